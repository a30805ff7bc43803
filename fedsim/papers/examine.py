"""What our runs say about a number or a claim: two p-values, the verdict that follows, and Holm's
correction.

Claims about several rivals are claims about the smallest (gains) or the largest (levelness) of the
true differences. The test for such a claim is an intersection-union test (Berger, 1982): every
rival is tested at the full level, and the largest p-value counts. The test against it is a
union-intersection test: the smallest p-value counts, multiplied by the number of rivals
(Bonferroni). No rival is picked by the data.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedsim.papers.protocol import Cases, UnjudgedError
from fedsim.papers.published import ALPHA, MAJORITY, Claim, Number, Verdict
from fedsim.results import measures
from fedsim.results.groups import Group
from fedsim.results.runs import Run, Seeds
from fedsim.results.statistics import (
    MIN_SEEDS,
    Difference,
    Estimate,
    Median,
    Share,
    differences,
    estimate,
    holm,
    paired_values,
    pooled,
)


@dataclass(frozen=True)
class Evidence:
    """The result of testing a number or a claim: p-values for it and against it, raw and after
    Holm's correction.

    `p_for` and `p_against` are compared with 5 %. `ours` is the decisive result: the difference to
    the method for which the claim is weakest, for example.

    `size_holds`: whether the interval of a gain holds the printed gain; None if none is printed;
    False also where runs are of another size than the paper's, which say nothing about it.
    `is_draw`: whether a printed number lies where one more run of ours would fall; None for other
    claims. `too_wide`: whether that interval reaches further than the margin, so that to lie inside
    of it says nothing. `holm_...` are nan until `holm_corrected`.
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
        """Seeds."""
        return 0 if self.ours is None else self.ours.num

    @property
    def is_tested(self) -> bool:
        """Whether there are enough seeds for a verdict, so that its tests count among those that
        are corrected."""
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
    """The evidences with Holm's correction: over all of their p-values for, and over all
    against."""
    for_them = holm([e.p_for if e.is_tested else math.nan for e in evidences])
    against = holm([e.p_against if e.is_tested else math.nan for e in evidences])
    return [
        replace(e, holm_for=f, holm_against=a)
        for e, f, a in zip(evidences, for_them, against, strict=True)
    ]


def clipped(p_value: float) -> float:
    """A p-value that was multiplied, limited to 1; nan stays nan."""
    return 1.0 if p_value > 1 else p_value


def is_number(
    printed: float, ours: Estimate | None, margin: float, tolerance: float = 0.0
) -> Evidence:
    """Test a number `printed` for one run, give or take `tolerance`: as one draw of ours, and for
    equivalence with our mean within `margin`."""
    if ours is None or ours.num < 2:
        return Evidence(ours)
    p_next, too_wide = ours.p_next(printed, tolerance), ours.next_half_width > margin
    p_for = ours.p_equivalent(margin, printed)
    return Evidence(ours, p_for, clipped(p_next), is_draw=p_next >= ALPHA, too_wide=too_wide)


def is_median_about(value: float, ours: Median, tolerance: float) -> Evidence:
    """Test that the median of censored values lies within `tolerance` of `value`, and against it
    that it does not."""
    low, high = value - tolerance, value + tolerance
    inside = max(ours.p_above(low), ours.p_below(high))
    outside = min(ours.p_below(low), ours.p_above(high))
    return Evidence(ours, inside, clipped(2 * outside))


def holds_for_most(ours: Share) -> Evidence:
    """Test that something holds for more than half of all runs, and against it that it holds for
    fewer."""
    return Evidence(ours, clipped(2 * ours.p_above(MAJORITY)), clipped(2 * ours.p_below(MAJORITY)))


P = Callable[[Difference], float]


def _of_rivals(
    rivals: Mapping[str, Difference], p_for: P, p_against: P, words: str = "weakest against"
) -> Evidence:
    """Test a claim about the differences to each of the rivals: the weakest for it counts, and any
    against it."""
    weakest = max(rivals, key=lambda name: p_for(rivals[name]))
    against = len(rivals) * min(p_against(d) for d in rivals.values())
    detail = f"{words} {weakest}" if len(rivals) > 1 else ""
    return Evidence(rivals[weakest], clipped(p_for(rivals[weakest])), clipped(against), detail)


