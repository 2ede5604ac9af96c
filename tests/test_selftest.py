"""The judge's own trial: every alteration is caught, nothing else changes, and a judge that sleeps is noticed."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import SAMPLES

from validation import artefacts, derive, plausibility, scorecard, selftest
from validation.artefacts import Artefacts
from validation.scorecard import CONDITIONAL, FAIL, GO, INVALID, NO_GO, PASS
from validation.selftest import CASES

KEPT = {  # of a family with many rows, by the beginning of their names
    "compute": ("square.", "roof", "peer.", "anchor."),
    "bandwidth": ("copy.", "add.", "anchor."),
}
NAMES = [f"{c.sc} {c.what}" for c in CASES]


def light(target: Path) -> Path:
    """A copy of the GPU sample with fewer rows, and two samples of a block."""
    shutil.copytree(SAMPLES / "mi355x", target)
    for path in (target / "records").glob("*.jsonl"):
        head, *rest = path.read_text("utf-8").splitlines()
        kept, names = [head], KEPT.get(path.stem.partition("_")[2], ("",))
        for record in map(json.loads, rest):
            if record.get("role") not in ("search", "warmup") and record["case"].startswith(names):
                record["samples_s"] = record.get("samples_s", [])[:2]
                kept.append(json.dumps(record))
        path.write_text("\n".join(kept) + "\n", "utf-8")
    return target


@pytest.fixture(scope="module")
def sample(tmp_path_factory) -> Path:
    return light(tmp_path_factory.mktemp("light") / "a sample")


@pytest.fixture(scope="module")
def before(sample) -> scorecard.Scorecard:
    return scorecard.judge(derive.load(sample))


def judged_by(sc: str) -> int:
    return int(sc.removeprefix("SC-"))


def test_the_unaltered_sample_passes(before):
    assert before.verdict == GO


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_every_case_is_caught_and_nothing_else_changes(sample, before, case):
    result = selftest.try_case(sample, case, before)
    assert result.ok, result
    assert (result.case, result.found, result.strangers) == (case, case.status, ())
    assert result.verdict == (NO_GO if case.status in (FAIL, INVALID) else CONDITIONAL)
    assert result.reason and "\n" not in result.reason


def test_a_case_leaves_the_sample_as_it_is(sample, before):
    files = {p: p.read_bytes() for p in sample.rglob("*") if p.is_file()}
    selftest.try_case(sample, CASES[0], before)
    assert {p: p.read_bytes() for p in sample.rglob("*") if p.is_file()} == files


def test_every_criterion_with_a_judge_has_a_case():
    assert selftest.without_case() == []


def test_a_judge_without_a_case_is_noticed(monkeypatch):
    monkeypatch.setitem(scorecard.JUDGES, 12, lambda run, base: base)
    monkeypatch.setitem(scorecard.JUDGES, 7, lambda run, base: base)
    assert selftest.without_case() == ["SC-12", "SC-7"]
    monkeypatch.setattr(selftest, "CASES", [c for c in CASES if c.sc != "SC-5"])
    assert selftest.without_case() == ["SC-12", "SC-5", "SC-7"]


BY_JUDGE = [c for c in CASES if judged_by(c.sc) in scorecard.JUDGES and (c.status == FAIL or c.sc == "SC-6")]
BY_GUARD = [c for c in CASES if c.status == INVALID and c.sc != "SC-6"]


def test_each_case_stands_in_one_of_the_two_tables():
    assert len(BY_JUDGE) + len(BY_GUARD) + 1 == len(CASES)  # and SC-5


@pytest.mark.parametrize("case", BY_JUDGE, ids=[c.sc for c in BY_JUDGE])
def test_a_judge_that_always_passes_is_missed(sample, before, monkeypatch, case):
    monkeypatch.setitem(scorecard.JUDGES, judged_by(case.sc), lambda run, base: replace(base, status=PASS, reason="fine"))
    result = selftest.try_case(sample, case, before)
    assert (result.found, result.ok) == (PASS, False)


@pytest.mark.parametrize("case", BY_GUARD, ids=[c.sc for c in BY_GUARD])
def test_a_guard_that_finds_nothing_is_missed(sample, before, monkeypatch, case):
    monkeypatch.setattr(plausibility, "check", lambda run: [])
    result = selftest.try_case(sample, case, before)
    assert result.found != INVALID and not result.ok


def test_artefacts_that_nobody_looks_at_are_missed(sample, before, monkeypatch):
    monkeypatch.setattr(artefacts, "check", lambda run: Artefacts((), ()))
    [case] = [c for c in CASES if c.sc == "SC-5"]
    assert not selftest.try_case(sample, case, before).ok


def nothing(run_dir: Path) -> None: ...


def both(run_dir: Path) -> None:
    for case in (CASES[NAMES.index("SC-0 the pilot's FLOP of a block is another")], case_of("SC-8")):
        case.alter(run_dir)


def case_of(sc: str) -> selftest.Case:
    return next(c for c in CASES if c.sc == sc)


def test_an_alteration_that_changes_nothing_is_missed(sample, before):
    result = selftest.try_case(sample, replace(case_of("SC-8"), alter=nothing), before)
    assert (result.found, result.verdict, result.ok) == (PASS, GO, False)


def test_another_criterion_that_changes_is_a_stranger(sample, before):
    case = replace(case_of("SC-8"), alter=both)
    result = selftest.try_case(sample, case, before)
    assert (result.found, result.strangers, result.ok) == (FAIL, ("SC-0",), False)
    assert selftest.try_case(sample, replace(case, also=("SC-0",)), before).ok


@pytest.mark.parametrize("verdict", [GO, CONDITIONAL])
def test_a_verdict_that_does_not_follow_is_missed(sample, before, monkeypatch, verdict):
    judge = scorecard.judge
    monkeypatch.setattr(scorecard, "judge", lambda run: replace(judge(run), verdict=verdict))
    assert not selftest.try_case(sample, case_of("SC-8"), before).ok


def test_a_sample_that_does_not_pass_proves_nothing():
    with pytest.raises(ValueError, match="sample_runs/cpu is CONDITIONAL GO: SC-"):
        selftest.run(SAMPLES / "cpu")


def test_run_tries_every_case_in_order(sample, monkeypatch):
    tried = [case_of("SC-0"), case_of("SC-5")]
    monkeypatch.setattr(selftest, "CASES", tried)
    results = selftest.run(sample)
    assert [r.case for r in results] == tried and all(r.ok for r in results)
