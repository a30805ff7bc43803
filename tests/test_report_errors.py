"""The rules of the verdicts err as rarely as they say: simulated papers and runs, judged by the rules themselves.

Those of the families as they are shipped are in docs/verdicts.md (scripts/reproduction/open_items.py). Differences
between methods are in units of their standard deviation from seed to seed, and so are printed gains.
"""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from fedsim.papers.examine import (
    Evidence,
    exceeds,
    holds_for_most,
    holm_corrected,
    is_level,
    is_median_about,
    is_not_worse,
    is_number,
    rises,
)
from fedsim.results.statistics import Difference, Median, Share, differences, estimate

Draw = Callable[[np.random.Generator], Evidence]
SEEDS = (3, 5, 10, 20)
PRINTED = 2.0
"""The printed gain, in standard deviations of a paired difference: that of GPFL at 2SPC is .0934 at some .04."""
MARGIN = 1.0
"""The margin of equivalence."""
ROUNDS = 500.0


def verdicts(draw: Draw, trials: int) -> Counter[str]:
    """The verdicts on `trials` claims, each the only one of its paper."""
    rng = np.random.default_rng(0)
    return Counter(holm_corrected([draw(rng)])[0].verdict for _ in range(trials))


def not_above(count: int, trials: int, rate: float) -> bool:
    """Whether `count` of `trials` can be a share of at most `rate` (binomial test at 1 in 10,000)."""
    return count == 0 or bool(stats.binom.sf(count - 1, trials, rate) > 1e-4)


def not_below(count: int, trials: int, rate: float) -> bool:
    """Whether `count` of `trials` can be a share of at least `rate` (binomial test at 1 in 10,000)."""
    return bool(stats.binom.cdf(count, trials, rate) > 1e-4)


def rivals(rng: np.random.Generator, num: int, effect: float, count: int) -> dict[str, Difference]:
    return {str(i): differences(rng.normal(effect, 1, num)) for i in range(count)}


# --- one simulated claim of each form ---


def number(num: int, shift: float) -> Draw:
    """A printed run whose method has a true mean that lies `shift` above ours, which is 0."""

    def draw(rng: np.random.Generator) -> Evidence:
        ours = estimate(rng.normal(0, 1, num))
        return is_number(rng.normal(shift, 1), ours, MARGIN)

    return draw


def fixed_number(num: int, value: float, tolerance: float = 0.0) -> Draw:
    """A number that is printed as `value` +- `tolerance`."""
    return lambda rng: is_number(value, estimate(rng.normal(0, 1, num)), MARGIN, tolerance)


def median_about(num: int, median: float, value: float = 200.0) -> Draw:
    """A first round that is printed as about 200 +- 50; ours has this median, and beyond round 500 it never comes."""

    def draw(rng: np.random.Generator) -> Evidence:
        rounds = median * np.exp(rng.normal(0, 0.5, num))
        return is_median_about(value, Median(tuple(np.where(rounds > ROUNDS, np.inf, rounds)), ROUNDS), 50.0)

    return draw


def bound(num: int, share: float) -> Draw:
    """A bound that holds for this `share` of all runs."""
    return lambda rng: holds_for_most(Share(int(rng.binomial(num, share)), num))


def gain(num: int, effect: float, count: int = 1, printed: float = PRINTED) -> Draw:
    """A printed gain over the best of equally good rivals that share the seeds, where the true gain is `effect`."""

    def draw(rng: np.random.Generator) -> Evidence:
        own, others = rng.normal(effect, 0.5**0.5, num), rng.normal(0, 0.5**0.5, (count, num))
        return exceeds({str(i): differences(own - other) for i, other in enumerate(others)}, printed)

    return draw


def level(num: int, effect: float, count: int = 1) -> Draw:
    return lambda rng: is_level(rivals(rng, num, effect, count), MARGIN)


def not_worse(num: int, effect: float, count: int = 1) -> Draw:
    return lambda rng: is_not_worse(rivals(rng, num, effect, count), MARGIN)


def trend(num: int, slope: float) -> Draw:
    at = np.array([0.0, 1.0, 2.0])
    return lambda rng: rises(list(at), [list(slope * at + rng.normal(0, 1, 3)) for _ in range(num)])


# --- how often they err ---

TRIALS = 400
LONG = 5_000
HALF = 0.025
"""The error rate of one side of a 95 % interval."""
SIGN = ("reproduced", "direction only")

