"""Statistics over seeds: means with intervals, paired comparisons at equal seeds, Holm's
correction.

A value of a run, such as its final accuracy, is one draw. Runs at different seeds are independent.
Intervals and p-values of means are Student's t, because experiments have three to ten seeds. A
percentile bootstrap covers 76 to 90 % there instead of 95 %. Shares and medians have exact
intervals from the binomial distribution. Statistics that too few seeds leave undefined are nan.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from scipy import special

from fedsim.core.arrays import Floats

if TYPE_CHECKING:
    import pandas as pd

LEVEL = 0.95
"""Confidence level of all intervals."""
ALPHA = round(1 - LEVEL, 10)  # 0.05 and not 0.050000000000000044
"""Significance level of all tests."""
POWER = 0.8
"""Probability with which a `detectable` difference is detected."""
MIN_SEEDS = 3
"""With fewer seeds no verdict is given."""
EXACT_PAIRS = 14
"""The sign-flip test enumerates all sign patterns of up to so many pairs. For more pairs it draws
2^14 patterns."""
UNBOUNDED = (-math.inf, math.inf)
"""Bounds of quantities that can have any value."""
UNIT = (0.0, 1.0)
"""Bounds of shares."""
ROUNDING = 1e-12
"""Standard errors and differences below this count as 0."""


@dataclass(frozen=True)
class Mean:
    """The mean of n `values`, one for each seed, with tests and intervals by Student's t.

    For one seed everything except the mean is nan. Intervals are cut at `bounds`, outside of which
    the quantity cannot lie. Tests ignore the bounds.
    """

    values: tuple[float, ...]
    bounds: tuple[float, float] = UNBOUNDED

    @property
    def num(self) -> int:
        """The number of values."""
        return len(self.values)

    @property
    def df(self) -> int:
        """The degrees of freedom of Student's t."""
        return self.num - 1

    @cached_property
    def mean(self) -> float:
        """The mean of the values."""
        return float(np.mean(self.values))

    @cached_property
    def sd(self) -> float:
        """The standard deviation of the sample, with divisor n - 1."""
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

    def __str__(self) -> str:
        """Return the mean with its 95 % interval: `0.8027 [0.7981, 0.8073]`."""
        digits = 4 if abs(self.mean) < 10 else 1  # shares, or rounds and numbers of selections
        low, high = self.interval
        interval = f" [{low:.{digits}f}, {high:.{digits}f}]" if self.num > 1 else ""
        return f"{self.mean:.{digits}f}{interval}"

    def corrected_interval(self, factor: float) -> tuple[float, float]:
        """Return the interval at the level 1 - 0.05 / `factor` (see `corrected_alike`)."""
        return self._around(t_quantile(1 - ALPHA / factor / 2, self.df) * self.error)

    def _around(self, reach: float) -> tuple[float, float]:
        """Return mean - reach and mean + reach, cut at the bounds."""
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
    """A mean over seeds that also predicts the value of one more run, at another seed."""

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
        """Return how far `value` lies from the mean, as a z score.

        The t statistic of `value` as one more run is converted to the normal quantile of the same
        probability. If `value` is one more run, the result is standard normal. nan for one seed, or
        if all values are equal.
        """
        if not self.df or self.next_error < ROUNDING:
            return math.nan
        t = (value - self.mean) / self.next_error
        return math.copysign(float(special.ndtri(special.stdtr(self.df, -abs(t)))), t)


@dataclass(frozen=True)
class Difference(Mean):
    """The mean of paired differences at equal seeds.

    Each difference is a mean over `strata` settings.
    """

    strata: int = 1

    @property
    def detectable(self) -> float:
        """The true difference that a two-sided test detects in about 80 % of cases."""
        quantiles = t_quantile((1 + LEVEL) / 2, self.df) + t_quantile(POWER, self.df)
        return quantiles * self.error


def estimate(values: Sequence[float], bounds: tuple[float, float] = UNBOUNDED) -> Estimate | None:
    """Return the mean of one value for each seed; None if there are no values."""
    return Estimate(tuple(map(float, values)), bounds) if len(values) else None


def differences(values: Sequence[float], strata: int = 1) -> Difference | None:
    """Return the mean of paired differences; None if there are fewer than two."""
    return Difference(tuple(map(float, values)), strata=strata) if len(values) > 1 else None


def paired(first: "pd.Series", second: "pd.Series") -> "pd.Series":
    """Return `first` - `second` at the seeds that both have. The index of a series holds seeds."""
    return (first - second.reindex(first.index)).dropna()


def pooled_values(strata: "Sequence[pd.Series]") -> "pd.Series":
    """Return the mean over strata (settings, for example) at each seed that all strata have."""
    import pandas as pd  # here: the table at the end of a sweep needs this module, but not pandas

    return pd.concat(strata, axis=1, join="inner").mean(axis=1)


def pooled(strata: "Sequence[pd.Series]") -> Difference | None:
    """Return the mean of paired differences by seed, averaged over strata; None with fewer than
    two common seeds.

    The differences are averaged at each seed that all strata have, and these means are tested,
    because strata of one seed are not independent.
    """
    return differences(pooled_values(strata), len(strata))


