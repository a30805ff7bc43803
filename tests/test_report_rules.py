"""The rules of the verdicts, by hand. How often they err is in test_report_errors.py."""

import math

import pytest

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
from fedsim.papers.judge import omnibus
from fedsim.papers.published import RULES, VERDICTS
from fedsim.results.statistics import Difference, Estimate, Median, Share, differences, estimate, pooled


def apart(*values: float) -> Difference:
    found = differences(values)
    assert found is not None
    return found


def runs(*values: float) -> Estimate:
    found = estimate(values)
    assert found is not None
    return found


def verdict(evidence: Evidence) -> str:
    (alone,) = holm_corrected([evidence])
    return alone.verdict


TEN = (0.50, 0.52, 0.54, 0.56, 0.58, 0.60, 0.62, 0.64, 0.66, 0.68)
"""Mean .59, standard deviation .061; one more run falls between .446 and .734 in 95 % of cases."""


def test_a_number_is_one_draw() -> None:
    ours = runs(*TEN)
    assert ours.next_interval[1] == pytest.approx(0.7337, abs=1e-3)
    assert ours.standardised_error(ours.next_interval[1]) == pytest.approx(1.96, abs=1e-3)
    assert verdict(is_number(0.73, ours, 0.04)) == "too wide to tell"  # inside, far from our mean
    assert verdict(is_number(0.74, ours, 0.04)) == "not reproduced"
    assert verdict(is_number(0.59, ours, 0.04)) == "reproduced"
    assert verdict(is_number(0.59, ours, 0.03)) == "too wide to tell"  # not shown to be as close as that
    half = ours.next_half_width
    assert verdict(is_number(0.59 - 0.95 * half, ours, half + 1e-9)) == "consistent with"
    assert verdict(is_number(0.59 - 0.95 * half, ours, half - 1e-9)) == "too wide to tell"
    assert verdict(is_number(0.59, runs(0.5, 0.6), 0.04)) == "undecided"
    assert verdict(is_number(0.59, None, 0.04)) == "undecided"


def test_a_number_outside_of_the_interval_may_be_one_of_many() -> None:
    found = is_number(0.76, runs(*TEN), 0.04)
    assert 0.01 < found.p_against < 0.05
    many = holm_corrected([found] * 10)
    assert {one.verdict for one in many} == {"undecided"}


def test_what_is_close_within_the_margin_is_reproduced_however_exact_our_mean_is() -> None:
    found = is_number(0.52, runs(0.500, 0.501, 0.499), 0.04)
    assert found.p_against < 0.05
    assert verdict(found) == "reproduced"


def test_about_a_value_has_two_sides() -> None:
    ours = runs(40.0, 50.0, 35.0, 45.0, 42.0)
    assert verdict(is_about(500, ours, 200)) == "not reproduced"
    assert verdict(is_about(42, ours, 20)) == "reproduced"
    assert verdict(is_about(60, ours, 5)) == "too wide to tell"  # one run of ours could be 55, and many others
    assert verdict(is_about(20, ours, 0.5)) == "not reproduced"


def test_a_median_that_may_never_be_reached() -> None:
    late = Median((300.0, 400.0, 450.0, 350.0, 480.0, *[math.inf] * 5), 500.0)
    assert verdict(is_median_about(200, late, 50)) == "not reproduced"  # "about 200" is not "at least 150"
    near = Median((180.0, 190.0, 200.0, 210.0, 220.0, 205.0, 195.0, 198.0, 202.0, 207.0), 500.0)
    assert verdict(is_median_about(200, near, 50)) == "reproduced"
    assert verdict(is_median_about(200, Median(late.values[:5], 500.0), 50)) == "undecided"


def test_a_bound_is_about_the_share_of_runs() -> None:
    found = [verdict(holds_for_most(Share(*x))) for x in ((10, 10), (9, 10), (8, 10), (1, 10), (6, 6), (5, 5), (0, 5))]
    assert found == ["reproduced"] * 2 + ["undecided", "not reproduced", "reproduced", "undecided", "undecided"]


