"""The guard: a healthy run passes, each rule trips on one altered row and names its cause, and slower never looks worse."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import replace

import model_records
import pytest
from conftest import CPU, ESCHER, MI355X, SAMPLES, TINY, UNKNOWN_GPU
from hypothesis import given, settings
from hypothesis import strategies as st

from escher_kernels import bandwidth as family_bandwidth
from escher_kernels import compute as family_compute
from escher_kernels import workload
from escher_kernels.bandwidth import MIB, OPS
from escher_kernels.compute import gemm
from escher_kernels.records import Record
from escher_kernels.statistics import Estimate
from escher_kernels.timing import Case
from validation import derive, plausibility
from validation.plausibility import INVALID, NOISY, NOTE, check


def with_records(run, family, items, **parameters):
    """The run with other records in a family, and with more parameters in that family's header."""
    file = run.files[family]
    header = replace(file.run, parameters=file.run.parameters | parameters)
    return replace(run, files=run.files | {family: replace(file, run=header, records=list(items))})


def light(name):
    """A sample with a few of its search candidates, which are most of its rows."""
    run = derive.load(SAMPLES / name)
    kept = [r for r in run.records("compute") if r.role != "search" or re.search(r"\.(2048|8192)x\1x\1\.", r.case)]
    return with_records(run, "compute", kept)


def altered(run, family, case, role="case", times=1.0, params=None, **changes):
    """The run with one row's times multiplied by `times`, and other fields of its records changed."""
    items, found = [], False
    for r in run.records(family):
        if (r.case, r.role) == (case, role):
            found = True
            samples = {"samples_s": tuple(s * times for s in r.samples_s)}
            r = replace(r, **(samples | {"params": r.params | (params or {})} | changes))
        items.append(r)
    assert found, f"{family} has no {role} {case}"
    return with_records(run, family, items)


def of_row(found, family, case, role="case", what=None):
    return [x for x in found if (x.family, x.case, x.role) == (family, case, role) and what in (None, x.what)]


def one(run, family, case, role="case", what=None):
    """The only finding of a row."""
    [found] = of_row(check(run), family, case, role, what)
    return found


RUNS = {name: light(name) for name in ("mi355x", "cpu")}
FAMILIES = list(RUNS["mi355x"].files)


# ---- healthy runs ----


def test_a_healthy_sample_has_no_invalid_row(sample):
    levels = {x.level for x in check(sample)}
    assert INVALID not in levels
    assert sample.kind == "cpu" or levels <= {NOTE}


def test_a_sample_that_is_looked_at_has_rows_of_every_kind():
    """Else the test above could not fail."""
    known = {(family, r.role) for run in RUNS.values() for family in FAMILIES for r in run.records(family) if r.samples_s}
    assert known >= {("compute", "search"), ("compute", "pair"), ("bandwidth", "case"), ("ops", "case"), ("e2e", "case")}


# ---- one altered row of the GPU sample ----

