"""Drives a run: makes its directory, executes one notebook a family with papermill, keeps how each ended.

Each notebook runs in a kernel of its own, started from a private kernelspec that names this interpreter, so that no
`python3` kernelspec of another environment can win. Records are written by the kernel as they are measured; what
happens to a notebook afterwards (error, time-out, death) is kept in status.json, because papermill's own output does
not tell them apart.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from escher_book import notebook
from escher_kernels import METHOD, environment
from escher_kernels.records import SCHEMA, RecordError, read_json, write_failed, write_json_atomic, write_text_atomic
from escher_kernels.run import ROOT, Settings
from escher_kernels.run import families as registry
from validation.config import OWN

NOTEBOOKS = ROOT / "notebooks"
TIMEOUT_S = {"quick": 300, "standard": 1200, "full": 7200}


class RunError(Exception):
    """The run cannot start or go on. One line: what, and the mend. Exit status 2."""


def families() -> dict[str, Path]:
    """Family -> its notebook, in the order of the book."""
    return {family: NOTEBOOKS / f"{stem}.ipynb" for family, stem in registry().items()}


def choose(text: str | None) -> list[str]:
    """Families named in `text` ("compute bandwidth" or with commas; "benchmark" or "all": every one), in book order."""
    known = list(families())
    words = [w for w in re.split(r"[\s,]+", text or "") if w]
    if not words or words in (["benchmark"], ["all"]):
        return known
    for word in words:
        if word not in known:
            raise RunError(f"unknown family {word!r}; known: {', '.join(known)}, or benchmark, or all")
    return [f for f in known if f in words]


def results_root(given: str | None) -> Path:
    return Path(given or os.environ.get("RESULTS_DIR") or ROOT / "results").absolute()


def newest(root: Path) -> Path:
    """The newest run below `root`. RunError if there is none."""
    runs = [(read_created(p), p) for p in root.glob("*/run.json")] if root.is_dir() else []
    if not runs:
        raise RunError(f"no run below {root}; make one with: make book")
    return max(runs)[1].parent


def read_created(run_json: Path) -> str:
    try:
        return str(read_json(run_json)["created_utc"])
    except (RecordError, KeyError, TypeError):
        return ""


def plan(settings: Settings) -> dict[str, Any]:
    """Device, profile, workload and environment, found in a child process so that this one never holds the device."""
    command = [sys.executable, "-m", "escher_kernels", "plan"]
    for name, value in settings.to_json().items():
        if value is not None:
            command += [f"--{name.replace('_', '-')}", str(value)]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", errors="replace", check=False)
    if done.returncode == 0:
        return json.loads(done.stdout)
    lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
    ours = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    more = len(lines) - lines.index(f"error: {ours[0]}") - 1 if ours else 0
    raise RunError((ours or lines[-1:])[0] + (f" (and {more} more)" if more else ""))


def new_run(root: Path, settings: Settings, chosen: list[str], planned: dict[str, Any]) -> Path:
    """Make results/<workload>-<target>-<YYYYMMDD-HHMMSS>/ with run.json and env.json. Raises RunError."""
    now = datetime.now(UTC)
    profile = planned["target"]["profile"]
    workload = planned["workload"]["name"]
    name = f"{workload}-{profile['key'] if profile else 'unknown'}-{now.strftime('%Y%m%d-%H%M%S')}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        for suffix in ("", *(f"-{i}" for i in range(2, 100))):
            run_dir = root / (name + suffix)
            try:
                run_dir.mkdir()
                break
            except FileExistsError:
                continue
        for part in ("records", "raw", "telemetry"):
            (run_dir / part).mkdir()
    except OSError as exc:
        raise RunError(write_failed(root, exc)) from None
    write_json_atomic(run_dir / "env.json", planned["env"])
    if settings.report_config:  # the run's own copy: a report elsewhere must judge by the same figures
        write_text_atomic(run_dir / "raw" / OWN, Path(settings.report_config).read_text(encoding="utf-8"))
    write_json_atomic(run_dir / "run.json", {
        "schema": SCHEMA,
        "method": METHOD,
        "run_id": run_dir.name,
        "created_utc": now.isoformat(timespec="seconds"),
        "source": "measured",
        "settings": settings.to_json(),
        "families": chosen,
        "target": planned["target"],
        "workload": planned["workload"],
        "world": 1,
        "partition": None,
        "nps": None,
        "argv": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "git": environment.git_state(ROOT),
    })  # fmt: skip
    return run_dir


class Console:
    """What the person sees, kept in the run's own log as well."""

    def __init__(self, log: Path | None, stream: TextIO | None = None):
        self.stream = stream or sys.stderr
        self.log = None
        if log:
            try:
                self.log = open(log, "a", encoding="utf-8")  # noqa: SIM115 - lives as long as the run
            except OSError as exc:
                raise RunError(write_failed(log, exc)) from None

    def write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()
        if self.log:
            try:
                self.log.write(text)
                self.log.flush()
            except OSError:  # a full disk must not end a run over its log; the console has the line
                self.log = None

    def flush(self) -> None: ...

    def __call__(self, line: str) -> None:
        self.write(line + "\n")


