"""Means with intervals over seeds, paired comparisons at equal seeds, and corrections for many of them.

Intervals and p-values are Student's t, which hold their level at the three to ten seeds that experiments have; a
percentile bootstrap covers 76 to 90 % there in place of 95 (tests/test_report_statistics.py simulates both).
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from fedsim.report.runs import Floats

LEVEL = 0.95
POWER = 0.8
MIN_SEEDS = 3
"""With fewer seeds no verdict is given: the interval of two seeds reaches 9 standard deviations to each side."""
EXACT_PAIRS = 14
"""Up to this number of pairs all sign flips are enumerated; beyond it 2^14 random ones are drawn."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, its 95 % confidence interval (Student's t), and the 95 % prediction interval of one more run.

    `low`, `high`: mean -/+ t sd / sqrt(n). `next_low`, `next_high`: mean -/+ t sd sqrt(1 + 1/n). t has n - 1 degrees of
    freedom; all four are nan for one seed. `sd` is the sample's standard deviation (divisor n - 1).
    """

    mean: float
    low: float
    high: float
    next_low: float
    next_high: float
    sd: float
    num: int

    def surprise(self, value: float) -> float:
        """Two-sided p-value of the hypothesis that `value` is the result of one more run; nan for one seed."""
        return 2 * t_tail(abs(value - self.mean), self.sd * math.sqrt(1 + 1 / self.num), self.num)


def estimate(values: Sequence[float]) -> Estimate | None:
    """The estimate from one value per seed; None if there are no values."""
    x = np.asarray(values, dtype=np.float64)
    if not len(x):
        return None
    mean = float(x.mean())
    if len(x) == 1:
        return Estimate(mean, math.nan, math.nan, math.nan, math.nan, math.nan, 1)
    sd, quantile = float(x.std(ddof=1)), float(stats.t.ppf((1 + LEVEL) / 2, len(x) - 1))
    half_width, next_half_width = quantile * sd / math.sqrt(len(x)), quantile * sd * math.sqrt(1 + 1 / len(x))
    return Estimate(
        mean, mean - half_width, mean + half_width, mean - next_half_width, mean + next_half_width, sd, len(x)
    )


@dataclass(frozen=True)
class Difference:
    """Paired differences at equal seeds: their mean, its 95 % interval, and p-values of two tests that it is 0.

    `p_value` (two-sided) and the interval are those of the paired t test; `p_flips` (two-sided) is that of a sign-flip
    test, which assumes no distribution and cannot fall below 2 / 2^n. `detectable` is approximately the true difference
    that a t test with this number of pairs and this standard deviation detects in 80 % of cases.
    """

    mean: float
    low: float
    high: float
    p_value: float
    detectable: float
    sd: float
    values: tuple[float, ...]

    @property
    def num(self) -> int:
        return len(self.values)

    @property
    def p_flips(self) -> float:
        return sign_flip_test(np.array(self.values))

    def p_above(self, value: float) -> float:
        """One-sided p-value of the hypothesis that the true difference is at most `value`."""
        return t_tail(self.mean - value, self.sd / math.sqrt(self.num), self.num)

    def p_below(self, value: float) -> float:
        """One-sided p-value of the hypothesis that the true difference is at least `value`."""
        return t_tail(value - self.mean, self.sd / math.sqrt(self.num), self.num)


def paired(first: Mapping[int, float], second: Mapping[int, float]) -> Difference | None:
    """`first` - `second` at the seeds that both have; None if these are fewer than two."""
    seeds = sorted(set(first) & set(second))
    return differences([first[s] - second[s] for s in seeds])


def differences(values: Sequence[float]) -> Difference | None:
    """Statistics of given paired differences; None if these are fewer than two."""
    x = np.asarray(values, dtype=np.float64)
    if len(x) < 2:
        return None
    mean, sd, error = float(x.mean()), float(x.std(ddof=1)), float(x.std(ddof=1)) / math.sqrt(len(x))
    half_width = float(stats.t.ppf((1 + LEVEL) / 2, len(x) - 1)) * error
    detectable = float(stats.t.ppf((1 + LEVEL) / 2, len(x) - 1) + stats.t.ppf(POWER, len(x) - 1)) * error
    p_value = 2 * t_tail(abs(mean), error, len(x))
    return Difference(mean, mean - half_width, mean + half_width, p_value, detectable, sd, tuple(map(float, x)))


def t_tail(distance: float, error: float, num: int) -> float:
    """P(T > distance / error) of Student's t with num - 1 degrees of freedom.

    If the error is 0 it is 0, 1/2 or 1 for a positive, zero or negative distance; values below 1e-12 count as 0.
    """
    if num < 2:
        return math.nan
    if error < 1e-12:
        return 0.5 if abs(distance) < 1e-12 else float(distance < 0)
    return float(stats.t.sf(distance / error, num - 1))


def sign_flip_test(values: Floats) -> float:
    """Share of all sign patterns that give a mean at least as far from 0 (Fisher's permutation test for pairs).

    Exact up to 14 pairs; n pairs cannot give less than 2 / 2^n.
    """
    if len(values) <= EXACT_PAIRS:
        signs = np.array(list(itertools.product((1, -1), repeat=len(values))))
    else:
        signs = np.random.default_rng(0).choice((1, -1), size=(2**EXACT_PAIRS, len(values)))
        signs[0] = 1
    sums = np.abs(signs @ values)
    return float((sums >= abs(values.sum()) - 1e-12).mean())


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for multiple tests by Holm's method (1979), which controls the family-wise error rate.

    The i-th smallest of m p-values is multiplied by m - i + 1; results are made monotone and limited to 1. A nan stays
    nan and does not count as a test.
    """
    p = np.asarray(p_values, dtype=np.float64)
    tested = np.flatnonzero(np.isfinite(p))
    order = tested[np.argsort(p[tested], kind="stable")]
    scaled = p[order] * np.arange(len(order), 0, -1)
    corrected = np.full(len(p), math.nan)
    corrected[order] = np.minimum(np.maximum.accumulate(scaled), 1.0)
    return [float(value) for value in corrected]


def half_width_in_sd(num: int) -> float:
    """Half the width of the 95 % interval of a mean of `num` values, in units of their standard deviation."""
    return float(stats.t.ppf((1 + LEVEL) / 2, num - 1)) / math.sqrt(num)


def share_interval(count: int, num: int) -> tuple[float, float]:
    """Exact 95 % interval (Clopper and Pearson, 1934) of a share, given `count` of `num` successes."""
    rest = (1 - LEVEL) / 2
    low = float(stats.beta.ppf(rest, count, num - count + 1)) if count else 0.0
    high = float(stats.beta.ppf(1 - rest, count + 1, num - count)) if count < num else 1.0
    return low, high
