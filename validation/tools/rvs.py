"""RVS, the ROCm Validation Suite: gst (GEMM), mem, pebb and pbqt (copies over links), babel (BabelStream), iet (power).

Traps of its logs, and what is done about them. PASS proves nothing: mem prints it whatever was found, pebb and pbqt
always store it; only error counts and figures are read. gst closes a device with the MAXIMUM of its intervals: that is a
"best", the intervals after the ramp-up are readings of their own. babel's first column is its maximum; up to RVS 1.4 the
columns after it are seconds. Threads write between each other's lines, so a row belongs to the action and device it
names. An action's name holds rounded sizes; exact ones stand in the configuration alone. gm prints microwatts as W: unread.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from escher_kernels.records import Record
from validation import tools
from validation.tools import FAIL, INCOMPLETE, INVALID, UNPARSED, UNSUPPORTED, Command, Parsed, Place

NAME = "RVS"
EXECUTABLES = ("rvs",)

# ---- how it is run

GFX942 = ("mi300x", "mi325x", "mi300a")
GFX950 = ("mi355x", "mi350x")
ANY_ELEMENTS, MOST_ELEMENTS = 2**28, 2**30  # of a babel array: RVS counts in 32 bits, and holds three on the host too
BLOCK_ELEMENTS = 2**20  # an array must be a whole number of thread blocks, whatever their size
COPY_BYTES = 2**30


def commands(place: Place) -> list[Command]:
    """One run a module, every device in turn (mem: together). The GEMM's data are RVS's "trig", sines and cosines: its
    "rand" are small whole numbers, on which a device clocks higher."""
    if place.kind != "rocm" or "rvs" not in place.executables:
        return []
    elements = min(place.plateau_bytes // 4 if place.plateau_bytes else ANY_ELEMENTS, MOST_ELEMENTS)
    elements = max(elements // BLOCK_ELEMENTS, 1) * BLOCK_ELEMENTS
    babel = {
        "num_iter": 500, "array_size": elements, "test_type": 1, "mibibytes": False, "o/p_csv": False,
        **dict.fromkeys(("read", "write", "copy", "mul", "add", "triad", "dot"), True), "subtest": 5,  # all, before 7.0
    }  # fmt: skip
    mem = {  # as shipped, with fewer passes. Its 128 MiB may lie in a last-level cache: for errors, not for bandwidth
        "mapped_memory": False, "mem_blocks": 128, "num_passes": 100, "thrds_per_blk": 64, "stress": True, "num_iter": 50000,
    }  # fmt: skip
    copies = {"duration": 0, "block_size": COPY_BYTES, "warm_calls": 3, "hot_calls": 10}  # 0: each pair once
    pebb = [
        _action(f"pebb-{way}", "pebb", **copies, host_to_device=way == "h2d", device_to_host=way == "d2h")
        for way in ("h2d", "d2h")
    ]
    n = max(place.devices, 1)
    return [
        _command(place, "gst", [_action("gst-bf16-trig", "gst", **_gemm_keys(place.target))], 120 + 90 * n),
        _command(place, "babel", [_action("babel-float", "babel", **babel)], 120 + 90 * n),
        _command(place, "pebb", pebb, 120 + 60 * n),
        _command(place, "mem", [{**_action("mem", "mem", **mem), "parallel": True}], 600),
    ]


def _command(place: Place, module: str, actions: list[dict[str, Any]], timeout_s: float) -> Command:
    # level 3: mem says at no lower one what it found
    argv = (place.executables["rvs"], "-c", f"{{dir}}/{module}.yaml", "-d", "3")
    files = {f"{module}.yaml": yaml.safe_dump({"actions": actions}, sort_keys=False)}
    return Command("rvs", f"rvs-{module}", argv, files=files, timeout_s=timeout_s)


def _action(name: str, module: str, **keys: Any) -> dict[str, Any]:
    return {"name": name, "device": "all", "module": module, "parallel": False, "count": 1, **keys}


def _gemm_keys(target: str | None) -> dict[str, Any]:
    """The shape and the library that RVS ships for the target; elsewhere the square that we time too. Target 0: no
    target of its own, since ours is the comparison. Fewer hot calls than shipped: several intervals, not one."""
    common = {
        "log_interval": 3000, "ramp_interval": 5000, "duration": 15000, "copy_matrix": False, "target_stress": 0,
        "matrix_init": "trig", "data_type": "bf16_r", "alpha": 1, "beta": 0, "transb": 0,
    }  # fmt: skip
    hipblaslt = {"out_data_type": "bf16_r", "compute_type": "fp32_r", "rotating": 512, "blas_source": "hipblaslt"}
    if target in GFX942:
        strides = {"lda": 8320, "ldb": 8320, "ldc": 4992, "ldd": 4992}
        return common | _sizes(4864, 4096, 8192) | strides | {"transa": 1, "hot_calls": 1000}
    if target in GFX950:
        return common | hipblaslt | _sizes(8192, 8192, 16384) | {"transa": 1, "hot_calls": 500}
    return common | hipblaslt | _sizes(8192, 8192, 8192) | {"transa": 0, "hot_calls": 100}


def _sizes(m: int, n: int, k: int) -> dict[str, int]:
    return {"matrix_size_a": m, "matrix_size_b": n, "matrix_size_c": k}


# ---- what its configuration says

DEFAULT_SIZE = 5760
DTYPES = {"sgemm": "fp32", "dgemm": "fp64", "hgemm": "fp16", "i8": "int8"}  # others: their own name
NAMED_DTYPE = re.compile(r"(?i)(?:^|[-_.])(bf16|fp16|fp32|fp64|fp8|bf8|fp6|bf6|fp4|i8|[sdh]gemm)(?=$|[-_.])")
NAMED_DATA = re.compile(r"(?i)(?:^|[-_.])(rand|trig)(?=$|[-_.])")
DATA = {"rand": "integers", "hiprand": "random", "trig": "trig"}  # rand: whole numbers from -2 to 2 in bf16 and fp16
PRECISIONS = {1: ("fp32", 4), 2: ("fp64", 8), 3: ("fp32", 4), 4: ("fp64", 8)}  # babel's test_type
EMBEDDED = re.compile(r"(?m)^actions:[ \t]*\n(?:(?:[ \t].*|- .*|)\n)+")


def _actions(config: str | None, text: str) -> tuple[dict[str, dict[str, Any]], str | None]:
    """Name -> keys of the actions of a configuration, given or standing in the log; and what is wrong with it."""
    source = config or (m[0] if (m := EMBEDDED.search(text)) else "")
    try:
        data = yaml.safe_load(source)
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}, "the configuration is no YAML"
    listed = data.get("actions") if isinstance(data, dict) else None
    out: dict[str, dict[str, Any]] = {}
    for keys in listed if isinstance(listed, list) else []:
        if isinstance(keys, dict) and isinstance(keys.get("name"), str):
            out[keys["name"]] = {} if keys["name"] in out else keys  # of two with one name, which ran is not told
    return out, None if out or not source else "the configuration lists no actions"


def row_major(m: int, n: int, k: int, transa: bool, transb: bool) -> dict[str, Any]:
    """The row-major GEMM that a column-major one is: m, n, k, layout.

    C = op(A) op(B) of M x N in column-major order is, byte for byte, C^T = op(B)^T op(A)^T of N x M in row-major
    order. So B is the first factor and A the second, and a matrix that BLAS transposes lies transposed for us too.
    """
    return {"m": n, "n": m, "k": k, "layout": ("T" if transb else "N") + ("T" if transa else "N")}


def _gemm(action: str, keys: dict[str, Any]) -> dict[str, Any]:
    """What is known of the GEMM of an action: from its configuration, else dtype and data from its name alone."""
    named, data = NAMED_DTYPE.search(action), NAMED_DATA.search(action)
    out: dict[str, Any] = {"op": "gemm", "dtype": _dtype(named[1]) if named else None, "data": data and DATA[data[1].lower()]}
    if not keys:
        return out
    out["dtype"] = _dtype(str(keys.get("data_type") or keys.get("ops_type") or "sgemm"))
    if keys.get("compute_type") == "xf32_r":
        out["dtype"] = "tf32"
    out["data"] = DATA.get(str(keys.get("matrix_init")))
    sizes = [_whole(keys, f"matrix_size_{x}", DEFAULT_SIZE) for x in "abc"]
    trans = [_whole(keys, "transa", 0), _whole(keys, "transb", 1)]  # RVS's defaults
    if keys.get("gemm_mode"):  # a batch is another operation than one GEMM of that shape
        out["batch"] = _whole(keys, "batch_size", None)
    elif None not in sizes and None not in trans:
        out |= row_major(*sizes, *map(bool, trans))
    return out


def _dtype(name: str) -> str:
    name = name.lower().removesuffix("_r")
    return DTYPES.get(name, name)


def _whole(keys: dict[str, Any], key: str, default: int | None) -> int | None:
    value = keys.get(key, default)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


# ---- what its output says

MODULES = ("gst", "mem", "pebb", "pbqt", "babel", "iet")
POSSIBLE = {"compute": (1e6, 1e17), "bandwidth": (1e6, 1e14), "sustained": (1.0, 3e3)}  # FLOP/s, B/s, W of one device
NO_NUMBER = re.compile(r"(?i)[-+]?(?:inf(?:inity)?|nan)")
CANNOT = re.compile(
    r"(?i)no devices match|no peers found|no platform support|no test levels support|no AMD compatible GPU|"
    r"no longer supports|no GPUs detected|invalid (?:output )?data-type"
)
GM = "readings of gm are not used: it prints microwatts as W"

_LEVEL = r"(?:NONE|RESULT|ERROR|INFO|DEBUG|TRACE) *\]"
_RECOGNISED = re.compile(
    rf"(?m)^[ \t]*\[{_LEVEL} \[ *\d+\.\d+ *\]|^[ \t]*RVS-[A-Z]+[: ]|^[ \t]*\[[^\]\n]+\] \[GPU:: *\d+|"
    r"ROCm Validation Suite \(RVS\)|^\| \S+ +\| [A-Z]{2,5} +\| (?:PASS|FAIL) +\||^[ \t]*gpu_id,function,num_times,n_elements,|"
    r'^[ \t]*GPU Id +Function +Mi?Bytes/sec|"loglevelname"\s*:|\A\s*\{\s*"version"\s*:\s*"[\d.]+",\s*"[a-z]{2,5}"\s*:\s*\{'
)


def recognises(text: str) -> bool:
    return bool(_RECOGNISED.search(text))


def parse(text: str, config: str | None = None) -> Parsed:
    """The readings of a log, of JSON (-j) or of babel's CSV. `config`: the YAML text that RVS ran with."""
    text = tools.clean(text)
    actions, trouble = _actions(config, text)
    found = _Found(text, actions, dict.fromkeys([trouble] if trouble else []))
    documents, whole = _json(text) if recognises(text) else (None, False)
    if documents is None:
        _read_lines(found)
        _close_lines(found)
    for document in documents or []:
        _read_json(found, document)
    if documents and not whole:
        found.issue(INCOMPLETE, "the JSON ends before its closing bracket")
    return found.verdict()


