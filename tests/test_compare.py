"""Run against run: refusals by name, verdicts in simulation and by hand, the noise of a run, variability and its file."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import random
import statistics
from collections import Counter
from pathlib import Path

import model_records as made
import pytest
from conftest import CPU, MI355X, SAMPLES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_roofline import TINY, times

from escher_kernels import targets
from escher_kernels.records import Record
from escher_kernels.statistics import Estimate, estimate, percentile
from validation import compare, derive, memory, roofline
from validation.compare import AMBIGUOUS, FASTER, SAME, SLOWER, CompareError

quick = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
ROWS = 60
RUNS = 10


def blocks(case: str, seconds, family: str = "environment", **more) -> list[Record]:
    """A case: one record a block, of one sample."""
    return [Record(family, case, block=i, samples_s=(s,), **more) for i, s in enumerate(seconds)]


def steady(middle: float, rng: random.Random, count: int = 6, sigma: float = 0.005) -> list[float]:
    return [middle * math.exp(rng.gauss(0, sigma)) for _ in range(count)]


@pytest.fixture
def timed(made_run):
    """A run of cases: `timed({"a": [block times]}, run_id="x")`."""

    def make(cases, family="environment", run_id="made", **more):
        records = [r for case, seconds in cases.items() for r in blocks(case, seconds, family)]
        return made_run(records, run_id=run_id, **more)

    return make


def row(found: compare.Comparison, key: str) -> compare.Compared:
    return next(x for x in (*found.headlines, *found.rows) if x.key == key)


def modelled(made_run, run_id="a", peak=2000, rate=1000, slower=1.0, found=MI355X, **more):
    """A run of all families of the small model; `slower`: the times of its passes."""
    records = [
        *made.roofs(peak, rate), *made.ops(TINY, times()), *made.e2e(TINY, 30.0 * slower, 25.0 * slower),
        *made.capacity(2**36, 2**35),
    ]  # fmt: skip
    return made_run(records, found=found, workload=TINY.to_json(), run_id=run_id, **more)


# --------------------------------------------------------------------------------------------- in simulation


def machine(rng: random.Random, factors: dict[str, float]) -> list[dict[str, list[float]]]:
    """Blocks of each row of ten fresh processes: every row of every process is shifted by 1 % (standard deviation)."""
    return [{row: steady(f * math.exp(rng.gauss(0, 0.01)), rng) for row, f in factors.items()} for _ in range(RUNS)]


EQUAL = {f"r{i}": 1.0 for i in range(ROWS)} | {"one": 1.0}
ONE_SLOWER = EQUAL | {"one": 1.05}


def verdicts(config, base, run) -> dict[str, str]:
    """What `compare` makes of two machines, from their block times alone."""
    sides = {}
    for name, processes in (("b", base), ("r", run)):
        floors = [{row: compare.odd_even(times) for row, times in process.items()} for process in processes]
        families = [percentile(list(own.values()), 90) for own in floors]
        for row in processes[0]:
            numbers = [
                compare.Headline(row, row, "f", "s", False, estimate([t] for t in p[row]), blocks=tuple(p[row]))
                for p in processes
            ]
            whole = [max(own[row], family) for own, family in zip(floors, families, strict=True)]
            sides[name, row] = compare.side_of(name, numbers, whole)
    return {row: compare.compared("case", sides["b", row], sides["r", row], config).verdict for row in base[0]}


def test_equal_machines_have_no_slow_row_and_a_slow_row_is_found(config):
    """Twenty trials of ten runs a side: sixty rows as they were, and one that is 5 % slower."""
    clean = found = 0
    for trial in range(20):
        rng = random.Random(trial)
        called = verdicts(config, machine(rng, EQUAL), machine(rng, ONE_SLOWER))
        slow = {row for row, verdict in called.items() if verdict == SLOWER}
        assert len(called) == ROWS + 1
        clean += slow <= {"one"}
        found += "one" in slow
    assert clean >= 19 and found >= 18


def test_a_machine_that_is_slower_throughout_is_found(config):
    every = {f"r{i}": 1.0 for i in range(10)}
    found = []
    for trial in range(20):
        rng = random.Random(trial)
        called = verdicts(config, machine(rng, every), machine(rng, dict.fromkeys(every, 1.05)))
        found.append(list(called.values()).count(SLOWER))
    assert sum(count >= 8 for count in found) >= 18 and sum(found) >= 0.9 * 200


def test_whole_runs_give_what_their_block_times_give(config, timed):
    rng = random.Random(0)
    base, run = machine(rng, EQUAL), machine(rng, ONE_SLOWER)
    loaded = ([timed(p, run_id=f"{name}{n}") for n, p in enumerate(side)] for name, side in (("b", base), ("r", run)))
    found = compare.compare(*loaded)
    assert {x.label: x.verdict for x in found.rows} == verdicts(config, base, run)
    assert [x.label for x in found.called(SLOWER)] == ["one"] and not any(x.indicative for x in found.rows)


def test_a_wide_interval_between_runs_is_not_called(timed):
    rng = random.Random(1)
    loose = [[timed({"a": steady(0.05 * k + math.exp(rng.gauss(0, 0.2)), rng)}, run_id=f"{k}{n}") for n in range(3)]
             for k in range(2)]  # fmt: skip
    assert row(compare.compare(*loose), "environment/a").verdict == AMBIGUOUS


# --------------------------------------------------------------------------------------------- the statistics


@pytest.mark.parametrize("seed", range(5))
def test_the_interval_is_welchs(seed):
    from scipy import stats

    rng = random.Random(seed)
    a, b = [rng.gauss(5, 1) for _ in range(4)], [rng.gauss(6, 3) for _ in range(9)]
    interval = stats.ttest_ind(b, a, equal_var=False).confidence_interval(0.95)
    found = compare.welch(a, b)
    assert (found.lo, found.hi) == pytest.approx((interval.low, interval.high))
    assert found.median == pytest.approx(statistics.fmean(b) - statistics.fmean(a))


def test_the_interval_covers_the_difference_as_often_as_it_says():
    rng, inside = random.Random(3), 0
    for _ in range(400):
        found = compare.welch([rng.gauss(0, 1) for _ in range(4)], [rng.gauss(0.5, 3) for _ in range(6)])
        inside += found.lo <= 0.5 <= found.hi
    assert 0.92 <= inside / 400 <= 0.98


def test_three_that_agree_by_chance_are_as_wide_as_their_blocks():
    wide = compare.welch([0.0, 0.0, 0.0], [0.1, 0.1, 0.1], 0.03, 0.03)
    t = 2.7764451  # 4 degrees of freedom
    assert (wide.lo, wide.hi) == pytest.approx((0.1 - t * math.sqrt(0.02), 0.1 + t * math.sqrt(0.02)))
    exact = compare.welch([0.0, 0.0, 0.0], [0.1, 0.1, 0.1])
    assert (exact.lo, exact.hi) == pytest.approx((0.1, 0.1))
    own = compare.welch([0.0, 2.0, 4.0], [1.0, 3.0, 5.0], 0.03, 0.03)
    assert own == compare.welch([0.0, 2.0, 4.0], [1.0, 3.0, 5.0])


@pytest.mark.parametrize("count", [3, 4, 6, 12])
def test_the_variance_of_a_median_of_blocks(count):
    rng = random.Random(count)
    draws = [[math.exp(rng.gauss(0, 0.01)) for _ in range(count)] for _ in range(2000)]
    real = statistics.variance(math.log(statistics.median(d)) for d in draws)
    assert 0.92 < statistics.fmean(map(compare.median_variance, draws)) / real < 1.27
    assert compare.median_variance([1.0]) is None


@pytest.mark.parametrize(
    "lo, hi, verdict",
    [
        (-0.02, 0.02, SAME), (-0.03, 0.03, SAME), (0.031, 0.2, FASTER), (-0.2, -0.031, SLOWER), (0.03, 0.2, AMBIGUOUS),
        (-0.2, -0.03, AMBIGUOUS), (-0.04, 0.0, AMBIGUOUS), (-0.04, 0.04, AMBIGUOUS), (0.0, 0.0, SAME),
    ],
)  # fmt: skip
def test_a_verdict_needs_the_whole_interval(lo, hi, verdict):
    assert compare.judge(lo, hi, 0.03) == verdict


def test_a_side_is_its_geometric_mean(timed):
    runs = [timed({"a": [t] * 3 + [t * 1.02] * 3}, run_id=str(t)) for t in (1.0, 2.0, 4.0)]
    middle = 1.01
    for count, ends, blocks_counted in ((1, (1.0, 1.02), 6), (2, (1.0, 2.04), 12)):
        found = row(compare.compare(runs[:count], runs[:1]), "environment/a").base
        assert (found.median, found.lo, found.hi) == pytest.approx((middle * 2 ** ((count - 1) / 2), *ends))
        assert found.blocks == blocks_counted and found.coverage == estimate([[1]] * 6).coverage
    found = row(compare.compare(runs, runs[:1]), "environment/a").base
    half = 4.3026527 * math.log(2) / math.sqrt(3)  # Student's, 2 degrees of freedom
    assert (found.median, found.lo, found.hi) == pytest.approx([2.02 * math.exp(x) for x in (0, -half, half)])
    assert (found.blocks, found.samples, found.coverage) == (3, 18, 0.95)


# --------------------------------------------------------------------------------------------- by hand


@pytest.mark.parametrize(
    "factor, verdict", [(1.0, SAME), (1.02, SAME), (1.05, SLOWER), (1 / 1.05, FASTER), (1.031, AMBIGUOUS)]
)
def test_one_run_a_side_is_indicative(timed, factor, verdict):
    seconds = [1.0, 1.001, 1.002, 1.003, 1.004, 1.005]
    base, run = timed({"a": seconds}, run_id="b"), timed({"a": [s * factor for s in seconds]}, run_id="r")
    found = row(compare.compare([base], [run]), "environment/a")
    assert (found.verdict, found.indicative, found.base_count, found.run_count) == (verdict, True, 1, 1)
    assert found.ratio == derive.quotient(found.base, found.run)
    assert found.ratio.median == pytest.approx(1 / factor) and not found.higher_is_better
    assert found.limit == 0.03 and found.difference is None


@pytest.mark.parametrize("factor, verdict", [(1.0305, SAME), (1 / 1.0305, SAME), (1.0312, SLOWER), (1 / 1.0312, FASTER)])
def test_the_limit_is_as_far_up_as_down(timed, factor, verdict):
    """3 % down is a ratio of 0.97, and 1 / 0.97 = 1.0309."""
    base, run = timed({"a": [1.0] * 6}, run_id="b"), timed({"a": [factor] * 6}, run_id="r")
    assert row(compare.compare([base], [run]), "environment/a").verdict == verdict


def test_fewer_than_two_processes_are_never_enough(timed):
    """Whatever the configuration says: one process has no variance."""
    runs = [timed({"a": [1.0 + 0.001 * n] * 6}, run_id=str(n)) for n in range(4)]
    one = {"regression_runs_count": {"value": 1, "unit": "count"}}
    lax = type(runs[0].config)({**runs[0].config, "thresholds": {**runs[0].config["thresholds"], **one}})
    runs = [dataclasses.replace(run, config=lax) for run in runs]
    assert compare.compare(runs[:1], runs[1:2]).rows[0].indicative
    assert not compare.compare(runs[:2], runs[2:]).rows[0].indicative


def test_three_runs_a_side_are_no_longer_indicative(timed):
    def three(name, factor=1.0):
        return [timed({"a": [factor * (1 + 0.001 * n)] * 6}, run_id=f"{name}{n}") for n in range(3)]

    found = row(compare.compare(three("b"), three("r", 1.05)), "environment/a")
    assert (found.verdict, found.indicative, found.base_count, found.run_count) == (SLOWER, False, 3, 3)
    assert found.ratio.median == pytest.approx(1 / 1.05)
    assert row(compare.compare(three("b"), three("r")[:2]), "environment/a").indicative


def test_a_difference_below_a_runs_own_noise_is_never_called(timed):
    """Odd and even blocks of row a lie 8 % apart in one of the runs; row b is steady, and 5 % slower as well."""
    noisy = [1.0, 1.08] * 3
    many = {f"steady{i}": [1.0] * 6 for i in range(20)}  # so that the family's floor is that of the quiet rows

    def pair(*swapped):
        quiet, loud = ({"a": [x] * 6, "b": [1.0] * 6, **many} for x in (1.04, 1.04))
        loud["a"] = noisy
        base, run = (loud, quiet) if swapped else (quiet, loud)
        run = {k: [s * 1.05 for s in v] for k, v in run.items()}
        return compare.compare([timed(base, run_id="b")], [timed(run, run_id="r")])

    for found in (pair(), pair("swapped")):
        assert row(found, "environment/a").verdict == AMBIGUOUS
        assert row(found, "environment/a").noise_floor == pytest.approx(math.log(1.08))
        assert row(found, "environment/b").verdict == SLOWER and row(found, "environment/b").noise_floor == 0
    # three runs a side, all of them noisy: the interval of the means is a point, the noise still stands
    base = [timed({"a": noisy, **many}, run_id=f"b{n}") for n in range(3)]
    run = [timed({"a": [s * 1.05 for s in noisy], **many}, run_id=f"r{n}") for n in range(3)]
    found = row(compare.compare(base, run), "environment/a")
    assert found.verdict != SLOWER and found.ratio.median == pytest.approx(1 / 1.05)
    level = [timed({"a": [s * x for s in [1.04] * 6], **many}, run_id=f"{x}{n}") for n in range(3) for x in (1, 1.05)]
    assert row(compare.compare(level[::2], level[1::2]), "environment/a").verdict == SLOWER


def test_one_noisy_process_of_three_does_not_make_the_side_noisy(timed):
    many = {f"steady{i}": [1.0] * 6 for i in range(20)}
    noisy = [1 / 1.14, 1.14] * 3
    base = [timed({"a": noisy if n == 0 else [1.0 + 0.001 * n] * 6, **many}, run_id=f"b{n}") for n in range(3)]
    run = [timed({"a": [1.2 + 0.001 * n] * 6, **many}, run_id=f"r{n}") for n in range(3)]
    found = row(compare.compare(base, run), "environment/a")
    assert found.noise_floor == 0 and found.verdict == SLOWER
    two = [timed({"a": noisy, **many}, run_id="c"), *base[:1], base[2]]
    assert row(compare.compare(two, run), "environment/a").noise_floor == pytest.approx(2 * math.log(1.14))


def test_runs_that_agree_are_as_uncertain_as_their_blocks(timed):
    wide = [0.9, 0.95, 1.0, 1.0, 1.05, 1.1]
    base, run = (
        [timed({"a": [s * f for s in wide]}, run_id=f"{name}{n}") for n in range(3)] for name, f in (("b", 1.0), ("r", 1.05))
    )
    found = row(compare.compare(base, run), "environment/a")
    least = compare.median_variance(wide)
    expected = compare.welch([math.log(1.05)] * 3, [0.0] * 3, least, least)
    assert (found.ratio.lo, found.ratio.hi) == pytest.approx((math.exp(expected.lo), math.exp(expected.hi)))
    assert found.ratio.lo < 0.9 and found.verdict == AMBIGUOUS
    assert found.base.hi == pytest.approx(math.exp(4.3026527 * math.sqrt(least / 3)))


def test_within_the_noise_is_the_same(timed):
    many = {f"r{i}": [1.0, 1.2] * 3 for i in range(3)}
    base, run = timed({**many, "a": [1.0] * 6}, run_id="b"), timed({**many, "a": [1.1] * 6}, run_id="r")
    assert row(compare.compare([base], [run]), "environment/a").verdict == SAME  # 10 %, in a family that moves by 20 %


def test_noise_of_a_row_and_of_its_family(timed, made_run):
    cases = {f"r{i}": [1.0, math.exp(0.01 * i)] * 3 for i in range(11)}
    found = compare.noise_floor(timed({**cases, "short": [1.0, 2.0, 1.0]}))
    assert found.rows == {("environment", f"r{i}"): pytest.approx(0.01 * i) for i in range(11)}
    assert found.families == {"environment": pytest.approx(0.09)} and found.run == pytest.approx(0.09)
    assert found.of(("environment", "r10"), "environment") == pytest.approx(0.10)  # its own is the larger
    assert found.of(("environment", "r1"), "environment") == pytest.approx(0.09)
    assert found.of(("environment", "short"), "environment") == pytest.approx(0.09)  # too few blocks for its own
    assert found.of(("ops", "x"), "ops") == pytest.approx(0.09)  # a family without a floor has the run's
    nothing = compare.noise_floor(timed({"short": [1.0, 2.0, 1.0]}))
    assert (nothing.rows, nothing.families, nothing.run, nothing.of("compute_roof", "compute")) == ({}, {}, None, None)


@pytest.mark.parametrize("count, own", [(3, None), (4, math.log(1.5)), (5, math.log(1.5)), (6, math.log(1.5))])
def test_odd_against_even_needs_two_blocks_each(count, own):
    assert compare.odd_even([1.0, 1.5, 1.0, 1.5, 1.0, 1.5][:count]) == (own if own is None else pytest.approx(own))


def test_without_noise_known_there_is_no_verdict(timed):
    found = compare.compare([timed({"a": [1.0] * 3}, run_id="b")], [timed({"a": [2.0] * 3}, run_id="r")])
    [only] = found.rows
    assert only.verdict is None and "noise unknown" in only.reason and only.ratio.median == 0.5
    one = compare.compare([timed({"a": [1.0]}, run_id="b")], [timed({"a": [2.0]}, run_id="r")]).rows[0]
    assert one.verdict is None and "no interval" in one.reason


# --------------------------------------------------------------------------------------------- properties

SECONDS = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=8)
CASES = st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), SECONDS, min_size=1)
SIDES = st.lists(CASES, min_size=1, max_size=4)


def loaded(timed, cases, name, factor=1.0):
    return [timed({k: [s * factor for s in v] for k, v in run.items()}, run_id=f"{name}{n}") for n, run in enumerate(cases)]


@quick
@given(SIDES)
def test_nothing_is_faster_or_slower_than_itself(timed, cases):
    runs = loaded(timed, cases, "a")
    found = compare.compare(runs, runs)
    assert not found.called(FASTER) and not found.called(SLOWER) and found.unlike == found.missing == ()
    assert all(x.ratio is None or x.ratio.lo <= 1 <= x.ratio.hi for x in found.rows)
    assert not compare.regressions(found)


@quick
@given(SIDES, SIDES)
def test_swapping_the_sides_inverts_the_ratio(timed, left, right):
    a, b = loaded(timed, left, "a"), loaded(timed, right, "b")
    forth, back = (sorted(compare.compare(x, y).rows, key=lambda r: r.key) for x, y in ((a, b), (b, a)))
    turned = {FASTER: SLOWER, SLOWER: FASTER}
    for x, y in zip(forth, back, strict=True):
        assert (x.key, x.base, x.run, x.noise_floor) == (y.key, y.run, y.base, y.noise_floor)
        assert turned.get(x.verdict, x.verdict) == y.verdict and x.indicative == y.indicative
        if x.ratio:
            assert (1 / x.ratio.median, 1 / x.ratio.hi, 1 / x.ratio.lo) == pytest.approx(
                (y.ratio.median, y.ratio.lo, y.ratio.hi)
            )


@quick
@given(SIDES, SIDES, st.integers(-12, 12))
def test_a_slower_clock_on_both_sides_changes_no_verdict(timed, left, right, power):
    plain, scaled = (
        compare.compare(loaded(timed, left, "a", factor), loaded(timed, right, "b", factor)).rows
        for factor in (1.0, 2.0**power)
    )
    assert [(x.key, x.verdict) for x in plain] == [(x.key, x.verdict) for x in scaled]
    assert [x.ratio and x.ratio.median for x in plain] == pytest.approx([x.ratio and x.ratio.median for x in scaled])


@quick
@given(st.floats(1e-3, 1e3))
def test_any_scale_leaves_the_mfu_and_its_verdict(made_run, scale):
    def run(name, pass_s):
        records = [*made.roofs(round(1e15), 10**12), *made.e2e(TINY, 1.2 * pass_s, pass_s)]
        for i, r in enumerate(records):
            if r.samples_s:
                records[i] = dataclasses.replace(r, samples_s=tuple(s * scale for s in r.samples_s))
        return made_run(records, found=MI355X, workload=TINY.to_json(), run_id=name)

    found = compare.compare([run("a", 1e-10)], [run("b", 1.5e-10)])  # far above the roof: a large share moves far
    assert row(found, "mfu_compiled").verdict == SLOWER and row(found, "compute_roof").verdict == SAME
    assert row(found, "mfu_compiled").base.median == pytest.approx(24768 / 1e-10 / 1e15)


# --------------------------------------------------------------------------------------------- what is unlike


def changed_workload(**fields):
    return {"name": "w", "depth": 1, "query_tokens": 2, "window_tokens": 3, **fields}


OTHER_NAME = dataclasses.replace(CPU, raw_name="Another CPU")
PARTITIONED = dataclasses.replace(MI355X, slice="CPX partition", compute_units=32)


@pytest.mark.parametrize(
    "base, run, said",
    [
        ({}, {"found": OTHER_NAME}, ["device: Some CPU against Another CPU"]),
        ({}, {"found": dataclasses.replace(CPU, arch="aarch64")}, ["device architecture: x86_64 against aarch64"]),
        ({}, {"found": dataclasses.replace(CPU, compute_units=4)}, ["compute units of the device: 2 against 4"]),
        ({"found": MI355X}, {"found": dataclasses.replace(MI355X, count=4)}, ["devices: 8 against 4"]),
        ({"found": MI355X}, {"found": PARTITIONED}, ["slice: not given against CPX partition", "target profile: mi355x against not given"]),  # noqa: E501
        ({}, {"asked": "mi355x"}, ["target profile: cpu against mi355x"]),
        ({}, {"workload": changed_workload(depth=2)}, ["workload depth: 1 against 2"]),
        ({}, {"workload": changed_workload(name="v", batch=4)}, ["workload name: w against v", "workload batch: not given against 4"]),  # noqa: E501
        ({}, {"workload": changed_workload(new_field=4)}, ["workload new_field: not given against 4"]),
        ({}, {"workload": changed_workload(full={"depth": 40})}, ["whole workload depth: 1 against 40"]),
        ({}, {"method": 99}, ["method: 1 against 99"]),
        ({"schema": 1}, {"schema": 2}, ["schema: 1 against 2"]),
        ({}, {"partition": "CPX"}, ["partition: not given against CPX"]),
        ({"nps": "NPS1"}, {"nps": "NPS4"}, ["NPS mode: NPS1 against NPS4"]),
        ({"world": 1}, {"world": 8}, ["world: 1 against 8"]),
        ({"power_cap_w": 1000}, {"power_cap_w": 700}, ["power cap in W: 1000 against 700"]),
        ({}, {"source": "synthetic"}, ["source: measured against synthetic"]),
        ({}, {"dtype": "fp16"}, ["compute dtype: bf16 against fp16"]),
    ],
)  # fmt: skip
def test_unlike_runs_are_refused_by_name_of_both_values(timed, base, run, said):
    a, b = timed({"a": [1.0] * 6}, run_id="first", **base), timed({"a": [1.0] * 6}, run_id="second", **run)
    found = compare.unlike(a, b)
    assert set(said) <= set(found)
    with pytest.raises(CompareError) as refused:
        compare.compare([a], [b])
    text = str(refused.value)
    assert text.startswith("first and second must not be compared: ") and "--across" in text and "\n" not in text
    assert all(line in text for line in said)
    with pytest.raises(CompareError, match="first and second must not be compared"):
        compare.variability([a, b])
    beside = compare.compare([a], [b], across=True)
    assert beside.unlike == tuple(found) and beside.across
    assert [(x.verdict, x.reason, x.ratio.median) for x in beside.rows] == [(None, "", 1.0)]


@pytest.mark.parametrize(
    "base, run",
    [
        ({}, {}),
        ({}, {"workload": changed_workload(title="T", note="n", derived_why="a CPU host", pilot={"peak_tflops": 1})}),
        ({"power_cap_w": 1000}, {}),  # not known on one side
        ({}, {"settings": {"budget": "full"}}),
        ({}, {"created_utc": "2027-01-01T00:00:00+00:00"}),
    ],
)
def test_words_and_what_one_run_does_not_say_are_no_difference(timed, base, run):
    a, b = timed({"a": [1.0] * 6}, run_id="first", **base), timed({"a": [1.0] * 6}, run_id="second", **run)
    assert compare.unlike(a, b) == [] and compare.compare([a], [b]).rows[0].verdict == SAME


def with_parameters(run: derive.LoadedRun, family: str, **parameters) -> derive.LoadedRun:
    file = run.files[family]
    header = dataclasses.replace(file.run, parameters={**file.run.parameters, **parameters})
    return dataclasses.replace(run, files={**run.files, family: dataclasses.replace(file, run=header)})


def test_threads_count_where_both_runs_measured_the_family(made_run):
    records = [*blocks("a", [1.0] * 6), *blocks("b", [1.0] * 6, "capacity")]
    a, b = (made_run(records, run_id=name) for name in "ab")
    two, one = with_parameters(a, "environment", threads=2), with_parameters(b, "environment", threads=1)
    assert compare.unlike(two, one) == ["threads: 2 against 1"]
    assert compare.unlike(with_parameters(a, "environment", threads=2), with_parameters(b, "capacity", threads=1)) == []


def test_a_run_unlike_its_own_side_is_refused_too(timed):
    a, b, c = (timed({"a": [1.0] * 6}, run_id=name, method=m) for name, m in (("a", 1), ("b", 1), ("c", 2)))
    for base, run in (([a, c], [b]), ([a], [b, c])):
        with pytest.raises(CompareError, match="a and c must not be compared: method: 1 against 2"):
            compare.compare(base, run)


def test_a_side_needs_runs_and_each_counts_once(timed):
    a, b = timed({"a": [1.0] * 6}, run_id="a"), timed({"a": [1.0] * 6}, run_id="b")
    with pytest.raises(CompareError, match="no baseline is given"):
        compare.compare([], [a])
    with pytest.raises(CompareError, match="no run is given"):
        compare.variability([])
    with pytest.raises(CompareError, match="baseline: run a is given twice"):
        compare.compare([a, a, b], [b])
    other = dataclasses.replace(a, env={"host": {"name": "another node"}})  # started in the same second elsewhere
    assert compare.compare([a, other], [b]).rows[0].base_count == 2


def test_a_workload_that_is_no_object_is_one_line(timed):
    run = timed({"a": [1.0] * 6}, run_id="a", workload=["w"])
    with pytest.raises(CompareError, match="a: run.json: workload is no object"):
        compare.compare([run], [run])


ENV = {
    "host": {
        "name": "n1", "system": "Linux 6.8", "memory": {"total_bytes": 10, "available_bytes": 7, "usable_bytes": 7},
        "disk_free_bytes": 5, "shm_free_bytes": 5, "cpu": {"model_name": "C", "printed_hz": 2.0e9, "flags": ["b", "a"]},
        "cpus": {"affinity": [3, 0, 1, 2], "threads": 4, "why": "4 CPUs allowed"},
        "caches": [{"level": 3, "size_bytes": 8, "shared_cpu_list": cpus} for cpus in ("0-1", "2-3")],
    },
    "software": {"packages": {"torch": "2.9"}, "driver": None},
    "knobs": {"governor": "performance", "load_average": "0.1"}, "variables": {}, "checks": [{"found": "0.1"}],
}  # fmt: skip


def test_the_environment_side_by_side(timed):
    a, b = (dataclasses.replace(timed({"a": [1.0] * 6}), env=copy.deepcopy(ENV)) for _ in range(2))
    b.env["host"].update(disk_free_bytes=1, shm_free_bytes=2)
    b.env["host"]["memory"].update(available_bytes=1, usable_bytes=2)
    b.env["host"]["cpus"].update(affinity=[0, 1, 2, 3], why="other words")
    b.env["host"]["cpu"].update(printed_hz=3.0e9, flags=["a", "b"])
    b.env["host"]["caches"].reverse()
    b.env["knobs"]["load_average"] = "9"
    b.env["checks"] = []
    assert compare.environment_differences(a, b) == []
    b.env["host"].update(system="Linux 6.9", caches=b.env["host"]["caches"][:1])
    b.env["host"]["cpus"]["affinity"] = [0, 1, 5]
    b.env["software"].update(driver="6.14", packages={"torch": "2.10", "triton": "3.5"})
    b.env["knobs"]["governor"] = "powersave"
    b.env["variables"] = {"HSA_X": "1"}
    found = {d.what: (d.base, d.run) for d in compare.environment_differences(a, b)}
    assert found == {
        "host.system": ("Linux 6.8", "Linux 6.9"), "host.cpus.affinity": ("0-3", "0-1,5"),
        "host.caches": ("2 x level 3, size_bytes 8", "1 x level 3, size_bytes 8"),
        "software.driver": (None, "6.14"), "software.packages.torch": ("2.9", "2.10"),
        "software.packages.triton": (None, "3.5"), "knobs.governor": ("performance", "powersave"),
        "variables.HSA_X": (None, "1"),
    }  # fmt: skip
    back = {d.what: (d.run, d.base) for d in compare.environment_differences(b, a)}
    assert back == found
    assert compare.compare([a], [b]).environment == tuple(compare.environment_differences(a, b))


def test_the_headers_tell_software_and_commit(timed):
    a, b = timed({"a": [1.0] * 6}), timed({"a": [1.0] * 6}, settings={"budget": "full"})
    file = b.files["environment"]
    header = dataclasses.replace(file.run, software={"packages": {"torch": "2.10"}}, git={"commit": "c0ffee", "dirty": True})
    b.files["environment"] = dataclasses.replace(file, run=header)
    assert {d.what: (d.base, d.run) for d in compare.environment_differences(a, b)} == {
        "software.packages.torch": (None, "2.10"), "git.commit": (None, "c0ffee"), "git.dirty": (None, "true"),
        "settings.budget": ("quick", "full"),
    }  # fmt: skip


# --------------------------------------------------------------------------------------------- headlines and rows


def test_headlines_are_what_the_pages_show(made_run):
    run = modelled(made_run)
    found = compare.headlines(run)
    c, b, shares = derive.compute(run), derive.bandwidth(run), {m.scope: m for m in roofline.mfu(run)}
    assert found["compute_roof"].value == c.roof.flop_s and found["compute_roof"].detail == "8192x8192x8192 NN"
    assert found["bandwidth_roof"].value == b.roof.bytes_s
    assert found["pass_eager"].value.median == 30.0 and not found["pass_eager"].higher_is_better
    for mode in ("eager", "compiled"):
        assert found[f"mfu_{mode}"].value == shares[mode].shares["measured"]
    assert found["capacity"].value.median == memory.capacity(run).total.bytes == 2**35
    assert found["best_square"].value is None and found["best_square"].reason == "no square GEMM was timed"
    assert found["add_plateau"].reason == "no plateau of add"
    assert found["bandwidth_roof"].label == "bandwidth roof"
    assert {h.unit for h in found.values()} == {"FLOP/s", "B/s", "fraction", "s", "B"}
    assert all(bool(h.value) != bool(h.reason) for h in found.values())


def test_headlines_of_nothing_say_so(made_run):
    run = dataclasses.replace(made_run([]), status={"compute": {"status": "failed", "message": "out of memory"}})
    found = compare.headlines(run)
    assert all(h.value is None for h in found.values())
    assert found["compute_roof"].reason == "family compute was not measured (failed: out of memory)"
    assert found["mfu_eager"].reason == "family e2e was not measured"


def test_a_plateau_that_is_not_whole_names_the_size(made_run):
    records = made.roofs(2000, 1000)
    lost = [r for r in records if r.case == "copy.2GiB"]
    skipped = dataclasses.replace(lost[0], skipped="out of memory", error=None)
    found = compare.headlines(made_run([*(r for r in records if r not in lost), skipped], found=MI355X))
    assert found["bandwidth_roof"].value is None and found["bandwidth_roof"].reason == "copy.2GiB: skipped: out of memory"


def test_the_blocks_of_a_headline_give_its_estimate(sample):
    """The noise of a headline is that of the blocks its estimate is made of."""
    for key, h in compare.headlines(sample).items():
        if key in ("compute_roof", "best_square", "bandwidth_roof", "add_plateau") and h.value:
            times_s = sorted(h.blocks)
            scale = h.value.median * statistics.median(times_s)  # the work of a block
            assert (scale / times_s[-1], scale / times_s[0]) == pytest.approx((h.value.lo, h.value.hi), rel=0.02)
            assert len(h.blocks) == h.value.blocks == 6


def test_rows_are_timed_cases_of_every_family(made_run):
    run = modelled(made_run)
    found = compare.case_rows(run)
    assert {family for family, _ in found} == {"compute", "bandwidth", "ops", "e2e"}
    assert all(r.time_s and r.role == "case" for r in found.values())
    assert found["e2e", "eager"].time_s.median == 30.0 and ("ops", "self_attn.flash.aiter") not in found


def test_a_missing_family_and_a_new_row_are_listed(made_run):
    whole = modelled(made_run, "whole")
    part = made_run(
        [*made.roofs(2000, 1000), *blocks("new", [1.0] * 6)], found=MI355X, workload=TINY.to_json(), run_id="part"
    )
    part = dataclasses.replace(part, status={"ops": {"status": "failed", "message": "out of memory"}})
    found = compare.compare([whole], [part])
    assert found.missing == (
        "run: family capacity was not measured", "run: family e2e was not measured",
        "run: family ops was not measured (failed: out of memory)", "baseline: family environment was not measured",
    )  # fmt: skip
    lost, new = row(found, "ops/ffn.gelu"), row(found, "environment/new")
    assert lost.base and lost.run is None and lost.verdict is None and "failed: out of memory" in lost.reason
    assert new.run and new.base is None and new.reason == "baseline: family environment was not measured"
    assert row(found, "mfu_compiled").reason == "run: family e2e was not measured"
    assert {"ops/ffn.gelu", "environment/new", "mfu_eager", "capacity"} <= {x.key for x in found.one_sided}
    assert row(found, "compute_roof").verdict == SAME and compare.regressions(found) == []


def test_a_wrong_or_skipped_row_is_listed_with_its_reason(made_run):
    def run(name, *times):
        records = []
        for case, seconds in zip("abcd", times, strict=True):
            records += made.records_of(made.Case(case, {}, flop=1), "environment", seconds, "x")
        return made_run(records, run_id=name)

    found = compare.compare([run("b", 1.0, 1.0, made.WRONG, "no memory")], [run("r", made.WRONG, "no memory", 1.0, 1.0)])
    assert {x.key.partition("/")[2]: x.reason for x in found.rows} == {
        "a": "run: wrong result", "b": "run: skipped: no memory",
        "c": "baseline: wrong result", "d": "baseline: skipped: no memory",
    }  # fmt: skip
    assert len(found.one_sided) == 4 and not any(x.ratio or x.verdict for x in found.rows)
    nowhere = compare.compare([run("b", 1.0, 1.0, 1.0, made.WRONG)], [run("r", 1.0, 1.0, 1.0, "no memory")])
    assert [x.label for x in nowhere.rows] == ["a", "b", "c"]
    some = compare.compare(
        [run(f"b{i}", 1.0, 1.0, 1.0, 1.0) for i in range(3)],
        [run(f"r{i}", made.WRONG if i == 0 else 1.0, 1.0, 1.0, 1.0) for i in range(4)],
    )
    assert row(some, "environment/a").note == "run: wrong result in 1 of 4 processes"
    assert row(some, "environment/a").run_count == 3 and not row(some, "environment/a").indicative


def test_times_of_other_work_have_no_ratio(made_run):
    """The roof's shape is the search's: its time says nothing where another shape won, its rate does."""
    a, b = (made_run(made.roofs(peak, 1000), found=MI355X, run_id=str(peak)) for peak in (2000, 3000))
    found = compare.compare([a], [b])
    assert row(found, "compute/roof").ratio is None and row(found, "compute/roof").verdict is None
    assert row(found, "compute/roof").reason == "the work differs: 2000 FLOP against 3000 FLOP"
    assert row(found, "compute_roof").ratio.median == pytest.approx(1.5) and row(found, "compute_roof").verdict == FASTER
    assert not found.one_sided
    mixed = row(compare.compare([a, b], [dataclasses.replace(a, info={**a.info, "run_id": "c"})]), "compute/roof")
    assert mixed.base is None and mixed.run.median == 1.0 and mixed.reason.startswith("the work differs")


def test_another_backend_is_said(made_run):
    a, b = (made_run(blocks("a", [1.0] * 6, backend=name), run_id=name) for name in ("flash", "math"))
    assert row(compare.compare([a], [b]), "environment/a").note == "flash against math"
    assert row(compare.compare([a], [a]), "environment/a").note == ""


def test_capacity_needs_runs_and_no_noise(made_run):
    def runs(name, *given, flags=()):
        out = []
        for i, amount in enumerate(given):
            records = [dataclasses.replace(r, flags=flags) for r in made.capacity(2**36, amount)]
            out.append(made_run(records, found=MI355X, run_id=f"{name}{i}"))
        return out

    [only] = compare.compare(runs("b", 2**35), runs("r", 2**34)).headlines
    assert only.key == "capacity" and only.verdict is None and "no interval" in only.reason and only.ratio.median == 0.5
    [three] = compare.compare(runs("b", *[2**35] * 3), runs("r", *[2**34] * 3)).headlines
    assert three.verdict == SLOWER and three.noise_floor is None and (three.ratio.lo, three.ratio.hi) == pytest.approx((0.5, 0.5))
    [least] = compare.compare(runs("b", *[2**35] * 3), runs("r", *[2**34] * 3, flags=("AT_LEAST",))).headlines
    assert least.verdict is None and "lower bound" in least.reason and "run: at least" in least.note


# --------------------------------------------------------------------------------------------- fresh processes


def test_iterations_inside_a_run_are_processes(made_run):
    def run(name, *factors):
        records = [
            r for i, f in enumerate(factors, 1) for r in blocks("a", [f * (1 + 0.001 * k) for k in range(6)], iteration=i)
        ]
        records += blocks("once", [1.0] * 6, "capacity")
        return derive.separated(made_run(records, run_id=name))

    split = compare.processes(run("a", 1.0, 2.0))
    assert [sorted(p.files) for p in split] == [["capacity", "environment"], ["environment"]]
    assert [compare.case_rows(p)["environment", "a"].time_s.median for p in split] == pytest.approx([1.0025, 2.005])
    whole = run("a", 1.0)
    assert compare.processes(whole) == [whole]
    begun = derive.separated(made_run(blocks("a", [1.0], iteration=2), iterations=3))
    assert [p.iteration for p in compare.processes(begun)] == [2]  # the others left nothing

    inside = compare.compare([run("a", 1.0, 1.001, 0.999)], [run("b", 1.05, 1.051, 1.049)])
    alone = compare.compare(
        [run(f"a{f}", f) for f in (1.0, 1.001, 0.999)], [run(f"b{f}", f) for f in (1.05, 1.051, 1.049)]
    )
    x, y = row(inside, "environment/a"), row(alone, "environment/a")
    assert x == y and x.verdict == SLOWER and not x.indicative and (x.base_count, x.run_count) == (3, 3)
    assert row(inside, "capacity/once").indicative and row(inside, "capacity/once").base_count == 1
    assert row(inside, "capacity/once").note == ""
    assert [(p.run_id, p.iteration) for p in inside.base] == [("a", 1), ("a", 2), ("a", 3)]
    assert [p.iteration for p in compare.variability([run("a", 1.0, 2.0)]).processes] == [1, 2]


# --------------------------------------------------------------------------------------------- regressions


def test_a_roof_that_fell_is_a_regression(made_run):
    found = compare.compare([modelled(made_run, "a")], [modelled(made_run, "b", peak=1900, rate=950)])
    fell = {r.what: r for r in compare.regressions(found)}
    assert list(fell) == ["compute roof", "bandwidth roof"]  # MFU rises as its roof falls
    roof = fell["compute roof"]
    assert (roof.base.median, roof.run.median, roof.limit, roof.limit_unit) == (2000, 1900, 0.03, "percent")
    assert roof.change.median == pytest.approx(-0.05) and roof.indicative and roof.unit == "FLOP/s"
    assert compare.regressions(compare.compare([modelled(made_run, "a")], [modelled(made_run, "b", peak=1950)])) == []


def test_a_roof_that_rose_takes_mfu_down_and_says_so(made_run):
    found = compare.compare([modelled(made_run, "a")], [modelled(made_run, "b", peak=2100)])
    [only] = compare.regressions(found)
    assert only.what == "MFU of the measured roof, compiled"
    assert only.note == "the compute roof rose; the time of a compiled pass is same"


@pytest.mark.parametrize("slower, called", [(1.0, False), (1.03, False), (1.06, True), (0.9, False)])
def test_compiled_mfu_is_judged_in_percentage_points(made_run, slower, called):
    """An MFU of 24768 / 25 / 2000 = 49.5 %: 2 points are 4.2 % of the time."""
    found = compare.compare([modelled(made_run, "a")], [modelled(made_run, "b", slower=slower)])
    mfu, fell = row(found, "mfu_compiled"), [r for r in compare.regressions(found) if "MFU" in r.what]
    assert mfu.difference.median == pytest.approx(24768 / 2000 / 25 * (1 / slower - 1)) and mfu.limit == 0.02
    assert (mfu.verdict == SLOWER) == bool(fell) == called
    if called:
        [only] = fell
        assert only.limit_unit == "percentage points" and only.change == mfu.difference and only.limit == 0.02
        assert (only.base, only.run, only.unit, only.note) == (mfu.base, mfu.run, "fraction", "")


def passes(made_run, name, slower, block_factors, roof_factors=(1.0,) * 6, count=10):
    """Runs of the roofs and the passes alone, each block of a pass or of the roof times its factor."""
    out = []
    for n in range(count):
        seconds = [25.0 * slower * f for f in block_factors]
        records = [*made.roofs(2000, 1000), *made.e2e(TINY, seconds, seconds)]
        records = [
            dataclasses.replace(r, samples_s=(roof_factors[r.block],)) if r.case == "roof" and r.samples_s else r for r in records
        ]
        out.append(made_run(records, found=MI355X, workload=TINY.to_json(), run_id=f"{name}{n}"))
    return out


def test_an_mfu_within_the_noise_of_its_passes_is_not_called(made_run):
    """Where every second block of a pass is 10 % slower, the noise of an MFU of 50 % is 5 points, and a fall of 5 points
    is not called, however many runs agree on it. The same blocks in pairs are odd and even alike: it is called."""
    turns, pairs = [0.95, 1.045] * 4, [0.95, 0.95, 1.045, 1.045] * 2
    for factors, verdict in ((turns, AMBIGUOUS), (pairs, SLOWER)):
        base, run = passes(made_run, "a", 1.0, factors), passes(made_run, "b", 1.12, factors)
        found = compare.compare(base, run)
        mfu, least = row(found, "mfu_compiled"), compare.median_variance(factors)
        values = [mfu.base.median, mfu.run.median]
        expected = compare.welch(*([v] * 10 for v in values), *(least * v**2 for v in values))
        assert (mfu.difference.lo, mfu.difference.hi) == pytest.approx((expected.lo, expected.hi))
        assert mfu.verdict == verdict and mfu.difference.hi < -0.035
        assert mfu.noise_floor == pytest.approx(compare.odd_even(factors))


def test_the_noise_of_an_mfu_is_that_of_its_roof_too(made_run):
    [run] = passes(made_run, "a", 1.0, [1.0] * 6, roof_factors=[1.0, 1.2] * 3, count=1)
    found = compare.noise_floor(run).headlines
    assert found["pass_eager"] == 0 and found["mfu_eager"] == found["compute_roof"] == pytest.approx(math.log(1.2))
    spread = compare.variability([run]).spread("mfu_eager")
    assert spread.within_frac == pytest.approx(math.sqrt(compare.median_variance([1.0, 1.2] * 3)))


def test_mfu_of_many_runs(made_run):
    def three(name, slower):
        return [modelled(made_run, f"{name}{n}", slower=slower * (1 + 0.001 * n)) for n in range(3)]

    found = compare.compare(three("a", 1.0), three("b", 1.06))
    mfu = row(found, "mfu_compiled")
    values = [[24768 / 2000 / 25 / (s * (1 + 0.001 * n)) for n in range(3)] for s in (1.0, 1.06)]
    welch = compare.welch(*values)
    assert (mfu.difference.lo, mfu.difference.hi) == pytest.approx((welch.lo, welch.hi))
    assert mfu.verdict == SLOWER and not mfu.indicative
    assert [r.indicative for r in compare.regressions(found)] == [False]


def crossing(found):
    return {r.what.removeprefix("operation "): r for r in compare.regressions(found) if r.unit == "bound"}


THREE = {"ffn.linear1", "ffn.linear2", "cross_attn.flash"}  # of 2.8, 2.8 and 2.7 FLOP/B; self_attn.flash has 4


@pytest.mark.parametrize(
    "peak, crossed",
    [
        (2000, set()),  # the ridge stays at 2 FLOP/B
        (3000, set()),  # a ridge of 3: the three are below it, but near
        (4000, THREE),  # a ridge of 4: attention stands on it
        (20_000, {*THREE, "self_attn.flash"}),
    ],
)
def test_an_operation_that_crosses_the_ridge_is_a_regression(made_run, peak, crossed):
    before, after = modelled(made_run, "a"), modelled(made_run, "b", peak=peak)
    found = crossing(compare.compare([before], [after]))
    assert set(found) == crossed
    assert all((r.base, r.run) == ("compute-bound", "memory-bound") for r in found.values())
    assert all(r.indicative and r.change is r.limit is None for r in found.values())
    assert not crossing(compare.compare([after], [before]))  # the other way is no regression
    assert compare.regressions(compare.compare([before], [after], across=True)) == []


def test_a_crossing_needs_the_whole_ridge_of_every_process(made_run):
    def wide(run, last):
        """The roof's last block takes `last` times as long: its interval reaches over the old or the new ridge."""
        file = run.files["compute"]
        records = [
            dataclasses.replace(r, samples_s=(last,)) if r.case == "roof" and r.samples_s and r.block == 5 else r
            for r in file.records
        ]
        return dataclasses.replace(run, files={**run.files, "compute": dataclasses.replace(file, records=records)})

    def called(base, run):
        """Where the operations bound by compute before are bound after, as far as it is settled; and what is called."""
        found = compare.compare(base, run)
        ends = {(b.base, b.run) for b in found.bounds if b.op in {*THREE, "self_attn.flash"}}
        return ends, len(crossing(found))

    before, after = modelled(made_run, "a"), modelled(made_run, "b", peak=20_000)
    assert called([before], [after]) == ({("compute", "memory")}, 4)
    assert called([before], [wide(after, 12.0)]) == ({("compute", None)}, 0)
    assert called([wide(before, 0.1)], [after]) == ({(None, "memory")}, 0)
    assert called([before], [after, modelled(made_run, "c")]) == ({("compute", None)}, 0)
    assert called([before], [after, modelled(made_run, "c", peak=21_000)]) == ({("compute", "memory")}, 4)
    bound = compare.compare([before], [after]).bounds[0]
    assert (bound.base_ridge.median, bound.run_ridge.median) == (2, 20)


