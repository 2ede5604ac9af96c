"""Plausibility: which rows of a run cannot be true, and the likely cause of each.

A rate is held against what the device gives at most: the roof or plateau that this run measured, and the rated or probed
peak of its own dtype. A row that helps to define a limit is held against that limit without itself. Above by at most
`guard_note_frac` is a note. More is INVALID on a GPU; on a CPU host, where neighbours and clocks decide a roof, it is
NOISY up to the probed peak and INVALID above that. Only a quotient whose whole interval lies beyond counts as more.
Beside rates: a time that does not grow with the work, a time that is not positive, a "memory" bandwidth of operands that
the caches hold, a pass faster than its parts allow, more memory than there is. What a run does not have is not judged.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from escher_kernels import workload
from escher_kernels.bandwidth import HOST_OPS, OPS
from escher_kernels.records import Record
from escher_kernels.statistics import Estimate
from escher_kernels.workload import ELEMENT_BYTES, Spec, WorkloadError
from validation import derive, memory, roofline
from validation.derive import Basis, LoadedRun, Row

NOTE, NOISY, INVALID = "note", "NOISY", "INVALID"
LEVELS = (NOTE, NOISY, INVALID)  # rising

COMPUTE, BANDWIDTH, GROWTH, TIME, PASS, AMOUNT = (  # `what` of a finding
    "compute rate", "bandwidth", "growth of the time with the work", "time", "time of a pass", "amount of memory",
)  # fmt: skip

ASYNCHRONOUS = "an asynchronous call was timed without waiting for it"
OVERHEAD = "an asynchronous call was timed without waiting for it, or a constant cost of every call hides the work"
CACHES = "the caches held the operands"
SLOWER = "the limit was measured in a slower state (clock, throttle or a neighbour)"
SEARCH = "the search for the roof was stopped before it found a shape this fast"
COUNTED = "work was counted twice, the time was taken without waiting for the device, or the profile is another device's"
COUNTED_CPU = "work was counted twice, or an instruction faster than those probed did it"
TIMER = "the timer cannot resolve a sample this short, or was read before the call had ended"
GRANTED = "memory was granted without being there (over-commit or swap), or bytes were counted twice"
UNKNOWN = "unknown"

# Brief by design: a candidate of the search gets three samples, which end before a power limit bites; warm-up ends where
# the boost does; and an anchor is what tells in which state a limit was measured. All may lie above the roof of minutes
# of work, so they are held against rated and probed peaks alone.
BRIEF = ("search", "anchor", "warmup")
STEADY = ("case", "pair")
READ_WRITE = ("copy", "add", "mul", "triad")
PROBED = {"bf16": ("bfloat16", "float32"), "fp32": ("float32",)}  # instructions that a GEMM of a dtype can be made of
STREAMING = "stream.streaming"  # the C copy whose stores do not read the line that they write
FLAT_WORK, FLAT_TIME, FLAT_ROWS = 4.0, 1.2, 3
LONGEST_LAUNCH_S = 1e-3  # handing a call to a device takes microseconds, on a slow host a tenth of this
PCIE_TRANSFERS = {3: 8e9, 4: 16e9, 5: 32e9}  # a lane and second; 128 of 130 bits are data (PCI Express 3.0 to 5.0)
UNITS = {
    "FLOP/s": ((1e12, "TFLOP/s"),),
    "B/s": ((1e12, "TB/s"), (1e9, "GB/s")),
    "s": ((1, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "B": ((2**30, "GiB"), (2**20, "MiB")),
    "": ((1, ""),),
}  # fmt: skip


@dataclass(frozen=True)
class Implausible:
    """One thing that cannot be, or nearly so. `value` and `limit` in base units; `reason` is one sentence for a reader.

    `excess_frac`: how far beyond the limit, as a fraction of it (of a pass: how much faster than the limit); None where the
    limit is no quantity that the value is a share of.
    """

    family: str
    case: str
    role: str
    what: str
    value: Estimate | float
    unit: str
    limit: float
    limit_name: str
    excess_frac: float | None
    level: str
    cause: str
    reason: str
    iteration: int = 1


@dataclass(frozen=True)
class Ceiling:
    """What a rate cannot exceed, and what exceeding it by more than a note is."""

    basis: Basis
    level: str


@dataclass(frozen=True)
class Excess:
    """A rate above a ceiling: `over` is the one over the other."""

    level: str
    basis: Basis
    over: Estimate


@dataclass(frozen=True)
class Flat:
    """The upper part of a sweep, the most work last, over which the work grew and the time did not."""

    name: str
    rows: tuple[Row, ...]
    work_growth: float
    time_growth: Estimate
    possible: bool  # the largest row's rate is one that a device can have


@dataclass(frozen=True)
class Known:
    """What the rows of a run are held against, derived once."""

    run: LoadedRun
    compute: derive.Compute | None
    bandwidth: derive.Bandwidth | None
    rows: dict[str, list[Row]]
    flats: tuple[Flat, ...]

    @property
    def note_frac(self) -> float:
        return self.run.config.threshold("guard_note_frac", self.run.kind)

    @property
    def measured_level(self) -> str:
        """What lying above a limit that this run measured is."""
        return NOISY if self.run.kind == "cpu" else INVALID

    def of(self, family: str, roles: Sequence[str]) -> list[Row]:
        """Timed rows that are not warm on purpose."""
        return [r for r in self.rows[family] if r.role in roles and r.time_s and r.cache != "warm"]

    def llc_bytes(self, family: str) -> int | None:
        """The last-level caches together, as the family was told; None where it was not."""
        found = self.run.files[family].run.parameters.get("llc_bytes")
        return found if isinstance(found, int) and not isinstance(found, bool) else None


def check(run: LoadedRun) -> list[Implausible]:
    """Everything that cannot be, or nearly so, the gravest first; of the run's repeats what is INVALID, said so."""
    found = _check(run)
    for repeat in run.repeats:
        bad = (x for x in _check(repeat) if x.level == INVALID)
        found += [replace(x, reason=f"iteration {repeat.iteration}: {x.reason}") for x in bad]
    return sorted(found, key=lambda x: (-LEVELS.index(x.level), -(x.excess_frac or 0)))


