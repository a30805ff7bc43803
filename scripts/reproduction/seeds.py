"""The number of seeds that would decide a number or claim, if our means and spreads were true."""

import math
from collections.abc import Callable

from scipy import special

from fedsim.papers.evidence import Evidence
from fedsim.papers.examine import BY_SIGN
from fedsim.papers.published import MAJORITY, Claim, Number
from fedsim.results.statistics import ALPHA, POWER, Difference, Estimate, Median, Share, t_quantile

MAX_SEEDS = 1000
"""If more seeds than this are needed, no number of seeds is enough."""
IsEnough = Callable[[int], bool]
"""Whether a number of seeds is enough for a verdict."""


def seeds_needed(printed: Number | Claim, evidence: Evidence, tests: int) -> int | None:
    """Return the smallest number of seeds with which a verdict comes with 80 % probability.

    The level is 5 % divided by `tests`, the number of tests in the family. If all or none of our
    runs keep a claim on every run, the others are assumed to do the same. None means that no number
    up to `MAX_SEEDS` is enough, because the truth seems to lie on the edge.
    """
    ways = _ways(printed, evidence, ALPHA / max(tests, 1))
    for num in range(evidence.num + 1, MAX_SEEDS + 1):
        if any(is_enough(num) for is_enough in ways):
            return num
    return None


def _ways(printed: Number | Claim, evidence: Evidence, level: float) -> list[IsEnough]:
    """Return the ways to a verdict: for it and against it."""
    ours = evidence.ours
    if isinstance(ours, Share):
        share = ours.count / ours.num
        return [_sign_test(max(share, 1 - share), level / 2)]
    if isinstance(ours, Estimate):
        return _ways_of_value(printed, ours, level)
    if isinstance(ours, Median):
        assert isinstance(printed, Claim)
        return _ways_of_median(printed, ours, level)
    if isinstance(ours, Difference):
        assert isinstance(printed, Claim)
        return _ways_of_difference(printed, ours, level, by_sign=BY_SIGN in evidence.detail)
    return []


def _ways_of_median(claim: Claim, ours: Median, level: float) -> list[IsEnough]:
    assert claim.value is not None
    below = sum(value < claim.value - claim.tolerance for value in ours.values) / ours.num
    above = sum(value > claim.value + claim.tolerance for value in ours.values) / ours.num
    not_below = _sign_test(1 - below, level, math.sqrt(POWER))
    not_above = _sign_test(1 - above, level, math.sqrt(POWER))

    def is_inside(num: int) -> bool:
        return not_below(num) and not_above(num)

    return [_sign_test(max(below, above), level / 2), is_inside]


def _ways_of_value(printed: Number | Claim, ours: Estimate, level: float) -> list[IsEnough]:
    assert printed.value is not None
    distance = abs(ours.mean - printed.value)
    if isinstance(printed, Claim):
        margin = tolerance = printed.tolerance
    else:
        margin, tolerance = printed.margin, 0.0

    def is_far(num: int) -> bool:
        edge = t_quantile(1 - level / 2, num - 1) * math.sqrt(1 + 1 / num)
        reach = edge + t_quantile(POWER, num - 1) / math.sqrt(num)
        return distance - tolerance > reach * ours.sd

    return [_t_test(margin - distance, ours.sd, level), is_far]


def _ways_of_difference(
    claim: Claim, ours: Difference, level: float, *, by_sign: bool
) -> list[IsEnough]:
    mean = ours.mean
    sd = ours.error * math.sqrt(ours.num)
    if claim.level_with is not None:
        inside = claim.level_with - abs(mean)
        return [_t_test(inside, sd, level), _t_test(-inside, sd, level / 2)]
    if claim.grows_with is not None:
        return [_t_test(abs(mean), sd, level / 2)]
    edge = 0.0 if claim.not_worse_by is None else -claim.not_worse_by
    promised = edge
    if claim.gain and not by_sign:
        promised = claim.gain - claim.tolerance
    return [_t_test(mean - edge, sd, level / 2), _t_test(promised - mean, sd, level / 2)]


def _t_test(distance: float, sd: float, level: float) -> IsEnough:
    """Return whether a one-sided t test shows a true `distance` with 80 % probability (about)."""

    def is_enough(num: int) -> bool:
        quantiles = t_quantile(1 - level, num - 1) + t_quantile(POWER, num - 1)
        return distance > quantiles * sd / math.sqrt(num)

    return is_enough


def _sign_test(share: float, level: float, power: float = POWER) -> IsEnough:
    """Return whether a one-sided binomial test shows that a true `share` is above one half."""

    def is_enough(num: int) -> bool:
        for count in range(num // 2, num + 1):
            if special.bdtrc(count - 1, num, MAJORITY) < level:  # the smallest significant count
                return float(special.bdtrc(count - 1, num, share)) >= power
        return False

    return is_enough