@dataclass
class _Stream:
    """One device in one gst action, until its closing line: the intervals, and what was seen of its ramp-up."""

    rows: list[tuple[int, str]] = field(default_factory=list)
    began: bool = False
    ended: bool = False


@dataclass
class _Found:
    """What was read so far; `verdict` judges the whole."""

    text: str
    actions: dict[str, dict[str, Any]]  # of the configuration
    warnings: dict[str, None]  # in order, each once; so are issues and consequences
    records: list[tuple[int, Record]] = field(default_factory=list)  # with the number of their line
    issues: dict[tuple[str, str], None] = field(default_factory=dict)  # status, reason
    consequences: dict[str, None] = field(default_factory=dict)  # failures without a reason: told only where none is known
    rejected: int = 0
    version: str | None = None
    line: int = 0
    modules: dict[str, str | None] = field(default_factory=dict)  # announced action -> module
    answered: set[str] = field(default_factory=set)  # actions with a reading, a message or an error
    results: dict[str, tuple[str, str]] = field(default_factory=dict)  # of the summary: action -> module, PASS or FAIL
    box: bool = False  # the summary began
    streams: dict[tuple[str, str], _Stream] = field(default_factory=dict)
    powers: dict[tuple[str, str], str] = field(default_factory=dict)  # iet, until its closing line: the highest so far
    links: dict[tuple[str, str], tuple[int, set[str]]] = field(default_factory=dict)  # how many rows, and which are there
    mem: Counter[str] = field(default_factory=Counter)
    babel: dict[str, str] = field(default_factory=dict)  # device -> action, until its table is closed
    babel_action: str = "babel"
    precision: str | None = None
    array_bytes: int | None = None  # of babel, as it prints it: rounded
    columns: tuple[str, ...] = ()  # of an open table or CSV: which of the two, then what it needs
    rows: set[str] = field(default_factory=set)  # devices in it

    def issue(self, status: str, reason: str) -> None:
        self.issues[status, tools.redact(" ".join(reason.split()))] = None

    def warn(self, what: str) -> None:
        self.warnings[tools.redact(what)] = None

    def error(self, message: str, where: str = "") -> None:
        """A message of the tool itself."""
        whole = f"{where} {message}".strip() or "an error without words"
        if "Action failed to run" in message:
            self.consequences[whole] = None
        else:
            self.issue(UNSUPPORTED if CANNOT.search(message) else FAIL, whole)

    def add(
        self, family: str, action: str, module: str, text: str, unit: str, statistic: str, flag: str = "",
        line: int | None = None, **params: Any,
    ) -> None:  # fmt: skip
        """Keep a figure that the log holds. One that cannot be is flagged, and is an issue; what is none is counted."""
        self.answered.add(action)
        record = tools.reading(family, action, f"rvs {module}", text, unit, statistic, **params)
        device = f" device {params['device']}" if params.get("device") else ""
        if record is None or text not in self.text:
            if NO_NUMBER.fullmatch(text):
                self.issue(INVALID, f"{module} {action}{device}: {text} {unit} is no figure")
            else:
                self.rejected += 1
            return
        value, (low, high) = tools.base_value(record), POSSIBLE[family]
        if not low <= value <= high:
            flag = f"INVALID: {'zero' if value == 0 else 'no device does that'}"
        if flag:
            status, _, why = flag.partition(": ")
            self.issue(status, f"{module} {action}{device}: {text} {unit}: {why}")
            record = replace(record, flags=(flag,))
        self.records.append((self.line if line is None else line, record))

    def verdict(self) -> Parsed:
        for reason in {} if any(s in (FAIL, UNSUPPORTED) for s, _ in self.issues) else self.consequences:
            self.issue(FAIL, reason)
        if self.mem["errors"]:
            self.issue(FAIL, f"mem: {self.mem['errors']} errors, whatever PASS says")
        elif self.mem and not self.mem["told"]:
            self.warn("mem: it does not say whether there were errors (PASS is printed whatever it found); use -d 3 or -j")
        self._asked_for()
        if not (self.records or self.issues or self.mem["told"]):
            self.issue(*self._nothing())
        reasons = {status: [r for s, r in self.issues if s == status] for status in tools.GRAVEST}
        first, *others = [status for status in tools.GRAVEST if reasons[status]] or [None]
        for status in others:
            self.warn(f"{status}: {_shortly(reasons[status])}")
        return Parsed(
            "rvs", tuple(r for _, r in sorted(self.records, key=lambda x: x[0])), first,
            _shortly(reasons[first]) if first else "", self.version, self.rejected, tuple(self.warnings),
        )  # fmt: skip

    def _asked_for(self) -> None:
        """Every action of the configuration must be in the log, unless it is another run's configuration."""
        asked = [action for action, keys in self.actions.items() if keys.get("module") in MODULES]
        missing = [action for action in asked if action not in self.answered and action not in self.results]
        if len(missing) < len(asked):
            for action in missing:
                self.issue(INCOMPLETE, f"{action}: asked for, and not in the log")
        elif asked and self.records:
            self.warn("no action of the configuration is in the log")

    def _nothing(self) -> tuple[str, str]:
        """Status and reason of a log without readings and without messages."""
        if not self.text.strip():
            return UNPARSED, "empty"
        if GM in self.warnings:
            return UNSUPPORTED, GM
        if self.rejected:
            return UNPARSED, f"{self.rejected} lines look like rows, and none could be read"
        if self.mem:
            return INCOMPLETE, "mem: neither a bandwidth nor an error count"
        if self.results:
            return UNPARSED, "a summary without figures: quiet mode (-q) prints none; run without it, or read the JSON"
        return UNPARSED, "no reading of RVS stands in it"