def _check(run: LoadedRun) -> list[Implausible]:
    rows = {family: derive.rows(run.records(family), run.config, run.kind) for family in run.files}
    c, b = derive.compute(run), derive.bandwidth(run)
    known = Known(run, c, b, rows, tuple(_flats(run, c, b)))
    found = (x for family in run.files for rule in (zero, *RULES.get(family, ())) for x in rule(known, family))
    return [replace(x, iteration=run.iteration) for x in found]


# ---- ceilings ----


def compute_ceilings(known: Known, row: Row) -> list[Ceiling]:
    """Of a row's own dtype: the measured roof, unless the row is brief or free to round its sums; rated or probed peak."""
    c, dtype, out = known.compute, row.params.get("dtype"), []
    if not isinstance(dtype, str):
        return []
    comparable = row.role in STEADY and not (row.family == "compute" and derive.gemm_group(row) in ("roof", "reduced"))
    if c and c.roof and c.roof.flop_s and c.dtype == dtype and comparable:
        roof = c.roof.flop_s
        out.append(Ceiling(Basis("measured", "compute roof", roof.median, "", True, interval=roof), known.measured_level))
    probed = ([p for p in c.probes if p.dtype in PROBED.get(dtype, ())], c.probe_skipped) if c else ()
    return out + [Ceiling(basis, INVALID) for basis in derive.compute_bases(known.run, dtype, *probed)]


def bandwidth_ceilings(known: Known, row: Row) -> list[Ceiling]:
    """The plateaus of the row's kind, unless it is brief; copy's where the caches can hold its operands; rated figures."""
    out, profile = [], known.run.selection.profile
    if row.role in STEADY and (kind := _streams(row)):
        # an ordinary store of a CPU first reads the line that it writes, which no row declares: what mostly reads, or
        # stores past the caches, can have all that the memory really moved
        lines = known.run.kind == "cpu" and (bool(row.flop) or row.case == STREAMING)
        out.append((_fastest(known, kind, row, lines), known.measured_level))
        if row.cache == "cold" and _fits_caches(known, row):
            out.append((_fastest(known, ("copy",), row), INVALID))
    out.append((_rated_bandwidth(known), INVALID))
    if profile and row.params.get("op") in HOST_OPS.values():
        name, link = f"rated link of {profile.name}, PCIe {profile.pcie}", pcie_bytes_s(profile.pcie)
        out.append((Basis("rated", name, link, "", known.run.selection.same_device), INVALID))
    return [Ceiling(basis, level) for basis, level in out if basis]


