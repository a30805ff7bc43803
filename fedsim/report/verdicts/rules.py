"""The rules by which numbers and claims are judged, as functions of statistics only.

They were fixed before any results were seen; `RULES` states them in words. Their error rates are simulated in
tests/test_report_rules.py.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fedsim.report.statistics import LEVEL, MIN_SEEDS, Difference, Estimate, differences, holm, share_interval

Verdict = Literal["reproduced", "not reproduced", "undecided", "not judged"]

MIN_SEEDS_FOR_BOUNDS = 5
"""If something holds for 5 of 5 seeds, the share of seeds for which it holds is above one half (one-sided 95 %)."""
MAX_INTERVAL_WIDTH = 0.2
"""A prediction interval of the accuracy that is wider than this is not informative."""
ALPHA = round(1 - LEVEL, 10)

RULES = {
    "judged": (
        "Only runs that follow the preset in every key that can matter are judged, by their configs; claims about"
        " others need the runs of all of them. At another size than the paper's, numbers and absolute values are not"
        " judged, and gains by their sign alone."
    ),
    "number": (
        "A number that a paper prints for one run is reproduced if it lies where one more run of ours would fall (95"
        " % prediction interval over seeds), not reproduced if it lies outside and stays so after Holm's correction"
        f" for all its numbers, and undecided otherwise, with fewer than {MIN_SEEDS} finished seeds, or with an"
        f" interval wider than {MAX_INTERVAL_WIDTH}."
    ),
    "bound": (
        "A claim that something is at most, or at least, a value is reproduced if it holds for every seed, not"
        f" reproduced if it holds for none, and undecided in between or with fewer than {MIN_SEEDS_FOR_BOUNDS} seeds. A"
        " run that never gets there counts as later than its last round; one that ends before the bound says nothing."
    ),
    "gain": (
        "Claims that a method exceeds others, is level with them, or gains along a parameter are tested on paired"
        " differences at equal seeds (one-sided t tests): for the claim, against each of the others, the weakest of"
        " which counts; and against it (some other is not exceeded by the printed gain), corrected for their number."
        " All tests of a paper's claims together are corrected by Holm's method. Not reproduced if the corrected"
        f" p-value against is below {ALPHA}, else reproduced if the one for it is, else undecided; so with fewer than"
        f" {MIN_SEEDS} pairs."
    ),
}


@dataclass(frozen=True)
class Evidence:
    """The result of testing a claim: one-sided p-values for it and against it, raw and after Holm's correction.

    A small `p_for` supports the claim, a small `p_against` contradicts it. `ours` is the decisive difference: that to
    the method for which the claim is weakest.
    """

    ours: Difference | None
    p_for: float = math.nan
    p_against: float = math.nan
    holm_for: float = math.nan
    holm_against: float = math.nan
    detail: str = ""

    @property
    def verdict(self) -> Verdict:
        """The verdict by RULES["gain"]."""
        if self.ours is None or self.ours.num < MIN_SEEDS:
            return "undecided"
        if self.holm_against < ALPHA:
            return "not reproduced"
        return "reproduced" if self.holm_for < ALPHA else "undecided"


def number_p(value: float, ours: Estimate | None) -> float:
    """Two-sided p-value of the printed `value` as the result of one more run of ours; nan with too few seeds."""
    return math.nan if ours is None or ours.num < MIN_SEEDS else ours.surprise(value)


def judge_number(value: float, ours: Estimate | None, corrected: float) -> Verdict:
    """The verdict by RULES["number"]; `corrected` is the number's p-value after Holm's correction."""
    if ours is None or ours.num < MIN_SEEDS:
        return "undecided"
    if ours.next_low <= value <= ours.next_high:
        return "undecided" if ours.next_high - ours.next_low > MAX_INTERVAL_WIDTH else "reproduced"
    return "not reproduced" if corrected < ALPHA else "undecided"


def judge_bound(count: int, num: int) -> Verdict:
    """The verdict by RULES["bound"] on a claim that holds for `count` of `num` seeds."""
    if num < MIN_SEEDS_FOR_BOUNDS or 0 < count < num:
        return "undecided"
    return "reproduced" if count else "not reproduced"


def show_share(count: int, num: int) -> str:
    """Text: for how many seeds something holds, and the exact interval of their share."""
    low, high = share_interval(count, num)
    few = f"; fewer than {MIN_SEEDS_FOR_BOUNDS} decide nothing" if num < MIN_SEEDS_FOR_BOUNDS else ""
    return f"holds for {count} of {num} seeds (share {low:.2f} to {high:.2f}{few})"


def exceeds(gain: float, rivals: Mapping[str, Difference]) -> Evidence:
    """Test that a method exceeds each of its rivals (by `gain` if it is > 0); `rivals` are the differences to them."""
    weakest = max(rivals, key=lambda name: rivals[name].p_above(0.0))
    against = min(rivals[name].p_below(gain) for name in rivals) * len(rivals)
    ours = rivals[weakest]
    return Evidence(ours, ours.p_above(0.0), min(against, 1.0), detail=f"weakest against {weakest}")


def is_level(margin: float, rivals: Mapping[str, Difference]) -> Evidence:
    """Test that a method differs from each rival by at most `margin`: two one-sided tests (Schuirmann, 1987)."""
    inside = {n: max(d.p_above(-margin), d.p_below(margin)) for n, d in rivals.items()}
    outside = min(min(d.p_above(margin), d.p_below(-margin)) for d in rivals.values())
    weakest = max(inside, key=lambda name: inside[name])
    against = min(2 * outside * len(rivals), 1.0)
    return Evidence(rivals[weakest], inside[weakest], against, detail=f"furthest from {weakest}")


def rises(at: Sequence[float], by_seed: Mapping[int, Sequence[float]], *, falls: bool = False) -> Evidence:
    """Test that values rise (or fall) along the positions `at`: a t test on the least-squares slope of each seed."""
    sign = -1.0 if falls else 1.0
    slopes = differences([sign * float(np.polyfit(at, values, 1)[0]) for values in by_seed.values()])
    if slopes is None:
        return Evidence(None)
    return Evidence(slopes, slopes.p_above(0.0), slopes.p_below(0.0), detail="slope" + (" downwards" if falls else ""))


def holm_corrected(evidences: Sequence[Evidence]) -> list[Evidence]:
    """The evidences with Holm's correction over all of their p-values, for and against."""
    p_values = holm([p if _has_enough_seeds(e) else math.nan for e in evidences for p in (e.p_for, e.p_against)])
    return [
        replace(evidence, holm_for=p_values[2 * i], holm_against=p_values[2 * i + 1])
        for i, evidence in enumerate(evidences)
    ]


def _has_enough_seeds(evidence: Evidence) -> bool:
    return evidence.ours is not None and evidence.ours.num >= MIN_SEEDS
