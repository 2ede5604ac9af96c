"""Numbers from records: rates, roofs, plateaus, bases, and what disturbed them. Pages and verdicts read these alone.

Everything is computed from the raw part of a run, so a report can be rebuilt without measuring and without torch. All
values are in base units (s, FLOP/s, B/s, Hz); scaling and rounding belong to the pages.
"""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from escher_kernels import records, targets
from escher_kernels.records import Record, RecordError, RecordFile, Run
from escher_kernels.statistics import Estimate, estimate, outliers, paired_ratio, percentile
from validation import config as configuration
from validation.config import Config

ANCHOR_MOVED = "NOISY: anchor moved"
MOST_ITERATIONS = 9999


@dataclass(frozen=True)
class Mark:
    """A record of role "mark", and how many records of its family and iteration stand before it."""

    record: Record
    after: int


@dataclass(frozen=True)
class LoadedRun:
    """The raw part of a run: of ONE iteration, the first that left records, with the others as `repeats`.

    `files` holds the families that were measured, by name, without marks; those are in `marks`. `status` is how the
    families ended in this iteration. A repeat may be without records. `unreadable`: why a family, or env.json or
    status.json, was left out.
    """

    directory: Path
    info: dict[str, Any]  # run.json
    env: dict[str, Any] | None
    status: dict[str, Any]  # family -> how it ended
    files: dict[str, RecordFile]
    selection: targets.Selection
    found: targets.Found
    config: Config
    unreadable: dict[str, str] = field(default_factory=dict)
    iteration: int = 1
    marks: tuple[Mark, ...] = ()
    repeats: tuple[LoadedRun, ...] = ()

    @property
    def iterations(self) -> tuple[LoadedRun, ...]:
        """Every iteration by its number, this one among them."""
        return tuple(sorted((self, *self.repeats), key=lambda r: r.iteration))

    @property
    def kind(self) -> str:
        return "cpu" if self.found.kind == "cpu" else "gpu"

    @property
    def synthetic(self) -> bool:
        return self.info.get("source") == "synthetic" or any(f.run.source == "synthetic" for f in self.files.values())

    def records(self, family: str) -> list[Record]:
        return self.files[family].records if family in self.files else []


def load(directory: Path, config: Config | None = None, lenient: bool = False) -> LoadedRun:
    """Read a run directory. Raises RecordError naming what is missing or corrupt, ConfigError for the configuration.

    `lenient`: a family's file that cannot be used is left out, its reason in `unreadable`, and the rest is read.
    """
    directory = Path(directory)
    if not (directory / "run.json").is_file():
        raise RecordError(f"{directory}: no run (run.json is missing); give a directory below results/")
    info = records.read_json(directory / "run.json")
    if not isinstance(info, dict):
        raise RecordError(f"{directory / 'run.json'}: no JSON object; measure again")
    for key in ("run_id", "method", "created_utc", "workload", "settings", "target"):
        if key not in info:
            raise RecordError(f"{directory / 'run.json'}: {key} is missing; measure again")
    count = info.get("iterations", 1)
    if type(count) is not int or not 1 <= count <= MOST_ITERATIONS:
        raise RecordError(f"{directory / 'run.json'}: iterations is {count!r}; expected a whole number, 1 to {MOST_ITERATIONS}")
    files: dict[str, RecordFile] = {}
    unreadable: dict[str, str] = {}
    for path in sorted((directory / "records").glob("*.jsonl")):
        family = path.stem.partition("_")[2]
        try:
            files[family] = _read_family(path, family, info)
        except RecordError as exc:
            if not lenient:
                raise
            unreadable[family] = str(exc).replace(f"{directory}{os.sep}", "")
    try:
        target = info["target"]
        found = targets.Found.from_json(target["found"])
        selection = targets.Selection.from_json({k: v for k, v in target.items() if k != "found"})
    except (KeyError, TypeError) as exc:
        raise RecordError(f"{directory / 'run.json'}: target is incomplete ({exc}); measure again") from None
    beside: dict[str, Any] = {}
    for name in ("env.json", "status.json"):
        try:
            beside[name] = _read_object(directory / name)
        except RecordError as exc:
            if not lenient:
                raise
            beside[name], unreadable[name] = None, str(exc).replace(f"{directory}{os.sep}", "")
    return separated(LoadedRun(
        directory=directory,
        info=info,
        env=beside["env.json"],
        status=beside["status.json"] or {},
        files=files,
        selection=selection,
        found=found,
        config=config or configuration.of_run(directory),
        unreadable=unreadable,
    ))  # fmt: skip


