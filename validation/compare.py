"""Run against run: what may be compared, what changed, and by how much two runs of one machine differ anyway.

The unit is a fresh process: a run, or inside a run one `iteration` of its records. Blocks of one process share its
memory layout, its compiled code and its clocks, so their interval says nothing of the next process (T. Kalibera and
R. Jones, "Rigorous benchmarking in reasonable time", ISMM 2013). With enough processes a side (regression_runs_count)
a row is judged by the 95 % interval of the difference of two means of logs, one number a process: its median. Logs,
because disturbances multiply, and because swapping the sides then inverts the ratio exactly. The sides may vary by
different amounts: B. L. Welch, "The generalization of Student's problem when several different population variances
are involved", Biometrika 34 (1947) 28-35. Fewer processes: the quotient of the block intervals, INDICATIVE only.

Three processes can agree by chance, and their sample variance then promises too much. A side's variance is therefore
never taken below what its blocks alone imply for a median; that only widens the interval. A call needs the WHOLE
interval beyond the limit and beyond the noise that each side shows against itself (A/A: odd against even blocks). Rows
are judged one by one, without a correction for their number: of rows whose true change is exactly the limit one in
forty is called, of unchanged rows only those that vary so much between processes that chance alone carries them past it.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from escher_kernels.statistics import COVERAGE, Estimate, estimate, percentile
from escher_kernels.targets import is_number, is_whole
from escher_kernels.workload import DERIVABLE
from validation import derive, memory, roofline
from validation.config import Config
from validation.derive import LoadedRun, Row

FASTER, SAME, SLOWER, AMBIGUOUS = "faster", "same", "slower", "ambiguous"
BASE, RUN = "baseline", "run"
JUDGED = ("compute_roof", "bandwidth_roof", "mfu_compiled")  # the headlines whose fall is a regression
AA_BLOCKS = 4  # two odd and two even ones
FLOOR_PERCENTILE = 90
SUMMARY_SCHEMA = 1
Key = tuple[str, str]  # family, case


class CompareError(ValueError):
    """Runs that must not be compared, or a summary that cannot be read. One line."""


# ---- what a process measured ----


@dataclass(frozen=True)
class Headline:
    """One number of a process. `value` None: `reason` says why. Capacity has no blocks: its value has coverage 0.

    `blocks`: one time a block, in order, proportional to the number or to its inverse; `basis_blocks` those of what it
    is divided by. `work`: what was computed, where only the same work may be compared. `at_least`: more may be there.
    """

    key: str
    label: str
    family: str
    unit: str
    higher_is_better: bool
    value: Estimate | None = None
    reason: str = ""
    detail: str = ""  # the shape, or what ran
    at_least: bool = False
    work: tuple = ()
    blocks: tuple[float, ...] = field(default=(), repr=False)
    basis_blocks: tuple[float, ...] = field(default=(), repr=False)


HEADLINES = {  # key: label, family, unit, higher is better
    "compute_roof": ("compute roof", "compute", "FLOP/s", True),
    "bandwidth_roof": ("bandwidth roof", "bandwidth", "B/s", True),
    "best_square": ("best square GEMM", "compute", "FLOP/s", True),
    "add_plateau": ("plateau of add", "bandwidth", "B/s", True),
    "mfu_eager": ("MFU of the measured roof, eager", "e2e", "fraction", True),
    "mfu_compiled": ("MFU of the measured roof, compiled", "e2e", "fraction", True),
    "pass_eager": ("time of a pass, eager", "e2e", "s", False),
    "pass_compiled": ("time of a pass, compiled", "e2e", "s", False),
    "capacity": ("memory in blocks of 1 GiB", "capacity", "B", True),
}


def processes(run: LoadedRun) -> list[LoadedRun]:
    """The fresh processes inside a run, by number: its iterations that left records."""
    return [p for p in run.iterations if p.files] or [run]


def case_rows(run: LoadedRun) -> dict[Key, Row]:
    """Every timed row of role "case" of every family of one process, by (family, case)."""
    return {key: row for key, row in _cases(run).items() if row.time_s}


def _cases(run: LoadedRun) -> dict[Key, Row]:
    return {
        (family, row.case): row
        for family in run.files
        for row in derive.rows(run.records(family), run.config, run.kind)
        if row.role == "case"
    }


def headlines(run: LoadedRun) -> dict[str, Headline]:
    """The numbers that a process stands for, by key; those that were not measured are there with the reason.

    The workload is read only where family e2e was measured: WorkloadError where it cannot be.
    """
    return _headlines(run, _cases(run))


def _headlines(run: LoadedRun, cases: dict[Key, Row]) -> dict[str, Headline]:
    out = {key: Headline(key, *about, reason=_absent(run, about[1])) for key, about in HEADLINES.items()}

    def put(key: str, value: Estimate | None, reason: str, **more: Any) -> None:
        out[key] = replace(out[key], value=value, reason="" if value else reason, **(more if value else {}))

    if c := derive.compute(run):
        for key, row in (("compute_roof", c.roof), ("best_square", c.best_square)):
            why = _untimed(row) if row or key == "compute_roof" else "no square GEMM was timed"
            put(key, row and row.flop_s, why, detail=_shape(row), blocks=_block_times(row))
    if b := derive.bandwidth(run):
        for key, op in (("bandwidth_roof", "copy"), ("add_plateau", "add")):
            plateau = next((p for p in b.plateaus if p.op == op), None)
            lost = (f"{r.case}: {_untimed(r)}" for r in _plateau_rows(b, op) if not r.bytes_s)
            put(key, plateau and plateau.bytes_s, next(lost, f"no plateau of {op}"), blocks=_plateau_times(b, op))
    if "e2e" in run.files:
        scopes = {m.scope: m for m in roofline.mfu(run)}
        for mode in (roofline.EAGER, roofline.COMPILED):
            row, scope = cases.get(("e2e", mode)), scopes[mode]
            blocks, detail = _block_times(row), (row.backend or "") if row else ""
            put(f"pass_{mode}", row and row.time_s, _untimed(row), blocks=blocks, detail=detail,
                work=_work(row))  # fmt: skip
            put(f"mfu_{mode}", scope.shares["measured"], scope.reason or "no compute roof in this run", blocks=blocks,
                basis_blocks=out["compute_roof"].blocks, detail=detail)  # fmt: skip
    if "capacity" in run.files:
        total = memory.capacity(run).total
        value = estimate([[float(total.bytes)]]) if total and total.bytes > 0 else None
        put("capacity", value, "no block was given", at_least=bool(total and total.at_least))
    return out


def _shape(row: Row | None) -> str:
    m, n, k, layout = ((row.params if row else {}).get(x) for x in ("m", "n", "k", "layout"))
    return f"{m}x{n}x{k} {layout or ''}".strip() if m else ""


def _block_times(row: Row | None) -> tuple[float, ...]:
    return tuple(statistics.median(block) for block in row.blocks) if row else ()


def _plateau_rows(found: derive.Bandwidth, op: str) -> list[Row]:
    return [r for r in found.rows if r.params["op"] == op and r.params.get("plateau")]


def _plateau_times(found: derive.Bandwidth, op: str) -> tuple[float, ...]:
    """Seconds a byte of a plateau, per block, as `derive` makes its estimate."""
    group = [r for r in _plateau_rows(found, op) if r.bytes_s]
    times = [dict(zip(r.block_numbers, _block_times(r), strict=True)) for r in group]
    common = [n for n in (times[0] if times else ()) if all(n in t for t in times)]
    return tuple(1 / statistics.median(r.bytes_moved / t[n] for r, t in zip(group, times, strict=True)) for n in common)


def _work(row: Row | None) -> tuple:
    return (row.flop, row.bytes_moved) if row else ()


def _absent(run: LoadedRun, family: str) -> str:
    how = run.status.get(family) or {}
    ended = how.get("status", "ok")
    said = f" ({': '.join(filter(None, (ended, how.get('message'))))})" if ended != "ok" else ""
    return f"family {family} was not measured{said}"


def _untimed(row: Row | None) -> str:
    if row is None:
        return "no such row"
    return "wrong result" if row.wrong else f"skipped: {row.skipped}" if row.skipped else "no positive sample"


def _of_case(run: LoadedRun, cases: dict[Key, Row], key: Key) -> Headline:
    """A row of role case as the same kind of number as the headlines."""
    family, case = key
    made = Headline("/".join(key), case, family, "s", False)
    row = cases.get(key)
    if row is None or not row.time_s:
        return replace(made, reason=_untimed(row) if row or family in run.files else _absent(run, family))
    return replace(made, value=row.time_s, detail=row.backend or "", work=_work(row), blocks=_block_times(row))


# ---- what may be compared ----

_GEOMETRY = """name hidden heads head_size ffn depth time_frequency time_tokens query_tokens window_tokens text_tokens batch
chunks cache""".split()
_WORDS = {"title", "unit", "note", "derived_from", "derived_why", "full", "pilot"}  # of a spec: no work follows from them


def unlike(a: LoadedRun, b: LoadedRun) -> list[str]:
    """Why two runs must not be compared, one line each that names both values; empty where they may be."""
    left, right = identity(a), identity(b)
    pairs = [(what, left.get(what), right.get(what)) for what in dict.fromkeys([*left, *right])]
    known = [("power cap in W", _power_cap(a), _power_cap(b))]  # the next ones only where both runs say them
    for what, name in (("compute dtype", "dtype"), ("threads", "threads")):
        known += [(what, *(r.files[f].run.parameters.get(name) for r in (a, b))) for f in a.files if f in b.files]
    pairs += [(what, x, y) for what, x, y in known if None not in (x, y)]
    return list(dict.fromkeys(f"{what}: {_shown(x)} against {_shown(y)}" for what, x, y in pairs if x != y))


def _power_cap(run: LoadedRun) -> Any:
    return run.info.get("power_cap_w", ((run.env or {}).get("device") or {}).get("power_cap_w"))


def identity(run: LoadedRun) -> dict[str, Any]:
    """What two runs must have in common."""
    found, info = run.found, run.info
    spec = info["workload"]
    if not isinstance(spec, dict):
        raise CompareError(f"{info['run_id']}: run.json: workload is no object; measure again")
    fields = [*_GEOMETRY, *(k for k in spec if k not in _GEOMETRY and k not in _WORDS)]
    whole = {**spec, **(spec.get("full") or {})}
    return {
        "device kind": found.kind, "device": found.raw_name, "device architecture": found.arch,
        "compute units of the device": found.compute_units, "devices": found.count, "slice": found.slice,
        "target profile": run.selection.profile and run.selection.profile.key,
        "partition": info.get("partition"), "NPS mode": info.get("nps"), "world": info.get("world"),
        **{f"workload {k}": spec.get(k) for k in fields},
        **{f"whole workload {k}": whole.get(k) for k in DERIVABLE},
        "method": info["method"], "schema": info.get("schema"),
        "source": "synthetic" if run.synthetic else "measured",
    }  # fmt: skip


def _shown(value: Any) -> str:
    return "not given" if value is None else str(value)


@dataclass(frozen=True)
class Difference:
    """A fact of the environment that differs. None: not known there."""

    what: str
    base: str | None
    run: str | None


_VOLATILE = re.compile(  # from minute to minute (printed_hz: on many kernels), or what follows from other facts
    r"(^|\.)(\w*free_bytes|available_bytes|usable_bytes|load_average|printed_hz|\w+_utc|why|checks|nominal)(\.|$)"
)


def environment_differences(a: LoadedRun, b: LoadedRun) -> list[Difference]:
    """Everything of env.json, of the software and git state, and of the settings that differs, by dotted name."""
    return _differences([a], [b])


def _differences(base: Sequence[LoadedRun], runs: Sequence[LoadedRun]) -> list[Difference]:
    left, right = _facts(base), _facts(runs)
    pairs = ((name, left.get(name), right.get(name)) for name in dict.fromkeys([*left, *right]))
    return [Difference(name, x, y) for name, x, y in pairs if x != y]


def _facts(side: Sequence[LoadedRun]) -> dict[str, str]:
    """Dotted name -> text, each value once where runs or families of a side differ among themselves."""
    found: dict[str, dict[str, None]] = {}
    for run in side:
        trees = [{"device": run.found.to_json()}, run.env or {}, {k: run.info.get(k) for k in ("git", "settings")}]
        trees += [{"software": f.run.software, "git": f.run.git} for f in run.files.values()]
        for name, text in (item for tree in trees for item in _flat("", tree)):
            if text is not None and not _VOLATILE.search(name):
                found.setdefault(name, {})[text] = None
    return {name: " / ".join(texts) for name, texts in found.items()}


def _flat(name: str, value: Any) -> Iterator[tuple[str, str | None]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, (list, tuple)):
        yield name, _list_text(value)
    else:
        yield name, value if value is None or isinstance(value, str) else json.dumps(value)


def _list_text(items: Sequence[Any]) -> str:
    """Order does not count; whole numbers as ranges, objects grouped, the CPUs that share a cache left out."""
    if items and all(type(i) is int for i in items):
        ordered, spans = sorted(set(items)), []
        for i in ordered:
            if spans and i == spans[-1][1] + 1:
                spans[-1][1] = i
            else:
                spans.append([i, i])
        return ",".join(f"{low}-{high}" if high > low else str(low) for low, high in spans)
    if items and all(isinstance(i, dict) for i in items):
        texts = (", ".join(f"{k} {v}" for k, v in i.items() if k != "shared_cpu_list") for i in items)
        return "; ".join(f"{count} x {text}" for text, count in sorted(Counter(texts).items()))
    return ", ".join(sorted(str(i) for i in items)) or "none"


# ---- A/A: a process against itself ----


@dataclass(frozen=True)
class NoiseFloor:
    """How far odd and even blocks of a process lie apart: abs(log ratio) of their medians, 0.08 being about 8 %.

    `rows` and `headlines` with at least four blocks; `families` the 90th percentile of their rows, `run` of all rows.
    """

    rows: dict[Key, float]
    headlines: dict[str, float]
    families: dict[str, float]
    run: float | None

    def of(self, key: Key | str, family: str) -> float | None:
        """The larger of its own floor and its family's (of a family without one: the run's); None: none is known."""
        own = self.headlines.get(key) if isinstance(key, str) else self.rows.get(key)
        known = [x for x in (own, self.families.get(family, self.run)) if x is not None]
        return max(known, default=None)


def noise_floor(run: LoadedRun) -> NoiseFloor:
    """The noise of one process (see `processes`); a difference below it is never called."""
    cases = _cases(run)
    return _noise_floor(cases, _headlines(run, cases))


def _noise_floor(cases: dict[Key, Row], numbers: dict[str, Headline]) -> NoiseFloor:
    rows = {key: own for key, row in cases.items() if row.time_s and (own := odd_even(_block_times(row))) is not None}
    whole = {}
    for key, number in numbers.items():
        parts = [odd_even(blocks) for blocks in (number.blocks, number.basis_blocks) if blocks]
        if number.value and parts and None not in parts:
            whole[key] = max(parts)
    families = {
        family: percentile([x for (of, _), x in rows.items() if of == family], FLOOR_PERCENTILE)
        for family in dict.fromkeys(family for family, _ in rows)
    }
    return NoiseFloor(rows, whole, families, percentile(list(rows.values()), FLOOR_PERCENTILE) if rows else None)


def odd_even(blocks: Sequence[float]) -> float | None:
    """abs(log ratio) of the medians of every second block; None for fewer than four blocks."""
    if len(blocks) < AA_BLOCKS:
        return None
    return abs(math.log(statistics.median(blocks[::2]) / statistics.median(blocks[1::2])))


# ---- the statistics ----


def median_variance(blocks: Sequence[float]) -> float | None:
    """Variance of the log of a median of blocks, from the spread of the blocks; None for fewer than two.

    s^2 (pi/2) / (n + pi/2 - 1): right for one normal observation and for many, between them 3 % low to 25 % high.
    """
    if len(blocks) < 2:
        return None
    return _variance([math.log(b) for b in blocks]) * (math.pi / 2) / (len(blocks) + math.pi / 2 - 1)


def _variance(values: Sequence[float]) -> float:
    """The sample variance; the standard library's sums exact fractions, which takes most of a comparison's time."""
    middle = statistics.fmean(values)
    return math.fsum((v - middle) ** 2 for v in values) / (len(values) - 1)


def _own_variance(number: Headline) -> float | None:
    """Of the log of one process's number: what its own blocks imply."""
    parts = [median_variance(blocks) for blocks in (number.blocks, number.basis_blocks) if blocks]
    return sum(parts) if parts and None not in parts else None


