"""The workload against the roofs: figures computed by hand, from the small spec `TINY` or from the method."""

from __future__ import annotations

import copy
import dataclasses
import math
from dataclasses import replace

import model_records as made
import pytest
from conftest import CPU, MI355X, UNKNOWN_GPU
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_records import ABSENT, DEFAULT, WRONG

from escher_kernels import targets, workload
from escher_kernels.statistics import estimate
from escher_kernels.workload import Spec
from validation import derive, roofline
from validation.roofline import INEFFICIENT, LAUNCH, MEMORY_BOUND, OUTSIDE, RESIDUAL

V100 = targets.Found("cuda", "Tesla V100-SXM2-32GB", "sm_70", 80, 34079899648)
ESCHER = workload.load("escher_14b_480p")
TINY = Spec(
    name="tiny", title="Tiny", hidden=8, heads=2, head_size=4, ffn=16, depth=2, time_frequency=4, time_tokens=3,
    query_tokens=6, window_tokens=12, text_tokens=5, batch=1, chunks=7,
)  # fmt: skip
PEAK, RATE = 2000, 1000  # a ridge of 2 FLOP/B: every operation with FLOP is bound by compute
THEORY_S = {  # max(FLOP / PEAK, bytes / RATE) of one execution
    "time_embed": 576 / 2000, "time_proj": 2304 / 2000, "norm.self": 0.192, "modulate.self": 0.288,
    "self_attn.q": 0.384, "self_attn.k": 0.384, "self_attn.v": 0.384, "qk_norm.self": 0.416, "rope": 0.480,
    "kv_cache_write": 0.384, "self_attn.flash": 1.152, "self_attn.o": 0.384, "residual_gate.self": 0.336,
    "norm.cross": 0.224, "cross_attn.q": 0.384, "qk_norm.cross": 0.208, "cross_attn.flash": 0.480,
    "cross_attn.o": 0.384, "residual.cross": 0.288, "norm.ffn": 0.192, "modulate.ffn": 0.288, "ffn.linear1": 0.768,
    "ffn.gelu": 0.384, "ffn.linear2": 0.768, "residual_gate.ffn": 0.336,
}  # fmt: skip
PASS_FLOP = 2 * (6 * 768 + 2304 + 960 + 2 * 1536) + 576 + 2304  # 24768
THEORY_PASS_S = 2 * (5.472 + 4.016) + 0.288 + 1.152  # 20.416: FLOP of a block, its bytes without FLOP, once a pass
NOT_IN_THE_PILOTS_TABLE = ("modulate.self", "qk_norm.self", "rope", "residual_gate.self", "qk_norm.cross",
                           "residual.cross", "modulate.ffn", "residual_gate.ffn")  # fmt: skip
OUTSIDE_S = 2 * 2.640
ATTENTION_S = 2 * (1.152 + 0.480)
AS_RUN_S = 1.5 * THEORY_PASS_S - 0.3 * ATTENTION_S  # 29.6448: default paths, attention by sdpa_flash at 1.2
quick = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def times(default=1.5, optimized=1.2, **own):
    """Seconds by factors of theory; attention has sdpa_flash alone. `own`: op (_ for .) -> path -> time."""

    def of(op, path):
        mine = own.get(op.name.replace(".", "_"), {})
        if path in mine:
            return mine[path]
        if op.kind == "attention" and path not in (DEFAULT, "sdpa_flash"):
            return f"{path} is not here"
        return THEORY_S[op.name] * (default if path == DEFAULT else optimized)

    return of


@pytest.fixture
def tiny(made_run):
    """A run of TINY: `tiny(ops records, e2e records, roofs=..., found=...)`."""

    def make(*parts, spec=TINY, roofs=True, **more):
        records = [r for part in parts for r in part]
        if roofs:
            records += made.roofs(*(roofs if isinstance(roofs, tuple) else (PEAK, RATE)))
        return made_run(records, workload=spec.to_json(), **{"found": MI355X, **more})

    return make


def row(run, name):
    return next(r for r in roofline.ops(run).rows if r.op.name == name)


# --------------------------------------------------------------------------------------------- calibration


def test_calibration_of_the_whole_workload(made_run):
    found = roofline.calibration(made_run([], workload=ESCHER.to_json()))
    assert (round(found.flop / 1e9, 2), round(found.bytes / 1e6, 2)) == (4641.44, 3069.95)
    assert (round(found.flop_drift * 100, 3), round(found.bytes_drift * 100, 3)) == (-0.006, -0.008)
    assert found.applies and found.reason == ""


def test_calibration_judges_no_derived_workload_but_shows_the_whole_one(made_run):
    whole = roofline.calibration(made_run([], workload=ESCHER.to_json()))
    for spec in (workload.fit(ESCHER, "cpu", 2**34), workload.overridden(ESCHER, depth=7)):
        found = roofline.calibration(made_run([], workload=spec.to_json()))
        assert not found.applies and "derived" in found.reason
        assert (found.flop_drift, found.bytes_drift) == (whole.flop_drift, whole.bytes_drift)


def test_a_drifting_geometry_is_a_drift_and_no_crash(made_run):
    other = replace(ESCHER, ffn=16384)  # 2 x 2 x 4680 x 5120 x 2560 FLOP more
    found = roofline.calibration(made_run([], workload=other.to_json()))
    extra = 2 * 2 * 4680 * 5120 * 2560
    assert found.flop == 4641443020800 + extra and found.applies
    assert found.flop_drift == pytest.approx((4641443020800 + extra) / 4641.7e9 - 1) and found.flop_drift > 0.05


@pytest.mark.parametrize(
    "pilot", [None, {}, {"block_gflop": 4641.7}, {"block_mb": 1}]
)
def test_a_pilot_without_totals_is_not_applicable(made_run, pilot):
    found = roofline.calibration(made_run([], workload=replace(ESCHER, pilot=pilot).to_json()))
    assert not found.applies and "declares no pilot totals" in found.reason
    assert found.flop_drift is found.bytes_drift is None and found.flop == 4641443020800


