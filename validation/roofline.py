"""The workload against the roofs: theory times, bounds, the sum of operations, MFU on each basis, and where the rest goes.

theory time = max(FLOP / compute roof, bytes / bandwidth roof), both roofs measured by this run. Families 4 and 5 measure
without knowing the roofs; everything that needs two families is derived here, from records alone.
S. Williams, A. Waterman, D. Patterson, "Roofline", CACM 2009.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from escher_kernels import attention, workload
from escher_kernels.records import Record
from escher_kernels.statistics import Estimate, estimate, paired_ratio
from escher_kernels.workload import Op, Spec
from validation import derive
from validation.derive import Basis, LoadedRun, Row

AT_LIMIT, TUNABLE, ISSUE, UNSETTLED = "at the limit", "tunable", "kernel issue", "unsettled"
DEFAULT, OPTIMIZED = "default", "optimized"
EAGER, COMPILED = "eager", "compiled"


def spec_of(run: LoadedRun) -> Spec:
    """The spec that ran. WorkloadError where run.json holds none that can be used."""
    return workload.from_json(run.info["workload"], f"{run.directory / 'run.json'}: workload")


# ---- calibration ----


@dataclass(frozen=True)
class Calibration:
    """The pilot's table against the derived geometry, a block. Drifts are fractions; `applies` False: only shown."""

    flop: int
    bytes: int
    pilot_flop: float | None
    pilot_bytes: float | None
    applies: bool
    reason: str

    @property
    def flop_drift(self) -> float | None:
        return self.flop / self.pilot_flop - 1 if self.pilot_flop else None

    @property
    def bytes_drift(self) -> float | None:
        return self.bytes / self.pilot_bytes - 1 if self.pilot_bytes else None


def calibration(run: LoadedRun) -> Calibration:
    """SC-0's figures: of the whole workload, and whether they judge what ran."""
    ran = spec_of(run)
    whole = ran.whole()
    flop, moved = workload.pilot_totals(whole)
    pilot = whole.pilot or {}
    totals = (pilot.get("block_gflop"), pilot.get("block_mb"))
    if not all(isinstance(t, (int, float)) and t > 0 for t in totals):
        return Calibration(flop, moved, None, None, False, f"workload {whole.name} declares no pilot totals")
    reason = "what ran is a derived workload" if ran.derived_from else ""
    return Calibration(flop, moved, totals[0] * 1e9, totals[1] * 1e6, not ran.derived_from, reason)


@dataclass(frozen=True)
class PilotBound:
    """What the pilot's own peak and ridge allow: the sum of theory times of its table."""

    peak_flop_s: float
    bytes_s: float
    mfu_frac: float


def pilot_bound(spec: Spec) -> PilotBound | None:
    """The highest MFU that the pilot's ridge allows at its peak; None for a workload without a pilot."""
    pilot = spec.pilot or {}
    if not (pilot.get("peak_tflops") and pilot.get("ridge_flop_per_byte")):
        return None
    peak = pilot["peak_tflops"] * 1e12
    bytes_s = peak / pilot["ridge_flop_per_byte"]
    rows = [op for op in workload.ops(spec.whole()) if op.bytes_pilot is not None]
    ideal = sum(op.flop_pilot for op in rows) / peak
    return PilotBound(peak, bytes_s, ideal / sum(max(op.flop_pilot / peak, op.bytes_pilot / bytes_s) for op in rows))


# ---- operations ----


@dataclass(frozen=True)
class OpRow:
    """An operation of the workload: its rows, its theory time, and what they say of each other.

    `others`: the paths beside the default one. `optimized`: the fastest right row. `ratio[path]`: measured over theory
    time. `bound`: compute, memory or near the ridge, by the measured roofs; `predicted` the same by the profile's rated
    figures. All that needs a roof is None without one.
    """

    op: Op
    default: Row | None
    others: tuple[Row, ...]
    optimized: Row | None
    theory_s: Estimate | None
    bound: str | None
    predicted: str | None
    ratio: dict[str, Estimate]
    band: str | None
    launch_bound: bool

    @property
    def intensity(self) -> float:
        return self.op.flop / self.op.bytes

    def row(self, path: str) -> Row | None:
        return self.default if path == DEFAULT else self.optimized

    @property
    def attains(self) -> Estimate | None:
        """Share of the roof at its intensity that the optimized path reaches."""
        r = self.ratio.get(OPTIMIZED)
        return r and Estimate(1 / r.median, 1 / r.hi, 1 / r.lo, r.coverage, r.blocks, r.samples)