# --------------------------------------------------------------------------------------------- variability


def roofs_of(made_run, *peaks, spread=0.0):
    out = []
    for i, peak in enumerate(peaks):
        items = []
        for r in made.roofs(peak, 1000):
            seconds = tuple(s * (1 + spread * (r.block - 2.5)) for s in r.samples_s) if r.case == "roof" else r.samples_s
            items.append(dataclasses.replace(r, samples_s=seconds))
        out.append(made_run(items, run_id=f"run{i}"))
    return out


def test_variability_by_hand(made_run):
    found = compare.variability(roofs_of(made_run, 1000, 1010, 1030))
    roof = found.spread("compute_roof")
    assert [s.key for s in found.spreads] == ["compute_roof", "bandwidth_roof"]
    assert roof.values == (1000, 1010, 1030) and (roof.count, roof.unit) == (3, "FLOP/s")
    assert (roof.mean, roof.median) == pytest.approx((3040 / 3, 1010))
    assert roof.cv == pytest.approx(math.sqrt(700 / 3) / (3040 / 3)) == pytest.approx(0.0150745, rel=1e-4)
    assert roof.within_frac == 0 and roof.between_frac == pytest.approx(roof.cv)
    assert (found.kind, found.cv_limit_frac, found.runs_needed) == ("cpu", 0.1, 3)
    gpu = made_run(made.roofs(1000, 1000), found=MI355X)
    assert compare.variability([gpu]).cv_limit_frac == 0.03
    assert [(p.run_id, p.iteration) for p in found.processes] == [("run0", 1), ("run1", 1), ("run2", 1)]
    assert found.spread("capacity") is None


