"""The rules of the verdicts: by hand, and how often they err in simulated experiments."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from fedsim.report.statistics import Difference, Estimate, differences
from fedsim.report.verdicts.rules import (
    Evidence,
    exceeds,
    holm_corrected,
    is_level,
    judge_bound,
    judge_number,
    number_p,
    rises,
    show_share,
)


def apart(*values: float) -> Difference:
    found = differences(values)
    assert found is not None
    return found


def verdict(evidence: Evidence) -> str:
    (alone,) = holm_corrected([evidence])
    return alone.verdict


def estimate_of(low: float, high: float, num: int = 5) -> Estimate:
    return Estimate((low + high) / 2, math.nan, math.nan, low, high, 0.01, num)


def test_a_number_is_judged_by_where_one_more_run_would_fall() -> None:
    near = estimate_of(0.45, 0.55)
    assert judge_number(0.54, near, 0.2) == "reproduced"
    assert judge_number(0.56, near, 0.04) == "not reproduced"
    assert judge_number(0.56, near, 0.3) == "undecided"  # outside, but one of many
    assert judge_number(0.5, estimate_of(0.3, 0.7), 0.9) == "undecided"  # anything would lie inside
    assert judge_number(0.5, estimate_of(0.5, 0.5, num=2), 0.9) == "undecided"
    assert judge_number(0.5, None, math.nan) == "undecided"
    assert math.isnan(number_p(0.5, estimate_of(0.5, 0.5, num=2)))


def test_a_bound_needs_five_seeds_that_agree() -> None:
    found = [judge_bound(*x) for x in ((5, 5), (0, 5), (4, 5), (4, 4), (0, 3))]
    assert found == ["reproduced", "not reproduced", "undecided", "undecided", "undecided"]
    assert show_share(3, 3) == "holds for 3 of 3 seeds (share 0.29 to 1.00; fewer than 5 decide nothing)"


def test_a_gain_is_judged_against_every_rival() -> None:
    above, level, below = apart(0.1, 0.12, 0.14), apart(-0.01, 0.01, 0.0), apart(-0.1, -0.12, -0.14)
    assert verdict(exceeds(0.0, {"a": above})) == "reproduced"
    assert verdict(exceeds(0.0, {"a": above, "b": level})) == "undecided"
    assert verdict(exceeds(0.0, {"a": above, "b": below})) == "not reproduced"
    assert exceeds(0.0, {"a": above, "b": level}).detail == "weakest against b"
    assert verdict(exceeds(0.3, {"a": above})) == "not reproduced"  # above 0, but not by as much as printed
    assert verdict(exceeds(0.12, {"a": above})) == "reproduced"
    assert verdict(exceeds(0.0, {"a": apart(0.1, 0.12)})) == "undecided"  # two pairs


def test_levelness_needs_differences_inside_the_margin() -> None:
    close, far, vague = apart(0.001, 0.002, 0.0), apart(0.1, 0.11, 0.12), apart(-0.05, 0.06, 0.01)
    assert verdict(is_level(0.01, {"a": close})) == "reproduced"
    assert verdict(is_level(0.01, {"a": far})) == "not reproduced"
    assert verdict(is_level(0.01, {"a": close, "b": far})) == "not reproduced"
    assert verdict(is_level(0.01, {"a": vague})) == "undecided"


def test_trends_are_slopes_of_seeds() -> None:
    rising = {0: [0.1, 0.2, 0.3], 1: [0.2, 0.31, 0.4], 2: [0.0, 0.1, 0.22]}
    found = rises([1, 2, 3], rising)
    assert found.ours is not None
    assert found.ours.mean == pytest.approx((0.1 + 0.1 + 0.11) / 3)
    assert verdict(found) == "reproduced"
    assert verdict(rises([1, 2, 3], rising, falls=True)) == "not reproduced"
    assert rises([1, 2], {0: [1.0, 2.0]}).ours is None


def test_claims_are_corrected_together() -> None:
    borderline = exceeds(0.0, {"a": apart(0.02, 0.04, 0.03)})  # one-sided p = .018
    assert verdict(borderline) == "reproduced"
    many = holm_corrected([borderline] * 5)
    assert {one.verdict for one in many} == {"undecided"}
    assert many[0].p_for == borderline.p_for
    assert (
        holm_corrected([Evidence(None), borderline])[1].verdict == "reproduced"
    )  # what was not tested counts for nothing


TRIALS = 600
Judge = Callable[[dict[str, Difference]], Evidence]


def rates(judge: Judge, means: tuple[float, ...], num: int, trials: int = TRIALS) -> dict[str, float]:
    """Shares of the verdicts on a claim about paired differences with these true means and standard deviation 1."""
    rng = np.random.default_rng(num)
    found = [
        verdict(judge({str(i): apart(*rng.normal(mean, 1, num)) for i, mean in enumerate(means)}))
        for _ in range(trials)
    ]
    return {name: found.count(name) / trials for name in ("reproduced", "not reproduced", "undecided")}


@pytest.mark.parametrize("num", [3, 5, 10, 20])
def test_error_rates_of_the_gain_rule(num: int) -> None:
    """A claim that is false is called reproduced, and one that is true not reproduced, in 5 % of cases at most."""
    slack = 4 * math.sqrt(0.05 * 0.95 / TRIALS)
    nothing = rates(lambda rivals: exceeds(2.0, rivals), (0.0, 0.0, 0.0), num)
    assert nothing["reproduced"] <= 0.05 + slack
    printed = rates(lambda rivals: exceeds(2.0, rivals), (2.0, 2.0, 2.0), num)
    assert printed["not reproduced"] <= 0.05 + slack
    one_rival_level = rates(lambda rivals: exceeds(0.0, rivals), (0.0, 3.0), num)
    assert one_rival_level["reproduced"] <= 0.05 + slack
    if num >= 10:  # enough to decide a gain of two standard deviations
        assert printed["reproduced"] >= 0.8
        assert nothing["not reproduced"] >= 0.8


@pytest.mark.parametrize("num", [5, 20])
def test_error_rates_of_levelness(num: int) -> None:
    slack = 4 * math.sqrt(0.05 * 0.95 / TRIALS)
    at_the_margin = rates(lambda rivals: is_level(1.0, rivals), (1.0,), num)
    assert at_the_margin["reproduced"] <= 0.05 + slack
    assert at_the_margin["not reproduced"] <= 0.05 + slack
    if num == 20:
        assert rates(lambda rivals: is_level(1.0, rivals), (0.0,), num)["reproduced"] >= 0.8