def _shortly(reasons: list[str]) -> str:
    return "; ".join(reasons[:2]) + (f" (and {len(reasons) - 2} more)" if len(reasons) > 2 else "")


# ---- text: each function reads the lines of its module, without level and time, and says whether a line was one

ACTION = rf"\[(?P<action>(?!{_LEVEL}|[GC]PU::|[\d. ]+\])[^\]]+)\] *"
GPU = r"\[GPU:: *(?P<gpu>\d+)\]"
NODE = r"\[GPU:: *\d+ - *(?P<{0}>\d+) - \S+\]"
COUNT = r"\[ *(?P<i>\d{1,4})/ *(?P<of>\d{1,4})\]"
FIGURE = r"(?P<what>\(pending\)|\(not measured\)|(?P<value>\S+) GBps(?: \(\*\))?)(?: duration: \S+ secs)?"
FUNCTION = r"(?P<function>Read|Write|Copy|Mul|Add|Triad|Dot)"

PREFIX = re.compile(rf"\s*(?:\[({_LEVEL}) \[ *\d+\.\d+ *\] ?)?(.*?)\s*", re.S)
ROW_LIKE = re.compile(
    r"\bGFLOPS\b|\bGBps\b|\bbandwidth = |\bPower\(W\)|Number of errors|^\d+(?: +|,)(?:Copy|Mul|Add|Triad|Dot|Read|Write)\b"
)
SELF_CLOSED = re.compile(r".*(?:TRUE|FALSE|secs|GB/s|PASS|FAIL|\||-{20})\s*|\s*(?:RVS-ERROR|\[ERROR) .*", re.S)
LONGEST_LINE = 1000  # of what RVS writes; patterns with two open ends take long over a longer one