def test_what_the_blocks_explain_is_not_between_runs(made_run):
    found = compare.variability(roofs_of(made_run, 1000, 1001, 1002, spread=0.02)).spread("compute_roof")
    logs = [math.log(1 + 0.02 * (b - 2.5)) for b in range(6)]
    expected = math.sqrt(statistics.variance(logs) * (math.pi / 2) / (6 + math.pi / 2 - 1))
    assert found.within_frac == pytest.approx(expected) and found.within_frac > found.cv
    assert found.between_frac == 0
    wide = compare.variability(roofs_of(made_run, 1000, 1100, 1200, spread=0.02)).spread("compute_roof")
    assert wide.between_frac == pytest.approx(math.sqrt(wide.cv**2 - expected**2)) and 0 < wide.between_frac < wide.cv


def test_one_process_has_no_cv_and_a_missing_value_is_kept(made_run):
    [one] = compare.variability(roofs_of(made_run, 1000)[:1]).spreads[:1]
    assert one.cv is one.cv_interval is one.between_frac is None and one.mean == 1000
    runs = [*roofs_of(made_run, 1000, 1010), made_run(made.capacity(2**36, 2**35), run_id="only capacity")]
    found = compare.variability(runs)
    assert found.spread("compute_roof").values == (1000, 1010, None) and found.spread("compute_roof").count == 2
    assert found.spread("capacity").values == (None, None, 2**35) and found.spread("capacity").within_frac is None


