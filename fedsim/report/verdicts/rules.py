"""The rules by which numbers and claims are judged, as functions of statistics alone.

They were fixed before runs were looked at; `RULES` says them in words. Their error rates are simulated in
tests/test_report_rules.py.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fedsim.report.statistics import LEAST_SEEDS, LEVEL, Difference, Estimate, differences, holm, share_interval

Verdict = Literal["reproduced", "not reproduced", "undecided", "not judged"]

LEAST_FOR_BOUNDS = 5
"""Where something holds for 5 of 5 seeds, the share of seeds for which it does lies above one half (one-sided 95 %)."""
WIDEST = 0.2
"""An interval of one more run's accuracy that is wider tells nothing."""
ERROR = round(1 - LEVEL, 10)

RULES = {
    "judged": (
        "Only runs that follow the preset in every key that can matter are judged, by their configs; claims about"
        " others need the runs of all of them. At another size than the paper's, numbers and absolute values are not"
        " judged, and gains by their sign alone."
    ),
    "number": (
        "A number that a paper prints for one run is reproduced if it lies where one more run of ours would fall (95"
        " % prediction interval over seeds), not reproduced if it lies outside and stays so after Holm's correction"
        f" for all its numbers, and undecided otherwise, with fewer than {LEAST_SEEDS} finished seeds, or with an"
        f" interval wider than {WIDEST}."
    ),
    "bound": (
        "A claim that something is at most, or at least, a value is reproduced if it holds for every seed, not"
        f" reproduced if it holds for none, and undecided in between or with fewer than {LEAST_FOR_BOUNDS} seeds. A run"
        " that never gets there counts as later than its last round; one that ends before the bound says nothing."
    ),
    "gain": (
        "Claims that a method exceeds others, is level with them, or gains along a parameter are tested on paired"
        " differences at equal seeds (one-sided t tests): for the claim, against each of the others, the weakest of"
        " which counts; and against it (some other is not exceeded by the printed gain), corrected for their number."
        " All tests of a paper's claims together are corrected by Holm's method. Not reproduced if the corrected"
        f" p-value against is below {ERROR}, else reproduced if the one for it is, else undecided; so with fewer than"
        f" {LEAST_SEEDS} pairs."
    ),
}


@dataclass(frozen=True)
class Evidence:
    """What runs say of a claim: one-sided p-values for it and against it, raw and after Holm's correction.

    `ours` is the difference that decides: to the other method for which the claim is weakest.
    """

    ours: Difference | None
    p_for: float = math.nan
    p_against: float = math.nan
    holm_for: float = math.nan
    holm_against: float = math.nan
    detail: str = ""

    @property
    def verdict(self) -> Verdict:
        """By RULES["gain"]."""
        if self.ours is None or self.ours.num < LEAST_SEEDS:
            return "undecided"
        if self.holm_against < ERROR:
            return "not reproduced"
        return "reproduced" if self.holm_for < ERROR else "undecided"


def number_p(value: float, ours: Estimate | None) -> float:
    """Two-sided p-value of a printed value as one more run of ours; nan with too few seeds."""
    return math.nan if ours is None or ours.num < LEAST_SEEDS else ours.surprise(value)


def judge_number(value: float, ours: Estimate | None, corrected: float) -> Verdict:
    """By RULES["number"]; `corrected` is its p-value after Holm's correction."""
    if ours is None or ours.num < LEAST_SEEDS:
        return "undecided"
    if ours.next_low <= value <= ours.next_high:
        return "undecided" if ours.next_high - ours.next_low > WIDEST else "reproduced"
    return "not reproduced" if corrected < ERROR else "undecided"


def judge_bound(held: int, num: int) -> Verdict:
    """By RULES["bound"]."""
    if num < LEAST_FOR_BOUNDS or 0 < held < num:
        return "undecided"
    return "reproduced" if held else "not reproduced"


def show_share(held: int, num: int) -> str:
    """For how many seeds something holds, with the exact interval of their share."""
    low, high = share_interval(held, num)
    few = f"; fewer than {LEAST_FOR_BOUNDS} decide nothing" if num < LEAST_FOR_BOUNDS else ""
    return f"holds for {held} of {num} seeds (share {low:.2f} to {high:.2f}{few})"


def exceeds(gain: float, rivals: Mapping[str, Difference]) -> Evidence:
    """That a method exceeds each of its rivals, by `gain` if that is above 0. `rivals`: the differences to them."""
    weakest = max(rivals, key=lambda name: rivals[name].p_above(0.0))
    against = min(rivals[name].p_below(gain) for name in rivals) * len(rivals)
    ours = rivals[weakest]
    return Evidence(ours, ours.p_above(0.0), min(against, 1.0), detail=f"weakest against {weakest}")


def is_level(margin: float, rivals: Mapping[str, Difference]) -> Evidence:
    """That a method differs from each of its rivals by at most `margin`: two one-sided tests (Schuirmann, 1987)."""
    inside = {n: max(d.p_above(-margin), d.p_below(margin)) for n, d in rivals.items()}
    outside = min(min(d.p_above(margin), d.p_below(-margin)) for d in rivals.values())
    weakest = max(inside, key=lambda name: inside[name])
    against = min(2 * outside * len(rivals), 1.0)
    return Evidence(rivals[weakest], inside[weakest], against, detail=f"furthest from {weakest}")


def rises(at: Sequence[float], by_seed: Mapping[int, Sequence[float]], *, falls: bool = False) -> Evidence:
    """That something rises (or falls) along the values `at`: a test of the seeds' least-squares slopes."""
    sign = -1.0 if falls else 1.0
    slopes = differences([sign * float(np.polyfit(at, values, 1)[0]) for values in by_seed.values()])
    if slopes is None:
        return Evidence(None)
    return Evidence(slopes, slopes.p_above(0.0), slopes.p_below(0.0), detail="slope" + (" downwards" if falls else ""))


def corrected(found: Sequence[Evidence]) -> list[Evidence]:
    """The same with Holm's correction over all their p-values, for and against."""
    p_values = holm([p if _enough(e) else math.nan for e in found for p in (e.p_for, e.p_against)])
    return [
        replace(evidence, holm_for=p_values[2 * i], holm_against=p_values[2 * i + 1])
        for i, evidence in enumerate(found)
    ]


def _enough(evidence: Evidence) -> bool:
    return evidence.ours is not None and evidence.ours.num >= LEAST_SEEDS
