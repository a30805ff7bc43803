"""How many seeds would decide a number or a claim, if the mean and the spread of our runs were the
true ones."""

import math
from collections.abc import Callable

from scipy import special

from fedsim.papers.examine import BY_SIGN, Evidence
from fedsim.papers.published import MAJORITY, Claim, Number
from fedsim.results.statistics import ALPHA, POWER, Difference, Estimate, Median, Share, t_quantile

MOST = 1000
"""More seeds than this count as no number of seeds."""
Enough = Callable[[int], bool]


def seeds_needed(printed: Number | Claim, evidence: Evidence, tests: int) -> int | None:
    """The smallest number of seeds with which a verdict comes with 80 % probability, in a family of
    `tests` tests.

    The level is 5 % / `tests`. Of claims on every run that all or none of ours kept: the fewest
    that decide it if they go on so. None: more than `MOST`, as where the truth seems to lie on the
    edge.
    """
    ways = _ways(printed, evidence, ALPHA / max(tests, 1))
    return next(
        (num for num in range(evidence.num + 1, MOST + 1) if any(way(num) for way in ways)), None
    )


def _ways(printed: Number | Claim, evidence: Evidence, level: float) -> list[Enough]:
    """The ways to a verdict, each as whether a number of seeds is enough for it."""
    ours = evidence.ours
    if isinstance(ours, Share):
        share = ours.count / ours.num
        return [_sign_test(max(share, 1 - share), level / 2)]
    if isinstance(ours, Median):
        assert isinstance(printed, Claim)
        assert printed.value is not None
        low, high = printed.value - printed.tolerance, printed.value + printed.tolerance
        below, above = (
            sum(v < low for v in ours.values) / ours.num,
            sum(v > high for v in ours.values) / ours.num,
        )
        above_low, below_high = (
            _sign_test(1 - share, level, math.sqrt(POWER)) for share in (below, above)
        )
        return [
            _sign_test(max(below, above), level / 2),
            lambda num: above_low(num) and below_high(num),
        ]
    if isinstance(ours, Estimate):
        return _of_single_value(printed, ours, level)
    if isinstance(ours, Difference):
        assert isinstance(printed, Claim)
        return _of_difference(printed, ours, level, by_sign=BY_SIGN in evidence.detail)
    return []


def _of_single_value(printed: Number | Claim, ours: Estimate, level: float) -> list[Enough]:
    assert printed.value is not None
    tolerance = printed.tolerance if isinstance(printed, Claim) else 0.0
    margin = printed.tolerance if isinstance(printed, Claim) else printed.margin
    distance = abs(ours.mean - printed.value)

    def is_far(num: int) -> bool:
        edge = t_quantile(1 - level / 2, num - 1) * math.sqrt(1 + 1 / num)
        return distance - tolerance > (edge + t_quantile(POWER, num - 1) / math.sqrt(num)) * ours.sd

    return [_t_test(margin - distance, ours.sd, level), is_far]


def _of_difference(claim: Claim, ours: Difference, level: float, *, by_sign: bool) -> list[Enough]:
    sd, mean = ours.error * math.sqrt(ours.num), ours.mean
    if claim.level_with is not None:
        inside = claim.level_with - abs(mean)
        return [_t_test(inside, sd, level), _t_test(-inside, sd, level / 2)]
    if claim.grows_with is not None:
        return [_t_test(abs(mean), sd, level / 2)]
    edge = 0.0 if claim.not_worse_by is None else -claim.not_worse_by
    against = claim.gain - claim.tolerance if claim.gain and not by_sign else edge
    return [_t_test(mean - edge, sd, level / 2), _t_test(against - mean, sd, level / 2)]


def _t_test(distance: float, sd: float, level: float) -> Enough:
    """Whether a one-sided t test at `level` shows a true `distance` with 80 % probability
    (approximately)."""
    return lambda num: (
        distance
        > (t_quantile(1 - level, num - 1) + t_quantile(POWER, num - 1)) * sd / math.sqrt(num)
    )


def _sign_test(share: float, level: float, power: float = POWER) -> Enough:
    """Whether a one-sided binomial test at `level` shows that a true `share` is above one half."""

    def is_enough(num: int) -> bool:
        counts = range(num // 2, num + 1)
        least = next(
            (count for count in counts if special.bdtrc(count - 1, num, MAJORITY) < level), None
        )
        return least is not None and float(special.bdtrc(least - 1, num, share)) >= power

    return is_enough