def test_the_interval_of_the_cv_covers_it():
    rng, inside = random.Random(5), 0
    for _ in range(300):
        values = tuple(rng.gauss(100, 5) for _ in range(5))
        lo, hi = compare.Spread("k", "l", "s", values, (None,) * 5).cv_interval
        inside += lo <= 0.05 <= hi
    assert 0.91 <= inside / 300 <= 0.99


@pytest.mark.parametrize(
    "values, known", [((1.0, 1.0, 1.0), (0, 0)), ((1.0, 1.4, 1.9), (0.15, math.inf)), ((1.0, 9.0, 2.0), None)]
)
def test_where_a_cv_has_an_interval(values, known):
    found = compare.Spread("k", "l", "s", values, (0.0,) * 3).cv_interval
    assert found == (known and pytest.approx(known, rel=0.1))


def test_the_summary_comes_back_as_it_was(made_run):
    runs = [*roofs_of(made_run, 1000, 1010, 1030, spread=0.01), made_run(made.capacity(2**36, 2**35), run_id="c")]
    found = compare.variability(runs)
    text = json.dumps(compare.summary(found), allow_nan=False)
    assert compare.read_summary(json.loads(text)) == found
    assert {"run0", "run1", "run2", "c"} <= {p["run_id"] for p in json.loads(text)["processes"]}


