"""The paper's number, ours, and whether they agree, by rules that are stated and were fixed before any run was seen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fedsim.report.groups import Group
from fedsim.report.published import Claim, Number, Publication, matches, measure_of
from fedsim.report.statistics import Difference, Estimate, estimate, paired

Verdict = Literal["reproduced", "not reproduced", "undecided"]

LEAST_SEEDS = 3
WIDEST = 0.2
"""An interval of one more run's accuracy that is wider tells nothing."""

RULES = {
    "number": (
        "A number that a paper prints for one run is reproduced if it lies where one more run of ours would fall"
        " (95 % prediction interval over seeds), not reproduced if it lies outside, and undecided with fewer than"
        f" {LEAST_SEEDS} finished seeds or an interval wider than {WIDEST}."
    ),
    "bound": (
        "A claim that something is at most, or at least, a value is reproduced if it holds for every seed, not"
        " reproduced if it holds for none, and undecided in between or with fewer than 3 seeds. Runs that never get"
        " there count as beyond any value."
    ),
    "gain": (
        "A claim that a method exceeds others by some gain is judged by the paired differences at equal seeds to the"
        " best of the others: reproduced if their 95 % bootstrap interval lies above 0 and reaches the printed gain,"
        " not reproduced if it ends below the printed gain, undecided otherwise or with fewer than 3 seeds."
    ),
}


@dataclass(frozen=True)
class Judged:
    """A printed number, or a claim, with ours beside it."""

    printed: Number | Claim
    ours: Estimate | Difference | None
    verdict: Verdict
    detail: str = ""

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's, for numbers."""
        if isinstance(self.printed, Claim) or self.ours is None:
            return None
        return self.ours.mean - self.printed.value


def judge(publication: Publication, groups: Sequence[Group]) -> list[Judged]:
    """Everything that a publication says of runs that there are."""
    numbers = [_judge_number(number, group) for number in publication.numbers if (group := _find(number.about, groups))]
    claims = [judged for claim in publication.claims if (judged := _judge_claim(claim, groups)) is not None]
    return [*numbers, *claims]


def _find(about: Mapping[str, str], groups: Sequence[Group]) -> Group | None:
    return next((group for group in groups if matches(group, about)), None)


def values_of(group: Group, measure: str) -> dict[int, float]:
    """A measure of the finished runs that have it, by seed."""
    found = {run.seed: measure_of(measure)(run) for run in group.complete}
    return {seed: value for seed, value in found.items() if value is not None}


def _judge_number(number: Number, group: Group) -> Judged:
    ours = estimate(list(values_of(group, number.measure).values()))
    return Judged(number, ours, judge_number(number.value, ours))


def judge_number(value: float, ours: Estimate | None) -> Verdict:
    """By RULES["number"]."""
    if ours is None or ours.num < LEAST_SEEDS:
        return "undecided"
    if not ours.next_low <= value <= ours.next_high:
        return "not reproduced"
    return "undecided" if ours.next_high - ours.next_low > WIDEST else "reproduced"


def _judge_claim(claim: Claim, groups: Sequence[Group]) -> Judged | None:
    group = _find(claim.about, groups)
    if group is None:
        return None
    if claim.gain is not None:
        return _judge_gain(claim, group, groups)
    return _judge_bound(claim, group)


def _judge_bound(claim: Claim, group: Group) -> Judged:
    measured = values_of(group, claim.measure)
    num = len(group.complete)
    if claim.at_most is not None:
        held = sum(value <= claim.at_most for value in measured.values())
    else:
        assert claim.at_least is not None
        held = sum(value >= claim.at_least for value in measured.values()) + num - len(measured)
    never = f", {num - len(measured)} never" if len(measured) < num else ""
    detail = f"holds for {held} of {num} seeds{never}"
    return Judged(claim, estimate(list(measured.values())), judge_bound(held, num), detail)


def judge_bound(held: int, num: int) -> Verdict:
    """By RULES["bound"]."""
    if num < LEAST_SEEDS or 0 < held < num:
        return "undecided"
    return "reproduced" if held else "not reproduced"


def _judge_gain(claim: Claim, group: Group, groups: Sequence[Group]) -> Judged | None:
    assert claim.gain is not None
    rivals = [g for name in claim.others if (g := _find({**claim.about, claim.among: name}, groups)) is not None]
    means = [(e.mean, g) for g in rivals if (e := estimate(list(values_of(g, claim.measure).values()))) is not None]
    if not means:
        return None
    best = max(means, key=lambda pair: pair[0])[1]
    difference = paired(values_of(group, claim.measure), values_of(best, claim.measure))
    return Judged(claim, difference, judge_gain(claim.gain, difference), f"best of the others: {best.name}")


def judge_gain(gain: float, difference: Difference | None) -> Verdict:
    """By RULES["gain"]."""
    if difference is None or difference.num < LEAST_SEEDS:
        return "undecided"
    if difference.high < gain - 1e-9:
        return "not reproduced"
    return "reproduced" if difference.low > 0 else "undecided"