def exceeds(
    rivals: Mapping[str, Difference], gain: float = 0.0, tolerance: float = 0.0
) -> Evidence:
    """Test that a method exceeds each of its rivals, by `gain` +- `tolerance` if that is printed (>
    0).

    `rivals` are the differences to them. All p-values are two-sided, those of 95 % intervals.
    """
    found = _of_rivals(
        rivals, lambda d: 2 * d.p_above(0.0), lambda d: 2 * d.p_below(gain - tolerance)
    )
    above_printed = 2 * max(d.p_above(gain + tolerance) for d in rivals.values())
    return replace(found, size_holds=min(found.p_against, above_printed) >= ALPHA if gain else None)


def is_not_worse(rivals: Mapping[str, Difference], margin: float) -> Evidence:
    """Test that a method is not worse than any rival by `margin` or more (non-inferiority)."""
    return _of_rivals(rivals, lambda d: 2 * d.p_above(-margin), lambda d: 2 * d.p_below(-margin))


def is_level(rivals: Mapping[str, Difference], margin: float) -> Evidence:
    """Test that a method differs from each rival by at most `margin`: two one-sided tests
    (Schuirmann, 1987)."""

    def outside(d: Difference) -> float:
        return 2 * min(d.p_above(margin), d.p_below(-margin))

    return _of_rivals(rivals, lambda d: d.p_equivalent(margin), outside, "furthest from")


def below_zero(ours: Difference | None, detail: str = "", *, above: bool = False) -> Evidence:
    """Test that a mean is below 0, or `above` it, by two-sided p-values."""
    if ours is None:
        return Evidence(None)
    sides = clipped(2 * ours.p_below(0.0)), clipped(2 * ours.p_above(0.0))
    p_for, p_against = sides[::-1] if above else sides
    return Evidence(ours, p_for, p_against, detail)


def rises(
    at: Sequence[float], by_seed: Sequence[Sequence[float]], *, falls: bool = False
) -> Evidence:
    """Test that values rise (or fall) along the positions `at`: a t test on the least-squares slope
    of each seed."""
    slopes = differences([float(np.polyfit(at, values, 1)[0]) for values in by_seed])
    return below_zero(slopes, "slope", above=not falls)


BY_SIGN = "by its sign alone at this size"
OTHER_SIZE = "another size than the paper's"


def examine_number(number: Number, cases: Cases) -> Evidence:
    """The evidence about a printed number. Raises `UnjudgedError`."""
    group = cases.usable(number.about)
    if cases.scale != "full":
        raise UnjudgedError(OTHER_SIZE)
    values = list(measures.values_by_seed(group, number.measure).values())
    return is_number(
        number.value, estimate(values, measures.bounds_of(number.measure)), number.margin
    )


def examine_claim(claim: Claim, cases: Cases) -> Evidence:
    """The evidence about a claim, by its form. Raises `UnjudgedError`."""
    if claim.grows_with is not None:
        return _trend(claim, cases)
    if claim.others:
        return _compare(claim, cases)
    group = cases.usable(claim.about)
    if cases.scale != "full" and not claim.any_size:
        raise UnjudgedError(OTHER_SIZE)
    return _bound(claim, group) if claim.is_bound else _about(claim, group)


def _compare(claim: Claim, cases: Cases) -> Evidence:
    strata = [{claim.pooled_over: value} for value in claim.values] if claim.pooled_over else [{}]
    by_stratum = [_differences(claim, {**claim.about, **stratum}, cases) for stratum in strata]
    rivals = {}
    for name in by_stratum[0]:
        difference = pooled([found[name] for found in by_stratum])
        if difference is None:
            raise UnjudgedError(f"fewer than two seeds in common with {name}")
        rivals[name] = difference
    if claim.level_with is not None:
        return is_level(rivals, claim.level_with)
    if claim.not_worse_by is not None:
        return is_not_worse(rivals, claim.not_worse_by)
    assert claim.gain is not None
    if cases.scale == "full" or claim.any_size or not claim.gain:
        return exceeds(rivals, claim.gain, claim.tolerance)
    found = exceeds(rivals)
    return replace(found, detail="; ".join(filter(None, (found.detail, BY_SIGN))), size_holds=False)