Cases = list[tuple[str, Callable[[int], Draw], tuple[str, ...], float | dict[int, float]]]
AT_MOST: Cases = [
    ("a number that is one draw of ours", lambda n: number(n, 0.0), ("not reproduced",), 0.05),
    ("a number at the margin", lambda n: fixed_number(n, MARGIN), ("reproduced",), 0.05),
    ("about a value, printed at the tolerance", lambda n: fixed_number(n, 1.0, 1.0), ("reproduced",), 0.05),
    ("about a value that is ours", lambda n: fixed_number(n, 0.0, 1.0), ("not reproduced",), 0.05),
    ("a median at the tolerance", lambda n: median_about(n, 250.0), ("reproduced",), 0.05),
    ("a median that is printed", lambda n: median_about(n, 200.0), ("not reproduced",), HALF),
    ("a median at the tolerance, against", lambda n: median_about(n, 250.0), ("not reproduced",), HALF),
    ("a bound that half of the runs keep", lambda n: bound(n, 0.5), ("reproduced",), HALF),
    ("the same, against", lambda n: bound(n, 0.5), ("not reproduced",), HALF),
    ("no effect", lambda n: gain(n, 0.0), SIGN, HALF),
    ("no effect, one of three rivals", lambda n: gain(n, 0.0, 3), SIGN, HALF),
    ("no effect, nothing printed", lambda n: gain(n, 0.0, 3, 0.0), ("reproduced",), HALF),
    ("no effect, against, nothing printed", lambda n: gain(n, 0.0, 3, 0.0), ("not reproduced",), HALF),
    ("half of the effect", lambda n: gain(n, PRINTED / 2), ("reproduced",), {10: 0.3, 20: 0.05}),
    ("half of the effect, three rivals", lambda n: gain(n, PRINTED / 2, 3), ("reproduced",), {10: 0.3, 20: 0.05}),
    ("the printed effect", lambda n: gain(n, PRINTED), ("not reproduced",), HALF),
    ("the printed effect, its size", lambda n: gain(n, PRINTED), ("not reproduced", "direction only"), 0.06),
    ("the printed effect, three rivals", lambda n: gain(n, PRINTED, 3), ("not reproduced",), HALF),
    ("level, at the margin", lambda n: level(n, MARGIN), ("reproduced",), 0.05),
    ("level, at the margin of three", lambda n: level(n, MARGIN, 3), ("reproduced",), 0.05),
    ("level, at the margin, against", lambda n: level(n, MARGIN, 3), ("not reproduced",), HALF),
    ("not worse, at the margin", lambda n: not_worse(n, -MARGIN, 3), ("reproduced",), HALF),
    ("not worse, at the margin, against", lambda n: not_worse(n, -MARGIN, 3), ("not reproduced",), HALF),
    ("no trend", lambda n: trend(n, 0.0), ("reproduced",), HALF),
    ("no trend, against", lambda n: trend(n, 0.0), ("not reproduced",), HALF),
]
AT_LEAST: Cases = [
    ("a number five deviations away", lambda n: number(n, 5.0), ("not reproduced",), {5: 0.85, 10: 0.95}),
    ("a number that is our mean", lambda n: fixed_number(n, 0.0), ("reproduced",), {10: 0.75, 20: 0.95}),
    ("a median twice the printed", lambda n: median_about(n, 400.0), ("not reproduced",), {10: 0.4, 20: 0.8}),
    ("a bound that nearly all keep", lambda n: bound(n, 0.95), ("reproduced",), {10: 0.85, 20: 0.95}),
    ("a bound that nearly none keeps", lambda n: bound(n, 0.05), ("not reproduced",), {10: 0.85, 20: 0.95}),
    ("no effect", lambda n: gain(n, 0.0, 3), ("not reproduced",), {5: 0.85, 10: 0.95}),
    ("half of the effect", lambda n: gain(n, PRINTED / 2), ("direction only",), {10: 0.55, 20: 0.9}),
    ("the printed effect", lambda n: gain(n, PRINTED, 3), ("reproduced",), {5: 0.7, 10: 0.92}),
    ("level, no difference", lambda n: level(n, 0.0), ("reproduced",), {10: 0.75, 20: 0.95}),
    ("level, twice the margin", lambda n: level(n, 2 * MARGIN), ("not reproduced",), {10: 0.75, 20: 0.95}),
    ("a trend of two deviations", lambda n: trend(n, 2.0), ("reproduced",), {5: 0.8, 10: 0.95}),
]


def limits(cases: Cases) -> list[object]:
    """One parameter set for each case and number of seeds that it has a limit for."""
    return [
        pytest.param(of(num), found, limit[num] if isinstance(limit, dict) else limit, id=f"{name}, {num} seeds")
        for name, of, found, limit in cases
        for num in SEEDS
        if not isinstance(limit, dict) or num in limit
    ]


@pytest.mark.parametrize(("draw", "found", "limit"), limits(AT_MOST))
@pytest.mark.parametrize("trials", [TRIALS, pytest.param(LONG, marks=pytest.mark.slow)])
def test_false_verdicts_are_rare(draw: Draw, found: tuple[str, ...], limit: float, trials: int) -> None:
    counts = verdicts(draw, trials)
    assert not_above(sum(counts[verdict] for verdict in found), trials, limit), (counts, limit)


@pytest.mark.parametrize(("draw", "found", "limit"), limits(AT_LEAST))
def test_true_verdicts_are_frequent_from_enough_seeds_on(draw: Draw, found: tuple[str, ...], limit: float) -> None:
    counts = verdicts(draw, TRIALS)
    assert not_below(sum(counts[verdict] for verdict in found), TRIALS, limit), (counts, limit)


# --- a whole paper ---


def paper(rng: np.random.Generator, num: int) -> list[Evidence]:
    """A paper none of whose claims is true, and all of whose numbers are draws from our distributions."""
    numbers = [is_number(rng.normal(3, 1), estimate(rng.normal(3, 1, num)), 0.0) for _ in range(10)]
    return [*numbers, *(gain(num, 0.0, 2, 0.0)(rng) for _ in range(10)), *(bound(num, 0.5)(rng) for _ in "abc")]


@pytest.mark.parametrize("num", [5, 20])
def test_a_paper_has_hardly_a_false_verdict_of_either_kind(num: int) -> None:
    """Holm's correction: without it, some 40 % of such papers have one."""
    rng = np.random.default_rng(0)
    papers = [paper(rng, num) for _ in range(150)]
    told = [{one.verdict for one in holm_corrected(found)} for found in papers]
    for kind in ("reproduced", "not reproduced"):
        assert not_above(sum(kind in verdicts for verdicts in told), 150, 0.05), kind
    raw = sum(any(min(one.p_for, one.p_against) < 0.05 for one in found) for found in papers)
    assert stats.binom.sf(raw - 1, 150, 0.25) < 0.01