def _rated_bandwidth(known: Known) -> Basis | None:
    chosen = known.run.selection
    if chosen.profile is None:
        return None
    name = f"rated bandwidth of {chosen.profile.name}"
    return Basis("rated", name, chosen.profile.bandwidth_bytes_s, "", chosen.same_device)


def _streams(row: Row) -> tuple[str, ...]:
    """The operations whose fastest plateau bounds a row: of its own mix of reads and writes."""
    op = row.params.get("op")
    if row.family == "bandwidth":
        if op in OPS:
            return READ_WRITE if op in READ_WRITE else (op,)
        if op in HOST_OPS.values():  # the device's memory is only read, or only written
            return tuple(OPS)
        return READ_WRITE if op == "strided" else ()
    return tuple(OPS) if row.flop else READ_WRITE  # GEMMs and attention mostly read


def _fastest(known: Known, ops: Sequence[str], row: Row | None = None, lines: bool = False) -> Basis | None:
    """The fastest plateau of `ops`, without `row` itself. `lines`: with the reads that a CPU's ordinary stores add."""
    b, found = known.bandwidth, []
    for op in ops if b else ():
        if row and row.family == "bandwidth" and row.params.get("plateau") and row.params.get("op") == op:
            own = [r for r in b.rows if r.params["op"] == op and r.params.get("plateau") and r.case != row.case]
            rate = max((r.bytes_s for r in own if r.bytes_s), key=lambda e: e.median, default=None)
        else:
            rate = next((p.bytes_s for p in b.plateaus if p.op == op), None)
        if rate:
            reads, writes = OPS[op].reads, OPS[op].writes
            found.append(rate.times((reads + 2 * writes) / (reads + writes)) if lines else rate)
    if not found:
        return None
    best = max(found, key=lambda e: e.median)
    name = f"plateau of {ops[0]}" if len(ops) == 1 else f"fastest of {', '.join(ops[:-1])} and {ops[-1]}"
    name += ", counted with the lines that its stores read" if lines else ""
    return Basis("measured", name, best.median, "", True, interval=best)


def _fits_caches(known: Known, row: Row) -> bool:
    """All operand sets of the row lie in the last-level caches together: a call can find its operands there."""
    llc, sets = known.llc_bytes(row.family), row.params.get("operand_sets")
    return bool(llc and isinstance(sets, int) and row.bytes_moved and sets * row.bytes_moved <= llc)


def pcie_bytes_s(text: str | None) -> float | None:
    """Bytes a second and direction of a link that a profile names as "Gen5 x16"; None for anything less plain."""
    found = re.fullmatch(r"Gen(\d) x(\d+)", text or "")
    transfers = PCIE_TRANSFERS.get(int(found[1])) if found else None
    return transfers and transfers * int(found[2]) / 8 * 128 / 130


def excess(rate: Estimate, ceilings: Iterable[Ceiling], note_frac: float) -> Excess | None:
    """How a rate lies above its ceilings: the gravest level, and of that the ceiling which says most: a rated or probed
    one before one that this run measured, and the highest.

    Above is where the whole interval is, or the median by more than a note: two that are equal exceed each other by turns.
    """
    found = []
    for ceiling in ceilings:
        over = ceiling.basis.frac(rate)
        if over and (over.lo > 1 or over.median > 1 + note_frac):
            found.append(Excess(ceiling.level if over.lo > 1 + note_frac else NOTE, ceiling.basis, over))
    return max(found, key=lambda x: (LEVELS.index(x.level), x.basis.name != "measured", x.basis.rate), default=None)


# ---- causes ----


def cause_of(known: Known, row: Row, unit: str, basis: Basis) -> tuple[str, str]:
    """(likely cause, what in the records shows it or ""). A cause is named only where the records can show it."""
    if any(x.case == row.case and x.family == row.family for flat in known.flats for x in flat.rows):
        return ASYNCHRONOUS, "the time does not grow with the work"
    if unit == "B/s" and "NOT_COLD" in row.flags:
        return CACHES, "the row is flagged NOT_COLD"
    if unit == "B/s" and row.cache == "cold" and _fits_caches(known, row):
        sizes = (_say(row.params["operand_sets"] * row.bytes_moved, "B"), _say(known.llc_bytes(row.family), "B"))
        return CACHES, "all operands are {}, the last-level caches {}".format(*sizes)
    if basis.name != "rated" and (seen := _slower_state(known, row.family, unit)):
        return SLOWER, seen
    if basis.name == "measured":
        if unit == "FLOP/s" and str(known.compute.roof.params.get("search_ended", "")).startswith("stopped"):
            return SEARCH, f"it {known.compute.roof.params['search_ended']}"
        return UNKNOWN, ""
    return (COUNTED if basis.name == "rated" else COUNTED_CPU), ""


