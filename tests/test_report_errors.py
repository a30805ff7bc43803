"""The rules of the verdicts err as rarely as they say: simulated papers and runs, at 3, 5, 10 and 20 seeds."""

from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from fedsim.papers.examine import Evidence, exceeds, holm_corrected, is_number
from fedsim.papers.published import RULES
from fedsim.results.statistics import differences, estimate, pooled
from tests import verdict_rates as sim
from tests.verdict_rates import MARGIN, PRINTED, SEEDS, Draw, not_above, not_below

TRIALS = 400
LONG = 5_000
HALF = 0.025
"""The error rate of one side of a 95 % interval."""
SIGN = ("reproduced", "direction only")
UNEQUAL = (0.3, 1.0, 3.0)
"""Standard deviations of three settings."""

Cases = list[tuple[str, Callable[[int], Draw], tuple[str, ...], float | dict[int, float]]]
AT_MOST: Cases = [
    ("a number that is one draw of ours", lambda n: sim.number(n, 0.0), ("not reproduced",), 0.05),
    ("a number at the margin", lambda n: sim.fixed_number(n, MARGIN), ("reproduced",), 0.05),
    ("about a value, printed at the tolerance", lambda n: sim.about(n, 1.0), ("reproduced",), 0.05),
    ("about a value that is ours", lambda n: sim.about(n, 0.0), ("not reproduced",), 0.05),
    ("a median at the tolerance", lambda n: sim.median_about(n, 250.0), ("reproduced",), 0.05),
    ("a median that is printed", lambda n: sim.median_about(n, 200.0), ("not reproduced",), HALF),
    ("a median at the tolerance, against", lambda n: sim.median_about(n, 250.0), ("not reproduced",), HALF),
    ("a bound that half of the runs keep", lambda n: sim.bound(n, 0.5), ("reproduced",), HALF),
    ("the same, against", lambda n: sim.bound(n, 0.5), ("not reproduced",), HALF),
    ("no effect", lambda n: sim.gain(n, 0.0), SIGN, HALF),
    ("no effect, one of three rivals", lambda n: sim.gain(n, 0.0, 3), SIGN, HALF),
    ("no effect, nothing printed", lambda n: sim.gain(n, 0.0, 3, 0.0), ("reproduced",), HALF),
    ("no effect, against, nothing printed", lambda n: sim.gain(n, 0.0, 3, 0.0), ("not reproduced",), HALF),
    ("half of the effect", lambda n: sim.gain(n, PRINTED / 2), ("reproduced",), {10: 0.3, 20: 0.05}),
    ("half of the effect, three rivals", lambda n: sim.gain(n, PRINTED / 2, 3), ("reproduced",), {10: 0.3, 20: 0.05}),
    ("the printed effect", lambda n: sim.gain(n, PRINTED), ("not reproduced",), HALF),
    ("the printed effect, its size", lambda n: sim.gain(n, PRINTED), ("not reproduced", "direction only"), 0.06),
    ("the printed effect, three rivals", lambda n: sim.gain(n, PRINTED, 3), ("not reproduced",), HALF),
    ("pooled, no effect", lambda n: sim.pooled_gain(n, 0.0), SIGN, HALF),
    ("pooled, no effect, unequal settings", lambda n: sim.pooled_gain(n, 0.0, UNEQUAL), SIGN, HALF),
    ("pooled, the printed effect", lambda n: sim.pooled_gain(n, PRINTED, UNEQUAL), ("not reproduced",), HALF),
    ("level, at the margin", lambda n: sim.level(n, MARGIN), ("reproduced",), 0.05),
    ("level, at the margin of three", lambda n: sim.level(n, MARGIN, 3), ("reproduced",), 0.05),
    ("level, at the margin, against", lambda n: sim.level(n, MARGIN, 3), ("not reproduced",), HALF),
    ("not worse, at the margin", lambda n: sim.not_worse(n, -MARGIN, 3), ("reproduced",), HALF),
    ("not worse, at the margin, against", lambda n: sim.not_worse(n, -MARGIN, 3), ("not reproduced",), HALF),
    ("no trend", lambda n: sim.trend(n, 0.0), ("reproduced",), HALF),
    ("no trend, against", lambda n: sim.trend(n, 0.0), ("not reproduced",), HALF),
]
AT_LEAST: Cases = [
    ("a number five deviations away", lambda n: sim.number(n, 5.0), ("not reproduced",), {5: 0.85, 10: 0.95}),
    ("a number that is our mean", lambda n: sim.fixed_number(n, 0.0), ("reproduced",), {10: 0.75, 20: 0.95}),
    ("a median twice the printed", lambda n: sim.median_about(n, 400.0), ("not reproduced",), {10: 0.4, 20: 0.8}),
    ("a bound that nearly all keep", lambda n: sim.bound(n, 0.95), ("reproduced",), {10: 0.85, 20: 0.95}),
    ("a bound that nearly none keeps", lambda n: sim.bound(n, 0.05), ("not reproduced",), {10: 0.85, 20: 0.95}),
    ("no effect", lambda n: sim.gain(n, 0.0, 3), ("not reproduced",), {5: 0.85, 10: 0.95}),
    ("half of the effect", lambda n: sim.gain(n, PRINTED / 2), ("direction only",), {10: 0.55, 20: 0.9}),
    ("the printed effect", lambda n: sim.gain(n, PRINTED, 3), ("reproduced",), {5: 0.7, 10: 0.92}),
    ("pooled, the printed effect", lambda n: sim.pooled_gain(n, PRINTED), ("reproduced",), {5: 0.9, 10: 0.92}),
    ("level, no difference", lambda n: sim.level(n, 0.0), ("reproduced",), {10: 0.75, 20: 0.95}),
    ("level, twice the margin", lambda n: sim.level(n, 2 * MARGIN), ("not reproduced",), {10: 0.75, 20: 0.95}),
    ("a trend of two deviations", lambda n: sim.trend(n, 2.0), ("reproduced",), {5: 0.8, 10: 0.95}),
]


