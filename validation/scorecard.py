"""The scorecard: SC-0 to SC-12, each PASS or why not, and one verdict. Reads records and thresholds, measures nothing.

A speed criterion is judged by its whole interval: wholly good PASS, wholly bad FAIL, straddling INSUFFICIENT. A miss
while other work disturbed the measurement is INSUFFICIENT on a GPU, unless telemetry saw the device throttle for heat in
the windows of that row: that is the device's own doing. On a CPU host a missed speed is WARN_CPU. Correctness is judged
regardless. Every threshold comes from the configuration with its source and date.

Of a run with several iterations, speed is judged by the one that the pages show, and how far the others lie from it is
SC-8's. A wrong result, a physically impossible row and a family that did not finish count in whichever iteration they are.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from escher_kernels.records import Record, RecordError, read_json
from escher_kernels.statistics import Estimate
from validation import artefacts, compare, crosscheck, derive, memory, plausibility, roofline
from validation.artefacts import Artefacts
from validation.derive import LoadedRun, Row
from validation.tools import UNPARSED, UNSUPPORTED

PASS, NA, WARN, WARN_CPU, SKIP = "PASS", "N/A", "WARN", "WARN_CPU", "SKIP"
INSUFFICIENT, INCOMPLETE, FAIL, INVALID = "INSUFFICIENT", "INCOMPLETE", "FAIL", "INVALID"
STATUSES = (INVALID, FAIL, INCOMPLETE, INSUFFICIENT, WARN, WARN_CPU, SKIP, NA, PASS)  # the worst first
GO, CONDITIONAL, NO_GO = "GO", "CONDITIONAL GO", "NO-GO"
HOST_CPU = "HOST CPU"
VARIABILITY = "variability.json"
EXIT_STRICT = 3


@dataclass(frozen=True)
class Figure:
    """A number of a criterion: a measured one with its interval, or a limit that is no threshold. Base units."""

    what: str
    value: float | None
    unit: str  # FLOP/s, B/s, fraction, percent, s, bytes, ratio, count
    lo: float | None = None
    hi: float | None = None

    @classmethod
    def of(cls, what: str, estimate: Estimate | None, unit: str) -> Figure:
        return cls(what, estimate and estimate.median, unit, estimate and estimate.lo, estimate and estimate.hi)


@dataclass(frozen=True)
class Limit:
    """A threshold as it was applied, with where it stands and comes from."""

    name: str
    value: float
    unit: str
    source: str
    date: str


@dataclass(frozen=True)
class Criterion:
    """One row. `evidence`: of a miss, what its window looked like. `family`: whose records it judges."""

    sc: str  # "SC-1", or HOST_CPU for the row that heads a CPU host's card
    title: str
    gating: bool
    family: str | None
    status: str
    reason: str
    figures: tuple[Figure, ...] = ()
    limits: tuple[Limit, ...] = ()
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scorecard:
    criteria: tuple[Criterion, ...]
    implausible: tuple[plausibility.Implausible, ...]
    verdict: str
    reasons: tuple[str, ...]  # of anything but GO, the gravest first
    exit_status: int
    strict_exit_status: int

    def criterion(self, sc: str) -> Criterion:
        return next(c for c in self.criteria if c.sc == sc)


TITLES = {
    0: ("Calibration of the workload", True, None),
    1: ("Compute roof", True, "compute"),
    2: ("Bandwidth roof", True, "bandwidth"),
    3: ("Operations against the roofline", True, "ops"),
    4: ("Model end to end", True, "e2e"),
    5: ("Artefacts", True, None),
    6: ("Numerical correctness", True, None),
    7: ("Sustained throughput", False, "sustained"),
    8: ("Variability between runs", False, None),
    9: ("Outside tools", False, None),
    10: ("Numerical stability", False, "stability"),
    11: ("Memory for the workload", False, "capacity"),
    12: ("Fused collective and GEMM", False, "fused"),
}


def judge(run: LoadedRun, checked: Artefacts | None = None) -> Scorecard:
    """Every criterion of a run and the verdict. `checked`: the artefacts, where they are known otherwise than by looking
    (a book that is being built). RecordError or WorkloadError where a part of the run is damaged."""
    try:
        found = plausibility.check(run)
    except (KeyError, TypeError, AttributeError) as exc:
        raise RecordError(f"{run.directory}: a record lacks what its family writes ({_what(exc)}); measure again") from None
    criteria = [_finished(run, number, found) for number in TITLES if number != 5]
    fifth = Criterion("SC-5", *TITLES[5], SKIP, "")  # the last to be judged
    try:
        fifth = _sc5(run, fifth, checked or artefacts.check(run))
    except RecordError as exc:
        fifth = replace(fifth, status=INCOMPLETE, reason=str(exc))
    criteria.insert(5, fifth)
    if run.kind == "cpu":
        text = (
            "a CPU host: speeds are shown and judged, and one that misses is WARN_CPU, because neighbours and clocks decide "
            "it; this card accepts no accelerator"
        )
        criteria.insert(0, Criterion(HOST_CPU, "What was measured", False, None, NA, text))
    return _verdict(run, tuple(criteria), tuple(found))


def _finished(run: LoadedRun, number: int, found: Sequence[plausibility.Implausible]) -> Criterion:
    """One criterion, after what the guard found in its family and how the family ended."""
    title, gating, family = TITLES[number]
    base = Criterion(f"SC-{number}", title, gating, family, SKIP, "")
    missing, known = bool(family) and family not in run.files, number in JUDGES
    result = replace(base, **_missing(run, family)) if missing else _judged(run, number, base)
    impossible = [i for i in found if i.level == plausibility.INVALID and i.family == family]
    where = run
    if known and impossible:
        more = f" (and {len(impossible) - 1} more)" if len(impossible) > 1 else ""
        result = replace(result, status=INVALID, reason=impossible[0].reason + more)
        where = next((r for r in run.repeats if r.iteration == impossible[0].iteration), run)
    end = _unfinished(run, family) if known and family and not missing else None
    if end and result.status not in (INVALID, FAIL):
        result = replace(result, status=INCOMPLETE, reason=f"{end}; of what was kept: {result.reason}")
    if not known or result.status in (PASS, NA, SKIP):
        return result
    of = "" if where is run else f"iteration {where.iteration}: "
    return replace(result, evidence=result.evidence or tuple(of + line for line in _evidence(where, result)))


def _judged(run: LoadedRun, number: int, base: Criterion) -> Criterion:
    if number not in JUDGES:
        return replace(base, reason=f"this version does not judge family {base.family}")
    try:
        return JUDGES[number](run, base)
    except (RecordError, compare.CompareError) as exc:  # one damaged file: the rest is judged
        return replace(base, status=INCOMPLETE, reason=str(exc))
    except (KeyError, TypeError, AttributeError) as exc:
        return replace(base, status=INCOMPLETE, reason=f"a record lacks what its family writes ({_what(exc)})")


def _what(exc: Exception) -> str:
    return f"{type(exc).__name__}: {exc}"


def _missing(run: LoadedRun, family: str) -> dict[str, str]:
    if end := _unfinished(run, family):
        return {"status": INCOMPLETE, "reason": end}
    return {"status": SKIP, "reason": f"family {family} was not run"}


def _unfinished(run: LoadedRun, family: str) -> str | None:
    """How a family ended, where it did not end well: in the iteration that is judged, else in another."""
    ends = ((r, end) for r in (run, *run.repeats) if (end := _unfinished_there(r, family)))
    where, end = next(ends, (run, None))
    return end if where is run else f"iteration {where.iteration}: {end}"


def _unfinished_there(run: LoadedRun, family: str) -> str | None:
    end, file = run.status.get(family), run.files.get(family)
    if family in run.unreadable:
        return f"the records of family {family} cannot be used ({run.unreadable[family]})"
    if end and end.get("status") != "ok":
        return _how(family, end) + ("" if file else "; nothing was kept")
    if file is None:
        return f"family {family} was chosen and left no records" if family in run.info.get("families", ()) else None
    if file.truncated:
        return f"the last record of family {family} was cut off"
    return f"how family {family} ended was not recorded" if run.status and end is None else None


def _how(family: str, end: dict[str, Any]) -> str:
    words = {"running": "was killed", "timeout": "ran out of time", "interrupted": "was interrupted"}
    word = words.get(end.get("status"), end.get("status") or "ended in a way that was not recorded")
    return f"family {family} {word}" + (f" ({end['message']})" if end.get("message") else "")


# ---- the verdict ----


def _verdict(run: LoadedRun, criteria: tuple[Criterion, ...], found: tuple) -> Scorecard:
    def named(*wanted: str, among: Iterable[Criterion] = criteria) -> list[str]:
        order = sorted((c for c in among if c.status in wanted), key=lambda c: STATUSES.index(c.status))
        return [f"{c.sc} {c.title}: {c.status}, {c.reason}" for c in order]

    judged = {TITLES[number][2] for number in JUDGES}
    orphans = [i.reason for i in found if i.level == plausibility.INVALID and i.family not in judged]
    bad = named(INVALID) + [f"Plausibility: {INVALID}, {reason}" for reason in orphans] + named(FAIL)
    unfinished = named(INCOMPLETE, among=[c for c in criteria if c.gating or c.family])
    listed = {c.family for c in criteria if c.status == INCOMPLETE}
    for family in dict.fromkeys([*(run.info.get("families") or run.status), *run.unreadable]):
        if family not in listed and not family.endswith(".json") and (end := _unfinished(run, family)):
            unfinished.append(end)
    unfinished += [why for name, why in run.unreadable.items() if name.endswith(".json")]
    open_ = named(INSUFFICIENT, WARN, SKIP, among=[c for c in criteria if c.gating])
    if bad:
        return Scorecard(criteria, found, NO_GO, tuple(bad + unfinished + open_), 1, 1)
    if unfinished:
        return Scorecard(criteria, found, CONDITIONAL, tuple(unfinished + open_), 1, 1)
    if open_:
        return Scorecard(criteria, found, CONDITIONAL, tuple(open_), 0, EXIT_STRICT)
    return Scorecard(criteria, found, GO, (), 0, 0)


# ---- what every criterion uses ----


def limit(run: LoadedRun, name: str, factor: float = 1.0) -> Limit:
    entry = run.config["thresholds"][name]
    return Limit(name, run.config.threshold(name, run.kind) * factor, entry["unit"], entry["source"], entry["date"])


def _few(run: LoadedRun, value: Estimate) -> bool:
    return value.blocks < run.config.threshold("min_blocks_count")


def side(run: LoadedRun, value: Estimate, floor: float) -> str:
    """PASS, FAIL or INSUFFICIENT of a value that must be at least `floor`."""
    if _few(run, value):
        return INSUFFICIENT
    if value.lo >= floor:
        return PASS
    return FAIL if value.hi < floor else INSUFFICIENT


def missed(run: LoadedRun, status: str, noisy: bool, family: str, cases: Iterable[str]) -> tuple[str, str]:
    """What a missed speed becomes, and the words for it; any other status stays. `cases`: the rows that missed.

    Throttling for heat or by an alarm is the device's own doing and excuses nothing. A power limit is no such reason: at
    full load it acts on every device.
    """
    if status not in (FAIL, WARN, INSUFFICIENT):
        return status, ""
    if run.kind == "cpu":
        return (WARN_CPU, "") if status in (FAIL, WARN) else (status, "")
    if status == FAIL and noisy:
        if throttled := _overheated(run, family, set(cases)):
            return FAIL, f"; the device throttled meanwhile ({throttled})"
        return INSUFFICIENT, "; other work or a moving clock disturbed the measurement, so it is not held against the device"
    return status, ""


def _percent(run: LoadedRun, e: Estimate, status: str, scale: float = 1.0) -> str:
    """A share in percent, with its interval where that is what decides, and its blocks where they are too few."""
    few = f"; {_blocks(e)} too few" if _few(run, e) else ""
    between = f" ({e.lo * scale:.1f} to {e.hi * scale:.1f} %{few})" if status == INSUFFICIENT else ""
    return f"{e.median * scale:.1f} %{between}"


def _blocks(e: Estimate) -> str:
    return "1 block is" if e.blocks == 1 else f"{e.blocks} blocks are"


def _noisy(row: Row | None) -> bool:
    return bool(row) and any(f.startswith("NOISY") for f in row.flags)


def _states(run: LoadedRun, family: str, cases: set[str] | None = None) -> list[dict[str, Any]]:
    return [r.device_state for r in run.records(family) if r.device_state and (cases is None or r.case in cases)]


def _overheated(run: LoadedRun, family: str, cases: set[str]) -> str:
    """The throttle reasons other than a power limit that telemetry saw in the windows of these rows, as words."""
    seen: dict[str, int] = {}
    for state in _states(run, family, cases):
        for reason in state.get("throttle") or ():
            if not re.search(r"ppt|power", reason):
                seen[reason] = seen.get(reason, 0) + 1
    return ", ".join(f"{reason} in {count} windows" for reason, count in seen.items())


def _evidence(run: LoadedRun, c: Criterion) -> tuple[str, ...]:
    """What the window of a criterion that was not met looked like: anchors, noise, clock, power, throttle, backend."""
    family = c.family
    if c.sc == "SC-6":
        bounds = _bounds(run)
        wrong = [(of, r) for of, r in _checked(run) if _is_wrong(r, bounds)]
        return tuple(f"{of}{r.family} {r.case}: backend {r.backend or 'unknown'}, error {_figures_of(r.error)}"
                     for of, r in wrong[:6])  # fmt: skip
    if family is None or family not in run.files:
        return ()
    items, out = run.records(family), []
    for a in derive.anchors(items, run.config):
        word = "moved" if a.moved else "steady"
        out.append(f"{a.case}: {word}, largest step {a.largest_move_frac * 100:.1f} % over {len(a.rates)} times")
    for case, shift in roofline.anchor_shift(run, family).items() if family in ("ops", "e2e") else ():
        out.append(f"{case}: {shift * 100:+.1f} % since the roof was measured")
    rows = [r for r in derive.rows(items, run.config, run.kind) if r.role == "case" and r.time_s]
    noisy = [r.case for r in rows if _noisy(r)]
    if rows:
        out.append(f"noise: {len(noisy)} of {len(rows)} rows NOISY" + (f" ({', '.join(noisy[:4])})" if noisy else ""))
    out += _telemetry(_states(run, family))
    backends = list(dict.fromkeys(r.backend for r in rows if r.backend))
    if backends:
        more = f" and {len(backends) - 4} more" if len(backends) > 4 else ""
        out.append(f"backend: {'; '.join(backends[:4])}{more}")
    return tuple(out)


def _figures_of(error: dict[str, Any]) -> str:
    return ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in error.items())


def _telemetry(states: Sequence[dict[str, Any]]) -> list[str]:
    def spread(key: str, scale: float, unit: str) -> str | None:
        values = [s[key] / scale for s in states if isinstance(s.get(key), (int, float))]
        if not values:
            return None
        return f"{key.partition('_')[0]}: {statistics.median(values):.4g} {unit} (median), lowest {min(values):.4g}"

    if not states:
        return ["clock, power, throttle: unknown, no telemetry in this run"]
    parts = [spread("clock_hz", 1e9, "GHz"), spread("power_w", 1, "W"), spread("temperature_c", 1, "°C")]
    reasons = sorted({reason for s in states for reason in s.get("throttle") or ()})
    return [p for p in parts if p] + [f"throttle: {', '.join(reasons) or 'none seen'}"]


# ---- the criteria ----


def _sc0(run: LoadedRun, base: Criterion) -> Criterion:
    c = roofline.calibration(run)
    figures = (
        Figure("FLOP of a block, drift", c.flop_drift, "fraction"),
        Figure("bytes of a block, drift", c.bytes_drift, "fraction"),
    )
    if c.flop_drift is None or c.bytes_drift is None:
        return replace(base, status=NA, reason=c.reason)
    at_most = limit(run, "calibration_drift_pct")
    base = replace(base, figures=figures, limits=(at_most,))
    worst = max(abs(c.flop_drift), abs(c.bytes_drift)) * 100
    words = f"the op table differs from the pilot's totals by at most {worst:.3g} %"
    if not c.applies:
        return replace(base, status=NA, reason=f"{c.reason}; of the whole workload {words}")
    return replace(base, status=PASS if worst <= at_most.value else FAIL, reason=words)


def _sc1(run: LoadedRun, base: Criterion) -> Criterion:
    c = derive.compute(run)
    roof = c.roof.flop_s if c.roof else None
    if roof is None:
        return replace(base, status=INCOMPLETE, reason="no GEMM of the search was right and timed, so there is no roof")
    figures = [Figure.of("compute roof", roof, "FLOP/s")]
    if other := _other_target(run):
        return replace(base, status=SKIP, figures=tuple(figures), reason=other)
    basis = next((b for b in c.bases if b.rate), None)
    source = _floor(run, "roof_floor_frac")
    if basis is None or isinstance(source, str):
        why = source if isinstance(source, str) else next(b.reason for b in c.bases)
        return replace(base, status=NA, figures=tuple(figures), reason=f"no floor to hold it against: {why}")
    share, floor = basis.frac(roof), source.value
    square = c.best_square
    beside = square.flop_s.median / roof.median if square else None
    squares, steady = limit(run, "best_square_frac"), limit(run, "converged_roof_frac")
    figures.append(Figure.of(f"share of the {basis.label}", share, "fraction"))
    figures.append(Figure("best square over the roof", beside, "fraction"))
    status, more = missed(run, side(run, share, floor), _noisy(c.roof) or c.disturbed, "compute", ["roof"])
    reason = f"the roof is {_percent(run, share, status, 100)} of the {basis.label}; at least {floor * 100:.1f} % is wanted{more}"
    if status == PASS and not c.converged:
        status, reason = WARN, reason + _unconverged(roof, steady)
    if status == PASS and beside is not None and beside < squares.value:
        status, reason = WARN, f"{reason}; the best square reaches only {beside * 100:.0f} % of the roof"
    if run.kind == "cpu" and status == WARN:
        status = WARN_CPU
    return replace(base, status=status, reason=reason, figures=tuple(figures), limits=(source, squares, steady))


def _unconverged(roof: Estimate, steady: Limit) -> str:
    return f"; the roof has not converged (half-width {roof.half_width * 100:.1f} %, at most {steady.value * 100:g} %)"


def _floor(run: LoadedRun, name: str) -> Limit | str:
    """The floor that the target's entry in the configuration gives; why there is none, as text."""
    profile = run.selection.profile
    entry = run.config.floor(profile.key, name) if profile else None
    if entry is None:
        return run.selection.reason if profile is None else f"target {profile.key} is not in {run.config.path}"
    if entry["value"] is None:
        return entry["note"]
    source = "; ".join(filter(None, (", ".join(entry["source"]), entry["note"])))
    return Limit(f"{profile.key}: {name}", entry["value"], "fraction", source, entry["date"])


