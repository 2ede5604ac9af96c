"""Our numbers against those of outside tools: like with like, or not at all.

A tool's reading is matched with the row of ours that did the same: operation, dtype, shape or size, data, bytes counted
the same way, one direction, and the same statistic, computed from our raw samples. Where the tool ran between two
measurements of ours, those are compared with it; an imported log is compared with the run's own rows, unless it names
another device. A reading without such a row is listed with what it lacks, never stretched to fit.

On a CPU host, where neighbours and clocks decide, a row that does not agree is WARN_CPU. On a GPU a row of ours that is
NOISY is not held against the device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from escher_kernels.bandwidth import COLD_FACTOR, OPS
from escher_kernels.records import Record, RecordFile
from escher_kernels.statistics import Estimate, estimate
from validation import derive, tools
from validation.derive import LoadedRun
from validation.tools import running
from validation.tools.running import Log

PASS, WARN, WARN_CPU, SKIP, INSUFFICIENT = "PASS", "WARN", "WARN_CPU", "SKIP", "INSUFFICIENT"
FAIL, INVALID, INCOMPLETE = tools.FAIL, tools.INVALID, tools.INCOMPLETE
LIMITS = {"compute": "cross_check_compute_pct", "bandwidth": "cross_check_bandwidth_pct"}
OUR_OP = {"copy": "copy", "mul": "mul", "add": "add", "triad": "triad", "read": "sum", "write": "fill"}
STREAMS = {name: OPS[ours].reads + OPS[ours].writes for name, ours in OUR_OP.items()}  # bytes counted over one stream's
ACROSS = ("host_to_device", "device_to_host")
COMPUTING = ("mul", "add", "triad", "sum")  # of which the dtype matters; others only move bytes
DATA = ("random", "trig")  # a tool's operands: all bits of a mantissa in use, as in ours; whole numbers clock higher
LONGEST_NAME = 1000  # of a line with a device's name
NOT_IDENTITY = ("iteration", "hwthreads")  # params that differ from one taking of a measurement to the next


@dataclass(frozen=True)
class Check:
    """One reading of a tool (or one whole log) judged. `ratio`: ours over theirs, None where nothing was compared."""

    tool: str
    name: str
    status: str
    reason: str
    log: str | None = None
    theirs: Estimate | None = None  # base units, counted as ours
    ours: Estimate | None = None
    ours_case: str | None = None
    ratio: Estimate | None = None
    limit_pct: float | None = None
    statistic: str | None = None
    unit: str | None = None  # "FLOP/s", "B/s", "s" or "W"
    imported: bool = False
    version: str | None = None
    interleaved: bool = False  # ours was measured again just before and just after it
    noisy: bool = False  # a row of ours that it was held against is flagged NOISY

    @property
    def matched(self) -> bool:
        return self.ratio is not None


def checks(run: LoadedRun) -> list[Check]:
    """Every reading of every log of the run, judged. RecordError where a log's description or our records are damaged."""
    by_name: dict[tuple[str, str, bool], list[Log]] = {}
    every = running.logs(run.directory)
    ran = {log.tool for log in every if log.log and not log.imported}
    for log in every:
        if log.log is None and log.name == log.tool and log.tool in ran:
            continue  # it was missing at one time, and ran at another
        # rounds of one command are one measurement, of which a later one takes the place; two imports are two
        key = (log.tool, (log.log or "") if log.imported else log.name, log.imported)
        if log.round == 0:
            by_name[key] = []
        by_name.setdefault(key, []).append(log)
    return [check for group in by_name.values() for check in _of_logs(run, group)]


def _of_logs(run: LoadedRun, group: Sequence[Log]) -> list[Check]:
    """The checks of one command, over its rounds."""
    out, apart, readings, warnings = [], [], {}, {}
    for log in group:
        parsed = running.parsed(run.directory, log)
        base = dict(tool=parsed.tool, log=log.log, imported=log.imported, version=parsed.version)
        if other := _other_device(run, log):
            out.append(Check(name=log.name, status=SKIP, reason=other, **base))
            continue
        warnings[log.log] = parsed.warnings
        if parsed.status:
            out.append(Check(name=log.name, status=parsed.status, reason=parsed.reason, **base))
        elif log.exit_status:
            why = f"its log is whole, and yet it ended with exit status {log.exit_status}"
            out.append(Check(name=log.name, status=WARN, reason=why, **base))
        elif not parsed.records:
            why = "it is whole, and holds no figure that is compared"
            out.append(Check(name=log.name, status=SKIP, reason=why, **base))
        for r in parsed.records:
            status, why = next((f for x in r.flags if (f := _flag(x))), (None, ""))
            if status:
                apart.append(Check(name=_name(r), status=status, reason=why, **base))
            elif parsed.status not in (FAIL, INVALID):  # a log that failed gives nothing to compare with
                readings.setdefault(_identity(r), []).append((log, parsed, r))
    wanted, first = _headline_payloads(readings), _first_devices(readings)
    summed_up = {(r.case, r.params.get("device")) for ((_, _, r), *_) in readings.values() if r.params["statistic"] == "interval"}
    for key, found in readings.items():
        r = found[0][2]
        # the best of several intervals is no best of single samples, and the intervals are all there
        repeated = r.params["statistic"] == "best" and (r.case, r.params.get("device")) in summed_up
        if key in wanted and not repeated:
            check = _compare(run, found, key in first)
            (out if check.matched else apart).append(check)
    return _warned([*dict.fromkeys(out), *_gathered(apart)], warnings)