@dataclass(frozen=True)
class Ops:
    spec: Spec
    rows: list[OpRow]
    every: list[Row]
    compute_roof: Estimate | None
    bandwidth_roof: Estimate | None
    roofs_missing: str | None
    ridge: Estimate | None
    ridge_predicted: float | None
    shift: dict[str, float]


def ops(run: LoadedRun) -> Ops | None:
    """Family 4 against the roofs; None where it was not measured."""
    if "ops" not in run.files:
        return None
    spec, config = spec_of(run), run.config
    every = derive.rows(run.records("ops"), config, run.kind)
    timed = [r for r in every if r.role == "case"]
    peak, bytes_s, missing = roofs(run)
    measured_ridge = derive.ridge(peak, bytes_s) if peak and bytes_s else None
    predicted = predicted_ridge(run)
    rows = [_op_row(op, timed, peak, bytes_s, predicted, run) for op in workload.ops(spec)]
    return Ops(spec, rows, every, peak, bytes_s, missing, measured_ridge, predicted, anchor_shift(run, "ops"))


def roofs(run: LoadedRun) -> tuple[Estimate | None, Estimate | None, str | None]:
    """(compute roof FLOP/s, bandwidth roof B/s, why one is missing)."""
    c, b = derive.compute(run), derive.bandwidth(run)
    peak = c.roof.flop_s if c and c.roof else None
    bytes_s = b.roof.bytes_s if b and b.roof else None
    missing = [name for name, value in (("compute", peak), ("bandwidth", bytes_s)) if value is None]
    return peak, bytes_s, f"no {' and no '.join(missing)} roof in this run" if missing else None


def predicted_ridge(run: LoadedRun) -> float | None:
    """Rated compute over rated bandwidth of the device that was measured; None without both."""
    profile = run.selection.profile
    c = derive.compute(run)
    if profile is None or not run.selection.same_device or c is None:
        return None
    peak = profile.dense_peak_flop_s.get(c.dtype)
    return peak / profile.bandwidth_bytes_s if peak and profile.bandwidth_bytes_s else None


def side(intensity: float, ridge: float | None, near_frac: float) -> str | None:
    """compute, memory, or near the ridge; None without a ridge."""
    if ridge is None:
        return None
    if abs(intensity / ridge - 1) <= near_frac:
        return "near"
    return "compute" if intensity > ridge else "memory"


def _op_row(
    op: Op, timed: Sequence[Row], peak: Estimate | None, bytes_s: Estimate | None, predicted: float | None, run: LoadedRun
) -> OpRow:
    config = run.config
    mine = [r for r in timed if r.params.get("op") == op.name]
    default = next((r for r in mine if r.params.get("path") == DEFAULT), None)
    others = tuple(r for r in mine if r is not default)
    right = [r for r in mine if r.time_s]
    optimized = min(right, key=lambda r: r.time_s.median, default=None)
    theory = None
    if peak and bytes_s:
        by_bytes = bytes_s.over(op.bytes)
        by_flop = peak.over(op.flop) if op.flop else None
        theory = by_flop if by_flop and by_flop.median > by_bytes.median else by_bytes
    ratio = {
        path: derive.quotient(r.time_s, theory)
        for path, r in ((DEFAULT, default), (OPTIMIZED, optimized))
        if theory and r and r.time_s
    }
    near, intensity = config.threshold("ridge_near_frac"), op.flop / op.bytes
    short = bool(theory and theory.median < config.threshold("launch_bound_s"))
    waits = bool(optimized and "HOST_BOUND" in optimized.flags)  # the device waited for the host to hand calls over
    launch_bound = run.kind == "gpu" and (short or waits)
    ridge = derive.ridge(peak, bytes_s).median if peak and bytes_s else None
    return OpRow(
        op=op, default=default, others=others, optimized=optimized, theory_s=theory,
        bound=side(intensity, ridge, near), predicted=side(intensity, predicted, near), ratio=ratio,
        band=band(ratio[OPTIMIZED], config) if OPTIMIZED in ratio and not launch_bound else None,
        launch_bound=launch_bound,
    )  # fmt: skip