ALTERED = [  # family, case, role, factor on its times, level, unit, words of the limit, cause
    ("compute", "square.8192", "case", 1 / 1.3, INVALID, "FLOP/s", "compute roof", plausibility.UNKNOWN),
    ("compute", "square.8192", "case", 1 / 1.05, NOTE, "FLOP/s", "compute roof", plausibility.UNKNOWN),
    ("compute", "square.8192", "case", 1 / 2, INVALID, "FLOP/s", "rated dense BF16 peak", plausibility.COUNTED),
    ("compute", "ffn.linear1", "case", 1 / 1.5, INVALID, "FLOP/s", "compute roof", plausibility.UNKNOWN),
    ("compute", "epilogue.fused", "pair", 1 / 1.6, INVALID, "FLOP/s", "compute roof", plausibility.UNKNOWN),
    ("compute", "roof", "case", 1 / 2, INVALID, "FLOP/s", "rated dense BF16 peak", plausibility.COUNTED),
    ("compute", "reduced.roof", "case", 1 / 2, INVALID, "FLOP/s", "rated dense BF16 peak", plausibility.COUNTED),
    ("compute", "search.8192x8192x8192.NN", "search", 1 / 2, INVALID, "FLOP/s", "rated", plausibility.COUNTED),
    ("ops", "anchor.gemm", "anchor", 1 / 2, INVALID, "FLOP/s", "rated", plausibility.COUNTED),
    ("ops", "anchor.copy", "anchor", 1 / 2, INVALID, "B/s", "rated bandwidth", plausibility.COUNTED),
    ("ops", "self_attn.q", "case", 1 / 1.5, INVALID, "FLOP/s", "compute roof", plausibility.UNKNOWN),
    ("ops", "norm.self", "case", 1 / 1.6, INVALID, "B/s", "fastest of copy, add, mul and triad", plausibility.UNKNOWN),
    ("ops", "norm.self", "case", 1 / 2, INVALID, "B/s", "rated bandwidth", plausibility.COUNTED),
    ("ops", "time_proj", "case", 1 / 1.35, INVALID, "B/s", "sum and fill", plausibility.UNKNOWN),
    ("bandwidth", "copy.18431MiB", "case", 1 / 1.2, INVALID, "B/s", "fastest of copy, add,", plausibility.UNKNOWN),
    ("bandwidth", "copy.18431MiB", "case", 1 / 1.5, INVALID, "B/s", "rated bandwidth", plausibility.COUNTED),
    ("bandwidth", "copy.64MiB", "case", 1 / 1.5, INVALID, "B/s", "fastest of copy, add,", plausibility.UNKNOWN),
    ("bandwidth", "sum.18431MiB", "case", 1 / 1.1, INVALID, "B/s", "plateau of sum", plausibility.UNKNOWN),
    ("bandwidth", "fill.24574MiB", "case", 1 / 1.08, INVALID, "B/s", "plateau of fill", plausibility.UNKNOWN),
    ("bandwidth", "strided.2", "case", 1 / 2.5, INVALID, "B/s", "fastest of copy, add,", plausibility.UNKNOWN),
    ("bandwidth", "host.to_device.pinned.256MiB", "case", 1 / 1.3, INVALID, "B/s", "PCIe Gen5 x16", plausibility.COUNTED),
    ("bandwidth", "host.from_device.pinned.64MiB", "case", 1 / 120, INVALID, "B/s", "PCIe Gen5 x16", plausibility.COUNTED),
]


@pytest.mark.parametrize("family, case, role, times, level, unit, limit, cause", ALTERED)
def test_a_row_above_its_limit_is_found_and_named(family, case, role, times, level, unit, limit, cause):
    run = RUNS["mi355x"]
    found = one(altered(run, family, case, role, times), family, case, role)
    assert (found.level, found.unit, found.cause) == (level, unit, cause)
    assert limit in found.limit_name and found.limit_name in found.reason
    assert isinstance(found.value, Estimate)
    assert found.excess_frac == pytest.approx(found.value.median / found.limit - 1, rel=1e-6)
    assert found.reason.startswith(f"{case} ") and f"likely cause: {cause}" in found.reason


HEALTHY = [  # family, case, role, factor on its times: still no finding on that row
    ("compute", "search.8192x8192x8192.NN", "search", 1 / 1.3),  # above the roof, but brief
    ("compute", "anchor.gemm", "warmup", 1 / 1.3),
    ("ops", "anchor.gemm", "anchor", 1 / 1.3),
    ("compute", "roof", "case", 1 / 1.3),  # it is the limit, and below the rated peak
    ("compute", "reduced.roof", "case", 1 / 1.3),  # may round its sums
    ("compute", "time_proj", "case", 1 / 3),  # its bytes come from caches, and nobody calls them a bandwidth
    ("bandwidth", "cache.64MiB", "case", 1 / 4),  # warm
    ("ops", "time_proj", "case", 1 / 1.2),  # mostly reads: below the plateau of sum, though above copy's
]


@pytest.mark.parametrize("family, case, role, times", HEALTHY)
def test_a_row_that_may_be_that_fast_is_no_finding(family, case, role, times):
    run = altered(RUNS["mi355x"], family, case, role, times)
    assert of_row(check(run), family, case, role) == []


