"""Creates the environment `.venv-<device>` when it is missing or out of date, then runs a command in it.

    python3 escher_book/setup_env.py [--device auto|rocm|cuda|cpu] [--torch-index-url URL] [-- COMMAND ARGS...]

Standard library only and any Python >= 3.8, because it runs before anything is installed. torch comes first, from
the index of the device kind (configs/torch_index.json); the project and its tests follow from the default index.
`escher-env.json` in the environment holds digests of what it was made from and is written after each finished
part: unchanged means no work, only a part that changed or was cut short is done again, and an environment that
moved or whose Python is gone is made anew. Exit status 2: set-up failed, with one line why. 130: interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit, urlunsplit

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("rocm", "cuda", "cpu")
OLDEST, NEWEST = (3, 11), (3, 13)
INDEX, PROJECT = "configs/torch_index.json", ("pyproject.toml", "configs/constraints.txt")
BASE_PYTHON = getattr(sys, "_base_executable", sys.executable)  # not the one of an environment about to be emptied
LOCK, LOG, MARKER = "escher.lock", "setup.log", "escher-env.json"


class Stop(Exception):
    """Set-up cannot go on; the message is the one line the user sees."""


def say(text: str, end: str = "\n") -> None:
    """To stderr: stdout belongs to the command that runs next."""
    print(text, end=end, file=sys.stderr, flush=True)


def version_key(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3])


def detect_device(dev: Path = Path("/dev"), path: str | None = None) -> tuple[str, str]:
    """(kind, reason). A device node outranks a tool: a tool may be installed on a login node without the device."""
    for node, kind in (("kfd", "rocm"), ("nvidiactl", "cuda")):
        if (dev / node).exists():
            return kind, f"{dev / node} exists"
    for tool in ("rocminfo", "rocm-smi", "amd-smi"):
        if shutil.which(tool, path=path):
            return "rocm", f"{tool} is on PATH"
    smi = shutil.which("nvidia-smi", path=path)
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        if smi and subprocess.run([smi, "-L"], capture_output=True, timeout=20).returncode == 0:
            return "cuda", "nvidia-smi works"
    return "cpu", "no AMD or NVIDIA device or tool found"


def read_index(path: Path) -> dict:
    """The torch versions and the index of each device kind, checked."""
    name = f"{path.parent.name}/{path.name}"
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise Stop(f"{name} is not JSON: {error}") from None

    def check(keys: str, pattern: str, expected: str) -> None:
        value = table
        for key in keys.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if not (isinstance(value, str) and re.match(pattern, value)):
            raise Stop(f"{name}: {keys} is {json.dumps(value)}; expected {expected}")

    for key in ("pinned", "minimum"):
        check(key, r"\d+(\.\d+)+$", 'a torch version, e.g. "2.13.0"')
    for kind in KINDS:
        check(f"index.{kind}.url", r"(https?|file)://.", "the URL of a package index")
    return table


def python_version(python: str | Path, needs: str = "sys") -> str:
    """Such as "3.11.7"; empty when it does not run or lacks a module of `needs`."""
    argv = [str(python), "-I", "-S", "-c", f"import {needs}, sys; print('%d.%d.%d' % sys.version_info[:3])"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
        if done.returncode == 0:
            return done.stdout.strip()
    return ""


def find_python(running: str = BASE_PYTHON, path: str | None = None) -> tuple[str, str]:
    """(executable, version): the running Python if it fits, else the newest on PATH that does run."""
    names = [f"python3.{minor}" for minor in range(NEWEST[1], OLDEST[1] - 1, -1)]
    folders = (os.environ.get("PATH", "") if path is None else path).split(os.pathsep)
    found = []
    for candidate in [running] + [os.path.join(folder, name) for name in names for folder in folders if folder]:
        if os.access(candidate, os.X_OK):
            version = python_version(candidate, "ensurepip, venv")  # Debian splits these two off
            if version and OLDEST <= version_key(version)[:2] <= NEWEST:
                return candidate, version
            found.append(f"{candidate} ({version or 'does not run, or has no venv and ensurepip'})")
    raise Stop(
        f"needs Python 3.{OLDEST[1]} to 3.{NEWEST[1]}; found {', '.join(found) or 'none'}; get one with `apt install "
        "python3 python3-venv` (Debian 12, Ubuntu 24.04) or `pyenv install 3.12`, then add PYTHON=<its path>"
    )


def without_secret(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def no_answer(index_url: str, timeout_s: float = 5.0) -> str:
    """Why the index does not answer, or "" when it does. Proxies: the environment's. Asked before pip is, because
    pip retries an unreachable index for minutes and then takes what other indices in its configuration offer."""
    if urlsplit(index_url).scheme not in ("http", "https"):
        return ""
    reason = [f"no answer in {timeout_s:g} s"]

    def ask() -> None:
        try:
            urllib.request.urlopen(without_secret(index_url).rstrip("/") + "/torch/", timeout=timeout_s).close()
            reason[0] = ""
        except urllib.error.HTTPError as error:  # 407 and 5xx are a proxy's answer, not the index's
            reason[0] = f"HTTP {error.code}" if error.code == 407 or error.code >= 500 else ""
        except Exception as error:  # no connection, timeout, not a URL: the text is what counts
            cause = getattr(error, "reason", error)  # pip has certificates of its own: let it judge
            reason[0] = "" if isinstance(cause, ssl.SSLCertVerificationError) else str(cause) or repr(cause)

    asking = threading.Thread(target=ask, daemon=True)  # name resolution knows no timeout of its own
    asking.start()
    asking.join(timeout_s + 1)
    return reason[0]


def torch_source(kind: str, table: dict, override: str) -> tuple[str, str]:
    """(requirement, index URL or "" for pip's default index). A fall-back is said; a URL the user gave has none."""
    url = override or table["index"][kind]["url"]
    requirement = f"torch>={table['minimum']}" if override else f"torch=={table['pinned']}"
    why = no_answer(url)
    if not why:
        return requirement, url
    lost = f"{without_secret(url)} does not answer ({why})"
    if override:
        raise Stop(f"{lost}; check TORCH_INDEX_URL")
    if kind == "rocm":
        raise Stop(f"{lost} and no other index has torch for ROCm; set TORCH_INDEX_URL to a mirror, or DEVICE=cpu")
    size = ", which may have a CUDA build of several GB only" if kind == "cpu" else ""
    say(f"set-up: {lost}: torch {table['pinned']} comes from pip's default index instead{size}")
    return requirement, ""


def last_error(log: Path, start: int) -> str:
    """The line of pip's output, from byte `start` on, that says what went wrong."""
    text = log.read_bytes()[start:].decode("utf-8", "replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"error\b", line, re.I) and "dependency resolver" not in line]
    return (errors or lines or ["no output"])[-1]


def step(what: str, argv: list[str], root: Path, log: Path, lock: int) -> None:
    """Runs one command with its output in `log`, and shows one line with the seconds it took."""
    start = time.monotonic()
    env = dict(os.environ, PIP_USER="0", PIP_NO_INPUT="1", PIP_DISABLE_PIP_VERSION_CHECK="1", PYTHONUTF8="1")
    say(f"set-up: {what} ...", end="")
    ended = "\n"
    try:
        with open(log, "ab") as out:
            shown = " ".join(shlex.quote(without_secret(word) if "://" in word else word) for word in argv)
            out.write(f"\n$ {shown}\n".encode("utf-8", "surrogateescape"))
            out.flush()
            begin = out.tell()
            # The child holds the lock too: should this process be killed, nobody else starts beside a running pip.
            files = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out, "pass_fds": (lock,)}
            status = subprocess.run(argv, cwd=str(root), env=env, **files).returncode
        ended = f" {time.monotonic() - start:.0f} s\n"
    finally:
        say(ended, end="")
    if status:
        raise Stop(f"{what} failed: {last_error(log, begin)} (log: {log})")


def pip(venv: Path) -> list[str]:
    """-I keeps a PYTHONPATH out of it. A home that cannot be written, or is not there, means no cache."""
    chosen = os.environ.get("PIP_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
    cache = [] if chosen or os.access(os.path.expanduser("~"), os.W_OK) else ["--no-cache-dir"]
    options = ["--progress-bar", "off", "--retries", "3", "--timeout", "60", *cache]
    return [str(venv / "bin/python"), "-I", "-X", "utf8", "-m", "pip", "install", *options]


def verify_torch(venv: Path, kind: str, minimum: str) -> str:
    """torch's version; refuses a torch that does not import, is too old or was built for another device."""
    code = "import json, torch; print(json.dumps([torch.__version__, torch.version.hip, torch.version.cuda]))"
    argv = [str(venv / "bin/python"), "-I", "-X", "utf8", "-c", code]
    done = subprocess.run(argv, capture_output=True, encoding="utf-8", errors="replace")
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise Stop(f"torch does not import in {venv.name}: {reason}")
    version, hip, cuda = json.loads(done.stdout.splitlines()[-1])
    if version_key(version) < version_key(minimum):
        raise Stop(f"torch {version} is in {venv.name}; expected {minimum} or newer: check TORCH_INDEX_URL")
    if kind != "cpu" and not {"rocm": hip, "cuda": cuda}[kind]:
        build = f"ROCm {hip}" if hip else f"CUDA {cuda}" if cuda else "the CPU only"
        need = f"{kind} needs its own build: set TORCH_INDEX_URL to an index that has one, or DEVICE=cpu"
        raise Stop(f"torch {version} in {venv.name} is built for {build}; {need}")
    return version


def drop_half_installed(venv: Path) -> None:
    """What a killed pip leaves behind looks installed to the next one: RECORD is written last."""
    for site in venv.glob("lib/python*/site-packages"):
        for entry in [*site.glob("~*"), *(d for d in site.glob("*.dist-info") if not (d / "RECORD").exists())]:
            shutil.rmtree(str(entry), ignore_errors=True)


def locked(venv: Path) -> IO:
    """Takes the lock, until the file is closed; kept inside the environment so that it needs no file beside it."""
    venv.mkdir(exist_ok=True)
    file = open(venv / LOCK, "a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say(f"set-up: another set-up works on {venv.name}; waiting for it")
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        say(f"set-up: {venv} takes no lock ({error.strerror}); run no second set-up beside this one")
    return file


def digest(*parts: str | bytes) -> str:
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def state(root: Path, venv: Path, kind: str, override: str) -> tuple[bool, bool, dict]:
    """(torch part done, project part done, the marker to write when both are). The Python is the environment's own:
    a shell with another `python3` does not make it anew. So no override keeps what an earlier one installed."""
    version = python_version(venv / "bin/python").rpartition(".")[0]
    goal = {
        "torch": digest(str(root), kind, version, (root / INDEX).read_bytes()),
        "torch_index": digest(override),
        "project": digest(*((root / name).read_bytes() for name in PROJECT)),
    }
    marker: dict = {}
    with contextlib.suppress(OSError, ValueError, TypeError):
        marker = dict(json.loads((venv / MARKER).read_text(encoding="utf-8")))
    same_index = not override or marker.get("torch_index") == goal["torch_index"]
    torch_done = bool(version) and marker.get("torch") == goal["torch"] and same_index
    if torch_done:
        goal["torch_index"] = marker.get("torch_index")
    return torch_done, torch_done and marker.get("project") == goal["project"], goal


def write_marker(venv: Path, marker: dict) -> None:
    (venv / "new.json").write_text(json.dumps(marker) + "\n", encoding="utf-8")
    os.replace(str(venv / "new.json"), str(venv / MARKER))


def prepare(root: Path, kind: str, why: str, override: str) -> tuple[Path, bool]:
    """(the environment for `kind`, whether anything had to be done for it)."""
    table = read_index(root / INDEX)
    venv = root / f".venv-{kind}"
    if state(root, venv, kind, override)[1]:
        return venv, False
    start = time.monotonic()
    with locked(venv) as file:
        lock = file.fileno()
        torch_done, project_done, _ = state(root, venv, kind, override)
        if project_done:
            return venv, False
        log = venv / LOG
        say(f"set-up: {venv.name} for {kind} ({why}); log: {log}")
        if not torch_done:
            requirement, url = torch_source(kind, table, override)  # may stop: nothing has been removed yet
            python, version = find_python()
            for entry in venv.iterdir():
                if entry.name != LOCK:
                    shutil.rmtree(str(entry)) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
            step(f"Python {version} from {python}", [python, "-I", "-m", "venv", str(venv)], root, log, lock)
            index = ["--index-url", url] if url else []
            where = without_secret(url) or "the default index"
            step(f"{requirement} from {where}", [*pip(venv), *index, requirement], root, log, lock)
            verify_torch(venv, kind, table["minimum"])
        goal = state(root, venv, kind, override)[2]
        write_marker(venv, dict(goal, project=None))
        drop_half_installed(venv)
        project = [*pip(venv), "-c", PROJECT[1], "-e", ".[test]"]
        step("escher, its report tools and its tests", project, root, log, lock)
        (venv / MARKER).unlink()  # should a requirement have replaced torch, this is not to be built upon
        version = verify_torch(venv, kind, table["minimum"])
        write_marker(venv, goal)
    say(f"set-up: {venv.name} is ready: torch {version} for {kind}, {time.monotonic() - start:.0f} s in all")
    return venv, True


def run_in(venv: Path, command: list[str]) -> None:
    """Replaces this process by the command, as if the environment were activated."""
    path = os.pathsep.join([str(venv / "bin"), os.environ.get("PATH", os.defpath)])
    env = dict(os.environ, PATH=path, VIRTUAL_ENV=str(venv), PYTHONUTF8="1")
    env.pop("PYTHONHOME", None)
    program = shutil.which(command[0], path=path)
    if program is None:
        raise Stop(f"no command {command[0]} in {venv / 'bin'} or on PATH")
    os.execve(program, command, env)


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(prog="setup_env.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=("auto", *KINDS), default="auto")
    parser.add_argument("--torch-index-url", default="", help="instead of the one in configs/torch_index.json")
    args = parser.parse_args(argv[:cut])
    try:
        kind, why = detect_device() if args.device == "auto" else (args.device, "asked for")
        venv, worked = prepare(root, kind, why, args.torch_index_url or os.environ.get("TORCH_INDEX_URL", ""))
        if argv[cut + 1 :]:
            run_in(venv, argv[cut + 1 :])
        elif not worked:
            say(f"set-up: {venv.name} is up to date ({kind}: {why})")
    except (Stop, OSError) as error:
        text = f"{error.filename or root}: {error.strerror or error}" if isinstance(error, OSError) else error
        say(f"set-up: {text}")
        return 2
    except KeyboardInterrupt:
        say("set-up: interrupted; the next call goes on from the last finished part")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
