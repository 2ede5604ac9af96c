"""What a notebook calls: measure the family or read what is there, hand the run to the page, show several things."""

from __future__ import annotations

import json
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from escher_book import vega
from escher_kernels import run
from escher_kernels.records import RecordError, write_json_atomic
from validation import derive

EXPECT = "ESCHER_EXPECT"  # set by the runner: the interpreter and torch version that the kernel must have


class WrongKernel(RuntimeError):
    """The kernel is another environment's."""


def torch_version() -> str | None:
    """Version of the torch distribution of this environment, without importing it."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def check_kernel() -> None:
    """Raise WrongKernel if the runner named an interpreter or a torch that this kernel does not have."""
    expected = json.loads(os.environ.get(EXPECT, "{}"))
    for what, found in (("interpreter", sys.executable), ("torch", torch_version())):
        if what in expected and expected[what] != found:
            raise WrongKernel(
                f"this notebook runs on the {what} {found}, the runner's is {expected[what]}: a foreign kernelspec "
                f"named python3 was used; remove it (jupyter kernelspec list) or run from the environment itself"
            )


def show(*items: Any) -> None:
    """Show sentences, tables and charts one below the other; None (not for this kind of device) is left out."""
    from IPython.display import display

    for item in items:
        if item is not None:
            display(item)


def collect(
    family: str,
    run_dir: str,
    replay: bool,
    settings: dict[str, Any],
    profile: dict[str, Any] | None,
    iteration: int = 1,
    resume: bool = False,
) -> derive.LoadedRun:
    """Measure `family` into `run_dir`, or with `replay` measure nothing; then read the run. `iteration` and `resume` as in
    `run.measure_family`.

    Without `run_dir` (a person in JupyterLab) a new run is made below results/.
    """
    vega.enable()
    check_kernel()
    chosen = run.Settings.from_json(settings)
    interactive = not run_dir
    if interactive:
        from escher_book import runner

        run_dir = str(runner.new_run(runner.results_root(None), chosen, [family], runner.plan(chosen)))
        print(f"a new run: {run_dir}", file=sys.stderr)
    if not replay:
        run.measure_family(family, Path(run_dir), chosen, profile, iteration=iteration, resume=resume)
        if interactive:
            write_json_atomic(Path(run_dir) / "status.json", {family: {"status": "ok", "message": ""}})
    found = derive.load(Path(run_dir), lenient=True)  # another family's file may be damaged
    if family in found.unreadable:
        raise RecordError(found.unreadable[family])
    return found
