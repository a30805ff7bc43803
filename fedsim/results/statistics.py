"""Means with intervals over seeds, paired comparisons at equal seeds, and corrections for many of
them.

Intervals and p-values are Student's t, which hold their level at the three to ten seeds that
experiments have; a percentile bootstrap covers 76 to 90 % there in place of 95. Shares and medians
have exact intervals from the binomial distribution.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from scipy import special

Key = TypeVar("Key")
LEVEL = 0.95
POWER = 0.8
MIN_SEEDS = 3
"""With fewer seeds no verdict is given."""
EXACT_PAIRS = 14
"""Up to here all sign flips are enumerated; beyond it 2^14 random ones are drawn."""
UNBOUNDED, UNIT = (-math.inf, math.inf), (0.0, 1.0)
"""Where quantities can lie; shares."""
ROUNDING = 1e-12
"""Standard errors and differences below this count as 0."""


@dataclass(frozen=True)
class Mean:
    """The mean of `values`, one a seed, by Student's t with n - 1 degrees of freedom; all but it is
    nan for one seed.

    `interval`: of 95 % confidence; `next_interval`: the 95 % prediction interval of one more run.
    Both are cut at `bounds`, outside of which the quantity cannot lie. Tests use mean and `sd` (the
    sample's, divisor n - 1), which stay.
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
        return self.sd / math.sqrt(self.num)

    @property
    def next_error(self) -> float:
        """That of the mean as a prediction of one more run."""
        return self.sd * math.sqrt(1 + 1 / self.num)

    @property
    def half_width(self) -> float:
        """Half the width of the interval, before it is cut."""
        return t_quantile((1 + LEVEL) / 2, self.df) * self.error

    @property
    def interval(self) -> tuple[float, float]:
        return self._around(self.half_width)

    @property
    def next_half_width(self) -> float:
        """Half the width of the prediction interval, before it is cut."""
        return t_quantile((1 + LEVEL) / 2, self.df) * self.next_error

    @property
    def next_interval(self) -> tuple[float, float]:
        return self._around(self.next_half_width)

    def _around(self, reach: float) -> tuple[float, float]:
        low, high = self.bounds
        return min(max(self.mean - reach, low), high), min(max(self.mean + reach, low), high)

    @property
    def p_value(self) -> float:
        """Two-sided, of the hypothesis that the true mean is 0."""
        return 2 * t_tail(abs(self.mean), self.error, self.df)

    def p_above(self, value: float) -> float:
        """One-sided p-value of the hypothesis that the true mean is at most `value`."""
        return t_tail(self.mean - value, self.error, self.df)

    def p_below(self, value: float) -> float:
        """Of the hypothesis that it is at least `value`."""
        return t_tail(value - self.mean, self.error, self.df)

    def p_equivalent(self, margin: float, value: float = 0.0) -> float:
        """p-value of the two one-sided tests (Schuirmann, 1987) that the true mean is within
        `margin` of `value`."""
        return t_tail(margin - abs(self.mean - value), self.error, self.df)


class Estimate(Mean):
    """A mean over seeds of a quantity."""

    def p_next(self, value: float, tolerance: float = 0.0) -> float:
        """Two-sided p-value of the hypothesis that one more run gives a value within `tolerance` of
        `value`."""
        distance = max(abs(value - self.mean) - tolerance, 0.0)
        return 2 * t_tail(distance, self.next_error, self.df)

    def standardised_error(self, value: float) -> float:
        """The distance of `value` from the mean as a standard normal variable, if `value` is one
        more run; nan where that cannot be told: the t statistic of the prediction interval at the
        same probability."""
        if not self.df or self.next_error < ROUNDING:
            return math.nan
        t = (value - self.mean) / self.next_error
        return math.copysign(float(special.ndtri(special.stdtr(self.df, -abs(t)))), t)


@dataclass(frozen=True)
class Difference(Mean):
    """The mean of paired differences at equal seeds, each perhaps a mean over `strata` settings
    (`pooled`)."""

    strata: int = 1

    @property
    def detectable(self) -> float:
        """Roughly the true difference that this test detects in 80 % of cases."""
        return (t_quantile((1 + LEVEL) / 2, self.df) + t_quantile(POWER, self.df)) * self.error


def estimate(values: Sequence[float], bounds: tuple[float, float] = UNBOUNDED) -> Estimate | None:
    """Of one value per seed; None if there are none."""
    return Estimate(tuple(map(float, values)), bounds) if len(values) else None


def differences(values: Sequence[float], strata: int = 1) -> Difference | None:
    """Of given paired differences; None if these are fewer than two."""
    return Difference(tuple(map(float, values)), strata=strata) if len(values) > 1 else None


def paired_values(first: Mapping[Key, float], second: Mapping[Key, float]) -> dict[Key, float]:
    """`first` - `second` by the seeds that both have."""
    return {seeds: value - second[seeds] for seeds, value in first.items() if seeds in second}


def pooled(strata: Sequence[Mapping[Key, float]]) -> Difference | None:
    """The mean over strata, such as partitions of the data, of paired differences by seed.

    They are averaged at each seed that all strata have, and these means are tested: strata of one
    seed are not independent. None if these seeds are fewer than two.
    """
    return differences([*pooled_values(strata).values()], len(strata))


def pooled_values(strata: Sequence[Mapping[Key, float]]) -> dict[Key, float]:
    """The mean over strata at each seed that all of them have."""
    first, *others = strata
    common = [seeds for seeds in first if all(seeds in other for other in others)]
    return {seeds: float(np.mean([stratum[seeds] for stratum in strata])) for seeds in common}


def ratio(above: Sequence[float], below: Sequence[float]) -> tuple[float, float, float] | None:
    """The ratio of the means of paired values, one a seed each, and its 95 % interval by Fieller
    (1954): r for which a t-test does not tell the mean of above - r below from 0. nan where the
    interval of the lower mean holds 0; None below two pairs."""
    if (num := len(above)) < 2:
        return None
    top, bottom = float(np.mean(above)), float(np.mean(below))
    (of_top, both), (_, of_bottom) = (
        np.cov(above, below) * t_quantile((1 + LEVEL) / 2, num - 1) ** 2 / num
    )
    if (square := bottom**2 - of_bottom) <= ROUNDING:
        return math.nan, math.nan, math.nan
    middle, root = (
        top * bottom - both,
        math.sqrt(max((top * bottom - both) ** 2 - square * (top**2 - of_top), 0.0)),
    )
    return top / bottom, float(middle - root) / square, float(middle + root) / square


def t_tail(distance: float, error: float, df: float) -> float:
    """P(T > distance / error) of Student's t with `df` degrees of freedom; nan if these are below
    1. If the error is 0 it is 0, 1/2 or 1 for a positive, zero or negative distance."""
    if not df >= 1:
        return math.nan
    if error < ROUNDING:
        return 0.5 if abs(distance) < ROUNDING else float(distance < 0)
    return float(special.stdtr(df, -distance / error))


def t_quantile(share: float, df: float) -> float:
    """Below it lies the `share` of Student's t with `df` degrees of freedom."""
    return float(special.stdtrit(df, share))


def sign_flip_test(values: Sequence[float]) -> float:
    """Share of all sign patterns that give a mean at least as far from 0 (Fisher's permutation test
    for pairs); n pairs cannot give less than 2 / 2^n."""
    if len(values) <= EXACT_PAIRS:
        signs = np.array(list(itertools.product((1, -1), repeat=len(values))))
    else:
        signs = np.random.default_rng(0).choice((1, -1), size=(2**EXACT_PAIRS, len(values)))
        signs[0] = 1
    sums = np.abs(signs @ np.asarray(values))
    return float((sums >= abs(np.sum(values)) - 1e-12).mean())


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for multiple tests by Holm's method (1979): the i-th smallest of m is
    multiplied by m - i + 1; results are made monotone and limited to 1. A nan stays nan and does
    not count as a test."""
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, kind="stable")[: np.isfinite(p).sum()]  # nan is sorted to the end
    corrected = np.full(len(p), math.nan)
    corrected[order] = np.minimum(
        np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1)), 1.0
    )
    return corrected.tolist()


def half_width_in_sd(num: int) -> float:
    """Half the width of the 95 % interval of a mean of `num` values, in units of their standard
    deviation."""
    return t_quantile((1 + LEVEL) / 2, num - 1) / math.sqrt(num)


@dataclass(frozen=True)
class Share:
    """For `count` of `num` runs something holds. Hypotheses are tested as those of a mean, by the
    binomial test."""

    count: int
    num: int

    @property
    def interval(self) -> tuple[float, float]:
        """Exact 95 % interval (Clopper and Pearson, 1934) of the share of runs for which it
        holds."""
        failed, outside = self.num - self.count, (1 - LEVEL) / 2
        low = special.betaincinv(self.count, failed + 1, outside) if self.count else 0.0
        high = special.betaincinv(self.count + 1, failed, 1 - outside) if failed else 1.0
        return float(low), float(high)

    def p_above(self, share: float) -> float:
        return float(special.bdtrc(self.count - 1, self.num, share)) if self.count else 1.0

    def p_below(self, share: float) -> float:
        return float(special.bdtr(self.count, self.num, share))


@dataclass(frozen=True)
class Median:
    """The median of values of which some are only known to lie beyond `beyond`; these are inf in
    `values`. Hypotheses are tested by the sign test."""

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
        """95 % interval of the median by order statistics (the sign test inverted); infinite below
        six values."""
        ordered = [-math.inf, *sorted(self.values), math.inf]
        rank = int(
            np.searchsorted(special.bdtr(np.arange(self.num), self.num, 0.5), (1 - LEVEL) / 2)
        )
        return ordered[rank], ordered[self.num + 1 - rank]

    def p_above(self, value: float) -> float:
        return Share(sum(one > value for one in self.values), self.num).p_above(0.5)

    def p_below(self, value: float) -> float:
        return Share(sum(one < value for one in self.values), self.num).p_above(0.5)