def _other_target(run: LoadedRun) -> str:
    """Why nothing is held against rated figures, where the target is another device than the one measured; else ""."""
    if run.selection.profile is None or run.selection.same_device:
        return ""
    return f"the target is {run.selection.profile.name}, another device was measured: the two are not compared"


def _sc2(run: LoadedRun, base: Criterion) -> Criterion:
    b = derive.bandwidth(run)
    if b.roof is None:
        return replace(base, status=INCOMPLETE, reason=f"no plateau of copy: {b.skipped or 'a size was not timed'}")
    at_most, steady = limit(run, "plateau_spread_pct"), limit(run, "converged_roof_frac")
    figures, limits = [Figure.of("bandwidth roof", b.roof.bytes_s, "B/s")], [at_most, steady]
    statuses, reasons = [], []

    def part(status: str, words: str, op: str) -> None:
        """What is judged by the plateau of `op`, whose noise alone excuses a miss."""
        rows = [r for r in b.rows if r.params.get("plateau") and r.params["op"] == op]
        status, more = missed(run, status, any(map(_noisy, rows)), "bandwidth", [r.case for r in rows])
        statuses.append(status)
        reasons.append(words + more)

    for name in ("copy", "add"):
        spread = _spread(b, name)
        if spread is None:
            part(INCOMPLETE, f"{name} has no plateau", name)
            continue
        figures.append(Figure.of(f"spread of {name} over the plateau", spread, "percent"))
        status = _at_most(run, spread, at_most.value)
        words = f"{name} differs by {_percent(run, spread, status)} over the plateau, at most {at_most.value:g} % is wanted"
        part(status, words, name)
    rated, floor = next((x for x in b.bases if x.rate), None), _floor(run, "bandwidth_floor_frac")
    if other := _other_target(run):
        part(SKIP, other, "copy")
    elif run.kind == "gpu" and rated and isinstance(floor, Limit):
        share = rated.frac(b.roof.bytes_s)
        figures.append(Figure.of(f"share of the {rated.label}", share, "fraction"))
        limits.append(floor)
        status = side(run, share, floor.value)
        words = f"the roof is {_percent(run, share, status, 100)} of rated, at least {floor.value * 100:.0f} % is wanted"
        part(status, words, "copy")
    elif run.kind == "gpu":
        why = floor if isinstance(floor, str) else b.bases[0].reason
        reasons.append(f"not held against a rated figure: {why}")
    status, more = worst(statuses), ""
    if status == PASS and not b.converged:
        status, more = WARN_CPU if run.kind == "cpu" else WARN, _unconverged(b.roof.bytes_s, steady)
    return replace(base, status=status, reason="; ".join(reasons) + more, figures=tuple(figures), limits=tuple(limits))


