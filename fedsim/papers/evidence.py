"""Evidence from our runs about a number or a claim of a paper, and the verdict that follows.

Each function here returns an `Evidence` with two p-values. A small `p_for` shows that the claim
holds: it tests the hypothesis that the claim is false. A small `p_against` shows that the claim
does not hold. Often neither is small. `holm_corrected` corrects both for the number of tests. Then
`Evidence.verdict` compares them with 5 %.

- The p-values are two-sided, that is, twice the one-sided ones, so that they agree with 95 %
  intervals. The exception are tests that a value lies within a range: both of its ends are tested,
  and the larger one-sided p-value counts (two one-sided tests; Schuirmann, 1987).
- A claim about several rivals (the methods that it compares with) holds if it holds of each one.
  So the largest of their p-values counts as `p_for` (an intersection-union test; Berger, 1982).
  One rival of which the claim is false is enough against it. So the smallest p-value, multiplied by
  the number of rivals, counts as `p_against` (a union-intersection test with Bonferroni's
  correction).
- A difference is that of a method minus a rival at equal seeds. `p_above(x)` is small if the mean
  difference is shown to be above x.
- A `margin` is the largest difference that we take for none. A `tolerance` is what a paper's words
  or digits leave open, as in "about 60 rounds".
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fedsim.papers.published import MAJORITY, Verdict
from fedsim.results.statistics import (
    ALPHA,
    MIN_SEEDS,
    Difference,
    Estimate,
    Median,
    Share,
    differences,
    holm,
)


@dataclass(frozen=True)
class Evidence:
    """The result of testing a number or a claim.

    - `ours`: our result; of a claim about several rivals, the difference to the rival of the
      largest `p_for`. None if there is no result.
    - `p_for`, `p_against`: the p-values; nan if there are too few seeds for a test.
    - `detail`: a remark, such as the name of this rival.
    - `size_holds`: whether our gain may be as large as the printed one. None if none is printed.
      `examine` sets it to False if our runs are smaller than the paper's.
    - `is_draw`: whether a printed number lies in the 95 % prediction interval of one more run of
      ours. None for claims that are not about a number.
    - `too_wide`: whether this interval reaches further from our mean than the margin, so that a
      number inside it says nothing.
    - `holm_for`, `holm_against`: the p-values after Holm's correction; nan before `holm_corrected`.
    """

    ours: Estimate | Difference | Share | Median | None
    p_for: float = math.nan
    p_against: float = math.nan
    detail: str = ""
    size_holds: bool | None = None
    is_draw: bool | None = None
    too_wide: bool = False
    holm_for: float = math.nan
    holm_against: float = math.nan

    @property
    def num(self) -> int:
        """The number of seeds."""
        return 0 if self.ours is None else self.ours.num

    @property
    def is_tested(self) -> bool:
        """True if there are enough seeds for a verdict. Other evidence is not corrected."""
        return self.num >= MIN_SEEDS

    @property
    def verdict(self) -> Verdict:
        """The verdict by the corrected p-values. `published.RULES` has the rules in words."""
        if not self.is_tested:
            return "undecided"
        if self.holm_for < ALPHA:
            return "direction only" if self.size_holds is False else "reproduced"
        if self.holm_against < ALPHA:
            return "not reproduced"
        if not self.is_draw:
            return "undecided"
        return "too wide to tell" if self.too_wide else "consistent with"


def holm_corrected(evidences: Sequence[Evidence]) -> list[Evidence]:
    """Return the evidences with corrected p-values: all `p_for` are corrected together, and all
    `p_against` together."""
    holm_for = holm([e.p_for if e.is_tested else math.nan for e in evidences])
    holm_against = holm([e.p_against if e.is_tested else math.nan for e in evidences])
    return [
        replace(evidence, holm_for=p_for, holm_against=p_against)
        for evidence, p_for, p_against in zip(evidences, holm_for, holm_against, strict=True)
    ]


def two_sided(p_value: float) -> float:
    """Return twice a one-sided p-value, at most 1; nan stays nan."""
    return clipped(2 * p_value)


def clipped(p_value: float) -> float:
    """Return a multiplied p-value, limited to 1; nan stays nan."""
    return 1.0 if p_value > 1 else p_value


def number_evidence(
    printed: float, ours: Estimate | None, margin: float, tolerance: float = 0.0
) -> Evidence:
    """Test the number that a paper prints for one run.

    Evidence for the number is about our mean: it is within `margin` of the number. Evidence against
    it is about a single run: one more run of ours would not give this number, give or take
    `tolerance`.
    """
    if ours is None or ours.num < 2:
        return Evidence(ours)
    p_next = ours.p_next(printed, tolerance)
    return Evidence(
        ours,
        ours.p_equivalent(margin, printed),
        clipped(p_next),
        is_draw=p_next >= ALPHA,
        too_wide=ours.next_half_width > margin,
    )


def median_evidence(value: float, ours: Median, tolerance: float) -> Evidence:
    """Test that the true median lies within `tolerance` of `value`, and against it that it lies
    outside. Values may be censored (inf)."""
    low, high = value - tolerance, value + tolerance
    p_inside = max(ours.p_above(low), ours.p_below(high))  # both must be shown
    p_outside = min(ours.p_below(low), ours.p_above(high))  # one is enough
    return Evidence(ours, p_inside, two_sided(p_outside))


def majority_evidence(ours: Share, detail: str = "") -> Evidence:
    """Test that a statement holds for more than half of all runs, and against it that it holds for
    less than half."""
    p_for, p_against = ours.p_above(MAJORITY), ours.p_below(MAJORITY)
    return Evidence(ours, two_sided(p_for), two_sided(p_against), detail)


Sign = Literal["negative", "positive"]
Test = Callable[[Difference], float]
"""A function that returns a p-value of a difference. Twice a one-sided one may exceed 1."""


def _evidence_of_rivals(
    rivals: Mapping[str, Difference], p_for: Test, p_against: Test, remark: str
) -> Evidence:
    """Test a claim about the differences to several rivals.

    Of the p-values for the claim, the largest counts. Of those against it the smallest counts,
    multiplied by the number of rivals. `remark` stands before the name of the rival of the largest
    p-value, as in "weakest against oort".
    """
    weakest = max(rivals, key=lambda name: p_for(rivals[name]))
    against = len(rivals) * min(p_against(difference) for difference in rivals.values())
    detail = f"{remark} {weakest}" if len(rivals) > 1 else ""
    return Evidence(rivals[weakest], clipped(p_for(rivals[weakest])), clipped(against), detail)


def gain_evidence(
    rivals: Mapping[str, Difference], gain: float = 0.0, tolerance: float = 0.0
) -> Evidence:
    """Test that a method exceeds each of its rivals.

    `rivals` has the differences to them. `gain` is the printed difference, give or take
    `tolerance`; 0 if none is printed. Evidence for the claim is that the method exceeds each rival
    at all. Evidence against it is that it exceeds one of them by less than the printed gain. So
    there may be evidence of both kinds: the verdict is then "direction only".
    """

    def p_exceeds(difference: Difference) -> float:
        return 2 * difference.p_above(0.0)

    def p_falls_short(difference: Difference) -> float:
        return 2 * difference.p_below(gain - tolerance)

    evidence = _evidence_of_rivals(rivals, p_exceeds, p_falls_short, "weakest against")
    if not gain:
        return evidence
    # The printed gain is too large if one of our gains is significantly below it. It is too small
    # if all of our gains are significantly above it.
    p_all_above = 2 * max(d.p_above(gain + tolerance) for d in rivals.values())
    size_holds = evidence.p_against >= ALPHA and p_all_above >= ALPHA
    return replace(evidence, size_holds=size_holds)


def margin_evidence(rivals: Mapping[str, Difference], margin: float) -> Evidence:
    """Test that a method falls short of each rival by less than `margin` (non-inferiority)."""

    def p_not_worse(difference: Difference) -> float:
        return 2 * difference.p_above(-margin)

    def p_worse(difference: Difference) -> float:
        return 2 * difference.p_below(-margin)

    return _evidence_of_rivals(rivals, p_not_worse, p_worse, "weakest against")


def level_evidence(rivals: Mapping[str, Difference], margin: float) -> Evidence:
    """Test that a method differs from each rival by at most `margin`: two one-sided tests
    (Schuirmann, 1987)."""

    def p_within(difference: Difference) -> float:
        return difference.p_equivalent(margin)

    def p_outside(difference: Difference) -> float:
        return 2 * min(difference.p_above(margin), difference.p_below(-margin))

    return _evidence_of_rivals(rivals, p_within, p_outside, "furthest from")


def sign_evidence(ours: Difference | None, sign: Sign, detail: str = "") -> Evidence:
    """Test that the mean of `ours` has this `sign`, and against it that it has the other one."""
    if ours is None:
        return Evidence(None)
    p_negative, p_positive = two_sided(ours.p_below(0.0)), two_sided(ours.p_above(0.0))
    if sign == "negative":
        return Evidence(ours, p_negative, p_positive, detail)
    return Evidence(ours, p_positive, p_negative, detail)


def trend_evidence(
    at: Sequence[float], by_seed: Sequence[Sequence[float]], *, falls: bool = False
) -> Evidence:
    """Test that values rise along the positions `at` on average (or fall, with `falls`).

    `by_seed` has a value at each position for each seed. The test is a t test on the seeds'
    least-squares slopes.
    """
    slopes = []
    for values in by_seed:
        slope, _ = np.polyfit(at, values, deg=1)
        slopes.append(float(slope))
    return sign_evidence(differences(slopes), "negative" if falls else "positive", detail="slope")
