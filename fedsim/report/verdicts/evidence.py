"""What our runs say about a number or a claim: two p-values, the verdict that follows, and Holm's correction."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedsim.report.statistics import MIN_SEEDS, ROUNDING, Difference, Estimate, Median, Share, holm
from fedsim.report.verdicts.rules import ALPHA, Verdict

Result = Estimate | Difference | Share | Median


@dataclass(frozen=True)
class Evidence:
    """The result of testing a number or a claim: p-values for it and against it, raw and after Holm's correction.

    A small `p_for` supports the claim, a small `p_against` contradicts it; each is that of a verdict, so that it is
    compared with 5 %. `ours` is the decisive result: the difference to the method for which the claim is weakest, for
    example.

    `size_holds`: whether the interval of a gain holds the printed gain; None if none is printed; False also where runs
    are of another size than the paper's, which say nothing about it.
    `is_draw`: whether a printed number lies where one more run of ours would fall; None for other claims. `too_wide`:
    whether that interval reaches further than the margin, so that to lie inside of it says nothing.
    `holm_...` are nan until `holm_corrected`.
    """

    ours: Result | None
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
        return 0 if self.ours is None else self.ours.num

    @property
    def is_tested(self) -> bool:
        """Whether there are enough seeds for a verdict, so that its tests count among those that are corrected."""
        return self.num >= MIN_SEEDS

    @property
    def is_arithmetic(self) -> bool:
        """Whether all runs give the same, as numbers of clients and samples do, so that there is nothing to test."""
        if isinstance(self.ours, Estimate):
            return self.ours.sd < ROUNDING
        return isinstance(self.ours, Difference) and self.ours.error < ROUNDING

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
    """The evidences with Holm's correction: over all of their p-values for, and over all against."""
    for_them = holm([e.p_for if e.is_tested else math.nan for e in evidences])
    against = holm([e.p_against if e.is_tested else math.nan for e in evidences])
    return [replace(e, holm_for=f, holm_against=a) for e, f, a in zip(evidences, for_them, against, strict=True)]


def clipped(p_value: float) -> float:
    """A p-value that was multiplied, limited to 1; nan stays nan."""
    return 1.0 if p_value > 1 else p_value
