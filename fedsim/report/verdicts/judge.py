"""Judgements of a paper's numbers and claims by finished runs, by the rules in `rules`.

`fedsim.report.protocol` says which runs may be judged.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedsim.report.groups import Group
from fedsim.report.protocol import Protocol, made_with, protocol_of, show_deviations
from fedsim.report.runs import Run
from fedsim.report.statistics import Difference, Estimate, estimate, holm, paired
from fedsim.report.verdicts.published import Claim, Number, Publication, find_measure, matches, publications_about
from fedsim.report.verdicts.rules import (
    Evidence,
    Verdict,
    exceeds,
    holm_corrected,
    is_level,
    judge_bound,
    judge_number,
    number_p,
    rises,
    show_share,
)

FIRST_ROUND_MEASURES = ("rounds_to_cover", "rounds_to")
"""Measures of the first round in which something happens; no value means that it never happened in the run."""
COUNT_MEASURES = ("most_selections", "mean_selections", "peak_selections")
"""Measures that cannot exceed the number of rounds."""


@dataclass(frozen=True)
class Judged:
    """A printed number or claim, our result for it, and the verdict.

    p-values are nan if nothing was tested. A number has a two-sided `p_against` only; a tested claim has one-sided
    p-values for it and against it. `holm_...` are corrected for all numbers, or all claims, of the paper about this
    preset.
    """

    printed: Number | Claim
    ours: Estimate | Difference | None
    verdict: Verdict
    detail: str = ""
    p_for: float = math.nan
    p_against: float = math.nan
    holm_for: float = math.nan
    holm_against: float = math.nan

    @property
    def difference(self) -> float | None:
        """Our number minus the paper's; None for claims."""
        if isinstance(self.printed, Claim) or self.ours is None:
            return None
        return self.ours.mean - self.printed.value


@dataclass(frozen=True)
class Unjudged:
    """The reason why a claim is not judged."""

    reason: str


def judge_all(groups: Sequence[Group]) -> list[tuple[Publication, list[Judged]]]:
    """The judgements for every publication about the groups' presets and sizes."""
    judgements = []
    for preset, scale in made_with(groups):
        ours = [g for g in groups if (g.choices.get("preset"), g.choices.get("scale", "full")) == (preset, scale)]
        for publication in publications_about(preset, scale):
            protocol = protocol_of(preset, scale, publication.substitutes)
            judgements.append((publication, judge(publication, ours, protocol)))
    return judgements


def judge(publication: Publication, groups: Sequence[Group], protocol: Protocol | None) -> list[Judged]:
    """Judge all numbers and claims of a publication for which there are runs; others are left out."""
    cases = _JudgedGroups(groups, protocol)
    numbers = [(number, group) for number in publication.numbers if (group := cases.find(number.about)) is not None]
    claims = [(claim, group) for claim in publication.claims if (group := cases.find(claim.about)) is not None]
    return [*_judge_numbers(numbers, cases), *_judge_claims(claims, cases)]


@dataclass(frozen=True)
class _JudgedGroups:
    """The groups of one preset and size, and checks whether they may be judged."""

    groups: Sequence[Group]
    protocol: Protocol | None

    @property
    def full_size(self) -> bool:
        return self.protocol is None or self.protocol.scale == "full"

    def find(self, wanted: Mapping[str, str]) -> Group | None:
        """The group that made these choices; of several, the one that deviates least from the preset."""
        matching = [group for group in self.groups if matches(group, wanted)]
        return min(matching, key=lambda group: len(self.deviations(group)), default=None)

    def deviations(self, group: Group) -> list[str]:
        return [] if self.protocol is None else self.protocol.deviations(group)

    def objection(self, group: Group) -> str | None:
        """The reason why a group may not be judged, or None."""
        if deviations := self.deviations(group):
            return f"{group.name} is not as the preset: {show_deviations(deviations)}"
        return None if group.complete else f"{group.name} has no finished run"

    def remark(self, group: Group) -> str:
        return "; ".join([] if self.protocol is None else self.protocol.remarks(group))

    def rivals(self, claim: Claim) -> dict[str, Group] | Unjudged:
        """The groups that a claim compares with, by name, or the reason why one of them cannot be used."""
        found = {name: self.find({**claim.about, claim.among: name}) for name in claim.others}
        if missing := [name for name, group in found.items() if group is None]:
            return Unjudged(f"no runs of {', '.join(missing)}")
        groups = {name: group for name, group in found.items() if group is not None}
        objections = [reason for group in groups.values() if (reason := self.objection(group))]
        return Unjudged(objections[0]) if objections else groups