def without(key):
    return lambda d: {k: v for k, v in d.items() if k != key}


def setting(path, value):
    def change(data):
        inner = data
        for step in path[:-1]:
            inner = inner[step]
        inner[path[-1]] = value
        return data

    return change


@pytest.mark.parametrize(
    "damage, said",
    [
        (lambda d: None, "the top level"), (lambda d: [], "the top level"), (without("schema"), "schema"),
        (setting(["schema"], 2), "schema"), (setting(["kind"], "tpu"), "kind"), (without("processes"), "processes"),
        (setting(["processes"], []), "processes"), (setting(["processes", 0], "run0"), r"processes\[0\]"),
        (setting(["processes", 1, "iteration"], -1), r"processes\[1\]"),
        (setting(["processes", 1, "run_id"], None), r"processes\[1\]"),
        (setting(["runs_needed"], 2.5), "runs_needed"), (setting(["cv_limit_frac"], "3 %"), "cv_limit_frac"),
        (setting(["headlines"], []), "headlines"), (setting(["headlines", "compute_roof"], 3), "headlines.compute_roof"),
        (setting(["headlines", "compute_roof", "unit"], None), "headlines.compute_roof.unit"),
        (setting(["headlines", "compute_roof", "values"], [1.0]), "headlines.compute_roof.values"),
        (setting(["headlines", "compute_roof", "values"], [1.0, "x", 2.0]), "headlines.compute_roof.values"),
        (setting(["headlines", "compute_roof", "values"], [1.0, math.nan, 2.0]), "headlines.compute_roof.values"),
        (setting(["headlines", "compute_roof", "values"], [1.0, 0, 2.0]), "headlines.compute_roof.values"),
        (setting(["headlines", "compute_roof", "values"], [None, None, None]), "headlines.compute_roof.values"),
        (setting(["headlines", "compute_roof", "values"], [1.0, True, 2.0]), "headlines.compute_roof.values"),
        (setting(["headlines", "compute_roof", "within"], [0.1, -0.1, 0.1]), "headlines.compute_roof.within"),
    ],
)  # fmt: skip
def test_a_malformed_summary_is_refused_by_key(made_run, damage, said):
    data = damage(compare.summary(compare.variability(roofs_of(made_run, 1000, 1010, 1030))))
    with pytest.raises(CompareError, match=rf"^some/variability.json: {said} is wrong or missing; expected [^\n]*$"):
        compare.read_summary(data, "some/variability.json")