def separated(run: LoadedRun) -> LoadedRun:
    """A run whose files hold all iterations and their marks -> its first iteration, the others beside it."""
    every = {r.iteration for f in run.files.values() for r in f.records}
    measured = {r.iteration for f in run.files.values() for r in f.records if r.role != "mark"}
    known = every | {int(i) for end in run.status.values() for i in end.get("iterations", ())}
    known |= set(range(1, run.info.get("iterations", 0) + 1))
    first = min(measured, default=min(known, default=1))

    def of(iteration: int) -> LoadedRun:
        files, marks = {}, []
        for family, file in run.files.items():
            mine = [r for r in file.records if r.iteration == iteration]
            if not mine and (file.records or iteration != first):
                continue
            kept = [r for r in mine if r.role != "mark"]
            cut_off = file.truncated and (not mine or mine[-1] is file.records[-1])
            files[family] = RecordFile(file.run, kept, cut_off)
            there = 0
            for r in mine:
                if r.role == "mark":
                    marks.append(Mark(r, there))
                else:
                    there += 1
        status = {family: how for family, end in run.status.items() if (how := _ended(end, iteration))}
        return replace(run, files=files, status=status, marks=tuple(marks), iteration=iteration)

    return replace(of(first), repeats=tuple(of(i) for i in sorted(known - {first})))


def _ended(end: dict[str, Any], iteration: int) -> dict[str, Any] | None:
    """How one iteration of a family ended; an entry without iterations is of the first."""
    if "iterations" in end:
        return end["iterations"].get(str(iteration))
    return end if iteration == 1 else None


def _read_object(path: Path) -> dict[str, Any] | None:
    """env.json or status.json, each an object; of the second every value is one too, and its iterations by number. None
    where it is missing."""
    if not path.is_file():
        return None
    data = records.read_json(path)
    if not isinstance(data, dict) or (path.name == "status.json" and not all(map(_is_status, data.values()))):
        raise RecordError(f"{path}: no JSON object of objects; delete it, or measure again")
    return data


def _is_status(end: Any) -> bool:
    if not isinstance(end, dict):
        return False
    each = end.get("iterations", {})
    return isinstance(each, dict) and all(
        re.fullmatch("[1-9][0-9]{0,3}", number) and isinstance(how, dict) for number, how in each.items()
    )


def _read_family(path: Path, family: str, info: dict[str, Any]) -> RecordFile:
    content = records.read(path)
    if content.run.family != family:
        raise RecordError(f"{path}: holds family {content.run.family!r}; give it that family's name back")
    _check_belongs(path, content.run, info)
    return content


def _check_belongs(path: Path, run: Run, info: dict[str, Any]) -> None:
    """Records of another run, method or device must not be shown as this run's."""
    device = {key: info.get("target", {}).get("found", {}).get(key) for key in ("kind", "raw_name", "arch")}
    wanted = {"run_id": info.get("run_id"), "method": info.get("method"), "device": device}
    found = {key: run.target.get("found", {}).get(key) for key in device}
    for name, value in {"run_id": run.run_id, "method": run.method, "device": found}.items():
        if value != wanted[name]:
            raise RecordError(
                f"{path}: its {name} is {value!r}, the run's is {wanted[name]!r}; move the file out of this run"
            )


