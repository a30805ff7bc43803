"""Means with intervals over seeds, and paired comparisons at equal seeds."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from fedsim.report.runs import Floats

LEVEL = 0.95
RESAMPLES = 10_000
EXACT_PAIRS = 14
"""Up to so many pairs all sign flips are enumerated, beyond 2^14 random ones are drawn."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds: its bootstrap interval, and the interval in which one more run would fall.

    `low`, `high`: percentile bootstrap (10,000 resamples); with few seeds it is too narrow, as all bootstraps are.
    `next_low`, `next_high`: mean -/+ t sd sqrt(1 + 1/n), Student's t with n - 1 degrees of freedom. nan for one seed.
    """

    mean: float
    low: float
    high: float
    next_low: float
    next_high: float
    num: int


def estimate(values: Sequence[float]) -> Estimate | None:
    """None for no values."""
    x = np.asarray(values, dtype=np.float64)
    if not len(x):
        return None
    mean = float(x.mean())
    if len(x) == 1:
        return Estimate(mean, math.nan, math.nan, math.nan, math.nan, 1)
    low, high = bootstrap(x)
    reach = float(stats.t.ppf((1 + LEVEL) / 2, len(x) - 1) * x.std(ddof=1) * math.sqrt(1 + 1 / len(x)))
    return Estimate(mean, low, high, mean - reach, mean + reach, len(x))


def bootstrap(values: Floats) -> tuple[float, float]:
    """Percentile interval of the mean; the same at every call."""
    rng = np.random.default_rng(0)
    means = values[rng.integers(len(values), size=(RESAMPLES, len(values)))].mean(1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


@dataclass(frozen=True)
class Difference:
    """Paired differences at equal seeds: their mean, bootstrap interval and two-sided p-value of a sign-flip test."""

    mean: float
    low: float
    high: float
    p_value: float
    num: int


def paired(one: Mapping[int, float], other: Mapping[int, float]) -> Difference | None:
    """`one` - `other` at the seeds that both have; None for fewer than two."""
    seeds = sorted(set(one) & set(other))
    if len(seeds) < 2:
        return None
    differences = np.array([one[s] - other[s] for s in seeds])
    low, high = bootstrap(differences)
    return Difference(float(differences.mean()), low, high, sign_flip_test(differences), len(seeds))


def sign_flip_test(differences: Floats) -> float:
    """Share of all sign patterns whose mean is at least as far from 0 (Fisher's permutation test for pairs).

    Exact up to 14 pairs; n pairs cannot give less than 2 / 2^n.
    """
    if len(differences) <= EXACT_PAIRS:
        signs = np.array(list(itertools.product((1, -1), repeat=len(differences))))
    else:
        signs = np.random.default_rng(0).choice((1, -1), size=(2**EXACT_PAIRS, len(differences)))
        signs[0] = 1
    sums = np.abs(signs @ differences)
    return float((sums >= abs(differences.sum()) - 1e-12).mean())
