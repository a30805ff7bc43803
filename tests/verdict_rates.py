"""How often the rules of the verdicts err: simulated papers and runs, judged by the rules themselves.

Those of the families as they are shipped are in docs/verdicts.md (scripts/reproduction/open_items.py). Differences
between methods are in units of their standard deviation from seed to seed, and so are printed gains.
"""

from collections import Counter
from collections.abc import Callable

import numpy as np
from scipy import stats

from fedsim.papers.examine import (
    Evidence,
    exceeds,
    holds_for_most,
    holm_corrected,
    is_about,
    is_level,
    is_median_about,
    is_not_worse,
    is_number,
    rises,
)
from fedsim.results.statistics import Difference, Median, Share, differences, estimate, pooled

Draw = Callable[[np.random.Generator], Evidence]
SEEDS = (3, 5, 10, 20)
PRINTED = 2.0
"""The printed gain, in standard deviations of a paired difference: that of GPFL at 2SPC is .0934 at some .04."""
MARGIN = 1.0
"""The margin of equivalence."""
ROUNDS = 500.0


def verdicts(draw: Draw, trials: int, seed: int = 0) -> Counter[str]:
    """The verdicts on `trials` claims, each the only one of its paper."""
    rng = np.random.default_rng(seed)
    return Counter(holm_corrected([draw(rng)])[0].verdict for _ in range(trials))


def not_above(count: int, trials: int, rate: float) -> bool:
    """Whether `count` of `trials` can be a share of at most `rate` (binomial test at 1 in 10,000)."""
    return count == 0 or bool(stats.binom.sf(count - 1, trials, rate) > 1e-4)


def not_below(count: int, trials: int, rate: float) -> bool:
    """Whether `count` of `trials` can be a share of at least `rate` (binomial test at 1 in 10,000)."""
    return bool(stats.binom.cdf(count, trials, rate) > 1e-4)


def difference(rng: np.random.Generator, num: int, mean: float, sd: float = 1.0) -> Difference:
    found = differences(rng.normal(mean, sd, num))  # type: ignore[arg-type]
    assert found is not None
    return found


# --- one simulated claim of each form ------------------------------------------------------------------------------


def number(num: int, shift: float) -> Draw:
    """A printed run whose method has a true mean that lies `shift` above ours."""

    def draw(rng: np.random.Generator) -> Evidence:
        ours = estimate(rng.normal(0, 1, num))  # type: ignore[arg-type]
        return is_number(rng.normal(shift, 1), ours, MARGIN)

    return draw


def fixed_number(num: int, value: float) -> Draw:
    """A printed number that lies `value` above our true mean."""
    return lambda rng: is_number(value, estimate(rng.normal(0, 1, num)), MARGIN)  # type: ignore[arg-type]


def about(num: int, value: float) -> Draw:
    """A quantity that is printed as about `value`, of which the tolerance is 1; ours is 0 on average."""
    return lambda rng: is_about(value, estimate(rng.normal(0, 1, num)), 1.0)  # type: ignore[arg-type]


def median_about(num: int, median: float, value: float = 200.0) -> Draw:
    """A first round that is printed as about 200 +- 50; ours has this median, and beyond round 500 it never comes."""

    def draw(rng: np.random.Generator) -> Evidence:
        rounds = median * np.exp(rng.normal(0, 0.5, num))
        return is_median_about(value, Median(tuple(np.where(rounds > ROUNDS, np.inf, rounds)), ROUNDS), 50.0)

    return draw


def bound(num: int, share: float) -> Draw:
    """A bound that holds for this `share` of all runs."""
    return lambda rng: holds_for_most(Share(int(rng.binomial(num, share)), num))


def gain(num: int, effect: float, rivals: int = 1, printed: float = PRINTED) -> Draw:
    """A printed gain over the best of equally good `rivals`, which share the seeds, where the true gain is `effect`."""

    def draw(rng: np.random.Generator) -> Evidence:
        own, others = rng.normal(effect, 0.5**0.5, num), rng.normal(0, 0.5**0.5, (rivals, num))
        found = {str(i): differences(own - other) for i, other in enumerate(others)}
        return exceeds({name: d for name, d in found.items() if d is not None}, printed)

    return draw


def level(num: int, effect: float, rivals: int = 1) -> Draw:
    return lambda rng: is_level({str(i): difference(rng, num, effect) for i in range(rivals)}, MARGIN)


def not_worse(num: int, effect: float, rivals: int = 1) -> Draw:
    return lambda rng: is_not_worse({str(i): difference(rng, num, effect) for i in range(rivals)}, MARGIN)


def trend(num: int, slope: float) -> Draw:
    at = np.array([0.0, 1.0, 2.0])

    def draw(rng: np.random.Generator) -> Evidence:
        return rises(list(at), [list(slope * at + rng.normal(0, 1, 3)) for _ in range(num)])

    return draw


def pooled_gain(num: int, effect: float, sds: tuple[float, ...] = (1.0, 1.0, 1.0), printed: float = PRINTED) -> Draw:
    """A printed mean gain over settings whose differences have these standard deviations, and means of their own."""
    apart = np.linspace(-1, 1, len(sds))

    def draw(rng: np.random.Generator) -> Evidence:
        strata = [rng.normal(effect + shift, sd, num) for shift, sd in zip(apart, sds, strict=True)]
        found = pooled([dict(enumerate(stratum.tolist())) for stratum in strata])
        assert found is not None
        return exceeds({"x": found}, printed)

    return draw
