"""Evidence from our runs about a number or a claim: two p-values, the verdict that follows, and
Holm's correction.

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
import pandas as pd

from fedsim.papers.protocol import Cases, UnjudgedError
from fedsim.papers.published import MAJORITY, Claim, Number, Verdict
from fedsim.results.frames import measured
from fedsim.results.measures import COUNT_MEASURES, FIRST_ROUND_MEASURES, base_name, bounds_of
from fedsim.results.runs import Run
from fedsim.results.statistics import (
    ALPHA,
    MIN_SEEDS,
    Difference,
    Estimate,
    Median,
    Share,
    differences,
    estimate,
    holm,
    paired,
    pooled,
)

BY_SIGN = "by its sign alone at this size"
OTHER_SIZE = "another size than the paper's"


@dataclass(frozen=True)
class Evidence:
    """The result of testing a number or a claim: p-values for it and against it, raw and after
    Holm's correction.

    `p_for` and `p_against` are compared with 5 %. `ours` is the decisive result: the difference to
    the method for which the claim is weakest, for example. `size_holds` says whether the interval
    of a gain holds the printed gain: None if none is printed, False also if runs are of another
    size than the paper's. `is_draw` says whether a printed number lies where one more run of ours
    would fall (None for other claims), and `too_wide` whether that interval reaches further than
    the margin, so that to lie inside it says nothing. `holm_...` are nan until `holm_corrected`.
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
        """True if there are enough seeds for a verdict. Only then its tests count among those that
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
    """Return the evidences with Holm's correction: over all of their p-values for, and over all
    against."""
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
    """Return a p-value that was multiplied, limited to 1; nan stays nan."""
    return 1.0 if p_value > 1 else p_value


def is_number(
    printed: float, ours: Estimate | None, margin: float, tolerance: float = 0.0
) -> Evidence:
    """Test a number `printed` for one run, give or take `tolerance`: as one draw of ours, and for
    equivalence with our mean within `margin`."""
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
    """Test that the median of censored values lies within `tolerance` of `value`, and against it
    that it does not."""
    low, high = value - tolerance, value + tolerance
    inside = max(ours.p_above(low), ours.p_below(high))
    outside = min(ours.p_below(low), ours.p_above(high))
    return Evidence(ours, inside, two_sided(outside))


def holds_for_most(ours: Share, detail: str = "") -> Evidence:
    """Test that something holds for more than half of all runs, and against it that it holds for
    fewer."""
    p_for, p_against = ours.p_above(MAJORITY), ours.p_below(MAJORITY)
    return Evidence(ours, two_sided(p_for), two_sided(p_against), detail)


Test = Callable[[Difference], float]
"""A one-sided test of a difference: its p-value."""


def _of_rivals(
    rivals: Mapping[str, Difference], p_for: Test, p_against: Test, words: str = "weakest against"
) -> Evidence:
    """Test a claim about the differences to each of the rivals: the weakest for it counts, and any
    against it."""
    weakest = max(rivals, key=lambda name: p_for(rivals[name]))
    against = len(rivals) * 2 * min(map(p_against, rivals.values()))
    detail = f"{words} {weakest}" if len(rivals) > 1 else ""
    return Evidence(rivals[weakest], clipped(p_for(rivals[weakest])), clipped(against), detail)


def exceeds(
    rivals: Mapping[str, Difference], gain: float = 0.0, tolerance: float = 0.0
) -> Evidence:
    """Test that a method exceeds each of its rivals, by `gain` +- `tolerance` if that is printed (>
    0).

    `rivals` are the differences to them. All p-values are two-sided, those of 95 % intervals.
    """
    evidence = _of_rivals(
        rivals, lambda d: 2 * d.p_above(0.0), lambda d: d.p_below(gain - tolerance)
    )
    if not gain:
        return evidence
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
    """Test that values rise (or fall) along the positions `at`: a t test on the least-squares slope
    of each seed."""
    slopes = [float(np.polyfit(at, values, 1)[0]) for values in by_seed]
    return below_zero(differences(slopes), "slope", above=not falls)


def examine_number(number: Number, cases: Cases) -> Evidence:
    """Return the evidence about a printed number. Raises `UnjudgedError`."""
    runs = cases.usable(number.about)
    if cases.scale != "full":
        raise UnjudgedError(OTHER_SIZE)
    return is_number(number.value, _estimated(runs, number.measure), number.margin)


def examine_claim(claim: Claim, cases: Cases) -> Evidence:
    """Return the evidence about a claim, by its form. Raises `UnjudgedError`."""
    if claim.grows_with is not None:
        return _trend(claim, cases)
    if claim.others:
        return _compare(claim, cases)
    runs = cases.usable(claim.about)
    if cases.scale != "full" and not claim.any_size:
        raise UnjudgedError(OTHER_SIZE)
    return _bound(claim, runs) if claim.is_bound else _about(claim, runs)


def _estimated(runs: pd.DataFrame, measure: str) -> Estimate | None:
    return estimate(measured(runs, measure).dropna(), bounds_of(measure))


def _compare(claim: Claim, cases: Cases) -> Evidence:
    strata: list[dict[str, str]] = [{}]
    if claim.pooled_over:
        strata = [{claim.pooled_over: value} for value in claim.values]
    by_stratum = [_differences(claim, {**claim.about, **stratum}, cases) for stratum in strata]
    rivals = {}
    for name in by_stratum[0]:
        difference = pooled([stratum[name] for stratum in by_stratum])
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
    evidence = exceeds(rivals)
    detail = f"{evidence.detail}; {BY_SIGN}" if evidence.detail else BY_SIGN
    return replace(evidence, detail=detail, size_holds=False)


def _differences(claim: Claim, about: Mapping[str, str], cases: Cases) -> dict[str, pd.Series]:
    """Return the differences by seed to each of the other methods; with `all_pairs`, those of all
    pairs of methods."""
    choices = {name: {**about, claim.among: name} for name in claim.others}
    missing = [name for name in claim.others if not cases.nearest(choices[name])]
    if missing:
        raise UnjudgedError(f"no runs of {', '.join(missing)}")
    values = {"": measured(cases.usable(about), claim.measure)}
    for name in claim.others:
        values[name] = measured(cases.usable(choices[name]), claim.measure)
    if not claim.all_pairs:
        return {name: paired(values[""], values[name]) for name in claim.others}
    by_pair = {}
    for first, second in itertools.combinations(values, 2):
        name = f"{first} to {second}" if first else second
        by_pair[name] = paired(values[first], values[second])
    return by_pair


def _trend(claim: Claim, cases: Cases) -> Evidence:
    """Test a trend of the measure, or of its difference to the method in `minus`. Values that are
    no numbers are at 0, 1, ..."""
    columns = []
    for value in claim.values:
        choices = {**claim.about, str(claim.grows_with): str(value)}
        column = measured(cases.usable(choices), claim.measure)
        if claim.minus is not None:
            less = measured(cases.usable({**choices, **claim.minus}), claim.measure)
            column = paired(column, less)
        columns.append(column.dropna())
    by_seed = pd.concat(columns, axis=1, join="inner")
    try:
        at = [float(value) for value in claim.values]
    except ValueError:
        at = [float(position) for position in range(len(claim.values))]
    return rises(at, by_seed.to_numpy().tolist(), falls=claim.falls)


def _about(claim: Claim, runs: pd.DataFrame) -> Evidence:
    assert claim.value is not None
    if base_name(claim.measure) not in FIRST_ROUND_MEASURES:
        ours = _estimated(runs, claim.measure)
        return is_number(claim.value, ours, claim.tolerance, claim.tolerance)
    num_rounds = min(run.num_rounds for run in runs["run"])
    if num_rounds < claim.value + claim.tolerance:
        limit = claim.value + claim.tolerance
        raise UnjudgedError(f"runs end at round {num_rounds}, before {limit:g}")
    values = measured(runs, claim.measure).fillna(math.inf)
    return is_median_about(claim.value, Median(tuple(values), num_rounds), claim.tolerance)


def _bound(claim: Claim, runs: pd.DataFrame) -> Evidence:
    values = measured(runs, claim.measure)
    outcomes = [_is_within(claim, run, v) for run, v in zip(runs["run"], values, strict=True)]
    known = [outcome for outcome in outcomes if outcome is not None]
    if not known:
        num_rounds = runs["run"].iloc[0].num_rounds
        raise UnjudgedError(f"all runs end at round {num_rounds}, before the bound")
    too_short = len(outcomes) - len(known)
    detail = f"{too_short} end before the bound" if too_short else ""
    return holds_for_most(Share(sum(known), len(known)), detail)


def _is_within(claim: Claim, run: Run, value: float) -> bool | None:
    """Return whether a run is within the bound of a claim; None if it ended too early to tell, or
    has no value."""
    name = base_name(claim.measure)
    is_upper = claim.at_most is not None
    bound = claim.at_most if claim.at_most is not None else claim.at_least
    assert bound is not None
    if math.isnan(value):  # it did not happen in the run, or the run has no such number
        happens_later = run.num_rounds + (0 if is_upper else 1) >= bound
        return not is_upper if name in FIRST_ROUND_MEASURES and happens_later else None
    if name in COUNT_MEASURES:  # a shorter run could not get there
        is_too_short = run.num_rounds <= bound if is_upper else run.num_rounds < bound
        if is_too_short:
            return None
    return value <= bound if is_upper else value >= bound
