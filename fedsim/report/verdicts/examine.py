"""From the groups of runs to the evidence for or against one number or claim, before Holm's correction."""

import itertools
import math
from collections.abc import Mapping, Sequence

from fedsim.report.groups import Group
from fedsim.report.named_measures import (
    COUNT_MEASURES,
    FIRST_ROUND_MEASURES,
    base_name,
    bounds_of,
    value_of,
    values_by_seed,
)
from fedsim.report.runs import Run, Seeds
from fedsim.report.statistics import Median, Share, estimate, paired_values, pooled
from fedsim.report.verdicts.cases import Cases, Unjudged
from fedsim.report.verdicts.comparisons import exceeds, is_level, is_not_worse, rises
from fedsim.report.verdicts.evidence import Evidence
from fedsim.report.verdicts.published import Claim, Number
from fedsim.report.verdicts.values import holds_for_most, is_about, is_median_about, is_number

Found = Evidence | Unjudged
BY_SIGN = "by its sign alone at this size"
OTHER_SIZE = Unjudged("another size than the paper's")


def examine_number(number: Number, cases: Cases) -> Found:
    """The evidence about a printed number."""
    group = cases.usable(number.about, number.measure)
    if isinstance(group, Unjudged):
        return group
    if not cases.full_size:
        return OTHER_SIZE
    values = list(values_by_seed(group, number.measure).values())
    return is_number(number.value, estimate(values, bounds_of(number.measure)), number.margin)


def examine_claim(claim: Claim, cases: Cases) -> Found:
    """The evidence about a claim, by its form."""
    if claim.grows_with is not None:
        return _trend(claim, cases)
    if claim.others:
        return _compare(claim, cases)
    group = cases.usable(claim.about, claim.measure)
    if isinstance(group, Unjudged):
        return group
    if not (cases.full_size or claim.any_size):
        return OTHER_SIZE
    return _bound(claim, group) if claim.is_bound else _about(claim, group)


# --- comparisons ---------------------------------------------------------------------------------------------------


def _compare(claim: Claim, cases: Cases) -> Found:
    strata = [{claim.pooled_over: value} for value in claim.values] if claim.pooled_over else [{}]
    by_stratum = []
    for stratum in strata:
        differences = _differences(claim, {**claim.about, **stratum}, cases)
        if isinstance(differences, Unjudged):
            return differences
        by_stratum.append(differences)
    rivals = {}
    for name in by_stratum[0]:
        difference = pooled([found[name] for found in by_stratum])
        if difference is None:
            return Unjudged(f"fewer than two seeds in common with {name}")
        rivals[name] = difference
    if claim.level_with is not None:
        return is_level(rivals, claim.level_with)
    if claim.not_worse_by is not None:
        return is_not_worse(rivals, claim.not_worse_by)
    assert claim.gain is not None
    if cases.full_size or claim.any_size or not claim.gain:
        return exceeds(rivals, claim.gain, claim.tolerance)
    found = exceeds(rivals)
    detail = "; ".join(part for part in (found.detail, BY_SIGN) if part)
    return Evidence(found.ours, found.p_for, found.p_against, detail, size_holds=False)


def _differences(claim: Claim, about: Mapping[str, str], cases: Cases) -> dict[str, dict[Seeds, float]] | Unjudged:
    """The differences by seed to each of the other methods; with `all_pairs`, those of all pairs of methods."""
    if missing := [name for name in claim.others if cases.find({**about, claim.among: name}) is None]:
        return Unjudged(f"no runs of {', '.join(missing)}")
    own = cases.usable(about, claim.measure)
    if isinstance(own, Unjudged):
        return own
    groups = {"": own}
    for name in claim.others:
        other = cases.usable({**about, claim.among: name}, claim.measure)
        if isinstance(other, Unjudged):
            return other
        groups[name] = other
    pairs = itertools.combinations(groups, 2) if claim.all_pairs else [("", name) for name in claim.others]
    found = {}
    for first, second in pairs:
        values = values_by_seed(groups[first], claim.measure), values_by_seed(groups[second], claim.measure)
        found[f"{first} to {second}" if first else second] = paired_values(*values)
    return found


# --- trends --------------------------------------------------------------------------------------------------------


def _trend(claim: Claim, cases: Cases) -> Found:
    assert claim.grows_with is not None
    by_value: list[dict[Seeds, float]] = []
    for value in claim.values:
        found = _trend_values(claim, {**claim.about, claim.grows_with: str(value)}, cases)
        if isinstance(found, Unjudged):
            return found
        by_value.append(found)
    seeds = sorted(set.intersection(*(set(values) for values in by_value)))
    return rises(_positions(claim.values), [[values[s] for values in by_value] for s in seeds], falls=claim.falls)


def _trend_values(claim: Claim, wanted: Mapping[str, str], cases: Cases) -> dict[Seeds, float] | Unjudged:
    """The measure by seed at one value of the parameter, or its difference to the method in `minus`."""
    group = cases.usable(wanted, claim.measure)
    if isinstance(group, Unjudged):
        return group
    values = values_by_seed(group, claim.measure)
    if claim.minus is None:
        return values
    other = cases.usable({**wanted, **claim.minus}, claim.measure)
    if isinstance(other, Unjudged):
        return other
    theirs = values_by_seed(other, claim.measure)
    return {seed: values[seed] - theirs[seed] for seed in values if seed in theirs}


def _positions(values: Sequence[str]) -> list[float]:
    """The values as numbers; if they are not numbers, their positions 0, 1, ..."""
    try:
        return [float(value) for value in values]
    except ValueError:
        return [float(position) for position in range(len(values))]


# --- single values -------------------------------------------------------------------------------------------------


def _about(claim: Claim, group: Group) -> Found:
    assert claim.value is not None
    measured = [value_of(run, claim.measure) for run in group.complete]
    if base_name(claim.measure) not in FIRST_ROUND_MEASURES:
        known = [value for value in measured if value is not None]
        return is_about(claim.value, estimate(known, bounds_of(claim.measure)), claim.tolerance)
    ends = min(run.num_rounds for run in group.complete)
    if ends < claim.value + claim.tolerance:
        return Unjudged(f"runs end at round {ends}, before {claim.value + claim.tolerance:g}")
    values = tuple(math.inf if value is None else value for value in measured)
    return is_median_about(claim.value, Median(values, ends), claim.tolerance)


def _bound(claim: Claim, group: Group) -> Found:
    outcomes = [_is_within(claim, run, value_of(run, claim.measure)) for run in group.complete]
    known = [outcome for outcome in outcomes if outcome is not None]
    if not known:
        return Unjudged(f"all runs end at round {group.complete[0].num_rounds}, before the bound")
    found = holds_for_most(Share(sum(known), len(known)))
    too_short = len(outcomes) - len(known)
    detail = f"{too_short} end before the bound" if too_short else ""
    return Evidence(found.ours, found.p_for, found.p_against, detail)


def _is_within(claim: Claim, run: Run, value: float | None) -> bool | None:
    """Whether a run is within the bound of a claim; None if it ended too early to tell, or has no value."""
    name = base_name(claim.measure)
    if claim.at_most is not None:
        if value is None:
            return False if name in FIRST_ROUND_MEASURES and run.num_rounds >= claim.at_most else None
        return None if name in COUNT_MEASURES and run.num_rounds <= claim.at_most else value <= claim.at_most
    assert claim.at_least is not None
    if value is None:
        return True if name in FIRST_ROUND_MEASURES and run.num_rounds + 1 >= claim.at_least else None
    return None if name in COUNT_MEASURES and run.num_rounds < claim.at_least else value >= claim.at_least
