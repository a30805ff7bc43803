"""The rules of the verdicts, by hand; and that they err as rarely as they say, by simulated papers
and runs.

Error rates of the families as they are shipped are in docs/verdicts.md
(scripts/reproduction/open_items.py). Differences between methods are simulated in units of their
standard deviation from seed to seed, and so are printed gains.
"""

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fedsim.papers.evidence import (
    Evidence,
    gain_evidence,
    holm_corrected,
    level_evidence,
    majority_evidence,
    margin_evidence,
    median_evidence,
    number_evidence,
    trend_evidence,
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
POOLED = pooled([pd.Series(values) for values in SETTINGS])
RISING = [[0.1, 0.2, 0.3], [0.2, 0.31, 0.4], [0.0, 0.1, 0.22]]


def first_round(value: float, tolerance: float, *rounds: float) -> Evidence:
    return median_evidence(value, Median(rounds, 500.0), tolerance)


CASES: dict[str, list[Evidence]] = {
    "reproduced": [
        number_evidence(0.59, TEN, 0.04),
        number_evidence(0.52, estimate((0.500, 0.501, 0.499)), 0.04),  # close, and no draw of ours
        number_evidence(42, FIVE, 20, 20),
        first_round(200, 50, *NEAR),
        first_round(100, 20, 95, 98, 100, 102, 105),
        *(majority_evidence(Share(*one)) for one in ((10, 10), (9, 10), (6, 6))),
        gain_evidence({"a": HIGH}),
        *(gain_evidence({"a": HIGH}, gain) for gain in (0.12, 0.16)),  # .12 [.070, .170]
        gain_evidence({"a": HIGH}, 0.06, 0.02),
        gain_evidence({"a": POOLED}),
        gain_evidence({"a": POOLED}, 0.5),
        level_evidence({"a": CLOSE}, 0.01),
        margin_evidence({"a": HIGH}, 0.01),
        trend_evidence([1, 2, 3], RISING),
    ],
    "direction only": [
        gain_evidence({"a": HIGH}, 0.3),
        gain_evidence({"a": HIGH}, 0.05),
    ],  # less, or more than is printed
    "consistent with": [number_evidence(0.59 - 0.95 * HALF, TEN, HALF + 1e-9)],
    "too wide to tell": [
        number_evidence(0.73, TEN, 0.04),  # inside, far from our mean
        number_evidence(0.59, TEN, 0.03),  # not shown to be as close as that
        number_evidence(0.59 - 0.95 * HALF, TEN, HALF - 1e-9),
        number_evidence(60, FIVE, 5, 5),  # one run of ours could be 55, and many others
    ],
    "not reproduced": [
        number_evidence(0.74, TEN, 0.04),
        number_evidence(500, FIVE, 200, 200),
        number_evidence(20, FIVE, 0.5, 0.5),
        first_round(200, 50, *LATE, *[math.inf] * 5),  # "about 200" is not "at least 150"
        first_round(100, 20, *[300] * 6),
        majority_evidence(Share(1, 10)),
        gain_evidence({"a": HIGH, "b": LOW}),
        gain_evidence({"a": LEVEL}, 0.1),
        level_evidence({"a": HIGH}, 0.01),
        level_evidence({"a": CLOSE, "b": HIGH}, 0.01),
        margin_evidence({"a": HIGH, "b": LOW}, 0.01),
        trend_evidence([1, 2, 3], RISING, falls=True),
    ],
    "undecided": [
        number_evidence(0.59, estimate((0.5, 0.6)), 0.04),
        number_evidence(0.59, None, 0.04),
        first_round(200, 50, *LATE),
        first_round(100, 20, 95, 98, 100, 102),
        first_round(100, 20, *[300] * 5),
        first_round(100, 20, *[120] * 6),
        *(majority_evidence(Share(*one)) for one in ((8, 10), (5, 5), (0, 5))),
        gain_evidence({"a": HIGH, "b": LEVEL}),
        gain_evidence({"a": apart(0.1, 0.12)}),  # two pairs
        gain_evidence(
            {"a": apart(-0.034, 0.17, 0.06, 0.05, 0.02)}, 0.1
        ),  # its interval holds 0 and .1
        gain_evidence({"a": apart(*SETTINGS[1])}),  # one of the settings that are pooled above
        level_evidence({"a": VAGUE}, 0.01),
        margin_evidence({"a": VAGUE}, 0.01),
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
    """Two-sided; of several rivals the weakest counts for a claim, and against it the strongest,
    times their number."""
    root = math.sqrt(3)
    high, low = HIGH, apart(0.0, 0.02, 0.04)  # 6 and 1 standard deviations above 0
    fallen = {"a": LOW, "b": apart(0.0, -0.02, -0.04)}
    assert gain_evidence({"a": high, "b": low}).p_for == pytest.approx(2 * tail(root))
    assert gain_evidence(fallen).p_against == pytest.approx(4 * tail(6 * root))
    assert gain_evidence(fallen).p_for == 1.0
    assert margin_evidence({"a": high, "b": low}, 0.02).p_for == pytest.approx(2 * tail(2 * root))
    assert margin_evidence(fallen, 0.02).p_against == pytest.approx(4 * tail(5 * root))
    assert level_evidence({"a": high, "b": low}, 0.1).p_against == pytest.approx(4 * tail(root))
    assert level_evidence({"a": low, "b": high}, 0.14).p_for == pytest.approx(tail(root))
    assert level_evidence(fallen, 0.1).p_against == pytest.approx(4 * tail(root))
    assert level_evidence({"a": low, "b": high}, 0.1).detail == "furthest from b"
    vague = {
        "a": apart(0.018, 0.02, 0.022),
        "b": apart(-0.1, 0.04, 0.18),
    }  # its mean is higher, its p-value too
    assert gain_evidence(vague).detail == margin_evidence(vague, 0.0).detail == "weakest against b"
    assert high.detectable == pytest.approx(
        (4.30265 + 1.06066) * 0.02 / root, rel=1e-5
    )  # quantiles of .975 and .8
    slopes = [[0.0, 0.1], [0.0, 0.12], [0.0, 0.14]]
    for falls in (False, True):
        found = trend_evidence([0, 1], slopes, falls=falls)
        assert (found.p_against if falls else found.p_for) == pytest.approx(2 * tail(6 * root))
        assert trend_evidence([1, 2, 3], RISING, falls=falls).ours.mean == pytest.approx(
            (0.1 + 0.1 + 0.11) / 3
        )
    assert trend_evidence([1, 2], [[1.0, 2.0]]).ours is None


def test_the_size_of_a_gain_is_judged_on_two_sides_by_hand() -> None:
    apart_by = 0.02 / math.sqrt(3) * 4.849  # at which a tail has 2 %
    assert tail(4.849) == pytest.approx(0.02, abs=1e-5)
    for sign, rivals, tolerance, holds in (
        *((1, "a", 0.0, False), (1, "ab", 0.0, True), (1, "a", 0.01, True)),  # one of two is enough
        *(
            (-1, "a", 0.0, False),
            (-1, "ab", 0.0, False),
            (-1, "a", 0.01, True),
        ),  # all of them are more
    ):
        assert (
            gain_evidence(dict.fromkeys(rivals, HIGH), 0.12 + sign * apart_by, tolerance).size_holds
            is holds
        )


def test_claims_are_corrected_together_for_and_against_apart() -> None:
    borderline = gain_evidence({"a": apart(0.02, 0.04, 0.03)})  # p = .037
    assert verdict(borderline) == "reproduced"
    many = holm_corrected([borderline] * 5)
    assert {one.verdict for one in many} == {"undecided"}
    assert many[0].p_for == borderline.p_for
    assert many[0].holm_for == pytest.approx(5 * borderline.p_for)
    against = gain_evidence({"a": apart(-0.02, -0.04, -0.03)})
    assert holm_corrected([borderline, against])[0].holm_for == pytest.approx(2 * borderline.p_for)
    assert (
        holm_corrected([Evidence(None), borderline])[1].verdict == "reproduced"
    )  # nothing was tested there
    number = number_evidence(0.76, TEN, 0.04)
    assert 0.01 < number.p_against < 0.05
    assert {one.verdict for one in holm_corrected([number] * 10)} == {"undecided"}


def test_the_omnibus_check() -> None:
    found = omnibus([1.0, -1.0, 2.0, math.nan])  # chi squared 6 with three degrees of freedom
    assert found == (
        3,
        pytest.approx(2 / 3),
        pytest.approx(math.sqrt(7 / 3)),
        pytest.approx(0.1116, abs=1e-4),
    )
    assert omnibus([1.0, math.nan]) is None


# --- simulated ---

Draw = Callable[[np.random.Generator], Evidence]
SEEDS = (3, 5, 10, 20)
PRINTED = 2.0
"""The printed gain, in standard deviations of a paired difference: that of GPFL at 2SPC is .0934 at
some .04."""
MARGIN = 1.0
"""The margin of equivalence."""
ROUNDS = 500.0


def verdicts(draw: Draw, trials: int) -> Counter[str]:
    """The verdicts on `trials` claims, each the only one of its paper."""
    rng = np.random.default_rng(0)
    return Counter(holm_corrected([draw(rng)])[0].verdict for _ in range(trials))


def not_above(count: int, trials: int, rate: float) -> bool:
    """Whether `count` of `trials` can be a share of at most `rate` (binomial test at 1 in
    10,000)."""
    return count == 0 or bool(stats.binom.sf(count - 1, trials, rate) > 1e-4)


def not_below(count: int, trials: int, rate: float) -> bool:
    """Whether `count` of `trials` can be a share of at least `rate` (binomial test at 1 in
    10,000)."""
    return bool(stats.binom.cdf(count, trials, rate) > 1e-4)


def rivals(rng: np.random.Generator, num: int, effect: float, count: int) -> dict[str, Difference]:
    return {str(i): differences(rng.normal(effect, 1, num)) for i in range(count)}


# --- one simulated claim of each form ---


def number(num: int, shift: float) -> Draw:
    """A printed run whose method has a true mean that lies `shift` above ours, which is 0."""

    def draw(rng: np.random.Generator) -> Evidence:
        ours = estimate(rng.normal(0, 1, num))
        return number_evidence(rng.normal(shift, 1), ours, MARGIN)

    return draw


def fixed_number(num: int, value: float, tolerance: float = 0.0) -> Draw:
    """A number that is printed as `value` +- `tolerance`."""
    return lambda rng: number_evidence(value, estimate(rng.normal(0, 1, num)), MARGIN, tolerance)


def median_about(num: int, median: float, value: float = 200.0) -> Draw:
    """A first round that is printed as about 200 +- 50; ours has this median, and beyond round 500
    it never comes."""

    def draw(rng: np.random.Generator) -> Evidence:
        rounds = median * np.exp(rng.normal(0, 0.5, num))
        return median_evidence(
            value, Median(tuple(np.where(rounds > ROUNDS, np.inf, rounds)), ROUNDS), 50.0
        )

    return draw


def bound(num: int, share: float) -> Draw:
    """A bound that holds for this `share` of all runs."""
    return lambda rng: majority_evidence(Share(int(rng.binomial(num, share)), num))


def gain(num: int, effect: float, count: int = 1, printed: float = PRINTED) -> Draw:
    """A printed gain over the best of equally good rivals that share the seeds, where the true gain
    is `effect`."""

    def draw(rng: np.random.Generator) -> Evidence:
        own, others = rng.normal(effect, 0.5**0.5, num), rng.normal(0, 0.5**0.5, (count, num))
        return gain_evidence(
            {str(i): differences(own - other) for i, other in enumerate(others)}, printed
        )

    return draw


def level(num: int, effect: float, count: int = 1) -> Draw:
    return lambda rng: level_evidence(rivals(rng, num, effect, count), MARGIN)


def not_worse(num: int, effect: float, count: int = 1) -> Draw:
    return lambda rng: margin_evidence(rivals(rng, num, effect, count), MARGIN)


def trend(num: int, slope: float) -> Draw:
    at = np.array([0.0, 1.0, 2.0])
    return lambda rng: trend_evidence(
        list(at), [list(slope * at + rng.normal(0, 1, 3)) for _ in range(num)]
    )


# --- how often they err ---

TRIALS = 400
LONG = 5_000
SIDE = 0.025
"""The error rate of one side of a 95 % interval."""
SIGN = ("reproduced", "direction only")

Cases = list[tuple[str, Callable[[int], Draw], tuple[str, ...], float | dict[int, float]]]
AT_MOST: Cases = [
    ("a number that is one draw of ours", lambda n: number(n, 0.0), ("not reproduced",), 0.05),
    ("a number at the margin", lambda n: fixed_number(n, MARGIN), ("reproduced",), 0.05),
    (
        "about a value, printed at the tolerance",
        lambda n: fixed_number(n, 1.0, 1.0),
        ("reproduced",),
        0.05,
    ),
    ("about a value that is ours", lambda n: fixed_number(n, 0.0, 1.0), ("not reproduced",), 0.05),
    ("a median at the tolerance", lambda n: median_about(n, 250.0), ("reproduced",), 0.05),
    ("a median that is printed", lambda n: median_about(n, 200.0), ("not reproduced",), SIDE),
    (
        "a median at the tolerance, against",
        lambda n: median_about(n, 250.0),
        ("not reproduced",),
        SIDE,
    ),
    ("a bound that half of the runs keep", lambda n: bound(n, 0.5), ("reproduced",), SIDE),
    ("the same, against", lambda n: bound(n, 0.5), ("not reproduced",), SIDE),
    ("no effect", lambda n: gain(n, 0.0), SIGN, SIDE),
    ("no effect, one of three rivals", lambda n: gain(n, 0.0, 3), SIGN, SIDE),
    ("no effect, nothing printed", lambda n: gain(n, 0.0, 3, 0.0), ("reproduced",), SIDE),
    (
        "no effect, against, nothing printed",
        lambda n: gain(n, 0.0, 3, 0.0),
        ("not reproduced",),
        SIDE,
    ),
    ("half of the effect", lambda n: gain(n, PRINTED / 2), ("reproduced",), {10: 0.3, 20: 0.05}),
    (
        "half of the effect, three rivals",
        lambda n: gain(n, PRINTED / 2, 3),
        ("reproduced",),
        {10: 0.3, 20: 0.05},
    ),
    ("the printed effect", lambda n: gain(n, PRINTED), ("not reproduced",), SIDE),
    (
        "the printed effect, its size",
        lambda n: gain(n, PRINTED),
        ("not reproduced", "direction only"),
        0.06,
    ),
    ("the printed effect, three rivals", lambda n: gain(n, PRINTED, 3), ("not reproduced",), SIDE),
    ("level, at the margin", lambda n: level(n, MARGIN), ("reproduced",), 0.05),
    ("level, at the margin of three", lambda n: level(n, MARGIN, 3), ("reproduced",), 0.05),
    ("level, at the margin, against", lambda n: level(n, MARGIN, 3), ("not reproduced",), SIDE),
    ("not worse, at the margin", lambda n: not_worse(n, -MARGIN, 3), ("reproduced",), SIDE),
    (
        "not worse, at the margin, against",
        lambda n: not_worse(n, -MARGIN, 3),
        ("not reproduced",),
        SIDE,
    ),
    ("no trend", lambda n: trend(n, 0.0), ("reproduced",), SIDE),
    ("no trend, against", lambda n: trend(n, 0.0), ("not reproduced",), SIDE),
]
AT_LEAST: Cases = [
    (
        "a number five deviations away",
        lambda n: number(n, 5.0),
        ("not reproduced",),
        {5: 0.85, 10: 0.95},
    ),
    (
        "a number that is our mean",
        lambda n: fixed_number(n, 0.0),
        ("reproduced",),
        {10: 0.75, 20: 0.95},
    ),
    (
        "a median twice the printed",
        lambda n: median_about(n, 400.0),
        ("not reproduced",),
        {10: 0.4, 20: 0.8},
    ),
    (
        "a bound that nearly all keep",
        lambda n: bound(n, 0.95),
        ("reproduced",),
        {10: 0.85, 20: 0.95},
    ),
    (
        "a bound that nearly none keeps",
        lambda n: bound(n, 0.05),
        ("not reproduced",),
        {10: 0.85, 20: 0.95},
    ),
    ("no effect", lambda n: gain(n, 0.0, 3), ("not reproduced",), {5: 0.85, 10: 0.95}),
    (
        "half of the effect",
        lambda n: gain(n, PRINTED / 2),
        ("direction only",),
        {10: 0.55, 20: 0.9},
    ),
    ("the printed effect", lambda n: gain(n, PRINTED, 3), ("reproduced",), {5: 0.7, 10: 0.92}),
    ("level, no difference", lambda n: level(n, 0.0), ("reproduced",), {10: 0.75, 20: 0.95}),
    (
        "level, twice the margin",
        lambda n: level(n, 2 * MARGIN),
        ("not reproduced",),
        {10: 0.75, 20: 0.95},
    ),
    ("a trend of two deviations", lambda n: trend(n, 2.0), ("reproduced",), {5: 0.8, 10: 0.95}),
]


def limits(cases: Cases) -> list[object]:
    """One parameter set for each case and number of seeds that it has a limit for."""
    return [
        pytest.param(
            of(num),
            found,
            limit[num] if isinstance(limit, dict) else limit,
            id=f"{name}, {num} seeds",
        )
        for name, of, found, limit in cases
        for num in SEEDS
        if not isinstance(limit, dict) or num in limit
    ]


@pytest.mark.parametrize(("draw", "found", "limit"), limits(AT_MOST))
@pytest.mark.parametrize("trials", [TRIALS, pytest.param(LONG, marks=pytest.mark.slow)])
def test_false_verdicts_are_rare(
    draw: Draw, found: tuple[str, ...], limit: float, trials: int
) -> None:
    counts = verdicts(draw, trials)
    assert not_above(sum(counts[verdict] for verdict in found), trials, limit), (counts, limit)


@pytest.mark.parametrize(("draw", "found", "limit"), limits(AT_LEAST))
def test_true_verdicts_are_frequent_from_enough_seeds_on(
    draw: Draw, found: tuple[str, ...], limit: float
) -> None:
    counts = verdicts(draw, TRIALS)
    assert not_below(sum(counts[verdict] for verdict in found), TRIALS, limit), (counts, limit)


# --- a whole paper ---


def paper(rng: np.random.Generator, num: int) -> list[Evidence]:
    """A paper none of whose claims is true, and all of whose numbers are draws from our
    distributions."""
    numbers = [
        number_evidence(rng.normal(3, 1), estimate(rng.normal(3, 1, num)), 0.0) for _ in range(10)
    ]
    return [
        *numbers,
        *(gain(num, 0.0, 2, 0.0)(rng) for _ in range(10)),
        *(bound(num, 0.5)(rng) for _ in "abc"),
    ]


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