NAMED = re.compile(r"Action name *:(.+)")
MODULE = re.compile(r"Module name *:(\w+)")
RVS_ERROR = re.compile(r"RVS-ERROR(?: \[[^\]]*\])?(?: \[(?P<action>[^\]]*)\])? *(?P<message>.*)")
RAW_ERROR = re.compile(
    r"Error in \w+\(\) ?!!!|Invalid [\w -]+ !!!|\w[\w ]*\(\) failed !!!.*|RVS-(?!ERROR)[A-Z]+: .+|Error: .+|"
    r"error: '.*'\(\d+\) from .+|Got Status: .+|terminate called .+|what\(\): .+|Memory access fault .+|Segmentation fault.*"
)
GM_LINE = re.compile(rf"{ACTION}gm +\d+ .*")
BOX = re.compile(r"\| *ROCm Validation Suite \(RVS\) Summary *\|")
VERSION = re.compile(r"\| RVS version *\| *(\d\S*) *\|")
NO_GPUS = re.compile(r"\| GPUs *\| *(No GPUs detected !) *\|")
RESULT = re.compile(r"\| (\S.*?) +\| ([A-Z]+) +\| *(PASS|FAIL) *\|")

RAMP = re.compile(rf"{ACTION}{GPU} +(?P<edge>Start|End) of GPU ramp up")
GFLOPS = re.compile(
    rf"{ACTION}(?:gst +(?P<old>\d+)|{GPU}) +GFLOPS +(?P<value>\S+)"
    r"(?: +Target (?:stress|GFLOPS) *: *(?P<target>\d[\d.]*) +met *: *(?P<met>TRUE|FALSE))?"
)
SELF_CHECK = re.compile(rf"{ACTION}{GPU} +self-check error +(?P<value>\S+)")
POWER = re.compile(rf"{ACTION}{GPU} +Power\(W\) +(?P<value>\S+)")
POWER_END = re.compile(rf"{ACTION}(?:iet +(?P<old>\d+)|{GPU}) +pass: +(?P<passed>TRUE|FALSE)")
PEBB = re.compile(
    rf"{ACTION}pcie-bandwidth *{COUNT} +(?:\[CPU:: *(?P<cpu>\d+)\] +{NODE.format('gpu')}|(?P<old_cpu>\d+) +(?P<old_gpu>\d+)) +"
    rf"h2d:+ *(?P<h2d>true|false) +d2h:+ *(?P<d2h>true|false) +{FIGURE}"
)
PBQT = re.compile(
    rf"{ACTION}p2p-bandwidth *{COUNT} +(?:{NODE.format('src')} +{NODE.format('dst')}|(?P<old_src>\d+) +(?P<old_dst>\d+)) +"
    rf"bidirectional: +(?P<both>true|false) +{FIGURE}"
)
MEM_BANDWIDTH = re.compile(rf"{ACTION}mem +Test 11: elapsedtime = \S+ bandwidth = (?P<value>\S+?) ?GB/s")
MEM_ERRORS = re.compile(rf"{ACTION}mem +(?:Number of errors :|.*because there are ?)(?P<count>\d{{1,18}})(?: ?errors found .*)?")
MEM_LINE = re.compile(
    rf"{ACTION}mem +(?:(?P<begun>Test 1: Change one bit .*)|(?P<told>\d+ +Memory tests : \d+ tests complete)|Test \d+ : PASS.*)"
)
BABEL_START = re.compile(rf"{ACTION}{GPU} +Starting the Babel memory stress test")
BABEL_SIZE = re.compile(r"Array size: (?P<size>\d{1,12}(?:\.\d{1,6})?) (?P<unit>Mi?B)\b.*")
BABEL_PRECISION = re.compile(r"(?:Running .*)?Precision: (float|double)")
BABEL_HEADER = re.compile(
    r"GPU Id +Function +(?P<unit>Mi?B)ytes/sec +"
    r"(?:(?P<rates>Max (?P=unit)/s +Min (?P=unit)/s +Avg (?P=unit)/s)|Min \(sec\) +Max +Average)"
)
BABEL_ROW = re.compile(rf"(?P<gpu>\d+) +{FUNCTION} +(?P<best>\S+) +(?P<max>\S+) +(?P<min>\S+) +(?P<mean>\S+)")
CSV_HEADER = re.compile(
    r"gpu_id,function,num_times,n_elements,sizeof,max_(?P<unit>mi?)bytes_per_sec,"
    r"(?:(?P<rates>(?P=unit)bps_at_min_t,(?P=unit)bps_at_max_t,(?P=unit)bps_at_avg_t)|min_runtime,max_runtime,avg_runtime)"
)
CSV_ROW = re.compile(
    rf"(?P<gpu>\d+),{FUNCTION},\d+,(?P<elements>\d{{1,18}}),(?P<size>[48]),(?P<best>[^,\s]+),[^,\s]+,(?P<min>[^,\s]+),(?P<mean>[^,\s]+)"
)