def test_a_gain_is_judged_against_every_rival() -> None:
    above, level, below = apart(0.1, 0.12, 0.14), apart(-0.01, 0.01, 0.0), apart(-0.1, -0.12, -0.14)
    assert verdict(exceeds({"a": above})) == "reproduced"
    assert verdict(exceeds({"a": above, "b": level})) == "undecided"
    assert verdict(exceeds({"a": above, "b": below})) == "not reproduced"
    assert exceeds({"a": above, "b": level}).detail == "weakest against b"
    assert verdict(exceeds({"a": apart(0.1, 0.12)})) == "undecided"  # two pairs
    vague = {"a": apart(0.018, 0.02, 0.022), "b": apart(-0.1, 0.04, 0.18)}  # its mean is higher, its p-value too
    assert exceeds(vague).detail == is_not_worse(vague, 0.0).detail == "weakest against b"


def test_a_printed_gain_has_two_sides() -> None:
    gain = {"a": apart(0.1, 0.12, 0.14)}  # .12 [.070, .170]
    assert verdict(exceeds(gain, 0.12)) == "reproduced"
    assert verdict(exceeds(gain, 0.16)) == "reproduced"
    assert verdict(exceeds(gain, 0.3)) == "direction only"
    assert verdict(exceeds(gain, 0.05)) == "direction only"  # more than is printed
    assert verdict(exceeds(gain, 0.06, 0.02)) == "reproduced"
    assert verdict(exceeds({"a": apart(-0.034, 0.17, 0.06, 0.05, 0.02)}, 0.1)) == "undecided"  # holds 0 and .1
    assert verdict(exceeds({"a": apart(-0.01, 0.01, 0.0)}, 0.1)) == "not reproduced"


def tail(t: float) -> float:
    """Student's t with two degrees of freedom: how often it is larger than `t`."""
    return (1 - t / math.sqrt(2 + t * t)) / 2


def test_p_values_of_differences_by_hand() -> None:
    """Two-sided; of several rivals the weakest counts for a claim, and against it the strongest, times their number."""
    root = math.sqrt(3)
    high, low = apart(0.1, 0.12, 0.14), apart(0.0, 0.02, 0.04)  # 6 and 1 standard deviations above 0
    fallen = {"a": apart(-0.1, -0.12, -0.14), "b": apart(0.0, -0.02, -0.04)}
    assert exceeds({"a": high, "b": low}).p_for == pytest.approx(2 * tail(root))
    assert exceeds(fallen).p_against == pytest.approx(4 * tail(6 * root))
    assert exceeds(fallen).p_for == 1.0
    assert is_not_worse({"a": high, "b": low}, 0.02).p_for == pytest.approx(2 * tail(2 * root))
    assert is_not_worse(fallen, 0.02).p_against == pytest.approx(4 * tail(5 * root))
    assert is_not_worse({"a": high, "b": low}, 0.02).detail == "weakest against b"
    assert is_level({"a": high, "b": low}, 0.1).p_against == pytest.approx(4 * tail(root))
    assert is_level({"a": low, "b": high}, 0.14).p_for == pytest.approx(tail(root))
    assert is_level(fallen, 0.1).p_against == pytest.approx(4 * tail(root))
    assert is_level({"a": low, "b": high}, 0.1).detail == "furthest from b"
    assert high.detectable == pytest.approx((4.30265 + 1.06066) * 0.02 / root, rel=1e-5)  # quantiles of .975 and .8
    slopes = [[0.0, 0.1], [0.0, 0.12], [0.0, 0.14]]
    for falls in (False, True):
        found = rises([0, 1], slopes, falls=falls)
        assert (found.p_against if falls else found.p_for) == pytest.approx(2 * tail(6 * root))


def test_the_size_of_a_gain_is_judged_on_two_sides_by_hand() -> None:
    gain = apart(0.1, 0.12, 0.14)
    apart_by = 0.02 / math.sqrt(3) * 4.849  # at which a tail has 2 %
    assert tail(4.849) == pytest.approx(0.02, abs=1e-5)
    assert exceeds({"a": gain}, 0.12 + apart_by).size_holds is False
    assert exceeds({"a": gain, "b": gain}, 0.12 + apart_by).size_holds is True  # one of two
    assert exceeds({"a": gain}, 0.12 + apart_by, 0.01).size_holds is True
    assert exceeds({"a": gain}, 0.12 - apart_by).size_holds is False
    assert exceeds({"a": gain, "b": gain}, 0.12 - apart_by).size_holds is False  # all of them are more
    assert exceeds({"a": gain}, 0.12 - apart_by, 0.01).size_holds is True