def test_the_pass_is_held_against_its_flop_over_the_roof():
    found = one(altered(RUNS["mi355x"], "e2e", "compiled", times=1 / 1.6), "e2e", "compiled")
    roof = derive.compute(RUNS["mi355x"]).roof.flop_s.median
    assert (found.level, found.what, found.unit) == (INVALID, plausibility.PASS, "s")
    assert found.limit == pytest.approx(workload.pass_flop(ESCHER) / roof)
    assert found.excess_frac == pytest.approx(found.limit / found.value.median - 1, rel=1e-6)
    assert "a pass, and its FLOP take" in found.reason


def test_a_row_is_not_part_of_the_limit_it_is_held_against():
    """Twice as fast at one size: the plateau's median stays, and that row is measured by the other two."""
    run = altered(RUNS["mi355x"], "bandwidth", "sum.18431MiB", times=1 / 1.1)
    others = [r.bytes_s.median for r in derive.bandwidth(run).rows if r.case in ("sum.24574MiB", "sum.36862MiB")]
    assert one(run, "bandwidth", "sum.18431MiB").limit == max(others)
    assert {x.case for x in check(run)} == {"sum.18431MiB"}


def test_every_size_above_the_rated_bandwidth_is_found_although_they_are_the_limit():
    run = RUNS["mi355x"]
    for r in derive.bandwidth(run).rows:
        if r.params["op"] == "copy" and r.params.get("plateau"):
            run = altered(run, "bandwidth", r.case, times=1 / 1.5)
    cases = {x.case for x in check(run) if x.level == INVALID and "rated" in x.limit_name}
    assert cases == {"copy.18431MiB", "copy.24574MiB", "copy.36862MiB"}


# ---- causes ----


def test_cold_rows_whose_operands_fit_the_caches_are_named():
    run = altered(RUNS["mi355x"], "bandwidth", "copy.64MiB", times=1 / 1.5, params={"operand_sets": 2})
    found = one(run, "bandwidth", "copy.64MiB")
    assert (found.level, found.cause) == (INVALID, plausibility.CACHES)
    assert "as all operands are 256 MiB, the last-level caches 256 MiB" in found.reason
    one_more = altered(run, "bandwidth", "copy.64MiB", params={"operand_sets": 3})
    assert one(one_more, "bandwidth", "copy.64MiB").cause == plausibility.UNKNOWN


def test_a_row_that_says_it_is_not_cold_is_a_note():
    run = altered(RUNS["mi355x"], "ops", "norm.self", times=1 / 1.6, flags=("NOT_COLD",))
    found = one(run, "ops", "norm.self")
    assert (found.level, found.cause) == (NOTE, plausibility.CACHES)
    assert "says itself" in found.reason


def test_anchors_that_were_faster_around_the_row_tell_of_a_slower_roof():
    run = altered(RUNS["mi355x"], "ops", "self_attn.q", times=1 / 1.6)
    run = altered(run, "ops", "anchor.gemm", "anchor", times=1 / 1.2)
    found = one(run, "ops", "self_attn.q")
    assert (found.level, found.cause) == (INVALID, plausibility.SLOWER)
    assert re.search(r"anchor.gemm ran 20.\d % faster in family ops than around the limit", found.reason)
    slower_here = altered(run, "ops", "anchor.gemm", "anchor", times=1.5)
    assert one(slower_here, "ops", "self_attn.q").cause == plausibility.UNKNOWN


def test_an_anchor_that_moved_while_the_limit_was_measured_is_named():
    run = altered(RUNS["mi355x"], "bandwidth", "strided.2", times=1 / 2.5)
    items = run.records("bandwidth")
    last = max(i for i, r in enumerate(items) if r.case == "anchor.copy")
    moved = [replace(r, samples_s=tuple(s * 1.3 for s in r.samples_s)) if i == last else r for i, r in enumerate(items)]
    found = one(with_records(run, "bandwidth", moved), "bandwidth", "strided.2")
    assert found.cause == plausibility.SLOWER and "anchor.copy moved by 29" in found.reason


def test_a_search_that_ended_early_is_named():
    run = altered(RUNS["mi355x"], "compute", "square.8192", times=1 / 1.3)
    run = altered(run, "compute", "roof", params={"search_ended": "stopped in round 1 after 6 s, its share of the budget"})
    found = one(run, "compute", "square.8192")
    assert found.cause == plausibility.SEARCH and "stopped in round 1" in found.reason