@contextmanager
def private_kernel(run_dir: Path) -> Iterator[None]:
    """A kernelspec `python3` that is this interpreter, first on JUPYTER_PATH, and writable Jupyter directories.

    HOME may not be writable, and a stale kernelspec in it must not be found.
    """
    try:
        base = Path(tempfile.mkdtemp(prefix=".jupyter-", dir=run_dir))
    except OSError as exc:
        raise RunError(write_failed(run_dir, exc)) from None
    spec = base / "data" / "kernels" / "python3"
    try:
        spec.mkdir(parents=True)
        argv = [sys.executable, "-m", "ipykernel_launcher", "--log-level=CRITICAL", "-f", "{connection_file}"]
        (spec / "kernel.json").write_text(
            json.dumps({"argv": argv, "display_name": "Python 3", "language": "python"}), encoding="utf-8"
        )
        changed = {
            "JUPYTER_PATH": str(base / "data"),
            "JUPYTER_DATA_DIR": str(base / "data"),
            "JUPYTER_RUNTIME_DIR": str(base / "runtime"),
            "JUPYTER_CONFIG_DIR": str(base / "config"),
            "IPYTHONDIR": str(base / "ipython"),
            "MPLCONFIGDIR": str(base / "matplotlib"),
            "PYTHONUTF8": "1",
            "PYTHONSAFEPATH": "1",  # the kernel's directory must not shadow a package
            notebook.EXPECT: json.dumps({"interpreter": sys.executable, "torch": notebook.torch_version()}),
        }
        before = {name: os.environ.get(name) for name in changed}
        os.environ.update(changed)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
    finally:
        shutil.rmtree(base, ignore_errors=True)


def check_parameters(source: Path, parameters: dict[str, Any]) -> None:
    """Refuse parameters that the notebook does not declare, and a notebook without a parameters cell."""
    cells = read_json(source)["cells"]
    tagged = [c for c in cells if "parameters" in c["metadata"].get("tags", [])]
    if len(tagged) != 1:
        raise RunError(f"{source.name}: {len(tagged)} cells are tagged parameters; exactly one is needed")
    text = "".join(tagged[0]["source"])
    declared = set(re.findall(r"^(\w+)\s*(?::[^=\n]+)?=", text, re.M))
    for name in parameters:
        if name not in declared:
            raise RunError(f"{source.name}: unknown parameter {name!r}; it declares {', '.join(sorted(declared))}")


@dataclass(frozen=True)
class Outcome:
    """How a notebook ended: ok, failed, timeout, died or interrupted, with one line that says why."""

    status: str
    message: str
    seconds: float

    @property
    def ok(self) -> bool:
        return self.status == "ok"


