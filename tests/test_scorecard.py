"""The scorecard: every criterion in every status on both sides of its threshold, the verdict, and whole runs that are bad."""

from __future__ import annotations

import copy
import json
import random
import re
import shutil
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest import mock

import model_records as made
import pytest
from conftest import CPU, ESCHER, MI355X, SAMPLES, TINY, UNKNOWN_GPU
from hypothesis import given, settings
from hypothesis import strategies as st
from model_records import ABSENT, DEFAULT, WRONG
from test_selftest import light

from escher_kernels import checks, e2e, targets, workload
from escher_kernels.records import Record, RecordError
from escher_kernels.statistics import estimate
from validation import compare, crosscheck, derive, plausibility, roofline, scorecard, selftest, tools
from validation.artefacts import Artefacts
from validation.crosscheck import Check
from validation.plausibility import Implausible
from validation.scorecard import (
    CONDITIONAL,
    FAIL,
    GO,
    INCOMPLETE,
    INSUFFICIENT,
    INVALID,
    NA,
    NO_GO,
    PASS,
    SKIP,
    STATUSES,
    WARN,
    WARN_CPU,
    Criterion,
)
from validation.tools import running

V100 = targets.Found("cuda", "Tesla V100-SXM2-32GB", "sm_70", 80, 34079899648)
MI300A = targets.Found("rocm", "AMD Instinct MI300A", "gfx942", 228, 137438953472)
WHOLE = Artefacts(("run.json",), ())
RATED, RATED_BYTES, PROBED = 2516.6e12, 8e12, 1e12  # dense BF16 FLOP/s and B/s of the MI355X; a CPU's probed FLOP/s
GIB = 2**30
SPREAD = (-1, -0.6, -0.2, 0.2, 0.6, 1)  # six blocks around their median
THROTTLE = {"clock_hz": 1.2e9, "power_w": 1400.0, "temperature_c": 104.0, "throttle": ["socket_thermal"]}


def judged(run, number) -> Criterion:
    """What the judge of one criterion says, without what the guard and the family's end add."""
    return scorecard.JUDGES[number](run, Criterion(f"SC-{number}", *scorecard.TITLES[number], SKIP, ""))


def six(middle: float, width: float = 0.002) -> list[float]:
    """Blocks around `middle`, steady as a roof must be."""
    return [middle * (1 + width * x) for x in SPREAD]


def straddling(middle: float) -> list[float]:
    return six(middle, 0.005)


def timed(family: str, case: str, rates: Iterable[float], params: dict, by: str = "flop", **more) -> list[Record]:
    """A record a block, each with that rate of FLOP or bytes."""
    work = 10**15
    return [Record(family, case, block=i, params=params, samples_s=(work / r,), backend="made", **{by: work}, **more)
            for i, r in enumerate(rates)]  # fmt: skip


def gemm(case: str, rates: Iterable[float], dtype: str = "bf16", **more) -> list[Record]:
    return timed("compute", case, rates, {"m": 8192, "n": 8192, "k": 8192, "layout": "NN", "dtype": dtype}, **more)


def stream(op: str, *sizes: Iterable[float], **more) -> list[Record]:
    """The plateau of an operation: the rates of each of its sizes."""
    return [r for n, rates in enumerate(sizes, start=1)
            for r in timed("bandwidth", f"{op}.{n}GiB", rates, {"op": op, "buffer_bytes": n * GIB, "plateau": True},
                           by="bytes_moved", cache="cold", **more)]  # fmt: skip


def probe(flop_s: float) -> Record:
    params = {"dtype": "bfloat16", "threads": 2}
    return Record("compute", "peak.amx_bf16", role="probe", params=params, flop=int(flop_s), samples_s=(1.0,))


def marked(records: Iterable[Record], **changes) -> list[Record]:
    return [replace(r, **changes) for r in records]


def noisy(records: Iterable[Record]) -> list[Record]:
    return marked(records, flags=("NOISY: spread",))


@pytest.fixture
def run_of(made_run):
    """`run_of(records, ...)`: a run on an MI355X of the tiny workload, unless told otherwise."""

    def make(records: Iterable[Record] = (), spec: workload.Spec = TINY, **more) -> derive.LoadedRun:
        return made_run(list(records), **{"found": MI355X, "workload": spec.to_json(), **more})

    return make


@pytest.fixture(scope="module")
def gpu(tmp_path_factory) -> derive.LoadedRun:
    """The GPU sample with fewer rows; it is GO."""
    return derive.load(light(tmp_path_factory.mktemp("light") / "mi355x"))


def reconfigured(run, **values) -> derive.LoadedRun:
    """The run judged by other values; `roof_floor_frac` and `bandwidth_floor_frac` are those of every target."""
    config = copy.deepcopy(run.config)
    for name, value in values.items():
        if name.endswith("_floor_frac"):
            for entry in (*config["targets"], config["cpu"]):
                entry[name]["value"] = value
        else:
            config["thresholds"][name]["value"] = value
    return replace(run, config=config)


# --------------------------------------------------------------------------------------------- SC-0


@pytest.mark.parametrize(
    "gflop, mb, status",
    [
        (1.0, 1.0, PASS),
        (1.049, 1.0, PASS),
        (1.051, 1.0, FAIL),
        (0.951, 1.0, PASS),
        (0.949, 1.0, FAIL),
        (1.0, 1.049, PASS),
        (1.0, 1.051, FAIL),
        (0.949, 1.051, FAIL),
    ],
)
def test_sc0_drift_of_flop_or_bytes(run_of, gflop, mb, status):
    flop, moved = workload.pilot_totals(ESCHER)
    pilot = {"block_gflop": flop / 1e9 / gflop, "block_mb": moved / 1e6 / mb}
    c = judged(run_of(spec=replace(ESCHER, pilot=pilot)), 0)
    assert c.status == status and "differs from the pilot's totals" in c.reason
    assert [x.name for x in c.limits] == ["calibration_drift_pct"]


@pytest.mark.parametrize(
    "spec, words",
    [
        (replace(ESCHER, pilot=None), "declares no pilot totals"),
        (workload.fit(ESCHER, "cpu", 2**34), "what ran is a derived workload"),
        (workload.overridden(ESCHER, depth=7), "what ran is a derived workload"),
    ],
)
def test_sc0_does_not_apply_to_others(run_of, spec, words):
    c = judged(run_of(spec=spec), 0)
    assert c.status == NA and words in c.reason


# --------------------------------------------------------------------------------------------- SC-1


def moved(records: list[Record]) -> list[Record]:
    """An anchor that gained 20 % while they were measured."""
    return made.around("compute", records, gemm=(100.0, 120.0))


BEST = gemm("square.8192", six(0.6 * RATED))
SC1_GPU = [  # records, more of the run, status, words
    (gemm("roof", six(0.502 * RATED)) + gemm("square.8192", six(0.5 * RATED)), {}, PASS, "at least 50.0 % is wanted"),
    (gemm("roof", six(0.498 * RATED)), {}, FAIL, "49.8 % of the rated dense BF16 peak of AMD Instinct MI355X"),
    (gemm("roof", straddling(0.5 * RATED)), {}, INSUFFICIENT, "50.0 % (49.8 to 50.2 %)"),
    (gemm("roof", six(0.6 * RATED)[:5]), {}, INSUFFICIENT, "; 5 blocks are too few)"),
    (gemm("roof", six(0.4 * RATED)[:1]), {}, INSUFFICIENT, "; 1 block is too few)"),
    (noisy(gemm("roof", six(0.4 * RATED))), {}, INSUFFICIENT, "not held against the device"),
    (moved(gemm("roof", six(0.4 * RATED))), {}, INSUFFICIENT, "not held against the device"),
    (moved(gemm("roof", six(0.4 * RATED), device_state=THROTTLE)), {}, FAIL, "throttled meanwhile (socket_thermal in 6 w"),
    (noisy(gemm("roof", six(0.6 * RATED))), {}, PASS, ""),
    (gemm("roof", six(0.6 * RATED, 0.0099)), {}, PASS, ""),
    (gemm("roof", six(0.6 * RATED, 0.0101)), {}, WARN, "not converged (half-width 1.0 %, at most 1 %)"),
    (gemm("roof", six(0.4 * RATED, 0.05)), {}, FAIL, ""),
    (gemm("roof", six(0.6 * RATED)) + gemm("square.8192", six(0.541 * RATED)), {}, PASS, ""),
    (gemm("roof", six(0.6 * RATED)) + gemm("square.8192", six(0.539 * RATED)), {}, WARN, "best square reaches only 90 %"),
    (gemm("roof", six(0.4 * RATED)) + gemm("square.8192", six(0.2 * RATED)), {}, FAIL, ""),
    (BEST, {}, INCOMPLETE, "there is no roof"),
    ([Record("compute", "roof", error={"check": "full", "ok": False})], {}, INCOMPLETE, "there is no roof"),
    (gemm("roof", six(9e15)), {"found": UNKNOWN_GPU}, NA, "no floor to hold it against: no rated basis: unknown device"),
    (gemm("roof", six(0.1 * RATED)), {"found": MI300A}, NA, "no public GEMM figure for MI300A"),
    (gemm("roof", six(0.1 * RATED)), {"asked": "h200"}, SKIP, "the target is NVIDIA H200 SXM, another device was measured"),
    (gemm("roof", six(9e15)), {"found": UNKNOWN_GPU, "asked": "mi355x"}, SKIP, "another device was measured"),
    (gemm("roof", six(0.1 * RATED)), {"asked": "cpu"}, SKIP, "the target is CPU host, another device was measured"),
    (gemm("roof", six(0.665 * 125e12), "fp16"), {"found": V100, "dtype": "fp16"}, PASS, "rated dense FP16 peak of NVIDIA V100"),
    (gemm("roof", six(0.661 * 125e12), "fp16"), {"found": V100, "dtype": "fp16"}, FAIL, "at least 66.3 % is wanted"),
    (gemm("roof", six(9e12)), {"found": V100}, NA, "has no rated dense bf16 peak"),
]  # fmt: skip
SC1_CPU = [
    ([*gemm("roof", six(0.702 * PROBED)), probe(PROBED)], {}, PASS, "of the probed peak of this host, amx_bf16 on 2 threads"),
    ([*gemm("roof", six(0.698 * PROBED)), probe(PROBED)], {}, WARN_CPU, "at least 70.0 % is wanted"),
    ([*gemm("roof", straddling(0.7 * PROBED)), probe(PROBED)], {}, INSUFFICIENT, ""),
    ([*noisy(gemm("roof", six(0.1 * PROBED))), probe(PROBED)], {}, WARN_CPU, ""),
    ([*gemm("roof", six(0.8 * PROBED, 0.02)), probe(PROBED)], {}, WARN_CPU, "not converged"),
    ([*gemm("roof", six(0.8 * PROBED)), *gemm("square.1", six(0.1 * PROBED)), probe(PROBED)], {}, WARN_CPU, "best square"),
    (gemm("roof", six(0.1 * PROBED)), {}, NA, "not probed"),
    ([*gemm("roof", six(0.1 * PROBED)), probe(PROBED)], {"asked": "mi355x"}, SKIP, "the target is AMD Instinct MI355X"),
    (BEST, {}, INCOMPLETE, "there is no roof"),
]  # fmt: skip