def check(draw: Draw, found: tuple[str, ...], limit: float, *, at_most: bool, trials: int) -> None:
    counts = sim.verdicts(draw, trials)
    count = sum(counts[verdict] for verdict in found)
    assert (not_above if at_most else not_below)(count, trials, limit), (counts, limit)


def limits(cases: Cases) -> list[object]:
    """One parameter set for each case and number of seeds that it has a limit for."""
    return [
        pytest.param(of(num), found, limit[num] if isinstance(limit, dict) else limit, id=f"{name}, {num} seeds")
        for name, of, found, limit in cases
        for num in SEEDS
        if not isinstance(limit, dict) or num in limit
    ]


@pytest.mark.parametrize(("draw", "found", "limit"), limits(AT_MOST))
def test_false_verdicts_are_rare(draw: Draw, found: tuple[str, ...], limit: float) -> None:
    check(draw, found, limit, at_most=True, trials=TRIALS)


@pytest.mark.parametrize(("draw", "found", "limit"), limits(AT_LEAST))
def test_true_verdicts_are_frequent_from_enough_seeds_on(draw: Draw, found: tuple[str, ...], limit: float) -> None:
    check(draw, found, limit, at_most=False, trials=TRIALS)


@pytest.mark.slow
@pytest.mark.parametrize(("draw", "found", "limit"), limits(AT_MOST))
def test_false_verdicts_are_rare_in_many_trials(draw: Draw, found: tuple[str, ...], limit: float) -> None:
    check(draw, found, limit, at_most=True, trials=LONG)


@pytest.mark.parametrize("num", [3, 5])
def test_five_seeds_decide_no_bound(num: int) -> None:
    assert set(sim.verdicts(sim.bound(num, 1.0), 5)) == {"undecided"}


# --- rules that err more often, which the same checks reject -------------------------------------------------------


