"""rccl-tests and nccl-tests: collectives between GPUs, timed back to back. One reader for both and for all generations.

A table names its columns, and they differ by version and option, so rows are read by the header. A row has a block of
figures out of place and one in place: mean time in us (`-C 1`: of the launch alone, which is no time of a collective),
algbw = size / time, busbw = algbw x a factor of operation and ranks. Traps:

- Before ROCm 7.15 and nccl-tests 2.17 a log does not name its collective. What size, count, redop, root, busbw and the
  unchecked in-place results of alltoall say leaves one; with `-c 0`, all_gather and alltoall may look the same.
- "Out of bounds values : 0 OK" stands there with the check off (`-c 0`, N/A) too. The average is over all sizes.
- One header a process means mpirun of a build without MPI: each process ran alone, on the same GPUs.
- Warnings of the library cut rows. A row must be whole, and its size, count, time and rates must agree, or it is flagged.
- Rates too small for two decimals are printed 0.00, and are left out. So are rows of 0 bytes.
- JSON (`-J`) holds the process environment, which is never read here, and one device a process.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from escher_kernels.records import Record
from validation.tools import (
    FAIL,
    INCOMPLETE,
    INVALID,
    UNPARSED,
    UNSUPPORTED,
    Command,
    Parsed,
    Place,
    clean,
    reading,
    redact,
)

NAME = "rccl-tests / nccl-tests"
TOOL = "rccl"
EXECUTABLES = ("all_reduce_perf", "all_gather_perf", "reduce_scatter_perf", "alltoall_perf", "broadcast_perf")
TOLERANCE = 0.01  # between figures of one row, beyond what printing rounds


def commands(place: Place) -> list[Command]:
    """Each collective over all devices of the node in one process, 1 MiB to 512 MiB, checked once a size."""
    if place.kind not in ("rocm", "cuda") or place.devices < 2:
        return []
    options = ("-b", "1M", "-e", "512M", "-f", "2", "-g", str(place.devices), "-d", "bfloat16", "-n", "20", "-w", "5",
               "-c", "1")  # fmt: skip
    return [
        Command(TOOL, name, (place.executables[name], *options), {"LC_ALL": "C"})
        for name in EXECUTABLES
        if name in place.executables
    ]


@dataclass(frozen=True)
class Collective:
    """How a row of one collective looks. `gathers`: size is count x element x ranks. None: either."""

    gathers: bool
    reduces: bool | None
    rooted: bool
    factor: Callable[[int], float]  # busbw / algbw of n ranks
    checked_in_place: bool = True


def _once(n: int) -> float:
    return 1.0


def _one_way(n: int) -> float:
    return (n - 1) / n


def _two_ways(n: int) -> float:
    return 2 * (n - 1) / n


COLLECTIVES = {
    "all_reduce": Collective(False, True, False, _two_ways),
    "all_gather": Collective(True, False, False, _one_way),
    "reduce_scatter": Collective(True, True, False, _one_way),
    "all_to_all": Collective(True, False, False, _one_way, checked_in_place=False),
    "broadcast": Collective(False, False, True, _once),
    "reduce": Collective(False, True, True, _once),
    "gather": Collective(True, False, True, _one_way),
    "scatter": Collective(True, False, True, _one_way),
    "send_recv": Collective(False, None, False, _once, checked_in_place=False),
}
EXECUTABLE_OF = {"all_to_all": "alltoall_perf", "send_recv": "sendrecv_perf"}
DTYPES = {
    "bfloat16": "bf16", "half": "fp16", "float": "fp32", "double": "fp64", "char": "int8", "int": "int32",
    "f8e4m3": "fp8_e4m3", "f8e5m2": "fp8_e5m2", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2",
    **{f"{sign}int{bits}": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 32, 64)},
}  # fmt: skip
DTYPE_BYTES = {
    "bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1, "uint8": 1, "int32": 4,
    "uint32": 4, "int64": 8, "uint64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class _Block:
    """The figures of a row for one placement, as printed. `wrong`: why its results are not right; None: they are."""

    placement: str | None
    time: str | None
    algbw: str
    busbw: str
    wrong: str | None
    checked: bool


@dataclass(frozen=True)
class _Row:
    size: int
    count: int
    dtype: str
    reduces: bool
    rooted: bool
    blocks: tuple[_Block, ...]


@dataclass(frozen=True)
class _Run:
    """One table, or one JSON document. `world` None: the list of ranks is damaged. `closed`: it has its closing part."""

    rows: tuple[_Row, ...]
    world: int | None
    name: str | None  # of the collective, where the log says it
    closed: bool
    columns: tuple[str, ...] = ()
    headers: int = 1
    failed: tuple[str, ...] = ()  # what the closing part says is wrong
    rejected: int = 0
    commas: bool = False  # a rejected line has decimal commas


_START = re.compile(r"# [nr]ccl-tests version|# Collective test starting|# nThread \d|(?<!concluded: )\b[a-z_]+_perf\b")
_PARAMETERS = re.compile(r"# nThread (\d{1,6}) nGpus (\d{1,6}) ")
_RANK = re.compile(r"#\s+Rank\s+(\d{1,7})(?:\s+Group\s+(\d{1,7}))?\s+Pid\s+\d+ on\s+\S+ device\s+\d+ \[.*")
_CUT_RANKS = re.compile(r"#\s+Rank\b.*\.\.\.")  # a process lists what fits in 2 kB
_PLACEMENT = re.compile(r"\b(out-of-place|in-place)\b")
_OUT_OF_BOUNDS = re.compile(r"# Out of bounds values\s*: (\d{1,19}) (OK|FAILED)\s*")
_AVERAGE = re.compile(r"# Avg bus bandwidth\s*: (\S+)\s*(OK|FAILED)?\s*")
_BOUNDS = "out of bounds values: {}"
_TARGET = "average busbw {} GB/s is below 0.9 of the target NCCL_TESTS_MIN_BW, which the log does not hold"
_NAMED = re.compile(r"\b([a-z][a-z_]*)_perf\b")
_STARTING = re.compile(r"^# Collective test starting: (?:\S*/)?([a-z][a-z_]*)_perf\b")
_TAG = re.compile(r"^\[\d+,\d+\](?:<\w+>)?:? ?")  # mpirun --tag-output
_TYPES = "|".join(sorted(DTYPES, key=len, reverse=True))
_LIKE_A_ROW = re.compile(rf"\d\s+\d+\s+(?:{_TYPES})\b|^\s*\d[\d.,]*(?:\s+(?:[\d.,e+-]+|N/A)){{2,}}\s*$")
_COMMA = re.compile(r"\d,\d")

_NUMBER = r"\d+(?:\.\d*)?(?:e[+-]?\d{1,3})?"
_FIGURE = rf"({_NUMBER}|-?nan|-?inf)"
_COLUMN = {
    "size": r"(\d{1,19})", "count": r"(\d{1,19})", "type": rf"({_TYPES})", "root": r"(-?\d{1,7})",
    "time": _FIGURE, "cputime": _FIGURE, "algbw": _FIGURE, "busbw": _FIGURE,
    "#wrong": rf"(N/A|{_NUMBER}|-?nan)", "timestamp": r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)",
    **dict.fromkeys(("error", "errors"), rf"(N/A|{_NUMBER}\*?|-?nan\*?)"),
}  # fmt: skip
_CHECKS = ("#wrong", "error", "errors")

_VERSION = re.compile(r"\b(nccl|rccl)-tests(?:: Version|\s+version) (\S+)")
_AMD = re.compile(r"\brccl|\bAMD Instinct|\bAMD Radeon|\bHIP version|\bgfx\d", re.I)
_JSON = re.compile(r'"(?:nccl|rccl)_version"\s*:\s*\d|"alg_bw"\s*:')
_TOO_MANY = (
    r"The number of requested GPUs \(\d+\) is greater than the number of GPUs available \(\d+\)|"
    r"Invalid number of GPUs: \d+ requested but only \d+ were found\."
)
_CANNOT = re.compile(
    rf"{_TOO_MANY}|Device implementation \d+ is not supported by this test|invalid option '.'|"
    r"Test \w+ failure \S+ '(?:no \w+-capable device is detected|invalid device ordinal)'"
)
_OWN = re.compile(
    rf"{_PARAMETERS.pattern}|{_VERSION.pattern}|{_JSON.pattern}|{_TOO_MANY}|USAGE: \S*[a-z]_perf\b|"
    r"Test (?:NCCL|RCCL|CUDA|HIP) failure \S+:\d+ '|^\S*[a-z]_perf: error while loading",
    re.M,
)
_ERROR = re.compile(
    r"Test \w+ failure \S+:\d+ '.*|Test timeout \(\d+s\).*|Memory access fault by GPU\b.*|"
    r"[a-z_]{1,30}_perf: error while loading shared libraries: .*"
)
_LAST_ERROR = re.compile(r"Test failure \S+:\d+|Segmentation fault.*|Aborted \(core dumped\)|Bus error.*")
_REMARK = re.compile(
    r"NCCL WARN (.+)|# (error: .+)|# (Reducing maxBytes to \d+ due to memory limitation)|# (Blocking Enabled: .+)|"
    r"(invalid (?:type|op) \S+, defaulting to \w+)|\"errors\"\s*:\s*\[\"((?:[^\"\\]|\\.)+)\""
)


def recognises(text: str) -> bool:
    return bool(_OWN.search(text)) or any(_columns(line) for line in _lines(text))


def parse(text: str) -> Parsed:
    """Every row of every run in the log; what is wrong with it first in the order FAIL, INVALID, UNSUPPORTED, ..."""
    text = clean(text)
    tables = [_table(part) for part in _split(_lines(text))]
    runs = [run for run in tables if run.headers or run.columns]
    if not runs and _JSON.search(text):
        runs = tables = [_document(text)]
    version = _VERSION.search(text)
    backend = f"{version[1]}-tests" if version else "rccl-tests" if _AMD.search(text) else "nccl-tests"
    records, warnings, lost = [], [], []
    for run in runs:
        found, remarks, impossible = _readings(run, backend)
        records += found
        warnings += remarks
        lost += impossible
    rejected = sum(run.rejected for run in tables)
    if rejected:
        warnings.append(f"rows that could not be read: {rejected}")
    warnings += [redact(next(filter(None, m.groups()))).strip() for m in _REMARK.finditer(text)]
    status, reason = _status(text, runs, records, lost)
    return Parsed(
        TOOL, tuple(records), status, reason, version[2] if version else None, rejected,
        tuple(dict.fromkeys(warnings))[:20],
    )  # fmt: skip


def _status(text: str, runs: Sequence[_Run], records: Sequence[Record], lost: list[str]) -> tuple[str | None, str]:
    """The gravest thing that is wrong with a log, and after it the others. `lost`: rows without any figure."""
    found: list[tuple[str, str]] = []
    cannot, error = _CANNOT.search(text), _ERROR.search(text) or _LAST_ERROR.search(text)
    if error and not cannot:
        found.append((FAIL, redact(error[0]).strip()))
    for status, said in ((FAIL, [why for run in runs for why in run.failed]), (INVALID, lost)):
        flagged = [(r, f.partition(": ")[2]) for r in records for f in r.flags if f.startswith(f"{status}: ")]
        if flagged:
            r, why = flagged[0]
            more = f"; {len(flagged)} readings in all" if len(flagged) > 1 else ""
            found.append((status, f"{why} ({_where(r.params['bytes'], r.params.get('placement'))}{more})"))
        found += [(status, why) for why in said]
    if cannot:
        found.append((UNSUPPORTED, redact(cannot[0]).strip()))
    elif not error and (open_ := [run for run in runs if not run.closed]):
        found.append((INCOMPLETE, "ends before its closing part" + ("" if open_[-1].rows else ", without a row")))
    elif any(run.world is None and run.rows for run in runs):
        found.append((INCOMPLETE, "the list of ranks is damaged: without their number, busbw cannot be checked"))
    elif not found and not runs:
        why = "no table and no JSON of rccl-tests or nccl-tests" if text.strip() else "empty"
        found.append((UNPARSED, why))
    elif not found and not records:
        hint = ", with decimal commas" if any(run.commas for run in runs) else ""
        rejected = sum(run.rejected for run in runs)
        found.append((UNPARSED, f"no row was understood (lines that look like one: {rejected}{hint})"))
    if not found:
        return None, ""
    first = found[0][0]
    return first, "; ".join(why if status == first else f"{status}: {why}" for status, why in found[:4])


def _where(size: int, placement: str | None) -> str:
    return f"{size} B, {placement or 'placement not told'}"


def _lines(text: str) -> list[str]:
    """The lines without what mpirun puts before them. An average that the end of the text may have cut is none."""
    lines = [_TAG.sub("", line) for line in text.split("\n")]
    return lines[:-1] if _AVERAGE.fullmatch(lines[-1]) else lines


def _split(lines: Sequence[str]) -> list[list[str]]:
    """The lines of each run. A header before the last run has closed stays in it: the two printed at the same time."""
    parts: list[list[str]] = [[]]
    closed = False
    for line in lines:
        if closed and _START.search(line):
            parts.append([])
            closed = False
        parts[-1].append(line)
        closed = closed or bool(_AVERAGE.fullmatch(line))
    return parts


def _columns(line: str) -> list[str]:
    """The names in a table's header; empty for any other line."""
    names = line.lstrip("# ").split() if line.startswith("#") else []
    return names if names[:3] == ["size", "count", "type"] and "busbw" in names else []


