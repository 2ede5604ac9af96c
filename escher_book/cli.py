"""The command line. One line for an error, and an exit status that means something.

0: done, and the verdict is GO or CONDITIONAL GO. 1: NO-GO, a family failed, timed out or died, the book was not built; of
compare, validate, variability and selftest that what they look for was found. 2: wrong usage or environment. 3: with
--strict, anything short of GO. 130: Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from escher_book import judging, runner
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

EXPECTED = (
    runner.RunError, RecordError, BookError, WorkloadError, CompareError, targets.ConfigError, targets.TargetError,
    targets.DeviceError,
)  # fmt: skip


def _options(function: Callable) -> Callable:
    for option in reversed((
        click.option("--target", default="auto", show_default=True, help="auto, cpu, or a key of configs/report_config.json"),
        click.option("--device", default="auto", show_default=True, type=click.Choice(["auto", "rocm", "cuda", "cpu"])),
        click.option("--families", default="benchmark", show_default=True, help='e.g. "compute bandwidth"; benchmark: all'),
        click.option("--budget", default="standard", show_default=True, type=click.Choice(list(BUDGETS))),
        click.option("--workload", default="escher_14b_480p", show_default=True, help="a name in configs/, or a .json file"),
        click.option("--reference-model", default=None, help="run the workload of this model of reference_video_models.json"),
        click.option("--depth", default=None, type=click.IntRange(min=1), help="blocks  [default: as the host can run]"),
        click.option("--tokens", default=None, type=click.IntRange(min=1), help="query tokens of a call"),
        click.option("--window", default=None, type=click.IntRange(min=1), help="tokens a query attends to"),
        click.option("--report-config", default=None, help="another report_config.json"),
        click.option("--results-dir", default=None, help="where runs go  [default: results]"),
        click.option("--timeout-s", default=None, type=click.IntRange(min=1), help="time a family may take"),
    )):  # fmt: skip
        function = option(function)
    return function


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def cli() -> None:
    """Measure this machine and build a report book of what was found."""


def _measure(
    families: str, results_dir: str | None, timeout_s: float | None, **settings: Any
) -> tuple[Path, dict, Any]:
    chosen = runner.choose(families)
    try:
        wanted = Settings.from_json(settings)
    except ValueError as exc:
        raise runner.RunError(str(exc)) from None
    if wanted.report_config:
        wanted = Settings.from_json({**settings, "report_config": str(Path(wanted.report_config).absolute())})
    if wanted.workload.endswith(".json"):
        wanted = Settings.from_json({**wanted.to_json(), "workload": str(Path(wanted.workload).absolute())})
    configuration.load(wanted.report_config)  # a threshold that cannot be used is said before anything is measured
    run_dir = runner.new_run(runner.results_root(results_dir), wanted, chosen, runner.plan(wanted))
    console = runner.Console(run_dir / "raw" / "run.log")
    console(f"run {run_dir}")
    try:
        return run_dir, runner.measure(run_dir, chosen, wanted, console, timeout_s), console
    except KeyboardInterrupt:
        console(f"interrupted; what was measured is kept: make report RUN={run_dir}")
        raise click.exceptions.Exit(130) from None


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
    run_dir, status, _ = _measure(**options)
    print(run_dir)
    return 0 if all(s["status"] == "ok" for s in status.values()) else 1


STRICT = click.option("--strict", is_flag=True, help="exit with 3 for anything short of GO")
RESULTS = click.option("--results-dir", default=None, help="where runs are  [default: results]")
RUN = click.argument("run_dir", metavar="[RUN]", required=False)


def _chosen(run_dir: str | None, results_dir: str | None) -> Path:
    return Path(run_dir).absolute() if run_dir else runner.newest(runner.results_root(results_dir))


@cli.command()
@_options
@STRICT
@click.option("--validate/--no-validate", default=True, show_default=True, help="run the outside tools that are installed")
def book(strict: bool, validate: bool, **options: Any) -> int:
    """Measure, judge, then build the book: results/<run>/site/index.html."""
    run_dir, status, console = _measure(**options)
    if validate:
        try:
            judging.run_tools(run_dir, console)
        except KeyboardInterrupt:
            console(f"interrupted; what was measured is kept: make report RUN={run_dir}")
            raise click.exceptions.Exit(130) from None
        except (*EXPECTED, OSError) as exc:  # the book must not be lost over it
            console(f"error: the outside tools could not be run: {exc}")
    whole = {family: s["status"] == "ok" for family, s in status.items()}
    built = _build(run_dir, console, whole, strict)
    return built or (0 if all(whole.values()) else 1)


@cli.command()
@RUN
@RESULTS
@STRICT
def report(run_dir: str | None, results_dir: str | None, strict: bool) -> int:
    """Judge and build the pages of RUN (default: the newest) again from its records, without measuring."""
    return _build(_chosen(run_dir, results_dir), runner.Console(None), strict=strict)


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
    chosen = [Path(p).absolute() for p in paths]
    for number in range(runs or 0):
        run_dir, status, console = _measure(**options)
        failed = [family for family, s in status.items() if s["status"] != "ok"]
        if failed:
            console(f"error: run {number + 1}: {', '.join(failed)} did not finish")
            return 1
        chosen.append(run_dir)
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