@dataclass(frozen=True)
class Row:
    """One case of a family: all its blocks together.

    `time_s` is per call. `flop_s` and `bytes_s` are the rates of the declared work. All None where the case was skipped
    (`skipped`) or its result was wrong (`wrong`): a wrong result has no time.
    """

    family: str
    case: str
    role: str
    params: dict[str, Any]
    backend: str | None = None
    cache: str | None = None
    flop: int | None = None
    bytes_moved: int | None = None
    time_s: Estimate | None = None
    flop_s: Estimate | None = None
    bytes_s: Estimate | None = None
    error: dict[str, Any] | None = None
    wrong: bool = False
    skipped: str | None = None
    flags: tuple[str, ...] = ()
    median_over_p10: float | None = None
    lost_cpu_frac: float | None = None
    outlier_count: int = 0
    blocks: tuple[tuple[float, ...], ...] = field(default=(), repr=False)  # seconds a call
    block_numbers: tuple[int, ...] = field(default=(), repr=False)  # of `blocks`


def rows(items: Iterable[Record], config: Config, kind: str = "gpu") -> list[Row]:
    """Group the records of a family by role and case, in order of first appearance.

    A row measured between two runs of an anchor that moved is marked. Of a pair that a kill cut short nothing counts.
    """
    items = _whole_pairs(items)
    moved = {turn for a in anchors(items, config) for turn in a.moved}
    groups: dict[tuple[str, str], list[Record]] = {}
    disturbed: set[tuple[str, str]] = set()
    turn = -1
    for r in items:
        if r.role == "anchor":
            turn = r.block
        groups.setdefault((r.role, r.case), []).append(r)
        if turn in moved and r.samples_s and r.role != "anchor":
            disturbed.add((r.role, r.case))
    return [_row(group, config, key in disturbed, kind) for key, group in groups.items()]


def _whole_pairs(items: Iterable[Record]) -> list[Record]:
    """Without the members of pairs (see `Record.pair_id`) that lack a case which those cases are paired with elsewhere."""
    items = list(items)
    wrong = {r.case for r in items if r.error and not r.error["ok"]}  # no time, so nobody waits for it
    together: dict[str, set[str]] = {}
    for r in items:
        if r.pair_id is not None and r.samples_s:
            together.setdefault(r.pair_id, set()).add(r.case)
    partners: dict[str, set[str]] = {}
    for cases in together.values():
        for case in cases:
            partners.setdefault(case, set()).update(cases - wrong)
    return [r for r in items if r.pair_id is None or not r.samples_s or partners[r.case] <= together[r.pair_id]]


def _row(group: Sequence[Record], config: Config, anchor_moved: bool, kind: str) -> Row:
    last = group[-1]
    timed = [r for r in group if r.samples_s]
    errors = [r.error for r in group if r.error]
    wrong = any(not e["ok"] for e in errors)
    full = next((e for e in errors if e.get("check") != "freivalds"), errors[0] if errors else None)
    base = dict(
        family=last.family, case=last.case, role=last.role, params=(timed[-1] if timed else last).params,
        backend=last.backend, cache=last.cache, bytes_moved=last.bytes_moved,
        flop=last.flop, error=next((e for e in errors if not e["ok"]), full), wrong=wrong,
        skipped=next((r.skipped for r in group if r.skipped), None),
    )  # fmt: skip
    flags = list(dict.fromkeys(f for r in group for f in r.flags))
    odd = sum(outliers(r.samples_s, config.threshold("outlier_ratio")) for r in timed)
    if odd:
        flags.append(f"OUTLIERS: {odd}")
    good = [r for r in timed if any(s > 0 for s in r.samples_s)]
    if wrong or not good:
        return Row(**base, flags=tuple(flags), outlier_count=odd)
    blocks = _per_block(good, lambda r, call_s: call_s)
    every = [s for b in blocks.values() for s in b]
    over_p10 = statistics.median(every) / percentile(every, 10)
    losses = [r.noise["lost_cpu_frac"] for r in good if r.noise and "lost_cpu_frac" in r.noise]
    lost = statistics.median(losses) if losses else None
    if over_p10 > config.threshold("noisy_ratio"):
        flags.append("NOISY: spread")
    if lost is not None and lost > config.threshold("lost_cpu_frac") and last.role != "probe":
        flags.append("NOISY: CPU time lost")
    if anchor_moved:
        flags.append(ANCHOR_MOVED)
    return Row(
        **base, time_s=estimate(blocks.values()), flags=tuple(flags), median_over_p10=over_p10, lost_cpu_frac=lost,
        outlier_count=odd, blocks=tuple(map(tuple, blocks.values())), block_numbers=tuple(blocks),
        flop_s=_rate(good, blocks, lambda r: r.flop), bytes_s=_rate(good, blocks, lambda r: r.bytes_moved),
    )  # fmt: skip