def _table(lines: Sequence[str]) -> _Run:
    columns: list[str] = []
    placements: list[str] = []
    ranks: list[tuple[int, str | None]] = []
    rows: list[_Row] = []
    failed: list[str] = []
    parameters, cut, rejected, commas, counted, averaged = [], 0, 0, False, False, False
    for line in lines:
        if found := _PARAMETERS.match(line):
            parameters.append(int(found[1]) * int(found[2]))
        elif _CUT_RANKS.fullmatch(line):
            cut += 1
        elif found := _RANK.fullmatch(line):
            ranks.append((int(found[1]), found[2]))
        elif names := _columns(line):
            columns = names
        elif found := _OUT_OF_BOUNDS.fullmatch(line):
            counted = True
            if found[2] == "FAILED" or int(found[1]):
                failed.append(_BOUNDS.format(found[1]))
        elif found := _AVERAGE.fullmatch(line):
            averaged = True
            if found[2] == "FAILED":
                failed.append(_TARGET.format(found[1]))
        elif line.startswith("#"):
            placements = _PLACEMENT.findall(line) or placements
        elif row := _row(line, columns, placements):
            rows.append(row)
        elif _LIKE_A_ROW.search(line):
            rejected += 1
            commas = commas or bool(_COMMA.search(line))
    return _Run(
        rows=tuple(rows), world=_world(ranks, cut, parameters[0] if parameters else None), name=_named(lines),
        closed=counted and averaged, columns=tuple(columns), headers=len(parameters), failed=tuple(failed),
        rejected=rejected, commas=commas,
    )  # fmt: skip