@pytest.mark.parametrize("pilot", [{"block_gflop": 0, "block_mb": 1}, {"block_gflop": "4", "block_mb": 1}])
def test_a_pilot_that_is_no_number_is_no_spec(made_run, pilot):
    run = made_run([], workload=replace(ESCHER, pilot=pilot).to_json())
    for of in (roofline.spec_of, roofline.calibration):
        with pytest.raises(workload.WorkloadError, match=r"run\.json: workload: pilot\.block_gflop is .*; expected a number"):
            of(run)


def test_what_the_pilots_own_figures_allow():
    bound = roofline.pilot_bound(ESCHER)
    assert bound.peak_flop_s == 1360e12 and bound.bytes_s == pytest.approx(1360e12 / 210)
    assert round(bound.mfu_frac * 100, 1) == 95.9
    # by hand: FLOP of compute-bound rows at the peak; three norms, the cache, gelu, both rows of category time
    # at peak / 210 bytes a second
    stream, gelu, proj = 2 * 4680 * 5120, 2 * 2 * 4680 * 13824, 2 * (3 * 5120 + 5120 * 30720 + 3 * 30720)
    moved = 3 * 2 * stream + 2 * stream + gelu + proj + 2 * 3 * (256 + 5120)
    flop = 4641443020800 - 2 * 3 * 5120 * 30720
    assert bound.mfu_frac == pytest.approx(4641443020800 / (flop + 210 * moved))
    assert roofline.pilot_bound(workload.fit(ESCHER, "cpu", 2**34)) == bound  # the pilot ran the whole workload
    for pilot in (None, {"peak_tflops": 1360}, {"ridge_flop_per_byte": 210}):
        assert roofline.pilot_bound(replace(ESCHER, pilot=pilot)) is None


# --------------------------------------------------------------------------------------------- operations


def test_theory_time_is_the_larger_of_the_two(tiny):
    run = tiny(made.ops(TINY, times()))
    found = roofline.ops(run)
    assert {r.op.name: r.theory_s.median for r in found.rows} == pytest.approx(THEORY_S)
    assert found.ridge.median == 2 and found.roofs_missing is None
    assert roofline.theory_total_s(found).median == pytest.approx(THEORY_PASS_S) == pytest.approx(20.416)
    assert workload.pass_flop(TINY) == PASS_FLOP == 24768
    memory = tiny(made.ops(TINY, times()), roofs=(3000, 1000))  # a ridge of 3: 320 bytes of q, 352 of cross attention
    assert row(memory, "self_attn.q").theory_s.median == pytest.approx(0.320)
    assert row(memory, "cross_attn.flash").theory_s.median == pytest.approx(0.352)
    assert row(memory, "self_attn.flash").theory_s.median == pytest.approx(2304 / 3000)
    assert row(memory, "norm.self").theory_s.median == pytest.approx(0.192) and row(memory, "norm.self").intensity == 0


@pytest.mark.parametrize(
    ("factor", "band"),
    [(1.09, "at the limit"), (1.11, "tunable"), (1.49, "tunable"), (1.51, "kernel issue"), (0.5, "at the limit")],
)
@pytest.mark.parametrize("name", ["ffn.linear1", "norm.cross", "self_attn.flash"])
def test_ratio_and_band(tiny, name, factor, band):
    found = row(tiny(made.ops(TINY, times(factor, factor))), name)
    assert found.ratio["optimized"].median == pytest.approx(factor) and found.band == band
    assert found.attains.median == pytest.approx(1 / factor)


def test_the_bands_follow_the_configuration(tiny, config):
    def judged(*ends):
        return roofline.band(estimate([[end] for end in (*ends, *ends, *ends, *ends, *ends, *ends)]), config)

    above = [math.nextafter(limit, 2) for limit in (1.10, 1.50)]
    limits = [judged(ratio) for ratio in (1.10, above[0], 1.50, above[1])]
    assert limits == ["at the limit", "tunable", "tunable", "kernel issue"]
    assert judged(0.9, 1.10) == "at the limit" and judged(above[0], 1.5) == "tunable" and judged(above[1], 9) == "kernel issue"
    assert judged(1.10, above[0]) == judged(1.5, above[1]) == judged(0.8, 4.8) == "unsettled"
    run = tiny(made.ops(TINY, times(1.3, 1.3)))
    other = copy.deepcopy(run.config)
    other["thresholds"]["tunable_ratio"]["value"] = 1.2
    assert row(run, "rope").band == "tunable" and row(replace(run, config=other), "rope").band == "kernel issue"


def test_the_interval_of_a_ratio_is_that_of_its_ends(tiny):
    blocks = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
    found = row(tiny(made.ops(TINY, times(rope={"compiled": WRONG, DEFAULT: [0.48 * b for b in blocks]}))), "rope")
    ratio = found.ratio["default"]
    assert (ratio.lo, ratio.median, ratio.hi) == pytest.approx((1.0, 1.25, 1.5))
    assert (found.attains.lo, found.attains.median, found.attains.hi) == pytest.approx((1 / 1.5, 0.8, 1.0))


@pytest.mark.parametrize(
    ("peak", "bound"),
    [(1900, "compute"), (1930, "near"), (2400, "near"), (3190, "near"), (3210, "memory")],  # q: 2.4 FLOP/B; 1.92 to 3.2
)
def test_the_side_of_the_ridge(tiny, peak, bound):
    run = tiny(made.ops(TINY, times()), roofs=(peak, 1000))
    assert row(run, "self_attn.q").bound == bound
    assert row(run, "norm.self").bound == "memory" and row(run, "self_attn.flash").bound == (
        "compute" if peak < 3200 else "near"
    )  # 4 FLOP/B
    assert roofline.ops(run).ridge.median == peak / 1000