def _warned(found: Sequence[Check], warnings: dict[str | None, Sequence[str]]) -> list[Check]:
    """The checks, the first of each log with what its parser warns of. Rounds of a command warn alike, and are one."""
    out = list(found)
    for log, texts in warnings.items():
        at = next((i for i, c in enumerate(out) if c.log == log), None)
        if at is not None:
            more = "".join(f"; the log: {' '.join(text.split())}" for text in texts[:2])
            out[at] = replace(out[at], reason=out[at].reason + more)
    return out


def _other_device(run: LoadedRun, log: Log) -> str | None:
    """Why an imported log is of another device, by the names of known devices in it; None where nothing says so."""
    if not log.imported:
        return None
    # names stand in one line, and in JSON in one text; none is long
    pieces = {piece[:LONGEST_NAME] for piece in re.split(r'[\n"]', running.kept_text(run.directory, log) or "")}
    named = [t["name"] for t in run.config["targets"] if any(_names(t, piece) for piece in pieces)]
    mine = run.selection.found_profile.name if run.selection.found_profile else run.found.raw_name
    if not named or mine in named:
        return None
    return f"its log names {', '.join(named)}, {mine} was measured"


def _names(target: dict[str, Any], piece: str) -> bool:
    exclude = target["exclude"]
    return bool(re.search(target["match"], piece, re.I)) and not (exclude and re.search(exclude, piece, re.I))


def _flag(text: str) -> tuple[str, str] | None:
    """Status and reason of a flag that forbids a reading's use; None for any other flag."""
    status, _, why = text.partition(":")
    return (status, why.strip() or "flagged") if status in (FAIL, INVALID) else None


def _gathered(found: Iterable[Check]) -> list[Check]:
    """Readings that say the same are one line: a matrix of a node holds hundreds."""
    alike: dict[tuple, list[Check]] = {}
    for c in found:
        alike.setdefault((c.status, c.reason), []).append(c)
    return [
        group[0] if len(group) == 1 else replace(group[0], name=f"{len(group)} readings, as {group[0].name}", theirs=None)
        for group in alike.values()
    ]


def _first_devices(readings: dict[tuple, list]) -> set[tuple]:
    """The readings of the device that ours is: number 0, or of the driver's long ids the first of a case."""
    first: dict[tuple, str] = {}
    out = set()
    for key, found in readings.items():
        r = found[0][2]
        device = str(r.params.get("device", "0"))
        counted = device.isdigit() and len(device) < 3
        if device == ("0" if counted else first.setdefault((r.family, r.case), device)):
            out.add(key)
    return out


def _identity(r: Record) -> tuple:
    """What makes two readings the same measurement taken twice."""
    params = sorted((k, str(v)) for k, v in r.params.items() if k not in NOT_IDENTITY)
    return (r.family, r.case, tuple(params), r.reported["unit"])


def _name(r: Record) -> str:
    p = r.params
    parts = [r.case, p.get("op"), f"{p['src']} to {p['dst']}" if "src" in p and "dst" in p else None,
             f"device {p['device']}" if "device" in p else None, p.get("stores"), p.get("statistic")]  # fmt: skip
    return ", ".join(dict.fromkeys(str(x) for x in parts if x))


def _headline_payloads(readings: dict[tuple, list]) -> set[tuple]:
    """Collectives are judged at their largest payload alone; every other reading is kept."""
    largest: dict[tuple, int] = {}
    for found in readings.values():
        r = found[0][2]
        if r.family == "comm" and "bytes" in r.params:
            of = (r.params.get("op"), r.params.get("placement"), r.reported["unit"])
            largest[of] = max(largest.get(of, 0), r.params["bytes"])
    return {
        key
        for key, found in readings.items()
        if (r := found[0][2]).family != "comm"
        or r.params.get("bytes") == largest.get((r.params.get("op"), r.params.get("placement"), r.reported["unit"]))
    }


