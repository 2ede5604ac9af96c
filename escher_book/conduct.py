"""One run from beginning to end: the plan, its folder and log, tuning, telemetry, measuring, and what the console is told.

`measured` makes a run, `resumed` goes on with one that was ended. Both return what the book is then built from. Nothing that
was measured is lost by what goes wrong here: records are on the disk before the next measurement starts.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from escher_book import expected, fingerprint, prepare_sys, runner
from escher_book.runner import Conduct, Console, RunError
from escher_kernels import METHOD, environment
from escher_kernels.records import SCHEMA, RecordError, read_json, write_json_atomic
from escher_kernels.run import ROOT, Settings
from escher_kernels.telemetry import poller
from escher_kernels.workload import WorkloadError, names
from validation import derive, iterations

FILESYSTEM = Path("/")


@dataclass(frozen=True)
class Asked:
    """What the command line asks for: one run for each of `settings`, which differ in their workload."""

    settings: tuple[Settings, ...]
    families: tuple[str, ...]
    conduct: Conduct
    root: Path
    require_gpu: bool = False


@dataclass(frozen=True)
class Made:
    """A run that was measured: how each family ended, and the console that also writes its log."""

    run_dir: Path
    status: dict[str, Any]
    console: Console

    @property
    def whole(self) -> dict[str, bool]:
        return {family: s["status"] == "ok" for family, s in self.status.items()}


def workloads(text: str, every: bool = False) -> list[str]:
    """The workloads named in `text` ("smoke big", commas too), or the path of one file, which may hold blanks."""
    if every:
        return names()
    return [text] if Path(text).is_file() else text.replace(",", " ").split() or [text]


def planned(asked: Asked) -> list[dict[str, Any]]:
    """The plan of every run, before anything is measured. Raises RunError, also where a GPU is required and not usable."""
    prefix, plans = runner.numactl_argv(asked.conduct.numactl), []
    for settings in asked.settings:
        plan = runner.plan(settings, prefix)
        found = plan["target"]["found"]
        if asked.require_gpu and found["kind"] == "cpu":
            asked_for = "the CPU was asked for" if settings.device == "cpu" else "no /dev/kfd and no /dev/nvidiactl here"
            why = found["note"] or asked_for
            raise RunError(f"--require-gpu: no usable GPU: {why}; see: escher doctor")
        plans.append(plan)
    return plans


def dry_run(asked: Asked) -> str:
    """What would be measured and how long it would take, by what is known of this device."""
    parts = []
    for settings, plan in zip(asked.settings, planned(asked), strict=True):
        found, profile, spec = plan["target"]["found"], plan["target"]["profile"], plan["workload"]
        limits = dict.fromkeys(asked.families, asked.conduct.timeout_s or runner.TIMEOUT_S[settings.budget])
        times = expected.expected(asked.root, asked.families, settings.budget, found, spec["name"], limits)
        parts.append(
            f"device    {found['raw_name']}, target {profile['key'] if profile else 'none'}\n"
            f"workload  {spec['name']}: depth {spec['depth']}, {spec['query_tokens']} tokens, window {spec['window_tokens']}\n"
            f"budget    {settings.budget}, iterations {asked.conduct.iterations}\n"
            + (f"warning   {found['note']}\n" if found["note"] else "")
            + expected.as_text(times, asked.conduct.iterations)
        )
    return "\n\n".join(parts)


def measured(asked: Asked, settings: Settings, plan: dict[str, Any]) -> Made:
    """Make a run and measure it. KeyboardInterrupt passes through once everything is put back."""
    run_dir = runner.new_run(asked.root, settings, list(asked.families), plan, asked.conduct)
    console = Console(run_dir / "raw" / "run.log")
    info = read_json(run_dir / "run.json")
    console.note(fingerprint.head(plan["env"], info) + "\n")
    console(f"run {run_dir}")
    if note := plan["target"]["found"]["note"]:
        console(f"WARNING: {note}; what is measured is the CPU (--require-gpu refuses that)")
    return _carry_out(run_dir, list(asked.families), settings, asked.conduct, console)


def resumable(run_dir: Path, require_gpu: bool = False) -> tuple[Settings, list[str], Conduct]:
    """What a run was asked for. RunError where it cannot be gone on with, and why."""
    path = run_dir / "run.json"
    if not path.is_file():
        raise RunError(f"{run_dir}: no run (run.json is missing); give a directory below results/")
    info = read_json(path)
    if isinstance(info, dict) and info.get("schema") == SCHEMA and info.get("method") == METHOD:
        unusable = derive.load(run_dir, lenient=True).unreadable  # RecordError for a run.json that cannot be used
        if "status.json" in unusable:
            raise RunError(f"{run_dir}: {unusable['status.json']}")
    try:
        for name, ours in (("schema", SCHEMA), ("method", METHOD)):
            if info.get(name) != ours:
                raise RunError(
                    f"{path}: {name} {info.get(name)!r}, this version measures by {ours}; records are not mixed: measure anew"
                )
        if info.get("source") != "measured":
            raise RunError(f"{path}: source is {info.get('source')!r}: nothing of it was measured, so it cannot go on")
        if require_gpu and info["target"]["found"]["kind"] == "cpu":
            raise RunError(f"--require-gpu: {run_dir.name} measures a CPU: leave it out, or measure into a new run")
        tuning = info.get("tuning") or {}
        for name, kind in (("numactl", str), ("stat_interval_s", (int, float)), ("prepare_sys", list)):
            if tuning.get(name) is not None and not isinstance(tuning[name], kind):
                raise ValueError(f"tuning.{name} is {tuning[name]!r}")
        kept = Conduct(
            iterations=info.get("iterations") or 1, numactl=tuning.get("numactl"), prepare_sys=bool(tuning.get("prepare_sys")),
            stat_interval_s=tuning.get("stat_interval_s"),
        )  # fmt: skip
        return Settings.from_json(info["settings"]), runner.choose(" ".join(info["families"])), kept
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise RunError(f"{path}: cannot be gone on with: {type(exc).__name__}: {exc}; measure anew") from None


def resumed(run_dir: Path, settings: Settings, families: Sequence[str], conduct: Conduct) -> Made:
    """Go on with a run: what is finished stays, the rest is measured."""
    info = read_json(run_dir / "run.json")
    plan = runner.plan(settings, runner.numactl_argv(conduct.numactl))
    for name in ("partition", "nps", "power_cap_w"):
        if info.get(name) != plan.get(name):
            raise RunError(
                f"{run_dir.name} was begun with {name} {info.get(name)!r}, now it is {plan.get(name)!r}: set it back, "
                "or measure into a new run"
            )
    (run_dir / "raw").mkdir(exist_ok=True)
    console = Console(run_dir / "raw" / "run.log")
    now = datetime.now(UTC).isoformat(timespec="seconds")
    tuning = {**(info.get("tuning") or {}), "stat_interval_s": conduct.stat_interval_s}
    resumed_utc = [*info.get("resumed_utc", []), now]
    runner.update(run_dir, iterations=conduct.iterations, resumed_utc=resumed_utc, tuning=tuning)
    here = {"argv": runner.argv(), "git": environment.git_state(ROOT), "resumed_utc": resumed_utc, "tuning": tuning}
    console.note(fingerprint.head(plan["env"], {**info, **here}) + "\n")
    console(f"run {run_dir}, resumed")
    return _carry_out(run_dir, list(families), settings, conduct, console, resume=True)


def _carry_out(
    run_dir: Path, families: list[str], settings: Settings, conduct: Conduct, console: Console, resume: bool = False
) -> Made:
    try:
        status = _measured(run_dir, families, settings, conduct, console, resume)
    except BaseException:  # whatever it is, the run is left as it stands for another process to go on with
        console.close()
        raise
    if conduct.iterations > 1:
        tell_iterations(run_dir, console)
    runner.point_latest(run_dir, console)
    return Made(run_dir, status, console)


def _measured(
    run_dir: Path, families: list[str], settings: Settings, conduct: Conduct, console: Console, resume: bool
) -> dict[str, Any]:
    """Measure on a machine that is tuned and watched meanwhile, if that is asked for. Returns the statuses."""
    go_on = f"Go on: escher book --resume {shlex.quote(str(run_dir))}"
    with ExitStack() as stack:
        if conduct.prepare_sys:
            steps = stack.enter_context(prepare_sys.prepared(FILESYSTEM, console, run_dir.parent))
            for line in prepare_sys.describe(steps):
                console(line)
            tuning = read_json(run_dir / "run.json").get("tuning") or {}
            runner.update(run_dir, tuning={**tuning, "prepare_sys": [s.to_json() for s in steps]})
            tuned = runner.plan(settings, runner.numactl_argv(conduct.numactl))  # what is measured is the tuned machine
            write_json_atomic(run_dir / "env.json", tuned["env"])
        if conduct.stat_interval_s:
            polling = poller.start(run_dir / "telemetry", conduct.stat_interval_s)
            stack.callback(lambda: (why := polling.stop()) and console(f"note: telemetry of the host: {why}"))
        try:
            return runner.measure(
                run_dir, families, settings, console, conduct, resume, lambda i: tell_iteration(run_dir, i, console)
            )
        except KeyboardInterrupt:
            console(f"interrupted; what was measured is kept. {go_on}")
            raise
        except (RecordError, RunError):
            console(f"what was measured is kept. {go_on}")
            raise


def tell_iteration(run_dir: Path, iteration: int, say: Callable[[str], None]) -> None:
    """The RESULT: line of an iteration."""
    try:
        say(iterations.result_line(derive.load(run_dir, lenient=True), iteration))
    except (RecordError, WorkloadError) as exc:
        say(f"note: iteration {iteration} has no RESULT line: {exc}")


def tell_iterations(run_dir: Path, say: Callable[[str], None]) -> None:
    """Every headline over the iterations, on the console and in iterations.json."""
    try:
        found = iterations.summary(derive.load(run_dir, lenient=True))
        write_json_atomic(run_dir / iterations.FILE, found)
    except (RecordError, WorkloadError) as exc:
        say(f"note: the iterations are not summed up: {exc}")
        return
    for line in iterations.lines(found):
        say(line)