def test_the_predicted_side_is_that_of_the_device_that_was_measured(tiny):
    def predicted(**more):
        found = roofline.ops(tiny(made.ops(ESCHER, lambda *_: 1.0), spec=ESCHER, **more))
        return found.ridge_predicted, {r.op.name: r.predicted for r in found.rows}

    ridge, sides = predicted()
    assert ridge == pytest.approx(2516.6e12 / 8e12)
    assert sides["self_attn.q"] == sides["cross_attn.flash"] == "compute"  # 1655 and 461 FLOP/B, against 315
    assert sides["time_proj"] == sides["norm.self"] == "memory"
    assert predicted(found=V100, dtype="fp16", roofs=False) == (None, dict.fromkeys(sides))  # no family 1, no dtype
    assert predicted(found=V100, dtype="fp16")[0] == pytest.approx(125e12 / 900e9)
    assert predicted(found=V100, dtype="bf16")[0] is None  # a V100 has no rated BF16
    for elsewhere in ({"asked": "h100"}, {"found": CPU, "asked": "mi355x"}, {"found": CPU}, {"found": UNKNOWN_GPU}):
        assert predicted(**elsewhere) == (None, dict.fromkeys(sides))


def test_launch_bound_is_a_short_theory_time_on_a_gpu(tiny):
    items = made.ops(ESCHER, lambda *_: 1e-3)
    roofs = (10**15, 5 * 10**12)
    found = {r.op.name: r.launch_bound for r in roofline.ops(tiny(items, spec=ESCHER, roofs=roofs)).rows}
    # 95.8 MB are 19.2 us, 143.8 MB 28.8 us, 55.1 MB 11.0 us, 314.8 MB 63 us, a GEMM of 245 GFLOP 245 us
    assert found["norm.self"] and found["time_embed"]
    assert not found["residual.cross"] and not found["time_proj"] and not found["self_attn.q"]
    on_cpu = tiny(made.ops(ESCHER, lambda *_: 1e-3, kind="cpu"), spec=ESCHER, roofs=roofs, found=CPU)
    assert not any(r.launch_bound for r in roofline.ops(on_cpu).rows)
    unknown = roofline.ops(tiny(items, spec=ESCHER, roofs=False)).rows
    assert not any(r.launch_bound for r in unknown)


def test_a_device_that_waited_for_its_host_is_launch_bound(tiny):
    def flagged(path, kind="gpu", **more):
        items = [replace(r, flags=("HOST_BOUND",)) if r.params.get("op") == "rope" and r.params["path"] == path and r.block == 3
                 else r for r in made.ops(TINY, times(), kind)]  # fmt: skip
        return row(tiny(items, **more), "rope")

    assert row(tiny(made.ops(TINY, times())), "rope").band == "tunable"
    one = flagged("compiled")
    assert one.launch_bound and one.band is None and one.ratio["optimized"].median == pytest.approx(1.2)
    assert not flagged(DEFAULT).launch_bound and flagged(DEFAULT).band == "tunable"  # the path that is judged did not wait
    assert flagged("compiled", roofs=False).launch_bound
    on_cpu = flagged("compiled", "cpu", found=CPU)
    assert not on_cpu.launch_bound and on_cpu.band == "tunable"


def test_what_is_launch_bound_is_not_judged(tiny):
    rows = roofline.ops(tiny(made.ops(ESCHER, lambda *_: 1e-3), spec=ESCHER, roofs=(made.PEAK, made.RATE))).rows
    assert {r.band is None for r in rows if r.launch_bound} == {True} == {bool(r.band) for r in rows if not r.launch_bound}
    assert all(r.ratio for r in rows)


def test_optimized_is_the_fastest_right_path(tiny):
    own = {
        "self_attn_flash": {DEFAULT: 5.0, "aiter": WRONG, "flash_attn": "no", "sdpa_flash": 3.0, "sdpa_math": 4.0},
        "rope": {DEFAULT: 2.0, "compiled": WRONG}, "ffn_gelu": {DEFAULT: WRONG, "compiled": 1.0},
        "residual_cross": {DEFAULT: 1.0, "compiled": 2.0},
        "norm_self": {DEFAULT: "no memory", "compiled": "no compiler"},
        "kv_cache_write": {DEFAULT: ABSENT},
    }  # fmt: skip
    run = tiny(made.ops(TINY, times(**own)))
    flash = row(run, "self_attn.flash")
    assert (flash.optimized.params["path"], flash.optimized.time_s.median) == ("sdpa_flash", 3.0)
    assert flash.ratio["default"].median == pytest.approx(5 / 1.152)
    assert len(flash.others) == 6 and {r.params["path"] for r in flash.others if r.wrong} == {"aiter"}
    for name in ("rope", "residual.cross"):  # the other path is wrong, is slower
        assert row(run, name).optimized.params["path"] == DEFAULT
    gelu = row(run, "ffn.gelu")
    assert gelu.default.wrong and gelu.default.time_s is None and gelu.optimized.params["path"] == "compiled"
    assert set(gelu.ratio) == {"optimized"}
    for name in ("norm.self", "kv_cache_write"):
        none = row(run, name)
        assert none.optimized is none.band is none.attains is None and not none.ratio
    assert row(run, "norm.self").default.skipped == "no memory" and row(run, "kv_cache_write").default is None


@pytest.mark.parametrize(
    ("drop", "missing"),
    [(("compute",), "no compute roof in this run"), (("bandwidth",), "no bandwidth roof in this run"),
     (("compute", "bandwidth"), "no compute and no bandwidth roof in this run")],
)  # fmt: skip
def test_without_a_roof_there_is_no_theory(tiny, drop, missing):
    run = tiny(made.ops(TINY, times()), made.e2e(TINY, 40.0, 30.0))
    run = replace(run, files={k: v for k, v in run.files.items() if k not in drop})
    found = roofline.ops(run)
    assert found.roofs_missing == missing and found.ridge is None and roofline.theory_total_s(found) is None
    for r in found.rows:
        assert r.theory_s is r.bound is r.band is r.attains is None and r.ratio == {} and r.optimized
    assert roofline.sum_of_ops(found, DEFAULT).time_s.median == pytest.approx(1.5 * THEORY_PASS_S)
    assert roofline.ledger(run, "eager") == missing