def welch(base: Sequence[float], run: Sequence[float], base_least: float = 0.0, run_least: float = 0.0) -> Estimate:
    """Mean of `run` less mean of `base` with Welch's 95 % interval; two numbers a side or more.

    `base_least`, `run_least`: a variance that the sample variance of that side is not believed to be below.
    """
    sides = ((base, base_least), (run, run_least))
    parts = [(max(_variance(x), least) / len(x), len(x) - 1) for x, least in sides]
    total = sum(v for v, _ in parts)
    half = 0.0
    if total > 0:
        half = _t_quantile(total**2 / sum(v**2 / freedom for v, freedom in parts)) * math.sqrt(total)
    middle = statistics.fmean(run) - statistics.fmean(base)
    return Estimate(middle, middle - half, middle + half, COVERAGE, len(base) + len(run), len(base) + len(run))


def _t_quantile(freedom: float) -> float:
    from scipy import stats  # loading it takes most of a second

    return float(stats.t.ppf((1 + COVERAGE) / 2, freedom))


def pooled(values: Sequence[Estimate], needed: int, least: float = 0.0) -> Estimate:
    """One side of a row: the geometric mean of its processes.

    The interval of one process is that of its blocks; of fewer than `needed` it spans theirs; else it is Student's, of
    the mean of the logs, and `blocks` counts processes. `least`: as for `welch`.
    """
    if len(values) == 1:
        return values[0]
    logs = [math.log(v.median) for v in values]
    middle, samples = math.exp(statistics.fmean(logs)), sum(v.samples for v in values)
    if len(values) < needed:
        return Estimate(middle, min(v.lo for v in values), max(v.hi for v in values), min(v.coverage for v in values),
                        sum(v.blocks for v in values), samples)  # fmt: skip
    variance = max(_variance(logs), least) / len(logs)
    half = _t_quantile(len(logs) - 1) * math.sqrt(variance) if variance else 0.0
    return Estimate(middle, middle * math.exp(-half), middle * math.exp(half), COVERAGE, len(values), samples)


