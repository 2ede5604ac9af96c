"""likwid-bench, or where it is missing stress-ng: the memory of a CPU host.

likwid-bench times assembly kernels. A copy with ordinary stores and one with streaming stores (`_mem`, `_nt`) are the
counterparts of our C copies. "MByte/s" is 1e6 B/s of the whole run: data volume / time, each load and store once, without
the lines that an ordinary store reads. "Size (Byte)" is all streams together. Not read: update and daxpy, whose size
means another thing in version 4, and kernels that are no streams.

stress-ng --stream runs copy, scale, add and triad in turn, one instance a thread, each with arrays of its own, and prints a
line an instance after 4.5 s: bytes read and written apart, and its "MB" is 2**20. Nothing in it is the sum that one copy
could be compared with, so each figure stays by itself: `op` stream_mix, `part` read or write, `instance`.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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

NAME = "likwid-bench / stress-ng"
TOOL = "host_stream"
EXECUTABLES = ("likwid-bench", "stress-ng")
KERNELS = {  # likwid's name -> ours, streams loaded, streams stored
    "copy": ("copy", 1, 1), "stream": ("triad", 2, 1), "triad": ("schoenauer_triad", 3, 1), "load": ("read", 1, 0),
    "sum": ("read", 1, 0), "store": ("write", 0, 1), "ddot": ("dot", 2, 0),
}  # fmt: skip
VECTORS = (("avx512f", "avx512"), ("avx", "avx"), ("sse2", "sse"))  # CPU flag -> likwid's word, widest first
TOLERANCE = 0.01
SECONDS = {"likwid-bench": 2, "stress-ng": 20}  # stress-ng fills its arrays within its time
CACHE_SIZES = 4  # stress-ng: an array is this many times its cache size; one, from 0.20 on


def commands(place: Place) -> list[Command]:
    """likwid-bench: both copies, on our CPUs, touched by the threads that use them, as large as ours. Else stress-ng."""
    if place.kind != "cpu" or not place.plateau_bytes:
        return []
    cpus = ",".join(map(str, place.cpus))
    env = {"LC_ALL": "C"}
    if likwid := place.executables.get("likwid-bench"):
        pinned = ("taskset", "-c", cpus) if cpus else ()
        area = f"N:{2 * place.plateau_bytes // 1000}kB:{place.threads}"  # all streams together
        return [
            Command(
                TOOL, f"likwid_{kernel}",
                (*pinned, likwid, "-t", kernel, "-W", area, "-s", str(SECONDS["likwid-bench"])), env,
            )
            for kernel in _copies(_cpu_flags(), platform.machine())
        ]  # fmt: skip
    if stress := place.executables.get("stress-ng"):
        options = ["--stream", str(place.threads), "--stream-l3-size", str(place.plateau_bytes // CACHE_SIZES),
                   "--timeout", f"{SECONDS['stress-ng']}s", *(("--taskset", cpus) if cpus else ())]  # fmt: skip
        return [Command(TOOL, "stress_ng_stream", (stress, *options), env)]
    return []


def _cpu_flags(path: Path = Path("/proc/cpuinfo")) -> set[str]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    found = re.search(r"^flags\s*:(.*)$", text, re.M)
    return set(found[1].split()) if found else set()


def _copies(flags: set[str], machine: str) -> tuple[str, ...]:
    """likwid's copies with ordinary and with streaming stores, the widest that this CPU has."""
    if machine in ("aarch64", "arm64"):
        return ("copy", "copy_nt")
    vector = next((word for flag, word in VECTORS if flag in flags), None)
    return (f"copy_{vector}", f"copy_mem_{vector}") if vector else ("copy", "copy_mem")


