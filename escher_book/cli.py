"""The command line. One line for an error, and an exit status that means something.

0: done, and the verdict is GO or CONDITIONAL GO. 1: NO-GO, a family failed, timed out or died, the book was not built; of
compare, validate, variability and selftest that what they look for was found. 2: wrong usage or environment. 3: with
--strict, anything short of GO. 130: Ctrl-C.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from escher_book import conduct, doctor, export, judging, listing, prepare_sys, runner
from escher_book import report as reports
from escher_book.stage import BookError
from escher_kernels import targets
from escher_kernels.records import RecordError
from escher_kernels.run import Settings
from escher_kernels.timing import BUDGETS
from escher_kernels.workload import WorkloadError
from validation import config as configuration
from validation import derive, scorecard
from validation.compare import CompareError

NEWEST = "newest"  # --resume without a run
EXPECTED = (
    runner.RunError, RecordError, BookError, WorkloadError, CompareError, targets.ConfigError, targets.TargetError,
    targets.DeviceError,
)  # fmt: skip


def _options(function: Callable) -> Callable:
    for option in reversed((
        click.option("--target", default="auto", show_default=True, help="auto, cpu, or a key of configs/report_config.json"),
        click.option("--device", default="auto", show_default=True, type=click.Choice(["auto", "rocm", "cuda", "cpu"])),
        click.option("--require-gpu", is_flag=True, help="refuse to measure a CPU"),
        click.option("--families", default="benchmark", show_default=True,
                     help='e.g. "compute bandwidth"; benchmark: numbers 0 to 6; all: every one'),
        click.option("--budget", default="standard", show_default=True, type=click.Choice(list(BUDGETS))),
        click.option("--workload", default="escher_14b_480p", show_default=True,
                     help="a name in configs/, a .json file, or several names: a run each"),
        click.option("--all", "every", is_flag=True, help="every family for every workload"),
        click.option("--reference-model", default=None, help="run the workload of this model of reference_video_models.json"),
        click.option("--depth", default=None, type=click.IntRange(min=1), help="blocks  [default: as the host can run]"),
        click.option("--tokens", default=None, type=click.IntRange(min=1), help="query tokens of a call"),
        click.option("--window", default=None, type=click.IntRange(min=1), help="tokens a query attends to"),
        click.option("--report-config", default=None, help="another report_config.json"),
        click.option("--results-dir", default=None, help="where runs go  [default: results]"),
        click.option("--iterations", default=1, show_default=True, type=click.IntRange(1, derive.MOST_ITERATIONS),
                     help="how often, each time in fresh processes"),
        click.option("--timeout-s", default=None, type=click.IntRange(min=1), help="time a family may take"),
        click.option("--run-timeout-s", default=None, type=click.IntRange(min=1), help="time all families together may take"),
        click.option("--numactl", default=None, metavar="SPEC", help="measure under numactl SPEC, e.g. '--localalloc'"),
        click.option("--stat-interval", default=1.0, show_default=True, type=click.FloatRange(min=0.05, max=3600),
                     help="seconds between two readings of the host's telemetry"),
        click.option("--no-stat", is_flag=True, help="no telemetry"),
        click.option("--prepare-sys", is_flag=True,
                     help="tune the machine for the run and put everything back (root): NUMA balancing, huge pages, "
                          "compaction, caches, governor, GPU performance level"),
        click.option("--resume", default=None, is_flag=False, flag_value=NEWEST, metavar="[RUN]",
                     help="go on with RUN (default: the newest) where it was ended, as it was begun"),
        click.option("--dry-run", is_flag=True, help="tell what would be measured and how long it would take"),
    )):  # fmt: skip
        function = option(function)
    return function


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def cli() -> None:
    """Measure this machine and build a report book of what was found."""


def _measure(
    *, families: str, results_dir: str | None, workload: str, every: bool, require_gpu: bool, dry_run: bool,
    resume: str | None, iterations: int, timeout_s: int | None, run_timeout_s: int | None, numactl: str | None,
    stat_interval: float, no_stat: bool, prepare_sys: bool, **settings: Any,
) -> Iterator[conduct.Made]:  # fmt: skip
    """Measure what the options ask for, a run for each workload. Exits after a dry run, and after Ctrl-C with 130."""
    if not math.isfinite(stat_interval):
        raise click.UsageError(f"--stat-interval is {stat_interval}; expected seconds, e.g. 1")
    root = runner.results_root(results_dir)
    how = runner.Conduct(iterations, timeout_s, run_timeout_s, numactl, None if no_stat else stat_interval, prepare_sys)
    if resume:
        if dry_run or every:
            raise click.UsageError("--dry-run and --all are for new runs; leave --resume out")
        asked = {"families": families, "workload": workload, **settings}
        run_dir = _chosen(None if resume == NEWEST else resume, results_dir)
        yield from _guarded(lambda: _resume(run_dir, asked, how, require_gpu))
        return
    if every and (_given("families") or _given("workload") or _given("reference_model")):
        raise click.UsageError("--all is every family and every workload; leave --families, --workload and --reference-model out")
    chosen = runner.choose("all" if every else families)
    try:
        wanted = [_absolute({**settings, "workload": name}) for name in conduct.workloads(workload, every)]
    except ValueError as exc:
        raise runner.RunError(str(exc)) from None
    configuration.load(wanted[0].report_config)  # a threshold that cannot be used is said before anything is measured
    asked = conduct.Asked(tuple(wanted), tuple(chosen), how, root, require_gpu)
    if dry_run:
        click.echo(conduct.dry_run(asked))
        raise click.exceptions.Exit(0)
    for one, plan in zip(wanted, conduct.planned(asked), strict=True):
        yield from _guarded(lambda one=one, plan=plan: conduct.measured(asked, one, plan))


def _absolute(settings: dict[str, Any]) -> Settings:
    """The settings, with paths that hold in another working directory. Raises ValueError."""
    out = Settings.from_json(settings)
    if out.report_config:
        out = replace(out, report_config=str(Path(out.report_config).absolute()))
    return replace(out, workload=str(Path(out.workload).absolute())) if out.workload.endswith(".json") else out


def _given(option: str) -> bool:
    """Whether the command line names the option, even if with its default."""
    return click.get_current_context().get_parameter_source(option) is ParameterSource.COMMANDLINE


def _guarded(work: Callable[[], conduct.Made]) -> Iterator[conduct.Made]:
    try:
        made = work()
    except KeyboardInterrupt:
        raise click.exceptions.Exit(130) from None
    try:
        yield made
    finally:
        made.console.close()


def _resume(run_dir: Path, asked: dict[str, Any], how: runner.Conduct, require_gpu: bool) -> conduct.Made:
    """Go on with a run by its own settings. RunError for an option that is given and says something else."""
    settings, chosen, kept = conduct.resumable(run_dir, require_gpu)
    there = {**settings.to_json(), "families": " ".join(chosen)}
    try:
        wanted = _absolute({k: v for k, v in asked.items() if k != "families"}).to_json()
    except ValueError as exc:
        raise runner.RunError(str(exc)) from None
    here = {**wanted, "families": " ".join(runner.choose(asked["families"])), "numactl": how.numactl}
    there["numactl"] = kept.numactl
    for option in (name for name in here if _given(name) and here[name] != there[name]):
        raise runner.RunError(
            f"--{option.replace('_', '-')} is {here[option]!r}, {run_dir.name} was begun with {there[option]!r}: leave it out, "
            "or measure into a new run"
        )
    more = {name: getattr(how, name) for name in ("timeout_s", "run_timeout_s")}
    for option, name in (("iterations", "iterations"), ("prepare_sys", "prepare_sys"), ("stat_interval", "stat_interval_s"),
                         ("no_stat", "stat_interval_s")):  # fmt: skip
        if _given(option):
            more[name] = getattr(how, name)
    if more.get("iterations", kept.iterations) < kept.iterations:
        raise runner.RunError(
            f"--iterations is {how.iterations}, {run_dir.name} was begun with {kept.iterations}: give at least as many"
        )
    return conduct.resumed(run_dir, settings, chosen, replace(kept, **more))


def _build(run_dir: Path, console: runner.Console, executed: dict | None = None, strict: bool = False) -> int:
    made = reports.make(run_dir, console, executed)
    for page in made.broken:
        console(f"error: a page could not be made from its records: {page}")
    if not made.built.ok:
        why = next(iter(made.built.warnings), "see the log")
        console(f"error: the book was not built: {why}; log: {made.built.log}")
        return 1
    status = _tell(made.card, console, strict)
    print(made.built.site / "index.html")
    return 1 if made.broken else status


def _tell(card: scorecard.Scorecard, console: Callable[[str], None], strict: bool) -> int:
    """The verdict and its reasons, one a line; returns the exit status that it means."""
    console(f"verdict: {card.verdict}")
    for reason in card.reasons:
        console(f"  {reason}")
    return card.strict_exit_status if strict else card.exit_status


@cli.command()
@_options
def run(**options: Any) -> int:
    """Measure only: records go to a new directory below results/."""
    whole = True
    for made in _measure(**options):
        print(made.run_dir)
        whole = whole and all(made.whole.values())
    return 0 if whole else 1


STRICT = click.option("--strict", is_flag=True, help="exit with 3 for anything short of GO")
RESULTS = click.option("--results-dir", default=None, help="where runs are  [default: results]")
RUN = click.argument("run_dir", metavar="[RUN]", required=False)


def _chosen(run_dir: str | None, results_dir: str | None) -> Path:
    """The run that is named, a link such as results/latest resolved; else the newest."""
    if not run_dir:
        return runner.newest(runner.results_root(results_dir))
    path = Path(run_dir).absolute()
    return path.resolve() if path.is_symlink() else path


@cli.command()
@_options
@STRICT
@click.option("--validate/--no-validate", default=True, show_default=True, help="run the outside tools that are installed")
def book(strict: bool, validate: bool, **options: Any) -> int:
    """Measure, judge, then build the book: results/<run>/site/index.html."""
    statuses = [_book(made, strict, validate) for made in _measure(**options)]
    return 1 if 1 in statuses else max(statuses)


def _book(made: conduct.Made, strict: bool, validate: bool) -> int:
    """Outside tools, then the book of a run that was just measured. Its exit status."""
    if validate:
        try:
            judging.run_tools(made.run_dir, made.console)
        except KeyboardInterrupt:
            made.console(f"interrupted; what was measured is kept: make report RUN={made.run_dir}")
            raise click.exceptions.Exit(130) from None
        except (*EXPECTED, OSError) as exc:  # the book must not be lost over it
            made.console(f"error: the outside tools could not be run: {exc}")
    built = _build(made.run_dir, made.console, made.whole, strict)
    return built or (0 if all(made.whole.values()) else 1)


@cli.command()
@RUN
@RESULTS
@STRICT
def report(run_dir: str | None, results_dir: str | None, strict: bool) -> int:
    """Judge and build the pages of RUN (default: the newest) again from its records, without measuring."""
    return _build(_chosen(run_dir, results_dir), runner.Console(None), strict=strict)


@cli.command(name="export")
@RUN
@RESULTS
@click.option("--format", "formats", default="md", show_default=True, help="what to write; several with commas")
@click.option("--output-name", default="report", show_default=True, help="name of the files, without their ending")
def export_(run_dir: str | None, results_dir: str | None, formats: str, output_name: str) -> int:
    """Write the report of RUN (default: the newest) as one file beside its records: report.md."""
    for path in export.export(_chosen(run_dir, results_dir), formats.replace(",", " ").split(), output_name):
        print(path)
    return 0


@cli.command(name="list")
@click.argument("what", type=click.Choice(["all", *listing.SECTIONS]), default="all")
@click.option("--json", "as_json", is_flag=True, help="for other programs")
def list_(what: str, as_json: bool) -> int:
    """What there is: families, workloads, targets, reference models, outside tools, optional backends and why not."""
    found = listing.sections(what)
    click.echo(json.dumps(listing.to_json(found), indent=1) if as_json else listing.as_text(found))
    return 0


@cli.command(name="doctor")
@RESULTS
@click.option("--require-gpu", is_flag=True, help="a host without a usable GPU is a problem")
@click.option("--restore", is_flag=True, help="put back what a killed --prepare-sys left changed")
@click.option("--json", "as_json", is_flag=True, help="for other programs")
def doctor_(results_dir: str | None, require_gpu: bool, restore: bool, as_json: bool) -> int:
    """Is this machine fit to be measured? Exit status 2 where a row is a problem."""
    root = runner.results_root(results_dir)
    if restore:
        return 0 if prepare_sys.restore(conduct.FILESYSTEM, print, root) else 2
    found = targets.Found.from_json(runner.plan(Settings())["target"]["found"])  # by a process that has ended by now
    drift = configuration.load().threshold("calibration_drift_pct")
    rows = [*doctor.rows(found, root, limits=doctor.Limits(drift_pct=drift), require_gpu=require_gpu), *_left_over(root)]
    width = shutil.get_terminal_size().columns
    click.echo(json.dumps(doctor.to_json(rows), indent=1) if as_json else doctor.as_text(rows, width))
    return doctor.exit_status(rows)


def _left_over(root: Path) -> list[doctor.Check]:
    """The row of a --prepare-sys that was killed together with its guardian."""
    left = prepare_sys.left_over(conduct.FILESYSTEM, root)
    if not left:
        return []
    why = "a killed run changed them for its own time, and nobody put them back"
    return [doctor.Check("host", "tuned settings", doctor.ATTENTION, left["message"], "none left changed", why, left["mend"])]


@cli.command()
@RUN
@RESULTS
@STRICT
def score(run_dir: str | None, results_dir: str | None, strict: bool) -> int:
    """Judge RUN (default: the newest): scorecard.json and .md, the verdict on the console."""
    run = derive.load(_chosen(run_dir, results_dir), lenient=True)
    try:
        card, _ = reports.judge_and_write(run)
    except RecordError:
        _tell(scorecard.judge(run), print, strict)  # a run that cannot be written to is judged all the same
        raise
    return _tell(card, print, strict)


@cli.command()
@RUN
@RESULTS
@click.option("--import", "imported", multiple=True, metavar="FILE", type=click.Path(exists=True, dir_okay=False),
              help="a log made elsewhere; repeat it for more")  # fmt: skip
@click.argument("more", nargs=-1, metavar="[FILE]...", type=click.Path(exists=True, dir_okay=False))
def validate(run_dir: str | None, results_dir: str | None, imported: tuple[str, ...], more: tuple[str, ...]) -> int:
    """Hold RUN against outside tools: those that are installed, or with --import logs of them."""
    return judging.validate(_chosen(run_dir, results_dir), [*imported, *more], runner.Console(None))


@cli.command(name="compare")
@click.argument("paths", metavar="[BASE] [RUN]", nargs=-1)
@click.option("--base", default=None, metavar="BASE", help="BASE, where RUN is left out")
@click.option("--across", is_flag=True, help="show unlike runs side by side, without a verdict")
@RESULTS
@STRICT
def compare_(paths: tuple[str, ...], base: str | None, across: bool, results_dir: str | None, strict: bool) -> int:
    """Hold RUN (default: the newest) against BASE (default: the baseline). Each is a run, or a folder of like runs."""
    if len(paths) + bool(base) > 2:
        raise click.UsageError("give BASE and RUN; several runs of a side lie in one folder")
    *first, run_dir = [Path(p).absolute() for p in paths] or [runner.newest(runner.results_root(results_dir))]
    held = Path(base).absolute() if base else first[0] if first else None
    root = runner.results_root(results_dir) if results_dir else None
    return judging.compare_runs(held, run_dir, across, strict, root)


@cli.group()
def baseline() -> None:
    """What later runs are compared with."""


@baseline.command(name="set")
@click.argument("paths", metavar="[RUN]...", nargs=-1)
@RESULTS
def baseline_set(paths: tuple[str, ...], results_dir: str | None) -> int:
    """Keep RUN... (default: the newest; three or more for a verdict) as the baseline of their device and workload."""
    chosen = [Path(p).absolute() for p in paths] or [runner.newest(runner.results_root(results_dir))]
    root = runner.results_root(results_dir) if results_dir else None
    return judging.set_baseline(chosen, root, runner.Console(None))


@cli.command()
@click.argument("paths", metavar="[RUN]...", nargs=-1)
@click.option("--runs", type=click.IntRange(min=2), default=None, help="make that many runs first")
@_options
@click.option("--keep", is_flag=True, help="keep it in each RUN, where SC-8 reads it")
def variability(paths: tuple[str, ...], runs: int | None, keep: bool, **options: Any) -> int:
    """How far fresh-process runs differ: of RUN..., or of --runs N new ones, which keep it for SC-8 (as --keep does)."""
    if bool(paths) == bool(runs):
        raise click.UsageError("give runs that are there, or --runs N to make some")
    if options["resume"] or options["dry_run"]:
        raise click.UsageError("--resume and --dry-run are for run and book")
    chosen = [Path(p).absolute() for p in paths]
    for number in range(runs or 0):
        for made in _measure(**options):
            if failed := [family for family, whole in made.whole.items() if not whole]:
                made.console(f"error: run {number + 1}: {', '.join(failed)} did not finish")
                return 1
            chosen.append(made.run_dir)
    found = [r for p in chosen for r in judging.runs_at(p)]
    return judging.tell_variability(found, keep or bool(runs), runner.Console(None))


@cli.command()
def selftest() -> int:
    """Put the judge on trial: alter the sample run criterion by criterion, and see each one caught."""
    return judging.self_test()


def main(argv: list[str] | None = None) -> None:
    """Entry point: runs a command and exits with its status; every expected error is one line."""
    if argv is None and sys.getfilesystemencoding() != "utf-8":  # in locale C a path with an umlaut is no valid text
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    for number in (signal.SIGTERM, signal.SIGHUP):  # a batch system's or a closed terminal's end is as orderly as Ctrl-C
        if argv is None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # a console in locale C must not end a run
    try:
        arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
        status = cli.main(args=arguments, prog_name="escher", standalone_mode=False)
    except click.exceptions.Exit as exc:
        status = exc.exit_code
    except click.UsageError as exc:
        status = _fail(f"{exc.format_message()} (see: {exc.ctx.command_path if exc.ctx else 'escher'} --help)")
    except (click.Abort, KeyboardInterrupt):
        status = 130
    except EXPECTED as exc:
        lines = str(exc).splitlines() or [type(exc).__name__]
        status = _fail(lines[0] + (f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""))
    except OSError as exc:
        status = _fail(f"{exc.filename or 'file'}: {exc.strerror or exc}")
    sys.stdout.flush()
    sys.exit(status or 0)


def _fail(message: str) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
