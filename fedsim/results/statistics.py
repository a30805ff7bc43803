"""Means with intervals over seeds, paired comparisons at equal seeds, and corrections for many of them.

Intervals and p-values are Student's t, which hold their level at the three to ten seeds that experiments have; a
percentile bootstrap covers 76 to 90 % there in place of 95 (tests/test_report_statistics.py simulates both). Shares and
medians have exact intervals from the binomial distribution.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from scipy import special, stats

from fedsim.results.runs import Floats

Key = TypeVar("Key")
LEVEL = 0.95
POWER = 0.8
MIN_SEEDS = 3
"""With fewer seeds no verdict is given: the interval of two seeds reaches 9 standard deviations to each side."""
EXACT_PAIRS = 14
"""Up to this number of pairs all sign flips are enumerated; beyond it 2^14 random ones are drawn."""
UNBOUNDED, UNIT = (-math.inf, math.inf), (0.0, 1.0)
"""Where quantities can lie: any, and accuracies and other shares."""
ROUNDING = 1e-12
"""Standard errors and differences below this count as 0."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, its 95 % confidence interval (Student's t), and the 95 % prediction interval of one more run.

    `low`, `high`: mean -/+ t sd / sqrt(n). `next_low`, `next_high`: mean -/+ t sd sqrt(1 + 1/n). t has n - 1 degrees of
    freedom; all four are nan for one seed, and cut at the bounds of `estimate`. `sd` is the sample's standard deviation
    (divisor n - 1).
    """

    mean: float
    low: float
    high: float
    next_low: float
    next_high: float
    sd: float
    num: int

    @property
    def next_half_width(self) -> float:
        """Half the width of the prediction interval, before it is cut; nan for one seed."""
        return t_quantile((1 + LEVEL) / 2, self.num - 1) * self.sd * math.sqrt(1 + 1 / self.num)

    def p_next(self, value: float, tolerance: float = 0.0) -> float:
        """Two-sided p-value of the hypothesis that one more run gives a value within `tolerance` of `value`.

        nan for one seed.
        """
        distance = max(abs(value - self.mean) - tolerance, 0.0)
        return 2 * t_tail(distance, self.sd * math.sqrt(1 + 1 / self.num), self.num - 1)

    def p_equivalent(self, value: float, margin: float) -> float:
        """p-value of the two one-sided tests (Schuirmann, 1987) that the true mean is within `margin` of `value`."""
        error = self.sd / math.sqrt(self.num)
        return t_tail(margin - abs(self.mean - value), error, self.num - 1)

    def standardised_error(self, value: float) -> float:
        """The distance of `value` from the mean as a standard normal variable, if `value` is one more run; else nan.

        The t statistic of the prediction interval, carried over to the normal distribution of the same probability.
        """
        error = self.sd * math.sqrt(1 + 1 / self.num)
        if self.num < 2 or error < ROUNDING:
            return math.nan
        t = (value - self.mean) / error
        return math.copysign(float(special.ndtri(special.stdtr(self.num - 1, -abs(t)))), t)


def estimate(values: Sequence[float], bounds: tuple[float, float] = UNBOUNDED) -> Estimate | None:
    """The estimate from one value per seed; None if there are no values.

    Intervals are cut at `bounds`, outside of which the quantity cannot lie: they cover it as often as before. Tests use
    the mean and the standard deviation, which stay.
    """
    x = np.asarray(values, dtype=np.float64)
    if not len(x):
        return None
    mean = float(x.mean())
    if len(x) == 1:
        return Estimate(mean, math.nan, math.nan, math.nan, math.nan, math.nan, 1)
    sd, quantile = float(x.std(ddof=1)), t_quantile((1 + LEVEL) / 2, len(x) - 1)
    half_width, next_half_width = quantile * sd / math.sqrt(len(x)), quantile * sd * math.sqrt(1 + 1 / len(x))
    ends = mean - half_width, mean + half_width, mean - next_half_width, mean + next_half_width
    low, high, next_low, next_high = (min(max(end, bounds[0]), bounds[1]) for end in ends)
    return Estimate(mean, low, high, next_low, next_high, sd, len(x))


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences at equal seeds, perhaps each a mean over settings (`pooled`), with t intervals.

    `error` is its standard error, `df` the degrees of freedom. `values` are the differences, one a seed.
    """

    mean: float
    error: float
    df: float
    values: tuple[float, ...]
    strata: int = 1

    @property
    def num(self) -> int:
        return len(self.values)

    @property
    def low(self) -> float:
        return self.mean - t_quantile((1 + LEVEL) / 2, self.df) * self.error

    @property
    def high(self) -> float:
        return self.mean + t_quantile((1 + LEVEL) / 2, self.df) * self.error

    @property
    def p_value(self) -> float:
        """Two-sided p-value of the t test that the true difference is 0."""
        return 2 * t_tail(abs(self.mean), self.error, self.df)

    def p_equivalent(self, margin: float) -> float:
        """p-value of the two one-sided tests (Schuirmann, 1987) that the true difference is within +- `margin`."""
        return max(self.p_above(-margin), self.p_below(margin))

    @property
    def detectable(self) -> float:
        """Approximately the true difference that this test detects in 80 % of cases."""
        return (t_quantile((1 + LEVEL) / 2, self.df) + t_quantile(POWER, self.df)) * self.error

    @property
    def p_flips(self) -> float:
        """Two-sided p-value of a sign-flip test, which assumes no distribution and cannot fall below 2 / 2^n."""
        return sign_flip_test(np.array(self.values))

    def p_above(self, value: float) -> float:
        """One-sided p-value of the hypothesis that the true difference is at most `value`."""
        return t_tail(self.mean - value, self.error, self.df)

    def p_below(self, value: float) -> float:
        """One-sided p-value of the hypothesis that the true difference is at least `value`."""
        return t_tail(value - self.mean, self.error, self.df)


