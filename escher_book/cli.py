"""The command line. One line for an error, and an exit status that means something.

0: done. 1: a family failed, timed out or died, or the book has a warning. 2: wrong usage or environment. 130: Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from escher_book import report as reports
from escher_book import runner
from escher_book.stage import BookError
from escher_kernels import targets
from escher_kernels.records import RecordError
from escher_kernels.run import Settings
from escher_kernels.timing import BUDGETS
from escher_kernels.workload import WorkloadError
from validation import config as configuration

EXPECTED = (
    runner.RunError, RecordError, BookError, WorkloadError, targets.ConfigError, targets.TargetError, targets.DeviceError,
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


def _build(run_dir: Path, console: runner.Console, executed: dict | None = None) -> int:
    result, broken = reports.make(run_dir, console, executed)
    for page in broken:
        console(f"error: a page could not be made from its records: {page}")
    if not result.ok:
        console(f"error: the book was not built: {next(iter(result.warnings), 'see the log')}; log: {result.log}")
        return 1
    print(result.site / "index.html")
    return 1 if broken else 0


@cli.command()
@_options
def run(**options: Any) -> int:
    """Measure only: records go to a new directory below results/."""
    run_dir, status, _ = _measure(**options)
    print(run_dir)
    return 0 if all(s["status"] == "ok" for s in status.values()) else 1


@cli.command()
@_options
def book(**options: Any) -> int:
    """Measure, then build the book: results/<run>/site/index.html."""
    run_dir, status, console = _measure(**options)
    whole = {family: s["status"] == "ok" for family, s in status.items()}
    built = _build(run_dir, console, whole)
    return built or (0 if all(whole.values()) else 1)


@cli.command()
@click.argument("run_dir", metavar="[RUN]", required=False)
@click.option("--results-dir", default=None, help="where runs are  [default: results]")
def report(run_dir: str | None, results_dir: str | None) -> int:
    """Build the pages of RUN (default: the newest) again from its records, without measuring."""
    chosen = Path(run_dir).absolute() if run_dir else runner.newest(runner.results_root(results_dir))
    return _build(chosen, runner.Console(None))


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
