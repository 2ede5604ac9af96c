"""Records on disk: what is written is read back, a failing disk leaves whole lines, a bad file is told by its line."""

import dataclasses
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from escher_kernels import records
from escher_kernels.records import ROLES, Record, RecordError, Run, Writer, read, to_line

TEST_ROOT = Path(__file__).resolve().parent.parent
RUN = Run("r", "compute", 1, {"name": "w"}, {"asked": "auto"}, {"budget": "quick"}, {}, {}, ["x"], "2026-01-01T00:00Z")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

finite = st.floats(allow_nan=False, allow_infinity=False)
count = st.integers(0, 2**63)
scalar = st.none() | st.booleans() | st.integers() | finite | st.text()
json_value = st.recursive(
    scalar, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=5
)
json_object = st.dictionaries(st.text(), json_value, max_size=3)
maybe = st.none().__or__
record_of = st.builds(
    Record, family=st.text(), case=st.text(), role=st.sampled_from(ROLES), params=json_object,
    backend=maybe(st.text()), block=count, of_blocks=maybe(count), samples_s=st.lists(finite, max_size=4).map(tuple),
    calls_per_sample=st.integers(1, 2**63), flop=maybe(count), bytes_moved=maybe(count),
    cache=st.sampled_from([None, "cold", "warm"]), iteration=count, rank=count,
    pair_id=maybe(st.text()), order=maybe(count), started_s=maybe(finite),
    error=maybe(json_object.map(lambda e: {**e, "ok": True})),
    noise=maybe(json_object), device_state=maybe(json_object), value=maybe(finite), unit=maybe(st.text()),
    reported=maybe(json_object), skipped=maybe(st.text()), flags=st.lists(st.text(), max_size=2).map(tuple),
    source=st.text(),
)  # fmt: skip