def _spread(b: derive.Bandwidth, op: str) -> Estimate | None:
    """max / min - 1 of the plateau's sizes in percent; the interval spans what their intervals allow."""
    rows = [r.bytes_s for r in b.rows if r.params["op"] == op and r.params.get("plateau")]
    if len(rows) < 2 or not all(rows):
        return None
    middle = max(r.median for r in rows) / min(r.median for r in rows) - 1
    low = max(x.lo for x in rows) / min(x.hi for x in rows) - 1
    high = max(x.hi / y.lo for x, y in itertools.permutations(rows, 2)) - 1  # a size is not both the most and the least
    return Estimate(middle * 100, max(0.0, low) * 100, high * 100, math.prod(r.coverage for r in rows),
                    min(r.blocks for r in rows), sum(r.samples for r in rows))  # fmt: skip


def _at_most(run: LoadedRun, value: Estimate, most: float) -> str:
    if _few(run, value):
        return INSUFFICIENT
    if value.hi <= most:
        return PASS
    return FAIL if value.lo > most else INSUFFICIENT


def worst(statuses: Iterable[str]) -> str:
    """The gravest of several; N/A where there is none."""
    return min(statuses, key=STATUSES.index, default=NA)


def _sc3(run: LoadedRun, base: Criterion) -> Criterion:
    found = roofline.ops(run)
    if found.roofs_missing:
        families = [f for f, x in (("compute", found.compute_roof), ("bandwidth", found.bandwidth_roof)) if x is None]
        return replace(base, status=_without(run, *families), reason=found.roofs_missing)
    near, share = limit(run, "ridge_near_frac"), limit(run, "attains_frac")
    briefest = run.config.threshold("launch_bound_s")
    unmeasured, wrong_side, low, open_, judged = [], [], [], [], 0
    for r in found.rows:
        if r.optimized is None:
            unmeasured.append(r.op.name)
            continue
        if run.kind == "gpu" and r.theory_s.median < briefest:
            continue
        judged += 1
        if _crossed(r, found, near.value):
            wrong_side.append(f"{r.op.name} is {r.bound}-bound, the rated ridge predicts {r.predicted}")
        status = side(run, r.attains, share.value)
        noisy = _noisy(r.optimized) or _slower_than_the_roofs(run, found, r)
        status, more = missed(run, status, noisy, "ops", [r.optimized.case])
        if status == PASS:
            continue
        if status == FAIL and r.launch_bound:
            status, more = INSUFFICIENT, "; the device waited for the host to hand calls over"
        attained = _percent(run, r.attains, status, 100)
        text = f"{r.op.name} attains {attained} of its roof, {share.value * 100:.0f} % is wanted{more}"
        (low if status in (FAIL, WARN_CPU) else open_).append(text)
    short = [r for r in found.rows if r.optimized and run.kind == "gpu" and r.theory_s.median < briefest]
    lowest = min((r for r in found.rows if r.attains and r not in short), key=lambda r: r.attains.median, default=None)
    figures = [Figure("operations judged", judged, "count"), Figure("launch-bound, not judged", len(short), "count")]
    if lowest:
        figures.append(Figure.of(f"lowest share of its roof: {lowest.op.name}", lowest.attains, "fraction"))
    figures += [Figure.of("measured ridge", found.ridge, "FLOP/B"), Figure("rated ridge", found.ridge_predicted, "FLOP/B")]
    brief = (limit(run, "launch_bound_s"),) if run.kind == "gpu" else ()
    base = replace(base, figures=tuple(figures), limits=(near, share, *brief))
    slow = WARN_CPU if run.kind == "cpu" else FAIL
    if not judged and not unmeasured:
        open_.append("no operation takes long enough to be judged")
    parts = [(FAIL, wrong_side), (slow, low), (INCOMPLETE, [f"no time for {x}" for x in unmeasured]), (INSUFFICIENT, open_)]
    parts = sorted((p for p in parts if p[1]), key=lambda p: STATUSES.index(p[0]))
    reasons = [text for _, texts in parts for text in texts]
    status = parts[0][0] if parts else PASS
    if not reasons:
        reasons = [f"{judged} operations attain at least {share.value * 100:.0f} % of the roof at their intensity"]
    shown = reasons[:4] + ([f"and {len(reasons) - 4} more"] if len(reasons) > 4 else [])
    if other := _other_target(run):
        status = worst((status, SKIP))
        shown.append(f"the side of the ridge is not judged: {other}")
    elif found.ridge_predicted is None and run.kind == "gpu":
        shown.append("the side of the ridge is not judged: no rated ridge of the device that was measured")
    return replace(base, status=status, reason="; ".join(shown))


