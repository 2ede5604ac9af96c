"""The head of a run's log: what a colleague needs to have the same machine, software and settings again.

What lscpu, rocminfo, nvidia-smi and the like say, kernel knobs, variables, packages, git, command line. Every line begins
with "| ", so that nothing of it is taken for a line of the run. Secrets, serial numbers and host names are masked. Nothing
here can end a run: what fails, hangs or is missing is a line.
"""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from escher_book import prepare_sys
from escher_kernels import environment
from validation import tools
from validation.tools.running import ROCM_BIN

TOOLS = (
    ("uname", "-a"), ("lscpu",), ("numactl", "--hardware"), ("rocminfo",), ("rocm-smi", "--showall"), ("amd-smi", "static"),
    ("nvidia-smi",), ("nvidia-smi", "-q"),
)  # fmt: skip
TOOL_S, ALL_TOOLS_S = 20.0, 60.0  # a driver in trouble makes its tools hang
OUTPUT_BYTES = 2**18  # of one tool
KILLED_S = 2  # how long a killed tool may take to be gone; one that hangs in a driver never is
FILES = (  # besides those that prepare-sys touches
    "sys/kernel/mm/transparent_hugepage/defrag", "sys/kernel/mm/transparent_hugepage/shmem_enabled",
    "proc/sys/vm/swappiness", "proc/sys/vm/zone_reclaim_mode", "proc/sys/vm/overcommit_memory", "proc/sys/vm/nr_hugepages",
    "proc/sys/kernel/perf_event_paranoid", "sys/devices/system/cpu/smt/active", "sys/devices/system/cpu/cpufreq/boost",
    "sys/devices/system/cpu/intel_pstate/no_turbo", "sys/devices/system/cpu/cpufreq/policy*/scaling_driver",
    "sys/devices/system/cpu/cpuidle/current_driver", "sys/devices/system/clocksource/clocksource0/current_clocksource",
    "sys/module/amdgpu/version", "sys/module/nvidia/version",
)  # fmt: skip
ABOUT = (
    "run_id", "created_utc", "method", "families", "iterations", "settings", "tuning", "partition", "nps", "power_cap_w", "world",
)  # fmt: skip
IDENTITY = re.compile(r"(?i)((?:uuid|serial|unique[ _]?id|guid|host[ _]id)[^:=\n]{0,24}[:=][ \t]*)(?!N/A)[^\s,][^\n,]*")
DEVICE = re.compile(r"(?i)\b((?:MIG-)?GPU-|MIG-)[0-9a-f]{8}[0-9a-f/-]*")


@dataclass(frozen=True)
class Said:
    """What a tool printed on both streams. `status`: None where its time was up; `cut`: it had more to say."""

    output: bytes
    status: int | None
    cut: bool = False


Command = Callable[[Sequence[str], float], Said]


def run_command(argv: Sequence[str], limit_s: float, most: int = OUTPUT_BYTES) -> Said:
    """Run a tool, its output bounded in time and size. OSError where it is not there or cannot be started."""
    path = shutil.which(argv[0], path=os.pathsep.join((os.environ.get("PATH", os.defpath), ROCM_BIN)))
    if path is None:
        raise FileNotFoundError(argv[0])
    process = subprocess.Popen(
        [path, *argv[1:]], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True, env={**os.environ, "LC_ALL": "C"},
    )  # fmt: skip
    out, end, deadline, ended = process.stdout.fileno(), False, time.monotonic() + limit_s, False
    data = bytearray()
    try:
        while not end and len(data) <= most and (left := deadline - time.monotonic()) > 0:
            if select.select([out], [], [], min(left, 0.1))[0]:
                data += (piece := os.read(out, 2**16))
                end = not piece
            else:  # a child that it left behind may hold the pipe
                end = process.poll() is not None
        if end:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        ended = process.poll() is not None
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILLED_S)
    return Said(bytes(data[:most]), process.returncode if ended else None, len(data) > most)


def head(
    env: Mapping[str, Any],
    run_info: Mapping[str, Any],
    command: Command = run_command,
    environ: Mapping[str, str] | None = None,
    root: Path = Path("/"),
    clock: Callable[[], float] = time.monotonic,
    packages: Callable[[], Iterable[Any]] = metadata.distributions,
) -> str:
    """The whole text, without an end of line. `env` and `run_info`: what env.json and run.json hold. Never raises."""
    deadline = clock() + ALL_TOOLS_S
    host = _host(env)
    parts = [
        _part("run", host, lambda: _about(run_info)),
        *(_tool(argv, host, command, deadline - clock()) for argv in TOOLS),
        _part("kernel knobs", host, lambda: _knobs(env, Path(root))),
        _part("environment variables", host, lambda: _variables(os.environ if environ is None else environ)),
        _part("Python packages", host, lambda: _packages(packages)),
    ]
    return "\n".join(f"| {line}".rstrip() for part in parts for line in part)