def band(ratio: Estimate, config: Any) -> str:
    """How far from the hardware an operation is: at the limit, tunable, or a kernel issue; unsettled where the interval
    of its ratio spans two of them."""
    limits = (config.threshold("at_limit_ratio"), config.threshold("tunable_ratio"))
    low, high = (sum(x > limit for limit in limits) for x in (ratio.lo, ratio.hi))
    return (AT_LIMIT, TUNABLE, ISSUE)[low] if low == high else UNSETTLED


def anchor_shift(run: LoadedRun, family: str) -> dict[str, float]:
    """How far this family's anchors lie from those around the roofs, per anchor case: rate here over rate there - 1."""
    def rate(name: str, case: str) -> float | None:
        found = next((a for a in derive.anchors(run.records(name), run.config) if a.case == case), None)
        return statistics.median(found.rates) if found else None

    out = {}
    for case, roof_family in (("anchor.gemm", "compute"), ("anchor.copy", "bandwidth")):
        here, there = rate(family, case), rate(roof_family, case)
        if here and there:
            out[case] = here / there - 1
    return out


def _times(spec: Spec, op: Op) -> int:
    """How often an operation runs in a pass."""
    return 1 if op.per_pass else spec.depth


@dataclass(frozen=True)
class Total:
    """A sum of operations over a pass; `time_s` is None where one has no time, and `missing` names them."""

    path: str
    time_s: Estimate | None
    missing: tuple[str, ...]


def sum_of_ops(found: Ops, path: str) -> Total:
    """The pass as the sum of its operations, each measured alone: block by block, then as ever."""
    missing = tuple(r.op.name for r in found.rows if not (r.row(path) and r.row(path).time_s))
    if missing:
        return Total(path, None, missing)
    return Total(path, total_s((r.row(path), _times(found.spec, r.op)) for r in found.rows), ())


def total_s(items: Iterable[tuple[Row, int]]) -> Estimate | None:
    """Sum of times x how often, over the blocks that all rows have."""
    items = list(items)
    medians = [{n: statistics.median(b) for n, b in zip(r.block_numbers, r.blocks, strict=True)} for r, _ in items]
    common = [n for n in medians[0] if all(n in m for m in medians)] if medians else []
    if not common:
        return None
    return estimate([sum(m[n] * times for m, (_, times) in zip(medians, items, strict=True))] for n in common)


def theory_total_s(found: Ops) -> Estimate | None:
    """Sum of theory times of a pass: what the roofs allow."""
    if found.roofs_missing:
        return None
    parts = [(r.theory_s, _times(found.spec, r.op)) for r in found.rows]
    return Estimate(*(sum(getattr(t, x) * n for t, n in parts) for x in ("median", "lo", "hi")),
                    min(t.coverage for t, _ in parts), min(t.blocks for t, _ in parts), 0)  # fmt: skip


# ---- end to end ----


@dataclass(frozen=True)
class Memory:
    """Peak while a pass runs, beyond what the process held before, and what of it is known. Bytes; `what` says what the
    peak is the peak of."""

    mode: str
    peak_bytes: float | None
    what: str
    weights_bytes: int | None
    cache_bytes: int | None


@dataclass(frozen=True)
class Counter:
    """FLOP of a pass as the op table declares them and as torch's counter finds them."""

    declared: int
    counted: float

    @property
    def drift_frac(self) -> float:
        return self.counted / self.declared - 1


@dataclass(frozen=True)
class E2e:
    spec: Spec
    rows: dict[str, Row]
    unavailable: dict[str, str]
    speedup: Estimate | None
    counter: Counter | None
    mode: str | None
    compile_s: float | None
    from_cache: bool
    compile_errors: list[dict[str, Any]]
    compile_tries: list[tuple[str, str]]
    attention: str | None
    attention_tries: list[tuple[str, str]]
    memory: list[Memory]
    gaps_s: dict[str, float]
    shift: dict[str, float]