def _slower_than_the_roofs(run: LoadedRun, found: roofline.Ops, r: roofline.OpRow) -> bool:
    """Whether the anchor of what bounds an operation ran slower here than around the roof; faster excuses no miss."""
    anchors = {"compute": ("anchor.gemm",), "memory": ("anchor.copy",)}.get(r.bound, tuple(found.shift))
    return any(found.shift.get(a, 0.0) < -run.config.threshold("anchor_moved_frac") for a in anchors)


def _without(run: LoadedRun, *families: str) -> str:
    """What lacks numbers of other families is: INCOMPLETE where one of them ran or was to run, else SKIP."""
    asked = {*run.files, *run.status, *run.info.get("families", ())}
    return INCOMPLETE if asked.intersection(families) else SKIP


def _crossed(r: roofline.OpRow, found: roofline.Ops, near_frac: float) -> bool:
    """On the other side of the ridge than predicted, near it nowhere in the interval of the measured ridge."""
    if r.predicted in (None, "near") or r.op.flop == 0:
        return False
    sides = {roofline.side(r.intensity, x, near_frac) for x in (found.ridge.lo, found.ridge.median, found.ridge.hi)}
    return len(sides) == 1 and sides.isdisjoint({"near", r.predicted})


def _sc4(run: LoadedRun, base: Criterion) -> Criterion:
    found = roofline.e2e(run)
    scopes = {m.scope: m for m in roofline.mfu(run)}
    points = limit(run, "mfu_pp")
    eager, compiled = (scopes[x].shares.get("measured") for x in (roofline.EAGER, roofline.COMPILED))
    figures = [Figure.of(scopes[x].label + ", MFU of the measured roof", scopes[x].shares.get("measured"), "fraction")
               for x in ("sum_default", roofline.EAGER, roofline.COMPILED)]  # fmt: skip
    figures += [Figure.of("eager over compiled time", found.speedup, "ratio"), *_pilot(run)]
    base = replace(base, figures=tuple(figures), limits=(points,))
    if roofline.EAGER not in found.rows:
        return replace(base, status=INCOMPLETE, reason=f"eager: {found.unavailable[roofline.EAGER]}")
    if found.speedup is None:
        why = found.unavailable.get(roofline.COMPILED, "its chunks do not pair with the eager ones")
        skipped = any(r.case == roofline.COMPILED and r.skipped for r in run.records("e2e"))
        status = INCOMPLETE
        if skipped and found.mode is None:  # no mode compiled; else it was wrong, or the family ended before
            status = FAIL if run.kind == "gpu" else SKIP
        return replace(base, status=status, reason=f"compiled: {why}")
    if eager is None:
        return replace(base, status=_without(run, "compute"), reason="no compute roof in this run, so there is no MFU")
    below = (1 - found.speedup.hi) * eager.median * 100  # points of MFU that compiled lies below eager, at the least
    middle = (found.speedup.median - 1) * eager.median * 100
    few = _few(run, found.speedup)
    status = INSUFFICIENT if few else FAIL if below > points.value else PASS
    word = "above" if middle >= 0 else "below"
    reason = f"compiled is {abs(middle):.1f} points of MFU {word} eager ({found.speedup.median:.3f} times as fast)"
    noisy = any(_noisy(r) for r in found.rows.values())
    status, more = missed(run, status, noisy, "e2e", [roofline.EAGER, roofline.COMPILED])
    gap = _gap(scopes["sum_default"].shares.get("measured"), eager)
    if gap and status == PASS and gap[0] > points.value:
        status = WARN_CPU if run.kind == "cpu" else WARN
        reason += f"; the sum of operations is {gap[1]:.1f} points above eager, more than {points.value:g}"
    if few:
        more = f"; {_blocks(found.speedup)} too few"
    return replace(base, status=status, reason=reason + more)


