"""Runs the outside tools, or takes logs made elsewhere, and keeps what they said below a run's raw/tools/.

The one part of judging that measures: ours / theirs / ours, round after round, our own side by `python -m escher_kernels`
in a process of its own. Every execution leaves `NN_<name>.log` (redacted) and `NN_<name>.json` (`Log`), so that judging
reads files alone, any time.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from escher_kernels.records import (
    RecordError,
    RecordFile,
    read,
    read_json,
    write_failed,
    write_json_atomic,
    write_text_atomic,
)
from validation import tools
from validation.derive import LoadedRun
from validation.tools import Command, Parsed, Place

ROCM_BIN = "/opt/rocm/bin"
ROUNDS = {"cpu": 3, "gpu": 1}  # how often theirs runs between ours
SIZE_ARGUMENTS = {"nvbandwidth": ("-b", 2**20)}  # whose logs do not tell the size that our own command asked for
LARGEST_LOG_BYTES = 16 * 2**20
OURS_TIMEOUT_S = 900
KILLED_S = 10  # how long a killed process may take to be gone
OWN_CASES = {  # family -> what ours measures again around theirs, by kind of device
    "gpu": {"compute": ("peer.*", "square.8192"), "bandwidth": ("copy.*", "host.*")},
    "cpu": {"bandwidth": ("stream.torch", "stream.plain", "stream.streaming")},
}


@dataclass(frozen=True)
class Log:
    """One execution of a tool, or one imported file. `log` None: nothing was run, `skipped` says why.

    `ours`: folders below raw/tools/ with our own records from just before and just after; none for an import.
    """

    tool: str
    name: str
    log: str | None
    argv: tuple[str, ...] = ()
    config: str | None = None  # what the tool was told by a file
    exit_status: int | None = None
    timed_out: bool = False
    started_utc: str = ""
    seconds: float | None = None
    imported: bool = False
    round: int = 0
    ours: tuple[str, ...] = ()
    skipped: str | None = None


def folder(run_dir: Path) -> Path:
    return Path(run_dir) / "raw" / "tools"


def logs(run_dir: Path) -> list[Log]:
    """Every log of a run, in the order they were made. RecordError where one's description is no such thing."""
    out = []
    for path in sorted(folder(run_dir).glob("*.json"), key=lambda p: (_number(p.name), p.name)):
        data = read_json(path)
        if why := _no_description(data):
            raise RecordError(f"{path}: describes no tool's log ({why}); delete it and validate again")
        out.append(Log(**{k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}))
    return out


_TYPES: dict[str, type | tuple] = {  # of a description's fields; others are texts
    "log": (str, type(None)), "argv": list, "config": (str, type(None)), "exit_status": (int, type(None)), "timed_out": bool,
    "seconds": (int, float, type(None)), "imported": bool, "round": int, "ours": list, "skipped": (str, type(None)),
}  # fmt: skip


def _no_description(data: Any) -> str | None:
    """What is wrong with the JSON of a `Log`; None where it is one. Names must be those of files beside it."""
    if not isinstance(data, dict):
        return "no JSON object"
    known = {f.name for f in fields(Log)}
    if odd := [k for k in data if k not in known] or [k for k in ("tool", "name", "log") if k not in data]:
        return f"{odd[0]!r} is {'missing' if odd[0] in known else 'unknown'}"
    for key, value in data.items():
        items = value if isinstance(value, list) else []
        if not isinstance(value, _TYPES.get(key, str)) or not all(isinstance(x, str) for x in items):
            return f"{key} is {str(value)[:40]!r}"
    names = [x for x in (data["log"], *data.get("ours", ())) if x is not None]
    bad = [x for x in names if x in ("", ".", "..") or "/" in x or not x.isprintable()]
    return f"{bad[0][:40]!r} is no name of a file beside it" if bad else None


