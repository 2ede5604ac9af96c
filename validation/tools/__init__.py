"""External tools: one module a tool, each saying how the tool is run and what its output says.

A module has `NAME`, `EXECUTABLES`, `commands(place) -> list[Command]`, `recognises(text) -> bool` and
`parse(text) -> Parsed`. Parsing never raises on bad text, never invents a value and never trusts an exit status or the
word PASS: every number returned stands in the text as it is, row by row, and a log without its closing part is
INCOMPLETE. A reading is an ordinary `Record`, so a cross-check is an ordinary comparison:

- `family`: compute, bandwidth, comm or sustained; `case`: the tool's own name for it; `backend`: tool and module.
- `params`: `op` (gemm; copy mul add triad dot read write, host_to_device, device_to_host, device_to_device; all_reduce
  all_gather ...; power), `statistic` (one of `STATISTICS`), `device` as the tool numbers it, and what is known of
  `dtype`, `m n k layout` (row-major, as `compute` names it), `data` (random, trig, integers), `buffer_bytes` (of one stream),
  `counted` (see `COUNTED`), `stores` (ordinary, streaming), `direction` (one; both: the sum of two), `src dst`, `world`,
  `bytes`.
- `reported`: `value` in `unit` (a key of `UNITS`), and `text`, the figure as printed.
- `flags`: "INVALID: why" or "FAIL: why" where this one reading must not be used or is a failure.
"""

from __future__ import annotations

import codecs
import importlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import yaml

from escher_kernels.records import Record

MODULES = ("rvs", "transferbench", "rocm_bw", "rccl", "nvbandwidth", "host_stream")
TAKES_CONFIG = ("rvs",)  # whose logs leave out what the configuration says
STATISTICS = ("median", "mean", "best", "interval")  # interval: one of several readings, of which we take the median
COUNTED = ("read+write", "payload", "bus", "alg")  # each stream once, as ours; the bytes copied, once; collectives
UNITS = {
    "FLOP/s": 1.0, "GFLOP/s": 1e9, "TFLOP/s": 1e12, "B/s": 1.0, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12,
    "MiB/s": 2.0**20, "GiB/s": 2.0**30, "s": 1.0, "ms": 1e-3, "us": 1e-6, "W": 1.0,
}  # fmt: skip

UNPARSED, INCOMPLETE, UNSUPPORTED, FAIL, INVALID = "UNPARSED", "INCOMPLETE", "UNSUPPORTED", "FAIL", "INVALID"
GRAVEST = (FAIL, INVALID, UNSUPPORTED, INCOMPLETE, UNPARSED)  # of several statuses of a log the first is its own
Found = dict[str, list[str]]  # statuses with what was found in a log that calls for them


@dataclass(frozen=True)
class Parsed:
    """What a log says. `status` None: whole, and its readings can be used; else why not, in one line.

    UNPARSED: no row was understood. INCOMPLETE: it ends before its closing part (the rows before are kept). UNSUPPORTED:
    the tool says it cannot do this here. FAIL: the tool found errors or missed a target. INVALID: its numbers cannot be.
    """

    tool: str
    records: tuple[Record, ...] = ()
    status: str | None = None
    reason: str = ""
    version: str | None = None
    rejected_lines: int = 0  # they look like rows, and could not be read as one
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Place:
    """Where a tool is to run: what `commands` may depend on."""

    kind: str  # "rocm", "cuda" or "cpu"
    target: str | None  # key of the profile of the device found
    devices: int
    executables: Mapping[str, str]  # name -> path, of those of EXECUTABLES that were found
    plateau_bytes: int | None = None  # one buffer at the largest plateau size of this run
    threads: int = 1  # CPU threads the measurement used
    cpus: Sequence[int] = ()  # which ones


@dataclass(frozen=True)
class Command:
    """One run of a tool. `files` are written beside it first; {dir} in `argv` and `env` is where they lie.

    `output`: name of a file in {dir} that holds the result, where that is not what the tool prints.
    """

    tool: str
    name: str  # of its log
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    output: str | None = None
    timeout_s: float = 300.0


def reading(
    family: str, case: str, backend: str, text: str, unit: str, statistic: str, flags: Sequence[str] = (), **params: Any
) -> Record | None:
    """A record of the figure `text`; None where it is no non-negative decimal number that is finite in base units."""
    if unit not in UNITS or statistic not in STATISTICS:
        raise ValueError(f"{unit!r} with statistic {statistic!r}: not in UNITS and STATISTICS")
    if not re.fullmatch(r"[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+", text):
        return None
    value = float(text)
    if not math.isfinite(value * UNITS[unit]):
        return None
    return Record(
        family=family, case=case, backend=backend, source="tool", flags=tuple(flags),
        params={**{k: v for k, v in params.items() if v is not None}, "statistic": statistic},
        reported={"value": value, "unit": unit, "text": text},
    )  # fmt: skip