def _named(lines: Iterable[str]) -> str | None:
    """The collective that the log names: in its header, or the only one in it, as in the command before the output."""
    said = {_collective(m) for line in lines for m in _STARTING.findall(line)}
    names = said or {_collective(m) for line in lines for m in _NAMED.findall(line)} & set(COLLECTIVES)
    return names.pop() if len(names) == 1 else None


def _collective(name: str) -> str:
    """Our word for "alltoall", "AllReduce", ...; a collective that is not known keeps its own."""
    return next((op for op in COLLECTIVES if op.replace("_", "") == name.lower().replace("_", "")), name)


def _world(ranks: Sequence[tuple[int, str | None]], cut: int, per_process: int | None) -> int | None:
    """Ranks of a communicator: those of rank 0's group. Lists that were cut off: as many as their processes have."""
    if cut:
        return cut * per_process if per_process else None
    group = [rank for rank, name in ranks if name == ranks[0][1]]
    numbers = sorted({rank for rank, _ in ranks})
    whole = numbers == list(range(len(numbers))) and not (per_process and len(numbers) % per_process)
    return len(set(group)) if whole and group else None


def _row(line: str, columns: Sequence[str], placements: Sequence[str]) -> _Row | None:
    """One line of the table; None unless every column is there and is what its name says."""
    firsts = [i for i, name in enumerate(columns) if name in ("time", "cputime")]
    if not firsts:
        return None
    # a collective without a reduction may leave its column blank
    parts = [r"(?:([a-z]\w*)\s+)?" if c == "redop" else _COLUMN.get(c, r"(\S+)") + r"(?:\s+|$)" for c in columns]
    found = re.fullmatch(r"\s*" + "".join(parts), line)
    if not found:
        return None
    cells = list(zip(columns, found.groups(), strict=True))
    key = dict(cells[: firsts[0]])
    blocks = [_block(dict(cells[a:b])) for a, b in zip(firsts, [*firsts[1:], len(cells)], strict=True)]
    if any(b is None for b in blocks):
        return None
    where = _places(placements, len(blocks))
    return _Row(
        int(key["size"]), int(key["count"]), DTYPES[key["type"]], key.get("redop") not in (None, "none"),
        int(key.get("root") or -1) >= 0, tuple(_Block(w, *b) for w, b in zip(where, blocks, strict=True)),
    )  # fmt: skip