def _per_block(items: Iterable[Record], of: Callable[[Record, float], float]) -> dict[int, list[float]]:
    """Block -> `of(record, seconds a call)` of its positive samples: several records of a block are one block."""
    out: dict[int, list[float]] = {}
    for r in items:
        out.setdefault(r.block, []).extend(of(r, s / r.calls_per_sample) for s in r.samples_s if s > 0)
    return out


def _rate(
    items: Sequence[Record], blocks: dict[int, list[float]], work: Callable[[Record], int | None]
) -> Estimate | None:
    """Work over the time's estimate; where the work differs from record to record, of each block's own rates."""
    if not all(work(r) for r in items):
        return None
    if len({work(r) for r in items}) == 1:
        return estimate(blocks.values()).over(work(items[0]))
    return estimate(_per_block(items, lambda r, call_s: work(r) / call_s).values())


@dataclass(frozen=True)
class Anchor:
    """An anchor case over a family: its rate each time it ran (steadiness needs two), the largest step between two."""

    case: str
    unit: str  # "FLOP/s" or "B/s"
    rates: tuple[float, ...]
    largest_move_frac: float
    moved: tuple[int, ...]  # k: it moved between its k-th and (k+1)-th time


def anchors(items: Iterable[Record], config: Config) -> list[Anchor]:
    """How steady the machine was while the family was measured."""
    out = []
    found: dict[str, list[Record]] = {}
    for r in items:
        if r.role == "anchor" and any(s > 0 for s in r.samples_s):
            found.setdefault(r.case, []).append(r)
    for case, group in found.items():
        work, unit = ("flop", "FLOP/s") if group[0].flop else ("bytes_moved", "B/s")
        rates = [
            getattr(r, work) * r.calls_per_sample / statistics.median(s for s in r.samples_s if s > 0) for r in group
        ]
        moves = [max(a, b) / min(a, b) - 1 for a, b in zip(rates, rates[1:], strict=False)]
        limit = config.threshold("anchor_moved_frac")
        moved = tuple(i for i, m in enumerate(moves) if m > limit)
        out.append(Anchor(case, unit, tuple(rates), max(moves, default=0.0), moved))
    return out


@dataclass(frozen=True)
class Basis:
    """What a measured rate may be divided by. `rate` is None where this run has no such basis, with the reason."""

    name: str  # "rated", "probed"
    label: str
    rate: float | None  # FLOP/s or B/s
    reason: str
    same_device: bool
    origin: str = ""  # where the figure comes from
    interval: Estimate | None = None  # where the basis itself was measured

    def frac(self, measured: Estimate | None) -> Estimate | None:
        """Measured over the basis; None unless both belong to the device that was measured."""
        if measured is None or not self.rate or not self.same_device:
            return None
        return quotient(measured, self.interval) if self.interval else measured.times(1 / self.rate)


@dataclass(frozen=True)
class Probe:
    """A CPU's peak by instruction. `best_flop_s`: the best slice of all threads together, or, where each thread's own
    slices were kept, the sum of the threads' bests: they need not be at full speed at the same moment."""

    name: str
    dtype: str
    threads: int
    best_flop_s: float
    together_flop_s: float
    block_bests: Estimate  # of all threads together


GEMM_GROUPS = ("square", "skew", "batched", "addmm", "long_k", "peer", "reduced", "epilogue")


def gemm_group(row: Row) -> str:
    """What a row of family 1 stands for: one of `GEMM_GROUPS`, "roof", or "workload" for a GEMM of the model."""
    head = row.case.partition(".")[0]
    return head if head in (*GEMM_GROUPS, "roof") else "workload"