# ---- CPU hosts, by hand ----

PROBED = 3 * model_records.PEAK


def linear(rate, dtype="bf16"):
    return model_records.records_of(Case("op", {"dtype": dtype}, flop=10**12), "ops", 10**12 / rate, "made")


def stream(case, rate, role="case", **params):
    item = Case(case, {"op": "copy", "dtype": "fp32", **params}, bytes_moved=10**9, cache="cold", role=role)
    return model_records.records_of(item, "bandwidth", 10**9 / rate, "made")


@pytest.mark.parametrize("times, level", [(1.2, NOISY), (1.04, NOTE), (1.0, None), (2.9, NOISY), (3.3, INVALID)])
def test_a_cpu_rate_is_noisy_up_to_the_probed_peak(made_run, times, level):
    run = made_run([*model_records.roofs(probed=PROBED), *linear(times * model_records.PEAK)])
    assert [x.level for x in check(run)] == ([level] if level else [])
    if level == INVALID:
        found = one(run, "ops", "op")
        assert (found.limit, found.cause) == (PROBED, plausibility.COUNTED_CPU) and "probed peak" in found.limit_name


@pytest.mark.parametrize("times, level", [(1.2, INVALID), (1.04, NOTE), (1.0, None)])
def test_a_gpu_that_no_profile_knows_is_held_against_its_roof(made_run, times, level):
    run = made_run([*model_records.roofs(), *linear(times * model_records.PEAK)], UNKNOWN_GPU)
    assert [x.level for x in check(run)] == ([level] if level else [])


def test_a_dtype_is_held_against_its_own_limits_alone(made_run):
    fast = 2 * model_records.PEAK  # of a roof in BF16; rated are 2.5e15 in BF16, 1.6e14 in FP32
    assert check(made_run([*model_records.roofs(), *linear(fast, "fp16")], UNKNOWN_GPU)) == []
    [found] = check(made_run([*model_records.roofs(), *linear(fast, "fp32")], MI355X))
    assert found.limit_name == "rated dense FP32 peak of AMD Instinct MI355X"
    assert check(made_run([*model_records.roofs(probed=PROBED), *linear(9 * PROBED, "fp16")])) == []  # nothing was probed


def test_rated_figures_of_a_target_that_is_another_device_are_no_limit(made_run):
    rows = [*linear(10**16), *stream("copy.64MiB", 10**13)]
    assert [x.limit_name for x in check(made_run(rows, MI355X))] == [
        "rated dense BF16 peak of AMD Instinct MI355X", "rated bandwidth of AMD Instinct MI355X"
    ]  # fmt: skip
    assert check(made_run(rows, MI355X, asked="h100_sxm")) == []


def test_cpu_bandwidth_is_noisy_at_most_unless_the_caches_hold_it(made_run):
    fast = stream("copy.4MiB", 1.5 * model_records.RATE, operand_sets=10)
    records = [*model_records.roofs(), *fast]
    assert one(made_run(records), "bandwidth", "copy.4MiB").level == NOISY
    for llc, level, cause in ((10**10, INVALID, plausibility.CACHES), (10**10 - 1, NOISY, plausibility.UNKNOWN)):
        run = made_run(records)
        found = one(with_records(run, "bandwidth", run.records("bandwidth"), llc_bytes=llc), "bandwidth", "copy.4MiB")
        assert (found.level, found.cause) == (level, cause)


@pytest.mark.parametrize("case, times, found", [
    ("stream.plain", 1.4, True), ("stream.streaming", 1.4, False), ("stream.streaming", 1.7, True)
])  # fmt: skip
def test_streaming_stores_are_allowed_the_traffic_of_ordinary_ones(made_run, case, times, found):
    """An ordinary copy of two counted streams moves three, so a copy past the caches can be half as fast again."""
    run = made_run([*model_records.roofs(), *stream(case, times * model_records.RATE, "pair")])
    assert [x.level for x in check(run)] == [NOISY] * found