@pytest.mark.parametrize("records, more, status, words", SC1_GPU)
def test_sc1_on_a_gpu(run_of, records, more, status, words):
    c = judged(run_of(records, **more), 1)
    assert c.status == status and words in c.reason


@pytest.mark.parametrize("records, more, status, words", SC1_CPU)
def test_sc1_on_a_cpu_host(run_of, records, more, status, words):
    c = judged(run_of(records, found=CPU, **more), 1)
    assert c.status == status and words in c.reason


# --------------------------------------------------------------------------------------------- SC-2

FAST = six(0.7 * RATED_BYTES)
THREE = (FAST, FAST, FAST)


def plateaus(larger: float = 1.0, width: float = 0.0005, rate: float = 0.7 * RATED_BYTES, op: str = "copy") -> list[Record]:
    """Both plateaus, of which `op` has one size that is `larger` times as fast."""
    flat, odd = six(rate, width), six(rate * larger, width)
    return [r for x in ("copy", "add") for r in stream(x, flat, odd if x == op else flat, flat)]


def of_op(op: str, change, records: list[Record]) -> list[Record]:
    return [change([r])[0] if r.params["op"] == op else r for r in records]


SC2_GPU = [
    (plateaus(), {}, PASS, "the roof is 70.0 % of rated, at least 60 % is wanted"),
    (plateaus(1.048), {}, PASS, "copy differs by 4.8 %"),
    (plateaus(1.052), {}, FAIL, "copy differs by 5.2 % over the plateau, at most 5 % is wanted"),
    (plateaus(1.05), {}, INSUFFICIENT, "copy differs by 5.0 % ("),
    (plateaus(1.052, op="add"), {}, FAIL, "add differs by 5.2 %"),
    (plateaus(rate=0.602 * RATED_BYTES), {}, PASS, ""),
    (plateaus(rate=0.598 * RATED_BYTES), {}, FAIL, "59.8 % of rated"),
    (plateaus(rate=0.6 * RATED_BYTES), {}, INSUFFICIENT, "60.0 % (60.0 to 60.0 %) of rated"),
    (stream("copy", *THREE), {}, INCOMPLETE, "add has no plateau"),
    (stream("add", *THREE), {}, INCOMPLETE, "no plateau of copy"),
    (stream("copy", FAST[:5], FAST[:5], FAST[:5]) + stream("add", *THREE), {}, INSUFFICIENT, "5 blocks are too few"),
    (stream("copy", *[six(0.7 * RATED_BYTES, 0.011)] * 3) + stream("add", *THREE), {}, WARN, "at most 1 %)"),
    (of_op("copy", noisy, plateaus(1.3)), {}, INSUFFICIENT, "not held against the device"),
    (of_op("add", noisy, plateaus(1.3)), {}, FAIL, "copy differs by 30.0 %"),  # the noise of add does not excuse copy
    (of_op("add", noisy, plateaus(rate=1e12)), {}, FAIL, "12.5 % of rated"),
    (of_op("add", noisy, plateaus(1.3, op="add")), {}, INSUFFICIENT, "add differs by 30.0 %"),
    (noisy(marked(plateaus(1.3), device_state=THROTTLE)), {}, FAIL, "the device throttled meanwhile"),
    (noisy(plateaus()), {}, PASS, ""),
    (plateaus(rate=9e13), {"found": UNKNOWN_GPU}, PASS, "not held against a rated figure: no rated basis: unknown device"),
    (plateaus(1.3), {"found": UNKNOWN_GPU}, FAIL, ""),
    (plateaus(rate=1e12), {"asked": "h200"}, SKIP, "the target is NVIDIA H200 SXM, another device was measured"),
    (plateaus(1.3), {"asked": "h200"}, FAIL, "copy differs by 30.0 %"),
    (plateaus(rate=1e12), {"asked": "cpu"}, SKIP, "the target is CPU host"),
]  # fmt: skip
SC2_CPU = [
    (plateaus(rate=1e10), {}, PASS, ""),
    (plateaus(1.148), {}, PASS, "at most 15 % is wanted"),
    (plateaus(1.152), {}, WARN_CPU, "copy differs by 15.2 %"),
    (plateaus(1.15), {}, INSUFFICIENT, ""),
    (noisy(plateaus(1.3)), {}, WARN_CPU, ""),
    (stream("copy", *[six(1e10, 0.03)] * 3) + stream("add", *THREE), {}, WARN_CPU, "not converged"),
    (stream("copy", *THREE), {}, INCOMPLETE, "add has no plateau"),
    (plateaus(), {"asked": "mi355x"}, SKIP, "the target is AMD Instinct MI355X, another device was measured"),
]  # fmt: skip


@pytest.mark.parametrize("records, more, status, words", SC2_GPU)
def test_sc2_on_a_gpu(run_of, records, more, status, words):
    c = judged(run_of(records, **more), 2)
    assert c.status == status and words in c.reason


@pytest.mark.parametrize("records, more, status, words", SC2_CPU)
def test_sc2_on_a_cpu_host(run_of, records, more, status, words):
    c = judged(run_of(records, found=CPU, **more), 2)
    assert c.status == status and words in c.reason


def test_sc2_one_size_cannot_differ_from_itself(run_of):
    """A size whose blocks lie 4 % apart, and two that are steady in its middle: none is 5 % from another."""
    wide = stream("copy", six(5.6e12, 0.02), *[six(5.6e12, 0.0)] * 2) + stream("add", *THREE)
    c = judged(run_of(wide), 2)
    spread = next(f for f in c.figures if f.what == "spread of copy over the plateau")
    assert (spread.lo, spread.hi) == (0.0, pytest.approx(100 * (1 / 0.98 - 1)))
    assert c.status == PASS


def test_sc2_a_floor_that_the_configuration_does_not_give_is_no_floor(run_of):
    run = reconfigured(run_of(plateaus()), bandwidth_floor_frac=None)
    c = judged(run, 2)
    assert c.status == PASS and "not held against a rated figure: of rated bandwidth; the lowest public" in c.reason


# --------------------------------------------------------------------------------------------- SC-3

PEAK, BYTES_S = 1560 * 10**12, 5900 * 10**9  # a ridge of 264 FLOP/B; the rated one is 315
Q = "self_attn.q"


def theory_s(op, peak: float = PEAK, bytes_s: float = BYTES_S) -> float:
    return max(op.flop / peak, op.bytes / bytes_s)


def op_times(factor: float = 1.2, peak: float = PEAK, bytes_s: float = BYTES_S, **own):
    """Times of every operation as a multiple of its theory time; `own`: op (_ for .) -> multiples of each block, or why
    it has no time."""

    def of(op, path):
        mine = own.get(op.name.replace(".", "_"), factor)
        if isinstance(mine, str):
            return mine
        return [theory_s(op, peak, bytes_s) * x for x in (mine if isinstance(mine, list) else [mine] * 6)]

    return of


def model_run(run_of, *, peak: int = PEAK, bytes_s: int = BYTES_S, change=list, around=None, kind="gpu", **more):
    """A run of roofs and of every operation; `change` alters the operations' records."""
    own = {k: more.pop(k) for k in list(more) if k.split("_")[0] in ("self", "cross", "ffn", "rope", "factor")}
    records = change(made.ops(ESCHER, op_times(peak=peak, bytes_s=bytes_s, **own), kind))
    if around:
        records = made.around("ops", records, **around)
    return run_of([*made.roofs(peak, bytes_s), *records], spec=ESCHER, **more)


def each(x: float) -> list[float]:
    """Blocks of times whose inverses lie closely around x."""
    return [1 / y for y in six(x, 0.001)]


def only_q(change):
    return lambda records: [change([r])[0] if r.params["op"] == Q else r for r in records]


SC3_GPU = [
    ({}, PASS, "operations attain at least 40 % of the roof at their intensity"),
    ({"self_attn_q": each(0.402)}, PASS, ""),
    ({"self_attn_q": each(0.398)}, FAIL, "self_attn.q attains 39.8 % of its roof, 40 % is wanted"),
    ({"self_attn_q": each(0.4)}, INSUFFICIENT, "self_attn.q attains 40.0 % (40.0 to 40.0 %) of its roof"),
    ({"self_attn_q": [1.2] * 5}, INSUFFICIENT, "; 5 blocks are too few)"),
    ({"self_attn_q": each(0.3), "change": only_q(noisy)}, INSUFFICIENT, "not held against the device"),
    ({"self_attn_q": each(0.3), "ffn_linear1": each(0.3), "change": only_q(noisy)}, FAIL, "ffn.linear1 attains 30.0 %"),
    ({"self_attn_q": each(0.3), "around": {"gemm": (104.0, 104.0)}}, FAIL, ""),
    ({"self_attn_q": each(0.3), "around": {"gemm": (94.0, 94.0)}}, INSUFFICIENT, "not held against the device"),
    ({"self_attn_q": each(0.3), "around": {"gemm": (110.0, 110.0)}}, FAIL, ""),  # faster than by the roof: no excuse
    ({"self_attn_q": each(0.3), "around": {"copy": (90.0, 90.0)}}, FAIL, ""),  # it is bound by the other one
    ({"self_attn_q": each(0.3), "change": only_q(lambda r: marked(r, flags=("HOST_BOUND",)))}, INSUFFICIENT,
     "the device waited for the host"),
    ({"self_attn_q": each(0.5), "change": only_q(lambda r: marked(r, flags=("HOST_BOUND",)))}, PASS, "18 operations"),
    ({"self_attn_q": each(0.3), "around": {"gemm": (50.0, 50.0)}, "change": lambda r: marked(r, device_state=THROTTLE)},
     FAIL, "the device throttled meanwhile (socket_thermal in "),
    ({"self_attn_q": "no kernel"}, INCOMPLETE, "no time for self_attn.q"),
    ({"self_attn_q": WRONG}, INCOMPLETE, "no time for self_attn.q"),
    ({"self_attn_q": ABSENT}, INCOMPLETE, "no time for self_attn.q"),
    ({"self_attn_q": ABSENT, "ffn_linear1": each(0.3), "ffn_linear2": each(0.4)}, FAIL, "ffn.linear1 attains"),
    ({"found": UNKNOWN_GPU}, PASS, "no rated ridge of the device that was measured"),
    ({"found": UNKNOWN_GPU, "self_attn_q": each(0.3)}, FAIL, ""),
    ({"asked": "h200"}, SKIP, "the side of the ridge is not judged: the target is NVIDIA H200 SXM"),
    ({"asked": "h200", "self_attn_q": each(0.3)}, FAIL, "the side of the ridge is not judged"),
    # a measured ridge of 3120: GEMMs of 1650 FLOP/B are on the memory's side of it
    ({"bytes_s": 500 * 10**9}, FAIL, "self_attn.q is memory-bound, the rated ridge predicts compute"),
    ({"bytes_s": 3120 * 10**9}, PASS, ""),  # 500: cross attention, of 462 FLOP/B, lies near it
    ({"bytes_s": 1950 * 10**9}, FAIL, "cross_attn.flash is memory-bound, the rated ridge predicts compute"),  # 800
]  # fmt: skip
SC3_CPU = [
    ({}, PASS, ""),
    ({"self_attn_q": each(0.398)}, WARN_CPU, "self_attn.q attains 39.8 %"),
    ({"self_attn_q": each(0.4)}, INSUFFICIENT, ""),
    ({"self_attn_q": each(0.3), "change": only_q(noisy)}, WARN_CPU, ""),
    ({"self_attn_q": each(0.4), "ffn_linear1": each(0.1)}, INSUFFICIENT, "self_attn.q attains 40.0 %"),
    ({"self_attn_q": "no kernel"}, INCOMPLETE, "no time for self_attn.q"),
    ({"asked": "mi355x"}, SKIP, "the side of the ridge is not judged: the target is AMD Instinct MI355X"),
    ({"asked": "mi355x", "self_attn_q": each(0.3)}, WARN_CPU, "self_attn.q attains 30.0 %"),
    ({"bytes_s": 500 * 10**9}, PASS, ""),  # no rated ridge to be on the wrong side of
]  # fmt: skip