def test_a_wrong_roof_is_no_roof(tiny):
    run = tiny(made.ops(TINY, times()))
    content = run.files["compute"]
    wrong = [replace(r, error={**r.error, "ok": False}) if r.case == "roof" and r.error else r for r in content.records]
    run = replace(run, files={**run.files, "compute": replace(content, records=wrong)})
    assert roofline.ops(run).roofs_missing == "no compute roof in this run"


# --------------------------------------------------------------------------------------------- the sum of operations


def test_the_sum_counts_each_block_as_often_as_it_runs(tiny):
    found = roofline.ops(tiny(made.ops(TINY, times(1.5, 1.2))))
    assert roofline.sum_of_ops(found, DEFAULT).time_s.median == pytest.approx(1.5 * 20.416)
    # a CPU has no other path of a GEMM or of a cache write, but a GPU has: the cache write alone stays
    assert roofline.sum_of_ops(found, "optimized").time_s.median == pytest.approx(1.2 * 20.416 + 2 * 0.3 * 0.384)


def test_the_sum_is_block_by_block(tiny):
    """What disturbs one block is in one observation, however many operations it met."""

    def of(op, path):
        return [1.0, 1.0, 1.0, 1.0, 1.0, 3.0] if path == DEFAULT else ABSENT

    total = roofline.sum_of_ops(roofline.ops(tiny(made.ops(TINY, of))), DEFAULT).time_s
    assert (total.lo, total.median, total.hi) == (48, 48, 144)  # 2 x 23 + 2 executions
    assert (total.blocks, total.coverage) == (6, pytest.approx(1 - 2 / 2**6))


def test_the_sum_takes_blocks_that_all_operations_have(tiny):
    def of(op, path):
        if path != DEFAULT:
            return ABSENT
        return [1.0, [], 1.0, [], [], 4.0] if op.name == "rope" else [1.0, 50.0, 1.0, 50.0, 50.0, 1.0]

    total = roofline.sum_of_ops(roofline.ops(tiny(made.ops(TINY, of))), DEFAULT).time_s
    assert (total.blocks, total.lo, total.median, total.hi) == (3, 48, 48, 54)  # rope: twice 4 s, not twice 1 s
    rows = [(r.default, 1) for r in roofline.ops(tiny(made.ops(TINY, of))).rows]
    assert roofline.total_s([]) is None
    apart = [(replace(rows[0][0], block_numbers=(7, 8, 9, 10, 11, 12)), 1), *rows[1:]]
    assert roofline.total_s(apart) is None


def test_a_missing_operation_leaves_no_sum_and_is_named(tiny):
    own = {"rope": {DEFAULT: WRONG, "compiled": "no compiler"}, "self_attn_q": {DEFAULT: "no memory"}}
    run = tiny(made.ops(TINY, times(**own)))
    found = roofline.ops(run)
    assert roofline.sum_of_ops(found, DEFAULT) == roofline.Total(DEFAULT, None, ("self_attn.q", "rope"))
    assert roofline.sum_of_ops(found, "optimized") == roofline.Total("optimized", None, ("rope",))
    scopes = {m.scope: m for m in roofline.mfu(run)}
    assert scopes["sum_default"].time_s is None and scopes["sum_default"].reason == "no time for self_attn.q, rope"
    assert not any(scopes["sum_default"].shares.values())


# --------------------------------------------------------------------------------------------- MFU


def shares(run, scope):
    return {name: s and s.median for name, s in next(m for m in roofline.mfu(run) if m.scope == scope).shares.items()}


def escher(tiny, **more):
    """The whole workload: 185.62 TFLOP a pass, eager in 0.25 s, compiled in 0.2 s; roofs 1e15 FLOP/s and 5e12 B/s."""
    parts = (made.ops(ESCHER, lambda *_: 1e-3), made.e2e(ESCHER, 0.25, 0.2))
    return tiny(*parts, **{"spec": ESCHER, "roofs": (made.PEAK, made.RATE), **more})


def test_mfu_on_each_basis_of_the_reference_device(tiny):
    run, rate = escher(tiny), 185.62108e12 / 0.25
    peaks = {"measured": 1e15, "rated": 2516.6e12, "pilot": 1360e12}
    assert shares(run, "eager") == pytest.approx({name: rate / peak for name, peak in peaks.items()},
                                                 rel=1e-6)  # fmt: skip
    assert shares(run, "compiled")["measured"] == pytest.approx(0.9281054, rel=1e-6)
    executions = 23 * 40 + 2
    assert shares(run, "sum_default")["measured"] == pytest.approx(0.18562108 / (executions * 1e-3), rel=1e-6)
    theory = next(m for m in roofline.mfu(run) if m.scope == "theory")
    assert 0.18562 < theory.time_s.median < 0.25 and theory.shares["measured"].median < 1


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ({"asked": "h100"}, {"measured", "pilot"}),  # the MI355X was measured: the pilot's device, not the target
        ({"found": CPU, "asked": "mi355x"}, {"measured"}),
        ({"found": UNKNOWN_GPU}, {"measured"}),
        ({"found": V100, "dtype": "fp16"}, {"measured", "rated"}),
        ({"found": V100, "dtype": "bf16"}, {"measured"}),
        ({"roofs": False}, {"rated", "pilot"}),
    ],
)
def test_no_share_of_another_devices_peak(tiny, more, names):
    run = escher(tiny, **more)
    for m in roofline.mfu(run):
        if m.time_s:
            assert {name for name, s in m.shares.items() if s} == names, m.scope
    if "dtype" in more and "rated" in names:
        assert shares(run, "eager")["rated"] == pytest.approx(185.62108 / 0.25 / 125, rel=1e-6)