def judge(lo: float, hi: float, bound: float) -> str:
    """An interval of a change, above 0 = better, against +-`bound`: the limit or the noise, whichever is larger."""
    if lo > bound:
        return FASTER
    if hi < -bound:
        return SLOWER
    return SAME if -bound <= lo and hi <= bound else AMBIGUOUS


# ---- run against run ----


@dataclass(frozen=True)
class Compared:
    """One headline or case on both sides. `ratio`: run over base, turned so that above 1 is better.

    `difference`: run less base, of an MFU alone; its `limit` is one of percentage points (0.02: 2), every other one a
    share of the base. `noise_floor`: see `NoiseFloor`. `verdict` None: `reason` says why, unless the sides are only shown
    side by side. `indicative`: fewer processes than a verdict needs. `note`: what else a reader must know.
    """

    key: str
    kind: str  # "headline" or "case"
    label: str
    family: str
    unit: str
    higher_is_better: bool
    base: Estimate | None
    run: Estimate | None
    ratio: Estimate | None
    difference: Estimate | None
    verdict: str | None
    indicative: bool
    noise_floor: float | None
    limit: float
    base_count: int  # processes with a value
    run_count: int
    reason: str = ""
    note: str = ""


@dataclass(frozen=True)
class OpBound:
    """Which roof bounds an operation on each side: compute, memory, near; None where its processes do not all say so
    with the whole interval of their ridge."""

    op: str
    intensity: float  # FLOP/B
    base: str | None
    run: str | None
    base_ridge: Estimate
    run_ridge: Estimate
    indicative: bool


