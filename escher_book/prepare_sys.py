"""--prepare-sys: tunes the machine for the time of a run, and puts everything back, however the run ends.

What was changed is written to a state file before the first change. A guardian, a child in a session of its own, waits
for the end of a pipe that only the driver holds, then puts back what the file still lists. Where the guardian was killed
too, the next run does it, or `escher doctor --restore`. All paths lie below a root, which is "/" but for tests.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from escher_kernels import host
from escher_kernels.records import RecordError, read_json, write_json_atomic

DONE, ALREADY, REFUSED, NOT_THERE = "done", "already", "refused", "not there"
AMD_LEVEL = "sys/class/drm/card*/device/power_dpm_force_performance_level"
SETTINGS = (  # name, files below the root, what a run wants; they are put back
    ("NUMA balancing", "proc/sys/kernel/numa_balancing", "0"),
    ("transparent huge pages", "sys/kernel/mm/transparent_hugepage/enabled", "always"),
    ("CPU governor", "sys/devices/system/cpu/cpufreq/policy*/scaling_governor", "performance"),
    ("GPU performance level", AMD_LEVEL, "high"),
)
ONCE = (  # nothing to put back; compaction comes second, since it joins what dropped pages leave
    ("drop caches", "proc/sys/vm/drop_caches", "3"),
    ("compaction", "proc/sys/vm/compact_memory", "1"),
)
AMD = "0x1002"
PLACE, FILE = "run/escher", "prepare_sys.json"
MEND = "escher doctor --restore"
WHY = {errno.EACCES: "; root may", errno.EPERM: "; root may", errno.EROFS: "; in a container, set it on the host"}
Say = Callable[[str], None]


@dataclass(frozen=True)
class Step:
    """What became of one file. `path` is below the root; `before` and `after` are None where nothing was read."""

    name: str
    path: str
    status: str  # done, already, refused, not there
    before: str | None = None
    after: str | None = None
    detail: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def describe(steps: Iterable[Step]) -> list[str]:
    """One line a step; files of one step that fared alike share it."""
    value = {DONE: " ({0.before} -> {0.after})", ALREADY: " ({0.after})"}
    return _counted([
        f"{s.name}: {s.status}" + (value[s.status].format(s) if s.after else "") + (f": {s.detail}" if s.detail else "")
        for s in steps
    ])  # fmt: skip


def _counted(lines: list[str]) -> list[str]:
    return [f"{line} [{n} files]" if (n := lines.count(line)) > 1 else line for line in dict.fromkeys(lines)]


def _why(exc: OSError) -> str:
    return (exc.strerror or str(exc)) + WHY.get(exc.errno, "")


def _read(path: Path) -> str:
    """The value in force: of "always [madvise] never" the word in brackets."""
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    chosen = re.search(r"\[(\S+)\]", text)
    return chosen[1] if chosen else text


def _write(path: Path, value: str, first: Callable[[], None] | None = None) -> None:
    """Write to a file that is there; `first` is called once it could be opened."""
    with open(os.open(path, os.O_WRONLY | os.O_TRUNC), "w", encoding="utf-8") as out:
        if first:
            first()
        out.write(f"{value}\n")


def _files(root: Path, pattern: str) -> list[str]:
    """Files below the root. Of graphics cards AMD's alone, and not their connectors (card0-DP-1)."""
    found = sorted(p.relative_to(root).as_posix() for p in root.glob(pattern))
    if pattern != AMD_LEVEL:
        return found
    cards = [p for p in found if re.fullmatch(r"card\d+", p.split("/")[3])]
    return [p for p in cards if host.text((root / p).with_name("vendor")) == AMD]


def _look(root: Path) -> tuple[list[Step], list[dict[str, str]]]:
    """The steps that are settled as they stand, and the changes to make."""
    steps, changes = [], []
    for name, pattern, wanted in SETTINGS:
        files = _files(root, pattern)
        if not files:
            steps.append(Step(name, pattern, NOT_THERE))
        for path in files:
            try:
                before = _read(root / path)
            except OSError as exc:
                steps.append(Step(name, path, REFUSED, detail=f"cannot be read: {_why(exc)}"))
                continue
            if before == wanted:
                steps.append(Step(name, path, ALREADY, before, before))
            else:
                changes.append({"name": name, "path": path, "before": before, "wrote": wanted})
    return steps, changes