def test_a_rival_that_is_picked_on_the_same_data_is_too_often_too_good() -> None:
    """The plain interval of the difference to the rival that looks best, in place of a simultaneous comparison."""

    def naive(rng: np.random.Generator) -> bool:
        own, others = rng.normal(PRINTED, 0.5**0.5, 20), rng.normal(0, 0.5**0.5, (4, 20))
        found = differences(own - others[np.argmax(others.mean(1))])  # type: ignore[arg-type]
        return found is not None and found.interval[1] < PRINTED

    rng = np.random.default_rng(0)
    false = sum(naive(rng) for _ in range(TRIALS))
    assert false / TRIALS > 0.05
    assert not not_above(false, TRIALS, HALF)


def test_an_interval_of_our_mean_is_none_of_one_more_run() -> None:
    rng = np.random.default_rng(0)
    false = 0
    for _ in range(TRIALS):
        ours = estimate(rng.normal(0, 1, 20))  # type: ignore[arg-type]
        assert ours is not None
        false += not ours.interval[0] <= rng.normal(0, 1) <= ours.interval[1]
    assert false / TRIALS > 0.5
    assert not not_above(false, TRIALS, 0.05)


def test_settings_of_a_seed_are_no_further_seeds() -> None:
    """Two settings that are the same division of the data, averaged in two ways: their differences correlate by .92."""
    rng = np.random.default_rng(0)
    false = {"by seed": 0, "as if independent": 0}
    for _ in range(TRIALS):
        shared = rng.normal(0, 0.96, 10)
        strata = [shared + rng.normal(0, 0.28, 10) for _ in "ab"]
        by_seed = pooled([dict(enumerate(stratum.tolist())) for stratum in strata])
        apart = differences(np.concatenate(strata))  # type: ignore[arg-type]
        assert by_seed is not None
        assert apart is not None
        for name, found in zip(false, (by_seed, apart), strict=True):
            false[name] += holm_corrected([exceeds({"x": found})])[0].verdict == "reproduced"
    assert not_above(false["by seed"], TRIALS, HALF)
    assert not not_above(false["as if independent"], TRIALS, HALF)


# --- a whole paper -------------------------------------------------------------------------------------------------


def paper(rng: np.random.Generator, num: int) -> list[Evidence]:
    """A paper none of whose claims is true, and all of whose numbers are draws from our distributions."""
    numbers = [is_number(rng.normal(3, 1), estimate(rng.normal(3, 1, num)), 0.0) for _ in range(10)]  # type: ignore[arg-type]
    return [*numbers, *(sim.gain(num, 0.0, 2, 0.0)(rng) for _ in range(10)), *(sim.bound(num, 0.5)(rng) for _ in "abc")]


def test_the_error_rate_holds_for_each_family_of_a_paper_and_not_for_both_together() -> None:
    """Rows from before and after the runs are corrected apart: the rule promises no more than that."""
    rng = np.random.default_rng(0)
    families = [[sim.number(5, 0.0)(rng) for _ in range(TRIALS)] for _ in range(2)]
    false = [[holm_corrected([one])[0].verdict == "not reproduced" for one in family] for family in families]
    assert all(not_above(sum(family), TRIALS, 0.05) for family in false)
    assert not not_above(sum(map(any, zip(*false, strict=True))), TRIALS, 0.05)
    assert "In each family the tests" in RULES["holm"]


@pytest.mark.parametrize("num", [5, 20])
def test_a_paper_has_hardly_a_false_verdict_of_either_kind(num: int) -> None:
    """Holm's correction: without it, some 40 % of such papers have one."""
    rng = np.random.default_rng(0)
    papers = 150
    corrected = {"reproduced": 0, "not reproduced": 0}
    raw = 0
    for _ in range(papers):
        found = paper(rng, num)
        verdicts = [one.verdict for one in holm_corrected(found)]
        raw += any(min(one.p_for, one.p_against) < 0.05 for one in found)
        for kind in corrected:
            corrected[kind] += kind in verdicts
    assert all(not_above(count, papers, 0.05) for count in corrected.values()), corrected
    assert not not_above(raw, papers, 0.05)
    assert stats.binom.sf(raw - 1, papers, 0.25) < 0.01