def _read_lines(found: _Found) -> None:
    lines = found.text.split("\n")
    tail = lines.pop()
    closed = bool(SELF_CLOSED.fullmatch(tail))
    seen = set()
    for number, line in enumerate([*lines, tail] if closed else lines):
        if len(line) > LONGEST_LINE:
            found.rejected += bool(ROW_LIKE.search(line))
            continue
        level, body = PREFIX.fullmatch(line).groups()
        if level and line in seen:  # microseconds and all: one line, written twice
            continue
        seen.add(line)
        found.line = number
        if not any(read(found, body, level or "") for read in (_frame, _gst, _iet, _links, _mem, _babel)):
            found.rejected += bool(ROW_LIKE.search(body))
    if not closed and tail.strip() and (ROW_LIKE.search(tail) or found.columns):
        found.rejected += 1
        found.issue(INCOMPLETE, "its last line is cut")


def _frame(found: _Found, body: str, level: str) -> bool:
    """What every module prints: names, errors, the summary."""
    if level.startswith("ERROR"):
        action, message = re.fullmatch(rf"(?:{ACTION})?(.*)", body).groups()
        found.error(message)
        found.answered.add(action or "")
        device = re.match(r"gst +(\d+) ", message)
        if device and (stream := found.streams.pop((action, device[1]), None)):
            _flush(found, action, device[1], stream)
    elif m := RVS_ERROR.fullmatch(body):
        found.error(m["message"], m["action"] or "")
        found.answered.add(m["action"] or "")
    elif RAW_ERROR.fullmatch(body):
        found.error(body)
    elif m := NAMED.fullmatch(body):
        found.modules.setdefault(m[1], None)
    elif m := MODULE.fullmatch(body):
        found.modules |= {a: m[1] for a, module in found.modules.items() if module is None}
    elif GM_LINE.fullmatch(body):
        found.warn(GM)
    elif BOX.fullmatch(body):
        found.box = True
    elif m := VERSION.fullmatch(body):
        found.version = m[1]
    elif m := NO_GPUS.fullmatch(body):
        found.error(m[1])
    elif m := RESULT.fullmatch(body):
        found.results[m[1]] = (m[2], m[3])
        if m[3] == "FAIL":
            found.consequences[f"{m[1]}: FAIL in the summary"] = None
    elif body == "...":
        found.warn("abridged: dots stand for lines that were left out")
    else:
        return False
    return True


def _gst(found: _Found, body: str, level: str) -> bool:
    if m := RAMP.fullmatch(body):
        key = m["action"], m["gpu"]
        if m["edge"] == "Start":
            if key in found.streams:  # the one before was never closed
                _unclosed(found, *key, found.streams.pop(key))
            found.streams[key] = _Stream(began=True)
        else:
            found.streams[key] = _Stream(began=True, ended=True)
    elif m := GFLOPS.fullmatch(body):
        key = m["action"], m["gpu"] or m["old"]
        if m["old"]:
            found.warn("gst: RVS of this age may print the highest so far as an interval")
        stream = found.streams.setdefault(key, _Stream())
        if m["met"]:
            _flush(found, *key, found.streams.pop(key), m["target"])
            flag = f"FAIL: its target of {m['target']} GFLOPS is not met" if m["met"] == "FALSE" else ""
            _flops(found, *key, m["value"], "best", m["target"], flag)
        else:
            stream.rows.append((found.line, m["value"]))
    elif m := SELF_CHECK.fullmatch(body):
        found.issue(FAIL, f"gst {m['action']} device {m['gpu']}: one GEMM, two results (self-check error {m['value']})")
    else:
        return False
    return True


def _flush(found: _Found, action: str, gpu: str, stream: _Stream, target: str | None = None) -> None:
    """Keep the intervals that came after the ramp-up."""
    if stream.rows and not stream.ended:
        if stream.began or "of GPU ramp up" in found.text:
            found.warn(f"gst {action}: where the ramp-up of device {gpu} ends is not told; its intervals are left out")
            return
        found.warn("gst: this log does not tell the ramp-up; the first intervals may belong to it")
    for line, value in stream.rows:
        _flops(found, action, gpu, value, "interval", target, line=line)