def _change(root: Path, name: str, path: str, before: str, wrote: str) -> Step:
    try:
        _write(root / path, wrote)
        after = _read(root / path)
        if after == wrote:
            return Step(name, path, DONE, before, after)
        why = f"it reads {after} after {wrote} was written"
    except OSError as exc:
        why = _why(exc)
    with contextlib.suppress(OSError):  # what did not take must not have half taken
        _write(root / path, before)
    return Step(name, path, REFUSED, before, detail=why)


def _once(root: Path, name: str, path: str, value: str) -> Step:
    try:
        _write(root / path, value, os.sync if name == "drop caches" else None)
    except FileNotFoundError:
        return Step(name, path, NOT_THERE)
    except OSError as exc:
        return Step(name, path, REFUSED, detail=_why(exc))
    return Step(name, path, DONE)


# ---- the state file ----


def _started(pid: int) -> int:
    """Start time of a process in clock ticks (field 22 of its stat), so that a reused pid is another; 0: it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return 0 if fields[0] in "ZX" else int(fields[19])
    except (OSError, IndexError, ValueError):
        return 0


def _state(path: Path) -> dict[str, Any] | None:
    """A state file, checked, since root writes what it says; None where there is none. RecordError: one line, why not."""
    if not os.path.lexists(path):
        return None
    data = read_json(path)
    try:
        good = type(data["pid"]) is int and type(data["started"]) is int and data["started"] > 0
        for change in data["changes"]:
            parts = PurePosixPath(change["path"])
            good &= any(len(parts.parts) == p.count("/") + 1 and parts.match(p) for _, p, _ in SETTINGS)
            good &= change.keys() == {"name", "path", "before", "wrote"} and all(type(v) is str for v in change.values())
    except (KeyError, TypeError, AttributeError):
        good = False
    if not good:
        raise RecordError(f"{path}: no state of --prepare-sys; set by hand what it may have changed, then delete it")
    return data


def _alive(state: dict[str, Any]) -> bool:
    return _started(state["pid"]) == state["started"]


def _places(root: Path, fallback_dir: Path | None) -> list[Path]:
    return [d.absolute() / FILE for d in (Path(root) / PLACE, *([Path(fallback_dir)] if fallback_dir else []))]


def _usable(place: Path) -> bool:
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        return os.access(place.parent, os.W_OK | os.X_OK)
    return False


@contextlib.contextmanager
def _locked(*places: Path) -> Iterator[None]:
    """One process at a time looks at the state files there and acts on them; on a file system without locks, any."""
    with contextlib.ExitStack() as stack:
        for path in places:
            with contextlib.suppress(OSError):
                descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
                stack.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def _restore(path: Path, root: Path, owner: tuple[int, int] | None = None) -> tuple[list[str], bool]:
    """Restore what `owner`, or else a run that is gone, changed: lines to say, and whether nothing is left over.

    The caller holds the lock. What no longer has our value is somebody else's, and stays.
    """
    try:
        state = _state(path)
    except RecordError as exc:
        return [str(exc)], False
    if state is None or (owner and (state["pid"], state["started"]) != owner):
        return [], True
    if not owner and _alive(state):
        return [f"another run, pid {state['pid']}, holds them"], False
    lines, failed = [], []
    for c in state["changes"]:
        file, name, before, wrote = root / c["path"], c["name"], c["before"], c["wrote"]
        try:
            now = _read(file)
            if now == wrote:
                _write(file, before)
                if (then := _read(file)) != before:
                    raise OSError(errno.EINVAL, f"it reads {then} after {before} was written")
                lines.append(f"{name}: back to {before}")
            elif now != before:
                lines.append(f"{name}: left at {now}, which somebody set after we wrote {wrote}")
        except FileNotFoundError:
            lines.append(f"{name}: {c['path']} is gone")
        except OSError as exc:
            failed.append(f"{name}: NOT back to {before}: {_why(exc)}; mend: {MEND}")
    try:
        if not failed:
            path.unlink()
    except OSError as exc:
        failed.append(f"{path}: cannot be removed: {_why(exc)}")
    head = [] if owner else [f"settings left by a killed run, pid {state['pid']}"]
    return _counted([*head, *lines, *failed]), not failed


def left_over(root: Path = Path("/"), fallback_dir: Path | None = None) -> dict[str, Any] | None:
    """What a killed run left: message, mend, state (its file), pid, paths. None: nothing, or the run is still at it."""
    for path in _places(root, fallback_dir):
        found = {"mend": MEND, "state": str(path), "pid": None, "paths": []}
        try:
            state = _state(path)
        except RecordError as exc:
            return {**found, "message": str(exc), "mend": "see the message"}
        if state and not _alive(state):
            message, paths = f"settings left by a killed run, pid {state['pid']}", [c["path"] for c in state["changes"]]
            return {**found, "message": message, "pid": state["pid"], "paths": paths}
    return None


def restore(root: Path, say: Say, fallback_dir: Path | None = None) -> bool:
    """Put back what killed runs left; whether nothing is left over."""
    places = _places(root, fallback_dir)
    with _locked(*places):
        results = [_restore(path, root) for path in places]
    for line in [line for lines, _ in results for line in lines] or ["no settings are left over"]:
        say(line)
    return all(whole for _, whole in results)


# ---- a run ----


class _Refused(Exception):
    """Nothing may be changed; why."""


def _claim(root: Path, fallback_dir: Path, say: Say, owner: dict[str, int]) -> tuple[Path, list[Step], list[dict[str, str]]]:
    """Make this process the owner: its state file, the steps that are settled, the changes to make. Raises _Refused."""
    places = _places(root, fallback_dir)
    usable = next(filter(_usable, places), None)
    with _locked(*places):
        results = [_restore(path, root) for path in places]
        held = [lines.pop() for lines, whole in results if not whole]
        for line in (line for lines, _ in results for line in lines):
            say(line)
        if held:
            raise _Refused(held[0])
        if not usable or not owner["started"]:
            where = places[0].parent if owner["started"] else "/proc"
            raise _Refused(f"no way back could be kept: {where} cannot be used")
        steps, changes = _look(root)  # only now: what another run set is no value to come back to
        try:
            write_json_atomic(usable, {**owner, "changes": changes})
        except RecordError as exc:
            raise _Refused(f"no way back could be kept: {exc}") from None
    return usable, steps, changes


@contextlib.contextmanager
def prepared(root: Path, say: Say, fallback_dir: Path) -> Iterator[list[Step]]:
    """Tune for the time of the block. Yields what became of each step; `say` tells what was put back.

    Nothing here ends a run: what cannot be done is a step that was refused.
    """
    root, owner = Path(root).absolute(), {"pid": os.getpid(), "started": _started(os.getpid())}
    try:
        state, steps, changes = _claim(root, fallback_dir, say, owner)
    except _Refused as exc:
        yield [Step(name, path, REFUSED, detail=str(exc)) for name, path, _ in (*SETTINGS, *ONCE)]
        return
    guardian, lines = None, []
    try:
        try:
            guardian = _guardian(state, root, owner)
            steps += [_change(root, **c) for c in changes]
        except OSError as exc:
            why = f"no guardian could be started: {_why(exc)}"
            steps += [Step(c["name"], c["path"], REFUSED, c["before"], detail=why) for c in changes]
        done = {s.path for s in steps if s.status == DONE}
        with contextlib.suppress(RecordError):  # what was refused need not stay in it
            write_json_atomic(state, {**owner, "changes": [c for c in changes if c["path"] in done]})
        steps += [_once(root, *once) for once in ONCE]
        yield steps
    finally:
        try:
            with _locked(state):
                lines, _ = _restore(state, root, tuple(owner.values()))
        finally:
            if guardian:
                guardian.stdin.close()  # it does what a second Ctrl-C left undone, and ends
                guardian.wait()
        for line in lines:
            say(line)


def _guardian(state: Path, root: Path, owner: dict[str, int]) -> subprocess.Popen:
    """Nobody else holds the writing end of its standard input, so that ends when this process does."""
    me = map(str, owner.values())
    return subprocess.Popen(
        [sys.executable, "-m", "escher_book.prepare_sys", str(state), "--root", str(root), "--owner", *me],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        cwd=Path(__file__).resolve().parent.parent,
    )  # fmt: skip


def guard(argv: Sequence[str] | None = None) -> int:
    """The guardian: wait for the end of the owner, then restore what it could not."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="python -m escher_book.prepare_sys")
    parser.add_argument("state", type=Path)
    parser.add_argument("--root", type=Path, default=Path("/"))
    parser.add_argument("--owner", type=int, nargs=2, required=True, metavar=("PID", "STARTED"))
    given = parser.parse_args(argv)
    while os.read(0, 4096):
        pass
    with _locked(given.state):
        return 0 if _restore(given.state, given.root, tuple(given.owner))[1] else 1


if __name__ == "__main__":
    sys.exit(guard())