def _places(placements: Sequence[str], n: int) -> list[str | None]:
    """Where the results of each block went: as the line above the header says; of two, they are always in this order."""
    words = [p.partition("-")[0] for p in placements]
    return list(words) if len(words) == n else ["out", "in"] if n == 2 else [None] * n


def _block(cells: dict[str, str]) -> tuple | None:
    check = next((c for c in _CHECKS if c in cells), None)
    if check is None or "algbw" not in cells or "busbw" not in cells:
        return None
    figure, wrong = cells[check], None
    if "nan" in figure:
        wrong = f"error is {figure}"
    elif check == "#wrong" and figure != "N/A" and float(figure):
        wrong = f"{figure} wrong values"
    elif figure.endswith("*"):
        wrong = f"error {figure.rstrip('*')} is beyond the tool's limit"
    return cells.get("time"), cells["algbw"], cells["busbw"], wrong, figure != "N/A"


class _Printed(str):
    """A number of a JSON document, as it stands there."""


_DECODER = json.JSONDecoder(parse_float=_Printed, parse_int=_Printed, parse_constant=_Printed)


def _document(text: str) -> _Run:
    """A document of `-J`, part by part, so that one that was cut off keeps its rows."""
    config = _part(text, "config", dict)
    args = _part(text, "args", list)
    bounds, average = _part(text, "out_of_bounds", dict), _part(text, "average_bus_bandwidth", dict)
    entries, rest = _results(text)
    rows = [_entry(e) for e in entries]
    names = {str(e.get("experiment_name") or "") for e in entries if isinstance(e, dict)} - {""}
    if args and isinstance(args[0], str) and (found := _NAMED.search(args[0])):
        names = {found[1]}
    devices = config.get("devices")
    groups = [d.get("group") for d in devices if isinstance(d, dict)] if isinstance(devices, list) else []
    sizes = [_whole(config.get(x)) for x in ("nthreads", "ngpus")]
    failed = [_BOUNDS.format(bounds.get("count"))] if bounds.get("okay") == "false" else []
    failed += [_TARGET.format(average.get("bandwidth"))] if average.get("okay") == "false" else []
    return _Run(
        rows=tuple(r for r in rows if r), name=_collective(names.pop()) if len(names) == 1 else None,
        world=math.prod(sizes) * groups.count(groups[0]) if all(sizes) and groups else None,
        closed=bool(bounds and average and re.search(r'"end_time"\s*:\s*"[^"]*"\s*\}\s*$', text)),
        failed=tuple(failed), rejected=rows.count(None) + rest,
    )  # fmt: skip