def parsed(run_dir: Path, log: Log) -> Parsed:
    """What a kept log says; SKIP-like logs have no readings and their reason."""
    if log.log is None:
        return Parsed(log.tool, status="SKIP", reason=log.skipped or "not run")
    path = folder(run_dir) / log.log
    try:
        data = path.read_bytes()
    except OSError as exc:
        return Parsed(log.tool, status=tools.UNPARSED, reason=f"{path.name} cannot be read: {exc.strerror or exc}")
    found = _sized(tools.read(data, log.config), log)
    if found.tool == "unknown" and not log.imported:  # we know what was run
        last = [line.strip() for line in tools.clean(data).split("\n") if line.strip()][-1:]
        why = f"its output was not understood, the last line is {last[0][:200]!r}" if last else "it printed nothing"
        found = replace(found, tool=log.tool, reason=why)
    if found.status in (None, tools.INCOMPLETE, tools.UNPARSED):
        why = f" ({found.reason})" if found.reason else ""
        if log.timed_out:
            return replace(found, status=tools.INCOMPLETE, reason=f"it was stopped when its time was up{why}")
        if log.exit_status and found.status:
            return replace(found, reason=f"{found.reason}; it ended with exit status {log.exit_status}")
    return found


def _sized(found: Parsed, log: Log) -> Parsed:
    """With the size of the buffers where our own command line alone tells it."""
    flag, unit = SIZE_ARGUMENTS.get(found.tool, ("", 1))
    value = next((b for a, b in zip(log.argv, log.argv[1:], strict=False) if a == flag), "")
    if log.imported or not re.fullmatch("[0-9]{1,9}", value):
        return found
    size = {"buffer_bytes": int(value) * unit}
    return replace(found, records=tuple(replace(r, params={**size, **r.params}) for r in found.records))


def kept_text(run_dir: Path, log: Log) -> str | None:
    """A kept log as it stands; None where there is none, or it cannot be read."""
    try:
        return (folder(run_dir) / log.log).read_text(encoding="utf-8", errors="replace") if log.log else None
    except OSError:
        return None


def ours(run_dir: Path, names: Iterable[str]) -> list[RecordFile]:
    """Our own records in those folders; a damaged file raises RecordError."""
    return [read(path) for name in names for path in sorted((folder(run_dir) / name / "records").glob("*.jsonl"))]


def place(run: LoadedRun, plateau_bytes: int | None) -> Place:
    """Where the tools would run: this machine, which the run must have been measured on."""
    header = next((f.run for f in run.files.values()), None)
    found = {}
    path = os.pathsep.join([*filter(None, os.environ.get("PATH", os.defpath).split(os.pathsep)), ROCM_BIN])
    for name in tools.MODULES:
        for executable in tools.module(name).EXECUTABLES:
            if where := shutil.which(executable, path=path):
                found[executable] = os.path.abspath(where)  # it runs in another folder
    profile = run.selection.found_profile
    parameters = header.parameters if header else {}
    return Place(
        kind=run.found.kind,
        target=profile.key if profile else None,
        devices=run.found.count,
        executables=found,
        plateau_bytes=plateau_bytes,
        threads=parameters.get("threads") or 1,
        cpus=tuple(parameters.get("affinity") or ()),
    )