@dataclass(frozen=True)
class ProcessId:
    run_id: str
    iteration: int
    created_utc: str


@dataclass(frozen=True)
class Comparison:
    """`missing`: a line for each family that one side alone has. `across`: side by side only, no verdicts, no bounds."""

    base: tuple[ProcessId, ...]
    run: tuple[ProcessId, ...]
    across: bool
    unlike: tuple[str, ...]
    environment: tuple[Difference, ...]
    headlines: tuple[Compared, ...]
    rows: tuple[Compared, ...]
    missing: tuple[str, ...]
    bounds: tuple[OpBound, ...]

    def headline(self, key: str) -> Compared | None:
        return next((h for h in self.headlines if h.key == key), None)

    def called(self, verdict: str) -> list[Compared]:
        """Headlines and rows with a verdict."""
        return [x for x in (*self.headlines, *self.rows) if x.verdict == verdict]

    @property
    def one_sided(self) -> list[Compared]:
        """Headlines and rows that only one side has a value of."""
        return [x for x in (*self.headlines, *self.rows) if not (x.base_count and x.run_count)]


@dataclass(frozen=True)
class _Process:
    run: LoadedRun
    cases: dict[Key, Row]
    numbers: dict[str, Headline]
    floor: NoiseFloor


@dataclass(frozen=True)
class Side:
    """One number on one side: of every process, of those that have a value, and what noise it must exceed there.

    `floor`: the median of the processes' floors; their largest would grow with every run that is added. `least`: the
    variance of a process's log that its blocks alone imply.
    """

    name: str
    every: list[Headline]
    good: list[Headline]
    floor: float | None
    least: float

    @property
    def medians(self) -> list[float]:
        return [n.value.median for n in self.good]

    def pooled(self, needed: int) -> Estimate | None:
        """None without a value, and where the processes did not do the same work."""
        if len({n.work for n in self.good}) != 1:
            return None
        return pooled([n.value for n in self.good], needed, self.least)