# --------------------------------------------------------------------------------------------- the sample runs


def test_a_sample_against_itself(sample):
    found = compare.compare([sample], [sample])
    assert found.unlike == found.environment == found.missing == () and not found.one_sided
    assert {x.verdict for x in (*found.headlines, *found.rows)} <= {SAME, AMBIGUOUS, None}
    assert len(found.rows) > 80 and all(x.indicative for x in found.rows) and len(found.headlines) == 9
    assert all(x.verdict for x in found.rows) and compare.regressions(found) == []
    assert Counter(b.base == b.run and b.base is not None for b in found.bounds) == {True: 25}


def test_the_samples_only_side_by_side():
    cpu, gpu = (derive.load(Path(SAMPLES) / name) for name in ("cpu", "mi355x"))
    with pytest.raises(CompareError, match="device: .* against AMD Instinct MI355X.*workload depth: 1 against 40"):
        compare.compare([cpu], [gpu])
    found = compare.compare([cpu], [gpu], across=True)
    assert not any(x.verdict for x in (*found.headlines, *found.rows)) and found.bounds == ()
    assert found.headline("compute_roof").ratio.median > 1 and found.headline("pass_eager").ratio is None
    assert found.headline("pass_eager").reason.startswith("the work differs") and len(found.unlike) > 5
    assert isinstance(found.headline("mfu_eager").base, Estimate) and found.one_sided
    assert targets.Found(**dataclasses.asdict(cpu.found)) == cpu.found  # comparing changed nothing
