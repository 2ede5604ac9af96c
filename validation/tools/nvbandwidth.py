"""nvbandwidth: NVIDIA's copies between host and GPUs, between GPUs, and within one, by copy engines (CE) or kernels (SM).

Each figure is the median of its samples (3 by default); -m would make it the mean, which no log tells, nor its buffers'
size. Bytes are counted once, so `device_local_copy` moves twice as much through the memory (`counted` payload). Which way
data flows is taken from the name of the test: a read test prints its matrix as row -> column though the row reads from
the column, a write test the other way round. Of copies both ways at once the "Total" of two GPUs is kept (`direction`
both). Left out are the others: between host and GPU by CE one way while the other is busy, by SM the sum up to version
0.6 and half of it since, and what stood for two GPUs before 0.6; tests of one against all; latencies; several nodes.

A matrix whose cells do not add up to its SUM is INVALID. The text ends with a NOTE (before version 0.6 that stands on
top), the JSON with its last brace.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

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

NAME = "nvbandwidth"
TOOL = "nvbandwidth"
EXECUTABLES = ("nvbandwidth",)
HOST_TESTS = ("host_to_device_memcpy_ce", "device_to_host_memcpy_ce")
PEER_TESTS = ("device_to_device_memcpy_read_ce", "device_to_device_memcpy_write_ce")
SMALLEST_MIB = 512  # its default; it warns of less


def commands(place: Place) -> list[Command]:
    """The copy within a GPU in buffers as large as ours; the links in its own, for which that size would take long."""
    path = place.executables.get(EXECUTABLES[0])
    if place.kind != "cuda" or path is None:
        return []
    mib = max(SMALLEST_MIB, (place.plateau_bytes or 0) // 2**20)
    links = (*HOST_TESTS, *(PEER_TESTS if place.devices > 1 else ()))
    return [
        Command(TOOL, "nvbandwidth_local", (path, "-j", "-b", str(mib), "-t", "device_local_copy")),
        Command(TOOL, "nvbandwidth_links", (path, "-j", "-t", *links), timeout_s=600),
    ]


@dataclass(frozen=True)
class _Test:
    """What is known of a test by its name: how the row and the column of a cell become source and destination."""

    op: str
    engine: str  # CE, SM
    rows: str  # CPU, GPU; "" for a copy within the GPU of the column
    to_column: bool
    both: bool = False
    access: str | None = None

    def prints(self, title: re.Match[str]) -> bool:
        """Whether the title of a matrix is one of this test."""
        arrow = "<->" if self.both else "->" if self.op == "host_to_device" or self.access == "read" else "<-"
        if title["local"] or not self.rows:
            return bool(title["local"]) and not self.rows
        return (title["engine"], title["rows"], title["arrow"]) == (self.engine, self.rows, arrow)


def _known(name: str) -> _Test | None:
    if name == "device_local_copy":
        return _Test("copy", "CE", "", True)
    m = re.fullmatch(r"(host|device)_to_(host|device)_(bidirectional_)?memcpy_(?:(read|write)_)?(ce|sm)", name)
    if m is None:
        return None
    kinds, both, access, engine = (m[1], m[2]), bool(m[3]), m[4], m[5].upper()
    if kinds == ("device", "device") and access:
        return _Test("device_to_device", engine, "GPU", access == "write", both, access)
    if kinds in (("host", "device"), ("device", "host")) and not access and not both:
        return _Test(f"{m[1]}_to_{m[2]}", engine, "CPU", m[1] == "host")
    return None


_VERSION = re.compile(r"^nvbandwidth Version: v?(\d+(?:\.\d+)*)", re.M)
_RUNNING = re.compile(r"Running (\w{1,80})\.\s*")
_TITLE = re.compile(
    r"(?:memcpy (?P<engine>CE|SM) (?P<rows>[CG]PU)\(row\) (?P<arrow>->|<-|<->) GPU\(column\)(?: (?P<part>\w+))?|"
    r"(?P<local>memcpy local GPU\(column\))) bandwidth \(GB/s\)\s*"
)
_HEADER = re.compile(r"((?:\s+\d{1,4})+)\s*")
_ROW = re.compile(r"\s*(\d{1,4})((?:\s+(?:\d{1,9}\.\d\d|N/A|-?nan|-?inf))+)\s*")
_ROW_LIKE = re.compile(r"\s*\d+\s+\S.*")
_SUM = re.compile(r"(?:SUM|&&&& PERF) (\w{1,80}) (\d{1,12}\.\d\d|-?nan|-?inf)(?: [+-]\S+)?\s*")
_WAIVED = re.compile(r"(?:Waived: ?|Waiving \w+\.)\s*")
_NOTE_LAST = re.compile(r"NOTE: The reported results may not reflect")
_NOTE_FIRST = re.compile(r"NOTE: This tool reports current measured bandwidth")
_SMALL = re.compile(r"NOTE: You have chosen a buffer size that is smaller.*")
_WRONG = re.compile(r"Invalid value when checking the pattern.*")
_STOPPED = re.compile(r"(?:\[(?:CUDA_ERROR|cudaError)\w*\]|NVML_ERROR: \[|ASSERT\b).* in expression .*")
_UNKNOWN_TEST = re.compile(r"^(?:ERROR: )?(Testcase .* (?:not found|out of bound)!)", re.M)
_ERROR = re.compile(r"^(?:ERROR|Error): (.*\S)", re.M)
_CANNOT = re.compile(
    r"(?i)no_?device|no cuda.*device|no_binary|no_?kernel_?image|unsupported_ptx|insufficient_?driver|not_?supported|"
    r"driver not loaded|invalid arguments|did not match any testcases"
)
_JSON = re.compile(r"^[ \t]*\{\s*\"nvbandwidth\"", re.M)
_GAP = re.compile(r"[\s,]*")
_FIGURE = re.compile(r"\d{1,9}(?:\.\d{1,17})?(?:[eE][+-]?\d{1,3})?")


def recognises(text: str) -> bool:
    return any(p.search(text) for p in (_VERSION, _JSON, _STOPPED)) or any(
        _TITLE.fullmatch(line) or _RUNNING.fullmatch(line) or _NOTE_LAST.match(line) for line in text.split("\n")
    )


@dataclass
class _Matrix:
    """One matrix of a test: cells as printed. `total`: as printed, None where it has none."""

    name: str
    part: str = ""  # Total, Read1, ...
    columns: int = 0
    rows: list[list[str]] = field(default_factory=list)
    total: str | None = None


def _records(m: _Matrix, test: _Test, found: Found, step: float | None) -> list[Record]:
    """Readings of a matrix. `step`: to what its figures are rounded; None: to 6 digits."""
    direction = "both" if test.both else "one"
    out: list[Record] = []
    total = size = 0.0
    for row, cells in enumerate(m.rows):
        for column, cell in enumerate(cells):
            if cell == "N/A":
                continue
            gpu, other = f"GPU {column}", f"{test.rows} {row}" if test.rows else f"GPU {column}"
            src, dst = (other, gpu) if test.to_column else (gpu, other)
            record = reading(
                "bandwidth", m.name, f"{TOOL}.{test.engine.lower()}", cell, "GB/s", "median", op=test.op, src=src, dst=dst,
                device=row if test.rows == "GPU" else column, counted="payload", direction=direction, access=test.access,
            )  # fmt: skip
            if record is None:
                found.setdefault(INVALID, []).append(f"{m.name}: a bandwidth is printed as {cell[:40]}")
                continue
            total += record.reported["value"]
            size += 1
            if record.reported["value"] > 0 and (src != dst or test.op == "copy"):  # 0.00: not measured, before 0.5
                out.append(record)
    if m.total is not None and m.rows:
        slack = 0.51 * step * (size + 1) if step else total * 1e-5
        if not _FIGURE.fullmatch(m.total) or abs(total - float(m.total)) > slack:
            why = f"{m.name}: its sum is printed as {m.total[:40]}, its cells give {total:.2f}"
            found.setdefault(INVALID, []).append(why)
            return flagged(out, why)
    return out


def _text(text: str, found: Found) -> tuple[list[Record], int]:
    """Readings of a log as text, and how many lines could not be read."""
    matrices: list[_Matrix] = []
    running: list[str] = []
    name, matrix, rejected = "", None, 0
    for line in text.split("\n"):
        if m := _RUNNING.fullmatch(line):
            name, matrix = m[1], None
            running.append(name)
        elif m := _TITLE.fullmatch(line):
            test = _known(name)
            matrix = _Matrix(name, m["part"] or "") if test and test.prints(m) else None
            if matrix:
                matrices.append(matrix)
        elif m := _SUM.fullmatch(line):
            own = re.fullmatch(re.escape(name) + r"(?:_\w+)?", m[1])
            if matrix and own:
                matrix.total = m[2]
            elif not own:  # of another test, whose start is lost
                matrices = [other for other in matrices if other is not matrix]
                rejected += max(1, len(matrix.rows) if matrix else 0)
            matrix = None
        elif matrix and matrix.columns == 0 and (m := _HEADER.fullmatch(line)):
            columns = [int(n) for n in m[1].split()]
            matrix.columns = len(columns) if columns == list(range(len(columns))) else 0
        elif matrix and _ROW_LIKE.fullmatch(line):
            m = _ROW.fullmatch(line)
            cells = m[2].split() if m else []
            if m and int(m[1]) == len(matrix.rows) and len(cells) == matrix.columns:
                matrix.rows.append(cells)
            else:
                rejected += 1
    records: list[Record] = []
    for m in matrices:
        test = _known(m.name)
        if test.both and m.part != "Total":  # one way alone
            continue
        records += _records(m, test, found, 0.01)
        if m.total is None or not m.rows:
            found.setdefault(INCOMPLETE, []).append(f"the matrix of {m.name} is not whole")
    lacking = [n for n in running if _known(n) and n not in {m.name for m in matrices}]
    if lacking:
        found.setdefault(INCOMPLETE, []).append(f"there is no matrix of {lacking[-1]}")
    last_sum = max((m.end() for m in re.finditer(r"^(?:SUM|&&&& PERF) ", text, re.M)), default=0)
    last_start = max((m.end() for m in re.finditer(r"^Running \w", text, re.M)), default=0)
    if not (_NOTE_LAST.search(text, last_sum) or (_NOTE_FIRST.search(text) and last_start < last_sum)):
        found.setdefault(INCOMPLETE, []).append("it ends before its closing note")
    return records, rejected


def _documents(text: str) -> tuple[list[dict], bool]:
    """The objects below "nvbandwidth", figures kept as text; and whether all of them were whole. Of one that is cut off
    or damaged the test cases before that place are kept."""
    decoder = json.JSONDecoder(parse_float=str, parse_int=str, parse_constant=str)
    out, whole = [], True
    for start in [m.start() for m in _JSON.finditer(text)]:
        at = text.index("{", start)
        try:
            out.append(decoder.raw_decode(text, at)[0]["nvbandwidth"])
            continue
        except (ValueError, RecursionError):
            whole = False
        cases, m = [], re.compile(r'"testcases"\s*:\s*\[').search(text, at)
        position = m.end() if m else len(text)
        while position < len(text):
            try:
                case, position = decoder.raw_decode(text, _GAP.match(text, position).end())
            except (ValueError, RecursionError):
                break
            cases.append(case)
        version = re.compile(r'"version"\s*:\s*"([^"]*)"').search(text, at)
        out.append({"testcases": cases, **({"version": version[1]} if version else {})})
    return [d for d in out if isinstance(d, dict)], whole


def _case_matrix(case: dict, test: _Test, devices: Any) -> _Matrix | None:
    """None where it has no matrix of texts, with equal rows as long as the list of devices, and a sum."""
    rows = case.get("bandwidth_matrix")
    if not isinstance(rows, list) or not rows or not all(isinstance(r, list) and r for r in rows):
        return None
    if not all(isinstance(c, str) for r in rows for c in r) or len({len(r) for r in rows}) != 1:
        return None
    columns, total = len(rows[0]), case.get("sum")
    title = _TITLE.fullmatch(str(case.get("bandwidth_description")))
    if (
        not title
        or not test.prints(title)
        or not isinstance(total, str)
        or (isinstance(devices, list) and columns != len(devices))
    ):
        return None
    part = title["part"] or ""
    if part == "Total":  # Read1, Read2 and Total stand below one another in one matrix; the sum is the last one's
        rows = rows[-columns:]
    if test.rows == "GPU" and len(rows) != columns:
        return None
    return _Matrix(str(case["name"]), part, columns, rows, total)


def _json(text: str, found: Found) -> tuple[list[Record], int, int, str | None, list[str]]:
    """Readings, lines that could not be read, waived tests, version and warnings of a log as JSON."""
    documents, whole = _documents(text)
    if not whole:
        found.setdefault(INCOMPLETE, []).append("its JSON is cut off or damaged")
    records: list[Record] = []
    warnings: list[str] = []
    rejected = waived = 0
    version = None
    for document in documents:
        version = str(document.get("version", "")).removeprefix("v") or version
        warnings += [str(document["warning"])] if document.get("warning") else []
        if error := document.get("error"):
            cannot = _CANNOT.search(str(error)) and not _WRONG.search(str(error))
            found.setdefault(UNSUPPORTED if cannot else FAIL, []).append(str(error))
        cases = document.get("testcases")
        cases = [c for c in cases if isinstance(c, dict)] if isinstance(cases, list) else []
        failed = {str(c.get("name")) for c in cases if c.get("status") == "Error"}
        for case in cases:
            name, status = str(case.get("name")), case.get("status")
            test = _known(name)
            waived += status == "Waived"
            if "name" not in case or status not in ("Passed", "Waived", "Running", "Error", "ERROR"):
                rejected += 1
            elif status == "Error":
                found.setdefault(FAIL, []).append(f"{name} ended in an error")
            elif status == "ERROR":
                warnings.append(f"Testcase {name} not found")
            elif status == "Running" and name not in failed:
                found.setdefault(INCOMPLETE, []).append(f"{name} did not end")
            if status != "Passed" or test is None:
                continue
            matrix = _case_matrix(case, test, document.get("GPU Device list"))
            if matrix is None or not all(f'"{c}"' in text for row in matrix.rows for c in row):
                rejected += 1
            elif not test.both or matrix.part == "Total":
                records += _records(matrix, test, found, None)
    return records, rejected, waived, version, warnings


def parse(text: str) -> Parsed:
    text = clean(text)
    found: Found = {}
    stops = [m[0] for m in _STOPPED.finditer(text)]
    if _JSON.search(text):
        records, rejected, waived, version, warnings = _json(text, found)
        stops = [] if FAIL in found or UNSUPPORTED in found else stops  # the JSON quotes what stopped it
    elif recognises(text):
        records, rejected = _text(text, found)
        waived = sum(bool(_WAIVED.fullmatch(line)) for line in text.split("\n"))
        m = _VERSION.search(text)
        version = m[1] if m else None
        warnings = [m[0] for m in _SMALL.finditer(text)]
        unknown = [m[1] for m in _UNKNOWN_TEST.finditer(text)]
        warnings += unknown
        stops += [e for e in (m[1] for m in _ERROR.finditer(text)) if e not in unknown]
    else:
        why = f"no output of {NAME}" if text.strip() else "empty"
        return Parsed(TOOL, status=UNPARSED, reason=why)
    for wrong in _WRONG.finditer(text):
        found.setdefault(FAIL, []).insert(0, wrong[0])
    for stop in stops:
        found.setdefault(UNSUPPORTED if _CANNOT.search(stop) else FAIL, []).append(stop)
    if waived:
        warnings.append(f"{waived} test(s) waived: they do not apply to this machine")
    said = tuple(redact(w)[:200] for w in dict.fromkeys(warnings))
    if not records and rejected:
        found.pop(INCOMPLETE, None)
        found[UNPARSED] = [f"none of {rejected} matrices or line(s) could be read"]
    elif rejected:
        found.setdefault(INCOMPLETE, []).append(f"{rejected} matrices or line(s) could not be read")
    elif not records and not found:
        found[UNSUPPORTED] = [said[-1] if said else "it ran no test that is read here"]
    return conclude(TOOL, records, found, version=version, rejected_lines=rejected, warnings=said)