def compare(base: Sequence[LoadedRun], runs: Sequence[LoadedRun], across: bool = False) -> Comparison:
    """Every headline and case of `runs` against `base`; see the module's docstring for what a verdict needs.

    CompareError, in one line, where the runs are unlike; with `across` they stand side by side without a verdict. The
    thresholds are those of the first of `runs`.
    """
    found = _unlike((BASE, base), (RUN, runs), mend=None if across else "--across shows them side by side")
    config = runs[0].config
    sides = {name: [_process(p) for r in side for p in processes(r)] for name, side in ((BASE, base), (RUN, runs))}
    everyone = [p for side in sides.values() for p in side]
    made, rows = [], []

    def add(out: list[Compared], kind: str, key: Key | str, number: Callable[[_Process], Headline]) -> None:
        both = []
        for name, side in sides.items():
            numbers = [number(p) for p in side]
            both.append(side_of(name, numbers, [p.floor.of(key, n.family) for p, n in zip(side, numbers, strict=True)]))
        if any(s.good for s in both):  # what was timed nowhere has lost nothing
            out.append(compared(kind, *both, config, across))

    for key in HEADLINES:
        add(made, "headline", key, lambda p, key=key: p.numbers[key])
    for key in dict.fromkeys(k for p in everyone for k in p.cases):
        add(rows, "case", key, lambda p, key=key: _of_case(p.run, p.cases, key))
    return Comparison(
        base=_ids(base), run=_ids(runs), across=across, unlike=tuple(found),
        environment=tuple(_differences(base, runs)), headlines=tuple(made), rows=tuple(rows),
        missing=tuple(_missing_families(sides)), bounds=() if across else tuple(_bounds(sides, config)),
    )  # fmt: skip


def _unlike(*sides: tuple[str, Sequence[LoadedRun]], mend: str | None) -> list[str]:
    """What is unlike the first run. CompareError, ending in `mend`, where there is any (mend None: never), and where a
    side is empty or has a run twice."""
    for name, side in sides:
        if not side:
            raise CompareError(f"no {name} is given; give at least one run directory")
        seen = Counter((r.info["run_id"], ((r.env or {}).get("host") or {}).get("name")) for r in side)
        if twice := next((run_id for (run_id, _), count in seen.items() if count > 1), None):
            raise CompareError(f"{name}: run {twice} is given twice; a run counts once")
    everyone = [r for _, side in sides for r in side]
    out: dict[str, None] = {}
    for other in everyone[1:]:
        lines = unlike(everyone[0], other)
        if lines and mend is not None:
            names = " and ".join(r.info["run_id"] for r in (everyone[0], other))
            raise CompareError("; ".join((f"{names} must not be compared: {lines[0]}", *lines[1:], mend)))
        out.update(dict.fromkeys(lines))
    return list(out)


def _process(run: LoadedRun) -> _Process:
    cases = _cases(run)
    numbers = _headlines(run, cases)
    return _Process(run, cases, numbers, _noise_floor(cases, numbers))


