"""Medians of blocks, their intervals and ratios: known values, coverage by simulation, invariances."""

import math
import random
import statistics as standard

import pytest
from hypothesis import given
from hypothesis import strategies as st

from escher_kernels.statistics import (
    Estimate,
    coverage_of,
    estimate,
    interval_rank,
    outliers,
    paired_ratio,
    percentile,
    slope,
)

positive = st.floats(1e-9, 1e3)
block = st.lists(positive, min_size=1, max_size=7)
blocks = st.lists(block, min_size=1, max_size=14)


def singles(values):
    return [[v] for v in values]


def close(a: Estimate, b: Estimate, rel=1e-9):
    return all(math.isclose(getattr(a, n), getattr(b, n), rel_tol=rel) for n in ("median", "lo", "hi"))


# ---- the interval ----

# n -> rank k of the order statistic and 1 - 2 sum_{i<k} C(n,i) / 2^n, e.g. 12: 1 - 2 (1 + 12 + 66) / 4096
RANKS = {
    1: (1, 0.0), 2: (1, 0.5), 3: (1, 0.75), 4: (1, 0.875), 5: (1, 0.9375), 6: (1, 0.96875), 7: (1, 0.984375),
    8: (1, 0.9921875), 9: (2, 0.9609375), 10: (2, 0.978515625), 11: (2, 0.98828125), 12: (3, 0.961425781),
    20: (6, 0.958610535), 24: (7, 0.977344155),
}  # fmt: skip


@pytest.mark.parametrize("n", RANKS)
def test_ranks_and_coverage(n):
    k, coverage = RANKS[n]
    values = [float(v) for v in range(1, n + 1)]
    random.Random(n).shuffle(values)
    found = estimate(singles(values))
    assert interval_rank(n) == k
    assert (found.lo, found.hi, found.blocks) == (k, n + 1 - k, n)
    assert found.coverage == pytest.approx(coverage, abs=1e-9)


@given(st.integers(6, 200))
def test_rank_is_the_largest_that_covers(n):
    k = interval_rank(n)
    assert coverage_of(n, k) >= 0.95
    assert 2 * (k + 1) > n or coverage_of(n, k + 1) < 0.95


@pytest.mark.parametrize("n", [6, 9, 12, 24])
@pytest.mark.parametrize("law", ["normal", "skewed", "two clocks"])
def test_interval_holds_the_true_median_as_often_as_it_says(n, law):
    rng, tries = random.Random(n), 3000
    draw, truth = {
        "normal": (lambda: rng.gauss(10, 1), 10),
        "skewed": (lambda: 1 + rng.expovariate(1), 1 + math.log(2)),
        "two clocks": (lambda: rng.uniform(1, 1.01) if rng.random() < 0.6 else rng.uniform(2, 2.01), 1 + 0.01 * 5 / 6),
    }[law]
    held = 0
    for _ in range(tries):
        found = estimate([draw()] for _ in range(n))
        held += found.lo <= truth <= found.hi
    nominal = coverage_of(n, interval_rank(n))
    deviation = math.sqrt(nominal * (1 - nominal) / tries)
    assert abs(held / tries - nominal) < 4 * deviation  # neither too narrow nor wider than it claims


def test_samples_of_a_block_do_not_count_as_observations():
    # 100 samples in each of 6 blocks, each block with its own level: the interval is that of the 6 levels
    rng = random.Random(1)
    levels = [1.00, 1.02, 1.04, 1.06, 1.08, 1.10]
    found = estimate([[level + rng.gauss(0, 1e-6) for _ in range(101)] for level in levels])
    assert found.lo == pytest.approx(1.00, abs=1e-5) and found.hi == pytest.approx(1.10, abs=1e-5)
    assert found.blocks == 6 and found.samples == 606


def test_a_spike_does_not_move_the_headline():
    steady = [[1.0] * 9 for _ in range(6)]
    steady[2][4] = 100.0
    assert estimate(steady).median == 1.0 == estimate(steady).hi


def test_empty_blocks_are_left_out_and_nothing_is_an_error():
    assert estimate([[], [2.0], []]).blocks == 1
    for nothing in ([], [[], []]):
        with pytest.raises(ValueError, match="no samples"):
            estimate(nothing)


def test_half_width_is_that_of_the_wider_side():
    assert estimate(singles([0.9, 1.0, 1.0, 1.0, 1.0, 1.3])).half_width == pytest.approx(0.3)
    assert estimate(singles([0.6, 1.0, 1.0, 1.0, 1.0, 1.3])).half_width == pytest.approx(0.4)
    assert estimate(singles([-1.1, -1.0, -1.0])).half_width == pytest.approx(0.1)
    assert estimate(singles([-1.0, 0.0, 1.0])).half_width == math.inf


def test_converged_needs_six_blocks_and_a_narrow_interval():
    assert estimate(singles([1.0] * 6)).converged(0.01)
    assert not estimate(singles([1.0] * 5)).converged(0.01)
    wide = estimate(singles([0.99, 1, 1, 1, 1, 1.02]))
    assert wide.converged(0.021) and not wide.converged(0.019)


# ---- invariances ----


@given(blocks, st.floats(1e-3, 1e3))
def test_scale(items, factor):
    scaled = estimate([[v * factor for v in b] for b in items])
    assert close(scaled, estimate(items).times(factor))
    assert math.isclose(scaled.half_width, estimate(items).half_width, rel_tol=1e-6, abs_tol=1e-9)