def python(code: str, *argv: str, uid: int | None = None) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *argv], capture_output=True, text=True, timeout=60,
        cwd=TEST_ROOT, user=uid, env={**os.environ, "PYTHONPATH": str(TEST_ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip


def write(path: Path, *items: Record) -> Path:
    with Writer(path, RUN) as out:
        for item in items:
            out.write(item)
    return path


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


# ---- what goes in comes out ----


@settings(max_examples=80, deadline=None)
@given(st.lists(record_of, max_size=3))
def test_round_trip(tmp_path_factory, items):
    found = read(write(tmp_path_factory.mktemp("r") / "a.jsonl", *items))
    assert found.run == RUN and found.records == items and not found.truncated


def test_every_field_is_in_the_round_trip():
    # a new field must be added to the strategy above
    assert set(record_of.wrapped_strategy.kwargs) == {f.name for f in dataclasses.fields(Record)}


def test_defaults_are_left_out():
    assert json.loads(to_line(Record("compute", "square.256"))) == {"family": "compute", "case": "square.256", "iteration": 1}
    assert json.loads(to_line(Record("c", "x", block=1)))["block"] == 1


def test_one_line_whatever_the_text(tmp_path):
    item = Record("c", "a\nb\u2028c\x85", params={"k\r\n": "\x00"}, skipped="ünï ± 漢")
    path = write(tmp_path / "a.jsonl", item)
    assert path.read_bytes().count(b"\n") == 2
    assert "ünï ± 漢" in path.read_text(encoding="utf-8")  # readable, not escaped
    assert read(path).records == [item]


def test_text_that_is_no_unicode_survives(tmp_path):
    # sys.argv and paths hold lone surrogates where the file system's names are not UTF-8
    odd = os.fsdecode(b"/tmp/r\xe9sultats")
    path = tmp_path / "a.jsonl"
    with Writer(path, dataclasses.replace(RUN, argv=[odd])) as out:
        out.write(Record("c", odd))
    assert read(path).run.argv == [odd] and read(path).records[0].case == odd
    records.write_json_atomic(tmp_path / "b.json", {"argv": [odd]})
    assert records.read_json(tmp_path / "b.json") == {"argv": [odd]}


@pytest.mark.parametrize("number", [0, 2**31 - 1, 2**31, 2**31 + 4096, 2**53 + 1])
def test_no_integer_field_is_32_bit(tmp_path, number):
    names = [f.name for f in dataclasses.fields(Record) if f.type in ("int", "int | None")]
    assert {"flop", "bytes_moved", "calls_per_sample", "block", "order"} <= set(names)
    item = Record("c", "x", params={"buffer_bytes": number}, **dict.fromkeys(names, number))
    item = dataclasses.replace(item, calls_per_sample=max(1, number))
    assert read(write(tmp_path / "a.jsonl", item)).records == [item]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["samples_s", "value", "params", "error"])
def test_nan_is_refused_and_nothing_of_it_is_written(tmp_path, bad, field):
    value = {"samples_s": (1.0, bad), "value": bad, "params": {"x": {"y": [bad]}}, "error": {"ratio": bad}}[field]
    with Writer(tmp_path / "a.jsonl", RUN) as out:
        with pytest.raises(RecordError, match=r"^compute: bad\.case: .*finite numbers or null$"):
            out.write(Record("compute", "bad.case", **{field: value}))
        out.write(Record("compute", "good"))
    assert [r.case for r in read(tmp_path / "a.jsonl").records] == ["good"]


def test_a_header_that_cannot_be_written_leaves_no_file(tmp_path):
    with pytest.raises(RecordError, match="header"):
        Writer(tmp_path / "a.jsonl", dataclasses.replace(RUN, parameters={"x": math.nan}))
    assert not list(tmp_path.iterdir())


# ---- reading what others left ----

HEADER = to_line(RUN)
GOOD = to_line(Record("compute", "a", samples_s=(1.0,)))


def test_only_a_cut_off_last_line_is_forgiven(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(f"{HEADER}\n{GOOD}\n{GOOD[:-5]}", encoding="utf-8")
    assert read(path).truncated and len(read(path).records) == 1
    path.write_text(f"{HEADER}\n{GOOD}\n{GOOD[:-5]}\n", encoding="utf-8")  # a whole line that is broken is no cut
    with pytest.raises(RecordError, match=r"a\.jsonl:3: "):
        read(path)
    path.write_text(f"{HEADER}\n{GOOD[:-5]}\n{GOOD}\n", encoding="utf-8")
    with pytest.raises(RecordError, match=r"a\.jsonl:2: "):
        read(path)


def test_killed_at_any_byte(tmp_path):
    items = [Record("c", "ünï", samples_s=(0.25, 1e-9), flop=2**31), Record("c", "b", skipped="漢字")]
    whole = write(tmp_path / "a.jsonl", *items).read_bytes()
    ends = [i for i, byte in enumerate(whole) if byte == 10]
    cut = tmp_path / "cut.jsonl"
    for size in range(len(whole) + 1):
        cut.write_bytes(whole[:size])
        if size < ends[0]:
            with pytest.raises(RecordError):
                read(cut)
            continue
        found = read(cut)
        done = sum(size >= end for end in ends[1:])  # the newline itself may be lost
        assert found.run == RUN and found.records == items[:done]
        assert found.truncated == (not any(end <= size <= end + 1 for end in ends))


BROKEN = {  # what stands in line 2 -> what the message says
    '{"family":"c","case":"x","speed":1}': "unknown field 'speed'",
    '{"family":"c","case":"x","role":"hero"}': "role is 'hero', expected one of case, search",
    '{"case":"x"}': "field 'family' is missing",
    '{"family":"c","case":7}': "field 'case' is missing or no text",
    '{"family":"c","case":"x","samples_s":["1"]}': "samples_s is no list of numbers",
    '{"family":"c","case":"x","samples_s":[true]}': "samples_s is no list of numbers",
    '{"family":"c","case":"x","samples_s":3}': "samples_s is no list of numbers",
    '{"family":"c","case":"x","samples_s":[NaN]}': "NaN is not allowed",
    '{"family":"c","case":"x","value":-Infinity}': "-Infinity is not allowed",
    '{"family":"c","case":"x","params":[]}': "params is no object",
    '{"family":"c","case":"x","flags":3}': "corrupt record",
    "[1,2]": "no JSON object",
    "null": "no JSON object",
    "not json": "corrupt record",
    HEADER: "unknown field",  # two runs in one file
}


@pytest.mark.parametrize("line", BROKEN)
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text(f"{HEADER}\n{line}\n{GOOD}\n", encoding="utf-8")
    with pytest.raises(RecordError) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:2: ") and BROKEN[line] in message and "\n" not in message


def test_not_utf8(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(HEADER.encode() + b'\n{"family":"\xe9","case":"x"}\n' + GOOD.encode() + b"\n")
    with pytest.raises(RecordError, match=r"a\.jsonl:2: .*utf-8"):
        read(path)


@pytest.mark.parametrize("text", ["", "\n\n", "\r\n"])
def test_empty_file(tmp_path, text):
    path = tmp_path / "a.jsonl"
    path.write_text(text, encoding="utf-8", newline="")
    with pytest.raises(RecordError, match="empty; delete the file and measure"):
        read(path)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"schema": 2}, "record schema 2, this version reads 1"),
        ({"schema": None}, "record schema None"),
        ({"schema": "1"}, "record schema '1'"),
        ({"kind": "case"}, ":1: .*the first line is no run header"),
        ({"workload": ...}, ":1: .*header lacks 'workload'"),
        ({"colour": "red"}, ":1: .*unknown field 'colour'"),
    ],
)
def test_bad_header(tmp_path, change, match):
    data = {k: v for k, v in {**json.loads(HEADER), **change}.items() if v is not ...}
    path = tmp_path / "a.jsonl"
    path.write_text(f"{json.dumps(data)}\n{GOOD}\n", encoding="utf-8")
    with pytest.raises(RecordError, match=match) as caught:
        read(path)
    assert "delete that line" not in str(caught.value)  # without its header the file says nothing