def _ids(side: Iterable[LoadedRun]) -> tuple[ProcessId, ...]:
    return tuple(ProcessId(r.info["run_id"], p.iteration, r.info["created_utc"]) for r in side for p in processes(r))


def side_of(name: str, numbers: Sequence[Headline], floors: Sequence[float | None]) -> Side:
    """One number of every process of a side, with the noise floor of each."""
    good = [n for n in numbers if n.value]
    known = [f for n, f in zip(numbers, floors, strict=True) if n.value and n.blocks and f is not None]
    least = [v for n in good if (v := _own_variance(n)) is not None]
    return Side(name, list(numbers), good, statistics.median(known) if known else None,
                statistics.fmean(least) if least else 0.0)  # fmt: skip


def compared(kind: str, base: Side, run: Side, config: Config, across: bool = False) -> Compared:
    """One number of both sides; with `across` without a verdict."""
    needed, sides = _needed(config), (base, run)
    about, points = base.every[0], base.every[0].unit == "fraction"
    limit = config.threshold("regression_mfu_pp" if points else "regression_roof_pct") / 100
    counts = [len(s.good) for s in sides]
    few = min(counts) < needed
    own = [s.pooled(needed) for s in sides]
    reason, ratio, change, verdict = _no_ratio(base, run), None, None, None
    floors = [s.floor for s in sides if s.floor is not None]
    floor = max(floors, default=None)
    if not reason:
        ratio = _ratio(base, run, *own, few)
        change = _difference(base, run, *own, few) if points else None
        reason = "" if across else _no_verdict(ratio, base, run)
        if not (reason or across):
            verdict = _verdict(ratio, change, limit, floor or 0.0, max(e.median for e in own))
    return Compared(
        key=about.key, kind=kind, label=about.label, family=about.family, unit=about.unit,
        higher_is_better=about.higher_is_better, base=own[0], run=own[1], ratio=ratio, difference=change, verdict=verdict,
        indicative=few, noise_floor=floor, limit=limit, base_count=counts[0], run_count=counts[1], reason=reason,
        note=_note(base, run),
    )  # fmt: skip


def _needed(config: Config) -> int:
    """Processes a side; two where fewer are configured, since one has no variance."""
    return max(2, int(config.threshold("regression_runs_count")))


def _verdict(ratio: Estimate, change: Estimate | None, limit: float, floor: float, larger: float) -> str:
    """`larger`: the larger of the two values, to which the noise of a difference is scaled."""
    if change:
        return judge(change.lo, change.hi, max(limit, math.expm1(floor) * larger))
    bound = -math.log1p(-limit) if limit < 1 else math.inf  # as far up as down
    return judge(math.log(ratio.lo), math.log(ratio.hi), max(bound, floor))


def _no_ratio(base: Side, run: Side) -> str:
    """Why the sides have no ratio, or ""."""
    lost = [f"{s.name}: {'; '.join(dict.fromkeys(n.reason for n in s.every))}" for s in (base, run) if not s.good]
    if lost:
        return "; ".join(lost)
    works = dict.fromkeys(n.work for s in (base, run) for n in s.good)
    if len(works) > 1:
        texts = (", ".join(f"{x} {u}" for x, u in zip(w, ("FLOP", "B"), strict=False) if x is not None) for w in works)
        return f"the work differs: {' against '.join(texts)}"
    return ""


def _no_verdict(ratio: Estimate, base: Side, run: Side) -> str:
    """Why a ratio is not judged, or ""."""
    both = (*base.good, *run.good)
    if any(n.at_least for n in both):
        return "a lower bound is not judged"
    if not ratio.coverage:
        return "one value a process has no interval, and there are too few processes"
    if any(n.blocks for n in both) and None in (base.floor, run.floor):
        return f"noise unknown: no row has {AA_BLOCKS} blocks"
    return ""


def _note(base: Side, run: Side) -> str:
    """What was lost in some processes of a side, and a number that is of something else than on the other side."""
    out = []
    for side in (base, run):
        lost = Counter(n.reason for n in side.every if not n.value and n.reason.startswith(("wrong", "skipped")))
        if any(n.at_least for n in side.good):
            out.append(f"{side.name}: at least; more may be there")
        if side.good:
            out += [f"{side.name}: {why} in {count} of {len(side.every)} processes" for why, count in lost.items()]
    details = [", ".join(sorted({n.detail for n in s.good if n.detail})) for s in (base, run)]
    if all(details) and details[0] != details[1]:
        out.append(f"{details[0]} against {details[1]}")
    return "; ".join(out)


def _ratio(base: Side, run: Side, b: Estimate, r: Estimate, few: bool) -> Estimate:
    """Above 1 is better, whatever the number."""
    if not base.every[0].higher_is_better:
        base, run, b, r = run, base, r, b
    if few:
        return derive.quotient(r, b)
    found = welch(*([math.log(m) for m in s.medians] for s in (base, run)), base.least, run.least)
    return replace(found, **{end: math.exp(getattr(found, end)) for end in ("median", "lo", "hi")})


