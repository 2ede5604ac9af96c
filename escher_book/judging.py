"""What the commands do that judge: outside tools, run against run, repeated runs, the self-test."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from escher_book import report as reports
from escher_book import runner, verdict
from escher_book.runner import Console, RunError
from escher_kernels.records import write_failed, write_json_atomic
from escher_kernels.run import Settings
from validation import compare, derive, scorecard, selftest
from validation.derive import LoadedRun
from validation.tools import running

SAMPLE = runner.ROOT / "tests" / "sample_runs" / "mi355x"
RAW = ("run.json", "env.json", "status.json", "records", "raw", "telemetry")  # of a run, without what is derived


def run_tools(run_dir: Path, console: Console) -> None:
    """Run the outside tools that are installed, ours before and after each, and keep what they said in the run."""
    run = derive.load(run_dir, lenient=True)
    if "compute" not in run.files and "bandwidth" not in run.files:
        return  # nothing of ours that a tool could be held against
    running.run_tools(run, plateau_bytes(run), console)


def plateau_bytes(run: LoadedRun) -> int | None:
    """One buffer as an outside tool is to take it: the size of the interleaved copies on a CPU, else the largest plateau."""
    b = derive.bandwidth(run)
    if b is None:
        return None
    pairs = [r.params["buffer_bytes"] for r in b.pairs if "buffer_bytes" in r.params]
    sizes = pairs or [r.params["buffer_bytes"] for r in b.rows if r.params.get("plateau")]
    return max(sizes, default=None)


def validate(run_dir: Path, imported: Sequence[str], console: Console) -> int:
    """Run tools or import logs, judge them, and tell each row. Exit status 1 where SC-9 is FAIL."""
    run = derive.load(run_dir, lenient=True)
    if imported:
        running.import_files(run_dir, [Path(p) for p in imported], console)
    else:
        _same_machine(run)
        run_tools(run_dir, console)
    card, checks = reports.judge_and_write(run)
    for c in checks:
        print(f"{c.status:12} {c.tool}: {c.name}: {c.reason}")
    outcome = card.criterion("SC-9")
    console(f"{outcome.sc} {outcome.status}: {outcome.reason}")
    return 1 if outcome.status in (scorecard.FAIL, scorecard.INVALID) else 0


def _same_machine(run: LoadedRun) -> None:
    """RunError unless this machine has the device that the run was measured on."""
    here = runner.plan(Settings.from_json(run.info["settings"]))["target"]["found"]
    there = run.found.to_json()
    differs = [key for key in ("kind", "raw_name", "arch", "count") if here.get(key) != there.get(key)]
    if differs:
        raise RunError(
            f"{run.directory.name} was measured on another device (its {differs[0]} is {there.get(differs[0])!r}, here it is "
            f"{here.get(differs[0])!r}): run the tools there, then --import their logs"
        )


# ---- run against run ----


def runs_at(path: Path) -> list[LoadedRun]:
    """The run that lies there, or every run of a folder of runs. RunError where there is neither."""
    if (path / "run.json").is_file():
        return [derive.load(path)]
    found = runner.runs(path)
    if not found:
        raise RunError(f"{path}: no run and no folder of runs; give a directory below results/")
    return [derive.load(p) for p in found]


def set_baseline(paths: Sequence[Path], root: Path | None, console: Console) -> int:
    """Keep the raw part of some like runs as the baseline of their kind, in place of the one before, which is named."""
    runs = [r for path in paths for r in runs_at(path)]
    compare.variability(runs)  # a set of unlike runs is none
    target = reports.baseline_folders(runs[0], root)[-1]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".new-", dir=target.parent))
        aside = work.with_name(f"{work.name}.before")  # the old one goes once the new one stands
        try:
            for run in runs:
                for name in RAW:
                    source = run.directory / name
                    if source.is_dir():
                        shutil.copytree(source, work / run.info["run_id"] / name)
                    elif source.is_file():
                        (work / run.info["run_id"]).mkdir(exist_ok=True)
                        shutil.copyfile(source, work / run.info["run_id"] / name)
            os.chmod(work, 0o755)
            if target.is_dir():
                console(f"in place of: {', '.join(sorted(p.name for p in target.iterdir()))}")
                os.rename(target, aside)
            os.rename(work, target)
        finally:
            if aside.is_dir() and not target.exists():
                os.rename(aside, target)
            for left_over in (work, aside):
                shutil.rmtree(left_over, ignore_errors=True)
    except OSError as exc:
        raise RunError(write_failed(target, exc)) from None
    console(f"baseline of {len(runs)} {'run' if len(runs) == 1 else 'runs'}: {target}")
    return 0


def compare_runs(base: Path | None, run: Path, across: bool, strict: bool, root: Path | None) -> int:
    """Print what changed. Exit status 1 for a regression or a judged headline that was lost; with `strict` 3 where
    something is indicative, ambiguous or not decided."""
    runs = runs_at(run)
    if base is None:
        folders = reports.baseline_folders(runs[0], root)
        base = next((f for f in folders if f.is_dir()), None)
        if base is None:
            raise RunError(f"no baseline for this device and workload ({folders[-1]}); set one: escher baseline set RUN")
    others = runs_at(base)
    twice = {r.info["run_id"] for r in others} & {r.info["run_id"] for r in runs}
    if twice:
        raise RunError(f"{sorted(twice)[0]} stands on both sides: give another run")
    found = compare.compare(others, runs, across)
    print(verdict.comparison_text(found))
    if across:
        return 0
    worse, undecided = compare.regressions(found), verdict.undecided(found)
    if any(not r.indicative for r in worse) or any(lost for _, lost in undecided):
        return 1
    return scorecard.EXIT_STRICT if strict and (worse or undecided or found.called(compare.AMBIGUOUS)) else 0


def tell_variability(runs: Sequence[LoadedRun], keep: bool, console: Console) -> int:
    """Print how far like runs differ, and with `keep` keep it in each of them, where SC-8 reads it. Exit status 1 where
    SC-8 is FAIL with it."""
    found = compare.variability(runs)
    print(verdict.variability_table(found).to_markdown())
    outcome = scorecard.judge_variability(runs[-1], found)
    console(f"{outcome.sc} {outcome.status}: {outcome.reason}")
    if keep:
        for run in runs:
            write_json_atomic(run.directory / scorecard.VARIABILITY, compare.summary(found))
            reports.judge_and_write(run)
        console(f"kept in {scorecard.VARIABILITY} of each run")
    return 1 if outcome.status == scorecard.FAIL else 0


def self_test() -> int:
    """Alter the sample run, criterion by criterion; exit status 1 where the judge misses one or calls another."""
    if not SAMPLE.is_dir():
        raise RunError(f"{SAMPLE}: the sample run is missing; run this from the repository")
    try:
        results = selftest.run(SAMPLE)
    except ValueError as exc:
        raise RunError(str(exc)) from None
    for r in results:
        strangers = f"; also changed: {', '.join(r.strangers)}" if r.strangers else ""
        print(f"{'ok' if r.ok else 'MISSED':7} {r.case.sc:6} {r.case.what}: {r.found}, {r.reason}{strangers}")
    gaps = selftest.without_case()
    for sc in gaps:
        print(f"MISSED  {sc:6} has a judge and no case")
    return 1 if gaps or not all(r.ok for r in results) else 0
