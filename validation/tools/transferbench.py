"""TransferBench: copies between the CPUs and GPUs of one AMD node, by GPU kernels (GFX) or DMA engines.

What is read of it, in plain text, in boxes and as CSV (OUTPUT_TO_CSV=1):

- preset p2p: a matrix of copies one way, and one of both ways at once. Titled "peak", each figure is the MEAN over the
  iterations; a row "max" (SHOW_ITERATIONS=1) is the best one. Of both ways the sum (row "<->") is kept.
- preset a2a: a matrix of copies that all run at once (`direction` contended: no measurement of one way alone).
- a configuration or command line: tests with one line a transfer, and one an iteration with SHOW_ITERATIONS=1.

Bytes are counted once, so a copy within one GPU moves twice as much through its memory (`counted` payload). Left out are
copies that CPU threads carry out (those between CPUs, and in p2p those whose source is one: they measure the threads),
transfers of a test that runs several at once, and memory of other kinds than the default (C and G). The text of a matrix
carries checks of its own (averages, row sums), and a table that fails one is INVALID.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from escher_kernels.records import Record
from validation.tools import (
    FAIL,
    INCOMPLETE,
    INVALID,
    UNPARSED,
    UNSUPPORTED,
    Command,
    Found,
    Parsed,
    Place,
    clean,
    conclude,
    flagged,
    reading,
    redact,
)

NAME = "TransferBench"
TOOL = "transferbench"
EXECUTABLES = ("TransferBench",)
DEFAULT_BYTES = 268435456  # of a p2p copy, where the tool is not told another
# two tests of one transfer each by one engine: source, executor (DMA engine of GPU 0), target
HOST_LINK = "1 1 (C0->D0->G0)\n1 1 (G0->D0->C0)\n"
WRAPPER = "ROCm Bandwidth Test Plugin Wrapper"  # rocm_bandwidth_test of ROCm 7 prints it first: rocm_bw takes that log


def commands(place: Place) -> list[Command]:
    """The copy within GPU 0 as large as ours, alone: a matrix at that size would take hours and as much host memory.
    GPU 0's link to the host by DMA engine, as a copy of the runtime uses it. Every pair of GPUs, at the tool's own size."""
    path = place.executables.get(EXECUTABLES[0])
    if place.kind != "rocm" or path is None:
        return []
    size, one_way = str((place.plateau_bytes or DEFAULT_BYTES) // 4 * 4), {"P2P_MODE": "1"}  # it takes multiples of 4
    alone = {**one_way, "NUM_CPU_DEVICES": "0", "NUM_GPU_DEVICES": "1"}
    host = (path, "{dir}/host_link.cfg", str(DEFAULT_BYTES))
    out = [
        Command(TOOL, "transferbench_local", (path, "p2p", size), alone, timeout_s=600),
        Command(TOOL, "transferbench_host", host, files={"host_link.cfg": HOST_LINK}),
    ]
    if place.devices > 1:
        out.append(Command(TOOL, "transferbench_p2p", (path, "p2p", str(DEFAULT_BYTES)), one_way, timeout_s=600))
    return out


_S = r"\s*+[|│,]?+\s*+"  # between the fields of a transfer: text, box, CSV, or nothing but blanks
_FIGURES = rf"{_S}(\d{{1,9}}\.\d{{3}}) GB/s{_S}(\d{{1,9}}\.\d{{3}}) ms"
_BYTES = rf"{_S}(\d{{1,15}}) bytes"
_VERSION = re.compile(r"^(?:TransferBench v|EnvVar,Value,Description,\(TransferBench v)(\d+(?:\.\d+)*)", re.M)
_TITLE = re.compile(
    r"\s*(Uni|Bi)directional copy peak bandwidth GB/s \[(Local|Remote) read / (?:Remote|Local) write\] "
    r"\(GPU-Executor: (GFX|DMA)\)\s*"
)
_HEADER = re.compile(r"\s*SRC(\+EXE)?\\(EXE\+)?DST[ ,]+((?:(?:CPU|GPU) \d\d{1,2}[ ,]*)+)")
_ROW = re.compile(r"\s*((?:CPU|GPU) \d\d{1,2})\s+(->|<-|<->|min|max|sd)[ ,](.*)")
_AVERAGES = re.compile(r"\s*Averages \(During +(Uni|Bi)Dir\):(.*)")
_SIZE = re.compile(r"\s*Bytes Per Direction[ ,](\d{1,15})\s*")
_EXECUTOR = re.compile(
    rf"\s*Executor: +(?:Rank \d+ +)?[A-Z]{{3}} +\d+{_FIGURES}{_BYTES}{_S}\d+\.\d{{3}}\s+GB/s \(sum\).*"
)
_TRANSFER = re.compile(rf"\s*Transfer +(\d{{1,6}}){_FIGURES}{_BYTES}{_S}([A-Z\d]+) -> (\S+) -> ([A-Z\d]+)\s*,?\s*")
_ITERATION = re.compile(rf"\s*Iter +(\d{{1,6}}){_FIGURES}{_S}(?:(?:CUs|XCCs):.*)?")
_AGGREGATE = re.compile(rf"\s*Aggregate \(CPU\){_FIGURES}{_BYTES}{_S}Overhead:? -?\d+\.\d{{3}} ms\s*,?\s*")
_TEST_LINE = re.compile(r"\s*(?:Executor: |Transfer +\d|Iter +\d|Aggregate \(CPU\))")
_TEST_TITLE = re.compile(r"\s*Test \d+:\s*")
_A2A = re.compile(r"\s*GPU-(?:GFX|DMA) All-To-All benchmark:")
_A2A_SIZE = re.compile(r"(?:- Copying |\[)(\d{1,15}) bytes (?:between|per Transfer)")
_A2A_MODE = re.compile(r"^A2A_MODE\s*[=,]\s*[12]\b", re.M)
_A2A_END = re.compile(r"\s*Aggregate bandwidth \(CPU Timed\):\s*\d+\.\d+ GB/s\s*")
_OTHER_MEMORY = re.compile(r"^((?:CPU_MEM_TYPE|GPU_MEM_TYPE|USE_FINE_GRAIN)\s*[=,]\s*[1-9])\b", re.M)
_P2P_MODE = re.compile(r"^P2P_MODE\s*[=,]\s*0\b", re.M)
_ERROR = re.compile(
    r"\[ERROR\]\s*(\S.*)|(Encountered (?:HIP|HSA) error \(.*)|(Transfer \d+: Unexpected .*)|(Parsing error: .*)"
)
_WARNING = re.compile(r"\[WARN\]\s*(\S.*)")
_CANNOT = re.compile(
    r"(?i)cannot exceed number of detected|detected \d+ gpus|requires at least|not supported|only support|"
    r"no binary|no kernel image|invalid device function|no rocm-capable device|unable to enable peer"
)
_OWN_ERROR = re.compile(
    r"\[ERROR\] (?:Number of [CG]PUs to use|numBytesPerTransfer|NUMA library not|Unable to (?:open transfer|enable peer)|"
    r"Transfer \d)|^Encountered (?:HIP|HSA) error \(.*TransferBench",
    re.M,
)
_CELL = re.compile(r"\d{1,9}\.\d{2,3}|N/A|-?(?:nan|inf)")
_FIGURE = re.compile(r"\d+\.\d+")


def recognises(text: str) -> bool:
    if WRAPPER in text:
        return False
    patterns = (_VERSION, _OWN_ERROR)
    lines = (_TITLE, _TRANSFER, _EXECUTOR, _AGGREGATE, _A2A)
    return any(p.search(text) for p in patterns) or any(p.match(line) for line in text.split("\n") for p in lines)


def ends(src: str, dst: str) -> dict | None:
    """`op`, `src`, `dst` and `device` of a copy between ends named like "GPU 03"; None for one between CPUs."""
    kinds = src[:3], dst[:3]
    if kinds == ("CPU", "CPU"):
        return None
    ops = {("CPU", "GPU"): "host_to_device", ("GPU", "CPU"): "device_to_host", ("GPU", "GPU"): "device_to_device"}
    gpu = src if kinds[0] == "GPU" else dst
    return {"op": "copy" if src == dst else ops[kinds], "src": src, "dst": dst, "device": int(gpu[4:])}


@dataclass
class _Matrix:
    """One table of p2p while it is read: cells as printed, by (row, arrow)."""

    both: bool
    remote: bool
    executor: str
    bytes: int | None
    columns: list[str] = field(default_factory=list)
    rows: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    clashes: set[tuple[str, str]] = field(default_factory=set)
    averages: list[str] | None = None  # CPU->CPU, CPU->GPU, GPU->CPU, GPU->GPU
    last: str = ""  # label of the row before
    csv: bool = False

    @property
    def title(self) -> str:
        return "bidirectional" if self.both else "unidirectional"

    def add(self, label: str, arrow: str, rest: str) -> bool:
        """Whether the row belongs here and is whole. The spread (min, sd) is read over."""
        cells = re.split(r"[,\s]+", rest.strip(" ,\t"))
        if arrow in ("min", "sd") or (self.both and arrow == "max"):
            return True
        if len(cells) != len(self.columns) or label not in self.columns or not all(map(_CELL.fullmatch, cells)):
            return False
        if (arrow == "max" and label != self.last) or (not self.both and arrow in ("<-", "<->")):
            return False
        if label.startswith("GPU") and (cells[self.columns.index(label)] == "N/A") is not self.both:
            return False  # a GPU copies within itself one way, never both ways: a row of the other table
        self.last = label
        if self.rows.setdefault((label, arrow), cells) != cells:
            self.clashes.add((label, arrow))
        return True

    def absent(self) -> list[str]:
        arrow = "<->" if self.both else "->"
        return [label for label in self.columns if (label, arrow) not in self.rows]


def _matrix_records(m: _Matrix, found: Found) -> list[Record]:
    statistics = {"<->": "mean"} if m.both else {"->": "mean", "max": "best"}
    out: list[Record] = []
    for (label, arrow), cells in m.rows.items():
        if arrow not in statistics:
            continue
        row = []
        for column, cell in zip(m.columns, cells, strict=True):
            known = ends(label, column)
            by = ("CPU" in label + column) if m.both else (column if m.remote else label).startswith("CPU")
            if known is None or by or cell == "N/A":  # carried out by CPU threads, one way at least
                continue
            record = reading(
                "bandwidth", f"p2p.{m.title}", f"{TOOL}.p2p", cell, "GB/s", statistics[arrow], **known,
                counted="payload", direction="both" if m.both else "one", buffer_bytes=m.bytes, executor=m.executor,
                remote_read=m.remote or None,
            )  # fmt: skip
            if record is None:
                found.setdefault(INVALID, []).append(f"{label} to {column} is printed as {cell}")
            elif record.reported["value"] > 0:  # 0.00: not measured
                row.append(record)
        if (label, arrow) in m.clashes:
            why = f"row {label} {arrow} stands twice with different figures"
            found.setdefault(INVALID, []).append(why)
            row = flagged(row, why)
        out += row
    return _averaged(m, out, found)


def _averaged(m: _Matrix, records: list[Record], found: Found) -> list[Record]:
    """Check the cells of whole tables against the averages below it, which leave out the copies within one device."""
    classes = ("host_to_device", "device_to_host", "device_to_device")
    for op, printed in zip(classes, (m.averages or ["N/A"] * 4)[1:], strict=True):
        cells = [r for r in records if r.params["op"] == op and r.params["statistic"] == "mean"]
        sources = {label[:3] for label in m.absent()}
        if printed == "N/A" or not cells or ("CPU" if op == "host_to_device" else "GPU") in sources:
            continue
        mean = sum(r.reported["value"] for r in cells) / len(cells) / (2 if m.both else 1)
        if abs(mean - float(printed)) > 0.0151:  # both are rounded to 0.01
            why = f"the table says {printed} GB/s is the average of {op}, its cells give {mean:.2f}"
            found.setdefault(INVALID, []).append(why)
            records = [flagged([r], why)[0] if r.params["op"] == op else r for r in records]
    return records


@dataclass
class _Test:
    """One test of a configuration while it is read. `bytes` of all its transfers; None: it has no closing line."""

    transfers: list[tuple[str, ...]] = field(default_factory=list)  # number, GB/s, ms, bytes, src, executor, dst
    iterations: list[tuple[str, str, str]] = field(default_factory=list)  # number, GB/s, ms
    bytes: int | None = None


def _place_of(memory: str) -> str | None:
    """Of G3 "GPU 03", of C0 "CPU 00"; "" of N, the memory that is none; None of any other kind."""
    kind = re.fullmatch(r"([CG])(\d{1,3})", memory)
    return f"{kind[1]}PU {int(kind[2]):02d}" if kind else "" if memory in ("N", "N0") else None


def _transfer_ends(src: str, executor: str, dst: str) -> dict | None:
    a, b = _place_of(src), _place_of(dst)
    if a is None or b is None:
        return None
    if a and b:
        return ends(a, b)
    own = re.match(r"(?:GPU|G)0*(\d{1,3})[.:]", executor)
    known = a or b
    if not own or known != f"GPU {int(own[1]):02d}":
        return None
    return {"op": "read" if a else "write", "src": a or None, "dst": b or None, "device": int(own[1])}


def _test_records(test: _Test, found: Found) -> list[Record]:
    """Readings of a test with one transfer. Of one that is not whole nothing can be said: others may have run with it."""
    if test.bytes is None:
        found.setdefault(INCOMPLETE, []).append("it ends inside a test")
    elif test.bytes != sum(int(t[3]) for t in test.transfers):
        found.setdefault(INCOMPLETE, []).append(f"transfers of a test of {test.bytes} bytes are missing")
    elif len(test.transfers) == 1:
        _, rate, ms, size, src, executor, dst = test.transfers[0]
        known = _transfer_ends(src, executor, dst)
        rows = [(rate, ms, "mean", None), *((r, t, "interval", int(n)) for n, r, t in test.iterations)]
        out = []
        for text, time_ms, statistic, iteration in rows if known else ():
            record = reading(
                "bandwidth", "config", f"{TOOL}.config", text, "GB/s", statistic, **known, executor=executor,
                counted="read+write" if known["op"] in ("read", "write") else "payload", iteration=iteration,
                direction="one", buffer_bytes=int(size),
            )  # fmt: skip
            if record is None or record.reported["value"] == 0:
                continue
            v, t = float(text), float(time_ms)
            if abs(v * t * 1e6 - int(size)) > 1e6 * 0.00051 * (v + t) + 1:  # both are rounded to 0.001
                why = f"{text} GB/s for {time_ms} ms are not {size} bytes"
                found.setdefault(INVALID, []).append(why)
                record = flagged([record], why)[0]
            out.append(record)
        return out
    return []


def _a2a_records(lines: Sequence[str], size: int | None, found: Found) -> tuple[list[Record], int]:
    """The matrix of an a2a summary, and how many of its rows could not be read."""
    columns: list[str] = []
    seen: dict[str, list[str]] = {}
    out: list[Record] = []
    rejected = 0
    for line in lines:
        words = re.sub("[│|,]", " ", line).split()
        if words[:1] == [r"SRC\DST"] and words[-2:] == ["STotal", "Actual"]:
            good = set(words[1:-2:2]) == {"GPU"} and all(re.fullmatch(r"\d\d{1,2}", n) for n in words[2:-2:2])
            columns = [f"GPU {n}" for n in words[2:-2:2]] if good else []
        elif columns and words[:1] == ["GPU"] and words[1:2]:
            label, cells = f"GPU {words[1]}", words[2:]
            if label not in columns or len(cells) != len(columns) + 2 or not all(map(_CELL.fullmatch, cells)):
                rejected += 1
                continue
            if seen.setdefault(label, cells) != cells:
                found.setdefault(INVALID, []).append(f"row {label} stands twice with different figures")
            figures = [float(c) for c in cells[:-1] if _FIGURE.fullmatch(c)]
            step = 10.0 ** -len(cells[-1].partition(".")[2])
            wrong = len(figures) < 2 or abs(sum(figures[:-1]) - figures[-1]) > 0.51 * step * len(figures)
            why = f"the cells of {label} do not sum to its STotal {cells[-2]}"
            row = []
            for column, cell in zip(columns, cells[:-2], strict=True):
                record = reading(
                    "bandwidth", "a2a", f"{TOOL}.a2a", cell, "GB/s", "mean", **ends(label, column),
                    counted="payload", direction="contended", buffer_bytes=size,
                )  # fmt: skip
                if record and record.reported["value"] > 0 and label != column:
                    row.append(record)
            if wrong:
                found.setdefault(INVALID, []).append(why)
            out += flagged(row, why) if wrong else row
    if not columns or set(columns) - set(seen):
        absent = ", ".join(c for c in columns if c not in seen) or "its header"
        found.setdefault(INCOMPLETE, []).append(f"the a2a summary lacks {absent}")
    return out, rejected


def parse(text: str) -> Parsed:
    text = clean(text)
    lines = text.split("\n")
    found: Found = {}
    matrices: list[_Matrix] = []
    tests: list[_Test] = []
    matrix: _Matrix | None = None  # whose rows come
    titled: _Matrix | None = None  # whose header comes
    test: _Test | None = None
    size: int | None = None
    rejected = 0
    for line in lines:
        if m := _SIZE.fullmatch(line):
            size = int(m[1])
        elif m := _TITLE.fullmatch(line):
            titled, matrix = _Matrix(m[1] == "Bi", m[2] == "Remote", m[3], size), None
            matrices.append(titled)
        elif m := _HEADER.fullmatch(line):
            matrix, titled = titled, None
            columns = re.findall(r"[CG]PU \d+", m[3])
            if matrix and (matrix.both is bool(m[1] or m[2]) or len(set(columns)) != len(columns)):
                matrix = None
            if matrix:
                matrix.columns, matrix.csv = columns, "," in line
        elif m := _ROW.fullmatch(line):
            rejected += not (matrix and matrix.add(m[1], m[2], m[3]))
        elif m := _AVERAGES.fullmatch(line):
            values = m[2].split()
            if matrix and (m[1] == "Bi") is matrix.both:
                good = len(values) == 4 and all(map(_CELL.fullmatch, values))
                matrix.averages = values if good and not re.search("nan|inf", m[2]) else ["N/A"] * 4
            matrix = None
        elif _TEST_LINE.match(line):
            if test is None:
                test = _Test()
                tests.append(test)
            if m := _TRANSFER.fullmatch(line):
                test.transfers += [m.groups()] if m.groups() not in test.transfers else []
            elif m := _ITERATION.fullmatch(line):
                test.iterations.append(m.groups())
            elif m := _AGGREGATE.fullmatch(line):
                test.bytes, test = int(m[3]), None
            else:
                rejected += not _EXECUTOR.fullmatch(line)
        elif _TEST_TITLE.fullmatch(line):
            test = None

    records: list[Record] = []
    other = _OTHER_MEMORY.search(text)
    for m in matrices:
        if not m.columns:
            found.setdefault(INCOMPLETE, []).append(f"the {m.title} table has no header")
            continue
        records += [] if other else _matrix_records(m, found)
        if m.averages is None and not m.csv:
            last = next(line.strip() for line in reversed(lines) if line.strip())
            failed = re.search("(?i)error|fail", last) and not _ROW.match(last)
            found.setdefault(FAIL if failed else INCOMPLETE, []).append(
                last if failed else f"it ends inside the {m.title} table"
            )
        elif absent := m.absent():
            found.setdefault(INCOMPLETE, []).append(f"the {m.title} table lacks {', '.join(absent)}")
    if _P2P_MODE.search(text) and matrices and not any(m.both for m in matrices):
        found.setdefault(INCOMPLETE, []).append("it ends before the bidirectional table")
    if size is not None and not matrices:
        found.setdefault(INCOMPLETE, []).append("it ends before the first table")
    a2a = any(map(_A2A.match, lines))
    warnings = [m[1] for line in lines if (m := _WARNING.search(line))]
    if a2a:
        if not any(map(_A2A_END.fullmatch, lines)):
            found.setdefault(INCOMPLETE, []).append("it ends before the bandwidths of all copies together")
        at = next((m for line in lines if (m := _A2A_SIZE.search(line))), None)
        cells, bad = _a2a_records(lines, int(at[1]) if at else None, found)
        rejected += bad
        if _A2A_MODE.search(text):
            warnings.append("the all-to-all only read or only wrote: no copies, left out")
        else:
            records += cells
    else:  # the transfers of an a2a stand in its matrix too
        for t in tests:
            records += _test_records(t, found)
        several = sum(len(t.transfers) > 1 for t in tests)
        warnings += [f"{several} test(s) of several transfers at once: left out"] if several else []
    warnings += [f"{' '.join(other[1].split())}: not the default memory, left out"] if other else []
    understood = bool(matrices or tests or a2a)
    return _end(text, records, rejected, understood, warnings, found)


def _end(
    text: str, records: list[Record], rejected: int, understood: bool, warnings: list[str], found: Found
) -> Parsed:
    errors = [next(filter(None, m.groups())) for m in _ERROR.finditer(text)]
    for error in errors[:1]:  # the others are details of it
        found.setdefault(UNSUPPORTED if _CANNOT.search(error) else FAIL, []).append(error)
    if not records and (rejected or not (understood or any(found.values()))):
        found.pop(INCOMPLETE, None)
        why = f"none of {rejected} line(s) could be read" if rejected else f"no result of {NAME} in it"
        found[UNPARSED] = [why if text.strip() else "empty"]
    elif rejected:
        found.setdefault(INCOMPLETE, []).append(f"{rejected} line(s) could not be read")
    version = _VERSION.search(text)
    said = tuple(redact(w)[:200] for w in dict.fromkeys(warnings))
    return conclude(
        TOOL, records, found, version=version[1] if version else None, rejected_lines=rejected, warnings=said
    )  # fmt: skip