def _difference(base: Side, run: Side, b: Estimate, r: Estimate, few: bool) -> Estimate:
    if few:
        return Estimate(r.median - b.median, r.lo - b.hi, r.hi - b.lo, r.coverage * b.coverage, min(r.blocks, b.blocks),
                        r.samples + b.samples)  # fmt: skip
    return welch(base.medians, run.medians, base.least * b.median**2, run.least * r.median**2)


def _missing_families(sides: dict[str, list[_Process]]) -> Iterator[str]:
    """A line for each family that was measured on one side alone."""
    there = {name: {family for p in side for family in p.run.files} for name, side in sides.items()}
    for name, other in ((RUN, BASE), (BASE, RUN)):
        for family in sorted(there[other] - there[name]):
            yield f"{name}: {_absent(sides[name][0].run, family)}"


# ---- regressions ----


def _bounds(sides: dict[str, list[_Process]], config: Config) -> Iterator[OpBound]:
    """Operations whose ridge both sides know."""
    needed = _needed(config)
    found = {name: [o for p in side if (o := roofline.ops(p.run)) and o.ridge] for name, side in sides.items()}
    if not all(found.values()):
        return
    ridges = {name: pooled([o.ridge for o in side], needed) for name, side in found.items()}
    said = {name: [{r.op.name: _settled(r, o.ridge) for r in o.rows} for o in side] for name, side in found.items()}
    few = min(map(len, found.values())) < needed
    for row in found[BASE][0].rows:
        base, run = ({of.get(row.op.name) for of in said[name]} for name in (BASE, RUN))
        ends = (x.pop() if len(x) == 1 else None for x in (base, run))
        yield OpBound(row.op.name, row.intensity, *ends, ridges[BASE], ridges[RUN], few)


def _settled(row: roofline.OpRow, ridge: Estimate) -> str | None:
    if row.bound == "compute":
        return row.bound if row.intensity > ridge.hi else None
    if row.bound == "memory":
        return row.bound if row.intensity < ridge.lo else None
    return row.bound


@dataclass(frozen=True)
class Regression:
    """What became worse than the method allows. `base`, `run`: estimates in `unit`, or the words of a bound.

    `change`: of a rate its ratio less 1, of an MFU the difference; `limit` is of the same kind, and `limit_unit` names
    it. A bound has no limit. `note`: what else a reader must know.
    """

    what: str
    base: Estimate | str
    run: Estimate | str
    unit: str
    change: Estimate | None
    limit: float | None
    limit_unit: str
    indicative: bool
    note: str = ""


def regressions(found: Comparison) -> list[Regression]:
    """A roof that fell, compiled MFU that fell, an operation that crossed to memory-bound; none of `across`."""
    out = []
    for key in JUDGED:
        row = found.headline(key)
        if row is None or row.verdict != SLOWER:
            continue
        points = row.difference is not None
        change = row.difference or replace(row.ratio, **{x: getattr(row.ratio, x) - 1 for x in ("median", "lo", "hi")})
        unit = "percentage points" if points else "percent"
        note = _why_mfu_fell(found) if points else row.note
        out.append(Regression(row.label, row.base, row.run, row.unit, change, row.limit, unit, row.indicative, note))
    for b in found.bounds:
        if (b.base, b.run) == ("compute", "memory"):
            words = (f"{side}-bound" for side in (b.base, b.run))
            out.append(Regression(f"operation {b.op}", *words, "bound", None, None, "", b.indicative))
    return out


def _why_mfu_fell(found: Comparison) -> str:
    """An MFU also falls where its basis rises, and then nothing became slower."""
    roof, whole = found.headline("compute_roof"), found.headline("pass_compiled")
    if roof and whole and roof.verdict == FASTER and whole.verdict != SLOWER:
        return f"the compute roof rose; the time of a compiled pass is {whole.verdict}"
    return whole.note if whole else ""


# ---- variability ----


@dataclass(frozen=True)
class Spread:
    """A headline over fresh processes. `values`: None where a process has none. `within`: the relative standard
    deviation that the blocks of each process alone give its value; None where it has too few.

    The CV is the sample standard deviation over the mean; its square is about `within_frac`^2 + `between_frac`^2.
    """

    key: str
    label: str
    unit: str
    values: tuple[float | None, ...]
    within: tuple[float | None, ...]

    @property
    def known(self) -> list[float]:
        return [v for v in self.values if v is not None]

    @property
    def count(self) -> int:
        return len(self.known)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.known)

    @property
    def median(self) -> float:
        return statistics.median(self.known)

    @property
    def cv(self) -> float | None:
        """None for one process."""
        return statistics.stdev(self.known) / self.mean if self.count > 1 else None

    @property
    def cv_interval(self) -> tuple[float, float] | None:
        """95 %, for normal values and a CV below 1/3, else None; it may have no upper end (infinity).

        The modified McKay interval: M. G. Vangel, "Confidence intervals for a normal coefficient of variation", The
        American Statistician 50 (1996) 21-26, equation 16.
        """
        if self.cv is None or self.cv >= 1 / 3:
            return None
        from scipy import stats

        n, k = self.count, self.cv
        ends = []
        for tail in ((1 + COVERAGE) / 2, (1 - COVERAGE) / 2):
            u = float(stats.chi2.ppf(tail, n - 1))
            under = ((u + 2) / n - 1) * k**2 + u / (n - 1)
            ends.append(k / math.sqrt(under) if under > 0 else math.inf)
        return ends[0], ends[1]

    @property
    def within_frac(self) -> float | None:
        """Root mean square of `within` over the processes that have a value; None where one is not known."""
        parts = [w for v, w in zip(self.values, self.within, strict=True) if v is not None]
        return math.sqrt(statistics.fmean(w**2 for w in parts)) if parts and None not in parts else None

    @property
    def between_frac(self) -> float | None:
        """What the CV holds beyond `within_frac`: the part that a new process adds. 0 where the blocks explain it all."""
        if self.cv is None or self.within_frac is None:
            return None
        return math.sqrt(max(0.0, self.cv**2 - self.within_frac**2))