def _compare(run: LoadedRun, found: Sequence[tuple[Log, tools.Parsed, Record]], our_device: bool) -> Check:
    log, parsed, r = found[0]
    p, statistic = r.params, r.params["statistic"]
    scale, why = _to_our_counting(r)
    values = [tools.base_value(x) * scale for _, _, x in found]
    base = dict(
        tool=parsed.tool, name=_name(r), log=log.log, statistic=statistic, unit=_base_unit(r), imported=log.imported,
        version=parsed.version,
    )  # fmt: skip
    if not all(map(math.isfinite, values)):
        return Check(status=INVALID, reason="a figure that large cannot be", **base)
    base["theirs"] = theirs = estimate([v] for v in values)
    if r.family not in LIMITS or not r.reported["unit"].endswith("/s"):
        return Check(status=SKIP, reason=f"this run has no row of {p.get('op', r.case)}", **base)
    if not running.fits(parsed.tool, run.found.kind):
        return Check(status=SKIP, reason="a tool for another kind of device than the one that was measured", **base)
    if why or not our_device:
        return Check(status=SKIP, reason=why or "another device than the one that was measured", **base)
    if min(values) < 1:
        return Check(status=INVALID, reason=f"{r.reported['text']} {r.reported['unit']} is no rate", **base)
    own = run.records(r.family)
    around = _around(run, r.family, [lg for lg, _, _ in found])
    wrong = {(x.role, x.case) for x in [*around, *own] if x.error and not x.error["ok"]}
    matching, lacks = _matching(r, around, wrong, run)
    between = bool(matching)
    if not between:
        matching, lacks = _matching(r, own, wrong, run)
    if not matching:
        return Check(status=SKIP, reason=f"nothing of ours is like it: {lacks}", **base)
    ours = _in_statistic(matching, statistic)
    ratio = (between and _paired(run, found, scale, wrong)) or derive.quotient(ours, theirs)
    limit = run.config.threshold(LIMITS[r.family], run.kind)
    noisy = _noisy(run, r.family, [lg for lg, _, _ in found] if between else None, matching[0])
    status, reason = _excused(*judge(ours, theirs, ratio, limit, run.kind), noisy, run.kind)
    if not between and not log.imported:
        reason += "; ours was not measured again around it"
    return Check(
        status=status, reason=reason, ours=ours, ours_case=matching[0].case, ratio=ratio, limit_pct=limit, noisy=noisy,
        interleaved=between, **base,
    )  # fmt: skip


def _noisy(run: LoadedRun, family: str, around: Sequence[Log] | None, ours: Record) -> bool:
    """Whether our row is flagged NOISY, by the records and the anchors of each file it came from: those from around the
    executions, or the run's own."""
    files = [run.records(family)] if around is None else [f.records for f in _files_around(run, family, around)]
    return any(
        flag.startswith("NOISY")
        for items in files
        for row in derive.rows(items, run.config, run.kind)
        if (row.role, row.case) == (ours.role, ours.case)
        for flag in row.flags
    )


def _excused(status: str, reason: str, noisy: bool, kind: str) -> tuple[str, str]:
    """What a row that is too slow, or faster than can be explained, becomes; any other stays."""
    if kind == "cpu":
        return (WARN_CPU if status in (FAIL, WARN) else status), reason
    if status == FAIL and noisy:
        return INSUFFICIENT, f"{reason}; other work or a moving clock disturbed ours"
    return status, reason


def _paired(run: LoadedRun, found: Sequence[tuple[Log, tools.Parsed, Record]], scale: float, wrong: set) -> Estimate | None:
    """Ours over theirs from interleaved rounds: a round's is ours from just before and just after over theirs, and the
    estimate is that of the rounds. None where there is one round, or where one lacks ours."""
    rounds: dict[str | None, list[tuple[Log, Record]]] = {}
    for log, _, r in found:
        rounds.setdefault(log.log, []).append((log, r))
    ratios = []
    for taken in rounds.values():
        (log, r), *_ = taken
        ours = _matching(r, _around(run, r.family, [log]), wrong, run)[0]
        if not ours:
            return None
        theirs = estimate([tools.base_value(x) * scale] for _, x in taken).median
        ratios.append([_in_statistic(ours, r.params["statistic"]).median / theirs])
    return estimate(ratios) if len(ratios) > 1 else None