def import_files(run_dir: Path, files: Sequence[Path], say: Callable[[str], None]) -> None:
    """Keep logs made elsewhere, each once; what is in them is judged later. A file that is a configuration goes with the
    logs of the tools that take one. RecordError, before anything is kept, for a file that cannot be read, or a
    configuration of which it cannot be told what was made with it."""
    texts, configs = [], []
    for path in map(Path, files):
        try:
            with open(path, "rb") as source:
                data = source.read(LARGEST_LOG_BYTES + 1)
                made = os.fstat(source.fileno()).st_mtime
        except OSError as exc:
            raise RecordError(f"{path}: cannot be read: {exc.strerror or exc}") from None
        if len(data) > LARGEST_LOG_BYTES:
            raise RecordError(f"{path}: larger than {LARGEST_LOG_BYTES // 2**20} MiB; import the tool's own output alone")
        content = tools.clean(data)
        if tools.is_configuration(content):
            configs.append((path.name, tools.redact_config(content)))
        else:
            content = tools.redact(content)
            texts.append((path, content, made, tools.recognise(content) or "unknown"))
    if len(configs) > 1:
        raise RecordError(f"{configs[0][0]} and {configs[1][0]} are two configurations; import each with its own logs")
    if configs and not any(tool in tools.TAKES_CONFIG for *_, tool in texts):
        raise RecordError(f"{configs[0][0]} is a configuration; give the log that was made with it too")
    there = [(log, kept_text(run_dir, log)) for log in logs(run_dir) if log.imported and log.log]
    for name, _ in configs:
        say(f"{name}: the configuration of the {', '.join(tools.module(t).NAME for t in tools.TAKES_CONFIG)} logs")
    for path, content, made, tool in texts:
        config = configs[0][1] if configs and tool in tools.TAKES_CONFIG else None
        if known := next((log for log, other in there if other == content), None):
            new = bool(config) and known.config != config
            say(f"{path.name}: the same log is there already ({known.log})" + (", now with its configuration" if new else ""))
            if new:
                write_json_atomic(_description(run_dir, known), asdict(replace(known, config=config)))
            continue
        started = datetime.fromtimestamp(made, UTC).isoformat(timespec="seconds")
        name = "".join(c if c.isalnum() or c in "-_" else "-" for c in path.stem)[:60] or "log"
        kept = keep(run_dir, content, Log(tool, name, None, config=config, started_utc=started, imported=True))
        there.append((kept, content))
        say(f"{path.name}: {tool}")


def run_tools(run: LoadedRun, plateau_bytes: int | None, say: Callable[[str], None]) -> None:
    """Run every tool that is installed and fits this machine, ours before and after each; note those that are not."""
    run_dir, here = run.directory, place(run, plateau_bytes)
    kind = run.kind
    todo: list[Command] = []
    for name in tools.MODULES:
        module = tools.module(name)
        if not fits(name, here.kind):
            continue
        if not any(e in here.executables for e in module.EXECUTABLES):
            wanted = " or ".join(module.EXECUTABLES[:2])
            keep(run_dir, None, Log(name, name, None, skipped=f"{wanted} is not installed"))
            say(f"{module.NAME}: not installed")
            continue
        commands = module.commands(here)
        if not commands:
            keep(run_dir, None, Log(name, name, None, skipped="nothing to run on this machine"))
        todo += commands
    if not todo:
        return
    groups = [todo] if kind == "cpu" else [[command] for command in todo]  # a CPU's take seconds, a GPU's minutes
    before = _measure_ours(run, say)
    for round_ in range(ROUNDS[kind]):
        for group in groups:
            ran = []
            for command in group:
                say(f"{command.tool}: {command.name}")
                text, log = _execute(command, round_)
                kept = keep(run_dir, None if log.skipped else text, replace(log, ours=tuple(filter(None, (before,)))))
                ran += [] if log.skipped else [kept]
            if ran:
                after = _measure_ours(run, say)
                for log in ran:
                    write_json_atomic(_description(run_dir, log), asdict(replace(log, ours=(*log.ours, *filter(None, (after,))))))
                before = after


def fits(name: str, kind: str) -> bool:
    """Whether a module's tool has something to say of a device of that kind."""
    return name in {"rocm": ("rvs", "transferbench", "rocm_bw", "rccl"), "cuda": ("nvbandwidth", "rccl"),
                    "cpu": ("host_stream",)}[kind]  # fmt: skip


def _execute(command: Command, round_: int) -> tuple[str, Log]:
    """Run one command in an empty folder until it ends or its time is up. `skipped`: it could not be started."""
    with tempfile.TemporaryDirectory(prefix="escher-tool-", ignore_cleanup_errors=True) as directory:
        for name, text in command.files.items():
            (Path(directory) / name).write_text(text, encoding="utf-8")
        argv = [a.replace("{dir}", directory) for a in command.argv]
        env = {**os.environ, "LC_ALL": "C", **{k: v.replace("{dir}", directory) for k, v in command.env.items()}}
        started, began = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
        out = Path(directory) / ".output"
        try:
            with open(out, "wb") as stream:
                status = _run(argv, command.timeout_s, stream, subprocess.STDOUT, cwd=directory, env=env)
        except OSError as exc:
            reason = f"{argv[0]} cannot be run: {exc.strerror or exc}"
            return "", Log(command.tool, command.name, None, tuple(command.argv), skipped=reason, round=round_)
        seconds = round(time.monotonic() - began, 1)
        result = Path(directory) / command.output if command.output else None
        read_from = result if result and result.is_file() and result.stat().st_size else out
        with open(read_from, "rb") as stream:
            text = tools.clean(stream.read(LARGEST_LOG_BYTES)).replace(directory, "{dir}")
        config = "\n".join(command.files.values()) or None
    log = Log(
        command.tool, command.name, None, tuple(command.argv), config, status, status is None, started, seconds, round=round_,
    )  # fmt: skip
    return text, log


