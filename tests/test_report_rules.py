"""The rules of the verdicts, by hand. How often they err is in test_report_errors.py."""

import math

import pytest

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
from fedsim.papers.judge import omnibus
from fedsim.papers.published import RULES, VERDICTS
from fedsim.results.statistics import Difference, Median, Share, differences, estimate, pooled


def apart(*values: float) -> Difference:
    return differences(values)


def verdict(evidence: Evidence) -> str:
    (alone,) = holm_corrected([evidence])
    return alone.verdict


TEN = estimate((0.50, 0.52, 0.54, 0.56, 0.58, 0.60, 0.62, 0.64, 0.66, 0.68))
"""Mean .59, standard deviation .061; one more run falls between .446 and .734 in 95 % of cases."""
HALF = TEN.next_half_width
FIVE = estimate((40.0, 50.0, 35.0, 45.0, 42.0))
LATE = (300.0, 400.0, 450.0, 350.0, 480.0)
NEAR = (180.0, 190.0, 200.0, 210.0, 220.0, 205.0, 195.0, 198.0, 202.0, 207.0)
HIGH, LEVEL, LOW = apart(0.1, 0.12, 0.14), apart(-0.01, 0.01, 0.0), apart(-0.1, -0.12, -0.14)
CLOSE, VAGUE = apart(0.001, 0.002, 0.0), apart(-0.05, 0.06, 0.01)
SETTINGS = [(0.9, 1.0, 1.1), (0.0, 0.1, 0.2), (0.3, 0.4, 0.52)]
POOLED = pooled([dict(enumerate(values)) for values in SETTINGS])
RISING = [[0.1, 0.2, 0.3], [0.2, 0.31, 0.4], [0.0, 0.1, 0.22]]


def first_round(value: float, tolerance: float, *rounds: float) -> Evidence:
    return is_median_about(value, Median(rounds, 500.0), tolerance)


CASES: dict[str, list[Evidence]] = {
    "reproduced": [
        is_number(0.59, TEN, 0.04),
        is_number(0.52, estimate((0.500, 0.501, 0.499)), 0.04),  # close, and no draw of ours
        is_number(42, FIVE, 20, 20),
        first_round(200, 50, *NEAR),
        first_round(100, 20, 95, 98, 100, 102, 105),
        *(holds_for_most(Share(*one)) for one in ((10, 10), (9, 10), (6, 6))),
        exceeds({"a": HIGH}),
        *(exceeds({"a": HIGH}, gain) for gain in (0.12, 0.16)),  # .12 [.070, .170]
        exceeds({"a": HIGH}, 0.06, 0.02),
        exceeds({"a": POOLED}),
        exceeds({"a": POOLED}, 0.5),
        is_level({"a": CLOSE}, 0.01),
        is_not_worse({"a": HIGH}, 0.01),
        rises([1, 2, 3], RISING),
    ],
    "direction only": [exceeds({"a": HIGH}, 0.3), exceeds({"a": HIGH}, 0.05)],  # less, or more than is printed
    "consistent with": [is_number(0.59 - 0.95 * HALF, TEN, HALF + 1e-9)],
    "too wide to tell": [
        is_number(0.73, TEN, 0.04),  # inside, far from our mean
        is_number(0.59, TEN, 0.03),  # not shown to be as close as that
        is_number(0.59 - 0.95 * HALF, TEN, HALF - 1e-9),
        is_number(60, FIVE, 5, 5),  # one run of ours could be 55, and many others
    ],
    "not reproduced": [
        is_number(0.74, TEN, 0.04),
        is_number(500, FIVE, 200, 200),
        is_number(20, FIVE, 0.5, 0.5),
        first_round(200, 50, *LATE, *[math.inf] * 5),  # "about 200" is not "at least 150"
        first_round(100, 20, *[300] * 6),
        holds_for_most(Share(1, 10)),
        exceeds({"a": HIGH, "b": LOW}),
        exceeds({"a": LEVEL}, 0.1),
        is_level({"a": HIGH}, 0.01),
        is_level({"a": CLOSE, "b": HIGH}, 0.01),
        is_not_worse({"a": HIGH, "b": LOW}, 0.01),
        rises([1, 2, 3], RISING, falls=True),
    ],
    "undecided": [
        is_number(0.59, estimate((0.5, 0.6)), 0.04),
        is_number(0.59, None, 0.04),
        first_round(200, 50, *LATE),
        first_round(100, 20, 95, 98, 100, 102),
        first_round(100, 20, *[300] * 5),
        first_round(100, 20, *[120] * 6),
        *(holds_for_most(Share(*one)) for one in ((8, 10), (5, 5), (0, 5))),
        exceeds({"a": HIGH, "b": LEVEL}),
        exceeds({"a": apart(0.1, 0.12)}),  # two pairs
        exceeds({"a": apart(-0.034, 0.17, 0.06, 0.05, 0.02)}, 0.1),  # its interval holds 0 and .1
        exceeds({"a": apart(*SETTINGS[1])}),  # one of the settings that are pooled above
        is_level({"a": VAGUE}, 0.01),
        is_not_worse({"a": VAGUE}, 0.01),
    ],
}