@dataclass(frozen=True)
class Compute:
    """Family 1. `rows`: every row that may be compared with the roof, without the roof itself. `reduced`: rows that let
    the library round partial sums to the dtype; they are compared with nothing."""

    run: Run
    roof: Row | None
    best_square: Row | None
    rows: list[Row]
    reduced: list[Row]
    pairs: list[Row]
    fused_speedup: Estimate | None  # time of GEMM with bias, then GELU, over that of one call; from interleaved pairs
    search: list[Row]
    probes: list[Probe]
    probe_skipped: str | None
    clock_hz: float | None
    clock_note: str
    bases: list[Basis]
    anchors: list[Anchor]
    dtype: str
    converged: bool
    disturbed: bool  # an anchor moved while the roof was measured

    def of(self, *groups: str) -> list[Row]:
        """The rows of some groups (see `gemm_group`), in the order they were planned."""
        return [r for r in self.rows if gemm_group(r) in groups]

    def same_shapes(self) -> list[list[Row]]:
        """GEMMs of the workload that were timed and have one shape: two or more rows a group."""
        found: dict[tuple, list[Row]] = {}
        for r in self.of("workload"):
            if r.flop_s:
                found.setdefault(tuple(r.params[x] for x in ("m", "n", "k", "layout")), []).append(r)
        return [group for group in found.values() if len(group) > 1]


def compute(run: LoadedRun) -> Compute | None:
    """Family 1. The roof is the fresh measurement of the search's winner; None where the family was not measured."""
    if "compute" not in run.files:
        return None
    items, config = run.records("compute"), run.config
    every = rows(items, config, run.kind)
    cases = [r for r in every if r.role == "case"]
    roof = next((r for r in cases if r.case == "roof"), None)
    squares = [r for r in cases if gemm_group(r) == "square" and r.flop_s]
    pairs = [r for r in every if r.role == "pair"]
    dtype = run.files["compute"].run.parameters["dtype"]
    probes, skipped = _probes(items)
    clock_hz, clock_note = _clock(items)
    return Compute(
        run=run.files["compute"].run,
        roof=roof,
        best_square=max(squares, key=lambda r: r.flop_s.median, default=None),
        rows=[r for r in cases if gemm_group(r) not in ("roof", "reduced")],
        reduced=[r for r in cases if gemm_group(r) == "reduced"],
        pairs=pairs,
        fused_speedup=_paired(pairs, "epilogue.unfused", "epilogue.fused"),
        search=[r for r in every if r.role == "search"],
        probes=probes,
        probe_skipped=skipped,
        clock_hz=clock_hz,
        clock_note=clock_note,
        bases=compute_bases(run, dtype, probes, skipped),
        anchors=anchors(items, config),
        dtype=dtype,
        disturbed=bool(roof and ANCHOR_MOVED in roof.flags),
        converged=bool(roof and roof.flop_s and roof.flop_s.converged(config.threshold("converged_roof_frac"))),
    )


def _probes(items: Iterable[Record]) -> tuple[list[Probe], str | None]:
    """Peaks, the highest first; and why there is no basis: nothing probed, or a BF16 instruction that could not be."""
    groups: dict[str, list[Record]] = {}
    threads: dict[str, dict[int, float]] = {}
    skipped = None
    for r in items:
        if r.role != "probe" or not r.case.startswith("peak"):
            continue
        if r.skipped and (r.case == "peak" or "bf16" in r.case):
            reason = r.skipped if r.case == "peak" else f"{r.case.partition('.')[2]}: {r.skipped}"
            skipped = f"{skipped}; {reason}" if skipped else reason
        elif (best_s := _best_s(r)) and "thread" in r.params:
            bests = threads.setdefault(r.params["of"], {})
            bests[r.params["thread"]] = max(bests.get(r.params["thread"], 0.0), r.flop / best_s)
        elif best_s:
            groups.setdefault(r.case, []).append(r)
    out = []
    for case, group in groups.items():
        bests = [[r.flop / _best_s(r)] for r in group]
        own = threads.get(case, {})
        together = max(b[0] for b in bests)
        whole = len(own) == group[0].params["threads"]
        out.append(
            Probe(
                name=case.partition(".")[2],
                dtype=group[0].params["dtype"],
                threads=group[0].params["threads"],
                best_flop_s=max(together, sum(own.values())) if whole else together,
                together_flop_s=together,
                block_bests=estimate(bests),
            )  # fmt: skip
        )
    return sorted(out, key=lambda p: -p.best_flop_s), skipped