def e2e(run: LoadedRun) -> E2e | None:
    """Family 5; None where it was not measured."""
    if "e2e" not in run.files:
        return None
    items = run.records("e2e")
    rows = {r.case: r for r in derive.rows(items, run.config, run.kind) if r.role == "case"}
    probes = [r for r in items if r.role == "probe"]
    reasons = {}
    for name in (EAGER, COMPILED):
        row = rows.get(name)
        if not (row and row.time_s):
            reasons[name] = "was not run" if row is None else row.skipped or ("wrong result" if row.wrong else "not timed")
    counter = next((r for r in probes if r.case == "flop.counter" and r.value), None)
    compiles = [r for r in probes if r.case == "compile"]
    ran = next((r for r in compiles if COMPILED in rows and r.params.get("mode") == rows[COMPILED].params.get("mode")), None)
    eager_row = rows.get(EAGER)
    return E2e(
        spec=spec_of(run),
        rows={name: r for name, r in rows.items() if r.time_s},
        unavailable=reasons,
        speedup=_speedup(rows.get(EAGER), rows.get(COMPILED)),
        counter=Counter(counter.params["declared"], counter.value) if counter else None,
        mode=ran.params["mode"] if ran else None,
        compile_s=ran.value if ran else None,
        from_cache=bool(ran and ran.params.get("from_cache")),
        compile_errors=[r.error for r in compiles if r.error and (ran is None or r.params["mode"] == ran.params["mode"])],
        compile_tries=[(r.params["mode"], _fate(r)) for r in _worst_of_each(compiles, lambda r: r.params["mode"])],
        attention=eager_row.params.get("attention") if eager_row else None,
        attention_tries=[(r.case.partition(".")[2], _fate(r)) for r in probes if r.case.startswith("attention.")],
        memory=[_memory(r) for r in probes if r.case.startswith("memory.")],
        gaps_s={r.case.partition(".")[2]: r.value for r in probes if r.case.startswith("gaps.") and r.value is not None},
        shift=anchor_shift(run, "e2e"),
    )


def _worst_of_each(items: Iterable[Record], key: Callable[[Record], Any]) -> list[Record]:
    """One record a key, in order: a wrong one where there is one (a mode has an error of its block and of its pass)."""
    out: dict[Any, Record] = {}
    for r in items:
        if key(r) not in out or (r.error and not r.error["ok"]):
            out[key(r)] = r
    return list(out.values())


def _fate(record: Record) -> str:
    """What became of something that was tried."""
    if record.skipped:
        return record.skipped
    if record.error and not record.error["ok"]:
        return "wrong result"
    return f"ran: {record.backend}" if record.backend else "worked"


def _memory(record: Record) -> Memory:
    p = record.params
    return Memory(record.case.partition(".")[2], record.value, record.skipped or p.get("what", ""), p.get("weights_bytes"),
                  p.get("cache_bytes"))  # fmt: skip


def _speedup(eager: Row | None, compiled: Row | None) -> Estimate | None:
    """Eager over compiled time, from chunks that alternate: median of the pairwise ratios."""
    if not (eager and compiled and eager.time_s and compiled.time_s):
        return None
    a, b = ({n: block for n, block in zip(r.block_numbers, r.blocks, strict=True)} for r in (eager, compiled))
    common = [n for n in a if n in b and len(a[n]) == len(b[n])]
    return paired_ratio([a[n] for n in common], [b[n] for n in common]) if common else None


@dataclass(frozen=True)
class Mfu:
    """One scope: its time a pass, its rate, and its share of each basis (None where this run has no such share)."""

    scope: str
    label: str
    time_s: Estimate | None
    flop_s: Estimate | None
    shares: dict[str, Estimate | None]
    reason: str = ""


SCOPES = {
    "theory": "sum of theory times",
    "sum_default": "sum of ops, default",
    "sum_optimized": "sum of ops, optimized",
    EAGER: "model, eager",
    COMPILED: "model, compiled",
}