def _part(title: str, host: str, make: Callable[[], str]) -> list[str]:
    try:
        text = _masked(make(), host)
    except Exception as exc:  # the head of a log must not end a run, whatever a file, package or tool is like
        text = f"cannot be told: {type(exc).__name__}: {_masked(str(exc), host)}"
    return [f"=== {title}", *text.rstrip().split("\n"), ""]


def _tool(argv: Sequence[str], host: str, command: Command, left_s: float) -> list[str]:
    name = shlex.join(argv)
    if left_s <= 0:
        return [f"=== {name}: not run, the {ALL_TOOLS_S:g} s for all tools were used up", ""]
    limit_s = min(TOOL_S, left_s)
    try:
        said = command(argv, limit_s)
        data = said.output
        if said.cut:  # half a line may hold half a secret, which no pattern knows
            data = data[: data.rfind(b"\n") + 1]
        text = tools.clean(data)
        if argv[0] == "uname":
            text = re.sub(r"^(\S+) \S+", r"\1 host", text)
    except FileNotFoundError:
        return [f"=== {name}: not found", ""]
    except Exception as exc:  # as in _part
        reason = f"{type(exc).__name__}: {exc}"
        return [f"=== {name}: {_masked(' '.join(reason.split()), host)}", ""]
    how = f"no end within {limit_s:g} s" if said.status is None else f"exit status {said.status}"
    if said.cut:
        how = f"the first {len(data)} bytes, more is left out"
    return _part(f"{name}: {how}", host, lambda: text)


def _host(env: Mapping[str, Any]) -> str:
    try:
        return str(env["host"]["name"])
    except (KeyError, TypeError):
        return ""


def _masked(text: str, host: str) -> str:
    """Without secrets, serial numbers, and the host's name where it cannot be an ordinary word."""
    text = IDENTITY.sub(r"\1[redacted]", DEVICE.sub(r"\1[redacted]", tools.redact(text)))
    if re.search(r"[\d.-]", host):
        text = re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", "host", text)
    return text.replace("RESULT:", "RESULT :")


def _about(info: Mapping[str, Any]) -> str:
    argv = [str(a) for a in info.get("argv") or sys.argv]
    git = info.get("git") or {}
    state = {True: ", tracked files differ", False: ""}.get(git.get("dirty"), ", unknown whether files differ")
    lines = [f"command: {shlex.join(tools.redact_arguments(argv))}", f"git: {git.get('commit') or 'no commit known'}{state}"]
    for name, of in (("target", ("profile", "key")), ("workload", ("name",))):
        value: Any = info.get(name)
        for key in of:
            value = value.get(key) if isinstance(value, Mapping) else None
        lines.append(f"{name}: {value}")
    lines += [f"{name}: {json.dumps(info[name], default=str, sort_keys=True)}" for name in ABOUT if name in info]
    return "\n".join([*lines, f"python: {' '.join(sys.version.split())}, {sys.executable}"])


def _knobs(env: Mapping[str, Any], root: Path) -> str:
    lines = [f"{name}: {'cannot be read' if value is None else value}" for name, value in (env.get("knobs") or {}).items()]
    for pattern in (*(files for _, files, _ in prepare_sys.SETTINGS), *FILES):
        found: dict[str, int] = {}
        for path in sorted(root.glob(pattern)):
            try:
                value = path.read_text(encoding="utf-8", errors="replace").strip()
            except OSError as exc:
                value = exc.strerror or "cannot be read"
            found[value] = found.get(value, 0) + 1
        lines += [f"/{pattern}: {value}" + (f" [{n} files]" if n > 1 else "") for value, n in found.items()]
    return "\n".join(lines)


def _variables(environ: Mapping[str, str]) -> str:
    found = environment.relevant_variables(dict(environ))
    return "\n".join(f"{name}={shlex.quote(value)}" for name, value in found.items()) or "none that steers a library"


def _packages(distributions: Callable[[], Iterable[Any]]) -> str:
    found = {}
    for one in distributions():
        try:
            name, version = str(one.metadata["Name"]), str(one.version)
        except Exception as exc:  # half an installation: the others are there all the same
            name, version = "one that cannot be read", type(exc).__name__
        found.setdefault(name.lower(), f"{name} {version}")  # the first on the path is the one that is imported
    text = ", ".join(found[name] for name in sorted(found))
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)