def _gap(above: Estimate | None, below: Estimate | None) -> tuple[float, float] | None:
    """(at least, middle) in percentage points; None without both."""
    return ((above.lo - below.hi) * 100, (above.median - below.median) * 100) if above and below else None


def _pilot(run: LoadedRun) -> list[Figure]:
    """The pilot's MFU targets beside this run's, where the two may be compared: reported, never gated on."""
    out, points = [], run.config.threshold("mfu_pp")
    for ref in roofline.reference(run):
        if ref.what.startswith("MFU") and ref.comparable and ref.observed:
            reached = "reached" if ref.observed.median * 100 >= ref.pilot * 100 - points else "not reached, reported only"
            words = f"{ref.what}, basis pilot (its target {ref.pilot * 100:.0f} - {points:g} points: {reached})"
            out.append(Figure.of(words, ref.observed, "fraction"))
    return out


def _sc5(run: LoadedRun, base: Criterion, checked: Artefacts) -> Criterion:
    figures = (Figure("artefacts declared", checked.declared, "count"), Figure("found whole", checked.whole, "count"))
    base = replace(base, figures=figures)
    missing = f"missing: {_some(checked.missing)}" if checked.missing else ""
    if checked.broken:
        return replace(base, status=FAIL, reason="; ".join(filter(None, (_some(checked.broken), missing))))
    if missing:
        return replace(base, status=INCOMPLETE, reason=missing)
    formats = ", ".join(checked.formats) or "none, so the raw part alone is required"
    return replace(base, status=PASS, reason=f"all {checked.declared} exist, open and are not empty (formats: {formats})")