def _differences(
    claim: Claim, about: Mapping[str, str], cases: Cases
) -> dict[str, dict[Seeds, float]]:
    """The differences by seed to each of the other methods; with `all_pairs`, those of all pairs of
    methods."""
    if missing := [
        name for name in claim.others if cases.find({**about, claim.among: name}) is None
    ]:
        raise UnjudgedError(f"no runs of {', '.join(missing)}")
    groups = {"": cases.usable(about)}
    groups |= {name: cases.usable({**about, claim.among: name}) for name in claim.others}
    values = {name: measures.values_by_seed(group, claim.measure) for name, group in groups.items()}
    pairs = (
        itertools.combinations(groups, 2)
        if claim.all_pairs
        else [("", name) for name in claim.others]
    )
    return {
        f"{first} to {second}" if first else second: paired_values(values[first], values[second])
        for first, second in pairs
    }


def _trend(claim: Claim, cases: Cases) -> Evidence:
    """Of the measure, or of its difference to the method in `minus`; values that are no numbers are
    at 0, 1, ..."""
    by_value: list[dict[Seeds, float]] = []
    for value in claim.values:
        wanted = {**claim.about, str(claim.grows_with): str(value)}
        found = measures.values_by_seed(cases.usable(wanted), claim.measure)
        if claim.minus is not None:
            less = measures.values_by_seed(cases.usable({**wanted, **claim.minus}), claim.measure)
            found = paired_values(found, less)
        by_value.append(found)
    seeds = sorted(set.intersection(*(set(values) for values in by_value)))
    try:
        at = [float(value) for value in claim.values]
    except ValueError:
        at = [float(position) for position in range(len(claim.values))]
    return rises(at, [[values[s] for values in by_value] for s in seeds], falls=claim.falls)


def _about(claim: Claim, group: Group) -> Evidence:
    assert claim.value is not None
    measured = list(map(measures.find_measure(claim.measure), group.complete))
    if measures.base_name(claim.measure) not in measures.FIRST_ROUND_MEASURES:
        known = [value for value in measured if value is not None]
        ours = estimate(known, measures.bounds_of(claim.measure))
        return is_number(claim.value, ours, claim.tolerance, claim.tolerance)
    ends = min(run.num_rounds for run in group.complete)
    if ends < claim.value + claim.tolerance:
        raise UnjudgedError(f"runs end at round {ends}, before {claim.value + claim.tolerance:g}")
    values = tuple(math.inf if value is None else value for value in measured)
    return is_median_about(claim.value, Median(values, ends), claim.tolerance)


def _bound(claim: Claim, group: Group) -> Evidence:
    measure = measures.find_measure(claim.measure)
    outcomes = [_is_within(claim, run, measure(run)) for run in group.complete]
    known = [outcome for outcome in outcomes if outcome is not None]
    if not known:
        raise UnjudgedError(
            f"all runs end at round {group.complete[0].num_rounds}, before the bound"
        )
    too_short = len(outcomes) - len(known)
    detail = f"{too_short} end before the bound" if too_short else ""
    return replace(holds_for_most(Share(sum(known), len(known))), detail=detail)


def _is_within(claim: Claim, run: Run, value: float | None) -> bool | None:
    """Whether a run is within the bound of a claim; None if it ended too early to tell, or has no
    value."""
    name = measures.base_name(claim.measure)
    if claim.at_most is not None:
        if value is None:
            return (
                False
                if name in measures.FIRST_ROUND_MEASURES and run.num_rounds >= claim.at_most
                else None
            )
        return (
            None
            if name in measures.COUNT_MEASURES and run.num_rounds <= claim.at_most
            else value <= claim.at_most
        )
    assert claim.at_least is not None
    if value is None:
        return (
            True
            if name in measures.FIRST_ROUND_MEASURES and run.num_rounds + 1 >= claim.at_least
            else None
        )
    return (
        None
        if name in measures.COUNT_MEASURES and run.num_rounds < claim.at_least
        else value >= claim.at_least
    )
