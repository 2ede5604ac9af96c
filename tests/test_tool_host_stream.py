"""likwid-bench and stress-ng: what their figures mean, what they say when they cannot, and damage of every kind."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from validation import tools
from validation.tools import FAIL, INCOMPLETE, INVALID, UNPARSED, UNSUPPORTED, Place, host_stream

FIXTURES = Path(__file__).parent / "fixtures" / "tools" / "host_stream"
NAMES = sorted(p.name for p in FIXTURES.iterdir())
STATUSES = {None, FAIL, INVALID, UNSUPPORTED, INCOMPLETE, UNPARSED}


def log(name):
    return (FIXTURES / name).read_text(encoding="utf-8")


def check_readings(text, parsed):
    assert parsed.status in STATUSES and parsed.rejected_lines >= 0
    assert "\n" not in parsed.reason and (parsed.reason != "") == (parsed.status is not None)
    for r in parsed.records:
        assert r.reported["text"] in text and float(r.reported["text"]) == r.reported["value"]
        assert r.family == "bandwidth" and r.params["statistic"] == "mean"
        assert r.reported["unit"] == {"likwid-bench": "MB/s", "stress-ng": "MiB/s"}[r.backend]
    json.dumps([r.params for r in parsed.records], allow_nan=False)


# name -> status, op, stores, dtype, bytes of one stream, figures
TABLE = {
    "likwid_copy_avx512.log": (None, "copy", "ordinary", "fp64", 384000000, ["30809.35"]),
    "likwid_copy_mem_avx.log": (None, "copy", "streaming", "fp64", 384000000, ["42484.40"]),
    "likwid_4_copy_sse.log": (None, "copy", "ordinary", "fp64", 192000000, ["22653.42"]),
    "likwid_stream_mem_sp_avx.log": (None, "triad", "streaming", "fp32", 128000000, ["27372.49"]),
    "likwid_load_sse.log": (None, "read", None, "fp64", 128000000, ["16369.76"]),
    "likwid_store_mem_avx512.log": (None, "write", "streaming", "fp64", 512000000, ["35903.84"]),
    "likwid_illegal_instruction.log": (UNSUPPORTED, None, None, None, None, []),
    "likwid_unknown_test.log": (UNSUPPORTED, None, None, None, None, []),
    "likwid_no_memory.log": (UNSUPPORTED, None, None, None, None, []),
    "likwid_no_domain.log": (UNSUPPORTED, None, None, None, None, []),
    "likwid_bad_size.log": (FAIL, None, None, None, None, []),
    "stress_one.log": (None, "stream_mix", None, "fp64", 402653184, ["6951.17", "4634.11"]),
    "stress_two.log": (None, "stream_mix", None, "fp64", 201326592, ["4874.11", "3249.41", "4823.42", "3215.62"]),
    "stress_0.20_two.log": (None, "stream_mix", None, "fp64", 50331648, ["5022.72", "3348.48", "4950.72", "3300.48"]),
    "stress_0.13.log": (None, "stream_mix", None, "fp64", 402653184, ["13071.36"]),
    "stress_too_short.log": (INCOMPLETE, None, None, None, None, []),
    "stress_no_memory.log": (UNSUPPORTED, None, None, None, None, []),
    "stress_option.log": (UNSUPPORTED, None, None, None, None, []),
}


def test_every_fixture_is_in_the_table():
    assert sorted(TABLE) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_fixture(name):
    text = log(name)
    status, op, stores, dtype, buffer, figures = TABLE[name]
    parsed = host_stream.parse(text)
    check_readings(text, parsed)
    assert host_stream.recognises(text) and tools.recognise(text) == "host_stream"
    assert (parsed.status, [r.reported["text"] for r in parsed.records]) == (status, figures), parsed.reason
    for r in parsed.records:
        p = r.params
        assert (p["op"], p.get("stores"), p["dtype"], p["buffer_bytes"]) == (op, stores, dtype, buffer)
        assert r.flags == ()


def test_one_likwid_reading_in_full():
    (r,) = host_stream.parse(log("likwid_copy_mem_avx.log")).records
    assert (r.case, r.backend, r.source) == ("copy_mem_avx", "likwid-bench", "tool")
    assert r.params == {
        "op": "copy", "dtype": "fp64", "counted": "read+write", "buffer_bytes": 384000000, "threads": 4,
        "hwthreads": [0, 2, 4, 6], "stores": "streaming", "statistic": "mean",
    }  # fmt: skip
    assert r.reported == {"value": 42484.4, "unit": "MB/s", "text": "42484.40"}


def test_instances_of_stress_stay_apart():
    records = host_stream.parse(log("stress_two.log")).records
    assert [(r.params["part"], r.params["instance"], r.params["instances"]) for r in records] == [
        ("read", 0, 2), ("write", 0, 2), ("read", 1, 2), ("write", 1, 2)
    ]  # fmt: skip
    assert not any("counted" in r.params for r in records)
    assert [r.params["counted"] for r in host_stream.parse(log("stress_0.13.log")).records] == ["read+write"]
    assert tools.base_value(records[0]) == pytest.approx(4874.11 * 2**20)


@pytest.mark.parametrize(
    "name, old, new, words",
    [
        ("likwid_copy_avx512.log", "30809.35", "31809.35", "31809.35 MByte/s is not data volume / time"),
        ("likwid_copy_avx512.log", "30809.35", "29381.99", "not data volume / time"),  # were it 2**20
        ("likwid_copy_avx512.log", "Time:\t\t\t6.231874e-01", "Time:\t\t\t6.431874e-01", "not data volume / time"),
        ("likwid_copy_avx512.log", "Time:\t\t\t6.231874e-01", "Time:\t\t\t0.000000e+00", "not data volume / time"),
        ("likwid_copy_avx512.log", "Iterations:\t\t100", "Iterations:\t\t96", "same iterations"),
        ("likwid_copy_avx512.log", "Size (Byte):\t\t768000000", "Size (Byte):\t\t384000000", "size x iterations"),
        ("likwid_copy_avx512.log", "Test: copy_avx512", "Test: stream_avx512", "bytes per element"),
        ("likwid_copy_avx512.log", "Vector length 12000000 Offset 0", "Vector length 6000000 Offset 0", "worked on"),
        ("stress_one.log", "4634.11", "4734.11", "are not those of copy, scale, add and triad"),
        ("stress_one.log", "6951.17", "0.00", "are not those of"),
        ("stress_one.log", "607.40", "636.90", "are not those of"),  # were its MB 1e6
        ("stress_0.13.log", "5228.54", "5528.54", "are not those of"),
    ],
)
def test_figures_that_do_not_agree(name, old, new, words):
    text = log(name)
    assert old in text
    parsed = host_stream.parse(text.replace(old, new))
    assert parsed.status == INVALID and words in parsed.reason
    assert parsed.records and all(any(f.startswith("INVALID: ") for f in r.flags) for r in parsed.records)


def test_small_deviation_is_allowed():
    assert host_stream.parse(log("likwid_copy_avx512.log").replace("30809.35", "30999.35")).status is None


@pytest.mark.parametrize("name", ["likwid_copy_avx512.log", "stress_two.log"])
def test_cut_anywhere_before_the_closing_part_is_incomplete(name):
    text = log(name)
    every = {(r.reported["text"], str(r.params)) for r in host_stream.parse(text).records}
    start = text.index("LIKWID MICRO BENCHMARK\n" if "likwid" in name else "dispatching") + 24
    end = text.rindex("-" * 80) if "likwid" in name else text.index("successful")
    for at in range(start, end, 3):
        parsed = host_stream.parse(text[:at])
        assert parsed.status == INCOMPLETE, at
        assert {(r.reported["text"], str(r.params)) for r in parsed.records} <= every


def test_a_missing_instance_is_incomplete():
    lines = [line for line in log("stress_two.log").splitlines(True) if "(instance 1)" not in line]
    parsed = host_stream.parse("".join(lines))
    assert parsed.status == INCOMPLETE and "1 instances, of 2" in parsed.reason and len(parsed.records) == 2


def test_two_logs_in_one_keep_both():
    parsed = host_stream.parse(log("likwid_copy_avx512.log") + log("likwid_copy_mem_avx.log"))
    assert parsed.status is None and [r.case for r in parsed.records] == ["copy_avx512", "copy_mem_avx"]
    parsed = host_stream.parse(log("likwid_copy_mem_avx.log") + log("likwid_illegal_instruction.log"))
    assert parsed.status == UNSUPPORTED and len(parsed.records) == 1


def test_lines_of_two_processes_through_each_other_give_nothing():
    a, b = (log(n).splitlines(True) for n in ("likwid_copy_avx512.log", "likwid_4_copy_sse.log"))
    mixed = [line for i in range(max(len(a), len(b))) for line in (*a[i : i + 1], *b[i : i + 1])]
    parsed = host_stream.parse("".join(mixed))
    assert parsed.status == INCOMPLETE and parsed.records == ()


def test_unknown_kernels_are_not_read():
    text = log("likwid_copy_avx512.log").replace("Test: copy_avx512", "Test: update_avx512")
    parsed = host_stream.parse(text)
    assert (parsed.status, parsed.records) == (UNPARSED, ()) and "update_avx512" in parsed.reason


def test_crowded_threads_are_told():
    text = log("likwid_copy_avx512.log").replace("on hwthread 3", "on hwthread 1")
    parsed = host_stream.parse(text)
    assert parsed.status is None and parsed.warnings == ("4 threads on 3 hardware threads",)


@pytest.mark.parametrize("name", ["likwid_copy_avx512.log", "stress_two.log"])
def test_decimal_commas_are_never_read(name):
    parsed = host_stream.parse(re.sub(r"(\d)\.(\d)", r"\1,\2", log(name)))
    assert parsed.records == () and parsed.status in (INCOMPLETE, UNPARSED) and parsed.rejected_lines > 0


@pytest.mark.parametrize("name", ["likwid_copy_avx512.log", "stress_two.log"])
def test_colours_line_ends_and_marks(name):
    text = log(name)
    coloured = "".join(f"\x1b[32m{line}\x1b[0m" for line in text.splitlines(True))
    for changed in (coloured, text.replace("\n", "\r\n"), "\ufeff" + text, text.expandtabs()):
        assert host_stream.parse(changed).records == host_stream.parse(text).records, changed


def test_failures_of_stress():
    text = log("stress_two.log").replace("successful run", "unsuccessful run")
    text += "stress-ng: fail:  [6101] stream: checksum failure, got 0x1, expecting 0x2\n"
    parsed = host_stream.parse(text)
    assert parsed.status == FAIL and "unsuccessful run" in parsed.reason and "6100" not in parsed.reason
    told = log("stress_0.20_two.log").replace("metrics untrustworthy: 0", "metrics untrustworthy: 2")
    assert host_stream.parse(told).status == INVALID
    indexed = log("stress_one.log").replace("6951.17", "9268.23")  # --stream-index reads indices too
    assert host_stream.parse(indexed).status == INVALID


def test_a_message_beside_a_whole_run_is_a_remark():
    parsed = host_stream.parse("ERROR - cannot read the turbo table\n" + log("likwid_copy_avx512.log"))
    assert parsed.status is None and parsed.warnings == ("ERROR - cannot read the turbo table",)


def test_commands_prefer_likwid_and_pin_it(monkeypatch):
    monkeypatch.setattr(host_stream, "_cpu_flags", lambda: {"sse2", "avx", "avx2"})
    monkeypatch.setattr(host_stream.platform, "machine", lambda: "x86_64")
    found = {"likwid-bench": "/x/likwid-bench", "stress-ng": "/x/stress-ng"}
    place = Place("cpu", None, 1, found, plateau_bytes=2**29, threads=4, cpus=(0, 2, 4, 6))
    commands = host_stream.commands(place)
    assert [c.name for c in commands] == ["likwid_copy_avx", "likwid_copy_mem_avx"]
    assert " ".join(commands[1].argv) == (
        "taskset -c 0,2,4,6 /x/likwid-bench -t copy_mem_avx -W N:1073741kB:4 -s 2"
    )  # fmt: skip
    assert all(c.env == {"LC_ALL": "C"} for c in commands)
    assert host_stream.commands(Place("rocm", None, 8, found, plateau_bytes=2**29)) == []
    assert host_stream.commands(Place("cpu", None, 1, found)) == []
    assert host_stream.commands(Place("cpu", None, 1, {}, plateau_bytes=2**29)) == []


def test_commands_without_likwid():
    place = Place("cpu", None, 1, {"stress-ng": "/x/stress-ng"}, plateau_bytes=2**29, threads=2, cpus=(0, 1))
    (command,) = host_stream.commands(place)
    assert " ".join(command.argv) == (
        "/x/stress-ng --stream 2 --stream-l3-size 134217728 --timeout 20s --taskset 0,1"
    )  # fmt: skip


@pytest.mark.parametrize(
    "flags, machine, kernels",
    [
        ({"sse2", "avx", "avx512f"}, "x86_64", ("copy_avx512", "copy_mem_avx512")),
        ({"sse2", "avx"}, "x86_64", ("copy_avx", "copy_mem_avx")),
        ({"sse2"}, "x86_64", ("copy_sse", "copy_mem_sse")),
        (set(), "x86_64", ("copy", "copy_mem")),
        (set(), "aarch64", ("copy", "copy_nt")),
    ],
)
def test_widest_kernels(flags, machine, kernels):
    assert host_stream._copies(flags, machine) == kernels
    assert all(host_stream._TEST.fullmatch(k) for k in kernels)


def test_cpu_flags(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags\t\t: fpu sse2 avx\n")
    assert host_stream._cpu_flags(tmp_path / "cpuinfo") == {"fpu", "sse2", "avx"}
    assert host_stream._cpu_flags(tmp_path / "none") == set()


@pytest.mark.skipif(not shutil.which("likwid-bench"), reason="likwid-bench is not installed")
@pytest.mark.parametrize("kernel, op, streams", [("copy", "copy", 2), ("load", "read", 1), ("stream", "triad", 3)])
def test_the_installed_likwid_is_understood(kernel, op, streams):
    ran = subprocess.run(
        ["likwid-bench", "-t", kernel, "-W", f"N:{streams * 2048}kB:1", "-i", "10"], capture_output=True, text=True, check=False
    )
    parsed = host_stream.parse(ran.stdout + ran.stderr)
    assert parsed.status is None, parsed.reason
    (r,) = parsed.records
    assert (r.params["op"], r.params["buffer_bytes"]) == (op, 2048000)


@pytest.mark.parametrize("text", ["", "\n\n", "hello\n", "MByte/s:\t\t5.00\n", "memory rate: 5.00 MB/sec\n"])
def test_foreign_and_empty(text):
    parsed = host_stream.parse(text)
    assert (parsed.status, parsed.records) == (UNPARSED, ()) and not host_stream.recognises(text)


def test_logs_of_other_tools_are_left_to_them():
    for path in FIXTURES.parent.glob("*/*"):
        if path.parent != FIXTURES:
            assert not host_stream.recognises(tools.clean(path.read_bytes())), path


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes(data):
    text = tools.clean(data)
    check_readings(text, host_stream.parse(text))
    host_stream.recognises(text)


PIECES = st.sampled_from([
    "LIKWID MICRO BENCHMARK\n", "Test: copy\n", "Using 1 threads\n", "Time:\t\t\t9.0e-999 sec\n", "Iterations:\t\t1\n",
    "Iterations per thread:\t1\n", "Size (Byte):\t\t16\n", "Data volume (Byte):\t16\n", "MByte/s:\t\t1.00\n", "-" * 80 + "\n",
    "Time:\t\t\t1.6e-05 sec\n", "stress-ng: info: [1] stream: memory rate: 0.00 MB/sec, 0.00 Mflop/sec (instance 0)\n",
    "stress-ng: info: [1] dispatching hogs: 0 stream\n", "stress-ng: info: [1] stream: using cache size of 8K\n", "7", ".", "\n",
    "stress-ng: info: [1] successful run completed in 1s\n", "Error: x\n",
])  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(PIECES, max_size=30))
def test_any_order_of_its_own_words(pieces):
    text = "".join(pieces)
    check_readings(text, host_stream.parse(text))


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([n for n in NAMES if TABLE[n][5]]), st.data())
def test_any_damage(name, data):
    text = log(name)
    lines = text.splitlines(True)
    every = {r.reported["text"] for r in host_stream.parse(text).records}
    draw = lambda n: data.draw(st.integers(0, max(n, 0)))  # noqa: E731
    kind = data.draw(st.sampled_from(["cut", "delete", "double", "splice"]))
    if kind == "cut":
        damaged = text[: draw(len(text))]
    else:
        i, j = draw(len(lines) - 1), draw(len(lines) - 1)
        spliced = lines[i][: draw(len(lines[i]))] + lines[j][draw(len(lines[j])) :]
        change = {"delete": [], "double": [lines[i]] * 2, "splice": [spliced]}[kind]
        damaged = "".join([*lines[:i], *change, *lines[i + 1 :]])
    parsed = host_stream.parse(damaged)
    check_readings(damaged, parsed)
    if kind != "splice":
        assert {r.reported["text"] for r in parsed.records} <= every