@given(blocks, st.randoms(use_true_random=False))
def test_order_does_not_matter(items, rng):
    shuffled = [rng.sample(b, len(b)) for b in items]
    rng.shuffle(shuffled)
    assert estimate(shuffled) == estimate(items)


@given(blocks)
def test_interval_encloses_the_median_and_lies_within_the_data(items):
    found = estimate(items)
    every = [v for b in items for v in b]
    assert min(every) <= found.lo <= found.median <= found.hi <= max(every)
    assert found.samples == len(every)


@given(blocks, st.floats(1, 1e12))
def test_a_rate_swaps_the_ends(items, work):
    time = estimate(items)
    rate = time.over(work)
    assert rate.lo <= rate.median * (1 + 1e-12) and rate.median <= rate.hi * (1 + 1e-12)
    assert rate.lo == work / time.hi and rate.hi == work / time.lo and rate.coverage == time.coverage


def test_times_a_negative_factor_keeps_lo_below_hi():
    found = estimate(singles([1.0, 2.0, 3.0])).times(-1)
    assert (found.lo, found.median, found.hi) == (-3, -2, -1)


# ---- ratios ----


def test_a_paired_ratio_cancels_a_drift_that_both_share():
    rng = random.Random(2)
    drift = [1 + 0.5 * i for i in range(6)]  # the machine becomes 3.5 times slower
    a = [[0.9 * d * rng.uniform(1, 1.001) for _ in range(3)] for d in drift]
    b = [[d * rng.uniform(1, 1.001) for _ in range(3)] for d in drift]
    found = paired_ratio(a, b)
    assert found.median == pytest.approx(0.9, rel=2e-3) and found.half_width < 2e-3
    unpaired = estimate(a).median / estimate(b).lo
    assert abs(unpaired - 0.9) > 0.1


@given(blocks)
def test_ratio_with_itself_is_one(items):
    found = paired_ratio(items, items)
    assert (found.lo, found.median, found.hi) == (1, 1, 1)


@given(st.lists(st.tuples(positive, positive), min_size=1, max_size=9))
def test_ratio_of_the_swapped_pair_is_the_inverse(pairs):
    a, b = singles(x for x, _ in pairs), singles(y for _, y in pairs)
    forth, back = paired_ratio(a, b), paired_ratio(b, a)
    assert math.isclose(forth.lo, 1 / back.hi, rel_tol=1e-9) and math.isclose(forth.hi, 1 / back.lo, rel_tol=1e-9)


@pytest.mark.parametrize(("a", "b"), [([[1.0]], [[1.0], [1.0]]), ([[1.0, 2.0]], [[1.0]])])
def test_pairs_that_do_not_match(a, b):
    with pytest.raises(ValueError):
        paired_ratio(a, b)


# ---- percentile, outliers ----


def test_percentile():
    values = [15.0, 20.0, 35.0, 40.0, 50.0]
    assert [percentile(values, q) for q in (0, 40, 50, 100)] == [15, 29, 35, 50]
    assert percentile([7.0], 90) == 7


@given(st.lists(positive, min_size=2, max_size=30), st.integers(1, 99))
def test_percentile_agrees_with_the_standard_library(values, q):
    assert percentile(values, q) == pytest.approx(standard.quantiles(values, n=100, method="inclusive")[q - 1])


def test_outliers():
    assert outliers([1.0, 1.1, 0.9]) == 0
    assert outliers([1.0, 1.0, 1.0, 5.0]) == 0 and outliers([1.0, 1.0, 1.0, 5.01]) == 1
    assert outliers([1.0, 1.0, 1.0, 0.2]) == 0 and outliers([1.0, 1.0, 1.0, 0.19]) == 1
    assert outliers([1.0, 1.0, 3.0], factor=2) == 1
    # ROCm has returned negative and zero event times for quick kernels: counted, and no part of the median
    assert outliers([-0.001, 0.0, 0.02]) == 2
    assert outliers([0.0, -1.0]) == 2 and outliers([]) == 0


# ---- slope ----

TIMES = [i * 0.01 for i in range(100)]


def test_slope_of_a_ramp():
    assert slope(TIMES, [1.0] * 100) == 0
    up = [1 + 0.1 * t / TIMES[-1] for t in TIMES]
    assert slope(TIMES, up) == pytest.approx(0.1 / 1.05)
    assert slope(TIMES, up[::-1]) == pytest.approx(-0.1 / 1.05)


@pytest.mark.parametrize("n", [5, 10, 63, 64, 65, 127, 128, 200])
def test_one_spike_does_not_bend_a_flat_line(n):
    for at in (0, n // 2, n - 1):
        values = [1.0] * n
        values[at] = 50.0
        assert slope([i * 0.01 for i in range(n)], values) == 0


def test_slope_of_too_little():
    assert slope([], []) == 0 and slope([1.0], [2.0]) == 0 and slope([1.0, 1.0], [2.0, 3.0]) == 0


@given(st.lists(positive, min_size=3, max_size=150), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_slope_is_a_fraction_whatever_the_units(values, time_factor, value_factor):
    times = [0.01 * i for i in range(len(values))]
    scaled = slope([t * time_factor for t in times], [v * value_factor for v in values])
    assert math.isclose(scaled, slope(times, values), rel_tol=1e-6, abs_tol=1e-9)
