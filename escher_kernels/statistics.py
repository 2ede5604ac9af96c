"""Statistics of blocks: medians, distribution-free intervals, ratios. Standard library only.

Samples inside a block are not independent (a busy neighbour slows a whole second of them), so a block counts as ONE
observation: its median. The headline is the median of the block medians, and the interval is made of their order
statistics: for n independent observations the k-th smallest and k-th largest enclose the true median with probability
1 - 2 sum_{i<k} C(n,i) / 2^n (David and Nagaraja, Order Statistics, 3rd ed., section 7.1). Six blocks: minimum to
maximum, 96.9 %.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MIN_BLOCKS = 6
COVERAGE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A median with its interval, in the unit of the observations."""

    median: float
    lo: float
    hi: float
    coverage: float  # probability that lo..hi holds the true median; below 0.95 with fewer than 6 blocks
    blocks: int
    samples: int

    @property
    def half_width(self) -> float:
        """max(hi - median, median - lo) / median, a fraction."""
        return max(self.hi - self.median, self.median - self.lo) / abs(self.median) if self.median else math.inf

    @property
    def sufficient(self) -> bool:
        return self.blocks >= MIN_BLOCKS

    def converged(self, limit_frac: float) -> bool:
        return self.sufficient and self.half_width <= limit_frac

    def over(self, amount: float) -> Estimate:
        """The estimate of amount / x: work over a time is a rate, and the interval's ends swap."""
        return Estimate(
            amount / self.median, amount / self.hi, amount / self.lo, self.coverage, self.blocks, self.samples
        )

    def times(self, factor: float) -> Estimate:
        lo, hi = sorted((self.lo * factor, self.hi * factor))
        return Estimate(self.median * factor, lo, hi, self.coverage, self.blocks, self.samples)


def coverage_of(n: int, k: int) -> float:
    """Probability that the k-th smallest and k-th largest of n observations enclose the median."""
    return 1 - 2 * sum(math.comb(n, i) for i in range(k)) / 2**n


def interval_rank(n: int, coverage: float = COVERAGE) -> int:
    """Largest k whose interval still has the coverage; 1 (minimum to maximum) where none has."""
    k = 1
    while 2 * (k + 1) <= n and coverage_of(n, k + 1) >= coverage:
        k += 1
    return k


def estimate(blocks: Iterable[Sequence[float]], coverage: float = COVERAGE) -> Estimate:
    """Median of block medians and its interval. `blocks`: the samples of each block. ValueError if all are empty."""
    blocks = [b for b in blocks if len(b)]
    if not blocks:
        raise ValueError("no samples")
    medians = sorted(statistics.median(b) for b in blocks)
    n, k = len(medians), interval_rank(len(medians), coverage)
    return Estimate(
        median=statistics.median(medians),
        lo=medians[k - 1],
        hi=medians[n - k],
        coverage=max(0.0, coverage_of(n, k)),
        blocks=n,
        samples=sum(len(b) for b in blocks),
    )


def paired_ratio(a: Iterable[Sequence[float]], b: Iterable[Sequence[float]]) -> Estimate:
    """Estimate of a/b from interleaved pairs: `a` and `b` hold each block's samples, paired by their index.

    ValueError where the pairs do not match.
    """
    ratios = []
    for block_a, block_b in zip(a, b, strict=True):
        if len(block_a) != len(block_b):
            raise ValueError(f"{len(block_a)} samples against {len(block_b)}: pairs A B A B have one of each")
        ratios.append([x / y for x, y in zip(block_a, block_b, strict=True)])
    return estimate(ratios)


def percentile(values: Sequence[float], q: float) -> float:
    """q-th percentile (0..100), linear between closest ranks."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * q / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def outliers(block: Sequence[float], factor: float = 5.0) -> int:
    """How many samples are not positive, or off the block's median by more than `factor` either way."""
    good = [s for s in block if s > 0]
    if not good:
        return len(block)
    middle = statistics.median(good)
    return sum(1 for s in block if s <= 0 or s > middle * factor or s < middle / factor)


def slope(times_s: Sequence[float], values: Sequence[float]) -> float:
    """Change of the fitted line over the whole window as a fraction of the mean; 0 for fewer than two points.

    Theil-Sen (median of pairwise slopes): one interrupted call does not bend it.
    """
    if len(values) < 2:
        return 0.0
    step = math.ceil(len(values) / 64)  # at most 2016 pairs
    points = list(zip(times_s[::step], values[::step], strict=True))
    slopes = [(v2 - v1) / (t2 - t1) for i, (t1, v1) in enumerate(points) for t2, v2 in points[i + 1 :] if t2 > t1]
    if not slopes:
        return 0.0
    return statistics.median(slopes) * (times_s[-1] - times_s[0]) / statistics.median(values)