def _part(text: str, key: str, kind: type) -> Any:
    """The value of a key, empty where it is missing, damaged or no `kind`."""
    found = re.search(rf'"{key}"\s*:\s*', text)
    try:
        value = _DECODER.raw_decode(text, found.end())[0] if found else None
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, kind) else kind()


def _results(text: str) -> tuple[list[Any], int]:
    """The entries of "results", and 1 where another one begins and does not end."""
    found = re.search(r'"results"\s*:\s*\[\s*', text)
    out: list[Any] = []
    at = found.end() if found else len(text)
    while at < len(text) and text[at] != "]":
        try:
            entry, at = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            return out, 1
        out.append(entry)
        at = re.compile(r"\s*,?\s*").match(text, at).end()
    return out, 0


def _whole(value: Any) -> int | None:
    return int(value) if isinstance(value, _Printed) and re.fullmatch(r"\d{1,19}", value) else None


def _entry(entry: Any) -> _Row | None:
    if not isinstance(entry, dict):
        return None
    size, count, dtype = _whole(entry.get("size")), _whole(entry.get("count")), DTYPES.get(str(entry.get("type")))
    root = re.fullmatch(r"\s*(-?\d{1,7})\s*", str(entry.get("root")))
    if size is None or count is None or dtype is None or root is None:
        return None
    blocks = []
    for placement, key in (("out", "out_of_place"), ("in", "in_place")):
        cells = entry.get(key)
        if cells is None:
            continue
        if not isinstance(cells, dict) or not all(isinstance(cells.get(x), str) for x in ("alg_bw", "bus_bw")):
            return None
        wrong, time = cells.get("nwrong"), cells.get("time")
        if not isinstance(wrong, str | None) or not isinstance(time, str | None):
            return None
        checked = {"#wrong": "N/A" if wrong is None else wrong, "algbw": cells["alg_bw"], "busbw": cells["bus_bw"]}
        if not re.fullmatch(_COLUMN["#wrong"], checked["#wrong"]):
            return None
        blocks.append(_Block(placement, *_block({**checked, **({"time": time} if time is not None else {})})))
    if not blocks:
        return None
    return _Row(size, count, dtype, entry.get("redop") not in ("", "none", None), int(root[1]) >= 0, tuple(blocks))


