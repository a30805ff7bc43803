"""Statistics over seeds: means with intervals, paired comparisons at equal seeds, Holm's
correction.

Intervals and p-values are Student's t, which hold their level at the three to ten seeds that
experiments have. A percentile bootstrap covers 76 to 90 % there instead of 95 %. Shares and medians
have exact intervals from the binomial distribution.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
from scipy import special

LEVEL = 0.95
"""Confidence level of all intervals."""
ALPHA = round(1 - LEVEL, 10)
POWER = 0.8
MIN_SEEDS = 3
"""With fewer seeds no verdict is given."""
EXACT_PAIRS = 14
"""Up to this number of pairs all sign flips are enumerated. For more pairs 2^14 random ones are
drawn."""
UNBOUNDED = (-math.inf, math.inf)
UNIT = (0.0, 1.0)
"""Bounds of shares."""
ROUNDING = 1e-12
"""Standard errors and differences below this count as 0."""


@dataclass(frozen=True)
class Mean:
    """The mean of `values`, one for each seed, by Student's t with n - 1 degrees of freedom.

    Everything except the mean is nan for one seed. Intervals are cut at `bounds`, outside of which
    the quantity cannot lie. Tests use the mean and `sd` (the sample's, divisor n - 1) as they are.
    """

    values: tuple[float, ...]
    bounds: tuple[float, float] = UNBOUNDED

    @property
    def num(self) -> int:
        return len(self.values)

    @property
    def df(self) -> int:
        return self.num - 1

    @cached_property
    def mean(self) -> float:
        return float(np.mean(self.values))

    @cached_property
    def sd(self) -> float:
        return float(np.std(self.values, ddof=1)) if self.df else math.nan

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        return self.sd / math.sqrt(self.num)

    @property
    def half_width(self) -> float:
        """Half the width of the 95 % interval, before it is cut."""
        return t_quantile((1 + LEVEL) / 2, self.df) * self.error

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the true mean."""
        return self._around(self.half_width)

    def _around(self, reach: float) -> tuple[float, float]:
        low, high = np.clip([self.mean - reach, self.mean + reach], *self.bounds).tolist()
        return low, high

    @property
    def p_value(self) -> float:
        """Two-sided p-value of the hypothesis that the true mean is 0."""
        return 2 * t_tail(abs(self.mean), self.error, self.df)

    def p_above(self, value: float) -> float:
        """One-sided p-value of the hypothesis that the true mean is at most `value`."""
        return t_tail(self.mean - value, self.error, self.df)

    def p_below(self, value: float) -> float:
        """One-sided p-value of the hypothesis that the true mean is at least `value`."""
        return t_tail(value - self.mean, self.error, self.df)

    def p_equivalent(self, margin: float, value: float = 0.0) -> float:
        """p-value of the two one-sided tests (Schuirmann, 1987) that the true mean is within
        `margin` of `value`."""
        return t_tail(margin - abs(self.mean - value), self.error, self.df)


class Estimate(Mean):
    """A mean over seeds of a quantity, which also predicts one more run."""

    @property
    def next_error(self) -> float:
        """The standard error of the mean as a prediction of one more run."""
        return self.sd * math.sqrt(1 + 1 / self.num)

    @property
    def next_half_width(self) -> float:
        """Half the width of the prediction interval, before it is cut."""
        return t_quantile((1 + LEVEL) / 2, self.df) * self.next_error

    @property
    def next_interval(self) -> tuple[float, float]:
        """The 95 % prediction interval of one more run."""
        return self._around(self.next_half_width)

    def p_next(self, value: float, tolerance: float = 0.0) -> float:
        """Two-sided p-value of the hypothesis that one more run gives a value within `tolerance` of
        `value`."""
        distance = max(abs(value - self.mean) - tolerance, 0.0)
        return 2 * t_tail(distance, self.next_error, self.df)

    def standardised_error(self, value: float) -> float:
        """Return the distance of `value` from the mean as a standard normal variable, if `value` is
        one more run: the t statistic of the prediction interval at the same probability.

        nan if the seeds do not vary.
        """
        if not self.df or self.next_error < ROUNDING:
            return math.nan
        t = (value - self.mean) / self.next_error
        return math.copysign(float(special.ndtri(special.stdtr(self.df, -abs(t)))), t)


@dataclass(frozen=True)
class Difference(Mean):
    """The mean of paired differences at equal seeds, each perhaps a mean over `strata` settings."""

    strata: int = 1

    @property
    def detectable(self) -> float:
        """Roughly the true difference that this test detects in 80 % of cases."""
        quantiles = t_quantile((1 + LEVEL) / 2, self.df) + t_quantile(POWER, self.df)
        return quantiles * self.error


def estimate(values: Sequence[float], bounds: tuple[float, float] = UNBOUNDED) -> Estimate | None:
    """Return the mean of one value for each seed; None if there are no values."""
    return Estimate(tuple(map(float, values)), bounds) if len(values) else None


def differences(values: Sequence[float], strata: int = 1) -> Difference | None:
    """Return the mean of paired differences; None if there are fewer than two."""
    return Difference(tuple(map(float, values)), strata=strata) if len(values) > 1 else None


def paired(first: pd.Series, second: pd.Series) -> pd.Series:
    """Return `first` - `second` at the seeds, their index, that both have."""
    return (first - second.reindex(first.index)).dropna()


def pooled_values(strata: Sequence[pd.Series]) -> pd.Series:
    """Return the mean over strata, such as settings, at each seed that all of them have."""
    return pd.concat(strata, axis=1, join="inner").mean(axis=1)


def pooled(strata: Sequence[pd.Series]) -> Difference | None:
    """Return the mean over strata of paired differences by seed; None below two common seeds.

    The differences are averaged at each seed that all strata have, and these means are tested,
    because strata of one seed are not independent.
    """
    return differences(pooled_values(strata), len(strata))


def ratio(above: Sequence[float], below: Sequence[float]) -> tuple[float, float, float] | None:
    """Return the ratio of the means of paired values, one for each seed, and its 95 % interval.

    The interval by Fieller (1954) holds every r for which a t-test does not tell the mean of
    above - r below from 0. All three are nan if the interval of the lower mean holds 0. None below
    two pairs.
    """
    num = len(above)
    if num < 2:
        return None
    top = float(np.mean(above))
    bottom = float(np.mean(below))
    squared_reach = t_quantile((1 + LEVEL) / 2, num - 1) ** 2 / num
    (of_top, of_both), (_, of_bottom) = np.cov(above, below) * squared_reach
    square = bottom**2 - of_bottom
    if square <= ROUNDING:
        return math.nan, math.nan, math.nan
    middle = top * bottom - of_both
    root = math.sqrt(max(middle**2 - square * (top**2 - of_top), 0.0))
    return top / bottom, float(middle - root) / square, float(middle + root) / square


def t_tail(distance: float, error: float, df: float) -> float:
    """Return P(T > distance / error) of Student's t with `df` degrees of freedom.

    nan if `df` is below 1. If the error is 0: 0, 1/2 or 1 for a positive, zero or negative
    distance.
    """
    if not df >= 1:
        return math.nan
    if error < ROUNDING:
        return 0.5 if abs(distance) < ROUNDING else float(distance < 0)
    return float(special.stdtr(df, -distance / error))


def t_quantile(share: float, df: float) -> float:
    """Return the value below which the `share` of Student's t with `df` degrees of freedom lies."""
    return float(special.stdtrit(df, share))


def sign_flip_test(values: Sequence[float]) -> float:
    """Return the share of all sign patterns that give a mean at least as far from 0 (Fisher's
    permutation test for pairs). n pairs cannot give less than 2 / 2^n."""
    if len(values) <= EXACT_PAIRS:
        signs = np.array(list(itertools.product((1, -1), repeat=len(values))))
    else:
        signs = np.random.default_rng(0).choice((1, -1), size=(2**EXACT_PAIRS, len(values)))
        signs[0] = 1
    sums = np.abs(signs @ np.asarray(values))
    return float((sums >= abs(np.sum(values)) - ROUNDING).mean())


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for multiple tests by Holm's method (1979).

    The i-th smallest of m is multiplied by m - i + 1. Results are made monotone and limited to 1. A
    nan stays nan and does not count as a test.
    """
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, kind="stable")[: np.isfinite(p).sum()]  # nan is sorted to the end
    multiplied = p[order] * np.arange(len(order), 0, -1)
    corrected = np.full(len(p), math.nan)
    corrected[order] = np.minimum(np.maximum.accumulate(multiplied), 1.0)
    return corrected.tolist()


def half_width_in_sd(num: int) -> float:
    """Return half the width of the 95 % interval of a mean of `num` values, in units of their
    standard deviation."""
    return t_quantile((1 + LEVEL) / 2, num - 1) / math.sqrt(num)


@dataclass(frozen=True)
class Share:
    """Something holds for `count` of `num` runs. Hypotheses are tested by the binomial test."""

    count: int
    num: int

    @property
    def interval(self) -> tuple[float, float]:
        """Exact 95 % interval (Clopper and Pearson, 1934) of the share of runs for which it
        holds."""
        failed = self.num - self.count
        outside = (1 - LEVEL) / 2
        low = special.betaincinv(self.count, failed + 1, outside) if self.count else 0.0
        high = special.betaincinv(self.count + 1, failed, 1 - outside) if failed else 1.0
        return float(low), float(high)

    def p_above(self, share: float) -> float:
        """p-value of the hypothesis that the true share is at most `share`."""
        return float(special.bdtrc(self.count - 1, self.num, share)) if self.count else 1.0

    def p_below(self, share: float) -> float:
        """p-value of the hypothesis that the true share is at least `share`."""
        return float(special.bdtr(self.count, self.num, share))


@dataclass(frozen=True)
class Median:
    """The median of values, of which those beyond `beyond` are only known to lie there: they are
    inf in `values`. Hypotheses are tested by the sign test."""

    values: tuple[float, ...]
    beyond: float = math.inf

    @property
    def num(self) -> int:
        return len(self.values)

    @property
    def median(self) -> float:
        """The lower median; inf if it lies beyond."""
        return sorted(self.values)[(self.num - 1) // 2]

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the median by order statistics (the sign test inverted); infinite below
        six values."""
        ordered = [-math.inf, *sorted(self.values), math.inf]
        tails = special.bdtr(np.arange(self.num), self.num, 0.5)
        rank = int(np.searchsorted(tails, (1 - LEVEL) / 2))
        return ordered[rank], ordered[self.num + 1 - rank]

    def p_above(self, value: float) -> float:
        """p-value of the hypothesis that the true median is at most `value`."""
        return Share(sum(number > value for number in self.values), self.num).p_above(0.5)

    def p_below(self, value: float) -> float:
        """p-value of the hypothesis that the true median is at least `value`."""
        return Share(sum(number < value for number in self.values), self.num).p_above(0.5)