def test_a_straddling_interval_is_a_note(made_run):
    slow, fast = 1 / model_records.PEAK, 1 / (1.5 * model_records.PEAK)
    item = Case("op", {"dtype": "bf16"}, flop=1)
    rows = model_records.records_of(item, "ops", [slow, fast, fast, fast, fast, fast], "made")
    found = one(made_run([*model_records.roofs(), *rows], MI355X), "ops", "op")
    assert found.level == NOTE and found.excess_frac == pytest.approx(0.5)
    assert "the interval of that ratio begins at 1.00" in found.reason
    rows = model_records.records_of(item, "ops", [fast] * 6, "made")
    assert one(made_run([*model_records.roofs(), *rows], MI355X), "ops", "op").level == INVALID


def test_two_equal_rates_that_exceed_each_other_by_turns_are_no_finding(made_run):
    around = [1 / (model_records.PEAK * f) for f in (0.99, 1.0, 1.01, 1.02, 1.03, 1.02)]
    rows = model_records.records_of(Case("op", {"dtype": "bf16"}, flop=1), "ops", around, "made")
    assert check(made_run([*model_records.roofs(), *rows], MI355X)) == []


# ---- the pass ----


def memory_bound_run(made_run, times, llc, found=MI355X):
    """A pass of few tokens, at `times` the time that its compulsory bytes need."""
    spec = replace(ESCHER, depth=2, query_tokens=3, window_tokens=12, time_tokens=3, text_tokens=5, pilot=None)
    d, f = spec.hidden, spec.ffn
    block = 6 * d * d + 2 * d * f + 2 * (spec.window_tokens + spec.text_tokens) * d  # self, cross q and o, FFN, caches
    moved = 2 * (2 * block + spec.time_frequency * d + 7 * d * d) - llc
    seconds = times * moved / model_records.RATE
    items = [*model_records.roofs(), *model_records.e2e(spec, seconds, seconds)]
    run = made_run(items, found, workload=spec.to_json())
    return with_records(run, "e2e", run.records("e2e"), llc_bytes=llc), moved


@pytest.mark.parametrize("found, level", [(MI355X, INVALID), (UNKNOWN_GPU, INVALID), (CPU, NOISY)])
def test_a_pass_cannot_be_faster_than_what_it_must_read(made_run, found, level):
    assert check(memory_bound_run(made_run, 1.0, 10**8, UNKNOWN_GPU)[0]) == []
    times = 0.9 if found.kind != "cpu" else 0.6  # a CPU's plateau of copy moves three streams for two counted
    run, moved = memory_bound_run(made_run, times, 10**8, found)
    finding = one(run, "e2e", "eager")
    speed = model_records.RATE * (1.5 if found.kind == "cpu" else 1)
    assert (finding.level, finding.what) == (level, plausibility.PASS)
    assert finding.limit == pytest.approx(moved / speed)
    assert "what it must read takes" in finding.reason


def test_a_pass_whose_weights_the_caches_hold_has_no_compulsory_bytes(made_run):
    run, _ = memory_bound_run(made_run, 0.01, 10**8)
    huge = with_records(run, "e2e", run.records("e2e"), llc_bytes=10**12)
    assert all("must read" not in x.limit_name for x in check(huge))
    assert any("must read" in x.limit_name for x in check(run))


# ---- sweeps ----


def squares(seconds, sizes=family_compute.SQUARES["gpu"]):
    return [
        r for n in sizes for r in model_records.records_of(gemm(f"square.{n}", n, n, n), "compute", seconds(n), "made")
    ]


def growth(run):
    return [x for x in check(run) if x.what == plausibility.GROWTH]


def test_a_flat_sweep_is_an_asynchronous_call(made_run):
    """On a device that nothing is known of: neither a roof nor a rated peak would tell."""
    [found] = growth(made_run(squares(lambda n: 8e-6), UNKNOWN_GPU))
    assert (found.level, found.cause, found.case) == (INVALID, plausibility.ASYNCHRONOUS, "square.32768")
    assert found.value.median == pytest.approx(1.0) and found.excess_frac is None
    assert "from square.12288 to square.32768 the work grows 19.0-fold" in found.reason


