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
LEAST_SEEDS = 3
"""With fewer seeds nothing is decided: the interval of two is 9 standard deviations wide on each side."""
EXACT_PAIRS = 14
"""Up to so many pairs all sign flips are enumerated, beyond 2^14 random ones are drawn."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds: its 95 % interval (Student's t), and the one in which one more run would fall.

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
        """Two-sided p-value of one more run that comes to `value`; nan for one seed."""
        return 2 * tail(abs(value - self.mean), self.sd * math.sqrt(1 + 1 / self.num), self.num)


def estimate(values: Sequence[float]) -> Estimate | None:
    """None for no values."""
    x = np.asarray(values, dtype=np.float64)
    if not len(x):
        return None
    mean = float(x.mean())
    if len(x) == 1:
        return Estimate(mean, math.nan, math.nan, math.nan, math.nan, math.nan, 1)
    sd, quantile = float(x.std(ddof=1)), float(stats.t.ppf((1 + LEVEL) / 2, len(x) - 1))
    reach, next_reach = quantile * sd / math.sqrt(len(x)), quantile * sd * math.sqrt(1 + 1 / len(x))
    return Estimate(mean, mean - reach, mean + reach, mean - next_reach, mean + next_reach, sd, len(x))


@dataclass(frozen=True)
class Difference:
    """Paired differences at equal seeds: mean, 95 % interval and two-sided p-values of two tests that it is 0.

    `p_value` is that of the paired t test, whose interval it is; `p_flips` that of a sign-flip test, which assumes no
    distribution and cannot fall below 2 / 2^n. `detectable` is, nearly, the true difference that a t test of as many
    pairs of this standard deviation finds in 80 % of cases.
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
        return tail(self.mean - value, self.sd / math.sqrt(self.num), self.num)

    def p_below(self, value: float) -> float:
        """One-sided p-value of the hypothesis that the true difference is at least `value`."""
        return tail(value - self.mean, self.sd / math.sqrt(self.num), self.num)


def paired(one: Mapping[int, float], other: Mapping[int, float]) -> Difference | None:
    """`one` - `other` at the seeds that both have; None for fewer than two."""
    seeds = sorted(set(one) & set(other))
    return differences([one[s] - other[s] for s in seeds])


def differences(values: Sequence[float]) -> Difference | None:
    """Statistics of differences that were paired already; None for fewer than two."""
    x = np.asarray(values, dtype=np.float64)
    if len(x) < 2:
        return None
    mean, sd, error = float(x.mean()), float(x.std(ddof=1)), float(x.std(ddof=1)) / math.sqrt(len(x))
    reach = float(stats.t.ppf((1 + LEVEL) / 2, len(x) - 1)) * error
    found = float(stats.t.ppf((1 + LEVEL) / 2, len(x) - 1) + stats.t.ppf(POWER, len(x) - 1)) * error
    p_value = 2 * tail(abs(mean), error, len(x))
    return Difference(mean, mean - reach, mean + reach, p_value, found, sd, tuple(map(float, x)))


def tail(distance: float, error: float, num: int) -> float:
    """P(T > distance / error) of Student's t with num - 1 degrees of freedom.

    Without any spread it is 0, 1/2 or 1 by the sign of the distance (differences that float error alone makes are 0).
    """
    if num < 2:
        return math.nan
    if error < 1e-12:
        return 0.5 if abs(distance) < 1e-12 else float(distance < 0)
    return float(stats.t.sf(distance / error, num - 1))


def sign_flip_test(values: Floats) -> float:
    """Share of all sign patterns whose mean is at least as far from 0 (Fisher's permutation test for pairs).

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
    """p-values corrected for there being many (Holm, 1979): the chance of any false finding stays below the level.

    The i-th smallest of m is multiplied by m - i + 1, and none may be smaller than the one before it. nan stays nan and
    counts for nothing.
    """
    p = np.asarray(p_values, dtype=np.float64)
    tested = np.flatnonzero(np.isfinite(p))
    order = tested[np.argsort(p[tested], kind="stable")]
    scaled = p[order] * np.arange(len(order), 0, -1)
    corrected = np.full(len(p), math.nan)
    corrected[order] = np.minimum(np.maximum.accumulate(scaled), 1.0)
    return [float(value) for value in corrected]


def reach_in_sd(num: int) -> float:
    """How far the 95 % interval of a mean of `num` values reaches to each side, in their standard deviations."""
    return float(stats.t.ppf((1 + LEVEL) / 2, num - 1)) / math.sqrt(num)


def share_interval(held: int, num: int) -> tuple[float, float]:
    """Exact 95 % interval (Clopper and Pearson, 1934) of the share of seeds for which something holds."""
    rest = (1 - LEVEL) / 2
    low = float(stats.beta.ppf(rest, held, num - held + 1)) if held else 0.0
    high = float(stats.beta.ppf(1 - rest, held + 1, num - held)) if held < num else 1.0
    return low, high