def _slower_state(known: Known, family: str, unit: str) -> str:
    """What the anchors say of the limit's state against the row's; "" where they were alike."""
    run = known.run
    case, home = ("anchor.gemm", "compute") if unit == "FLOP/s" else ("anchor.copy", "bandwidth")
    shift = roofline.anchor_shift(run, family).get(case, 0.0)
    if shift > run.config.threshold("anchor_moved_frac"):
        return f"{case} ran {_number(shift * 100)} % faster in family {family} than around the limit"
    for name in dict.fromkeys((home, family)):
        moved = next((a for a in derive.anchors(run.records(name), run.config) if a.case == case and a.moved), None)
        if moved:
            return f"{case} moved by {_number(moved.largest_move_frac * 100)} % within family {name}"
    return ""


# ---- sentences ----


def _number(value: float) -> str:
    """Three significant digits, thousands separated."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = 2 - math.floor(math.log10(abs(value)))
    return f"{round(value, places):,.{max(0, min(places, 12))}f}"


def _say(value: float, unit: str) -> str:
    scale, name = next((x for x in UNITS[unit] if abs(value) >= x[0] or not value), UNITS[unit][-1])
    return f"{_number(value / scale)} {name}".rstrip()


def _verdict(level: str, over: Estimate, note_frac: float, labelled: bool = False) -> str:
    if level == INVALID:
        return "impossible"
    if level == NOISY:
        return "one of the two was disturbed"
    if labelled:
        return "a note, as the row says itself that caches may hold its operands"
    if over.median <= 1 + note_frac:
        return f"a note, as it is no more than {note_frac * 100:g} % above"
    return f"a note, as the interval of that ratio begins at {_number(over.lo)}"


def _ending(verdict: str, cause: str, seen: str) -> str:
    return f"{verdict}; likely cause: {cause}{f', as {seen}' if seen else ''}."


# ---- rules: (what is known, family) -> what cannot be ----


def steady_rates(known: Known, family: str) -> Iterator[Implausible]:
    """Cases and pairs against measured and rated limits."""
    return _rates(known, known.of(family, STEADY))


def brief_rates(known: Known, family: str) -> Iterator[Implausible]:
    """Search candidates, warm-up and anchors against rated and probed peaks; see `BRIEF`."""
    return _rates(known, known.of(family, BRIEF))


def _rates(known: Known, rows: Iterable[Row]) -> Iterator[Implausible]:
    for row in rows:
        if row.flop_s:
            yield from _rate(known, row, COMPUTE, row.flop_s, "FLOP/s", compute_ceilings(known, row))
        # GEMMs of family 1 and the anchor's multiply the same matrices again and again: caches may serve their bytes,
        # which nobody reads as a bandwidth. Family 4 rotates its operands.
        if row.bytes_s and (not row.flop or (row.family == "ops" and row.role in STEADY)):
            yield from _rate(known, row, BANDWIDTH, row.bytes_s, "B/s", bandwidth_ceilings(known, row))


def _rate(
    known: Known, row: Row, what: str, rate: Estimate, unit: str, ceilings: list[Ceiling]
) -> Iterator[Implausible]:
    found = excess(rate, ceilings, known.note_frac)
    if found is None:
        return
    cause, seen = cause_of(known, row, unit, found.basis)
    labelled = unit == "B/s" and "NOT_COLD" in row.flags  # no claim of a memory bandwidth, so none that is false
    level = NOTE if labelled else found.level
    verb = "computes" if unit == "FLOP/s" else "moves"
    yield Implausible(
        row.family, row.case, row.role, what, rate, unit, found.basis.rate, found.basis.label,
        found.over.median - 1, level, cause,
        f"{row.case} {verb} {_say(rate.median, unit)}, {_number(found.over.median)} times the {found.basis.label} "
        f"({_say(found.basis.rate, unit)}): "
        + _ending(_verdict(level, found.over, known.note_frac, labelled), cause, seen),
    )  # fmt: skip


def zero(known: Known, family: str) -> Iterator[Implausible]:
    """Blocks of which most samples are no positive time; a single one is only counted. What declares no work, such as an
    empty pair of events, may take none; what is wrong has no time anyway."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for r in known.run.records(family):
        groups.setdefault((r.role, r.case), []).append(r)
    for (role, case), group in groups.items():
        wrong = any(r.error and not r.error.get("ok") for r in group)
        if wrong or group[-1].cache == "warm" or not any(r.flop or r.bytes_moved for r in group):
            continue
        medians = [statistics.median(r.samples_s) for r in group if r.samples_s]
        bad = [m for m in medians if m <= 0]
        if bad:
            yield Implausible(
                family, case, role, TIME, min(bad), "s", 0.0, "no time at all", None, INVALID, TIMER,
                f"{case} took {_say(min(bad), 's')} in the median sample, and no positive time in {len(bad)} of "
                f"{len(medians)} blocks: " + _ending("impossible", TIMER, ""),
            )  # fmt: skip