def test_not_there_and_no_file(tmp_path):
    with pytest.raises(RecordError, match="No such file"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(RecordError, match="cannot be read"):
        read(tmp_path)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda t: t.encode("utf-8", "replace")))
def test_junk_is_a_record_error_or_whole(tmp_path_factory, junk):
    path = tmp_path_factory.mktemp("j") / "a.jsonl"
    path.write_bytes(HEADER.encode() + b"\n" + junk)
    try:
        found = read(path)
    except RecordError as exc:
        assert str(path) in str(exc) and "\n" not in str(exc)
    else:
        assert found.run == RUN and not found.records


# ---- writing ----


def test_an_existing_file_is_never_overwritten(tmp_path):
    path = write(tmp_path / "a.jsonl", Record("c", "old"))
    before = path.read_bytes()
    with pytest.raises(RecordError, match="exists already; go on with --resume, or measure into a new run"):
        Writer(path, RUN)
    assert path.read_bytes() == before


def test_each_line_is_on_the_disk_before_write_returns(tmp_path, monkeypatch):
    path, on_disk = tmp_path / "a.jsonl", []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (real(fd), on_disk.append(path.read_bytes().count(b"\n"))))
    with Writer(path, RUN) as out:
        assert on_disk == [1]
        for n in range(2, 5):
            out.write(Record("c", str(n)))
            assert on_disk[-1] == n and len(on_disk) == n


def test_spaces_and_umlauts(tmp_path):
    path = write(tmp_path / "a b" / "ü ñ" / "01 ä.jsonl", Record("c", "x"))
    assert [r.case for r in read(path).records] == ["x"]


