"""Samples a collector at an interval into a file of JSON lines, in a process of its own, and reads such a file.

The first line is a header, each other line a sample with the time at which it was really taken: seconds since the start, by
a clock that no one sets. A sample that is late is not made up for. The process ends when its standard input does, however
its parent died, and without a word to anyone when the disk is full: telemetry never disturbs the run.
"""

from __future__ import annotations

import errno
import json
import math
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from escher_kernels.records import RecordError
from escher_kernels.telemetry import Collector

SCHEMA = 1
FEWEST = 3  # samples below which a median and a range say nothing
END_S = 5  # what a poller that was told to end may take


def names(out: Path) -> Iterator[Path]:
    """host.jsonl, host-2.jsonl, ...: a run that is resumed begins a new file, as its clock begins again."""
    yield out
    number = 1
    while True:
        number += 1
        yield out.with_name(f"{out.stem}-{number}{out.suffix}")


def files(folder: Path, collector: str = "host") -> list[Path]:
    """What was sampled in a run, in order."""
    found = []
    for path in names(Path(folder) / f"{collector}.jsonl"):
        if not path.exists():
            return found
        found.append(path)
    return found


def free(out: Path) -> Path:
    """The first of `names` that is not there yet."""
    return next(path for path in names(out) if not path.exists())


# ------------------------------------------------------------------------------------------- in the poller's process


def sample(
    collector: Collector,
    out: Path,
    interval_s: float,
    told_to_end: Callable[[float], bool],
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """Write samples until `told_to_end(seconds)`, which waits that long, is true. Returns why it ended before, else ""."""
    started = clock()
    header = {
        "schema": SCHEMA,
        "collector": collector.name,
        "started_utc": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "interval_s": interval_s,
        "unusable": collector.unusable,
    }
    try:
        descriptor = os.open(free(out), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        try:
            _write(descriptor, header)
            if collector.unusable:
                return collector.unusable
            turn = 0
            while True:
                taken_s = clock() - started
                found = collector.read()
                _write(descriptor, {"time_s": round(taken_s, 6), **{name: _finite(value) for name, value in found.items()}})
                turn = max(turn + 1, math.floor((clock() - started) / interval_s) + 1)
                if told_to_end(min(interval_s, max(0.0, started + turn * interval_s - clock()))):
                    return ""
        finally:
            os.close(descriptor)
    except OSError as exc:
        return f"{out.name}: {exc.strerror or exc}"


def _write(descriptor: int, what: dict[str, Any]) -> None:
    line = json.dumps(what, allow_nan=False).encode("ascii") + b"\n"
    if os.write(descriptor, line) < len(line):  # in one call, so that a line is whole or the last one
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def stdin_ended(seconds: float) -> bool:
    """Wait that long, or until standard input ends: then true. What is written to it means nothing."""
    until = time.monotonic() + seconds
    try:
        while True:
            ready, _, _ = select.select([0], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                return False
            if not os.read(0, 4096):
                return True
    except (OSError, ValueError):  # there is no standard input
        return True


# ---------------------------------------------------------------------------------------------- in the driver's process


@dataclass
class Poller:
    """A poller that was started, or `reason`: why it was not."""

    path: Path
    reason: str = ""
    process: subprocess.Popen[bytes] | None = None

    def stop(self) -> str:
        """End it and wait for that. Returns why it sampled nothing or ended early, else ""."""
        if self.process is None:
            return self.reason
        early = self.process.poll()
        with suppress(OSError):
            self.process.stdin.close()
        for end in (lambda: None, self.process.kill):
            end()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(END_S)
                break
        self.process = None
        errors = self.path.with_suffix(".err")
        with suppress(OSError):
            said = errors.read_text(encoding="utf-8", errors="replace").split("\n")
            self.reason = next((line for line in reversed(said) if line.strip()), "")
            if not self.reason:
                errors.unlink()
        if early is not None and not self.reason:
            self.reason = f"it ended early, with exit status {early}"
        return self.reason


def start(folder: Path, interval_s: float, measuring: Iterable[int] | None = None, collector: str = "host") -> Poller:
    """Sample into `folder` until `stop`, or until this process is gone. Raises nothing: see `Poller.reason`.

    `measuring`: the logical CPUs that the poller keeps away from while there are others; None: those that this process
    would measure on.
    """
    out = Path(folder).absolute() / f"{collector}.jsonl"
    if not 0 < interval_s < math.inf:
        return Poller(out, f"an interval of {interval_s!r} s cannot be; give seconds above 0, e.g. 1")
    if measuring is None:
        from escher_kernels import environment

        measuring = environment.cpu_allowance().cores
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out = free(out)
        with open(out.with_suffix(".err"), "wb") as errors:
            process = subprocess.Popen(
                [
                    sys.executable, "-m", "escher_kernels.telemetry", "--out", str(out), "--interval-s", str(interval_s),
                    "--collector", collector, "--measuring", ",".join(map(str, measuring)),
                ],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True,
                cwd=Path(__file__).resolve().parents[2],
            )  # fmt: skip
    except (OSError, ValueError) as exc:
        return Poller(out, " ".join(str(exc).split()))
    return Poller(out, process=process)


# ------------------------------------------------------------------------------------------------------- reading a file


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], int]:
    """Header, samples, and how many lines were left out because they are no samples; a last line that was cut off in the
    middle is none of these. RecordError where the file cannot be read or has no header."""
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as exc:
        raise RecordError(f"{path}: cannot be read: {exc.strerror or exc}") from None
    header = _object(lines[0])
    if header is None or header.get("schema") != SCHEMA:
        raise RecordError(f"{path}:1: no header of telemetry (schema {SCHEMA}); delete the file, nothing can be read from it")
    torn = bool(lines[-1]) and _object(lines[-1]) is None
    body = [_object(line) for line in lines[1 : len(lines) - torn] if line.strip()]
    samples = [s for s in body if s and _is_number(s.get("time_s"))]
    return header, samples, len(body) - len(samples)


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def summary(path: Path) -> dict[str, Any]:
    """What a page shows of a file: number of samples, the longest time between two, and of each quantity in how many
    samples it was read, its least, median and largest value (None: in none). `note` says what makes it worthless, "" else.
    """
    header, samples, left_out = read(path)
    times = [s["time_s"] for s in samples]
    note = header.get("unusable") or ""
    if not note and len(samples) < FEWEST:
        note = f"{len(samples)} samples are too few to say anything; {FEWEST} are needed"
    return {
        "collector": header.get("collector"),
        "started_utc": header.get("started_utc"),
        "interval_s": header.get("interval_s"),
        "count": len(samples),
        "left_out": left_out,
        "duration_s": max(times) - min(times) if times else None,
        "longest_gap_s": max((b - a for a, b in zip(times, times[1:], strict=False)), default=None),
        "note": note,
        "quantities": {name: _range([s.get(name) for s in samples]) for name in _quantities(samples)} if not note else {},
    }


def _quantities(samples: list[dict[str, Any]]) -> list[str]:
    return [name for name in dict.fromkeys(name for s in samples for name in s) if name != "time_s"]


def _range(values: list[Any]) -> dict[str, Any]:
    read = [v for v in values if _is_number(v)]
    return {
        "count": len(read),
        "min": min(read, default=None),
        "median": statistics.median(read) if read else None,
        "max": max(read, default=None),
    }