def values_by_seed(group: Group, measure: str) -> dict[int, float]:
    """A measure of the group's finished runs by seed, without runs for which it does not exist."""
    values = {run.seed: find_measure(measure)(run) for run in group.complete}
    return {seed: value for seed, value in values.items() if value is not None}


# --- numbers -------------------------------------------------------------------------------------------------------


def _judge_numbers(numbers: Sequence[tuple[Number, Group]], cases: _JudgedGroups) -> list[Judged]:
    ours = [estimate(list(values_by_seed(group, number.measure).values())) for number, group in numbers]
    reasons = [_number_objection(group, cases) for _, group in numbers]
    p_values = [
        math.nan if reason else number_p(number.value, our)
        for (number, _), our, reason in zip(numbers, ours, reasons, strict=True)
    ]
    return [
        Judged(number, our, "not judged", reason)
        if reason
        else Judged(
            number,
            our,
            judge_number(number.value, our, after),
            cases.remark(group),
            p_against=before,
            holm_against=after,
        )
        for (number, group), our, reason, before, after in zip(
            numbers, ours, reasons, p_values, holm(p_values), strict=True
        )
    ]


def _number_objection(group: Group, cases: _JudgedGroups) -> str | None:
    return cases.objection(group) or (None if cases.full_size else "another size than the paper's")


# --- claims --------------------------------------------------------------------------------------------------------


def _judge_claims(claims: Sequence[tuple[Claim, Group]], cases: _JudgedGroups) -> list[Judged]:
    """Judge bounds by counting seeds, and all other claims by tests that are corrected together."""
    results = [_examine(claim, group, cases) for claim, group in claims]
    tested = iter(holm_corrected([result for result in results if isinstance(result, Evidence)]))
    return [
        _to_judged(claim, next(tested) if isinstance(result, Evidence) else result, cases.remark(group))
        for (claim, group), result in zip(claims, results, strict=True)
    ]


def _examine(claim: Claim, group: Group, cases: _JudgedGroups) -> Evidence | Judged | Unjudged:
    if (reason := cases.objection(group)) is not None:
        return Unjudged(reason)
    if claim.grows_with is not None:
        return _trend(claim, cases)
    if claim.gain is None and claim.level_with is None:
        return _bound(claim, group) if cases.full_size or claim.any_size else Unjudged("another size than the paper's")
    rivals = cases.rivals(claim)
    if isinstance(rivals, Unjudged):
        return rivals
    return _compare(claim, group, rivals, full_size=cases.full_size or claim.any_size)


def _to_judged(claim: Claim, found: Evidence | Judged | Unjudged, remark: str) -> Judged:
    if isinstance(found, Judged):
        return found
    if isinstance(found, Unjudged):
        return Judged(claim, None, "not judged", found.reason)
    detail = "; ".join(part for part in (found.detail, remark) if part)
    p_values = found.p_for, found.p_against, found.holm_for, found.holm_against
    return Judged(claim, found.ours, found.verdict, detail, *p_values)