def test_file_size_limit_leaves_whole_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    out = python(
        """
        import resource, sys
        from pathlib import Path
        from tests.test_records import RUN, Record, RecordError, Writer
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
        with Writer(Path(sys.argv[1]), RUN) as out:
            try:
                for n in range(1000):
                    out.write(Record("c", f"case{n}", params={"x": "y" * 50}))
            except RecordError as exc:
                print(out.count, exc)
        """,
        str(path),
    )
    assert out.returncode == 0, out.stderr
    kept, message = out.stdout.strip().split(" ", 1)
    assert message == f"{path}: cannot be written: the file-size limit is reached; raise it (ulimit -f); " + (
        f"{kept} records are kept"
    )
    found = read(path)
    assert not found.truncated and len(found.records) == int(kept) > 3 and path.read_bytes().endswith(b"\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_full_disk(tmp_path):
    out = Writer(tmp_path / "a.jsonl", RUN)
    out._file.close()
    out._file = open("/dev/full", "wb", buffering=0)
    with out, pytest.raises(RecordError, match="the disk is full; free some space; 0 records are kept"):
        out.write(Record("c", "x"))


def test_a_half_written_line_is_cut_off(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    with Writer(path, RUN) as out:
        out.write(Record("c", "kept"))
        monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(RecordError, match="Input/output error; 1 records are kept"):
            out.write(Record("c", "lost"))
        monkeypatch.undo()
        out.write(Record("c", "later"))
    assert [r.case for r in read(path).records] == ["kept", "later"]


def test_a_header_that_does_not_fit_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(RecordError, match="the disk is full"):
        Writer(tmp_path / "a.jsonl", RUN)
    assert not list(tmp_path.iterdir())  # an empty file could be neither read nor measured into again


# ---- whole files ----


def test_atomic_replace(tmp_path):
    path = tmp_path / "a ü.json"
    records.write_json_atomic(path, {"ü": [1, None]})
    records.write_json_atomic(path, {"b": 2})
    assert records.read_json(path) == {"b": 2} and [p.name for p in tmp_path.iterdir()] == [path.name]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_failed_replace_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    records.write_json_atomic(path, {"old": 1})
    with pytest.raises(ValueError, match="JSON"):
        records.write_json_atomic(path, {"new": math.nan})
    with monkeypatch.context() as m:
        m.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(RecordError, match=r"a\.json: cannot be written: the disk is full"):
            records.write_json_atomic(path, {"new": 1})
    with monkeypatch.context() as m:
        m.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(30, "Read-only file system")))
        with pytest.raises(RecordError, match="read-only; choose another RESULTS_DIR"):
            records.write_json_atomic(path, {"new": 1})
    assert records.read_json(path) == {"old": 1} and [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_file_size_limit_keeps_the_old_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old", encoding="utf-8")
    code = """
    import resource, sys
    from escher_kernels import records
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    try:
        records.write_text_atomic(sys.argv[1], "x" * 5000)
    except records.RecordError as exc:
        print(exc)
    """
    assert "ulimit -f" in python(code, str(path)).stdout
    assert path.read_text(encoding="utf-8") == "old" and [p.name for p in tmp_path.iterdir()] == ["a.txt"]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 1000


@needs_root
def test_directory_of_somebody_else():
    with tempfile.TemporaryDirectory() as directory:  # tmp_path lies below one that others cannot even enter
        os.chmod(directory, 0o755)
        _write_as_somebody_else(Path(directory))


def _write_as_somebody_else(tmp_path):
    (tmp_path / "old.json").write_text("{}", encoding="utf-8")
    code = """
    import os, sys
    sys.path.insert(0, os.environ["PYTHONPATH"])
    from pathlib import Path
    from escher_kernels import records
    run = records.Run("r", "c", 1, {}, {}, {}, {}, {}, [], "")
    os.setuid(65534)
    for attempt in (lambda: records.Writer(Path(sys.argv[1]) / "a.jsonl", run),
                    lambda: records.Writer(Path(sys.argv[1]) / "sub" / "a.jsonl", run),
                    lambda: records.write_json_atomic(Path(sys.argv[1]) / "old.json", {"new": 1})):
        try:
            attempt()
        except records.RecordError as exc:
            print(exc)
    """
    out = python(code, str(tmp_path))
    assert out.returncode == 0, out.stderr
    told = out.stdout.splitlines()
    assert len(told) == 3 and all("no permission; choose another RESULTS_DIR" in line for line in told), told
    assert [p.name for p in tmp_path.iterdir()] == ["old.json"]
    assert records.read_json(tmp_path / "old.json") == {}


def test_read_json_names_the_place(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{\n "a": 1,,\n}', encoding="utf-8")
    with pytest.raises(RecordError, match=r"a\.json:2:9: no valid JSON"):
        records.read_json(path)
    path.write_text('{"a": NaN}', encoding="utf-8")
    with pytest.raises(RecordError, match="NaN is not allowed"):
        records.read_json(path)
    path.write_bytes(b'"\xff"')
    with pytest.raises(RecordError, match="no valid JSON"):
        records.read_json(path)
    with pytest.raises(RecordError, match="cannot be read"):
        records.read_json(tmp_path / "none.json")