def test_a_cpu_has_a_probed_basis(tiny):
    run = tiny(made.e2e(TINY, 24.768, 12.384), made.roofs(2000, 1000, probed=4000), roofs=False, found=CPU)
    assert shares(run, "eager") == pytest.approx({"measured": 0.5, "probed": 0.25})  # 1000 FLOP/s
    assert shares(run, "compiled") == pytest.approx({"measured": 1.0, "probed": 0.5})
    named = {b.name: b for b in roofline.bases(run)}
    assert named["probed"].rate == 4000 and "another device" not in named["probed"].reason


def test_the_pilots_basis_is_for_its_device_only(tiny):
    here, there = ({b.name: b for b in roofline.bases(escher(tiny, **m))}["pilot"] for m in ({}, {"found": V100}))
    assert here.same_device and here.reason == "" and here.rate == 1360e12
    assert not there.same_device and "another device" in there.reason
    assert "pilot" not in {b.name for b in roofline.bases(tiny(made.e2e(TINY, 1.0, 1.0)))}  # no pilot in the workload


def test_an_mfu_of_the_measured_roof_spans_the_roofs_interval(tiny):
    blocks = (0.8, 1.0, 1.0, 1.0, 1.0, 1.25)  # 2500, 2000 and 1600 FLOP/s
    roofs = [replace(r, samples_s=(blocks[r.block],)) if r.case == "roof" and r.samples_s else r for r in made.roofs(PEAK, RATE)]
    run = tiny(made.e2e(TINY, 30.0, 20.0), roofs, roofs=False)
    eager = next(m for m in roofline.mfu(run) if m.scope == "eager")
    share, rate = eager.shares["measured"], 24768 / 30
    assert (share.lo, share.median, share.hi) == pytest.approx((rate / 2500, rate / 2000, rate / 1600))
    assert (share.blocks, share.coverage) == (6, pytest.approx((1 - 2 / 2**6) ** 2))
    rated = eager.shares["rated"]  # a figure of the vendor has no interval
    assert rated.lo == rated.median == rated.hi


def test_scopes_that_were_not_measured_say_why(tiny):
    reasons = {m.scope: m.reason for m in roofline.mfu(tiny(made.e2e(TINY, 30.0, "no compiler"), roofs=False))}
    assert reasons["theory"] == reasons["sum_default"] == "family ops was not measured"
    assert reasons["eager"] == "" and reasons["compiled"] == "no compiler"
    reasons = {m.scope: m.reason for m in roofline.mfu(tiny(made.ops(TINY, times()), roofs=False))}
    assert reasons["theory"] == "no compute and no bandwidth roof in this run"
    assert reasons["eager"] == reasons["compiled"] == "family e2e was not measured"


# --------------------------------------------------------------------------------------------- end to end


def test_the_speed_up_is_the_median_of_pairwise_ratios(tiny):
    run = tiny(made.e2e(TINY, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [0.5, 1.0, 1.5, 8.0, 10.0, 12.0]))
    ratio = roofline.e2e(run).speedup
    assert (ratio.lo, ratio.median, ratio.hi, ratio.blocks) == (0.5, 1.25, 2.0, 6)  # of medians: 3.5 / 4.75
    eager, compiled = [[2.0, 20.0], [2.0, 2.0], [2.0, 2.0]], [[1.0, 10.0], [], [1.0, 0.5]]
    ratio = roofline.e2e(tiny(made.e2e(TINY, eager, compiled))).speedup
    assert (ratio.blocks, ratio.samples, ratio.lo, ratio.hi) == (2, 4, 2.0, 3.0)
    assert roofline.e2e(tiny(made.e2e(TINY, [[], 1.0], [1.0, []]))).speedup is None


@pytest.mark.parametrize(
    ("compiled", "reason"), [("no C++ compiler", "no C++ compiler"), (WRONG, "wrong result"), (ABSENT, "was not run"),
                             ([0.0] * 6, "not timed")],
)  # fmt: skip
def test_unavailable_is_a_reason_and_never_a_ratio_of_one(tiny, compiled, reason):
    run = tiny(made.ops(TINY, times()), made.e2e(TINY, 30.0, compiled))
    found = roofline.e2e(run)
    assert found.unavailable == {"compiled": reason} and found.speedup is None and set(found.rows) == {"eager"}
    assert roofline.ledger(run, "compiled") == reason
    assert shares(run, "compiled") == dict.fromkeys(shares(run, "eager"))
    both = roofline.e2e(tiny(made.e2e(TINY, "out of memory", "out of memory")))
    assert set(both.unavailable) == {"eager", "compiled"} and both.rows == {} and both.attention is None


def test_what_was_tried_is_told(tiny):
    tries = [
        made.Record("e2e", "compile", role="probe", params={"mode": "max-autotune"}, skipped="unavailable: no Triton"),
        made.compile_try("reduce-overhead", "block", 3e-3), made.compile_try("reduce-overhead", "pass", 0.4),
    ]  # fmt: skip
    found = roofline.e2e(tiny(made.e2e(TINY, 30.0, 20.0, mode="default", tries=tries)))
    assert found.compile_tries == [("max-autotune", "unavailable: no Triton"), ("reduce-overhead", "wrong result"),
                                   ("default", "worked")]  # fmt: skip
    assert (found.mode, found.compile_s, found.from_cache) == ("default", 42.0, False)
    assert found.attention == "sdpa_flash"
    assert found.attention_tries == [("aiter", "aiter cannot be imported"), ("sdpa_flash", "ran: aten::_sdpa_flash")]
    nothing = roofline.e2e(tiny(made.e2e(TINY, 30.0, "no mode compiled", tries=tries[:1])))
    assert nothing.mode is nothing.compile_s is None and nothing.compile_tries == [
        ("max-autotune", "unavailable: no Triton")
    ]
    cached = made.e2e(TINY, 30.0, 20.0)
    cached = [replace(r, params={**r.params, "from_cache": 2}) if r.case == "compile" else r for r in cached]
    assert roofline.e2e(tiny(cached)).from_cache