def execute(
    run_dir: Path,
    family: str,
    replay: bool,
    settings: Settings,
    profile: dict | None,
    console: Console,
    timeout_s: float,
) -> Outcome:
    """Execute a family's notebook into run_dir/notebooks/. The output file is replaced only as a whole.

    KeyboardInterrupt passes through after the kernel is gone. Raises RunError for a notebook that cannot be run at all.
    """
    import nbclient.exceptions
    import papermill
    from jupyter_client.kernelspec import NoSuchKernel

    source = families()[family]
    parameters = {
        "run_dir": str(run_dir), "replay": replay, "settings": settings.to_json(), "profile": None if replay else profile,
    }  # fmt: skip
    check_parameters(source, parameters)
    final = run_dir / "notebooks" / source.name
    partial = final.with_name(f".{source.stem}.partial.ipynb")
    started = time.monotonic()
    status, message = "ok", ""
    try:
        final.parent.mkdir(exist_ok=True)
        papermill.execute_notebook(
            str(source), str(partial), parameters=parameters, progress_bar=False, stderr_file=console, cwd=str(run_dir),
            kernel_name="python3", language="python", execution_timeout=int(timeout_s), start_timeout=120,
        )  # fmt: skip
    except papermill.PapermillExecutionError as exc:
        if exc.ename == "KeyboardInterrupt":
            raise KeyboardInterrupt from None
        status, message = "failed", f"{exc.ename}: {exc.evalue}"
    except nbclient.exceptions.CellTimeoutError:
        status, message = "timeout", f"not done after {timeout_s:g} s"
    except nbclient.exceptions.DeadKernelError:
        status, message = "died", "the kernel was killed (out of memory?)"
    except NoSuchKernel as exc:
        raise RunError(f"the private kernelspec was not found ({exc}); is JUPYTER_PATH overridden?") from None
    except OSError as exc:
        raise RunError(write_failed(partial, exc)) from None
    finally:
        _take(partial, final)
    return Outcome(status, " ".join(message.split()), round(time.monotonic() - started, 1))


def _take(partial: Path, final: Path) -> None:
    """Put an executed notebook in its place, unless a full disk or Ctrl-C cut it off: then the old one stays."""
    if not partial.exists():
        return
    try:
        read_json(partial)
    except RecordError:
        partial.unlink()
        return
    with open(partial, "rb") as out:
        os.fsync(out.fileno())
    os.replace(partial, final)


def measure(run_dir: Path, chosen: list[str], settings: Settings, console: Console, timeout_s: float | None) -> dict:
    """Execute the families' notebooks one after the other; status.json is written after each. Returns the statuses."""
    profile = read_json(run_dir / "run.json")["target"]["profile"]
    status: dict[str, Any] = {}
    limit = timeout_s or TIMEOUT_S[settings.budget]
    with private_kernel(run_dir):
        for number, family in enumerate(chosen, start=1):
            console(f"[{number}/{len(chosen)}] {family}")
            began = datetime.now(UTC).isoformat(timespec="seconds")
            status[family] = {"status": "running", "message": "", "started_utc": began}
            write_json_atomic(run_dir / "status.json", status)
            try:
                outcome = execute(run_dir, family, False, settings, profile, console, limit)
            except KeyboardInterrupt:
                logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # it would tell of the cell that was cut short
                status[family] = {"status": "interrupted", "message": "Ctrl-C", "started_utc": began}
                write_json_atomic(run_dir / "status.json", status)
                raise
            status[family] = {**outcome.__dict__, "started_utc": began}
            write_json_atomic(run_dir / "status.json", status)
            word = "done" if outcome.ok else f"{outcome.status.upper()}: {outcome.message}"
            console(f"[{number}/{len(chosen)}] {family}: {word} ({outcome.seconds:.0f} s)")
    return status