@pytest.mark.parametrize("expected", CASES)
def test_verdicts_by_hand(expected: str) -> None:
    assert [verdict(evidence) for evidence in CASES[expected]] == [expected] * len(CASES[expected])
    assert "five seeds can say reproduced, it takes six to say not reproduced" in RULES["value"]
    words = " ".join(RULES.values())
    assert all(verdict in words for verdict in VERDICTS if verdict not in ("not judged",))


def tail(t: float) -> float:
    """Student's t with two degrees of freedom: how often it is larger than `t`."""
    return (1 - t / math.sqrt(2 + t * t)) / 2


def test_p_values_of_differences_by_hand() -> None:
    """Two-sided; of several rivals the weakest counts for a claim, and against it the strongest, times their number."""
    root = math.sqrt(3)
    high, low = HIGH, apart(0.0, 0.02, 0.04)  # 6 and 1 standard deviations above 0
    fallen = {"a": LOW, "b": apart(0.0, -0.02, -0.04)}
    assert exceeds({"a": high, "b": low}).p_for == pytest.approx(2 * tail(root))
    assert exceeds(fallen).p_against == pytest.approx(4 * tail(6 * root))
    assert exceeds(fallen).p_for == 1.0
    assert is_not_worse({"a": high, "b": low}, 0.02).p_for == pytest.approx(2 * tail(2 * root))
    assert is_not_worse(fallen, 0.02).p_against == pytest.approx(4 * tail(5 * root))
    assert is_level({"a": high, "b": low}, 0.1).p_against == pytest.approx(4 * tail(root))
    assert is_level({"a": low, "b": high}, 0.14).p_for == pytest.approx(tail(root))
    assert is_level(fallen, 0.1).p_against == pytest.approx(4 * tail(root))
    assert is_level({"a": low, "b": high}, 0.1).detail == "furthest from b"
    vague = {"a": apart(0.018, 0.02, 0.022), "b": apart(-0.1, 0.04, 0.18)}  # its mean is higher, its p-value too
    assert exceeds(vague).detail == is_not_worse(vague, 0.0).detail == "weakest against b"
    assert high.detectable == pytest.approx((4.30265 + 1.06066) * 0.02 / root, rel=1e-5)  # quantiles of .975 and .8
    slopes = [[0.0, 0.1], [0.0, 0.12], [0.0, 0.14]]
    for falls in (False, True):
        found = rises([0, 1], slopes, falls=falls)
        assert (found.p_against if falls else found.p_for) == pytest.approx(2 * tail(6 * root))
        assert rises([1, 2, 3], RISING, falls=falls).ours.mean == pytest.approx((0.1 + 0.1 + 0.11) / 3)
    assert rises([1, 2], [[1.0, 2.0]]).ours is None


def test_the_size_of_a_gain_is_judged_on_two_sides_by_hand() -> None:
    apart_by = 0.02 / math.sqrt(3) * 4.849  # at which a tail has 2 %
    assert tail(4.849) == pytest.approx(0.02, abs=1e-5)
    for sign, rivals, tolerance, holds in (
        *((1, "a", 0.0, False), (1, "ab", 0.0, True), (1, "a", 0.01, True)),  # one of two is enough
        *((-1, "a", 0.0, False), (-1, "ab", 0.0, False), (-1, "a", 0.01, True)),  # all of them are more
    ):
        assert exceeds(dict.fromkeys(rivals, HIGH), 0.12 + sign * apart_by, tolerance).size_holds is holds


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
    number = is_number(0.76, TEN, 0.04)
    assert 0.01 < number.p_against < 0.05
    assert {one.verdict for one in holm_corrected([number] * 10)} == {"undecided"}


def test_the_omnibus_check() -> None:
    found = omnibus([1.0, -1.0, 2.0, math.nan])  # chi squared 6 with three degrees of freedom
    assert found == (3, pytest.approx(2 / 3), pytest.approx(math.sqrt(7 / 3)), pytest.approx(0.1116, abs=1e-4))
    assert omnibus([1.0, math.nan]) is None