def _base_unit(r: Record) -> str:
    unit = r.reported["unit"]
    return "FLOP/s" if unit.endswith("FLOP/s") else "B/s" if unit.endswith("B/s") else "W" if unit == "W" else "s"


def _around(run: LoadedRun, family: str, logs: Iterable[Log]) -> list[Record]:
    """Our records from around those executions, those between two of them once; `iteration` counts the processes."""
    return [replace(x, iteration=i) for i, f in enumerate(_files_around(run, family, logs)) for x in f.records]


def _files_around(run: LoadedRun, family: str, logs: Iterable[Log]) -> list[RecordFile]:
    names = dict.fromkeys(name for log in logs for name in log.ours)
    return [f for f in running.ours(run.directory, names) if f.run.family == family]


def judge(ours: Estimate, theirs: Estimate, ratio: Estimate, limit_pct: float, kind: str) -> tuple[str, str]:
    """PASS where all of the ratio's interval lies within the limit, FAIL or WARN where all of it is beyond.

    On a CPU host, where neighbours disturb both, it is enough for PASS that the middle is within the limit, or that the
    two intervals overlap.
    """
    slow, fast = 1 - limit_pct / 100, 1 + limit_pct / 100
    apart = abs(ratio.median - 1) * 100
    side = "slower" if ratio.median < 1 else "faster"
    words = f"ours is {apart:.1f} % {side}"
    if (slow <= ratio.median <= fast) if kind == "cpu" else (slow <= ratio.lo and ratio.hi <= fast):
        return PASS, f"{words}, within {limit_pct:g} %"
    if kind == "cpu" and ours.lo <= theirs.hi and theirs.lo <= ours.hi:
        return PASS, f"{words}, and the intervals overlap"
    if ratio.hi < slow:
        return FAIL, f"{words}; at most {limit_pct:g} % is allowed"
    if ratio.lo > fast:
        return WARN, f"{words}, more than {limit_pct:g} %: check what is counted"
    return INSUFFICIENT, f"{words}, and the interval of the ratio straddles {limit_pct:g} %"


def _to_our_counting(r: Record) -> tuple[float, str | None]:
    """The factor from the tool's counting of bytes to ours; and why the two cannot be made alike."""
    p = r.params
    if r.family != "bandwidth":
        return 1.0, None
    op = p.get("op")
    if p.get("direction", "one") != "one":
        return 1.0, "copies that share the links; ours runs one at a time"
    if op in ACROSS:
        return (1.0, None) if p.get("counted", "payload") == "payload" else (1.0, f"counts {p['counted']}")
    if op not in STREAMS:
        return 1.0, f"this run has no row of {op}"
    if p.get("counted") == "read+write":
        return 1.0, None
    if p.get("counted") == "payload":
        return float(STREAMS[op]), None
    return 1.0, "which bytes it counts is not documented"


def _matching(
    r: Record, candidates: Iterable[Record], wrong: set[tuple[str, str]], run: LoadedRun
) -> tuple[list[Record], str]:
    """Our records of the same thing; where there are none, what was missing or different. A wrong result has no time."""
    work = "flop" if r.family == "compute" else "bytes_moved"
    timed = [x for x in candidates if x.family == r.family and getattr(x, work) and any(s > 0 for s in x.samples_s)]
    if not timed:
        return [], f"family {r.family} was not measured"

    def like(items: Sequence[Record]) -> tuple[list[Record], str]:
        return _gemms(r.params, items) if r.family == "compute" else _copies(r.params, items, run)

    found, lacks = like([x for x in timed if (x.role, x.case) not in wrong])
    if not found and (of_wrong := like(timed)[0]):
        lacks = f"the result of {of_wrong[0].case} was wrong"
    return found, lacks


def _gemms(p: dict[str, Any], timed: Sequence[Record]) -> tuple[list[Record], str]:
    if p.get("batch"):
        return [], "it is a batch of GEMMs"
    shape = ("m", "n", "k")
    if any(p.get(x) is None for x in shape):
        return [], "its log does not tell M, N and K"
    if p.get("data") not in DATA:
        return [], f"its data are {p.get('data') or 'not told'}, ours are N(0,1)"
    found = [x for x in timed if x.role == "case" and x.params.get("op", "mm") == "mm"]
    found = [x for x in found if not x.params.get("reduced_precision") and all(x.params.get(n) == p[n] for n in shape)]
    if not found:
        return [], f"no GEMM of {'×'.join(str(p[x]) for x in shape)}"
    for name in ("dtype", "layout"):
        alike = [x for x in found if x.params.get(name) == p.get(name)]
        if not alike:
            mine = ", ".join(sorted({str(x.params.get(name)) for x in found}))
            return [], f"the {name} of that GEMM is {p.get(name) or 'not told'}, ours is {mine}"
        found = alike
    return _one_case(found), ""