def test_the_rate_that_follows_from_a_flat_sweep_has_the_same_cause(made_run):
    run = made_run([*model_records.roofs(), *squares(lambda n: 5e-3)], MI355X)
    rate = one(run, "compute", "square.32768", what=plausibility.COMPUTE)
    assert (rate.level, rate.cause) == (INVALID, plausibility.ASYNCHRONOUS)


def test_a_constant_cost_of_every_call_is_found(made_run):
    [found] = growth(made_run(squares(lambda n: 0.6), MI355X))
    assert (found.level, found.cause) == (INVALID, plausibility.OVERHEAD)


@pytest.mark.parametrize("op", ["copy", "host_to_device"])
def test_each_operation_of_the_bandwidth_family_is_a_sweep(op):
    run = RUNS["mi355x"]
    rows = [r for r in (*derive.bandwidth(run).rows, *derive.bandwidth(run).host) if r.params["op"] == op]
    for r in rows:
        run = altered(run, "bandwidth", r.case, times=0.02 / r.time_s.median)
    assert {x.cause for x in growth(run)} == {plausibility.OVERHEAD}
    assert len(growth(run)) == (2 if op == "host_to_device" else 1)  # pinned and pageable


def test_one_collapsed_size_is_no_flat_sweep(made_run):
    healthy = {n: 2 * n**3 / 1.5e15 for n in family_compute.SQUARES["gpu"]}
    for slow in healthy:
        assert growth(made_run(squares(lambda n, slow=slow: healthy[n] * (30 if n == slow else 1)), MI355X)) == []


@pytest.mark.parametrize("launch_s, flat", [(1e-5, False), (3e-4, False), (2e-3, True)])
def test_small_sizes_may_all_take_the_time_of_a_launch(made_run, launch_s, flat):
    """The largest was left out; a device that waits for the host takes one time for all. No launch takes 2 ms."""
    run = made_run(squares(lambda n: max(launch_s, 2 * n**3 / 2e16), (1024, 1536, 2048)), MI355X)
    assert bool(growth(run)) is flat


def test_a_sweep_is_flat_only_where_its_whole_interval_is(made_run):
    noisy = [0.6, 0.6, 0.6, 0.6, 0.6, 0.8]
    assert growth(made_run(squares(lambda n: noisy if n == 32768 else 0.6), MI355X)) == []


@settings(max_examples=120, deadline=None)
@given(
    sizes=st.lists(st.sampled_from(family_compute.SQUARES["gpu"]), min_size=2, unique=True),
    launch_s=st.floats(1e-6, 5e-4),
    speed=st.floats(0.02, 0.95),
    overlapped=st.booleans(),
    noise=st.lists(st.floats(0.98, 1.02), min_size=6, max_size=6),
    known=st.booleans(),
)
def test_a_healthy_sweep_is_never_flat(sizes, launch_s, speed, overlapped, noise, known):
    """However long handing a call over takes, whether it overlaps with the work, and whichever sizes were left."""
    def seconds(n):
        work_s = 2 * n**3 / (2.5166e15 * speed)
        return [(max(launch_s, work_s) if overlapped else launch_s + work_s) * x for x in noise]

    config = RUNS["mi355x"].config
    run = replace(RUNS["mi355x"], files={"compute": RUNS["mi355x"].files["compute"]}, config=config)
    if not known:
        run = replace(run, selection=replace(run.selection, profile=None, found_profile=None, same_device=False))
    assert growth(with_records(run, "compute", squares(seconds, sizes))) == []


# ---- zero ----


@pytest.mark.parametrize("samples, found", [((0.0, 0.0), True), ((-1e-6, 0.0, 1e-3), True), ((-1e-6, 1e-3, 1e-3), False)])
def test_a_block_without_a_positive_median_is_found(samples, found):
    run = altered(RUNS["mi355x"], "compute", "square.1024", samples_s=samples)
    assert [x.what for x in of_row(check(run), "compute", "square.1024") if x.what == plausibility.TIME] == [
        plausibility.TIME
    ] * found


def test_a_warm_row_is_exempt():
    run = altered(RUNS["mi355x"], "bandwidth", "cache.64MiB", samples_s=(0.0, 0.0))
    assert check(run) == [] and check(altered(run, "bandwidth", "cache.64MiB", cache="cold"))