def ratio(above: Sequence[float], below: Sequence[float]) -> tuple[float, float, float] | None:
    """Return mean(above) / mean(below) of paired values, one pair for each seed, and the ends of
    its 95 % interval.

    Fieller's interval (1954) holds every r for which a paired t-test does not reject that
    above - r * below has the mean 0. All three numbers are nan if the interval of mean(below) holds
    0, because the ratio is then unbounded. None for fewer than two pairs.
    """
    num = len(above)
    if num < 2:
        return None
    mean_above = float(np.mean(above))
    mean_below = float(np.mean(below))
    # The ends are the roots of a r^2 - 2 b r + c = 0: there the squared t statistic of
    # above - r * below is equal to the squared quantile. Without the variances, a, b and c would be
    # mean_below^2, mean_above * mean_below and mean_above^2.
    squared_reach = t_quantile((1 + LEVEL) / 2, num - 1) ** 2 / num
    (var_above, covariance), (_, var_below) = np.cov(above, below) * squared_reach
    a = mean_below**2 - var_below
    b = mean_above * mean_below - covariance
    c = mean_above**2 - var_above
    if a <= ROUNDING:
        return math.nan, math.nan, math.nan
    root = math.sqrt(max(b**2 - a * c, 0.0))
    return mean_above / mean_below, float(b - root) / a, float(b + root) / a


def t_tail(distance: float, error: float, df: float) -> float:
    """Return P(T > distance / error) of Student's t with `df` degrees of freedom.

    nan if `df` is below 1. If the error is 0: 0, 1/2 or 1 for a positive, zero or negative
    distance.
    """
    if not df >= 1:  # also for nan
        return math.nan
    if error < ROUNDING:
        return 0.5 if abs(distance) < ROUNDING else float(distance < 0)
    return float(special.stdtr(df, -distance / error))


def t_quantile(share: float, df: float) -> float:
    """Return the quantile at `share` of Student's t with `df` degrees of freedom."""
    return float(special.stdtrit(df, share))


def sign_flip_test(values: Sequence[float]) -> float:
    """Return the two-sided p-value of Fisher's permutation test for paired differences.

    It is the share of all 2^n sign patterns of the n `values` for which the mean is at least as far
    from 0 as observed. It cannot be less than 2 / 2^n.
    """
    if len(values) <= EXACT_PAIRS:
        signs = np.array(list(itertools.product((1, -1), repeat=len(values))))
    else:
        signs = np.random.default_rng(0).choice((1, -1), size=(2**EXACT_PAIRS, len(values)))
        signs[0] = 1  # the observed pattern counts, so that p is above 0
    sums = np.abs(signs @ np.asarray(values))
    return float((sums >= abs(np.sum(values)) - ROUNDING).mean())


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for multiple tests by Holm's method (1979).

    The i-th smallest of m is multiplied by m - i + 1. Results are made monotone and limited to 1. A
    nan stays nan and does not count as a test.
    """
    return np.minimum(_multiplied(p_values), 1.0).tolist()


def corrected_alike(
    leads: Sequence[Difference | None],
) -> list[tuple[float, tuple[float, float]]]:
    """Return the p-value of each difference by Holm's method over all of them, and the interval
    that is corrected alike; nan for None.

    If Holm's method multiplies a p-value by k, the interval has the level 1 - 0.05 / k. So it
    excludes 0 exactly if the corrected p-value is below 0.05. For the i-th smallest of m p-values k
    lies between m - i + 1 and m, which is the factor of Bonferroni's intervals. These alone hold
    all true differences at once with a probability of 95 %.
    """
    p_values = [math.nan if lead is None else lead.p_value for lead in leads]
    corrected = []
    for lead, p, product in zip(leads, p_values, _multiplied(p_values).tolist(), strict=True):
        interval = (math.nan, math.nan)
        if lead is not None:
            interval = lead.corrected_interval(product / p if p else 1.0)  # 0: it has no width
        corrected.append((min(product, 1.0), interval))
    return corrected


def _multiplied(p_values: Sequence[float]) -> Floats:
    """Return p-values by Holm's method before they are limited to 1."""
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, kind="stable")[: np.isfinite(p).sum()]  # nan is sorted to the end
    multiplied = np.full(len(p), math.nan)
    multiplied[order] = np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1))
    return multiplied


def half_width_in_sd(num: int) -> float:
    """Return the half width of the 95 % interval of a mean of `num` values, divided by their
    standard deviation."""
    return t_quantile((1 + LEVEL) / 2, num - 1) / math.sqrt(num)


@dataclass(frozen=True)
class Share:
    """The share of runs for which a claim holds: `count` of `num`, tested by the binomial test."""

    count: int
    num: int

    @property
    def interval(self) -> tuple[float, float]:
        """Exact 95 % interval of the true share (Clopper and Pearson, 1934)."""
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
    """The median of values, some of which are only known to be greater than `beyond`.

    Such values are inf in `values`: a run did not reach an accuracy by its last round, for example.
    Hypotheses are tested by the sign test.
    """

    values: tuple[float, ...]
    beyond: float = math.inf

    @property
    def num(self) -> int:
        """The number of values."""
        return len(self.values)

    @property
    def median(self) -> float:
        """The lower median; inf if it is only known to be greater than `beyond`."""
        return sorted(self.values)[(self.num - 1) // 2]

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the true median, which holds every value that the sign test does not
        reject.

        Its ends are among the values. With fewer than six values it is infinite.
        """
        ordered = [-math.inf, *sorted(self.values), math.inf]
        # P(at most k values below the median) for k = 0, 1, ...; `rank` is the first k that is not
        # rejected, and the interval runs from the rank-th smallest to the rank-th largest value.
        tails = special.bdtr(np.arange(self.num), self.num, 0.5)
        rank = int(np.searchsorted(tails, (1 - LEVEL) / 2))
        return ordered[rank], ordered[self.num + 1 - rank]

    def p_above(self, value: float) -> float:
        """p-value of the hypothesis that the true median is at most `value`."""
        return Share(sum(number > value for number in self.values), self.num).p_above(0.5)

    def p_below(self, value: float) -> float:
        """p-value of the hypothesis that the true median is at least `value`."""
        return Share(sum(number < value for number in self.values), self.num).p_above(0.5)