_TITLE = re.compile(r"^LIKWID MICRO BENCHMARK *$", re.M)
_TEST = re.compile(rf"({'|'.join(KERNELS)})((?:_(?:sp|mem|nt|avx512|avx|sse|fma|neon|pair|sve\d+|vsx\d|scalar\d))*)")
_GAP = r"[ \t]+"
_FIELDS = {
    "test": r"Test: (\S+)", "threads": r"Using (\d{1,6}) threads", "time": rf"Time:{_GAP}(\d\.\d+e[+-]\d{{1,3}}) sec",
    "iterations": rf"Iterations:{_GAP}(\d{{1,18}})", "each": rf"Iterations per thread:{_GAP}(\d{{1,18}})",
    "size": rf"Size \(Byte\):{_GAP}(\d{{1,18}})", "volume": rf"Data volume \(Byte\):{_GAP}(\d{{1,20}})",
    "rate": rf"MByte/s:{_GAP}(\d+\.\d+)",
}  # fmt: skip
_LINES = {name: re.compile(rf"^{pattern} *\n", re.M) for name, pattern in _FIELDS.items()}  # whole lines only
_PER_ELEMENT = re.compile(r"^(Load|Store) bytes per elem(?:ent|\.):[ \t]+(\d{1,4})$", re.M)
_THREAD = re.compile(r"^Group: \d+ Thread \d+ Global Thread \d+ running on (?:hwthread|core) (\d{1,6}) - "
                     r"Vector length (\d{1,18}) Offset -?\d+$", re.M)  # fmt: skip
_RULE = re.compile(r"^-{40,}$", re.M)

_RATE = re.compile(
    r"^stress-ng: info: +\[\d+\] (?:stress-ng-)?stream: memory rate: (?:(\d+\.\d+) MB/sec|"
    r"(\d+\.\d+) MB read/sec, (\d+\.\d+) MB write/sec), (\d+\.\d+) (?:double precision )?Mflop/sec \(instance (\d{1,6})\)$"
)
_INSTANCES = re.compile(r"dispatching hogs:.*?\b(\d{1,6}) stream\b")
_CACHE = re.compile(r"stream: (?:[Uu]sing (?:CPU )?cache size of|cannot determine CPU L3 cache size, defaulting to) (\d{1,12})K")
_BUFFERS = re.compile(r"stream: using 3 cache sized buffers for stream operations, total (\d{1,12})K per stream instance")
_TOO_SHORT = re.compile(r"\brun (?:duration )?too short to (?:reliably )?determine memory rate")
_ENDED = re.compile(r"^stress-ng: info: +\[\d+\] (?:un)?successful run completed in ", re.M)
_FAILED = re.compile(r"^stress-ng: fail: .*|^stress-ng: info: +\[\d+\] unsuccessful run completed.*", re.M)
_UNTRUSTWORTHY = re.compile(r"^stress-ng: \w+: +\[\d+\] metrics untrustworthy: [1-9].*", re.M)

_CANNOT = re.compile(
    r"^(?:Error: (?:Unknown test case|Insufficient memory|Cannot use desired domain|Unsupported processor|Streams too small|"
    r"The given vector length)|ERROR: Illegal instruction|Unknown test case).*|"
    r"^stress-ng: error: .*(?:[Cc]annot allocate|failed to mmap|[Oo]ut of memory).*|^stress-ng: unrecognized option .*|"
    r"^Value .* is out of range for stream-.*|^stress-ng: \w+: +\[\d+\] .*\bskipping stressor.*",
    re.M,
)
_ERROR = re.compile(
    r"^(?:Error\b|ERROR\b|Stream size cannot be read|Unknown affinity domain|taskset: failed|Segmentation fault).*|"
    r"^stress-ng: error: .*",
    re.M,
)
_OWN = re.compile(
    rf"{_TITLE.pattern}|^Error: (?:Unknown test case|Insufficient memory to fulfill|Cannot (?:use desired domain|place stream))|"
    r"^This happens if you want to run a kernel that uses instructions|^Stream size cannot be read, should look like|"
    r"^Allocate: Process running on (?:hwthread|core) |^stress-ng: (?:info|error|fail|warn|metrc|debug|unrecognized)\b|"
    r"\bis out of range for stream-|^taskset: failed",
    re.M,
)


