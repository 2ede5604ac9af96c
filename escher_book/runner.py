"""Drives a run: makes its directory, executes one notebook a family with papermill, keeps how each ended.

Each notebook runs in a kernel of its own, started from a private kernelspec that names this interpreter, so that no
`python3` kernelspec of another environment can win. Records are written by the kernel as they are measured; what
happens to a notebook afterwards (error, time-out, death) is kept in status.json, because papermill's own output does
not tell them apart.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from escher_book import notebook
from escher_kernels import METHOD, environment
from escher_kernels.records import SCHEMA, RecordError, read_json, write_failed, write_json_atomic, write_text_atomic
from escher_kernels.run import ROOT, Settings, records_path
from escher_kernels.run import families as registry
from validation.config import OWN
from validation.tools import redact_arguments

NOTEBOOKS = ROOT / "notebooks"
TIMEOUT_S = {"quick": 300, "standard": 1200, "full": 7200}
LAST_BENCHMARK = 6  # families up to this number are `benchmark`; those after it take longer or ask for more, see `all`
DISTRIBUTED = ("comm", "fused")  # their ranks pin themselves
LATEST = "latest"
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class RunError(Exception):
    """The run cannot start or go on. One line: what, and the mend. Exit status 2."""


def families() -> dict[str, Path]:
    """Family -> its notebook, in the order of the book."""
    return {family: NOTEBOOKS / f"{stem}.ipynb" for family, stem in registry().items()}


def choose(text: str | None) -> list[str]:
    """Families named in `text` ("compute bandwidth" or with commas; "all": every one; "benchmark", or nothing: those
    numbered up to 6), in book order."""
    known = list(families())
    words = [w for w in re.split(r"[\s,]+", text or "") if w]
    if words == ["all"]:
        return known
    if len(words) > 1 and (alone := next((w for w in words if w in ("all", "benchmark")), None)):
        raise RunError(f"{alone!r} names families itself and stands alone; known: {', '.join(known)}")
    if not words or words == ["benchmark"]:
        return [f for f, stem in registry().items() if int(stem.partition("_")[0]) <= LAST_BENCHMARK]
    for word in words:
        if word not in known:
            raise RunError(f"unknown family {word!r}; known: {', '.join(known)}, or benchmark, or all")
    return [f for f in known if f in words]


def results_root(given: str | None) -> Path:
    return Path(given or os.environ.get("RESULTS_DIR") or ROOT / "results").absolute()


def runs(root: Path) -> list[Path]:
    """The runs right below a folder, without links such as results/latest."""
    return sorted(p.parent for p in root.glob("*/run.json") if not p.parent.is_symlink()) if root.is_dir() else []


def newest(root: Path) -> Path:
    """The newest run below `root`. RunError if there is none."""
    found = [(read_created(path / "run.json"), path) for path in runs(root)]
    if not found:
        raise RunError(f"no run below {root}; make one with: make book")
    return max(found)[1]


def read_created(run_json: Path) -> str:
    try:
        return str(read_json(run_json)["created_utc"])
    except (RecordError, KeyError, TypeError):
        return ""


def plan(settings: Settings, prefix: Sequence[str] = ()) -> dict[str, Any]:
    """Device, profile, workload and environment, found in a child process so that this one never holds the device.

    `prefix`: what the measuring processes are started through, so that the plan is for what they will find.
    """
    command = [*prefix, sys.executable, "-m", "escher_kernels", "plan"]
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


@dataclass(frozen=True)
class Conduct:
    """How a run is made, apart from what it measures. `iterations`: fresh processes a family. `timeout_s`: what a family
    may take (None: as its budget gives), `run_timeout_s`: all of it. `stat_interval_s`: of the telemetry; None: none."""

    iterations: int = 1
    timeout_s: float | None = None
    run_timeout_s: float | None = None
    numactl: str | None = None
    stat_interval_s: float | None = 1.0
    prepare_sys: bool = False


def numactl_argv(spec: str | None) -> list[str]:
    """The command that a measuring process is started through. RunError where numactl is missing or refuses `spec`."""
    if not spec:
        return []
    try:
        argv = ["numactl", *shlex.split(spec)]
        done = subprocess.run([*argv, "true"], capture_output=True, text=True, errors="replace", timeout=30, check=False)
    except ValueError as exc:
        raise RunError(f"--numactl {spec!r}: {exc}; e.g. --numactl '--physcpubind=0-15 --localalloc'") from None
    except OSError as exc:
        raise RunError(f"--numactl: numactl cannot be run ({exc.strerror}); install it (apt install numactl)") from None
    except subprocess.TimeoutExpired:
        raise RunError(f"--numactl {spec!r}: numactl did not end within 30 s") from None
    if done.returncode:
        said = next(iter([*done.stderr.splitlines(), *done.stdout.splitlines()]), f"exit status {done.returncode}")
        raise RunError(f"--numactl {spec!r}: {said.strip()}")
    return argv


def new_run(
    root: Path, settings: Settings, chosen: list[str], planned: dict[str, Any], conduct: Conduct = Conduct()
) -> Path:
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
        "iterations": conduct.iterations,
        "target": planned["target"],
        "workload": planned["workload"],
        "world": 1,
        **{name: planned.get(name) for name in ("partition", "nps", "power_cap_w", "devices")},
        "tuning": {"numactl": conduct.numactl, "stat_interval_s": conduct.stat_interval_s, "prepare_sys": []},
        "argv": argv(),
        "git": environment.git_state(ROOT),
    })  # fmt: skip
    return run_dir


def argv() -> tuple[str, ...]:
    """How this process was called, without secrets."""
    return redact_arguments([Path(sys.argv[0]).name, *sys.argv[1:]])


def update(run_dir: Path, **changed: Any) -> None:
    """Change keys of run.json. Raises RecordError."""
    write_json_atomic(run_dir / "run.json", {**read_json(run_dir / "run.json"), **changed})


def point_latest(run_dir: Path, say: Callable[[str], None]) -> None:
    """results/latest -> the run that finished last. Where that cannot be (a folder of that name, a file system without
    links) it is said, and nothing is lost."""
    link, made = run_dir.parent / LATEST, run_dir.parent / f".{LATEST}-{os.getpid()}"
    try:
        if link.exists() and not link.is_symlink():
            raise OSError(f"{link} is no link")
        made.unlink(missing_ok=True)
        made.symlink_to(run_dir.name)
        os.replace(made, link)
    except OSError as exc:
        say(f"note: {link} was not set: {exc.strerror or exc}")


class Console:
    """What the person sees, kept in the run's own log as well. The open log is the run's lock."""

    def __init__(self, log: Path | None, stream: TextIO | None = None):
        self.stream = stream or sys.stderr
        self.log = None
        if log:
            try:
                self.log = open(log, "a", encoding="utf-8")  # noqa: SIM115 - lives as long as the run
                fcntl.flock(self.log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(f"{log.parent.parent}: another escher measures into this run; wait for it") from None
            except OSError as exc:
                if self.log is None:  # else a file system without locks
                    raise RunError(write_failed(log, exc)) from None

    def write(self, text: str) -> None:
        with suppress(OSError):  # whoever read it is gone (a pipe, a closed terminal): the log has the line
            self.stream.write(text)
            self.stream.flush()
        self.note(text)

    def note(self, text: str) -> None:
        """Into the log alone."""
        if self.log:
            try:
                self.log.write(text)
                self.log.flush()
            except OSError:  # a full disk must not end a run over its log; the console has the line
                self.log = None

    def flush(self) -> None: ...

    def close(self) -> None:
        """Close the log, and give up the lock."""
        if self.log:
            self.log.close()
            self.log = None

    def __call__(self, line: str) -> None:
        self.write(line + "\n")


@contextmanager
def no_process_left() -> Iterator[None]:
    """End every process that was started inside and is still there: a killed kernel leaves its children behind (compile
    workers, ranks, the capacity family's child). They become this process's own (see prctl(2)), however deep they were.
    """
    import psutil

    def everyone() -> list[psutil.Process]:
        return psutil.Process().children(recursive=True)

    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = {p.pid for p in everyone()}
    try:
        yield
    finally:
        while left := [p for p in everyone() if p.pid not in before]:
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            _, alive = psutil.wait_procs(left, timeout=5)
            if len(alive) == len(left):  # in an uninterruptible call of a driver: nothing ends that
                break
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@contextmanager
def private_kernel(run_dir: Path, prefix: Sequence[str] = ()) -> Iterator[None]:
    """A kernelspec `python3` that is this interpreter, first on JUPYTER_PATH, and writable Jupyter directories.

    `prefix`: a command that the kernel is started through. HOME may not be writable, and a stale kernelspec in it must not be
    found.
    """
    try:
        base = Path(tempfile.mkdtemp(prefix=".jupyter-", dir=run_dir))
    except OSError as exc:
        raise RunError(write_failed(run_dir, exc)) from None
    spec = base / "data" / "kernels" / "python3"
    try:
        spec.mkdir(parents=True)
        argv = [*prefix, sys.executable, "-m", "ipykernel_launcher", "--log-level=CRITICAL", "-f", "{connection_file}"]
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
    iteration: int = 1,
    resume: bool = False,
) -> Outcome:
    """Execute a family's notebook into run_dir/notebooks/. The output file is replaced only as a whole; that of a later
    iteration is not kept, as the pages show the first.

    KeyboardInterrupt passes through after the kernel is gone. Raises RunError for a notebook that cannot be run at all.
    """
    import nbclient.exceptions
    import papermill
    from jupyter_client.kernelspec import NoSuchKernel

    source = families()[family]
    parameters = {
        "run_dir": str(run_dir), "replay": replay, "settings": settings.to_json(), "profile": None if replay else profile,
        "iteration": iteration, "resume": resume,
    }  # fmt: skip
    check_parameters(source, parameters)
    final = run_dir / "notebooks" / source.name
    partial = final.with_name(f".{source.stem}.partial.ipynb")
    started = time.monotonic()

    def left(_: Any) -> int:
        return max(1, round(started + timeout_s - time.monotonic()))

    status, message = "ok", ""
    try:
        final.parent.mkdir(exist_ok=True)
        papermill.execute_notebook(
            str(source), str(partial), parameters=parameters, progress_bar=False, stderr_file=console, cwd=str(run_dir),
            kernel_name="python3", language="python", timeout_func=left, start_timeout=120,  # left: of the whole notebook
        )  # fmt: skip
    except papermill.PapermillExecutionError as exc:
        if exc.ename == "KeyboardInterrupt":
            raise KeyboardInterrupt from None
        status, message = "failed", f"{exc.ename}: {exc.evalue}"
    except nbclient.exceptions.CellTimeoutError:
        status, message = "timeout", f"not done after {timeout_s:.0f} s"
    except nbclient.exceptions.DeadKernelError:
        status, message = "died", "the kernel was killed (out of memory?)"
    except NoSuchKernel as exc:
        raise RunError(f"the private kernelspec was not found ({exc}); is JUPYTER_PATH overridden?") from None
    except OSError as exc:
        raise RunError(write_failed(partial, exc)) from None
    finally:
        if iteration > 1:
            partial.unlink(missing_ok=True)
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


def measure(
    run_dir: Path,
    chosen: list[str],
    settings: Settings,
    console: Console,
    conduct: Conduct = Conduct(),
    resume: bool = False,
    after: Callable[[int], None] = lambda iteration: None,
) -> dict[str, Any]:
    """Execute the families' notebooks one after the other, `conduct.iterations` times; status.json is written after each.

    `resume`: what is finished stays, the rest goes on. `after` is called at the end of each iteration of which something was
    executed. Returns the statuses.
    """
    profile = read_json(run_dir / "run.json")["target"]["profile"]
    status = _object(run_dir / "status.json") if resume else {}
    limit, began, whole = conduct.timeout_s or TIMEOUT_S[settings.budget], time.monotonic(), conduct.run_timeout_s
    prefix = numactl_argv(conduct.numactl)
    todo = [(iteration, family) for iteration in range(1, conduct.iterations + 1) for family in chosen]

    def keep(family: str, iteration: int, status_: str, message: str, seconds: float = 0.0, started_utc: str = "") -> None:
        entry = {"status": status_, "message": message, "seconds": seconds, "started_utc": started_utc}
        _enter(status, family, iteration, conduct.iterations, entry)
        write_json_atomic(run_dir / "status.json", status)

    for path in run_dir.glob(".jupyter-*"):  # of a process that was killed; the log's lock keeps others out
        shutil.rmtree(path, ignore_errors=True)
    executed = False
    for number, (iteration, family) in enumerate(todo, start=1):
        label = f"[{number}/{len(todo)}] {family}" + (f", iteration {iteration}" if conduct.iterations > 1 else "")
        left = whole - (time.monotonic() - began) if whole else limit
        earlier = how_ended(status, family, iteration)
        if earlier.get("status") == "ok" and recorded(run_dir, family):
            console(f"{label}: is there already")
        elif left <= 0:
            keep(family, iteration, "timeout", f"the {whole:g} s of the whole run were used up before it began")
            console(f"{label}: TIMEOUT: the {whole:g} s of the whole run are used up")
        else:
            console(label)
            executed = True
            started = datetime.now(UTC).isoformat(timespec="seconds")
            spent = earlier.get("seconds") or 0.0
            keep(family, iteration, "running", "", spent, started)
            through = () if family in DISTRIBUTED else prefix
            try:
                with no_process_left(), private_kernel(run_dir, through):
                    outcome = execute(
                        run_dir, family, False, settings, profile, console, min(limit, left), iteration, resume
                    )
            except KeyboardInterrupt:
                logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # it would tell of the cell that was cut short
                keep(family, iteration, "interrupted", "Ctrl-C", spent, started)
                raise
            keep(family, iteration, outcome.status, outcome.message, round(spent + outcome.seconds, 1), started)
            word = "done" if outcome.ok else f"{outcome.status.upper()}: {outcome.message}"
            console(f"{label}: {word} ({outcome.seconds:.0f} s)")
        if family == chosen[-1] and executed:
            after(iteration)
            executed = False
    return status


def recorded(run_dir: Path, family: str) -> bool:
    """Whether a family's records are there: a person may have deleted a damaged file, for it to be measured again."""
    return records_path(run_dir, family).is_file()


def how_ended(status: dict[str, Any], family: str, iteration: int) -> dict[str, Any]:
    """How an iteration of a family ended; {} where nothing is known of it."""
    whole = status.get(family, {})
    return whole["iterations"].get(str(iteration), {}) if "iterations" in whole else whole if iteration == 1 else {}


def _enter(status: dict[str, Any], family: str, iteration: int, iterations: int, entry: dict[str, Any]) -> None:
    """Put how an iteration ended into the statuses; a family ended as the first of its iterations that is not ok did."""
    if iterations == 1:
        status[family] = entry
        return
    nothing = {"status": "interrupted", "message": "not begun", "seconds": 0.0, "started_utc": ""}
    whole = status.get(family, {})
    there = whole.get("iterations") or ({"1": whole} if whole else {})
    each = {str(i): there.get(str(i), nothing) for i in range(1, iterations + 1)} | {str(iteration): entry}
    number, bad = next(((i, e) for i, e in each.items() if e["status"] != "ok"), ("", None))
    why = {"status": bad["status"], "message": f"iteration {number}: {bad['message']}"} if bad else entry
    seconds = round(sum(e.get("seconds") or 0.0 for e in each.values()), 1)
    status[family] = {
        "status": why["status"], "message": why["message"], "seconds": seconds, "started_utc": each["1"]["started_utc"],
        "iterations": each,
    }  # fmt: skip


def _object(path: Path) -> dict[str, Any]:
    """A JSON object of objects, {} where there is none. RunError where it is something else."""
    data = read_json(path) if path.is_file() else {}
    if not isinstance(data, dict) or not all(isinstance(v, dict) for v in data.values()):
        raise RunError(f"{path}: no JSON object of objects; delete it, and what is whole is found from the records")
    return data