@pytest.mark.parametrize("more, status, words", SC3_GPU)
def test_sc3_on_a_gpu(run_of, more, status, words):
    c = judged(model_run(run_of, **more), 3)
    assert c.status == status and words in c.reason


@pytest.mark.parametrize("more, status, words", SC3_CPU)
def test_sc3_on_a_cpu_host(run_of, more, status, words):
    c = judged(model_run(run_of, kind="cpu", found=CPU, **more), 3)
    assert c.status == status and words in c.reason


def test_sc3_the_reasons_of_the_status_come_first(run_of):
    run = model_run(run_of, self_attn_q=ABSENT, self_attn_k=each(0.4), ffn_linear1=each(0.3))
    c = judged(run, 3)
    assert [re.match(r"(no time for )?\S+", x)[0] for x in c.reason.split("; ")] == [
        "ffn.linear1", "no time for self_attn.q", "self_attn.k"]  # fmt: skip


def test_sc3_launch_bound_operations_are_counted_and_not_judged(run_of):
    """Modulation of one token: far below 20 microseconds, and far from its roof."""
    slow = model_run(run_of, change=lambda records: [
        replace(r, samples_s=tuple(50 * s for s in r.samples_s)) if r.params["op"] == "time_embed" else r for r in records
    ])  # fmt: skip
    found = {r.op.name: r for r in roofline.ops(slow).rows}
    assert found["time_embed"].launch_bound and found["time_embed"].attains.median < 0.1
    c = judged(slow, 3)
    short = sum(r.launch_bound for r in found.values())
    figures = {f.what: f.value for f in c.figures}
    assert c.status == PASS and figures["launch-bound, not judged"] == short >= 1
    assert figures["operations judged"] == len(found) - short
    assert "time_embed" not in c.reason and not any("time_embed" in f.what for f in c.figures)


def test_sc3_operations_that_are_all_launch_bound_prove_nothing(run_of):
    c = judged(reconfigured(model_run(run_of), launch_bound_s=1.0), 3)
    assert c.status == INSUFFICIENT and c.reason == "no operation takes long enough to be judged"


def test_sc3_near_the_ridge_anywhere_in_its_interval_is_no_failure(run_of):
    """The ridge reaches from 800, where cross attention is wholly memory-bound, to 500, near which it lies."""
    def run(rates):
        every = made.ops(ESCHER, op_times(bytes_s=1.95e12)), gemm("roof", [PEAK] * 6), stream("copy", *[rates] * 3)
        return run_of([r for records in every for r in records], spec=ESCHER)

    assert judged(run([1.95e12] * 4 + [3.12e12] * 2), 3).status == PASS
    assert judged(run(six(1.95e12, 0.01)), 3).status == FAIL


@pytest.mark.parametrize(
    "roofs, chosen, status, words",
    [
        ((), ["ops"], SKIP, "no compute and no bandwidth roof in this run"),
        (("compute",), ["ops", "compute"], SKIP, "no bandwidth roof in this run"),
        ((), ["ops", "compute"], INCOMPLETE, "no compute and no bandwidth roof"),
        (("compute",), ["ops", "compute", "bandwidth"], INCOMPLETE, "no bandwidth roof"),
    ],
)
def test_sc3_without_roofs(run_of, roofs, chosen, status, words):
    records = [r for r in made.roofs(PEAK, BYTES_S) if r.family in roofs]
    c = judged(run_of([*records, *made.ops(TINY, op_times())], families=chosen), 3)
    assert (c.status, words in c.reason) == (status, True)


# --------------------------------------------------------------------------------------------- SC-4

SMALL_PEAK, SMALL_BYTES_S = 10**9, 5 * 10**6
PASS_FLOP = workload.pass_flop(TINY)


def pass_s(mfu: float) -> float:
    return PASS_FLOP / SMALL_PEAK / mfu


def blocks(seconds: float, samples: int = 4, count: int = 6) -> list[tuple[float, ...]]:
    return [(seconds,) * samples] * count


def e2e_run(run_of, eager, compiled, *more: Record, roofs: bool = True, change=list, **info):
    records = change(made.e2e(TINY, eager, compiled))
    return run_of([*records, *more, *(made.roofs(SMALL_PEAK, SMALL_BYTES_S) if roofs else ())], **info)


def at(mfu: float, **more):
    """Chunks of a pass at an MFU of the measured roof."""
    return blocks(pass_s(mfu), **more)