def _some(items: Sequence[str]) -> str:
    return ", ".join(items[:3]) + (f" and {len(items) - 3} more" if len(items) > 3 else "")


def _sc6(run: LoadedRun, base: Criterion) -> Criterion:
    bounds = _bounds(run)
    names = ("gemm_elementwise_rel", "gemm_elementwise_abs", "freivalds_sigma_ratio")  # of ratios that the checks store
    limits = [*bounds.values(), *(limit(run, n) for n in names)]
    wrong, checked, largest = [], 0, None
    for of, r in _checked(run):
        checked += 1
        if why := _is_wrong(r, bounds):
            wrong.append(f"{of}{r.family} {r.case}: {why}")
        elif (rel := r.error.get("rel_frobenius")) is not None and not r.params.get("reduced_precision"):
            share = rel / r.error.get("rel_frobenius_limit", math.inf)
            largest = max(largest or (0.0, ""), (share, f"{of}{r.family} {r.case}"))
    figures = [Figure("results checked", checked, "count"), Figure("wrong", len(wrong), "count")]
    if largest:
        figures.append(Figure(f"largest error over its bound: {largest[1]}", largest[0], "fraction"))
    base = replace(base, figures=tuple(figures), limits=tuple(dict.fromkeys(limits)))
    if wrong:
        return replace(base, status=INVALID, reason=f"{len(wrong)} of {checked} checked results are wrong: {_some(wrong)}")
    if not checked:
        gone = [f for f in ("compute", "ops", "e2e") if f in run.info.get("families", ())]
        return replace(base, status=INCOMPLETE if gone else SKIP, reason="no result was checked")
    return replace(base, status=PASS, reason=f"all {checked} checked results lie inside their bounds")