def bases(run: LoadedRun) -> list[Basis]:
    """What an MFU may be a share of: the measured roof, the rated or probed peak, the pilot's peak."""
    c = derive.compute(run)
    peak = c.roof.flop_s if c and c.roof else None
    why = "" if peak else "no compute roof in this run"
    out = [Basis("measured", "measured compute roof", peak and peak.median, why, True, interval=peak)]
    out += c.bases if c else derive.compute_bases(run, next(iter(run.files.values())).run.parameters["dtype"])
    pilot = spec_of(run).pilot or {}
    if pilot.get("peak_tflops"):
        reference = run.config["project"].get("reference_target")
        profile = run.selection.found_profile
        same = bool(profile and profile.key == reference)
        why = "" if same else f"the pilot's peak is that of {reference}, another device"
        out.append(Basis("pilot", "pilot's peak", pilot["peak_tflops"] * 1e12, why, same, pilot.get("source", "")))
    return out


def mfu(run: LoadedRun) -> list[Mfu]:
    """Every scope that was measured, against every basis."""
    spec, found, whole = spec_of(run), ops(run), e2e(run)
    flop, basis = workload.pass_flop(spec), bases(run)
    out = []
    for scope, label in SCOPES.items():
        time_s, reason = None, "family ops was not measured" if not scope.startswith((EAGER, COMPILED)) else ""
        if scope == "theory" and found:
            time_s, reason = theory_total_s(found), found.roofs_missing or ""
        elif scope.startswith("sum_") and found:
            total = sum_of_ops(found, scope.removeprefix("sum_"))
            time_s, reason = total.time_s, f"no time for {', '.join(total.missing)}" if total.missing else ""
        elif scope in (EAGER, COMPILED):
            row = whole.rows.get(scope) if whole else None
            time_s = row.time_s if row else None
            reason = (whole.unavailable.get(scope, "") if whole else "family e2e was not measured")
        rate = time_s.over(flop) if time_s else None
        out.append(Mfu(scope, label, time_s, rate, {b.name: b.frac(rate) for b in basis}, reason))
    return out


@dataclass(frozen=True)
class Ledger:
    """Where the time of a pass beyond FLOP / roof goes. Seconds; `parts` in order, the residual last.

    `noted`: what of it is not known here; a part that is not known is left out.
    """

    mode: str
    total_s: float
    floor_s: float
    parts: dict[str, float]
    residual_frac: Estimate  # of the pass; its interval is that of the pass and of the sum of its operations
    finding: bool | None  # the residual lies wholly beyond the limit; None: its interval straddles the limit
    noted: tuple[str, ...]


MEMORY_BOUND, INEFFICIENT, OUTSIDE, LAUNCH, RESIDUAL = (
    "memory-bound operations", "kernel inefficiency", "outside the pilot's table", "launch gaps", "residual",
)  # fmt: skip
PARTS = (MEMORY_BOUND, INEFFICIENT, OUTSIDE, LAUNCH, RESIDUAL)


def ledger(run: LoadedRun, mode: str) -> Ledger | str:
    """The gap ledger of the eager or the compiled pass; the reason as text where it cannot be made.

    Eager is explained by the default path of each operation, compiled by the optimized one, attention in both by the
    backend that the model ran.
    """
    found, whole = ops(run), e2e(run)
    if not found or not whole:
        return "needs families ops and e2e in one run"
    if found.roofs_missing:
        return found.roofs_missing
    row = whole.rows.get(mode)
    if row is None:
        return whole.unavailable.get(mode, "not timed")
    path = DEFAULT if mode == EAGER else OPTIMIZED
    chosen = {r.op.name: _as_ran(r, path, row.params.get("attention")) for r in found.rows}
    missing = [name for name, r in chosen.items() if not (r and r.time_s)]
    if missing:
        return f"no time for {', '.join(missing)}"
    spec, peak = found.spec, found.compute_roof.median
    memory = slow = outside = 0.0
    for r in found.rows:
        measured, times = chosen[r.op.name].time_s.median, _times(spec, r.op)
        if r.op.bytes_pilot is None:
            outside += times * measured
            continue
        memory += times * (r.theory_s.median - r.op.flop / peak)
        slow += times * (measured - r.theory_s.median)
    total, floor = row.time_s.median, workload.pass_flop(spec) / peak
    gap = whole.gaps_s.get(mode)
    parts = {MEMORY_BOUND: memory, INEFFICIENT: slow, OUTSIDE: outside, **({} if gap is None else {LAUNCH: gap})}
    parts[RESIDUAL] = total - floor - sum(parts.values())
    frac = _residual(row.time_s, total_s((chosen[r.op.name], _times(spec, r.op)) for r in found.rows), gap or 0.0, parts)
    noted = []
    if gap is None:
        why = "a CPU runs an operation inside its call" if run.kind == "cpu" else "they were not measured"
        noted.append(f"launch gaps are not told apart ({why}); they are part of the residual")
    limit = run.config.threshold("gap_residual_frac")
    beyond = min(abs(frac.lo), abs(frac.hi)) > limit and frac.lo * frac.hi > 0
    within = max(abs(frac.lo), abs(frac.hi)) <= limit
    return Ledger(mode, total, floor, parts, frac, beyond if beyond or within else None, tuple(noted))