@dataclass(frozen=True)
class _Run:
    """What one run says. `missing`: why it is not whole."""

    records: tuple[Record, ...] = ()
    missing: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    rejected: int = 0


def recognises(text: str) -> bool:
    return bool(_OWN.search(text))


def parse(text: str) -> Parsed:
    """Every run in the log; what is wrong with it first in the order FAIL, INVALID, UNSUPPORTED, INCOMPLETE, UNPARSED."""
    text = clean(text)
    runs = [_likwid(part) for part in _TITLE.split(text)[1:]]
    if re.search(r"^stress-ng: ", text, re.M):
        runs.append(_stress(text))
    errors = [_words(m[0]) for m in _ERROR.finditer(text) if not _CANNOT.match(m[0])]
    whole = bool(runs) and not any(run.missing for run in runs)
    remarks = [remark for run in runs for remark in run.remarks] + (errors if whole else [])
    version = re.search(r"\bstress-ng,? (?:version )?(\d+\.\d+\.\d+)\b", text)
    status, reason = _status(text, runs, [] if whole else errors)
    return Parsed(
        TOOL, tuple(r for run in runs for r in run.records), status, reason, version[1] if version else None,
        sum(run.rejected for run in runs), tuple(dict.fromkeys(remarks))[:20],
    )  # fmt: skip


def _status(text: str, runs: Sequence[_Run], errors: Sequence[str]) -> tuple[str | None, str]:
    """The gravest thing that is wrong with a log, and after it the others."""
    records = [r for run in runs for r in run.records]
    cannot = [_words(m[0]) for m in _CANNOT.finditer(text)]
    found = [(FAIL, why) for why in errors[:1] if not cannot]
    found += [(FAIL, _words(m[0])) for m in _FAILED.finditer(text)][:1]
    found += [(INVALID, why) for why in dict.fromkeys(f.partition(": ")[2] for r in records for f in r.flags)]
    found += [(INVALID, _words(m[0])) for m in _UNTRUSTWORTHY.finditer(text)][:1]
    found += [(UNSUPPORTED, why) for why in cannot]
    if not any(status in (FAIL, UNSUPPORTED) for status, _ in found):
        found += [(INCOMPLETE, why) for why in dict.fromkeys(why for run in runs for why in run.missing)]
    if not found and not records:
        remarks = [remark for run in runs for remark in run.remarks]
        found.append((UNPARSED, "; ".join(remarks) or ("no rate was understood" if text.strip() else "empty")))
    if not found:
        return None, ""
    first = found[0][0]
    return first, "; ".join(why if status == first else f"{status}: {why}" for status, why in found[:4])


def _words(line: str) -> str:
    """A message without the tool's name and process."""
    return redact(re.sub(r"^stress-ng: (?:\w+: +\[\d+\] )?", "", line)).strip()


