"""Going on with what was ended: no record is lost, nothing finished is measured twice, and the file stays readable."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import mortal
import pytest

from escher_kernels import records
from escher_kernels.records import Record, RecordError, Run, Writer
from escher_kernels.timing import Budget, Case, CpuTimer, Prepared, Session

KILLS = 20
RUN = Run("run", "family", 1, {}, {}, {}, {}, {}, [], "2026-01-01T00:00:00+00:00")


def live(path: Path, log: Path, last: int) -> int:
    command = [sys.executable, mortal.__file__, str(path), str(log), str(last)]
    return subprocess.run(command, timeout=60, check=False).returncode


def written(path: Path) -> list[Record]:
    return records.read(path).records if path.exists() and b"\n" in path.read_bytes() else []


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_at_random_moments_and_resumed(tmp_path, seed):
    """20 kills: what was on the disk stays as it was, and each block of each case is there once in the end."""
    path, log, dice = tmp_path / "00_mortal.jsonl", tmp_path / "measured.log", random.Random(seed)
    kept: list[Record] = []
    killed = 0
    while killed < KILLS:
        if live(path, log, dice.randint(1, 40)) == 0:  # it came to its end before that moment
            break
        killed += 1
        now = written(path)
        assert now[: len(kept)] == kept, "a record was lost or changed"
        kept = now
    assert killed >= 10
    assert live(path, log, 0) == 0
    found = written(path)
    assert found[: len(kept)] == kept
    ended = len(found)
    assert live(path, log, 0) == 0 and len(written(path)) == ended, "a finished run was gone on with"

    whole = Counter((r.case, r.block) for r in found if r.samples_s and r.role != "pair")
    assert set(whole.values()) == {1}, "a block was measured twice"
    blocks = {name: {block for case, block in whole if case == name} for name, _ in whole}
    assert blocks == {
        **{name: {0} for name in mortal.SEARCH}, "plain": set(range(6)), "checked": set(range(6)), "slow": {0, 1, 2, 4, 5},
    }  # fmt: skip
    assert [r.case for r in found if r.value is not None] == ["value"]
    assert Counter(r.case for r in found if r.skipped) == {"skipped": 1}
    assert not any(r.samples_s for r in found if r.case == "wrong")
    turns = {name: Counter(r.pair_id for r in found if r.case == name) for name in mortal.PAIRS}
    assert all(set(c.values()) == {1} for c in turns.values())
    both = set(turns["pair.a"]) & set(turns["pair.b"])
    assert {t.rstrip("+") for t in both} == {f"{b}.{i}" for b in range(6) for i in range(2)} and len(both) == 12
    times = Counter(log.read_text("utf-8").splitlines())
    assert set(times.values()) == {1}, "something that was written was measured again"


def session(before=(), said=None, **more):
    out: list[Record] = []
    now = [0.0]
    told = [] if said is None else said
    timer, budget = CpuTimer(lambda: round(now[0] * 1e9)), Budget("standard", 0.01, 2.0, 20)
    made = Session("family", timer, out.append, budget, 1, lambda what, **_: told.append(what), lambda: now[0],
                   before=before, **more)  # fmt: skip

    def item(name, seconds=0.002, role="case", **fields):
        def call(_):
            now[0] += seconds

        return Prepared(Case(name, role=role), call=call, **fields)

    return made, out, item


def test_what_is_finished_is_not_prepared():
    first, out, item = session()
    first.run_blocks([item("a")])
    first.skip(Case("b"), "too big")
    first.record(Case("c"), value=2.0)
    first.record(Case("d"), error={"ok": False})
    then, _, _ = session(before=out)
    assert not any(then.wanted(Case(name)) for name in "abcd") and then.wanted(Case("e"))
    then, _, _ = session(before=out[:-3])
    assert not then.wanted(Case("a")), "all of its blocks are there"
    then, _, _ = session(before=out[:5])
    assert then.wanted(Case("a")), "a block is missing"


def test_a_resumed_case_keeps_the_plan_that_it_was_begun_with():
    """Three of six blocks fitted at first; that it is faster now does not give it others."""
    first, out, item = session()
    first.run_blocks([item("a", 0.6)])
    assert [r.block for r in out] == [0, 2, 5] and {r.of_blocks for r in out} == {3}
    then, more, item = session(before=out[:1])
    then.run_blocks([item("a", 0.002)])
    assert [r.block for r in more] == [2, 5] and all("INSUFFICIENT" in r.flags for r in more)


def test_time_goes_on_and_anchors_are_counted_on():
    first, out, item = session()
    first.run_blocks([item("a")])
    out.append(Record("family", "anchor.gemm", role="anchor", block=2, samples_s=(1.0,)))
    then, more, item = session(before=out)
    then._anchors = [item("anchor.gemm", role="anchor")]
    then.anchor()
    then.run_blocks([item("b")])
    assert more[0].block == 3 and min(r.started_s for r in more) >= max(r.started_s for r in out if r.started_s)


def test_a_case_with_blocks_is_not_skipped_later():
    first, out, item = session()
    first.run_blocks([item("a")])
    said = []
    then, more, _ = session(before=out[:3], said=said)
    then.skip(Case("a"), "out of memory")
    assert not more and "a is left as it is: out of memory" in said


def test_a_wrong_result_is_recorded_before_its_block():
    """A process killed between the two leaves no block that passes for right."""
    verdicts = [True, True, False]
    made, out, item = session()
    made.run_blocks([item("a", check=lambda turn, full: {"check": "x", "ok": verdicts.pop(0)})])
    assert [bool(r.samples_s) for r in out[-2:]] == [False, True] and not out[-2].error["ok"] and out[-2].block == 5


def test_a_case_that_comes_out_wrong_now_is_said_though_it_was_right_before():
    first, out, item = session()
    first.run_blocks([item("a", check=lambda *_: {"check": "x", "ok": True})])
    then, more, item = session(before=out[:3])
    then.run_blocks([item("a", check=lambda *_: {"check": "x", "ok": False})])
    assert [r.error["ok"] for r in more] == [False]


def test_what_libraries_said_becomes_flags():
    made, out, item = session(notices=lambda case, backend, skipped: (f"FALLBACK: {case.name}",))
    made.run_blocks([item("a", flags=("X",))])
    made.skip(Case("b"), "why")
    assert out[0].flags == ("X", "FALLBACK: a") and out[-1].flags == ("FALLBACK: b",)


# ---- the file ----


def test_a_file_is_gone_on_with_only_when_asked(tmp_path):
    path = tmp_path / "a.jsonl"
    with Writer(path, RUN) as out:
        out.write(Record("family", "a"))
    with pytest.raises(RecordError, match="exists already; go on with --resume"):
        Writer(path, RUN)
    with Writer(path, RUN, go_on=True) as out:
        assert [r.case for r in out.before.records] == ["a"]
        out.write(Record("family", "b"))
    assert [r.case for r in written(path)] == ["a", "b"]


@pytest.mark.parametrize(("tail", "cases"), [
    (b'{"family":"family","case":"b', ["a", "c"]),  # cut off
    (b'{"family":"family","case":"b","iteration":1}', ["a", "b", "c"]),  # whole, without its end
    (b"\xff\xfe", ["a", "c"]),
])  # fmt: skip
def test_a_cut_off_line_is_removed_and_a_whole_one_kept(tmp_path, tail, cases):
    path = tmp_path / "a.jsonl"
    with Writer(path, RUN) as out:
        out.write(Record("family", "a"))
    with open(path, "ab") as end:
        end.write(tail)
    with Writer(path, RUN, go_on=True) as out:
        out.write(Record("family", "c"))
    assert [r.case for r in written(path)] == cases and not records.read(path).truncated


@pytest.mark.parametrize("there", [b"", b'{"kind":"run","run_id'])
def test_a_file_without_a_header_is_begun_again(tmp_path, there):
    path = tmp_path / "a.jsonl"
    path.write_bytes(there)
    with Writer(path, RUN, go_on=True) as out:
        assert out.before is None
        out.write(Record("family", "a"))
    assert [r.case for r in written(path)] == ["a"]


def test_a_damaged_file_is_not_gone_on_with(tmp_path):
    path = tmp_path / "a.jsonl"
    with Writer(path, RUN) as out:
        out.write(Record("family", "a"))
    damaged = path.read_bytes().replace(b'"a"', b'"a') + b'{"family":"family","case":"b"}\n'
    path.write_bytes(damaged)
    with pytest.raises(RecordError, match="a.jsonl:2: corrupt record"):
        Writer(path, RUN, go_on=True)
    assert path.read_bytes() == damaged


def test_two_processes_do_not_write_one_file(tmp_path):
    path = tmp_path / "a.jsonl"
    with Writer(path, RUN) as out:
        out.write(Record("family", "a"))
        with pytest.raises(RecordError, match="another process writes it"):
            Writer(path, RUN, go_on=True)
        out.write(Record("family", "b"))
    assert [r.case for r in written(path)] == ["a", "b"]