def _best_s(record: Record) -> float | None:
    return min((s for s in record.samples_s if s > 0), default=None)


def _clock(items: Iterable[Record]) -> tuple[float | None, str]:
    """The clock from the best slice of each dependent chain; unknown where two chains differ by more than 3 %."""
    best: dict[str, float] = {}
    for r in items:
        if r.role == "probe" and r.case.startswith("clock.") and (best_s := _best_s(r)):
            best[r.case] = max(best.get(r.case, 0.0), r.params["cycles"] / best_s)
    if not best:
        return None, "not probed"
    low, high = min(best.values()), max(best.values())
    if high / low > 1.03:
        return None, f"the two chains disagree ({low / 1e9:.2f} and {high / 1e9:.2f} GHz)"
    return high, "best slice of two chains of dependent instructions that agree within 3 %"


def compute_bases(
    run: LoadedRun, dtype: str, probes: Sequence[Probe] = (), skipped: str | None = "family compute was not measured"
) -> list[Basis]:
    """What a compute rate of that dtype may be a share of: the rated dense peak, on a CPU the probed one."""
    selection = run.selection
    profile = selection.profile
    out = []
    if profile is None:
        out.append(Basis("rated", "rated dense peak", None, f"no rated basis: {selection.reason}", False))
    elif profile.kind == "gpu":
        rate = profile.dense_peak_flop_s.get(dtype)
        reason = selection.reason if rate else f"{profile.name} has no rated dense {dtype} peak"
        label = f"rated dense {dtype.upper()} peak of {profile.name}"
        out.append(Basis("rated", label, rate, reason, selection.same_device, profile.peak_formula))
    if run.kind == "cpu":
        if probes and not skipped:
            best = probes[0]
            label = f"probed peak of this host, {best.name} on {best.threads} threads"
            out.append(Basis("probed", label, best.best_flop_s, "", True, "loops of one instruction, best slices"))
        else:
            why = skipped or "not probed"
            out.append(Basis("probed", "probed peak of this host", None, why, True))
    return out


def quotient(a: Estimate, b: Estimate) -> Estimate:
    """a / b of two separate measurements. The interval spans the ratios of the ends: it holds where both do."""
    return Estimate(a.median / b.median, a.lo / b.hi, a.hi / b.lo, a.coverage * b.coverage, min(a.blocks, b.blocks),
                    a.samples + b.samples)  # fmt: skip


def ridge(compute_roof: Estimate, bandwidth_roof: Estimate) -> Estimate:
    """Compute roof over bandwidth roof, FLOP/B."""
    return quotient(compute_roof, bandwidth_roof)


@dataclass(frozen=True)
class Plateau:
    """An op over the three largest sizes. `bytes_s`: per block the median of the three sizes' rates, then as ever."""

    op: str
    bytes_s: Estimate
    spread_frac: float  # max / min - 1 of the three sizes' headlines
    sizes: tuple[int, ...]


BESIDE = {"strided": ("strided",), "host": ("host_to_device", "device_to_host")}  # ops that no plateau holds


@dataclass(frozen=True)
class Bandwidth:
    """Family 2. `rows`: the cold rows of plain operations. `strided` and `host` (copies between host and device) stand
    beside: they enter no plateau and no roof, and nothing is compared with them."""

    run: Run
    roof: Plateau | None
    plateaus: list[Plateau]
    rows: list[Row]
    strided: list[Row]
    host: list[Row]
    cache_curve: list[Row]
    pairs: list[Row]
    speedup: dict[str, Estimate]  # torch's copy over the C copy with ordinary, with streaming stores: ratio of rates
    bases: list[Basis]
    anchors: list[Anchor]
    converged: bool
    disturbed: bool  # an anchor moved while the plateau of copy was measured
    skipped: str | None