def _unclosed(found: _Found, action: str, gpu: str, stream: _Stream) -> None:
    _flush(found, action, gpu, stream)
    found.issue(INCOMPLETE, f"gst {action}: device {gpu} has no closing line")


def _flops(
    found: _Found, action: str, gpu: str | None, value: str, statistic: str, target: str | None, flag: str = "",
    dtype: str | None = None, line: int | None = None,
) -> None:  # fmt: skip
    keys = found.actions.get(action, {})
    asked, said = _number(str(keys.get("target_stress", ""))), _number(target or "")
    params = _gemm(action, keys)
    stored = {"tf32": "fp32"}.get(params["dtype"], params["dtype"])
    if (None not in (asked, said) and int(asked) != int(said)) or (keys and dtype and stored != dtype):
        found.warn(f"gst {action}: the configuration tells another target or dtype than the log, and was not used")
        keys, params = {}, _gemm(action, {})
    if not keys:
        params["dtype"] = dtype or params["dtype"]
    limit = 10 * (said or asked or 0)
    if limit and (_number(value) or 0) > limit:
        flag = "INVALID: over ten times its target"
    found.add("compute", action, "gst", value, "GFLOP/s", statistic, flag, line, device=gpu, **params)


def _number(text: str) -> float | None:
    return value if re.fullmatch(r"\d+(?:\.\d*)?", text) and math.isfinite(value := float(text)) else None


def _iet(found: _Found, body: str, level: str) -> bool:
    if m := POWER.fullmatch(body):
        key = m["action"], m["gpu"]
        found.powers[key] = max(found.powers.get(key, "0"), m["value"], key=lambda x: _number(x) or 0)
        found.add("sustained", m["action"], "iet", m["value"], "W", "interval", op="power", device=m["gpu"])
    elif m := POWER_END.fullmatch(body):
        action, gpu = m["action"], m["gpu"] or m["old"]
        highest = found.powers.pop((action, gpu), "unknown")
        found.answered.add(action)
        if m["passed"] == "FALSE":
            asked = found.actions.get(action, {}).get("target_power")
            target = f"its target of {asked} W" if asked else "its target"
            found.issue(FAIL, f"iet {action} device {gpu}: {target} is not met, the highest is {highest} W")
    return m is not None


def _links(found: _Found, body: str, level: str) -> bool:
    """pebb, pbqt. A final row is the mean of the whole run; those of level INFO are parts of it."""
    if m := PEBB.fullmatch(body):
        module = "pebb"
        params = _across(m["cpu"] or m["old_cpu"], m["gpu"] or m["old_gpu"], m["h2d"] == "true", m["d2h"] == "true")
    elif m := PBQT.fullmatch(body):
        module = "pbqt"
        params = _between(m["src"] or m["old_src"], m["dst"] or m["old_dst"], m["both"] == "true")
    else:
        return False
    _, done = found.links.get((module, m["action"]), (0, set()))
    if not level.startswith("INFO"):
        done = done | {m["i"]}
        _link(found, m["action"], module, m["value"] or m["what"], params)
    found.links[module, m["action"]] = (int(m["of"]), done)
    return True


def _across(cpu: str, gpu: str, h2d: bool, d2h: bool) -> dict[str, Any]:
    """Of a copy between host and device. With both ways on it is the sum of two."""
    src, dst, op = f"CPU {cpu}", f"GPU {gpu}", "host_to_device"
    if d2h and not h2d:
        src, dst, op = dst, src, "device_to_host"
    return {"op": op, "direction": "both" if h2d and d2h else "one", "src": src, "dst": dst, "device": gpu}


def _between(src: str, dst: str, both: bool | None) -> dict[str, Any]:
    direction = None if both is None else "both" if both else "one"
    return {"op": "device_to_device", "direction": direction, "src": f"GPU {src}", "dst": f"GPU {dst}"}


def _link(found: _Found, action: str, module: str, text: str, params: dict[str, Any]) -> None:
    found.answered.add(action)
    if re.fullmatch(r"\(.*\)|NA", text):
        found.issue(INCOMPLETE, f"{module} {action}: {params['src']} to {params['dst']} {text}")
        return
    size = _whole(found.actions.get(action, {}), "block_size", None)
    found.add("bandwidth", action, module, text, "GB/s", "mean", counted="payload", buffer_bytes=size, **params)


def _mem(found: _Found, body: str, level: str) -> bool:
    if m := MEM_BANDWIDTH.fullmatch(body):
        found.mem["done"] += 1
        # in truth MiB a millisecond, of reads and writes: no `counted`, so it is compared with nothing
        found.add("bandwidth", m["action"], "mem", m["value"], "GB/s", "mean", op="read_write")
    elif m := MEM_ERRORS.fullmatch(body):
        found.mem["errors"] += int(m["count"])
    elif m := MEM_LINE.fullmatch(body):
        found.mem.update(begun=bool(m["begun"]), told=bool(m["told"]))  # told: at this level error counts are printed too
    if m:
        found.answered.add(m["action"])
    return m is not None