def _residual(whole: Estimate, alone: Estimate | None, gap_s: float, parts: dict[str, float]) -> Estimate:
    """The residual over the pass; without a block that all operations share its interval is unbounded on both sides."""
    middle = parts[RESIDUAL] / whole.median
    if alone is None:
        return Estimate(middle, min(-1.0, middle), 1.0, 0.0, 0, whole.samples)
    low, high = ((end - other - gap_s) / whole.median for end, other in ((whole.lo, alone.hi), (whole.hi, alone.lo)))
    return Estimate(middle, min(low, middle), max(high, middle), whole.coverage * alone.coverage,
                    min(whole.blocks, alone.blocks), whole.samples + alone.samples)  # fmt: skip


def _as_ran(r: OpRow, path: str, backend: str | None) -> Row | None:
    """The row that stands for an operation inside the model: its path, or the attention backend that the model ran."""
    if r.op.kind == "attention":
        timed = [x for x in (*r.others, r.default) if x and x.time_s]
        same = [x for x in timed if backend in (x.params.get("path"), x.params.get("attention"))]
        if not same and backend in (None, attention.DEFAULT):  # what torch chose by itself
            return r.default
        return same[0] if same else None
    return r.row(path)


# ---- the pilot ----


@dataclass(frozen=True)
class Reference:
    """A figure of the pilot beside what this run found. `comparable` False: shown, never subtracted."""

    what: str
    unit: str
    pilot: float
    observed: Estimate | None
    comparable: bool
    reason: str
    basis: str = ""  # of this run's share; the pilot's are shares of its own peak


def _ridge(run: LoadedRun) -> Estimate | None:
    peak, bytes_s, missing = roofs(run)
    return None if missing else derive.ridge(peak, bytes_s)


def reference(run: LoadedRun) -> list[Reference]:
    """The pilot's figures beside this run's; base units (FLOP/s, FLOP/B, fractions)."""
    spec = spec_of(run)
    pilot = spec.pilot or {}
    if not pilot:
        return []
    target = run.config["project"].get("reference_target")
    profile = run.selection.found_profile
    here = bool(profile and profile.key == target)
    why = "" if here else f"the pilot ran on {target}"
    if spec.derived_from:
        why = "; ".join(filter(None, (why, "this run's workload is a derived one")))
    scopes, peak = {m.scope: m for m in mfu(run)}, derive.compute(run)
    out = []
    if pilot.get("peak_tflops"):
        roof = peak.roof.flop_s if peak and peak.roof else None
        reason = "" if here else f"the pilot ran on {target}"
        out.append(Reference("compute roof", "FLOP/s", pilot["peak_tflops"] * 1e12, roof, here, reason))
    if pilot.get("ridge_flop_per_byte"):
        reason = "" if here else f"the pilot ran on {target}"
        out.append(Reference("ridge", "FLOP/B", pilot["ridge_flop_per_byte"], _ridge(run), here, reason))
    names = {"sum_of_ops": "sum_optimized", EAGER: EAGER, COMPILED: COMPILED}
    for name, scope in names.items():
        if (value := (pilot.get("mfu_pct") or {}).get(name)) is not None:
            basis = "pilot" if here else "measured"  # the pilot's figures are shares of its own peak
            share = scopes[scope].shares.get(basis)
            out.append(Reference(f"MFU, {SCOPES[scope]}", "fraction", value / 100, share, not why, why, basis))
    return out