def test_levelness_needs_differences_inside_the_margin() -> None:
    close, far, vague = apart(0.001, 0.002, 0.0), apart(0.1, 0.11, 0.12), apart(-0.05, 0.06, 0.01)
    assert verdict(is_level({"a": close}, 0.01)) == "reproduced"
    assert verdict(is_level({"a": far}, 0.01)) == "not reproduced"
    assert verdict(is_level({"a": close, "b": far}, 0.01)) == "not reproduced"
    assert verdict(is_level({"a": vague}, 0.01)) == "undecided"


def test_not_worse_has_one_side() -> None:
    better, worse = apart(0.1, 0.11, 0.12), apart(-0.1, -0.11, -0.12)
    assert verdict(is_not_worse({"a": better}, 0.01)) == "reproduced"
    assert verdict(is_not_worse({"a": better, "b": worse}, 0.01)) == "not reproduced"
    assert verdict(is_not_worse({"a": apart(-0.05, 0.06, 0.01)}, 0.01)) == "undecided"


def test_five_runs_can_show_that_a_first_round_is_about_a_value_and_six_that_it_is_not() -> None:
    def of(*rounds: float) -> str:
        return verdict(is_median_about(100, Median(rounds, 500), 20))

    assert of(95, 98, 100, 102, 105) == "reproduced"
    assert of(95, 98, 100, 102) == "undecided"
    assert of(*[300] * 6) == "not reproduced"
    assert of(*[300] * 5) == "undecided"
    assert "five seeds can say reproduced, it takes six to say not reproduced" in RULES["value"]


def test_trends_are_slopes_of_seeds() -> None:
    rising = [[0.1, 0.2, 0.3], [0.2, 0.31, 0.4], [0.0, 0.1, 0.22]]
    found = rises([1, 2, 3], rising)
    assert isinstance(found.ours, Difference)
    assert found.ours.mean == pytest.approx((0.1 + 0.1 + 0.11) / 3)
    assert verdict(found) == "reproduced"
    falling = rises([1, 2, 3], rising, falls=True)
    assert isinstance(falling.ours, Difference)
    assert falling.ours.mean == found.ours.mean  # shown as it is
    assert verdict(falling) == "not reproduced"
    assert rises([1, 2], [[1.0, 2.0]]).ours is None


def test_a_gain_over_settings_that_differ_is_seen_when_they_are_pooled() -> None:
    settings = [(0.9, 1.0, 1.1), (0.0, 0.1, 0.2), (0.3, 0.4, 0.52)]
    found = pooled([dict(enumerate(values)) for values in settings])
    assert found is not None
    assert verdict(exceeds({"a": found})) == "reproduced"
    assert verdict(exceeds({"a": apart(*settings[1])})) == "undecided"
    assert verdict(exceeds({"a": found}, 0.5)) == "reproduced"


def test_claims_are_corrected_together_for_and_against_apart() -> None:
    borderline = exceeds({"a": apart(0.02, 0.04, 0.03)})  # p = .037
    assert verdict(borderline) == "reproduced"
    many = holm_corrected([borderline] * 5)
    assert {one.verdict for one in many} == {"undecided"}
    assert many[0].p_for == borderline.p_for
    assert many[0].holm_for == pytest.approx(5 * borderline.p_for)
    against = exceeds({"a": apart(-0.02, -0.04, -0.03)})
    assert holm_corrected([borderline, against])[0].holm_for == pytest.approx(2 * borderline.p_for)
    assert holm_corrected([Evidence(None), borderline])[1].verdict == "reproduced"  # nothing was tested there


def test_the_omnibus_check() -> None:
    found = omnibus([1.0, -1.0, 2.0, math.nan])
    assert found is not None
    assert (found.num, found.mean, found.sd) == (3, pytest.approx(2 / 3), pytest.approx(math.sqrt(7 / 3)))
    assert found.p_value == pytest.approx(0.1116, abs=1e-4)  # chi squared 6 with three degrees of freedom
    assert omnibus([1.0, math.nan]) is None


def test_every_verdict_is_explained() -> None:
    words = " ".join(RULES.values())
    assert all(verdict in words for verdict in VERDICTS if verdict not in ("not judged",))