def _babel(found: _Found, body: str, level: str) -> bool:
    if m := BABEL_START.fullmatch(body):
        if m["action"] != found.babel_action:
            found.array_bytes = None
        found.babel[m["gpu"]] = found.babel_action = m["action"]
    elif m := BABEL_SIZE.fullmatch(body):
        found.array_bytes = round(float(m["size"]) * {"MB": 10**6, "MiB": 2**20}[m["unit"]]) or None
    elif m := BABEL_PRECISION.fullmatch(body):
        found.precision = {"float": "fp32", "double": "fp64"}[m[1]]
    elif m := BABEL_HEADER.fullmatch(body):
        _end_table(found)
        found.columns, found.rows = ("table", m["unit"] + "/s", "rates" if m["rates"] else "seconds"), set()
    elif m := CSV_HEADER.fullmatch(body):
        _end_table(found)
        unit = {"m": "MB/s", "mi": "MiB/s"}[m["unit"]]
        found.columns, found.rows = ("csv", unit, "rates" if m["rates"] else "seconds"), set()
    elif (m := BABEL_ROW.fullmatch(body) or CSV_ROW.fullmatch(body)) and found.columns:
        _babel_row(found, m.groupdict())
    elif m := re.fullmatch(r"-{20,}", body):
        if found.columns[:1] == ("table",) and found.rows:  # the rule below its last row
            found.babel = {gpu: action for gpu, action in found.babel.items() if gpu not in found.rows}
            found.columns = ()
    return m is not None


def _babel_row(found: _Found, row: dict[str, str]) -> None:
    """A row of the table or the CSV that is open."""
    kind, unit, rest = found.columns
    if (kind == "csv") != ("elements" in row):
        found.rejected += 1
        return
    gpu = row["gpu"]
    found.rows.add(gpu)
    action = found.babel.get(gpu, found.babel_action)
    dtype, size = found.precision, None
    if kind == "csv":
        dtype, size = {"4": "fp32", "8": "fp64"}[row["size"]], int(row["elements"]) * int(row["size"])
    elif keys := found.actions.get(action):
        dtype, width = PRECISIONS.get(_whole(keys, "test_type", 1), (None, 0))
        size = (_whole(keys, "array_size", 0) or 0) * width or None
    size = size or found.array_bytes
    rates = (row["best"], row["min"], row["mean"]) if rest == "rates" else (row["best"], None, None)
    _stream_rates(found, action, gpu, row["function"], unit, rates, dtype, size)


def _stream_rates(
    found: _Found, action: str, gpu: str | None, function: str, unit: str, rates: tuple[str | None, ...], dtype: str | None,
    size: int | None,
) -> None:  # fmt: skip
    """`rates`: best, worst, mean. In sustained mode all three are one figure, the mean of a single long batch."""
    best, worst, mean = rates
    op = function.lower()
    counted = None if op in ("read", "write") and mean is None else "read+write"  # where it prints seconds, those two twice
    for text, statistic in ((None if mean and best == worst else best, "best"), (mean, "mean")):
        if text is not None:
            found.add("bandwidth", action, "babel", text, unit, statistic, op=op, device=gpu, dtype=dtype, counted=counted,
                      buffer_bytes=size)  # fmt: skip


def _end_table(found: _Found) -> None:
    """At the end, or where another begins: a table is whole with the rule below it, a CSV with a row."""
    if found.columns[:1] == ("csv",) and found.rows:
        found.babel = {gpu: action for gpu, action in found.babel.items() if gpu not in found.rows}
    elif found.columns:
        found.issue(INCOMPLETE, f"babel: a {'table' if found.columns[0] == 'table' else 'CSV'} ends before it is whole")


def _close_lines(found: _Found) -> None:
    """What is still open at the end of a text is missing."""
    for (action, gpu), stream in found.streams.items():
        _unclosed(found, action, gpu, stream)
    for action, gpu in sorted(found.powers):
        found.issue(INCOMPLETE, f"iet {action}: device {gpu} has no closing line")
    for (module, action), (of, done) in found.links.items():
        if len(done) < of:
            found.issue(INCOMPLETE, f"{module} {action}: {len(done)} of {of} rows")
    _end_table(found)
    for gpu, action in found.babel.items():
        found.issue(INCOMPLETE, f"babel {action}: device {gpu} has no table")
    if found.mem["begun"] > found.mem["done"] and not any(module == "MEM" for module, _ in found.results.values()):
        found.issue(INCOMPLETE, f"mem: {found.mem['done']} of {found.mem['begun']} devices came to the last test")
    for action, module in found.modules.items():
        if found.box and action not in found.results and not any(s == UNSUPPORTED for s, _ in found.issues):
            found.issue(INCOMPLETE, f"its summary ends before {action}")
        elif module in MODULES and action not in found.answered | set(found.results):
            found.issue(INCOMPLETE, f"{module} {action}: nothing follows its name")
    if found.records and not found.box and "[RESULT]" in found.text:
        found.warn("no summary (RVS before 1.3 prints none): whether every device is here cannot be told")


# ---- JSON (-j)


def _json(text: str) -> tuple[list[Any] | None, bool]:
    """The documents of a JSON log and whether it is whole; None where it is no JSON. Of a cut one, its whole records."""
    if not re.match(r"\s*(?:\{\s*[\"}]|\[\s*[{\]])", text):
        return None, False
    for prepare in (str.strip, _closed):
        source, at, documents = prepare(text), 0, []
        decoder = json.JSONDecoder(object_pairs_hook=_object, parse_int=str, parse_float=str, parse_constant=str)
        try:
            while at < len(source) and source[at] in "{[":  # RVS appends to a file that exists
                document, end = decoder.raw_decode(source, at)
                documents.append(document)
                at = re.compile(r"\s*").match(source, end).end()
        except (ValueError, RecursionError):
            continue
        if documents:
            return documents, prepare is str.strip and at >= len(source)
    return None, False