def test_the_counter_and_the_peaks(tiny):
    found = roofline.e2e(tiny(made.e2e(TINY, 30.0, 20.0, counted=24768 * 1.02, gaps={"eager": 0.5})))
    assert found.counter.declared == 24768 and found.counter.drift_frac == pytest.approx(0.02)
    assert found.gaps_s == {"eager": 0.5}
    weights = 2 * (2 * (8 * 64 + 2 * 8 * 16) + 4 * 8 + 7 * 64)  # bytes of 1536 + 480 elements
    caches = 2 * 2 * 2 * (5 + 12) * 8
    [eager, compiled] = found.memory
    assert (eager.mode, eager.weights_bytes, eager.cache_bytes) == ("eager", weights, caches)
    assert eager.peak_bytes == 2**33 + weights + caches and compiled.what == "allocated on the device"
    none = [
        replace(r, value=None, skipped="no VmHWM") if r.case.startswith("memory") else r
        for r in made.e2e(TINY, 1.0, 1.0)
    ]
    assert [(m.peak_bytes, m.what) for m in roofline.e2e(tiny(none)).memory] == [(None, "no VmHWM")] * 2
    assert roofline.e2e(tiny([r for r in none if r.case != "flop.counter"])).counter is None


def test_families_that_were_not_measured(tiny):
    run = tiny(made.ops(TINY, times()))
    assert roofline.e2e(run) is None and roofline.ledger(run, "eager") == "needs families ops and e2e in one run"
    run = tiny(made.e2e(TINY, 1.0, 1.0))
    assert roofline.ops(run) is None and roofline.ledger(run, "eager") == "needs families ops and e2e in one run"


# --------------------------------------------------------------------------------------------- the gap ledger


def test_the_ledger_by_hand(tiny):
    run = tiny(made.ops(TINY, times(1.5, 1.2)), made.e2e(TINY, 30.0, 26.0))
    eager = roofline.ledger(run, "eager")
    assert eager.total_s == 30.0 and eager.floor_s == pytest.approx(24768 / 2000)
    assert eager.parts == pytest.approx({
        MEMORY_BOUND: 2 * (0.192 + 0.224 + 0.192 + 0.384 + 0.384),
        INEFFICIENT: 0.5 * (THEORY_PASS_S - OUTSIDE_S - ATTENTION_S) + 0.2 * ATTENTION_S,
        OUTSIDE: 1.5 * OUTSIDE_S,
        RESIDUAL: 30.0 - AS_RUN_S,
    })  # fmt: skip
    frac = eager.residual_frac
    assert (frac.lo, frac.median, frac.hi) == pytest.approx((0.3552 / 30,) * 3) and eager.finding is False
    assert (frac.blocks, frac.coverage) == (6, pytest.approx((1 - 2 / 2**6) ** 2))
    assert list(eager.parts)[-1] == RESIDUAL and "they were not measured" in eager.noted[0]
    compiled = roofline.ledger(run, "compiled")  # the cache write has its default path alone
    assert compiled.parts[INEFFICIENT] == pytest.approx(0.2 * (THEORY_PASS_S - OUTSIDE_S) + 2 * 0.3 * 0.384)
    assert compiled.parts[OUTSIDE] == pytest.approx(1.2 * OUTSIDE_S)
    mine = {r.op.name for r in roofline.ops(run).rows if r.op.bytes_pilot is None}
    assert mine == set(NOT_IN_THE_PILOTS_TABLE)


def test_memory_bound_gemms_stand_with_the_memory_bound_operations(tiny):
    """With a ridge of 3 each q, k, v, o and cross q, o takes 0.320 s instead of 0.256 s, and so on."""
    run = tiny(made.ops(TINY, times(1.0, 1.0)), made.e2e(TINY, 40.0, 40.0), roofs=(3000, 1000))
    found = roofline.ledger(run, "eager")
    more = 2 * (6 * (0.320 - 0.256) + (0.352 - 0.320) + 2 * (0.544 - 0.512))
    once = (264 / 1000 - 576 / 3000) + (1104 / 1000 - 2304 / 3000)
    assert found.floor_s == pytest.approx(8.256)
    assert found.parts[MEMORY_BOUND] == pytest.approx(2 * 1.376 + more + once)


def test_eager_is_explained_by_default_rows_and_compiled_by_optimized_ones(tiny):
    base = roofline.ledger(tiny(made.ops(TINY, times()), made.e2e(TINY, 31.0, 26.0)), "eager")
    slow = made.ops(TINY, times(rope={DEFAULT: 1.72, "compiled": 0.48}))  # 1.0 s more than 1.5 x 0.48 s
    run = tiny(slow, made.e2e(TINY, 31.0, 26.0))
    assert roofline.ledger(run, "eager").parts[OUTSIDE] == pytest.approx(base.parts[OUTSIDE] + 2.0)
    assert roofline.ledger(run, "compiled").parts[OUTSIDE] == pytest.approx(1.2 * OUTSIDE_S - 2 * 0.2 * 0.48)