def _readings(run: _Run, backend: str) -> tuple[list[Record], list[str], list[str]]:
    """Time, algbw and busbw of every block, with what speaks against them; remarks; and what gives no reading."""
    records: list[Record] = []
    lost: list[str] = []
    rows = [row for row in run.rows if row.size]
    op, possible = _op(run, rows)
    remarks = []
    if len(rows) < len(run.rows):
        remarks.append(f"rows of 0 bytes, left out: {len(run.rows) - len(rows)}")
    if op is None and len(possible) > 1:
        remarks.append(f"the log does not name its collective, which may be {' or '.join(possible)}")
    if any(not b.checked for row in rows for b in row.blocks):
        remarks.append("results were not checked (-c 0, or in place where the tool cannot)")
    if any(b.time is None for row in rows for b in row.blocks):
        remarks.append("times of the launch alone (-C 1) are left out")
    factors = {COLLECTIVES[c].factor for c in possible}
    factor = factors.pop()(run.world) if len(factors) == 1 and run.world else None
    case = EXECUTABLE_OF.get(op, f"{op}_perf") if op else "collective"
    for row in rows:
        for block in row.blocks:
            doubts = _doubts(run, row, block, op, possible, factor)
            flags = [f"{FAIL}: {block.wrong}"] if block.wrong else []
            flags += [f"{INVALID}: {why}" for why in doubts]
            params = dict(op=op, dtype=row.dtype, bytes=row.size, world=run.world, placement=block.placement,
                          validated=None if block.checked else False)  # fmt: skip
            figures = [] if block.time is None else [(block.time, "us", None)]
            if _number(block.algbw) or doubts:
                figures += [(block.algbw, "GB/s", "alg"), (block.busbw, "GB/s", "bus")]
            found = [reading("comm", case, backend, t, u, "mean", flags, counted=c, **params) for t, u, c in figures]
            records += [r for r in found if r]
            if doubts and not any(found):
                lost.append(f"{doubts[0]} ({_where(row.size, block.placement)})")
    return records, remarks, lost