def _compare(claim: Claim, group: Group, rivals: Mapping[str, Group], *, full_size: bool) -> Evidence | Unjudged:
    ours = values_by_seed(group, claim.measure)
    differences = {name: paired(ours, values_by_seed(rival, claim.measure)) for name, rival in rivals.items()}
    usable = {name: difference for name, difference in differences.items() if difference is not None}
    if few := [name for name in differences if name not in usable]:
        return Unjudged(f"fewer than two seeds in common with {', '.join(few)}")
    if claim.level_with is not None:
        return is_level(claim.level_with, usable)
    assert claim.gain is not None
    found = exceeds(claim.gain if full_size else 0.0, usable)
    if full_size or not claim.gain:
        return found
    return Evidence(found.ours, found.p_for, found.p_against, detail=f"{found.detail}; by its sign alone at this size")


def _trend(claim: Claim, cases: _JudgedGroups) -> Evidence | Unjudged:
    assert claim.grows_with is not None
    by_value: list[dict[int, float]] = []
    for value in claim.values:
        found = _trend_values(claim, {**claim.about, claim.grows_with: str(value)}, cases)
        if isinstance(found, Unjudged):
            return found
        by_value.append(found)
    seeds = sorted(set.intersection(*(set(values) for values in by_value)))
    at = _positions(claim.values)
    return rises(at, {seed: [values[seed] for values in by_value] for seed in seeds}, falls=claim.falls)


def _trend_values(claim: Claim, wanted: Mapping[str, str], cases: _JudgedGroups) -> dict[int, float] | Unjudged:
    """The measure by seed at one value of the parameter, or its difference to the method in `minus`."""
    group = cases.find(wanted)
    other = None if claim.minus is None else cases.find({**wanted, **claim.minus})
    if group is None or (claim.minus is not None and other is None):
        return Unjudged(f"no runs at {claim.grows_with}={wanted[str(claim.grows_with)]}")
    for candidate in (group, *([other] if other else [])):
        if (reason := cases.objection(candidate)) is not None:
            return Unjudged(reason)
    values = values_by_seed(group, claim.measure)
    if other is None:
        return values
    theirs = values_by_seed(other, claim.measure)
    return {seed: values[seed] - theirs[seed] for seed in values if seed in theirs}


def _positions(values: Sequence[str]) -> list[float]:
    """The values as numbers; if they are not numbers, their positions 0, 1, ..."""
    try:
        return [float(value) for value in values]
    except ValueError:
        return [float(position) for position in range(len(values))]


def _bound(claim: Claim, group: Group) -> Judged | Unjudged:
    measured = {run.seed: find_measure(claim.measure)(run) for run in group.complete}
    outcomes = [_is_within(claim, run, measured[run.seed]) for run in group.complete]
    known = [outcome for outcome in outcomes if outcome is not None]
    if not known:
        return Unjudged(f"all runs end at round {group.complete[0].num_rounds}, before the bound")
    values = [value for value in measured.values() if value is not None]
    never = f", {len(measured) - len(values)} never" if len(values) < len(measured) else ""
    too_short = f", {len(outcomes) - len(known)} end before the bound" if len(known) < len(outcomes) else ""
    detail = show_share(sum(known), len(known)) + never + too_short
    return Judged(claim, estimate(values), judge_bound(sum(known), len(known)), detail)


def _is_within(claim: Claim, run: Run, value: float | None) -> bool | None:
    """Whether a run is within the bound of a claim; None if it ended too early to tell, or has no value."""
    name = claim.measure.partition("@")[0]
    if claim.at_most is not None:
        if value is None:
            return False if name in FIRST_ROUND_MEASURES and run.num_rounds >= claim.at_most else None
        return None if name in COUNT_MEASURES and run.num_rounds <= claim.at_most else value <= claim.at_most
    assert claim.at_least is not None
    if value is None:
        return True if name in FIRST_ROUND_MEASURES and run.num_rounds + 1 >= claim.at_least else None
    return None if name in COUNT_MEASURES and run.num_rounds < claim.at_least else value >= claim.at_least