def test_attention_stands_as_the_model_ran_it(tiny):
    own = {
        name: {DEFAULT: 2.0, "sdpa_flash": 2.0, "sdpa_math": 7.0} for name in ("self_attn_flash", "cross_attn_flash")
    }
    items = made.ops(TINY, times(**own))
    flash, by_math = (tiny(items, made.e2e(TINY, 50.0, 40.0, attention=a)) for a in ("sdpa_flash", "sdpa_math"))
    for mode in ("eager", "compiled"):
        more = roofline.ledger(by_math, mode).parts[INEFFICIENT] - roofline.ledger(flash, mode).parts[INEFFICIENT]
        assert more == pytest.approx(2 * 2 * 5.0), mode
    torchs = tiny(items, made.e2e(TINY, 50.0, 40.0, attention="sdpa"))  # torch's own choice: the default row
    assert roofline.ledger(torchs, "eager").parts == roofline.ledger(flash, "eager").parts


@pytest.mark.parametrize(("total", "finding"), [(30.0, False), (30.7, True), (28.5, True)])
def test_a_large_residual_is_a_finding(tiny, total, finding):
    made_of = roofline.ledger(tiny(made.ops(TINY, times()), made.e2e(TINY, total, 26.0)), "eager")
    assert made_of.residual_frac.median == pytest.approx(1 - AS_RUN_S / total) and made_of.finding is finding


@pytest.mark.parametrize(
    ("eager", "rope", "ends", "finding"),
    [
        # the pass alone spreads, against operations of 29.6448 s: both sides of the limit, then both limits
        ((29.9, 30.0, 31.0), 0.0, (0.2552 / 30, 1.3552 / 30), None),
        ((28.0, 30.0, 31.5), 0.0, (-1.6448 / 30, 1.8552 / 30), None),
        ((29.7, 30.0, 30.4), 0.0, (0.0552 / 30, 0.7552 / 30), False),
        # rope runs twice a pass: 0.1 s more or less of it are 0.2 s of the sum
        ((30.0, 30.0, 30.0), 0.1, (0.1552 / 30, 0.5552 / 30), False),
        ((30.7, 30.7, 30.7), 0.1, (0.8552 / 30.7, 1.2552 / 30.7), None),
        ((31.0, 31.0, 31.0), 0.1, (1.1552 / 31, 1.5552 / 31), True),
        ((28.5, 28.5, 28.5), 0.1, (-1.3448 / 28.5, -0.9448 / 28.5), True),
        ((30.9, 31.0, 31.2), 0.1, (1.0552 / 31, 1.7552 / 31), True),
    ],
)  # fmt: skip
def test_the_residuals_interval_decides(tiny, eager, rope, ends, finding):
    def six(low, middle, high):
        return [low, middle, middle, middle, middle, high]

    own = {"rope": {DEFAULT: six(0.72 - rope, 0.72, 0.72 + rope)}}
    run = tiny(made.ops(TINY, times(**own)), made.e2e(TINY, six(*eager), 26.0))
    found = roofline.ledger(run, "eager")
    frac = found.residual_frac
    assert (frac.lo, frac.hi) == pytest.approx(ends) and frac.median == pytest.approx(1 - AS_RUN_S / eager[1])
    assert found.finding is finding
    gaps = roofline.ledger(
        tiny(made.ops(TINY, times(**own)), made.e2e(TINY, six(*eager), 26.0, gaps={"eager": 0.25})), "eager"
    ).residual_frac
    less = 0.25 / eager[1]
    assert (gaps.lo, gaps.median, gaps.hi) == pytest.approx((frac.lo - less, frac.median - less, frac.hi - less))


@pytest.mark.parametrize("total", [30.0, 10.0])  # the operations take 29.6 s: more than twice a pass of 10 s
def test_operations_without_a_common_block_settle_no_residual(tiny, total):
    own = {"rope": {DEFAULT: [0.72, [], [], [], [], []]}, "norm_self": {DEFAULT: [[], *[0.288] * 5]}}
    found = roofline.ledger(tiny(made.ops(TINY, times(**own)), made.e2e(TINY, total, 26.0)), "eager")
    frac = found.residual_frac
    assert found.finding is None and frac.coverage == frac.blocks == 0
    assert frac.median == pytest.approx(1 - AS_RUN_S / total) and frac.lo == min(-1.0, frac.median) and frac.hi == 1.0


def test_launch_gaps_are_a_part_where_they_are_known(tiny):
    items = made.ops(TINY, times())
    run = tiny(items, made.e2e(TINY, 30.0, 26.0, gaps={"eager": 0.25}))
    eager, compiled = roofline.ledger(run, "eager"), roofline.ledger(run, "compiled")
    assert eager.parts[LAUNCH] == 0.25 and eager.parts[RESIDUAL] == pytest.approx(0.3552 - 0.25)
    assert eager.noted == () and LAUNCH not in compiled.parts and "not measured" in compiled.noted[0]
    zero = roofline.ledger(tiny(items, made.e2e(TINY, 31.0, 26.0, gaps={"eager": 0.0})), "eager")
    assert zero.parts[LAUNCH] == 0.0 and zero.noted == ()
    on_cpu = tiny(made.ops(TINY, times(), kind="cpu"), made.e2e(TINY, 31.0, 26.0), found=CPU)
    assert "a CPU runs an operation inside its call" in roofline.ledger(on_cpu, "eager").noted[0]


def test_no_ledger_without_every_operation(tiny):
    own = {"rope": {DEFAULT: WRONG}, "self_attn_q": {DEFAULT: ABSENT, "compiled": ABSENT}}
    run = tiny(made.ops(TINY, times(**own)), made.e2e(TINY, 31.0, 26.0))
    assert roofline.ledger(run, "eager") == "no time for self_attn.q, rope"
    assert roofline.ledger(run, "compiled") == "no time for self_attn.q"