def bandwidth(run: LoadedRun) -> Bandwidth | None:
    """Family 2. The roof is the plateau of copy; None where the family was not measured."""
    if "bandwidth" not in run.files:
        return None
    items, config, profile = run.records("bandwidth"), run.config, run.selection.profile
    every = rows(items, config, run.kind)
    labelled = {name: [r for r in every if r.params.get("op") in ops] for name, ops in BESIDE.items()}
    beside = {op for ops in BESIDE.values() for op in ops}
    cold = [r for r in every if r.role == "case" and r.cache == "cold" and r.params["op"] not in beside]
    plateaus = [p for op in dict.fromkeys(r.params["op"] for r in cold) if (p := _plateau(op, cold))]
    roof = next((p for p in plateaus if p.op == "copy"), None)
    pairs = [r for r in every if r.role == "pair"]
    if profile is None:
        bases = [Basis("rated", "rated bandwidth", None, f"no rated basis: {run.selection.reason}", False)]
    elif profile.bandwidth_bytes_s:
        label, same = f"rated bandwidth of {profile.name}", run.selection.same_device
        origin = f"vendor figure for {profile.memory_type}"
        bases = [Basis("rated", label, profile.bandwidth_bytes_s, run.selection.reason, same, origin)]
    else:
        bases = [Basis("rated", "rated bandwidth", None, profile.bandwidth_floor_note, run.selection.same_device)]
    return Bandwidth(
        run=run.files["bandwidth"].run,
        roof=roof,
        plateaus=plateaus,
        rows=cold,
        **labelled,
        cache_curve=[r for r in every if r.cache == "warm"],
        pairs=pairs,
        speedup=_speedup(pairs),
        bases=bases,
        anchors=anchors(items, config),
        disturbed=any(ANCHOR_MOVED in r.flags for r in cold if r.params["op"] == "copy" and r.params.get("plateau")),
        converged=bool(roof and roof.bytes_s.converged(config.threshold("converged_roof_frac"))),
        skipped=next((f"{r.case}: {_why_untimed(r)}" for r in cold if r.params.get("plateau") and not r.bytes_s), None),
    )


def _plateau(op: str, cold: Sequence[Row]) -> Plateau | None:
    """None unless every size that was fixed before timing has a right and timed row."""
    group = [r for r in cold if r.params["op"] == op and r.params.get("plateau")]
    if not group or not all(r.bytes_s for r in group):
        return None
    medians_s = [{n: statistics.median(b) for n, b in zip(r.block_numbers, r.blocks, strict=True)} for r in group]
    common = [n for n in medians_s[0] if all(n in other for other in medians_s)]  # a slow size has fewer blocks
    if not common:
        return None
    blocks = [[statistics.median(r.bytes_moved / s[n] for r, s in zip(group, medians_s, strict=True))] for n in common]
    medians = [r.bytes_s.median for r in group]
    spread = max(medians) / min(medians) - 1
    return Plateau(op, estimate(blocks), spread, tuple(r.params["buffer_bytes"] for r in group))


def _why_untimed(row: Row) -> str:
    return row.skipped or ("wrong result" if row.wrong else "no positive sample")


def _speedup(pairs: Sequence[Row]) -> dict[str, Estimate]:
    found = {name: _paired(pairs, f"stream.{name}", "stream.torch") for name in ("plain", "streaming")}
    return {name: ratio for name, ratio in found.items() if ratio}


def _paired(pairs: Sequence[Row], slow: str, fast: str) -> Estimate | None:
    """Time of `slow` over that of `fast` from their interleaved samples; None where one is missing or they do not pair."""
    by_name = {r.case: r for r in pairs if r.time_s}
    a, b = by_name.get(slow), by_name.get(fast)
    if not (a and b) or a.block_numbers != b.block_numbers:
        return None
    if [len(x) for x in a.blocks] != [len(x) for x in b.blocks]:
        return None
    return paired_ratio(a.blocks, b.blocks)