def flat(known: Known, family: str) -> Iterator[Implausible]:
    """Sweeps whose time does not grow with their work: told of the row with the most work."""
    for found in known.flats:
        first, last = found.rows[0], found.rows[-1]
        if last.family != family:
            continue
        cause = OVERHEAD if found.possible else ASYNCHRONOUS
        yield Implausible(
            family, last.case, last.role, GROWTH, found.time_growth, "", FLAT_TIME, "least growth of the time",
            None, INVALID, cause,
            f"{found.name}: from {first.case} to {last.case} the work grows {_number(found.work_growth)}-fold and the time "
            f"by a factor of {_number(found.time_growth.median)} (to {_say(last.time_s.median, 's')}): "
            + _ending("impossible", cause, ""),
        )  # fmt: skip


def passes(known: Known, family: str) -> Iterator[Implausible]:
    """A pass of the model against its FLOP over the compute roof, and its compulsory bytes over the fastest plateau."""
    spec, llc = _spec(known.run), known.llc_bytes(family)
    for row in known.of(family, STEADY):
        found = []
        if row.flop_s and (above := excess(row.flop_s, compute_ceilings(known, row), known.note_frac)):
            found.append((above, row.flop, "FLOP/s", "its FLOP", "take"))
        moved = max(0, compulsory_bytes(spec) - llc) if spec and llc is not None else 0
        if moved:
            fastest = _fastest(known, tuple(OPS), lines=known.run.kind == "cpu")
            bases = ((fastest, known.measured_level), (_rated_bandwidth(known), INVALID))
            ceilings = [Ceiling(basis, level) for basis, level in bases if basis]
            if above := excess(row.time_s.over(moved), ceilings, known.note_frac):
                found.append((above, moved, "B/s", "what it must read", "takes"))
        if not found:
            continue
        above, work, unit, of, take = max(found, key=lambda x: (LEVELS.index(x[0].level), x[1] / x[0].basis.rate))
        cause, seen = cause_of(known, row, unit, above.basis)
        limit_s = work / above.basis.rate
        yield Implausible(
            family, row.case, row.role, PASS, row.time_s, "s", limit_s, f"{of} over the {above.basis.label}",
            above.over.median - 1, above.level, cause,
            f"{row.case} takes {_say(row.time_s.median, 's')} a pass, and {of} {take} {_say(limit_s, 's')} at the "
            f"{above.basis.label} ({_say(above.basis.rate, unit)}): "
            + _ending(_verdict(above.level, above.over, known.note_frac), cause, seen),
        )  # fmt: skip


def _spec(run: LoadedRun) -> Spec | None:
    try:
        return roofline.spec_of(run)
    except WorkloadError:
        return None  # the families that need the workload say so themselves


def compulsory_bytes(spec: Spec) -> int:
    """What a pass reads once: weights and caches. The weights of the text's keys and values work once a prompt."""
    once_a_prompt = 2 * spec.hidden * spec.hidden * spec.depth * ELEMENT_BYTES
    return workload.weight_bytes(spec) - once_a_prompt + workload.cache_bytes(spec)