@dataclass(frozen=True)
class Variability:
    """Headlines over fresh processes of one kind of run; `cv_limit_frac` and `runs_needed` are SC-8's thresholds."""

    kind: str
    processes: tuple[ProcessId, ...]
    spreads: tuple[Spread, ...]
    cv_limit_frac: float
    runs_needed: int

    def spread(self, key: str) -> Spread | None:
        return next((s for s in self.spreads if s.key == key), None)


def variability(runs: Sequence[LoadedRun]) -> Variability:
    """Every headline that a process of `runs` has, over all of them. CompareError where the runs are unlike."""
    _unlike((RUN, runs), mend="give runs of one machine and one workload")
    numbers = [headlines(p) for r in runs for p in processes(r)]
    spreads = []
    for key in HEADLINES:
        mine = [n[key] for n in numbers]
        if any(n.value for n in mine):
            own = [_own_variance(n) if n.value else None for n in mine]
            spreads.append(Spread(
                key, mine[0].label, mine[0].unit, tuple(n.value.median if n.value else None for n in mine),
                tuple(None if v is None else math.sqrt(v) for v in own),
            ))  # fmt: skip
    config, kind = runs[0].config, runs[0].kind
    return Variability(kind, _ids(runs), tuple(spreads), config.threshold("cv_pct", kind) / 100,
                       int(config.threshold("cv_runs_count", kind)))  # fmt: skip


def summary(found: Variability) -> dict[str, Any]:
    """What SC-8 needs, as plain data for variability.json: values alone, since every share derives from them."""
    return {
        "schema": SUMMARY_SCHEMA,
        "kind": found.kind,
        "cv_limit_frac": found.cv_limit_frac,
        "runs_needed": found.runs_needed,
        "processes": [vars(p) for p in found.processes],
        "headlines": {
            s.key: {"label": s.label, "unit": s.unit, "values": list(s.values), "within": list(s.within)}
            for s in found.spreads
        },
    }


def read_summary(data: Any, where: str = "variability.json") -> Variability:
    """The variability that `summary` wrote. CompareError naming the key that is wrong."""

    def need(good: bool, key: str, expected: str) -> None:
        if not good:
            raise CompareError(f"{where}: {key} is wrong or missing; expected {expected}; measure the variability again")

    need(isinstance(data, dict), "the top level", "an object")
    need(data.get("schema") == SUMMARY_SCHEMA, "schema", str(SUMMARY_SCHEMA))
    need(data.get("kind") in ("cpu", "gpu"), "kind", '"cpu" or "gpu"')
    need(is_number(data.get("cv_limit_frac")), "cv_limit_frac", "a fraction")
    need(is_whole(data.get("runs_needed")), "runs_needed", "a whole number")
    ids, numbers = data.get("processes"), data.get("headlines")
    need(isinstance(ids, list) and bool(ids), "processes", "a list")
    for i, one in enumerate(ids):
        good = isinstance(one, dict) and set(one) == {"run_id", "iteration", "created_utc"} and is_whole(one["iteration"])
        good = good and isinstance(one["run_id"], str) and isinstance(one["created_utc"], str)
        need(good, f"processes[{i}]", "run_id, iteration and created_utc")
    made = tuple(ProcessId(**one) for one in ids)
    need(isinstance(numbers, dict), "headlines", "an object")
    spreads = []
    for key, one in numbers.items():
        at = f"headlines.{key}"
        need(isinstance(one, dict), at, "an object")
        for name in ("label", "unit"):
            need(isinstance(one.get(name), str), f"{at}.{name}", "a text")
        for name in ("values", "within"):
            good = isinstance(one.get(name), list) and len(one[name]) == len(made)
            good = good and all(v is None or is_number(v) and v >= 0 for v in one[name])
            need(good, f"{at}.{name}", f"{len(made)} numbers or null")
        positive = [v for v in one["values"] if v is not None]
        need(bool(positive) and min(positive) > 0, f"{at}.values", "positive numbers")
        spreads.append(Spread(key, one["label"], one["unit"], tuple(one["values"]), tuple(one["within"])))
    return Variability(data["kind"], made, tuple(spreads), data["cv_limit_frac"], data["runs_needed"])