@given(st.data())
@quick
def test_parts_and_floor_sum_to_the_total(tiny, data):
    seconds = st.floats(1e-6, 1e6)
    of = {}

    def drawn(op, path):
        return of.setdefault((op.name, path), data.draw(seconds))

    gaps = data.draw(st.one_of(st.none(), st.floats(0, 1e3).map(lambda g: {"eager": g})))
    run = tiny(made.ops(TINY, drawn), made.e2e(TINY, data.draw(seconds), data.draw(seconds), gaps=gaps),
               roofs=(data.draw(st.integers(1, 10**16)), data.draw(st.integers(1, 10**13))))  # fmt: skip
    for mode in ("eager", "compiled"):
        found = roofline.ledger(run, mode)
        every = [found.floor_s, *found.parts.values()]
        assert math.fsum(every) == pytest.approx(found.total_s, abs=1e-12 * sum(map(abs, every)), rel=0)
        frac, rounding = found.residual_frac, 1e-12 * sum(map(abs, every)) / found.total_s
        assert frac.median == found.parts[RESIDUAL] / found.total_s and (LAUNCH in found.parts) == (mode in (gaps or {}))
        assert frac.lo <= frac.median <= frac.hi and frac.hi - frac.lo <= rounding  # the blocks are equal
        if abs(abs(frac.median) - 0.03) > rounding:
            assert found.finding is (abs(frac.median) > 0.03)


# --------------------------------------------------------------------------------------------- anchors, the pilot


def test_how_far_the_anchors_lie_from_those_of_the_roofs(tiny):
    items = made.around("ops", made.ops(TINY, times()), gemm=(90.0, 90.0), copy=(100.0, 140.0))
    run = tiny(items, made.around("e2e", made.e2e(TINY, 1.0, 1.0)))
    assert roofline.anchor_shift(run, "ops") == pytest.approx({"anchor.gemm": -0.10, "anchor.copy": 0.20})
    assert roofline.ops(run).shift == roofline.anchor_shift(run, "ops")
    assert roofline.e2e(run).shift == pytest.approx({"anchor.gemm": 0.0, "anchor.copy": 0.0})
    alone = tiny(items, roofs=False)
    assert roofline.anchor_shift(alone, "ops") == {} and roofline.anchor_shift(run, "capacity") == {}


def test_the_pilots_figures_are_comparable_on_its_device_only(tiny):
    def found(**more):
        return {r.what: r for r in roofline.reference(escher(tiny, **more))}

    here = found()
    assert all(r.comparable and r.reason == "" for r in here.values()) and len(here) == 5
    assert (here["compute roof"].pilot, here["compute roof"].observed.median) == (1360e12, 1e15)
    assert (here["ridge"].pilot, here["ridge"].observed.median) == (210, 200)
    assert {what: r.basis for what, r in here.items()} == {
        "compute roof": "", "ridge": "", "MFU, sum of ops, optimized": "pilot", "MFU, model, eager": "pilot",
        "MFU, model, compiled": "pilot",
    }  # fmt: skip
    eager = here["MFU, model, eager"]
    there = found(found=V100)["MFU, model, eager"]
    assert there.basis == "measured" and there.observed.median == pytest.approx(185.62108 / 0.25 / 1000, rel=1e-6)
    assert eager.pilot == 0.93 and eager.observed.median == pytest.approx(185.62108 / 0.25 / 1360, rel=1e-6)
    for more in ({"found": V100}, {"found": CPU, "asked": "mi355x"}, {"found": UNKNOWN_GPU}):
        assert all(not r.comparable and "the pilot ran on mi355x" in r.reason for r in found(**more).values())
    shallow = workload.overridden(ESCHER, depth=7)
    derived = roofline.reference(tiny(made.e2e(shallow, 0.05, 0.04), spec=shallow, roofs=(made.PEAK, made.RATE)))
    assert [r.comparable for r in derived] == [True, True, False, False, False]  # a roof does not depend on the depth
    assert "derived" in derived[-1].reason
    assert roofline.reference(tiny(made.e2e(TINY, 1.0, 1.0))) == []


# --------------------------------------------------------------------------------------------- nothing is not a number


def numbers(value):
    """Every float in a value, whatever holds it."""
    if isinstance(value, float):
        yield value
    elif dataclasses.is_dataclass(value):
        for f in dataclasses.fields(value):
            yield from numbers(getattr(value, f.name))
    elif isinstance(value, dict):
        yield from numbers(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from numbers(v)


ANY_TIME = st.one_of(
    st.floats(1e-9, 1e6), st.sampled_from([WRONG, ABSENT, "no memory", 0.0, -1.0]),
    st.lists(st.lists(st.sampled_from([0.0, -1e-6, 1e-9, 1.0, 1e6]), max_size=2), max_size=6),
)  # fmt: skip


@given(st.data())
@quick
def test_whatever_was_recorded_nothing_is_nan_or_infinite(tiny, data):
    def drawn(op, path):
        return data.draw(ANY_TIME) if op.name in ("rope", "self_attn.flash", "ffn.linear1") else 1.0

    of = {}
    items = made.ops(TINY, lambda op, path: of.setdefault((op.name, path), drawn(op, path)))
    found, asked = data.draw(
        st.sampled_from([(MI355X, "auto"), (CPU, "mi355x"), (UNKNOWN_GPU, "auto"), (V100, "h100")])
    )
    spec = replace(TINY, pilot=ESCHER.pilot)
    run = tiny(made.around("ops", items), made.e2e(TINY, data.draw(ANY_TIME), data.draw(ANY_TIME)), found=found,
               asked=asked, spec=spec, roofs=data.draw(st.sampled_from([True, False])))  # fmt: skip
    got = [roofline.calibration(run), roofline.pilot_bound(spec), roofline.ops(run), roofline.e2e(run),
           roofline.bases(run),
           roofline.mfu(run), roofline.reference(run), [roofline.ledger(run, m) for m in ("eager", "compiled")],
           [roofline.sum_of_ops(roofline.ops(run), p) for p in (DEFAULT, "optimized")] if "ops" in run.files else None,
           [derive.anchors(run.records(f), run.config) for f in run.files]]  # fmt: skip
    assert all(math.isfinite(x) for x in numbers(got))
    for m in roofline.mfu(run):
        assert m.time_s is None or m.time_s.median > 0