def paired(first: Mapping[Key, float], second: Mapping[Key, float]) -> Difference | None:
    """`first` - `second` at the seeds that both have; None if these are fewer than two."""
    return pooled([paired_values(first, second)])


def paired_values(first: Mapping[Key, float], second: Mapping[Key, float]) -> dict[Key, float]:
    """`first` - `second` by the seeds that both have."""
    return {seeds: value - second[seeds] for seeds, value in first.items() if seeds in second}


def differences(values: Sequence[float]) -> Difference | None:
    """Statistics of given paired differences; None if these are fewer than two."""
    x = np.asarray(values, dtype=np.float64)
    if len(x) < 2:
        return None
    return Difference(float(x.mean()), float(x.std(ddof=1)) / math.sqrt(len(x)), len(x) - 1, tuple(map(float, x)))


def pooled(strata: Sequence[Mapping[Key, float]]) -> Difference | None:
    """The mean over strata, such as partitions of the data, of paired differences by seed, each with the same weight.

    The differences are averaged at each seed that all strata have, and these means are tested: strata of one seed are
    not independent. None if these seeds are fewer than two.
    """
    first, *others = strata
    common = [seeds for seeds in first if all(seeds in other for other in others)]
    found = differences([float(np.mean([stratum[seeds] for stratum in strata])) for seeds in common])
    return None if found is None else replace(found, strata=len(strata))


def t_tail(distance: float, error: float, df: float) -> float:
    """P(T > distance / error) of Student's t with `df` degrees of freedom; nan if these are below 1.

    If the error is 0 it is 0, 1/2 or 1 for a positive, zero or negative distance.
    """
    if not df >= 1:
        return math.nan
    if error < ROUNDING:
        return 0.5 if abs(distance) < ROUNDING else float(distance < 0)
    return float(special.stdtr(df, -distance / error))


def t_quantile(share: float, df: float) -> float:
    """The quantile of Student's t with `df` degrees of freedom below which the `share` of its distribution lies."""
    return float(special.stdtrit(df, share))


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
    return t_quantile((1 + LEVEL) / 2, num - 1) / math.sqrt(num)


@dataclass(frozen=True)
class Share:
    """For `count` of `num` runs something holds."""

    count: int
    num: int

    @property
    def interval(self) -> tuple[float, float]:
        """Exact 95 % interval (Clopper and Pearson, 1934) of the share of runs for which it holds."""
        found = stats.binomtest(self.count, self.num).proportion_ci(LEVEL, method="exact")
        return float(found.low), float(found.high)

    def p_above(self, share: float) -> float:
        """One-sided p-value of the hypothesis that it holds for at most this `share` of runs (binomial test)."""
        return float(special.bdtrc(self.count - 1, self.num, share)) if self.count else 1.0

    def p_below(self, share: float) -> float:
        """One-sided p-value of the hypothesis that it holds for at least this `share` of runs (binomial test)."""
        return float(special.bdtr(self.count, self.num, share))


@dataclass(frozen=True)
class Median:
    """The median of values of which some are only known to lie beyond `beyond`; these are inf in `values`."""

    values: tuple[float, ...]
    beyond: float

    @property
    def num(self) -> int:
        return len(self.values)

    @property
    def median(self) -> float:
        """The lower median; inf if it lies beyond."""
        return sorted(self.values)[(self.num - 1) // 2]

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the median by order statistics (the sign test inverted); infinite below six values."""
        ordered = [-math.inf, *sorted(self.values), math.inf]
        rank = int(stats.binom.ppf((1 - LEVEL) / 2, self.num, 0.5))
        return ordered[rank], ordered[self.num + 1 - rank]

    def p_above(self, value: float) -> float:
        """One-sided p-value of the hypothesis that the median is at most `value` (sign test)."""
        return Share(sum(one > value for one in self.values), self.num).p_above(0.5)

    def p_below(self, value: float) -> float:
        """One-sided p-value of the hypothesis that the median is at least `value` (sign test)."""
        return Share(sum(one < value for one in self.values), self.num).p_above(0.5)