def test_zero_is_told_with_its_blocks():
    items = RUNS["mi355x"].records("ops")
    first = next(i for i, r in enumerate(items) if r.case == "norm.self" and r.samples_s)
    items = [replace(r, samples_s=(0.0,)) if i == first else r for i, r in enumerate(items)]
    found = one(with_records(RUNS["mi355x"], "ops", items), "ops", "norm.self")
    assert (found.level, found.cause, found.value, found.excess_frac) == (INVALID, plausibility.TIMER, 0.0, None)
    assert "no positive time in 1 of 6 blocks" in found.reason


def test_what_declares_no_work_may_take_no_time():
    run = altered(RUNS["mi355x"], "environment", "event.empty_pair", samples_s=(0.0, 0.0))
    assert check(run) == []


# ---- capacity ----


@pytest.mark.parametrize("given_frac, level", [(1.0, None), (1.04, NOTE), (1.2, INVALID)])
def test_more_memory_than_there_is(made_run, given_frac, level):
    run = made_run(model_records.capacity(2**38, int(given_frac * 2**38)), MI355X)
    found = [x for x in check(run) if x.case in ("contiguous", "blocks", "device.free")]
    assert [x.level for x in found] == ([level] * 3 if level else [])
    if level:
        assert {x.cause for x in found} == {plausibility.GRANTED} and {x.limit for x in found} == {2.0**38}
        assert "times all memory of the device (256 GiB)" in found[0].reason


def test_without_the_total_no_amount_is_judged(made_run):
    items = [r for r in model_records.capacity(2**30, 2**38) if r.case != "device.total"]
    assert check(made_run(items, MI355X)) == []


# ---- sentences and order ----


def test_a_reason_is_one_sentence_with_figures_in_a_readers_units(made_run):
    run = made_run([*model_records.roofs(), *stream("copy.64MiB", 1.572 * model_records.RATE)], UNKNOWN_GPU)
    assert one(run, "bandwidth", "copy.64MiB").reason == (
        "copy.64MiB moves 7.86 TB/s, 1.57 times the fastest of copy, add, mul and triad (5.00 TB/s): impossible; "
        "likely cause: unknown."
    )


@pytest.mark.parametrize("value, unit, text", [
    (9.31e12, "B/s", "9.31 TB/s"), (5.67e10, "B/s", "56.7 GB/s"), (1.5634e15, "FLOP/s", "1,560 TFLOP/s"),
    (7.8e11, "FLOP/s", "0.780 TFLOP/s"), (0.0, "s", "0 s"), (-1.78e-3, "s", "-1.78 ms"), (8e-6, "s", "8.00 µs"),
    (2**38, "B", "256 GiB"), (12.0, "", "12.0"),
])  # fmt: skip
def test_figures(value, unit, text):
    assert plausibility._say(value, unit) == text


def test_the_gravest_come_first(made_run):
    rows = [*linear(1.04 * model_records.PEAK), *stream("copy.4MiB", 1.2 * model_records.RATE)]
    rows += stream("copy.8MiB", 1.5 * model_records.RATE)
    found = check(made_run([*model_records.roofs(), *rows], UNKNOWN_GPU))
    assert [(x.case, x.level) for x in found] == [("copy.8MiB", INVALID), ("copy.4MiB", INVALID), ("op", NOTE)]


@pytest.mark.parametrize("text, rate", [
    ("Gen5 x16", 63.0e9), ("Gen4 x16", 31.5e9), ("Gen3 x16", 15.75e9), ("Gen5", None), (None, None),
    ("Gen5/Gen6 (texts differ)", None), ("Gen4 x16 (host link is Infinity Fabric)", None), ("Gen9 x16", None),
])  # fmt: skip
def test_a_plain_link_has_a_rate_and_no_other_text(text, rate):
    assert plausibility.pcie_bytes_s(text) == (pytest.approx(rate, rel=1e-3) if rate else None)


def test_the_operations_that_read_and_write_are_those_of_the_family():
    assert set(plausibility.READ_WRITE) == {name for name, op in OPS.items() if op.reads and op.writes}
    assert plausibility.STREAMING in {
        p.case.name for p in family_bandwidth.pairs(_NoBuffers(), None, 1, 4 * MIB)
    }


