"""Records: what was measured, as plain data on disk.

A family's file holds one JSON object a line. The first line is the `Run` header, every other line one `Record`.
A line is flushed to the disk before the next measurement starts, so a killed run loses at most the line it was
writing. Raw samples and declared work are stored; rates, means and percentages never are: they are derived.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1  # 1: first version. Raise it when a field changes its meaning, and say here what changed.

LONE_SURROGATES = "backslashreplace"  # argv and paths that are not UTF-8 hold them; \udcXX is how JSON escapes one

ROLES = ("case", "search", "anchor", "warmup", "probe", "pair", "mark")


class RecordError(ValueError):
    """A record file that cannot be read or written. The message is one line: the file, what is wrong, the mend."""


@dataclass(frozen=True)
class Run:
    """Header of a record file: where the numbers that follow come from."""

    run_id: str
    family: str
    method: int
    workload: dict[str, Any]
    target: dict[str, Any]  # asked, profile key, what was found, whether the two are one device
    parameters: dict[str, Any]
    software: dict[str, Any]  # python, torch, driver, the interpreter that measured
    git: dict[str, Any]  # commit, dirty
    argv: list[str]
    created_utc: str
    source: str = "measured"  # or "synthetic": generated, shown with a watermark
    schema: int = SCHEMA


@dataclass(frozen=True)
class Record:
    """One block of one case: raw samples and declared work.

    `samples_s` are seconds for `calls_per_sample` calls each; `flop` and `bytes_moved` are the work of ONE call.
    A case that could not run has `skipped` (the reason) and no samples; a wrong result has `error` with
    ``ok: false`` and no samples. `value` with `unit` is for a measurement that is no time. `of_blocks`: the blocks that the
    case gets in all, so that a reader can tell whether it is whole. A record of role "mark" is no measurement: from it on
    another process wrote (`params`: when, how it was called, and `kind`: "iteration" or "resumed").
    """

    family: str
    case: str
    role: str = "case"
    params: dict[str, Any] = field(default_factory=dict)
    backend: str | None = None  # what really ran
    block: int = 0
    samples_s: tuple[float, ...] = ()
    calls_per_sample: int = 1
    flop: int | None = None
    bytes_moved: int | None = None
    cache: str | None = None  # "cold", "warm", or None where it does not apply
    iteration: int = 1  # which fresh process of the run, from 1
    rank: int = 0
    pair_id: str | None = None
    order: int | None = None
    started_s: float | None = None  # since the header was written
    error: dict[str, Any] | None = None
    noise: dict[str, Any] | None = None
    device_state: dict[str, Any] | None = None
    value: float | None = None
    unit: str | None = None
    reported: dict[str, Any] | None = None
    skipped: str | None = None
    flags: tuple[str, ...] = ()
    source: str = "measured"
    of_blocks: int | None = None


_RUN_FIELDS = {f.name: f for f in dataclasses.fields(Run)}
_RECORD_FIELDS = {f.name: f for f in dataclasses.fields(Record)}
_REQUIRED_RUN = [f.name for f in _RUN_FIELDS.values() if f.default is dataclasses.MISSING]


def _default(f: dataclasses.Field) -> Any:
    return f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default


def to_line(item: Run | Record) -> str:
    """One JSON line. Fields at their default are left out; NaN and infinity raise `RecordError`."""
    if isinstance(item, Run):
        data = {"kind": "run", **dataclasses.asdict(item)}
    else:
        data = {
            name: list(value) if isinstance(value, tuple) else value
            for name, f in _RECORD_FIELDS.items()
            if (value := getattr(item, name)) != _default(f) or name == "iteration"
        }
    try:
        return json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    except ValueError as exc:
        name = getattr(item, "case", "header")
        raise RecordError(f"{item.family}: {name}: {exc}; a record holds finite numbers or null") from None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_FIELD_TYPES = {
    "samples_s": (lambda v: isinstance(v, list) and all(map(_is_number, v)), "list of numbers"),
    "flags": (lambda v: isinstance(v, list) and all(isinstance(f, str) for f in v), "list of texts"),
    "calls_per_sample": (lambda v: _is_count(v) and v > 0, "whole number above 0"),
    **dict.fromkeys(("block", "of_blocks", "iteration", "rank", "order", "flop", "bytes_moved"), (_is_count, "whole number")),
    **dict.fromkeys(("started_s", "value"), (_is_number, "number")),
    **dict.fromkeys(
        ("params", "error", "noise", "device_state", "reported"), (lambda v: isinstance(v, dict), "object")
    ),
}


def _record(data: dict[str, Any]) -> Record:
    unknown = set(data) - set(_RECORD_FIELDS)
    if unknown:
        raise ValueError(f"unknown field {sorted(unknown)[0]!r}")
    for name in ("family", "case"):
        if not isinstance(data.get(name), str):
            raise ValueError(f"field {name!r} is missing or no text")
    if data.get("role", "case") not in ROLES:
        raise ValueError(f"role is {data['role']!r}, expected one of {', '.join(ROLES)}")
    if isinstance(data.get("error"), dict) and not isinstance(data["error"].get("ok"), bool):
        raise ValueError("error does not tell whether the result is ok")
    for name, (good, what) in _FIELD_TYPES.items():
        if name in data and data[name] is not None and not good(data[name]):
            raise ValueError(f"{name} is no {what}")
    return Record(**{**data, "samples_s": tuple(data.get("samples_s", ())), "flags": tuple(data.get("flags", ()))})


def _run(data: dict[str, Any], path: Path) -> Run:
    schema = data.get("schema")
    if schema != SCHEMA:
        raise RecordError(
            f"{path}: record schema {schema!r}, this version reads {SCHEMA}; "
            f"read it with the version of escher that wrote it"
        )
    missing = [name for name in _REQUIRED_RUN if name not in data]
    if missing:
        raise ValueError(f"header lacks {missing[0]!r}")
    unknown = set(data) - set(_RUN_FIELDS)
    if unknown:
        raise ValueError(f"unknown field {sorted(unknown)[0]!r}")
    return Run(**data)


@dataclass(frozen=True)
class RecordFile:
    run: Run
    records: list[Record]
    truncated: bool  # the last line was cut off by a kill or a full disk, and was left out


def _forbid_constant(name: str) -> float:
    raise ValueError(f"{name} is not allowed")


def read(path: Path) -> RecordFile:
    """Read a record file. Raises `RecordError` naming file and line; only a cut-off last line is forgiven."""
    path = Path(path)
    try:
        raw = path.read_bytes()
    except OSError as exc:
        raise RecordError(f"{path}: cannot be read: {exc.strerror or exc}") from None
    lines = raw.split(b"\n")
    tail = lines.pop()  # b"" after a whole last line
    run, records = None, []
    for number, line in enumerate([*lines, *([tail] if tail else [])], start=1):
        last_and_cut = number > len(lines)
        if not line.strip():
            continue
        try:
            data = json.loads(line.decode("utf-8"), parse_constant=_forbid_constant)
            if not isinstance(data, dict):
                raise ValueError("no JSON object")
            if run is None:
                if data.pop("kind", None) != "run":
                    raise ValueError("the first line is no run header")
                run = _run(data, path)
            else:
                records.append(_record(data))
        except RecordError:
            raise
        except (ValueError, TypeError) as exc:
            if last_and_cut and run is not None:
                return RecordFile(run, records, truncated=True)
            mend = "delete that line to keep the others" if run else "measure the family again"
            raise RecordError(f"{path}:{number}: corrupt record ({exc}); {mend}") from None
    if run is None:
        raise RecordError(f"{path}: empty; delete the file and measure the family again")
    return RecordFile(run, records, truncated=False)


class Writer:
    """Appends records to a file, each on the disk before `write` returns; one process at a time.

    ``with Writer(path, run) as out: out.write(record)``. A new file begins with the header. An existing one is refused
    (`RecordError`) unless `go_on`: then a cut-off last line is removed and what is there is kept as `before`; its header
    stays. On a failed write (disk full) the half-written line is cut off again, then `RecordError` is raised.
    """

    def __init__(self, path: Path, run: Run, go_on: bool = False):
        self.path, self.count = Path(path), 0
        header = to_line(run)
        self.before = read(self.path) if go_on and self._has_header() else None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "r+b" if self.before else "xb", buffering=0)
        except FileExistsError:
            raise RecordError(f"{self.path}: exists already; go on with --resume, or measure into a new run") from None
        except OSError as exc:
            raise RecordError(write_failed(self.path, exc)) from None
        try:
            self._lock()
            if self.before:
                self._cut_tail()
            else:
                self._append(header)
        except RecordError:
            self._file.close()
            if not self.before:
                self.path.unlink()  # without a header it could be neither read nor measured into again
            raise

    def _has_header(self) -> bool:
        """Whether there is something to go on from; a file whose header was cut off holds nothing and is removed."""
        try:
            with open(self.path, "rb") as there:
                whole = there.readline().endswith(b"\n")
            if not whole:
                self.path.unlink()
            return whole
        except FileNotFoundError:
            return False
        except OSError as exc:
            raise RecordError(write_failed(self.path, exc)) from None

    def _lock(self) -> None:
        """A killed driver can leave a process behind that still measures: two must not write one file."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RecordError(f"{self.path}: another process writes it; wait for it, or end it") from None
        except OSError:  # a file system without locks
            return

    def _cut_tail(self) -> None:
        """Read again, now that nobody else writes, and leave whole lines only."""
        self.before = read(self.path)
        try:
            whole = self.path.read_bytes().rfind(b"\n") + 1
            if not self.before.truncated and whole < self._file.seek(0, os.SEEK_END):
                self._file.write(b"\n")  # a whole line that lacks its end
            else:
                self._file.truncate(whole)
                self._file.seek(whole)
        except OSError as exc:
            raise RecordError(write_failed(self.path, exc)) from None

    def write(self, record: Record) -> None:
        self._append(to_line(record))
        self.count += 1

    def _append(self, line: str) -> None:
        start = self._file.tell()
        data = line.encode("utf-8", LONE_SURROGATES) + b"\n"
        try:
            done = 0
            while done < len(data):
                done += self._file.write(data[done:])
            os.fsync(self._file.fileno())
        except OSError as exc:
            with contextlib.suppress(OSError):  # a reader forgives a cut-off last line
                self._file.truncate(start)
                self._file.seek(start)
            kept = self.count + (len(self.before.records) if self.before else 0)
            raise RecordError(write_failed(self.path, exc) + f"; {kept} records are kept") from None

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()