def _copies(p: dict[str, Any], timed: Sequence[Record], run: LoadedRun) -> tuple[list[Record], str]:
    op = OUR_OP.get(p["op"], p["op"])
    mine = [x for x in timed if x.params.get("op") == op and x.cache != "warm" and x.role in ("case", "pair")]
    kind = ""
    if op in ACROSS:
        memory = p.get("memory", "pinned")
        kind, mine = f" with {memory} memory", [x for x in mine if x.params.get("memory") == memory]
    elif "stores" in p:  # the same instruction against the same instruction
        name = {"ordinary": "stream.plain", "streaming": "stream.streaming"}.get(p["stores"])
        kind, mine = f" with {p['stores']} stores", [x for x in mine if x.case == name]
    else:
        mine = [x for x in mine if x.role == "case"]
    if not mine:
        return [], f"no {op}{kind}"
    if op in COMPUTING and p.get("dtype") != mine[0].params.get("dtype"):
        return [], f"the dtype of its {p['op']} is {p.get('dtype') or 'not told'}, ours is {mine[0].params.get('dtype')}"
    told = run.files["bandwidth"].run.parameters if "bandwidth" in run.files else {}
    threads = mine[0].params.get("threads") or told.get("threads")
    if threads and p.get("threads", threads) != threads:
        return [], f"it ran on {p['threads']} threads, ours on {threads}"
    size, llc = p.get("buffer_bytes"), told.get("llc_bytes") or 0
    if size is None:
        if op not in ACROSS:
            return [], "its size is not told, so it may stay in the caches"
        return _one_case(_largest(mine)), ""
    if op not in ACROSS and STREAMS[p["op"]] * size < 0.99 * COLD_FACTOR * llc:  # a tool may round a size down
        return [], f"its buffers of {size / 2**20:.4g} MiB may stay in the caches ({llc / 2**20:.4g} MiB), ours do not"
    near = [
        x for x in mine
        if x.params["buffer_bytes"] <= 2 * size <= 4 * x.params["buffer_bytes"]
        or min(x.params["buffer_bytes"], size) >= COLD_FACTOR * llc > 0
    ]  # fmt: skip
    if not near:
        return [], f"no {op}{kind} of a like size"
    closest = min(near, key=lambda x: abs(x.params["buffer_bytes"] - size))
    return [x for x in near if x.case == closest.case], ""


def _largest(items: Sequence[Record]) -> list[Record]:
    most = max(x.params["buffer_bytes"] for x in items)
    return [x for x in items if x.params["buffer_bytes"] == most]


def _one_case(items: Sequence[Record]) -> list[Record]:
    return [x for x in items if x.case == items[0].case]


def _in_statistic(items: Sequence[Record], statistic: str) -> Estimate:
    """Our rate in the tool's statistic: of block medians, of block means, or of the best sample of each block.

    A mean is work over time; a tool's interval is the mean of a stretch of calls, and so is a block's.
    """
    blocks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for x in items:
        work = (x.flop if x.family == "compute" else x.bytes_moved) * x.calls_per_sample
        blocks.setdefault((x.iteration, x.block), []).extend((work, s) for s in x.samples_s if s > 0)
    if statistic == "best":
        return estimate([max(work / s for work, s in b)] for b in blocks.values())
    if statistic in ("mean", "interval"):
        return estimate([sum(work for work, _ in b) / sum(s for _, s in b)] for b in blocks.values())
    return estimate([work / s for work, s in b] for b in blocks.values())


def to_json(found: Sequence[Check]) -> list[dict[str, Any]]:
    """validation.json: one object a check, base units."""
    def numbers(e: Estimate | None) -> dict[str, float] | None:
        return e and {"median": e.median, "lo": e.lo, "hi": e.hi}

    return [
        {
            "tool": c.tool, "name": c.name, "status": c.status, "reason": c.reason, "unit": c.unit, "statistic": c.statistic,
            "theirs": numbers(c.theirs), "ours": numbers(c.ours), "ours_case": c.ours_case, "ratio": numbers(c.ratio),
            "limit_pct": c.limit_pct, "log": c.log, "imported": c.imported, "version": c.version,
            "interleaved": c.interleaved, "noisy": c.noisy,
        }
        for c in found
    ]  # fmt: skip