class _NoBuffers:
    """What `pairs` asks of its buffers."""

    def _operands(self, *_):
        return None, None, None

    def flags(self, *_):
        return ()


# ---- robust ----


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_without_a_family_or_with_one_alone_is_judged(run, family):
    without = {name: f for name, f in run.files.items() if name != family}
    assert INVALID not in {x.level for x in check(replace(run, files=without))}
    assert INVALID not in {x.level for x in check(replace(run, files={family: run.files[family]}))}


def test_without_the_roofs_only_rated_figures_are_left():
    run = altered(RUNS["mi355x"], "ops", "self_attn.q", times=1 / 1.5)
    assert one(run, "ops", "self_attn.q").limit_name == "compute roof"
    alone = replace(run, files={"ops": run.files["ops"]})
    assert check(alone) == []
    assert one(altered(alone, "ops", "self_attn.q", times=1 / 1.6), "ops", "self_attn.q").limit_name.startswith("rated")


@pytest.mark.parametrize("change", [
    {"skipped": "no memory", "samples_s": ()}, {"error": {"ok": False}, "samples_s": ()}, {"samples_s": ()}, {"params": {}}
])  # fmt: skip
@pytest.mark.parametrize("family", ["compute", "capacity", "ops", "e2e"])
def test_rows_that_are_skipped_wrong_or_bare_are_not_judged(family, change):
    run = RUNS["mi355x"]
    items = [replace(r, **change) if r.role != "anchor" else r for r in run.records(family)]
    assert INVALID not in {x.level for x in check(with_records(run, family, items))}


def test_a_workload_that_cannot_be_read_leaves_the_rest_judged(made_run):
    items = [*model_records.roofs(), *model_records.e2e(TINY, 1e-9, 1e-9)]
    run = made_run(items, MI355X, workload={"name": "no geometry"})
    assert {x.case for x in check(run)} == {"eager", "compiled"}


@pytest.mark.parametrize("parameters", [{"llc_bytes": None}, {"llc_bytes": "many"}, {"llc_bytes": 0}])
def test_an_unknown_size_of_the_caches_is_no_cause(parameters):
    run = altered(RUNS["mi355x"], "bandwidth", "copy.64MiB", times=1 / 1.5, params={"operand_sets": 1})
    run = with_records(run, "bandwidth", run.records("bandwidth"), **parameters)
    assert one(run, "bandwidth", "copy.64MiB").cause == plausibility.UNKNOWN


def test_records_are_left_as_they_were():
    before = [dataclasses.replace(r) for r in RUNS["mi355x"].records("bandwidth")]
    check(RUNS["mi355x"])
    assert before == RUNS["mi355x"].records("bandwidth")


# ---- slower never looks worse ----

TIMED = sorted({
    (name, f, r.case, r.role) for name, run in RUNS.items() for f in FAMILIES for r in run.records(f) if r.samples_s
})  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(TIMED), st.floats(0.02, 1.2), st.floats(1.0, 30.0))
def test_slower_never_adds_to_what_is_said_of_a_row(row, fast, slower):
    """Nor does it make a finding graver, whatever the row defines for others."""
    name, family, case, role = row
    run = altered(RUNS[name], family, case, role, fast)
    before = {x.what: x.level for x in of_row(check(run), family, case, role)}
    after = {x.what: x.level for x in of_row(check(altered(run, family, case, role, slower)), family, case, role)}
    assert after.keys() <= before.keys()
    assert all(plausibility.LEVELS.index(after[what]) <= plausibility.LEVELS.index(before[what]) for what in after)


def test_a_later_family_adds_its_rules_in_one_place(monkeypatch, made_run):
    finding = plausibility.Implausible("comm", "c", "case", "w", 1.0, "", 0.0, "", None, NOISY, "", "made up.")
    monkeypatch.setitem(plausibility.RULES, "comm", (lambda known, family: iter([replace(finding, family=family)]),))
    assert check(made_run([Record("comm", "c", samples_s=(1.0,))])) == [finding]