def _closed(text: str) -> str:
    """The text to the end of its last whole object, and the brackets that are open there."""
    stack: list[str] = []
    end, closers = 0, ""
    for token in re.finditer(r'"(?:[^"\\]|\\.)*"|[{}\[\]]', text):
        if token[0] in ("{", "["):
            stack.append("}" if token[0] == "{" else "]")
        elif stack and token[0] == stack[-1]:
            stack.pop()
            if token[0] == "}":
                end, closers = token.end(), "".join(reversed(stack))
    return text[:end].strip() + closers


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | None:
    """An action that ran twice has its key twice: both lists. Any other key twice is damage: None."""
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out and not (isinstance(value, list) and isinstance(out[key], list)):
            return None
        out[key] = [*out[key], *value] if key in out else value
    return out


def _entries(node: Any, action: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """(action, record) of everything below, {} for an action without records, None for a damaged one.

    Only the first module's name is a key: what module a record is of, its own keys tell.
    """
    if isinstance(node, list):
        for item in node or [{}]:
            own = item.get("action") if isinstance(item, dict) else None
            yield (own if isinstance(own, str) else action), item
    elif isinstance(node, dict) and depth < 5:
        for key, value in node.items():
            if not isinstance(value, str):
                yield from _entries(value, key, depth + 1)
    else:
        yield action, None


def _read_json(found: _Found, document: Any) -> None:
    for action, entry in _entries(document, "rvs"):
        found.line += 1
        if entry == {}:
            found.issue(INCOMPLETE, f"{action}: no record")
        elif not isinstance(entry, dict):
            found.rejected += 1
        else:
            _read_entry(found, action, entry)


def _read_entry(found: _Found, action: str, entry: dict[str, Any]) -> None:
    r = {key: value for key, value in entry.items() if isinstance(value, str)}
    gpu = r.get("gpu_id")
    device = f" device {gpu}" if gpu else ""
    passed = {"true": True, "false": False}.get(r.get("pass", "").lower())
    target = r.get("target") or r.get("target_power")
    missed = f"FAIL: its target of {target or 'unknown'} is not met" if passed is False else ""
    found.answered.add(action)
    if message := r.get("err") or r.get("ERROR"):
        found.error(message, f"{action}{device}:")
    elif CANNOT.search(r.get("message", "")):
        found.error(r["message"], f"{action}:")
    elif flops := r.get("gflops") or r.get("GFLOPS"):
        interval = passed is None and "loglevelname" in r  # only the flat JSON before ROCm 6.4 holds them
        if interval:
            found.warn("gst: this log does not tell the ramp-up; the first intervals may belong to it")
        dtype = _dtype(r["dtype"]) if r.get("dtype") else None
        _flops(found, action, gpu, flops, "interval" if interval else "best", target, missed, dtype)
    elif power := r.get("average power"):  # the highest in truth
        found.add("sustained", action, "iet", power, "W", "best", missed, op="power", device=gpu)
    elif "errors" in r and "Test" in r:
        found.mem["told"] += 1
        if passed is False or r["errors"].strip("0"):
            found.issue(FAIL, f"mem {action}{device}: {r['errors']} errors in {r['Test']}")
    elif "throughput" in r:
        _json_link(found, action, r)
    elif isinstance(entry.get("results"), list) or "Function" in r:
        _json_babel(found, action, gpu, entry)


def _json_link(found: _Found, action: str, r: dict[str, str]) -> None:
    """pebb and pbqt: which way the copies went stands in the configuration alone; a name may lie."""
    keys = found.actions.get(action)
    if "srcgpu" in r:
        module, both = "pbqt", keys and keys.get("bidirectional") is True
        params = _between(r["srcgpu"], r.get("dstgpu", ""), both if keys else None)
    else:
        module, cpu, gpu = "pebb", r.get("srccpu", ""), r.get("dstgpu", "")
        params = {"src": f"CPU {cpu}", "dst": f"GPU {gpu}", "device": gpu}
        if keys:
            params = _across(cpu, gpu, *(keys.get(x, True) is True for x in ("host_to_device", "device_to_host")))
    if not keys:
        found.warn(f"{module} {action}: its JSON does not say which way the copies went; its configuration would")
    _link(found, action, module, r["throughput"].removesuffix(" GBps"), params)


def _json_babel(found: _Found, action: str, gpu: str | None, entry: dict[str, Any]) -> None:
    keys = found.actions.get(action)
    dtype = PRECISIONS.get(_whole(keys, "test_type", 1), (None, 0))[0] if keys else None
    size = entry.get("array_size")
    size = int(size) if isinstance(size, str) and re.fullmatch("[0-9]{1,18}", size) else None
    for sub in entry["results"] if isinstance(entry.get("results"), list) else [entry]:
        r = {k: v for k, v in sub.items() if isinstance(v, str)} if isinstance(sub, dict) else {}
        function = r.get("subtest") or r.get("Function") or ""
        unit = "mibytes" if "max_mibytes_per_sec" in r else "mbytes"
        best, worst, mean = (r.get(f"{x}_{unit}_per_sec") for x in ("max", "min", "avg"))
        best = best or r.get("MBytes/sec")  # up to RVS 1.4
        if best and re.fullmatch(FUNCTION, function):
            unit = {"mbytes": "MB/s", "mibytes": "MiB/s"}[unit]
            _stream_rates(found, action, gpu, function, unit, (best, worst, mean), dtype, size)
        else:
            found.rejected += 1