def _likwid(part: str) -> _Run:
    """One run, given what stands after its title."""
    fields: dict[str, str] = {}
    for name, line in _LINES.items():
        values = set(line.findall(part))
        if len(values) == 1:
            fields[name] = values.pop()
    rate = _LINES["rate"].search(part)
    rejected = int(rate is None and "MByte/s:" in part)
    lacks = [name for name in _FIELDS if name not in fields]
    missing = ()
    if not (rate and _RULE.search(part, rate.end())):
        missing = ("likwid-bench ends before its closing part",)
    elif lacks:
        missing = (f"likwid-bench: no line, or several, of {', '.join(lacks)}",)
    if lacks:
        return _Run(missing=missing, rejected=rejected)
    if not (test := _TEST.fullmatch(fields["test"])):
        return _Run(missing=missing, remarks=(f"{fields['test']} is a kernel that is not read",))
    op, loads, stores = KERNELS[test[1]]
    words = set(test[2].split("_"))
    element = 4 if "sp" in words else 8
    size, volume, threads, each = (int(fields[x]) for x in ("size", "volume", "threads", "each"))
    buffer, rest = divmod(size, loads + stores)
    places = _THREAD.findall(part)
    doubts = []
    if rest or volume != each * size:
        doubts.append(f"data volume {volume} is not size x iterations")
    if int(fields["iterations"]) != each * threads:
        doubts.append("its threads did not all run the same iterations")
    if any(int(n) != {"Load": loads, "Store": stores}[what] * element for what, n in _PER_ELEMENT.findall(part)):
        doubts.append(f"bytes per element are not those of {fields['test']}")
    if len(places) == threads and sum(int(n) for _, n in places) * element != buffer:
        doubts.append("size is not what its threads worked on")
    time_s, figure = float(fields["time"]), fields["rate"]
    if not time_s or not float(figure) or abs(volume / time_s / 1e6 / float(figure) - 1) > TOLERANCE:
        doubts.append(f"{figure} MByte/s is not data volume / time")
    cpus = sorted({int(cpu) for cpu, _ in places}) if len(places) == threads else None
    crowded = (f"{threads} threads on {len(cpus)} hardware threads",) if cpus and len(cpus) < threads else ()
    r = reading(
        "bandwidth", fields["test"], "likwid-bench", figure, "MB/s", "mean", [f"{INVALID}: {d}" for d in doubts],
        op=op, dtype="fp32" if element == 4 else "fp64", counted="read+write", buffer_bytes=buffer, threads=threads,
        hwthreads=cpus, stores=("streaming" if words & {"mem", "nt"} else "ordinary") if stores else None,
    )  # fmt: skip
    return _Run((r,) if r else (), missing, crowded, int(r is None))


def _stress(text: str) -> _Run:
    """All instances of a log."""
    lines = [m.groups() for line in text.split("\n") if (m := _RATE.match(line))]
    said, cache, buffers = _INSTANCES.search(text), _CACHE.search(text), _BUFFERS.search(text)
    instances = int(said[1]) if said else None
    buffer = None
    if buffers:
        buffer = int(buffers[1]) * 1024 // 3
    elif cache and instances:
        buffer = int(cache[1]) * 1024 * CACHE_SIZES // instances
    records = []
    for both, read, write, mflop, instance in lines:
        flags = [f"{INVALID}: {why}" for why in _not_the_mix(both, read, write, mflop)]
        parts = [(both, None, "read+write")] if both else [(read, "read", None), (write, "write", None)]
        records += [
            reading(
                "bandwidth", "stream", "stress-ng", figure, "MiB/s", "mean", flags, op="stream_mix", part=part, counted=counted,
                dtype="fp64", buffer_bytes=buffer, instance=int(instance), instances=instances,
            )
            for figure, part, counted in parts
        ]  # fmt: skip
    missing = [f"stress-ng: {m[0]}" for m in [_TOO_SHORT.search(text)] if m]
    ran = len({line[-1] for line in lines})
    if not _ENDED.search(text):
        missing.append("stress-ng ends before its closing part")
    elif lines and instances is not None and ran != instances:
        missing.append(f"stress-ng: rates of {ran} instances, of {instances} that ran")
    return _Run(tuple(r for r in records if r), tuple(missing), (), text.count("stream: memory rate: ") - len(lines))


def _not_the_mix(both: str | None, *rates: str | None) -> list[str]:
    """Copy, scale, add and triad read 6 arrays, write 4 and do 4 operations an element; with indices they read more."""
    read, write, mflop = (float(x or 0) for x in rates)
    if both:  # before 0.15, which counted the bytes of 4 arrays as operations
        pairs = [(float(both), mflop * 10 / 4)]
    else:
        pairs = [(read, write * 6 / 4), (read * 2**20, mflop * 1e6 * 6 * 8 / 4)]
    if all(a > 0 and abs(b / a - 1) <= TOLERANCE for a, b in pairs):
        return []
    return ["bytes read, bytes written and operations are not those of copy, scale, add and triad"]