def _checked(run: LoadedRun) -> Iterator[tuple[str, Record]]:
    """Every record with a check in every iteration; before it the words that name another iteration than the judged one."""
    for part in (run, *run.repeats):
        of = "" if part is run else f"iteration {part.iteration}: "
        yield from ((of, r) for family in part.files for r in part.records(family) if r.error)


def _bounds(run: LoadedRun) -> dict[str, Limit]:
    """Kind of check -> the relative Frobenius error that the configuration allows; of a pass at this run's depth."""
    gemm = limit(run, "gemm_rel_frobenius")
    deep = max(1.0, math.sqrt(roofline.spec_of(run).depth / run.config.threshold("compiled_pass_depth_count")))
    whole = limit(run, "compiled_pass_rel_frobenius", deep)
    return {
        "full": gemm, "freivalds": gemm, "attention": limit(run, "attention_rel_frobenius"),
        "compiled block": limit(run, "compiled_block_rel_frobenius"), "compiled pass": whole, "against eager": whole,
    }  # fmt: skip


def _is_wrong(r: Record, bounds: dict[str, Limit]) -> str | None:
    """Why a result is wrong: what its check said, or a figure beyond the bound that the configuration gives now.

    A GEMM that may round its sums, or that applies GELU, has the wider bound of its own check alone.
    """
    e = r.error
    rel, check = e.get("rel_frobenius"), e.get("check")
    wider = r.params.get("reduced_precision") or r.params.get("op") in ("fused", "unfused")
    now = bounds[check].value if check in bounds and not wider else None
    limits = [x for x in (e.get("rel_frobenius_limit"), now) if x is not None]
    if rel is not None and limits and not rel <= min(limits):
        return f"relative Frobenius error {rel:.2g}, at most {min(limits):.2g} is allowed"
    for name, what in (("elementwise_ratio", "an element"), ("freivalds_ratio", "a row of the Freivalds check")):
        if (ratio := e.get(name)) is not None and ratio > 1:
            return f"{what} is off by {ratio:.2g} times its bound"
    return None if e["ok"] else f"the {e.get('check', 'comparison')} check failed"


def _sc8(run: LoadedRun, base: Criterion) -> Criterion:
    found = variability(run)
    if isinstance(found, str):
        return replace(base, status=SKIP, reason=found, limits=_variability_limits(run))
    return judge_variability(run, found)


def variability(run: LoadedRun) -> compare.Variability | str:
    """What SC-8 is judged by: the run's own iterations or the variability that was kept in it, whichever has more
    processes (of equally many its own); why there is neither, as text. RecordError or CompareError for a damaged file."""
    own, path = compare.processes(run), run.directory / VARIABILITY
    kept, why = None, "one run alone has no spread between runs; escher variability --runs 3, or ITERATIONS=3, makes more"
    if path.is_file():
        kept = compare.read_summary(read_json(path), str(path))
        if run.info["run_id"] not in [p.run_id for p in kept.processes]:
            kept, why = None, f"{VARIABILITY} is of other runs"
    if len(own) > 1 and len(own) >= len(kept.processes if kept else ()):
        return compare.variability([run])
    return kept or why


def _variability_limits(run: LoadedRun) -> tuple[Limit, Limit]:
    return limit(run, "cv_pct"), limit(run, "cv_runs_count")


def judge_variability(run: LoadedRun, found: compare.Variability) -> Criterion:
    """SC-8 of runs that `run` is one of."""
    at_most, enough = _variability_limits(run)
    spreads = [s for s in found.spreads if s.cv is not None and s.count >= enough.value]
    count = min((s.count for s in found.spreads), default=len(found.processes))
    figures = [Figure("fresh-process runs", count, "count")]
    figures += [Figure(f"CV of {s.label}", s.cv * 100, "percent") for s in found.spreads if s.cv is not None]
    base = Criterion("SC-8", *TITLES[8], SKIP, "", figures=tuple(figures), limits=(at_most, enough))
    largest = max(spreads, key=lambda s: s.cv, default=None)
    met = largest is None or largest.cv * 100 <= at_most.value
    if met and (largest is None or len(spreads) < len(found.spreads)):
        few = next((f" of {s.label}" for s in found.spreads if s not in spreads), "")
        return replace(base, status=INSUFFICIENT, reason=f"{count} fresh-process runs{few}, {enough.value:g} are needed")
    status = PASS if met else WARN_CPU if run.kind == "cpu" else FAIL
    words = f"the largest CV of {largest.count} runs is {largest.cv * 100:.1f} % ({largest.label})"
    return replace(base, status=status, reason=f"{words}, at most {at_most.value:g} % is wanted")