def _doubts(
    run: _Run, row: _Row, block: _Block, op: str | None, possible: Sequence[str], factor: float | None
) -> list[str]:
    """Why the figures of a block cannot be."""
    if run.headers > 1:
        return [f"{run.headers} headers before one closing part: mpirun of a build without MPI, each process by itself"]
    if run.world == 1:
        return ["a single rank: nothing was sent"]
    figures = {"time": block.time, "algbw": block.algbw, "busbw": block.busbw}
    if odd := [f"{name} is {text}" for name, text in figures.items() if text is not None and _number(text) is None]:
        return odd
    time, algbw, busbw = (None if text is None else _number(text) for text in figures.values())
    if time == 0:
        return ["time is zero"]
    if op and not possible:
        return []  # a collective that is not known: neither is what its size and rates mean
    if run.world and not possible:
        return ["columns, size and rates are those of no collective that is known"]
    out = []
    if run.world and not any(_size_fits(COLLECTIVES[c], run.world, row) for c in possible):
        out.append(f"size {row.size} is not what {row.count} elements of {row.dtype} make")
    if time is not None:
        rate = row.size / time / 1e3
        slack = _rounding(block.algbw) + rate * _rounding(block.time) / time
        if abs(rate - algbw) > TOLERANCE * rate + slack:
            out.append(f"algbw {block.algbw} GB/s is not size / time = {rate:.4g}")
    if factor is not None:
        slack = _rounding(block.busbw) + factor * _rounding(block.algbw)
        if abs(algbw * factor - busbw) > TOLERANCE * algbw * factor + slack:
            out.append(f"busbw {block.busbw} GB/s is not algbw x {factor:.4g} of {run.world} ranks")
    return out


def _op(run: _Run, rows: Sequence[_Row]) -> tuple[str | None, list[str]]:
    """The collective: what the log says, or the only one that its rows can be; and all those that they can be."""
    if run.name:
        return run.name, [run.name] if run.name in COLLECTIVES else []
    if run.world in (None, 1):
        return None, []
    possible = [name for name in COLLECTIVES if 2 * sum(_looks_like(name, run, row) for row in rows) > len(rows)]
    if len({COLLECTIVES[name].factor for name in possible}) > 1:
        rates = [(_number(b.algbw), _number(b.busbw)) for row in rows for b in row.blocks]
        ratios = [busbw / algbw for algbw, busbw in rates if busbw is not None and algbw and algbw >= 1]
        factors = {name: COLLECTIVES[name].factor(run.world) for name in possible}
        middle = statistics.median(ratios) if ratios else None
        possible = [n for n, factor in factors.items() if middle is None or abs(middle / factor - 1) < 0.05]
    return (possible[0] if len(possible) == 1 else None), possible


def _looks_like(name: str, run: _Run, row: _Row) -> bool:
    """Can this row be of that collective, whatever its rates?"""
    c = COLLECTIVES[name]
    if c.reduces not in (None, row.reduces) or c.rooted != row.rooted:
        return False
    if not _size_fits(c, run.world, row):
        return False
    if run.columns and not {"redop", "root"} <= set(run.columns) and c.gathers and not (c.reduces or c.rooted):
        # where columns still differed by collective, alltoall had one for redop and left it blank
        return name == ("all_to_all" if "redop" in run.columns else "all_gather")
    checks = {b.placement: b.checked for b in row.blocks}
    return not any(checks.values()) or checks.get("in", c.checked_in_place) == c.checked_in_place


def _size_fits(c: Collective, world: int, row: _Row) -> bool:
    return row.size == row.count * DTYPE_BYTES[row.dtype] * (world if c.gathers else 1)


def _number(text: str) -> float | None:
    """A figure's value; None where it is none. One with an exponent is large: neither infinite nor zero."""
    value = float(text) if re.fullmatch(_NUMBER, text) else math.nan
    return value if math.isfinite(value) and (value or "e" not in text) else None


def _rounding(text: str) -> float:
    """Half of a figure's last digit."""
    mantissa, _, exponent = text.partition("e")
    return float(f"5e{int(exponent or 0) - len(mantissa.partition('.')[2]) - 1}")