def distinct(records: Iterable[Record]) -> tuple[Record, ...]:
    """Each reading once: a log kept twice says nothing new."""
    return tuple({repr((r.case, r.params, r.reported, r.flags)): r for r in records}.values())


def flagged(records: Iterable[Record], why: str) -> list[Record]:
    return [replace(r, flags=(*r.flags, f"{INVALID}: {why}")) for r in records]


def conclude(tool: str, records: Iterable[Record], found: Found, **more) -> Parsed:
    """A `Parsed` with the gravest of the statuses that `found` has reasons for; the reason names all, gravest first."""
    reasons = [
        (s, r) for s in GRAVEST for r in dict.fromkeys(found.get(s, ()))
    ]
    reason = redact("; ".join(" ".join(r.split()) or "an error without words" for _, r in reasons[:3]))[:400]
    return Parsed(tool, distinct(records), reasons[0][0] if reasons else None, reason, **more)


def base_value(record: Record) -> float:
    """The reading in base units (FLOP/s, B/s, s, W)."""
    return record.reported["value"] * UNITS[record.reported["unit"]]


_ANSI = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*(?:[@-~]|\Z)|"  # colours, cursor
    r"\x1b[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)|"  # titles, links
    r"\x1b[ -/]+[0-~]|\x1b[0-Z\\-~]"
)
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f]")


def clean(data: bytes | str) -> str:
    """A log as text: any bytes, colours and control characters gone, of a line redrawn with \\r only what stayed."""
    if isinstance(data, bytes):
        if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            text = data.decode("utf-16", "replace")
        else:
            text = data.decode("utf-8-sig", "replace")
    else:
        text = data.removeprefix("\ufeff")
    text = _ANSI.sub("", text).replace("\r\n", "\n")
    lines = (line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return _UNPRINTABLE.sub("", "\n".join(lines))


# Nothing here reaches over the end of a line: what stands on the next one is another thing, and may be a figure. Values in
# quotes keep them, so that JSON stays JSON. Names and hosts have a longest length, so that no text takes long.
_SECRET = (
    r"(?:TOKEN|SECRET|PASSW(?:OR)?D|PASSPHRASE|CREDENTIAL|(?:API|ACCESS|PRIVATE)[_-]?KEY|_KEY|AUTH|COOKIE|SESSION)"
    r"[A-Z0-9_.-]{0,64}+"
)
_IS = r"(?:[\"'][ \t]*:[ \t]*(?=[\"'])|[ \t]*[=:][ \t]*)"  # between a name and its value, in JSON; in YAML or a shell
_VALUE = r"(?:\"(?:[^\"\\\n]|\\.)*+|'[^'\n]*+|(?![\[{(])[^\s,;\"']+)"
_NAME = r"[\w.-]{1,250}"
_UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"


def _in_quotes(by: str) -> Callable[[re.Match[str]], str]:
    """Replace the group `value`, without the quote that it may begin with."""

    def replaced(m: re.Match[str]) -> str:
        quote = m["value"][0] if m["value"][0] in "\"'" else ""
        return m[0][: m.start("value") - m.start()] + quote + by + m[0][m.end("value") - m.start() :]

    return replaced


_REDACTIONS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # nccl-tests -J keeps the whole environment; the file may end in it
        (r'("env"\s*:\s*)\[(?:[^\]"]++|"(?:[^"\\]|\\[\s\S])*+(?:"|\\?\Z))*+(?:\]|\Z)', r"\1[]"),
        (r"(?i)\b(?:bearer[ \t]+[a-z0-9+/=._~-]{8,}|basic[ \t]+[a-z0-9+/=]{16,})", "[redacted]"),
        (rf"(?i){_SECRET}{_IS}(?P<value>{_VALUE})", _in_quotes("[redacted]")),
        (rf"(?i)(?<![\w-])--?[a-z-]{{0,40}}{_SECRET}[ \t]+(?![=:-])(?P<value>{_VALUE})", _in_quotes("[redacted]")),
        (r"\b(?:hf|gh[opsur]|github_pat|glpat|sk|nvapi|xox[abprs])[-_][A-Za-z0-9_-]{10,}", "[redacted]"),
        (r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|(?<![\w-])eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?", "[redacted]"),
        (r"(\b[a-z][a-z0-9+.-]{1,20}://)[^\s/@\"']{1,250}@", r"\1[redacted]@"),
        (r"(?<![\w@/.+-])[A-Za-z_][\w.+-]{0,63}@[A-Za-z][\w.-]{0,250}", "user@host"),
        (rf"(?i)\b(?:GPU-)?{_UUID}\b", "[redacted]"),
        (r"(?i)\bGPU-[0-9a-f]{16}\b", "GPU-[redacted]"),
        (rf"(?i)(?<![a-z0-9])serial(?:[ _](?:number|no))?{_IS}(?P<value>{_VALUE})", _in_quotes("[redacted]")),
        # process ids, user and host names, as each tool writes them
        (r"(\b[Pp]id[ \t]+)\d+([ \t]+on[ \t]+)\S+", r"\g<1>0\g<2>host"),
        (rf"(?<!\S){_NAME}([ \t]pid[ \t]+)\d+(: Test )", r"host\g<1>0\2"),
        (rf"(?m)^{_NAME}(: Test (?:NCCL|RCCL|CUDA|HIP) failure )", r"host\1"),
        (rf"(?<![\w.:-]){_NAME}:\d+:\d+( \[\d+\] )", r"host:0:0\1"),
        (r"\[[A-Za-z][\w.-]{0,250}:\d+\]", "[host:0]"),
        (r"(\bstress-ng: \w+: +\[)\d+\]", r"\g<1>0]"),
        (r'("pid"[ \t]*:[ \t]*)\d+', r"\g<1>0"),
        (rf"(?i)\bhostname{_IS}(?P<value>{_VALUE})", _in_quotes("host")),
        (rf"(?m)^{_NAME}(\n+Device 0: )", r"host\1"),
        (r"(\([0-9a-fA-F]{1,16}:[0-9a-fA-F]{1,4}:[0-9a-fA-F.]{1,8}\): )\([^()\n]{1,250}\)", r"\1(host)"),
        (r"\b((?:HOST|USER|USERNAME|LOGNAME|SUDO_USER|SSH_[A-Z]{1,20})=)[^\s,;\"']+", r"\1[redacted]"),
        (r"(/(?:home|Users)/)[^/\s:;,\"']+", r"\1user"),
    )
)  # fmt: skip