WHY = "torch.compile is unavailable: no mode compiled to a right result (see compile)"
SC4 = [  # eager, compiled, more, status on a GPU, on a CPU host, words
    (at(0.5), at(0.5), {}, PASS, PASS, "compiled is 0.0 points of MFU above eager (1.000 times as fast)"),
    (at(0.5), at(0.9), {}, PASS, PASS, "compiled is 40.0 points of MFU above eager"),
    (at(0.5), at(0.452), {}, PASS, PASS, "compiled is 4.8 points of MFU below eager"),
    (at(0.5), at(0.448), {}, FAIL, WARN_CPU, "compiled is 5.2 points of MFU below eager"),
    (at(0.5), at(0.4)[:5] + at(0.452)[:1], {}, PASS, PASS, ""),  # its interval is not wholly beyond
    (at(0.04), at(0.001), {}, PASS, PASS, "3.9 points"),  # there are no 5 points to lose
    (at(0.5, count=5), at(0.6, count=5), {}, INSUFFICIENT, INSUFFICIENT, "5 blocks are too few"),
    (at(0.5, count=5), at(0.1, count=5), {}, INSUFFICIENT, INSUFFICIENT, "5 blocks are too few"),
    (at(0.5), at(0.3), {"change": noisy}, INSUFFICIENT, WARN_CPU, ""),
    (at(0.5), at(0.3), {"change": lambda r: noisy(marked(r, device_state=THROTTLE))}, FAIL, WARN_CPU, ""),
    (at(0.5), WHY, {}, FAIL, SKIP, f"compiled: {WHY}"),
    (at(0.5), WRONG, {}, INCOMPLETE, INCOMPLETE, "compiled: wrong result"),
    (at(0.5), ABSENT, {}, INCOMPLETE, INCOMPLETE, "compiled: was not run"),  # killed while it compiled
    (at(0.5), at(0.5, samples=3), {}, INCOMPLETE, INCOMPLETE, "its chunks do not pair with the eager ones"),
    ("out of memory", "out of memory", {}, INCOMPLETE, INCOMPLETE, "eager: out of memory"),
    (at(0.5), at(0.5), {"roofs": False}, SKIP, SKIP, "no compute roof in this run, so there is no MFU"),
    (at(0.5), at(0.5), {"roofs": False, "families": ["compute", "e2e"]}, INCOMPLETE, INCOMPLETE, "no compute roof"),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
@pytest.mark.parametrize("eager, compiled, more, on_gpu, on_cpu, words", SC4)
def test_sc4(run_of, kind, eager, compiled, more, on_gpu, on_cpu, words):
    run = e2e_run(run_of, eager, compiled, found=MI355X if kind == "gpu" else CPU, **more)
    c = judged(run, 4)
    assert c.status == (on_gpu if kind == "gpu" else on_cpu) and words in c.reason


def test_sc4_a_pass_that_compiled_and_could_not_be_timed_is_no_failure_to_compile(run_of):
    item = e2e.case(TINY, "bf16", e2e.COMPILED, mode="default")
    late = Record("e2e", item.name, params=item.params, skipped="6 calls do not fit the time that is left")
    run = e2e_run(run_of, at(0.5), ABSENT, made.compile_try("default", "pass", 3e-3), late)
    c = judged(run, 4)
    assert c.status == INCOMPLETE and "do not fit" in c.reason


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
@pytest.mark.parametrize(
    "apart, blocks_, status", [(4.8, 6, PASS), (5.2, 6, WARN), (-20.0, 6, PASS), (20.0, 5, INSUFFICIENT)]
)
def test_sc4_the_sum_of_operations_above_eager_is_a_warning(run_of, kind, apart, blocks_, status):
    """The times of the operations add up to a pass at 60 % MFU."""
    table = workload.ops(TINY)
    share = pass_s(0.6) / sum(op.bytes * (1 if op.per_pass else TINY.depth) for op in table)

    def of(op, path):
        return op.bytes * share if path == DEFAULT or op.kind != "attention" else "not here"

    eager = at(0.6 - apart / 100, count=blocks_)
    run = e2e_run(run_of, eager, eager, *made.ops(TINY, of, kind), found=MI355X if kind == "gpu" else CPU)
    c = judged(run, 4)
    assert c.status == (WARN_CPU if (kind, status) == ("cpu", WARN) else status)
    assert ("points above eager, more than 5" in c.reason) == (status == WARN)


def test_sc4_reports_the_pilots_targets_and_never_gates_on_them(gpu):
    c = judged(gpu, 4)
    told = [f for f in c.figures if "basis pilot (its target" in f.what]
    assert len(told) == 3 and all(f.value < 0.9 for f in told) and c.status == PASS


# --------------------------------------------------------------------------------------------- SC-5


@pytest.mark.parametrize(
    "checked, status, words",
    [
        (Artefacts(("a", "b"), ()), PASS, "all 2 exist, open and are not empty (formats: none"),
        (Artefacts(("a", "b"), ("html", "pdf")), PASS, "(formats: html, pdf)"),
        (Artefacts(("a", "b"), (), missing=("b",)), INCOMPLETE, "missing: b"),
        (Artefacts(tuple("abcde"), (), missing=tuple("abcde")), INCOMPLETE, "missing: a, b, c and 2 more"),
        (Artefacts(("a", "b"), (), broken=("b (empty)",)), FAIL, "b (empty)"),
        (Artefacts(("a", "b"), (), missing=("a",), broken=("b (empty)",)), FAIL, "b (empty); missing: a"),
    ],
)
def test_sc5(run_of, checked, status, words):
    c = scorecard.judge(run_of(), checked).criterion("SC-5")
    assert c.status == status and words in c.reason
    whole = len(checked.required) - len(checked.missing) - len(checked.broken)
    assert [f.value for f in c.figures] == [len(checked.required), whole]


# --------------------------------------------------------------------------------------------- SC-6

GEMM, ATTENTION, BLOCK = 2.0**-8, 2.0**-7, 2.0**-6
MORE, LESS = 1.001, 0.999


def checked(family: str, check: str, ok: bool = True, params=None, **error) -> Record:
    return Record(family, "a case", params=params or {}, backend="made", error={"check": check, "ok": ok, **error})


def result(family: str, check: str, rel: float, params=None, limit: float = 1.0, **error) -> Record:
    """A check that its own family called right, with that relative Frobenius error."""
    return checked(family, check, params=params, rel_frobenius=rel, rel_frobenius_limit=limit, **error)


SC6 = [  # a result, depth, status, words
    (result("compute", "full", LESS * GEMM), 2, PASS, "all 1 checked results lie inside their bounds"),
    (result("compute", "full", MORE * GEMM), 2, INVALID, "a case: relative Frobenius error 0.0039, at most 0.0039"),
    (result("ops", "full", MORE * GEMM, {"op": "self_attn.q"}), 2, INVALID, "relative Frobenius"),
    (result("compute", "full", MORE * GEMM, {"op": "bmm"}), 2, INVALID, "relative Frobenius"),
    (result("compute", "full", 1.9 * GEMM, {"op": "fused"}, 2 * GEMM), 2, PASS, ""),
    (result("compute", "full", 2.1 * GEMM, {"op": "fused"}, 2 * GEMM), 2, INVALID, ""),
    (result("compute", "full", 7 * GEMM, {"reduced_precision": True}, 8 * GEMM), 2, PASS, ""),
    (result("compute", "full", 9 * GEMM, {"reduced_precision": True}, 8 * GEMM), 2, INVALID, ""),
    (result("compute", "full", 0.0, elementwise_ratio=1.0), 2, PASS, ""),
    (result("compute", "full", 0.0, elementwise_ratio=1.01), 2, INVALID, "an element is off by 1 times its bound"),
    (checked("compute", "freivalds", freivalds_ratio=1.0), 2, PASS, ""),
    (checked("compute", "freivalds", freivalds_ratio=1.5), 2, INVALID, "a row of the Freivalds check is off by 1.5 times"),
    (checked("bandwidth", "float64", elementwise_ratio=1.0), 2, PASS, ""),
    (checked("bandwidth", "float64", elementwise_ratio=3.0), 2, INVALID, "an element is off by 3 times"),
    (checked("ops", "exact"), 2, PASS, ""),
    (checked("ops", "exact", ok=False), 2, INVALID, "the exact check failed"),
    (result("ops", "rows", MORE * ATTENTION, limit=ATTENTION), 2, INVALID, ""),
    (result("ops", "attention", LESS * ATTENTION), 2, PASS, ""),
    (result("ops", "attention", MORE * ATTENTION), 2, INVALID, "at most 0.0078 is allowed"),
    (checked("ops", "attention", ok=False, rel_frobenius=None, rel_frobenius_limit=ATTENTION), 2, INVALID, "check failed"),
    (result("e2e", "compiled block", LESS * BLOCK), 40, PASS, ""),
    (result("e2e", "compiled block", MORE * BLOCK), 40, INVALID, "at most 0.016 is allowed"),
    (result("e2e", "compiled pass", LESS * BLOCK), 10, PASS, ""),
    (result("e2e", "compiled pass", MORE * BLOCK), 10, INVALID, ""),
    (result("e2e", "compiled pass", LESS * 2 * BLOCK), 40, PASS, ""),
    (result("e2e", "compiled pass", MORE * 2 * BLOCK), 40, INVALID, "at most 0.031 is allowed"),
    (result("e2e", "against eager", MORE * 2 * BLOCK), 40, INVALID, ""),
    (result("e2e", "branches", MORE * BLOCK, limit=BLOCK), 2, INVALID, ""),
]  # fmt: skip


@pytest.mark.parametrize("found", [MI355X, CPU])
@pytest.mark.parametrize("record, depth, status, words", SC6)
def test_sc6_wrong_is_invalid_on_any_machine(run_of, found, record, depth, status, words):
    c = judged(run_of([record], spec=replace(TINY, depth=depth), found=found), 6)
    assert c.status == status and words in c.reason


def test_sc6_is_not_excused_by_noise(run_of):
    assert judged(run_of(noisy([checked("ops", "exact", ok=False)])), 6).status == INVALID


@pytest.mark.parametrize(
    "chosen, status", [([], SKIP), (["environment"], SKIP), (["environment", "ops"], INCOMPLETE), (["compute"], INCOMPLETE)]
)
def test_sc6_with_nothing_checked(run_of, chosen, status):
    c = judged(run_of([Record("capacity", "blocks", value=1.0)], families=chosen), 6)
    assert (c.status, c.reason) == (status, "no result was checked")


def test_sc6_names_the_largest_share_of_a_bound_and_the_bound_of_this_depth(run_of):
    records = [result("ops", "attention", 0.004, limit=ATTENTION), result("compute", "full", 0.001, limit=GEMM)]
    c = judged(run_of(records, spec=replace(TINY, depth=40)), 6)
    assert c.figures[-1].what == "largest error over its bound: ops a case" and c.figures[-1].value == 0.004 * 128
    limits = {x.name: x.value for x in c.limits}
    assert limits["compiled_pass_rel_frobenius"] == 2 * BLOCK and len(limits) == len(c.limits) == 7


def test_the_configuration_and_the_checks_that_measured_have_one_bound(config):
    """Elementwise and Freivalds ratios are stored as shares of their bounds, so those cannot change afterwards."""
    assert config.threshold("gemm_elementwise_rel") == config.threshold("gemm_rel_frobenius") == checks.UNIT_ROUNDOFF["bf16"]
    assert config.threshold("gemm_sampled_rows_count") == checks.CHECK_ROWS
    for depth in (1, 10, 11, 40):
        deep = max(1.0, (depth / config.threshold("compiled_pass_depth_count")) ** 0.5)
        assert e2e.pass_limit(depth) == pytest.approx(config.threshold("compiled_pass_rel_frobenius") * deep)


# --------------------------------------------------------------------------------------------- SC-7, SC-10, SC-12


@pytest.mark.parametrize("number, family", [(7, "sustained"), (10, "stability"), (12, "fused")])
def test_a_family_that_nothing_judges_yet(run_of, number, family):
    def card(records=(), **more):
        return scorecard.judge(run_of(records, **more), WHOLE).criterion(f"SC-{number}")

    assert (card().status, card().reason) == (SKIP, f"family {family} was not run")
    assert card(families=[family]).status == INCOMPLETE
    c = card([Record(family, "x", value=1.0)])
    assert (c.status, c.reason) == (SKIP, f"this version does not judge family {family}")


# --------------------------------------------------------------------------------------------- SC-8


def varied(tmp_path: Path, kind: str, headlines: dict[str, list], run_id: str = "made", count: int = 3) -> None:
    data = {
        "schema": 1, "kind": kind, "cv_limit_frac": 0.5, "runs_needed": 1,
        "processes": [{"run_id": run_id if i == 0 else f"other-{i}", "iteration": 0, "created_utc": ""} for i in range(count)],
        "headlines": {k: {"label": k, "unit": "s", "values": v, "within": [None] * count} for k, v in headlines.items()},
    }  # fmt: skip
    (tmp_path / scorecard.VARIABILITY).write_text(json.dumps(data), "utf-8")


def cv(percent: float) -> list[float]:
    """Three values with that coefficient of variation."""
    return [1 - percent / 100, 1.0, 1 + percent / 100]


SC8 = [
    ("gpu", {"roof": cv(2.9)}, PASS, "the largest CV of 3 runs is 2.9 % (roof), at most 3 % is wanted"),
    ("gpu", {"roof": cv(3.1)}, FAIL, "3.1 % (roof)"),
    ("gpu", {"roof": cv(1), "plateau": cv(3.1)}, FAIL, "3.1 % (plateau)"),
    ("cpu", {"roof": cv(9.9)}, PASS, "at most 10 % is wanted"),
    ("cpu", {"roof": cv(10.1)}, WARN_CPU, "10.1 % (roof)"),
    ("gpu", {"roof": [1.0, 1.0]}, INSUFFICIENT, "2 fresh-process runs of roof, 3 are needed"),
    ("gpu", {"roof": cv(1), "mfu": [1.0, None, 1.0]}, INSUFFICIENT, "2 fresh-process runs of mfu"),
    ("gpu", {"roof": cv(1), "mfu": [1.0, None, None]}, INSUFFICIENT, "1 fresh-process runs of mfu"),
    ("gpu", {"roof": cv(4), "mfu": [1.0, None, 1.0]}, FAIL, "4.0 % (roof)"),
    ("cpu", {"roof": cv(11), "mfu": [1.0, None, 1.0]}, WARN_CPU, "11.0 % (roof)"),
    ("gpu", {"roof": [1.0, 2.0, None]}, INSUFFICIENT, "2 fresh-process runs"),  # far apart, and too few to say so
    ("gpu", {}, INSUFFICIENT, "3 fresh-process runs"),
]  # fmt: skip


@pytest.mark.parametrize("kind, headlines, status, words", SC8)
def test_sc8(run_of, tmp_path, kind, headlines, status, words):
    varied(tmp_path, kind, headlines, count=max(map(len, headlines.values()), default=3))
    run = replace(run_of(found=CPU if kind == "cpu" else MI355X), directory=tmp_path)
    c = judged(run, 8)
    assert c.status == status and words in c.reason


def test_sc8_without_repeated_runs(run_of, tmp_path):
    run = replace(run_of(), directory=tmp_path)
    assert judged(run, 8).status == SKIP and "escher variability --runs 3" in judged(run, 8).reason
    varied(tmp_path, "gpu", {"roof": cv(50)}, run_id="another")
    assert (judged(run, 8).status, judged(run, 8).reason) == (SKIP, "variability.json is of other runs")
    (tmp_path / scorecard.VARIABILITY).write_text("{", "utf-8")
    for text, words in (("{", "variability.json:1:2: no valid JSON"), ("[]", "the top level is wrong or missing")):
        (tmp_path / scorecard.VARIABILITY).write_text(text, "utf-8")
        told = scorecard._finished(run, 8, ())
        assert told.status == INCOMPLETE and words in told.reason


def repeated(gpu: derive.LoadedRun, *scales: float, **ends) -> derive.LoadedRun:
    """The sample in several iterations, the times of each multiplied; `ends` are families of status.json."""
    files = {}
    for family, f in gpu.files.items():
        items = [replace(r, iteration=i, samples_s=tuple(s * x for s in r.samples_s))
                 for i, x in enumerate(scales, start=1) for r in f.records]  # fmt: skip
        files[family] = replace(f, records=items)
    one = {"status": "ok", "message": "", "seconds": 1.0, "started_utc": ""}
    status = {f: {**one, "iterations": {str(i): one for i in range(1, len(scales) + 1)}} for f in gpu.files} | ends
    info = gpu.info | {"iterations": len(scales)}
    return derive.separated(replace(gpu, files=files, status=status, info=info, directory=Path("nowhere")))


def test_sc8_of_the_runs_own_iterations(gpu):
    c = judged(repeated(gpu, 1.0, 1.001, 0.999), 8)
    assert c.status == PASS and "CV of 3 runs is 0.1 %" in c.reason
    assert judged(repeated(gpu, 1.0, 1.1, 0.9), 8).status == FAIL
    two = judged(repeated(gpu, 1.0, 1.001), 8)
    assert two.status == INSUFFICIENT and "2 fresh-process runs" in two.reason


def test_sc8_is_judged_by_what_has_more_processes(gpu, tmp_path):
    run_id = gpu.info["run_id"]
    for count, scales, status in ((3, (1.0, 1.1), FAIL), (4, (1.0, 1.001, 0.999), FAIL), (3, (1.0, 1.001, 0.999), PASS)):
        varied(tmp_path, "gpu", {"kept": [1.0, 1.5, 2.0, 1.0][:count]}, run_id=run_id, count=count)
        c = judged(replace(repeated(gpu, *scales), directory=tmp_path), 8)
        assert c.status == status and ("(kept)" in c.reason) == (status == FAIL)
    varied(tmp_path, "gpu", {"kept": [1.0, 1.5, 2.0, 1.0]}, run_id="another", count=4)
    assert judged(replace(repeated(gpu, 1.0, 1.0), directory=tmp_path), 8).status == INSUFFICIENT
    assert judged(replace(gpu, directory=tmp_path), 8).reason == "variability.json is of other runs"
    (tmp_path / scorecard.VARIABILITY).write_text("{", "utf-8")
    assert scorecard._finished(replace(repeated(gpu, 1.0, 1.0, 1.0), directory=tmp_path), 8, ()).status == INCOMPLETE


def in_iteration(run: derive.LoadedRun, number: int, family: str, change) -> derive.LoadedRun:
    """Change the records of a family in one of the repeats."""
    def altered(part: derive.LoadedRun) -> derive.LoadedRun:
        file = part.files[family]
        return replace(part, files=part.files | {family: replace(file, records=[change(r) for r in file.records])})

    return replace(run, repeats=tuple(altered(r) if r.iteration == number else r for r in run.repeats))


def test_iterations_that_are_alike_are_judged_as_one(gpu):
    alone, three = (scorecard.judge(x, WHOLE) for x in (gpu, repeated(gpu, 1.0, 1.0, 1.0)))
    assert (three.verdict, three.implausible) == (alone.verdict, alone.implausible) == (GO, ())
    for c in alone.criteria:
        if c.sc not in ("SC-6", "SC-8", "SC-9"):  # more results, the spread of others, and the sample's logs
            assert three.criterion(c.sc) == c


def test_a_wrong_result_of_any_iteration_is_invalid(gpu):
    def wrong(r: Record) -> Record:
        if r.case != "square.8192" or not r.error:
            return r
        return replace(r, error=r.error | {"ok": False, "rel_frobenius": 0.5})

    card = scorecard.judge(in_iteration(repeated(gpu, 1.0, 1.0, 1.0), 3, "compute", wrong), WHOLE)
    c = card.criterion("SC-6")
    assert (c.status, card.verdict) == (INVALID, NO_GO)
    assert "iteration 3: compute square.8192: relative Frobenius error 0.5" in c.reason
    assert c.evidence and all(line.startswith("iteration 3: compute square.8192") for line in c.evidence)
    assert card.criterion("SC-1").status == PASS


def test_a_row_that_cannot_be_is_invalid_in_any_iteration(gpu):
    def faster(r: Record) -> Record:
        return replace(r, samples_s=tuple(s / 5 for s in r.samples_s)) if r.case == "square.8192" else r

    card = scorecard.judge(in_iteration(repeated(gpu, 1.0, 1.0, 1.0), 3, "compute", faster), WHOLE)
    c = card.criterion("SC-1")
    assert (c.status, card.verdict) == (INVALID, NO_GO) and c.reason.startswith("iteration 3: square.8192 computes")
    assert c.evidence and all(line.startswith("iteration 3: ") for line in c.evidence)
    assert {(i.iteration, i.level) for i in card.implausible} == {(3, plausibility.INVALID)}


def test_a_row_that_cannot_be_counts_where_the_first_iteration_lacks_its_family(gpu):
    run = repeated(gpu, 1.0, 1.0)
    first = replace(run, files={name: f for name, f in run.files.items() if name != "compute"})
    found = [replace(impossible("compute", reason="iteration 2: too fast"), iteration=2)]
    c = scorecard._finished(first, 1, found)
    assert c.status == INVALID and c.reason == "iteration 2: too fast" and c.evidence


def test_speed_is_judged_by_the_iteration_that_the_pages_show(gpu):
    run = repeated(gpu, 1.0, 3.0)
    assert scorecard.judge(run, WHOLE).criterion("SC-1").status == PASS


@pytest.mark.parametrize("kept", [True, False])
def test_a_family_that_failed_in_a_later_iteration_is_incomplete(gpu, kept):
    bad = {"status": "failed", "message": "out of memory", "seconds": 1.0, "started_utc": ""}
    ok = bad | {"status": "ok", "message": ""}
    ends = {"compute": {**bad, "iterations": {"1": ok, "2": ok, "3": bad}}}
    run = repeated(gpu, 1.0, 1.0, 1.0, **ends)
    if not kept:
        *others, last = run.repeats
        last = replace(last, files={name: f for name, f in last.files.items() if name != "compute"})
        run = replace(run, repeats=(*others, last))
    card = scorecard.judge(run, WHOLE)
    c = card.criterion("SC-1")
    assert (c.status, card.verdict, card.exit_status) == (INCOMPLETE, CONDITIONAL, 1)
    assert c.reason.startswith("iteration 3: family compute failed (out of memory)") and run.status["compute"] == ok


def test_an_iteration_that_was_never_begun_is_incomplete(gpu):
    run = repeated(gpu, 1.0, 1.0)
    run = derive.separated(replace(gpu, info=run.info | {"iterations": 2}, status={}))
    card = scorecard.judge(run, WHOLE)
    assert card.verdict == CONDITIONAL
    assert card.criterion("SC-2").reason.startswith("iteration 2: family bandwidth was chosen and left no records")


# --------------------------------------------------------------------------------------------- SC-9


def compared(status: str, unit: str = "B/s", case: str = "copy.1GiB", **more) -> Check:
    return Check("tool", case, status, "why", ratio=estimate([[1.0]] * 6), unit=unit, ours_case=case, **more)


def unmatched(status: str) -> Check:
    return Check("tool", "a log", status, "why")


SC9 = [  # checks, status on a GPU, on a CPU host, words
    ([compared("PASS")], PASS, PASS, "1 matched rows agree with tool"),
    ([compared("PASS"), unmatched("SKIP"), unmatched("UNSUPPORTED")], PASS, PASS, "1 matched rows agree"),
    ([compared("PASS"), unmatched("SKIP"), unmatched("UNPARSED")], WARN, WARN_CPU, "tool, a log: why (UNPARSED)"),
    ([compared("PASS"), unmatched("INVALID")], WARN, WARN_CPU, "tool, a log: why (INVALID)"),  # the tool's, not the device's
    ([compared("PASS"), compared("FAIL", case="x")], FAIL, FAIL, "tool, x: why"),  # on a CPU host no row is FAIL
    ([compared("WARN")], WARN, WARN, ""),
    ([compared("WARN_CPU")], WARN_CPU, WARN_CPU, ""),
    ([compared("INSUFFICIENT")], INSUFFICIENT, INSUFFICIENT, ""),
    ([compared("INSUFFICIENT", case="y"), compared("FAIL", case="x")], FAIL, FAIL, "tool, x: why, tool, y: why"),
    ([unmatched("FAIL")], FAIL, FAIL, "tool, a log: why"),  # the tool itself found errors
    ([compared("PASS"), unmatched("FAIL")], FAIL, FAIL, "tool, a log: why"),
    ([compared("PASS"), unmatched("WARN")], WARN, WARN_CPU, "tool, a log: why"),
    ([unmatched("SKIP")], SKIP, SKIP, "no matched row (tool: SKIP, why)"),
    ([unmatched("SKIP"), unmatched("UNSUPPORTED")], SKIP, SKIP, "no matched row"),
    ([unmatched("SKIP"), unmatched("UNPARSED")], INCOMPLETE, INCOMPLETE, "tool: UNPARSED, why"),
    ([unmatched("INCOMPLETE")], INCOMPLETE, INCOMPLETE, ""),
    ([], SKIP, SKIP, "no outside tool was run"),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
@pytest.mark.parametrize("found, on_gpu, on_cpu, words", SC9)
def test_sc9(run_of, monkeypatch, kind, found, on_gpu, on_cpu, words):
    monkeypatch.setattr(crosscheck, "checks", lambda run: found)
    c = judged(run_of(found=MI355X if kind == "gpu" else CPU), 9)
    assert c.status == (on_gpu if kind == "gpu" else on_cpu) and words in c.reason


THEIRS = {
    "compute": dict(op="gemm", m=8192, n=8192, k=8192, layout="NN", dtype="bf16", data="random"),
    "bandwidth": dict(op="copy", buffer_bytes=3 * GIB, counted="read+write"),
}


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
@pytest.mark.parametrize(
    "family, percent, status",
    [
        ("compute", -9.7, PASS),
        ("compute", -10.3, FAIL),
        ("compute", -10.0, INSUFFICIENT),
        ("compute", 9.7, PASS),
        ("compute", 10.3, WARN),
        ("bandwidth", -14.7, PASS),
        ("bandwidth", -15.3, FAIL),
        ("bandwidth", 14.7, PASS),
        ("bandwidth", 15.3, WARN),
    ],
)
def test_sc9_ours_so_many_percent_from_a_tools_reading(run_of, monkeypatch, kind, family, percent, status):
    rate, tool = 1e12, "rvs" if kind == "gpu" else "host_stream"
    ours = six(rate * (1 + percent / 100 - 1e-6 * (status == INSUFFICIENT)))
    unit = "FLOP/s" if family == "compute" else "B/s"
    reading = tools.reading(family, "its name", tool, str(rate), unit, "median", **THEIRS[family])
    monkeypatch.setattr(running, "logs", lambda run_dir: [running.Log(tool, "log", "a.log", imported=True)])
    monkeypatch.setattr(running, "parsed", lambda run_dir, log: tools.Parsed(tool, (reading,)))
    records = gemm("square.8192", ours) if family == "compute" else stream("copy", *[ours] * 3)
    c = judged(run_of(records, found=MI355X if kind == "gpu" else CPU), 9)
    assert c.status == (WARN_CPU if kind == "cpu" and status in (FAIL, WARN) else status)
    assert (f"ours is {abs(percent):.1f} % {'slower' if percent < 0 else 'faster'}" in c.reason) == (status != PASS)
    assert c.figures[0].value == 1 and c.figures[1].value == pytest.approx(1 + percent / 100, rel=1e-5)


# --------------------------------------------------------------------------------------------- SC-11

NEED = workload.needed_bytes(ESCHER)  # 41.6 GiB


def searched(given: int, total: int = 288 * GIB, ended: str = "refused", **flags) -> list[Record]:
    return [replace(r, params={**r.params, "ended": ended}, **(flags if r.case == "blocks" else {}))
            if r.case in ("blocks", "contiguous") else r for r in made.capacity(total, given)]  # fmt: skip


def in_pieces(given: int, largest: int, flags: tuple[str, ...] = ()) -> list[Record]:
    """All together enough, but no piece larger than that."""
    return [replace(r, value=float(largest)) if r.case == "contiguous" else r for r in searched(given, flags=flags)]


SC11 = [
    (searched(NEED), {}, PASS, "escher_14b_480p needs 41.6 GiB; 41.6 GiB measured, margin +0.0 GiB"),
    (searched(NEED - GIB), {}, FAIL, "margin -1.0 GiB, though its rated memory would hold it"),
    (searched(NEED - GIB), {"found": V100, "dtype": "fp16"}, WARN, "its rated memory is smaller than that"),
    (searched(NEED - GIB), {"found": UNKNOWN_GPU}, WARN, "no rated memory to hold it against"),
    (searched(NEED - GIB), {"found": CPU}, WARN, "no rated memory to hold it against"),
    (searched(NEED - GIB), {"asked": "h200"}, WARN, "the target is NVIDIA H200 SXM, another device was measured"),
    (searched(NEED), {"asked": "h200"}, PASS, ""),
    (searched(NEED - GIB, flags=("AT_LEAST",)), {}, INSUFFICIENT, "the search ended before it could tell"),
    (searched(NEED - GIB, 40 * GIB, flags=("AT_LEAST",)), {"found": CPU}, WARN, "of 40.0 GiB that there can be"),
    (searched(NEED, flags=("AT_LEAST",)), {}, PASS, "at least 41.6 GiB measured"),
    (in_pieces(NEED, GIB // 4), {}, FAIL, "largest tensor is 0.29 GiB, and one tensor got 0.25 GiB, though its rated"),
    ([r for r in in_pieces(NEED, GIB // 4, ("AT_LEAST",)) if r.case != "device.total"], {"found": CPU}, WARN, "0.25 GiB"),
    ([Record("capacity", "blocks", skipped="no memory at all")], {}, INCOMPLETE, "found no amount"),
]  # fmt: skip


@pytest.mark.parametrize("records, more, status, words", SC11)
def test_sc11(run_of, records, more, status, words):
    c = judged(run_of(records, spec=ESCHER, **more), 11)
    assert c.status == status and words in c.reason


def test_sc11_asks_for_the_whole_workload_and_shows_the_margin(run_of):
    c = judged(run_of(searched(NEED), spec=workload.fit(ESCHER, "cpu", 2**34)), 11)
    figures = {f.what: f.value for f in c.figures}
    assert figures["weights"] + figures["caches"] + figures["peak live activations"] == NEED
    assert (figures["margin"], figures["rated"]) == (0, 309220868096)


# --------------------------------------------------------------------------------------------- the guard, and how it ended

FAMILIES = {number: family for number, (_, _, family) in scorecard.TITLES.items() if family}


@pytest.fixture(scope="module")
def one_of_each() -> list[Record]:
    return [Record(family, "x", value=1.0, unit="B") for family in FAMILIES.values()]


def card_of(run, statuses=None, found=(), checked=WHOLE) -> scorecard.Scorecard:
    """The card of a run whose judges say what `statuses` has (SC number -> status; PASS)."""
    def judge(number):
        status = (statuses or {}).get(number, PASS)
        return lambda run, base: replace(base, status=status, reason=f"because {number}")

    judges = {number: judge(number) for number in scorecard.TITLES if number != 5}
    match (statuses or {}).get(5, PASS):
        case "FAIL":
            checked = replace(checked, broken=("run.json",))
        case "INCOMPLETE":
            checked = replace(checked, missing=("run.json",))
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(scorecard.JUDGES, judges))
        stack.enter_context(mock.patch.object(plausibility, "check", lambda run: list(found)))
        return scorecard.judge(run, checked)


def impossible(family: str, level: str = plausibility.INVALID, reason: str = "too fast") -> Implausible:
    return Implausible(family, "case", "case", "rate", 2.0, "B/s", 1.0, "limit", 1.0, level, "unknown", reason)


@pytest.mark.parametrize("number, family", [x for x in FAMILIES.items()])
def test_what_cannot_be_makes_its_familys_criterion_invalid(run_of, one_of_each, number, family):
    run = run_of(one_of_each)
    card = card_of(run, {number: WARN}, [impossible(family), impossible(family, reason="also")])
    assert [c.sc for c in card.criteria if c.status != PASS] == [f"SC-{number}"]
    assert (card.criterion(f"SC-{number}").status, card.verdict) == (INVALID, NO_GO)
    assert card.criterion(f"SC-{number}").reason == "too fast (and 1 more)"
    for level in (plausibility.NOTE, plausibility.NOISY):
        assert card_of(run, found=[impossible(family, level)]).verdict == GO


def test_what_cannot_be_in_a_family_without_a_criterion_counts_too(run_of, one_of_each):
    card = card_of(run_of(one_of_each), {3: FAIL, 6: INVALID}, [impossible("environment")])
    assert card.verdict == NO_GO and len(card.reasons) == 3
    assert [r.partition(",")[0] for r in card.reasons] == [
        "SC-6 Numerical correctness: INVALID", "Plausibility: INVALID", "SC-3 Operations against the roofline: FAIL"
    ]  # fmt: skip


ENDS = [
    ({"status": "failed", "message": "ValueError: no"}, "family ops failed (ValueError: no)"),
    ({"status": "timeout", "message": "not done after 300 s"}, "family ops ran out of time (not done after 300 s)"),
    ({"status": "died", "message": "the kernel was killed"}, "family ops died (the kernel was killed)"),
    ({"status": "interrupted", "message": "Ctrl-C"}, "family ops was interrupted (Ctrl-C)"),
    ({"status": "running", "message": ""}, "family ops was killed"),
    ({}, "family ops ended in a way that was not recorded"),
]


@pytest.mark.parametrize("end, words", [e for e in ENDS if e[0]])
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("status, after", [(PASS, INCOMPLETE), (WARN, INCOMPLETE), (FAIL, FAIL), (INVALID, INVALID)])
def test_a_family_that_did_not_end_well(run_of, one_of_each, end, words, kept, status, after):
    records = one_of_each if kept else [r for r in one_of_each if r.family != "ops"]
    run = replace(run_of(records, families=["ops", "e2e"]), status={"ops": end, "e2e": {"status": "ok"}})
    card = card_of(run, {3: status})
    c = card.criterion("SC-3")
    assert c.status == (after if kept else INCOMPLETE)
    assert card.exit_status == card.strict_exit_status == 1
    assert card.verdict == (NO_GO if c.status in (FAIL, INVALID) else CONDITIONAL)
    assert sum(words in reason for reason in card.reasons) == 1
    if c.status == INCOMPLETE:
        assert c.reason == words + ("; of what was kept: because 3" if kept else "; nothing was kept")


def test_a_family_without_a_criterion_that_did_not_end_well(run_of, one_of_each):
    run = run_of([*one_of_each, Record("environment", "x", value=1.0)], families=["environment", *FAMILIES.values()])
    assert card_of(run).verdict == GO
    well = {family: {"status": "ok"} for family in run.files}
    killed = replace(run, status={**well, "environment": {"status": "running"}})
    assert card_of(killed).reasons == ("family environment was killed",)
    cut = replace(run, files=run.files | {"environment": replace(run.files["environment"], truncated=True)})
    assert card_of(cut).reasons == ("the last record of family environment was cut off",)
    gone = replace(run, files={k: v for k, v in run.files.items() if k != "environment"})
    assert card_of(gone).reasons == ("family environment was chosen and left no records",)
    untold = replace(run, status={k: v for k, v in well.items() if k != "environment"})
    assert card_of(untold).reasons == ("how family environment ended was not recorded",)
    for bad in (killed, cut, gone, untold):
        assert (card_of(bad).verdict, card_of(bad).exit_status) == (CONDITIONAL, 1)


def test_a_family_that_was_not_chosen_is_a_skip(run_of, one_of_each):
    records = [r for r in one_of_each if r.family != "ops"]
    card = card_of(run_of(records, families=["compute", "bandwidth", "capacity", "e2e"]))
    c = card.criterion("SC-3")
    assert (c.status, c.reason) == (SKIP, "family ops was not run")
    assert (card.verdict, card.exit_status, card.strict_exit_status) == (CONDITIONAL, 0, 3)


# --------------------------------------------------------------------------------------------- the verdict

VERDICTS = [  # what is not PASS, verdict, exit status, with --strict
    ({}, GO, 0, 0),
    ({0: NA, 1: NA, 7: NA, 11: NA}, GO, 0, 0),
    ({7: SKIP, 8: SKIP, 9: SKIP, 10: SKIP, 12: SKIP}, GO, 0, 0),
    ({7: INSUFFICIENT, 8: WARN, 9: WARN_CPU, 11: WARN}, GO, 0, 0),
    ({1: SKIP}, CONDITIONAL, 0, 3),
    ({2: INSUFFICIENT}, CONDITIONAL, 0, 3),
    ({4: WARN}, CONDITIONAL, 0, 3),
    ({3: WARN_CPU}, GO, 0, 0),
    ({1: INCOMPLETE}, CONDITIONAL, 1, 1),
    ({5: INCOMPLETE}, CONDITIONAL, 1, 1),
    ({11: INCOMPLETE}, CONDITIONAL, 1, 1),
    ({11: INCOMPLETE, 2: WARN}, CONDITIONAL, 1, 1),
    ({1: FAIL}, NO_GO, 1, 1),
    ({5: FAIL}, NO_GO, 1, 1),
    ({6: INVALID}, NO_GO, 1, 1),
    ({8: FAIL}, NO_GO, 1, 1),
    ({12: INVALID}, NO_GO, 1, 1),
    ({7: FAIL, 1: INCOMPLETE, 2: WARN}, NO_GO, 1, 1),
]  # fmt: skip


@pytest.mark.parametrize("statuses, verdict, exit_status, strict", VERDICTS)
def test_the_verdict(run_of, one_of_each, statuses, verdict, exit_status, strict):
    card = card_of(run_of(one_of_each), statuses)
    assert (card.verdict, card.exit_status, card.strict_exit_status) == (verdict, exit_status, strict)
    assert bool(card.reasons) == (verdict != GO)


def test_the_gravest_reasons_come_first_and_each_names_its_criterion(run_of, one_of_each):
    statuses = {1: WARN, 2: INSUFFICIENT, 3: INCOMPLETE, 4: SKIP, 8: FAIL, 9: WARN, 12: INVALID}
    card = card_of(run_of(one_of_each), statuses)
    assert card.reasons == (
        "SC-12 Fused collective and GEMM: INVALID, because 12", "SC-8 Variability between runs: FAIL, because 8",
        "SC-3 Operations against the roofline: INCOMPLETE, because 3", "SC-2 Bandwidth roof: INSUFFICIENT, because 2",
        "SC-1 Compute roof: WARN, because 1", "SC-4 Model end to end: SKIP, because 4",
    )  # fmt: skip


def test_a_cpu_hosts_card_is_headed_by_what_was_measured(run_of, one_of_each):
    card = card_of(run_of(one_of_each, found=CPU))
    assert (card.criteria[0].sc, card.criteria[0].status, card.verdict) == (scorecard.HOST_CPU, NA, GO)
    assert "accepts no accelerator" in card.criteria[0].reason
    assert [c.sc for c in card.criteria[1:]] == [c.sc for c in card_of(run_of(one_of_each)).criteria]


def test_the_criteria_stand_in_their_order(gpu):
    assert [c.sc for c in scorecard.judge(gpu).criteria] == [f"SC-{n}" for n in range(13)]


RANK = {GO: 0, CONDITIONAL: 1, NO_GO: 2}
GATING = {n for n, (_, gating, _) in scorecard.TITLES.items() if gating}
some_statuses = st.fixed_dictionaries(
    {n: st.sampled_from((PASS, FAIL, INCOMPLETE) if n == 5 else STATUSES) for n in scorecard.TITLES}
)


@pytest.fixture(scope="module")
def tiny_run(one_of_each):
    """A run for properties, made without a fixture of a function."""
    made_here = derive.load(SAMPLES / "mi355x")
    files = {r.family: replace(made_here.files["capacity"], records=[r]) for r in one_of_each}
    return replace(made_here, files=files, info=made_here.info | {"families": list(files)}, status={})


@settings(max_examples=60, deadline=None)
@given(statuses=some_statuses)
def test_the_verdict_is_that_of_the_worst(tiny_run, statuses):
    card = card_of(tiny_run, statuses)
    here = set(statuses.values())
    open_ = {statuses[n] for n in GATING} & {SKIP, INSUFFICIENT, WARN}
    worst = NO_GO if here & {FAIL, INVALID} else CONDITIONAL if INCOMPLETE in here or open_ else GO
    assert card.verdict == worst
    assert {c.sc: c.status for c in card.criteria} == {f"SC-{n}": s for n, s in statuses.items()}
    assert card.exit_status == (1 if here & {FAIL, INVALID, INCOMPLETE} else 0)
    assert card.strict_exit_status == (card.exit_status or (0 if worst == GO else 3))
    named = [r.partition(" ")[0] for r in card.reasons]
    assert named == list(dict.fromkeys(named)) and (named == []) == (worst == GO)


@settings(max_examples=60, deadline=None)
@given(statuses=some_statuses, number=st.sampled_from(sorted(scorecard.TITLES)), bad=st.sampled_from([FAIL, INVALID]),
       family=st.sampled_from([*FAMILIES.values(), "environment"]))  # fmt: skip
def test_a_bad_row_more_never_improves_the_verdict(tiny_run, statuses, number, bad, family):
    before = card_of(tiny_run, statuses)
    more = card_of(tiny_run, {**statuses, number: FAIL if number == 5 else bad})
    for after in (more, card_of(tiny_run, statuses, [impossible(family)])):
        assert RANK[after.verdict] >= RANK[before.verdict] and after.verdict == NO_GO
        assert after.exit_status >= before.exit_status and after.strict_exit_status == 1
        assert len(after.reasons) >= 1


# --------------------------------------------------------------------------------------------- thresholds

CONFIGURED = [  # criterion, statuses before and after, what the configuration says instead
    (0, PASS, FAIL, {"calibration_drift_pct": 0.001}),
    (1, PASS, FAIL, {"roof_floor_frac": 0.7}),
    (1, PASS, NA, {"roof_floor_frac": None}),
    (1, PASS, WARN, {"best_square_frac": 0.99}),
    (1, PASS, WARN, {"converged_roof_frac": 0.0001}),
    (1, PASS, INSUFFICIENT, {"min_blocks_count": 7}),
    (2, PASS, FAIL, {"bandwidth_floor_frac": 0.8}),
    (2, PASS, INSUFFICIENT, {"plateau_spread_pct": 0.1}),
    (2, PASS, WARN, {"converged_roof_frac": 0.0001}),
    (2, PASS, INSUFFICIENT, {"min_blocks_count": 7}),
    (3, PASS, FAIL, {"attains_frac": 0.6}),
    (3, PASS, INSUFFICIENT, {"launch_bound_s": 1.0}),
    (3, PASS, INSUFFICIENT, {"min_blocks_count": 7}),
    (4, PASS, INSUFFICIENT, {"min_blocks_count": 7}),
    (6, PASS, INVALID, {"gemm_rel_frobenius": 0.001}),
    (6, PASS, INVALID, {"attention_rel_frobenius": 0.001}),
    (6, PASS, INVALID, {"compiled_block_rel_frobenius": 0.001}),
    (6, PASS, INVALID, {"compiled_pass_rel_frobenius": 0.004}),
    (6, PASS, PASS, {"compiled_pass_rel_frobenius": 0.006}),  # twice that at depth 40
    (6, PASS, INVALID, {"compiled_pass_rel_frobenius": 0.006, "compiled_pass_depth_count": 40}),
    (8, PASS, FAIL, {"cv_pct": 0.1}),
    (8, PASS, INSUFFICIENT, {"cv_runs_count": 4}),
    (9, PASS, WARN, {"cross_check_bandwidth_pct": 0.01}),
]


@pytest.mark.parametrize("number, before, after, values", CONFIGURED)
def test_a_threshold_comes_from_the_configuration_alone(gpu, number, before, after, values):
    assert judged(gpu, number).status == before
    c = judged(reconfigured(gpu, **values), number)
    assert c.status == after
    for x in c.limits:
        name = x.name.rpartition(": ")[2]
        if name in values and name != "compiled_pass_rel_frobenius":
            assert x.value == values[name]


@pytest.mark.parametrize(
    "values, records, number, before, after",
    [
        ({"mfu_pp": 2.0}, made.e2e(TINY, at(0.5), at(0.452)), 4, PASS, FAIL),
        ({"ridge_near_frac": 0.01}, made.ops(ESCHER, op_times(bytes_s=3.12e12)), 3, PASS, FAIL),
        ({"anchor_moved_frac": 0.3}, moved(gemm("roof", six(0.4 * RATED))), 1, INSUFFICIENT, FAIL),
        ({"noisy_ratio": 1.5}, gemm("roof", [0.1 * RATED] * 2 + [0.4 * RATED] * 5), 1, FAIL, FAIL),
    ],
)
def test_thresholds_that_the_sample_does_not_reach(run_of, values, records, number, before, after):
    family, roofs = records[-1].family, []
    if family == "e2e":
        roofs = made.roofs(SMALL_PEAK, SMALL_BYTES_S)
    elif family == "ops":
        roofs = made.roofs(PEAK, 3120 * 10**9)
    run = run_of([*records, *roofs], spec=ESCHER if family == "ops" else TINY)
    assert judged(run, number).status == before
    assert judged(reconfigured(run, **values), number).status == after


def test_every_limit_that_is_shown_has_its_value_a_source_and_a_date(sample):
    card = scorecard.judge(sample)
    shown = [x for c in card.criteria for x in c.limits]
    assert len(shown) > 15
    for x in shown:
        target, _, name = x.name.rpartition(": ")
        entry = sample.config.floor(target, name) if target else sample.config["thresholds"][name]
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", x.date) and x.date == entry["date"]
        assert len(x.source) > 5 and x.unit
        if name != "compiled_pass_rel_frobenius":  # that one is of the depth
            assert x.value == (entry["value"] if target else sample.config.threshold(name, sample.kind))


def test_a_limit_on_a_cpu_host_is_that_of_a_cpu_host(run_of):
    assert [x.value for x in judged(run_of(plateaus(), found=CPU), 2).limits if x.name == "plateau_spread_pct"] == [15.0]
    assert [x.value for x in judged(run_of(plateaus()), 2).limits if x.name == "plateau_spread_pct"] == [5.0]


# --------------------------------------------------------------------------------------------- whole runs


def statuses(card: scorecard.Scorecard) -> dict[str, str]:
    return {c.sc: c.status for c in card.criteria}


def bad(card: scorecard.Scorecard) -> list[str]:
    return [r for r in card.reasons if ": FAIL," in r or ": INVALID," in r]


def test_a_healthy_gpu_is_go():
    card = scorecard.judge(derive.load(SAMPLES / "mi355x"))
    assert (card.verdict, card.reasons, card.exit_status, card.strict_exit_status) == (GO, (), 0, 0)
    assert not any(c.evidence for c in card.criteria)


def test_a_healthy_cpu_host_exits_0():
    card = scorecard.judge(derive.load(SAMPLES / "cpu"))
    assert card.verdict != NO_GO and card.exit_status == 0 and bad(card) == []
    assert {c.status for c in card.criteria} & {FAIL, INVALID, INCOMPLETE} == set()


@pytest.mark.parametrize("seed, factor, jitter, level", [(1, 1.0, 0.4, 0.0), (2, 4.0, 0.1, 0.0), (3, 2.0, 1.0, 1.0)])
def test_a_cpu_host_that_is_noisier_and_slower_exits_0(sample_copy, seed, factor, jitter, level):
    run_dir, noise = sample_copy("cpu"), random.Random(seed)

    def change(r):
        block = factor * (1 + level * noise.random())
        if r.get("role") != "probe":
            r["samples_s"] = [s * block * (1 + jitter * noise.random()) for s in r.get("samples_s", ())]

    for family in ("compute", "bandwidth", "ops", "e2e"):
        selftest.lines(run_dir, family, change)
    card = scorecard.judge(derive.load(run_dir))
    assert bad(card) == [] and card.exit_status == 0 and card.verdict == CONDITIONAL
    assert statuses(card)["SC-1"] == WARN_CPU


BAD_COPY = selftest.slower("bandwidth", 0.3, selftest.named("copy.36862MiB"))


def wrong_gemm(r) -> None:
    if r["case"] == "ffn.linear2" and (r.get("error") or {}).get("check") == "full":
        r["error"] |= {"rel_frobenius": 0.3, "ok": False}


def test_a_throttled_family_a_wrong_result_and_an_impossible_bandwidth_are_three_reasons(sample_copy):
    run_dir = sample_copy("mi355x")
    selftest.slower("ops", 3.0, **THROTTLE)(run_dir)
    selftest.lines(run_dir, "compute", wrong_gemm)
    BAD_COPY(run_dir)
    card = scorecard.judge(derive.load(run_dir))
    assert (card.verdict, card.exit_status, card.strict_exit_status) == (NO_GO, 1, 1)
    assert bad(card) == list(card.reasons[:3])
    bandwidth, correct, ops = card.reasons[:3]
    assert bandwidth.startswith("SC-2 Bandwidth roof: INVALID, copy.36862MiB moves 19.7 TB/s") and "likely cause" in bandwidth
    assert correct.startswith("SC-6 Numerical correctness: INVALID, 1 of 294 checked results are wrong: compute ffn.linear2")
    assert ops.startswith("SC-3 Operations against the roofline: FAIL, ") and " of its roof, 40 % is wanted" in ops
    assert "the device throttled meanwhile (socket_thermal in " in ops
    found = {c.sc: "\n".join(c.evidence) for c in card.criteria}
    assert "throttle: socket_thermal" in found["SC-3"] and "clock: 1.2 GHz (median), lowest 1.2" in found["SC-3"]
    assert "power: 1400 W" in found["SC-3"] and "temperature: 104 °C" in found["SC-3"]
    assert re.search(r"anchor\.gemm: -6\d\.\d % since the roof was measured", found["SC-3"])
    assert re.search(r"anchor\.copy: steady, largest step \d\.\d % over 2 times", found["SC-3"])
    assert "noise: " in found["SC-3"] and "backend: torch, eager" in found["SC-3"]
    assert found["SC-6"].startswith("compute ffn.linear2: backend torch.mm, preferred BLAS hipBLASLt, error ")
    assert "rel_frobenius 0.3" in found["SC-6"]
    assert "no telemetry in this run" in found["SC-2"] and "anchor.copy: steady" in found["SC-2"]


def test_a_slow_family_without_telemetry_is_not_held_against_the_device(sample_copy):
    run_dir = sample_copy("mi355x")
    selftest.slower("ops", 3.0)(run_dir)
    card = scorecard.judge(derive.load(run_dir))
    assert (statuses(card)["SC-3"], card.verdict, card.exit_status) == (INSUFFICIENT, CONDITIONAL, 0)
    c = card.criterion("SC-3")
    assert "not held against the device" in c.reason and "clock, power, throttle: unknown, no telemetry in this run" in c.evidence


def only(card, before, *changed: str) -> None:
    """Every other criterion is what it was, each with one line that says why."""
    now, was = statuses(card), statuses(before)
    assert {sc for sc in now if now[sc] != was[sc]} == set(changed)
    assert all(c.reason and "\n" not in c.reason for c in card.criteria)


@pytest.fixture(scope="module")
def light_dir(tmp_path_factory) -> Path:
    return light(tmp_path_factory.mktemp("source") / "mi355x")


@pytest.fixture
def copy_of(light_dir, tmp_path) -> Path:
    return Path(shutil.copytree(light_dir, tmp_path / "run"))


@pytest.fixture(scope="module")
def healthy(light_dir) -> scorecard.Scorecard:
    return scorecard.judge(derive.load(light_dir))


def ended(run_dir: Path, family: str, status: str, message: str = "") -> None:
    selftest.json_file("status.json", lambda d: d.update({family: {"status": status, "message": message}}))(run_dir)


def test_a_missing_family(copy_of, healthy):
    (copy_of / "records" / "04_ops.jsonl").unlink()
    card = scorecard.judge(derive.load(copy_of))
    only(card, healthy, "SC-3", "SC-5")
    assert card.reasons == (
        "SC-3 Operations against the roofline: INCOMPLETE, family ops was chosen and left no records",
        "SC-5 Artefacts: INCOMPLETE, missing: records/04_ops.jsonl",
    )
    assert (card.verdict, card.exit_status) == (CONDITIONAL, 1)


def test_families_that_were_never_asked_for(copy_of, healthy):
    for name in ("04_ops", "05_e2e"):
        (copy_of / "records" / f"{name}.jsonl").unlink()
    selftest.json_file("run.json", lambda d: d.update(families=["environment", "compute", "bandwidth", "capacity"]))(copy_of)
    selftest.json_file("status.json", lambda d: [d.pop(x) for x in ("ops", "e2e")])(copy_of)
    card = scorecard.judge(derive.load(copy_of))
    only(card, healthy, "SC-3", "SC-4")
    assert (statuses(card)["SC-3"], statuses(card)["SC-4"], card.exit_status) == (SKIP, SKIP, 0)


def test_a_family_that_was_killed_while_it_compiled(copy_of, healthy):
    path = copy_of / "records" / "05_e2e.jsonl"
    lines = path.read_text("utf-8").splitlines(keepends=True)
    first = next(i for i, line in enumerate(lines) if '"compile"' in line)
    path.write_text("".join(lines[:first]) + lines[first][:40], "utf-8")
    ended(copy_of, "e2e", "running")
    card = scorecard.judge(derive.load(copy_of))
    only(card, healthy, "SC-4")
    assert card.criterion("SC-4").status == INCOMPLETE
    assert card.criterion("SC-4").reason.startswith("family e2e was killed; of what was kept: eager: ")
    assert (card.verdict, card.exit_status) == (CONDITIONAL, 1)


@pytest.mark.parametrize("family, sc", [("compute", "SC-1"), ("bandwidth", "SC-2"), ("capacity", "SC-11"), ("ops", "SC-3")])
def test_a_record_that_was_cut_off(copy_of, healthy, family, sc):
    [path] = (copy_of / "records").glob(f"*_{family}.jsonl")
    path.write_bytes(path.read_bytes()[:-9])
    card = scorecard.judge(derive.load(copy_of))
    only(card, healthy, sc)
    assert card.criterion(sc).status == INCOMPLETE and (card.verdict, card.exit_status) == (CONDITIONAL, 1)
    assert card.criterion(sc).reason.startswith(f"the last record of family {family} was cut off; of what was kept: ")


def test_a_cut_record_does_not_hide_a_failure(copy_of):
    selftest.slower("compute", 2.0)(copy_of)
    [path] = (copy_of / "records").glob("*_compute.jsonl")
    path.write_bytes(path.read_bytes()[:-9])
    card = scorecard.judge(derive.load(copy_of))
    assert statuses(card)["SC-1"] == FAIL and card.verdict == NO_GO
    assert "the last record of family compute was cut off" in card.reasons


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda text: text.replace('"schema": 1', '"schema": 0', 1).replace('"schema":1', '"schema":0', 1), "record schema 0"),
        (lambda text: text.replace("\n", "\n{broken\n", 1), "corrupt record"),
        (lambda text: "", "empty"),
    ],
)
def test_records_that_cannot_be_read_are_one_line(copy_of, damage, words):
    path = copy_of / "records" / "04_ops.jsonl"
    path.write_text(damage(path.read_text("utf-8")), "utf-8")
    with pytest.raises(RecordError) as raised:
        derive.load(copy_of)
    assert "04_ops.jsonl" in str(raised.value) and words in str(raised.value) and "\n" not in str(raised.value)


def test_a_workload_that_cannot_be_read_is_one_line(copy_of):
    selftest.json_file("run.json", lambda d: d["workload"].pop("hidden"))(copy_of)
    with pytest.raises(workload.WorkloadError, match="run.json: workload") as raised:
        scorecard.judge(derive.load(copy_of))
    assert "\n" not in str(raised.value)


def test_a_summary_of_other_runs_that_is_kept_here_judges_nothing(copy_of, healthy):
    selftest.json_file(scorecard.VARIABILITY, lambda d: d["processes"][0].update(run_id="another"))(copy_of)
    only(scorecard.judge(derive.load(copy_of)), healthy, "SC-8")


# --------------------------------------------------------------------------------------------- evidence and JSON


def test_evidence_stands_where_something_was_missed_and_nowhere_else(run_of):
    card = scorecard.judge(run_of([*made.around("compute", gemm("roof", six(0.4 * RATED))), *plateaus()]), WHOLE)
    assert {c.sc for c in card.criteria if c.evidence} == {"SC-1"}
    assert card.criterion("SC-1").evidence == (
        "anchor.gemm: steady, largest step 0.0 % over 2 times", "anchor.copy: steady, largest step 0.0 % over 2 times",
        "noise: 0 of 1 rows NOISY", "clock, power, throttle: unknown, no telemetry in this run", "backend: made",
    )  # fmt: skip


def test_evidence_of_wrong_results_names_backend_and_error(run_of):
    wrong = [replace(checked("ops", "exact", ok=False), case=f"op{i}", backend=None) for i in range(8)]
    card = scorecard.judge(run_of([*wrong, checked("ops", "exact")]), WHOLE)
    lines = card.criterion("SC-6").evidence
    assert len(lines) == 6 and lines[0] == "ops op0: backend unknown, error check exact, ok False"


def test_a_card_is_plain_json(sample):
    card = scorecard.judge(sample)
    data = json.loads(json.dumps(scorecard.to_json(card), allow_nan=False))
    assert (data["verdict"], data["exit_status"]) == (card.verdict, card.exit_status)
    assert [c["sc"] for c in data["criteria"]] == [c.sc for c in card.criteria]
    assert data["reasons"] == list(card.reasons) and len(data["implausible"]) == len(card.implausible)


def test_judging_twice_says_the_same(gpu):
    assert scorecard.judge(gpu) == scorecard.judge(gpu)


def test_summaries_are_read_as_they_are_written(gpu):
    assert compare.read_summary(json.loads((gpu.directory / scorecard.VARIABILITY).read_text("utf-8"))).runs_needed == 3
