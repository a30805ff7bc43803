"""Evidence from our runs about a number or a claim of a paper: two p-values, Holm's correction of
them, and the verdict that follows.

`p_for` tests the hypothesis that the claim is false: a small value is evidence for the claim.
`p_against` tests the hypothesis that it is true. Both are compared with 5 %. "Ours" is a result of
our runs, "printed" is what the paper prints. Rivals are the methods that a claim compares with.

Claims about several rivals are claims about the smallest (gains) or the largest (levelness) of the
true differences. The test for such a claim is an intersection-union test (Berger, 1982): every
rival is tested at the full level, and the largest p-value counts. The test against it is a
union-intersection test: the smallest p-value counts, multiplied by the number of rivals
(Bonferroni). No rival is picked by the data.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

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

    - `ours`: the decisive result; of a claim about several rivals, the difference to the rival for
      which the claim is weakest. None if there is no result.
    - `p_for`, `p_against`: the p-values; nan if there are too few seeds for a test.
    - `size_holds`: whether the interval of a gain contains the printed gain. None if no gain is
      printed. False if our runs have another size than the paper's.
    - `is_draw`: whether a printed number lies in the prediction interval of one more run of ours.
      None for claims that are not about a number.
    - `too_wide`: whether that interval reaches further than the margin, so that a number inside it
      says nothing.
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
        """True if there are enough seeds for a verdict. Only such evidence counts in Holm's
        correction."""
        return self.num >= MIN_SEEDS

    @property
    def verdict(self) -> Verdict:
        """The verdict by the corrected p-values (see `RULES`)."""
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


def is_number(
    printed: float, ours: Estimate | None, margin: float, tolerance: float = 0.0
) -> Evidence:
    """Test the number that a paper prints for one run.

    For it: our mean is within `margin` of the number (equivalence). Against it: the number, give or
    take `tolerance`, is not one more run of ours.
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


def is_median_about(value: float, ours: Median, tolerance: float) -> Evidence:
    """Test that the true median lies within `tolerance` of `value`, and against it that it lies
    outside. Values may be censored (inf)."""
    low, high = value - tolerance, value + tolerance
    p_inside = max(ours.p_above(low), ours.p_below(high))  # both must be shown
    p_outside = min(ours.p_below(low), ours.p_above(high))  # one is enough
    return Evidence(ours, p_inside, two_sided(p_outside))


def holds_for_most(ours: Share, detail: str = "") -> Evidence:
    """Test that a statement holds for more than half of all runs, and against it that it holds for
    less than half."""
    p_for, p_against = ours.p_above(MAJORITY), ours.p_below(MAJORITY)
    return Evidence(ours, two_sided(p_for), two_sided(p_against), detail)


Test = Callable[[Difference], float]
"""A function that tests a difference and returns the p-value."""


def _of_rivals(
    rivals: Mapping[str, Difference], p_for: Test, p_against: Test, words: str = "weakest against"
) -> Evidence:
    """Test a claim about the differences to several rivals.

    The largest of the p-values `p_for` counts, which must be those of two-sided tests. The smallest
    of the one-sided p-values `p_against` counts, doubled and multiplied by the number of rivals.
    """
    weakest = max(rivals, key=lambda name: p_for(rivals[name]))
    against = len(rivals) * 2 * min(map(p_against, rivals.values()))
    detail = f"{words} {weakest}" if len(rivals) > 1 else ""
    return Evidence(rivals[weakest], clipped(p_for(rivals[weakest])), clipped(against), detail)


def exceeds(
    rivals: Mapping[str, Difference], gain: float = 0.0, tolerance: float = 0.0
) -> Evidence:
    """Test that a method exceeds each of its rivals.

    `rivals` are the differences to them. `gain` is the printed difference, give or take
    `tolerance`; 0 if none is printed. All p-values are two-sided: they agree with 95 % intervals.
    """
    evidence = _of_rivals(
        rivals, lambda d: 2 * d.p_above(0.0), lambda d: d.p_below(gain - tolerance)
    )
    if not gain:
        return evidence
    # The printed gain holds unless our gains are significantly below it, or above it.
    above_printed = 2 * max(d.p_above(gain + tolerance) for d in rivals.values())
    return replace(evidence, size_holds=min(evidence.p_against, above_printed) >= ALPHA)


def is_not_worse(rivals: Mapping[str, Difference], margin: float) -> Evidence:
    """Test that a method is not worse than any rival by `margin` or more (non-inferiority)."""
    return _of_rivals(rivals, lambda d: 2 * d.p_above(-margin), lambda d: d.p_below(-margin))


def is_level(rivals: Mapping[str, Difference], margin: float) -> Evidence:
    """Test that a method differs from each rival by at most `margin`: two one-sided tests
    (Schuirmann, 1987)."""

    def outside(difference: Difference) -> float:
        return min(difference.p_above(margin), difference.p_below(-margin))

    return _of_rivals(rivals, lambda d: d.p_equivalent(margin), outside, "furthest from")


def below_zero(ours: Difference | None, detail: str = "", *, above: bool = False) -> Evidence:
    """Test that a mean is below 0, or `above` it, by two-sided p-values."""
    if ours is None:
        return Evidence(None)
    below_p, above_p = two_sided(ours.p_below(0.0)), two_sided(ours.p_above(0.0))
    p_for, p_against = (above_p, below_p) if above else (below_p, above_p)
    return Evidence(ours, p_for, p_against, detail)


def rises(
    at: Sequence[float], by_seed: Sequence[Sequence[float]], *, falls: bool = False
) -> Evidence:
    """Test that values rise along the positions `at` (or fall, with `falls`).

    `by_seed` has a value at each position for each seed. The test is a t test on the seeds'
    least-squares slopes.
    """
    slopes = [float(np.polyfit(at, values, 1)[0]) for values in by_seed]
    return below_zero(differences(slopes), "slope", above=not falls)