def redact(text: str) -> str:
    """The log as it may be kept: no process environment, tokens, serial numbers, UUIDs, process ids, user or host names.

    Figures stay as they are, and a second time changes nothing.
    """
    for _ in range(4):  # what one pattern leaves may be what another looks for
        before = text
        for pattern, replacement in _REDACTIONS:
            text = pattern.sub(replacement, text)
        if text == before:
            break
    return text


def redact_config(text: str) -> str:
    """A configuration as it may be kept. What was YAML still is: where a secret took a bracket of the text along, it is
    written anew."""
    kept = _bare(text)
    if (data := _yaml(text)) is not None and _yaml(kept) is None:
        kept = yaml.safe_dump(_redacted(data, {}), sort_keys=False)
    return kept


def _bare(text: str) -> str:
    return redact(text).replace("[redacted]", "redacted")  # in YAML a bracket would begin a list


def _yaml(text: str) -> Any:
    """What YAML holds; None where it is none."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return None


def _redacted(node: Any, done: dict[int, Any]) -> Any:
    """The same, redacted. `done`: parts that are there already, by their id, since YAML may refer to one twice."""
    if isinstance(node, str):
        return _bare(node)
    if id(node) in done or not isinstance(node, (dict, list)):
        return done.get(id(node), node)
    out = done[id(node)] = type(node)()
    if isinstance(node, list):
        out.extend(_redacted(item, done) for item in node)
    else:
        secret = {key for key in node if _bare(f"{key}: x") != f"{key}: x"}
        out.update((key, "redacted" if key in secret else _redacted(value, done)) for key, value in node.items())
    return out


def redact_arguments(argv: Sequence[str]) -> tuple[str, ...]:
    """A command line as it may be kept: a secret may stand in the argument after the one that names it."""
    out = []
    for before, argument in zip(["", *argv], argv, strict=False):
        _, found, after = redact(f"{before} {argument}").partition(f"{before} ")
        out.append(after if found and before.startswith("-") else redact(argument))
    return tuple(out)


def module(name: str) -> ModuleType:
    return importlib.import_module(f"validation.tools.{name}")


def is_configuration(text: str) -> bool:
    """Whether this is what a tool is told, YAML with a list of actions, and not what it says."""
    if not re.search(r"(?m)^[{ \t]*[\"']?actions[\"']?[ \t]*:", text):  # reading a long log as YAML takes minutes
        return False
    data = _yaml(text)
    return isinstance(data, dict) and isinstance(data.get("actions"), list)


def recognise(text: str) -> str | None:
    """Which tool's log this is; None for a foreign one."""
    return next((name for name in MODULES if module(name).recognises(text)), None)


def read(data: bytes | str, config: str | None = None) -> Parsed:
    """Parse a log of any tool; `config`: the configuration file that tool ran with. A foreign or empty log is UNPARSED
    and says which tools are known."""
    text = clean(data)
    name = recognise(text) if text.strip() else None
    if name is None:
        why = "not the output of a tool that is known" if text.strip() else "empty"
        return Parsed("unknown", status=UNPARSED, reason=f"{why} ({', '.join(MODULES)})")
    parse = module(name).parse
    return parse(text, config=config) if config and name in TAKES_CONFIG else parse(text)