def amounts(known: Known, family: str) -> Iterator[Implausible]:
    """Amounts of memory against all that the device, the host or its control group has."""
    found = memory.capacity(known.run)
    total, roles = found.most_bytes, {r.case: r.role for r in known.run.records(family)}
    for amount in found.amounts.values() if total else ():
        if amount.bytes is None or amount.case == "device.total" or amount.bytes <= total:
            continue
        over = Estimate(*[amount.bytes / total] * 3, 1.0, 1, 1)
        level = INVALID if over.median > 1 + known.note_frac else NOTE
        of = found.amounts["device.total"].params.get("of", "device")
        name = f"all memory of the {of}"
        yield Implausible(
            family, amount.case, roles[amount.case], AMOUNT, float(amount.bytes), "B", float(total), name,
            over.median - 1, level, GRANTED,
            f"{amount.case} is {_say(amount.bytes, 'B')}, {_number(over.median)} times {name} ({_say(total, 'B')}): "
            + _ending(_verdict(level, over, known.note_frac), GRANTED, ""),
        )  # fmt: skip


# ---- sweeps ----


def _flats(run: LoadedRun, c: derive.Compute | None, b: derive.Bandwidth | None) -> Iterator[Flat]:
    """Sweeps of one kind of work over sizes: the squares of family 1, each operation's cold sizes of family 2."""
    sweeps: dict[str, list[Row]] = {}
    for row in c.of("square") if c else ():
        sweeps.setdefault(f"squares of {row.params.get('dtype')}", []).append(row)
    for row in (*b.rows, *b.host) if b else ():
        if row.role == "case":
            name = ", ".join(filter(None, (row.params["op"], row.params.get("memory"))))
            sweeps.setdefault(f"sizes of {name}", []).append(row)
    for name, rows in sweeps.items():
        if found := _flat(name, [r for r in rows if r.time_s], run):
            yield found


def _flat(name: str, rows: Sequence[Row], run: LoadedRun) -> Flat | None:
    """The sweep, where its time is flat; `rows` in any order.

    The largest is compared with the FASTEST of the others, so one collapsed size among them does not look like a flat
    sweep. A device that waits for the host to hand calls over takes one time for all its small sizes, healthily: that
    time is under `LONGEST_LAUNCH_S`, and no rate is one that no device has.
    """
    rows = sorted((r for r in rows if _work(r)), key=_work)
    start = len(rows) // 2
    while start > 0 and (_work(rows[-1]) < FLAT_WORK * _work(rows[start]) or len(rows) - start < FLAT_ROWS):
        start -= 1
    rows = rows[start:]
    if len(rows) < FLAT_ROWS or _work(rows[-1]) < FLAT_WORK * _work(rows[0]):
        return None
    last = rows[-1]
    fastest = min((r.time_s for r in rows[:-1]), key=lambda t: t.median)
    growth = derive.quotient(last.time_s, fastest)
    highest = _highest_rate(run, last)
    possible = highest is None or _work(last) / last.time_s.hi <= highest
    if growth.hi >= FLAT_TIME or (possible and fastest.lo < LONGEST_LAUNCH_S):
        return None
    return Flat(name, tuple(rows), _work(last) / _work(rows[0]), growth, possible)


def _work(row: Row) -> int:
    return row.flop or row.bytes_moved or 0


def _highest_rate(run: LoadedRun, row: Row) -> float | None:
    """What a device can do at most, FLOP/s or B/s: this one's rated figure, else the highest of all that are known."""
    own = run.selection.profile if run.selection.same_device else None
    dtype = row.params.get("dtype")
    known = [run.config.profile(t["key"]) for t in run.config["targets"]]
    rates = [
        [(p.dense_peak_flop_s.get(dtype) if row.flop else p.bandwidth_bytes_s) for p in profiles]
        for profiles in ([own] if own else [], known)
    ]
    return next((max(filter(None, group)) for group in rates if any(group)), None)


# The guard of a family: a new family adds its line here. `zero` judges every family.
RULES: dict[str, tuple[Callable[[Known, str], Iterator[Implausible]], ...]] = {
    "compute": (steady_rates, brief_rates, flat),
    "bandwidth": (steady_rates, brief_rates, flat),
    "capacity": (amounts,),
    "ops": (steady_rates, brief_rates),
    "e2e": (passes, brief_rates),
}