def write_failed(path: Path, exc: OSError) -> str:
    """One line that says why `path` could not be written and what to do."""
    mend = {
        errno.ENOSPC: "the disk is full; free some space",
        errno.EDQUOT: "the disk quota is used up; free some space",
        errno.EFBIG: "the file-size limit is reached; raise it (ulimit -f)",
        errno.EROFS: "the file system is read-only; choose another RESULTS_DIR",
        errno.EACCES: "no permission; choose another RESULTS_DIR",
    }.get(exc.errno or 0, exc.strerror or str(exc))
    return f"{path}: cannot be written: {mend}"


def write_bytes_atomic(path: Path, data: bytes) -> None:
    """Replace `path` as a whole: readers see the old file or the new one, never a part. `RecordError` if it fails."""
    path = Path(path)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with open(descriptor, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as exc:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise RecordError(write_failed(path, exc)) from None


def write_text_atomic(path: Path, text: str) -> None:
    write_bytes_atomic(path, text.encode("utf-8"))


def write_json_atomic(path: Path, data: Any) -> None:
    text = json.dumps(data, allow_nan=False, ensure_ascii=False, indent=1) + "\n"
    write_bytes_atomic(path, text.encode("utf-8", LONE_SURROGATES))


def read_json(path: Path) -> Any:
    """Parse a JSON file. Raises `RecordError` with file, line and column."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_forbid_constant)
    except OSError as exc:
        raise RecordError(f"{path}: cannot be read: {exc.strerror or exc}") from None
    except json.JSONDecodeError as exc:
        raise RecordError(f"{path}:{exc.lineno}:{exc.colno}: no valid JSON ({exc.msg})") from None
    except ValueError as exc:
        raise RecordError(f"{path}: no valid JSON ({exc})") from None