def _run(argv: Sequence[str], timeout_s: float, out: Any, err: Any, **where: Any) -> int | None:
    """Run to the end; its exit status, None where its time was up. It has a process group of its own, of which nothing
    is left behind, neither after Ctrl-C nor after an end that left children. OSError where it cannot be started."""
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True, **where
    )  # fmt: skip
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILLED_S)


def keep(run_dir: Path, text: str | None, log: Log) -> Log:
    """Write a log and its description under the next free number, redacted. An existing one is never replaced."""
    home = folder(run_dir)
    stem = f"{1 + max((_number(p.name) for p in home.glob('*')), default=0):02d}_{log.name}"
    log = replace(
        log,
        argv=tools.redact_arguments(log.argv),
        config=log.config and tools.redact_config(log.config),
        skipped=log.skipped and tools.redact(log.skipped),
    )
    if text is not None:
        write_text_atomic(home / f"{stem}.log", tools.redact(text))
        log = replace(log, log=f"{stem}.log")
    write_json_atomic(home / f"{stem}.json", asdict(log))
    return log


def _description(run_dir: Path, log: Log) -> Path:
    return (folder(run_dir) / log.log).with_suffix(".json")


def _number(name: str) -> int:
    """The number that a file of ours begins with; 0 where it does not."""
    found = re.match(r"([0-9]{1,9})_", name)
    return int(found[1]) if found else 0


def _measure_ours(run: LoadedRun, say: Callable[[str], None]) -> str | None:
    """Measure our own cases once more into a folder below raw/tools/; its name, or None where that failed (said).
    RecordError where the run cannot be written to."""
    home = folder(run.directory)
    taken = [p.name.partition("-")[2] for p in home.glob("ours-*")]
    target = home / f"ours-{1 + max((int(n) for n in taken if n.isdecimal()), default=0)}"
    try:
        target.mkdir(parents=True)
    except OSError as exc:
        raise RecordError(write_failed(target, exc)) from None
    for family, patterns in OWN_CASES[run.kind].items():
        names = _own_cases(run, family, patterns)
        if not names:
            continue
        command = [sys.executable, "-m", "escher_kernels", family, "--run", str(target), "--only", *names]
        for key, value in {**run.info["settings"], "budget": "quick"}.items():
            if value is not None:
                command += [f"--{key.replace('_', '-')}", str(value)]
        say(f"ours: {family}")
        with tempfile.TemporaryFile() as err:  # no pipe: a child that outlives it would hold one open
            status = _run(command, OURS_TIMEOUT_S, subprocess.DEVNULL, err)
            err.seek(0)
            told = [line for line in err.read().decode("utf-8", "replace").splitlines() if line.strip()]
        if status is None:
            say(f"ours: {family} was stopped after {OURS_TIMEOUT_S} s")
        elif status:
            say(f"ours: {family} failed: {told[-1] if told else 'no message'}")
    return target.name if any(target.glob("records/*.jsonl")) else None


def _own_cases(run: LoadedRun, family: str, patterns: Sequence[str]) -> list[str]:
    """The cases of this run's family that are compared with tools: of copies the plateau's alone."""
    def wanted(r: Any) -> bool:
        head = any(r.case == p or (p.endswith("*") and r.case.startswith(p[:-1])) for p in patterns)
        aside = r.params.get("op") == "copy" and r.role == "case" and not r.params.get("plateau")
        return head and r.samples_s and not aside

    return list(dict.fromkeys(r.case for r in run.records(family) if wanted(r)))
