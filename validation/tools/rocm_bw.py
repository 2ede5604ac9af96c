"""rocm_bandwidth_test: copies between the CPUs and GPUs of one AMD node. Two programs have that name:

- up to ROCm 6.4, `rocm-bandwidth-test`: -a and -A print matrices of the BEST copy ("peak"), of 64 MiB in version 2 (so
  says its source; its log does not tell); -s with -d, and -b, print one table a pair of devices, with the best and the
  mean without the slowest for each size; -v prints whether what arrived was right. It numbers the CPUs first: so do
  `src` and `dst`. `device` counts the GPUs alone, from 0, where the log lists them, else it is the tool's number.
- of ROCm 7, `rocm_bandwidth_test run tb ...`: TransferBench behind a wrapper. Its log is read by `transferbench`.

The old program counts both streams of a copy within one GPU (`counted` read+write), and both copies of a pair that run
at once (`direction` both). Copies between CPUs are never run. The log of `hipBusBandwidth`, a HIP sample that is often
taken for this tool, is recognised and not read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

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
    transferbench,
)
from validation.tools.transferbench import ends

NAME = "rocm_bandwidth_test"
TOOL = "rocm_bw"
OLD, NEW = "rocm-bandwidth-test", "rocm_bandwidth_test"
EXECUTABLES = (OLD, NEW)
MATRIX_BYTES = 64 * 2**20


def commands(place: Place) -> list[Command]:
    """Each program by the name it is installed under; ROCm 7's not where TransferBench is there, which it would only
    repeat. Where a name belongs to the other program, that says at once that it does not take the arguments, and the
    log is UNSUPPORTED."""
    found = place.executables
    if place.kind != "rocm":
        return []
    out = []
    if NEW in found and transferbench.EXECUTABLES[0] not in found:
        argv = (found[NEW], "run", "tb", "p2p", str(transferbench.DEFAULT_BYTES))
        out.append(Command(TOOL, "rocm_bandwidth_test_p2p", argv, {"P2P_MODE": "1"}, timeout_s=600))
    if OLD in found:
        out.append(Command(TOOL, "rocm_bandwidth_test_a", (found[OLD], "-a")))
    return out


_VERSION = re.compile(r"^[ \t]*RocmBandwidthTest Version: (\d+(?:\.\d+)*)[ \t]*$", re.M)
_LAUNCH = re.compile(r"^[ \t]*Launch Command is: (.*)$", re.M)
_DEVICE = re.compile(
    r"^[ \t]*Device: (\d{1,3}),  .*?(,  (?:[\da-f]{4}:)?[\da-f]{2}:[\da-f]+\.[\da-f])?[ \t]*$", re.M | re.I
)
_TITLE = re.compile(
    r"\s*(?:(Uni|Bi)directional copy (peak|average) bandwidth GB/s|(Data Path Validation)|Inter-Device .*)\s*"
)
_HEADER = re.compile(r"\s*D/D((?:\s+\d{1,3})+)\s*")
_ROW = re.compile(r"\s*(\d{1,3})((?:\s+(?:N/A|PASS|FAIL|-?nan|-?inf|\d{1,9}(?:\.\d{3})?))+)\s*")
_ROW_LIKE = re.compile(r"\s*\d+\s.*")
_BENCHMARK = re.compile(r"=+\s+(Uni|Bi)directional Benchmark Result\s+=+\s*")
_END = re.compile(r"=+ (Src|Dst) Device Id: (\d{1,3}) \1 Device Type: ([CG]pu) =+\s*")
_SIZE_ROW = re.compile(r"(\d{1,6}) (Bytes|KB|MB)" + r"\s+(\d{1,12}\.\d{3})" * 4 + r"\s*")
_SIZE_LIKE = re.compile(r"\d+ (?:Bytes|KB|MB)\s.*")
_UNIT_BYTES = {"Bytes": 1, "KB": 2**10, "MB": 2**20}
_HIP_SAMPLE = re.compile(r"^[ \t]*[HD]2[HD]_(?:Bandwidth|Time)_?(?:un)?pinned\s", re.M)
_INVALID_REQUEST = re.compile(r"^[ \t]*Invalid Request[ \t]*$", re.M)
_NO_ACCESS = re.compile(r"^[ \t]*(Rocm Device .* cannot ACCESS .*\S)[ \t]*$", re.M)
_HSA_ERROR = re.compile(r"(HSA Error Found!.*)\n(?:Error: (.*))?")  # behind the dots of progress
_HELP = re.compile(r"^[ \t]*-a    Perform Unidirectional Copy involving all device combinations", re.M)
_NEW_REFUSES = re.compile(
    r"^[ \t]*(The following arguments? w(?:as|ere) not expected: .*|A subcommand is required)[ \t]*$", re.M
)
_NEW_ERROR = re.compile(r"^[ \t]*\[CmdLine\] -> Error: (.*?)[ \t]*$", re.M)


def recognises(text: str) -> bool:
    patterns = (_VERSION, _HIP_SAMPLE, _HELP, _HSA_ERROR, _NEW_REFUSES, _NEW_ERROR)
    lines = text.split("\n")
    return (
        transferbench.WRAPPER in text
        or any(p.search(text) for p in patterns)
        or bool(re.fullmatch(r"\s*Invalid Request\s*", text))
        or any(_BENCHMARK.fullmatch(line) for line in lines)
        or any((m := _TITLE.fullmatch(line)) and m[2] for line in lines)
    )


@dataclass
class _Matrix:
    """One matrix while it is read; `kind` is Uni, Bi or "" (of checks)."""

    kind: str
    statistic: str = ""
    columns: list[int] = field(default_factory=list)
    rows: dict[int, list[str]] = field(default_factory=dict)

    def add(self, label: int, cells: list[str]) -> bool:
        """Whether the row belongs here: rows come in order, so that none of a later matrix is taken for one of this."""
        want = r"PASS|FAIL|N/A" if not self.kind else r"\d+\.\d{3}|N/A|-?nan|-?inf"
        expected = self.columns[len(self.rows) :]
        if len(cells) != len(self.columns) or not expected or not all(re.fullmatch(want, c) for c in cells):
            return False
        if label != expected[0]:
            return False
        self.rows[label] = cells
        return True


@dataclass
class _Table:
    """The sizes of one pair of devices while they are read."""

    both: bool
    src: tuple[str, str] | None = None  # number, Cpu or Gpu
    dst: tuple[str, str] | None = None
    rows: list[tuple[str, ...]] = field(default_factory=list)  # number, unit, mean us, mean GB/s, least us, best GB/s


def _name(number: int | str, kind: str) -> str:
    return f"{kind.upper()} {int(number):02d}"


def _known(src: str, dst: str) -> dict | None:
    known = ends(src, dst)
    return known and {**known, "counted": "read+write" if known["op"] == "copy" else "payload"}


def _matrix_records(m: _Matrix, kinds: dict[int, str], size: int | None, found: Found) -> list[Record]:
    cells = {(r, c): x for r, row in m.rows.items() for c, x in zip(m.columns, row, strict=True) if x != "N/A"}
    if {device for pair in cells for device in pair} - set(kinds):
        found.setdefault(INCOMPLETE, []).append("the list of devices is not whole")
        return []
    if not m.kind:
        wrong = [f"what device {r} copied to device {c} arrived wrong" for (r, c), x in cells.items() if x == "FAIL"]
        found.setdefault(FAIL, []).extend(wrong)
        return []
    gpus = [n for n in sorted(kinds) if kinds[n] == "Gpu"]
    out, why = [], ""
    for (row, column), cell in cells.items():
        known = _known(_name(row, kinds[row]), _name(column, kinds[column]))
        if known is None:  # it never runs these, so the line of a GPU must have been cut
            why = why or f"devices {row} and {column} are listed as CPUs and have a bandwidth"
            continue
        if m.kind == "Bi" and cells.get((column, row), cell) != cell:  # one measurement, printed twice
            why = why or f"the bidirectional figures of devices {row} and {column} differ"
        known["device"] = gpus.index(known["device"])
        record = reading(
            "bandwidth", "-a" if m.kind == "Uni" else "-A", f"{TOOL}.matrix", cell, "GB/s", m.statistic, **known,
            direction="both" if m.kind == "Bi" else "one", buffer_bytes=size,
        )  # fmt: skip
        if record is None:
            found.setdefault(INVALID, []).append(f"device {row} to device {column} is printed as {cell}")
        elif record.reported["value"] > 0:
            out.append(record)
    for n in gpus:  # they copy within themselves one way, and never both ways: else these are rows of another matrix
        if n in m.rows and ((n, n) in cells) is (m.kind == "Bi"):
            why = why or f"device {n} to itself is printed as {cells.get((n, n), 'N/A')}"
    if why:
        found.setdefault(INVALID, []).append(why)
    return flagged(out, why) if why else out


def _table_records(t: _Table, found: Found) -> list[Record]:
    known = _known(_name(*t.src), _name(*t.dst)) if t.src and t.dst else None
    out = []
    for number, unit, mean_us, mean, least_us, best in t.rows if known else ():
        size = int(number) * _UNIT_BYTES[unit]
        for text, us, statistic in ((mean, mean_us, "mean"), (best, least_us, "best")):
            record = reading(
                "bandwidth", "-b" if t.both else "-s -d", f"{TOOL}.sizes", text, "GB/s", statistic, **known,
                direction="both" if t.both else "one", buffer_bytes=size,
            )  # fmt: skip
            if record is None or record.reported["value"] == 0:
                continue
            v, s = float(text), float(us)
            slack = 1e3 * 0.00051 * (v + s) + 1  # both are rounded to 0.001
            if all(abs(v * s * 1e3 - streams * size) > slack for streams in (1, 2)):
                why = f"{text} GB/s for {us} us are not {number} {unit}, nor twice as much"
                found.setdefault(INVALID, []).append(why)
                record = flagged([record], why)[0]
            out.append(record)
    return out


def _expected(launch: str) -> tuple[set[str], set[tuple[str, str]]]:
    """What a launch command asks for: the matrices (Uni, Bi, ""), and the ends of tables (flag s, d or b, device)."""
    if "rocm_bandwidth -a + rocm_bandwidth -A" in launch:
        return {"Uni", "Bi"}, set()
    flags = "".join(re.findall(r"\s-([A-Za-z]+)", launch))
    if "v" in flags:
        return {""}, set()
    lists = re.findall(r"\s-([sdb])\s*([\d,]+)", launch)
    return {k for flag, k in (("a", "Uni"), ("A", "Bi")) if flag in flags}, {
        (flag, device) for flag, devices in lists for device in devices.split(",") if device
    }


def parse(text: str) -> Parsed:
    text = clean(text)
    if transferbench.WRAPPER in text:
        inner = transferbench.parse(text)
        return replace(
            inner, tool=TOOL, records=tuple(replace(r, backend=f"{TOOL}.{r.backend}") for r in inner.records)
        )
    found: Found = {}
    matrices: list[_Matrix] = []
    tables: list[_Table] = []
    matrix: _Matrix | None = None
    table: _Table | None = None
    rejected = 0
    for line in text.split("\n"):
        if m := _TITLE.fullmatch(line):
            matrix, table = None, None
            if m[2] or m[3]:
                matrix = _Matrix(m[1] or "", "mean" if m[2] == "average" else "best")
                matrices.append(matrix)
        elif m := _HEADER.fullmatch(line):
            if matrix and matrix.columns:
                matrix = None  # the title of this one is lost
            if matrix:
                matrix.columns = [int(n) for n in m[1].split()]
        elif m := _BENCHMARK.fullmatch(line):
            table = _Table(m[1] == "Bi")
            tables.append(table)
        elif m := _END.fullmatch(line):
            if table and not table.rows and getattr(table, m[1].lower()) is None:
                setattr(table, m[1].lower(), (m[2], m[3]))
            else:
                table = None  # the title of this one is lost
        elif m := _SIZE_ROW.fullmatch(line):
            if table and any(row[:2] == m.groups()[:2] and row != m.groups() for row in table.rows):
                table = None  # a size once more: the title of its table is lost
            if table and table.src and table.dst:
                table.rows += [m.groups()] if m.groups() not in table.rows else []
            else:
                rejected += 1
        elif _SIZE_LIKE.fullmatch(line):
            rejected += 1
        elif matrix and _ROW_LIKE.fullmatch(line):
            m = _ROW.fullmatch(line)
            rejected += not (m and matrix.add(int(m[1]), m[2].split()))

    version = _VERSION.search(text)
    kinds = {int(m[1]): "Gpu" if m[2] else "Cpu" for m in _DEVICE.finditer(text)}
    launch = _LAUNCH.search(text)
    wanted, asked = _expected(launch[1]) if launch else (set(), set())
    records: list[Record] = []
    names = {"Uni": "unidirectional matrix", "Bi": "bidirectional matrix", "": "matrix of checks"}
    for m in matrices:
        records += _matrix_records(m, kinds, MATRIX_BYTES if version and version[1].startswith("2.") else None, found)
        if not m.columns or len(m.rows) < len(m.columns):
            found.setdefault(INCOMPLETE, []).append(f"the {names[m.kind]} is not whole")
    for kind in sorted(wanted - {m.kind for m in matrices}, reverse=True):
        found.setdefault(INCOMPLETE, []).append(f"it ends before the {names[kind]}")
    most = max((len(t.rows) for t in tables), default=0)
    for t in tables:
        records += _table_records(t, found)
        if len(t.rows) < max(most, 1):
            found.setdefault(INCOMPLETE, []).append("a table of sizes is not whole")
    seen = {(f, e[0]) for t in tables for flag, e in (("s", t.src), ("d", t.dst)) if e for f in (flag, "b")}
    if asked - seen:
        found.setdefault(INCOMPLETE, []).append("it ends before the tables of all devices asked for")
    elif tables and not text.endswith("\n\n"):  # the tool ends with an empty line
        found.setdefault(INCOMPLETE, []).append("it ends inside a table of sizes")
    return _finish(text, records, rejected, bool(matrices and not any(m.kind for m in matrices)), found)


def _finish(text: str, records: list[Record], rejected: int, checks: bool, found: Found) -> Parsed:
    if m := _HSA_ERROR.search(text):
        found.setdefault(FAIL, []).append(m[2] or m[1])
    if m := _NO_ACCESS.search(text):
        found.setdefault(UNSUPPORTED, []).append(m[1])
    elif m := _NEW_REFUSES.search(text):
        found[UNSUPPORTED] = [f"{m[1]} (ROCm 7's {NEW} does not know the old flags)"]
    elif m := _NEW_ERROR.search(text):
        cannot = re.search("(?i)not found|invalid subcommand|not provided", m[1])
        found.setdefault(UNSUPPORTED if cannot else FAIL, []).append(m[1])
    elif _INVALID_REQUEST.search(text):
        found[UNSUPPORTED] = ["Invalid Request (there is no copy of that kind here)"]
    elif _HELP.search(text):
        found[UNSUPPORTED] = ["it printed its help: it does not take these arguments"]
    if _HIP_SAMPLE.search(text):
        found = {UNPARSED: [f"the output of the HIP sample hipBusBandwidth, which is another tool than {NAME}"]}
    elif re.fullmatch(r"\s*\.+\s*", text):
        found[INCOMPLETE] = ["it ends before anything but its dots of progress"]
    elif not records and (rejected or not (checks or any(found.values()))):
        found.pop(INCOMPLETE, None)
        why = f"none of {rejected} line(s) could be read" if rejected else f"no result of {NAME} in it"
        found[UNPARSED] = [why if text.strip() else "empty"]
    elif rejected:
        found.setdefault(INCOMPLETE, []).append(f"{rejected} line(s) could not be read")
    version = _VERSION.search(text)
    said = ("it checked the copies and timed none",) if checks else ()
    return conclude(
        TOOL, records, found, version=version[1] if version else None, rejected_lines=rejected, warnings=said
    )  # fmt: skip