def _sc9(run: LoadedRun, base: Criterion) -> Criterion:
    names = ("cross_check_compute_pct", "cross_check_bandwidth_pct", "cross_check_collective_pct")
    found = crosscheck.checks(run)
    matched = [c for c in found if c.matched]
    figures = [Figure("matched rows", len(matched), "count")]
    figures += [Figure.of(f"ours over {c.tool}: {c.name}", c.ratio, "ratio") for c in matched[:6]]
    base = replace(base, figures=tuple(figures), limits=tuple(limit(run, n) for n in names))
    told = [c for c in found if c.status == FAIL or (c.matched and c.status != PASS)]
    told.sort(key=lambda c: STATUSES.index(c.status))
    odd = [c for c in found if not c.matched and c.status in (INVALID, INCOMPLETE, UNPARSED, WARN)]
    if told or (odd and matched) or any(c.status == WARN for c in odd):
        # what is wrong with a tool is not the device's, so it is never NO-GO; but it is said
        status = told[0].status if told else WARN_CPU if matched and run.kind == "cpu" else WARN
        words = [f"{c.tool}, {c.name}: {c.reason}" for c in told]
        words += [f"{c.tool}, {c.name}: {c.reason} ({c.status})" for c in odd]
        evidence = tuple(_disagreement(c) for c in told if c.matched)
        return replace(base, status=status, reason=_some(words), evidence=evidence)
    if not matched:
        if not found:
            why = "no outside tool was run; escher validate RUN runs what is installed, --import takes logs"
            return replace(base, status=SKIP, reason=why)
        problems = [f"{c.tool}: {c.status}, {c.reason}" for c in found]
        all_skipped = all(c.status in (SKIP, UNSUPPORTED) for c in found)
        return replace(base, status=SKIP if all_skipped else INCOMPLETE, reason=f"no matched row ({_some(problems)})")
    with_whom = ", ".join(sorted({c.tool for c in matched}))
    return replace(base, status=PASS, reason=f"{len(matched)} matched rows agree with {with_whom}")


def _disagreement(c: crosscheck.Check) -> str:
    """The evidence of a matched row that does not agree, in base units."""
    def figure(e: Estimate | None) -> str:
        return f"{e.median:.5g} {c.unit} ({e.lo:.5g} to {e.hi:.5g})" if e else "unknown"

    how = "imported" if c.imported else "interleaved" if c.interleaved else "not interleaved"
    noise = "ours is NOISY" if c.noisy else "ours is not NOISY"
    return (
        f"{c.tool}, {c.name}: our {c.ours_case} {figure(c.ours)}, theirs {figure(c.theirs)}, statistic {c.statistic}, "
        f"log {c.log}, {how}, {noise}"
    )


def _sc11(run: LoadedRun, base: Criterion) -> Criterion:
    found = memory.capacity(run)
    need = next((n for n in memory.needs_of_run(run) if n.whole), None)
    if need is None or found.total is None:
        why = "no workload" if need is None else "the search for many blocks found no amount"
        return replace(base, status=INCOMPLETE, reason=why)
    h = memory.headroom(need, found)
    figures = (
        Figure("weights", need.weights_bytes, "bytes"), Figure("caches", need.caches_bytes, "bytes"),
        Figure("peak live activations", need.activations_bytes, "bytes"), Figure("measured", h.measured_bytes, "bytes"),
        Figure("margin", h.margin_bytes, "bytes"), Figure("rated", found.rated_bytes, "bytes"),
    )  # fmt: skip
    base = replace(base, figures=figures)
    gib = 2**30
    had = f"{'at least ' if h.at_least else ''}{h.measured_bytes / gib:.1f} GiB measured"
    if h.at_least and h.fits is False and found.most_bytes:
        had += f", of {found.most_bytes / gib:.1f} GiB that there can be"
    words = f"{need.spec.name} needs {need.bytes / gib:.1f} GiB; {had}, margin {h.margin_bytes / gib:+.1f} GiB"
    if h.fits is False and h.margin_bytes >= 0:
        sizes = (x / gib for x in (need.largest_tensor_bytes, found.largest_tensor[0]))
        words += "; but its largest tensor is {:.2f} GiB, and one tensor got {:.2f} GiB".format(*sizes)
    rated_fits = h.rated_fits if found.same_device else None
    if h.fits:
        return replace(base, status=PASS, reason=words)
    if h.fits is None:
        return replace(base, status=INSUFFICIENT, reason=f"{words}; the search ended before it could tell")
    if rated_fits:
        return replace(base, status=FAIL, reason=f"{words}, though its rated memory would hold it")
    why = "its rated memory is smaller than that" if rated_fits is False else "no rated memory to hold it against"
    why = _other_target(run) or why
    return replace(base, status=WARN, reason=f"{words}; {why}")


JUDGES: dict[int, Callable[[LoadedRun, Criterion], Criterion]] = {
    0: _sc0, 1: _sc1, 2: _sc2, 3: _sc3, 4: _sc4, 6: _sc6, 8: _sc8, 9: _sc9, 11: _sc11,
}  # fmt: skip


def to_json(card: Scorecard) -> dict[str, Any]:
    """scorecard.json."""
    return {
        "schema": 1, "verdict": card.verdict, "exit_status": card.exit_status, "strict_exit_status": card.strict_exit_status,
        "reasons": list(card.reasons), "criteria": [asdict(c) for c in card.criteria],
        "implausible": [asdict(i) for i in card.implausible],
    }  # fmt: skip
