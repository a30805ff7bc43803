"""Judgements of a paper's numbers and claims by finished runs, by the rules in `rules`.

`fedsim.papers.protocol` says which runs may be judged; `examine` finds the evidence; here the tests of a family are
corrected together, and for the stricter reading those of a paper.

All printed numbers of a table at once: are they, together, draws from the distributions of our runs?
"""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from fedsim.papers.examine import Evidence, Found, examine_claim, examine_number, holm_corrected
from fedsim.papers.protocol import Protocol, by_preset, protocol_of
from fedsim.papers.published import Cases, Claim, Number, Publication, Unjudged, Verdict, publications_about
from fedsim.results.groups import Group, group_runs
from fedsim.results.runs import Run
from fedsim.results.statistics import Estimate


@dataclass(frozen=True)
class Judged:
    """A printed number or claim, the evidence from our runs with corrected p-values, and what is to be said of it.

    `preset`: that of the runs, "" where it does not matter. `over_paper`: the verdict of the stricter reading, where
    all tests of the paper are one family. `tests`: how many tests its own family has.
    """

    printed: Number | Claim
    evidence: Evidence | None
    detail: str = ""
    preset: str = ""
    over_paper: Verdict = "not judged"
    tests: int = 0

    @property
    def verdict(self) -> Verdict:
        return "not judged" if self.evidence is None else self.evidence.verdict

    @property
    def difference(self) -> float | None:
        """Our mean minus the paper's number; None for claims."""
        ours = None if self.evidence is None else self.evidence.ours
        if isinstance(self.printed, Claim) or not isinstance(ours, Estimate):
            return None
        return ours.mean - self.printed.value


@dataclass(frozen=True)
class Examined:
    """What was found about a printed number or claim, before correction."""

    printed: Number | Claim
    found: Found
    remark: str
    preset: str


def judge_all(runs: Iterable[Run]) -> list[tuple[Publication, list[Judged]]]:
    """The judgements for every publication about the runs' presets and sizes."""
    return correct(examine_all(runs))


def examine_all(runs: Iterable[Run]) -> list[tuple[Publication, list[Examined]]]:
    """The evidence for every publication about the runs' presets and sizes, each preset by its own runs alone."""
    examined = []
    for (preset, scale), own in by_preset(runs).items():
        ours = group_runs(own)
        for publication in publications_about(preset, scale):
            protocol = protocol_of(preset, scale, publication.substitutes)
            examined.append((publication, examine(publication, ours, protocol)))
    return examined


def judge(publication: Publication, groups: Sequence[Group], protocol: Protocol | None) -> list[Judged]:
    """Judge all numbers and claims of a publication for which there are runs; others are left out."""
    ((_, judged),) = correct([(publication, examine(publication, groups, protocol))])
    return judged


def examine(publication: Publication, groups: Sequence[Group], protocol: Protocol | None) -> list[Examined]:
    """The evidence about all numbers and claims of a publication for which there are runs."""
    cases, preset = Cases(groups, protocol), "" if protocol is None else protocol.preset
    numbers = [
        Examined(number, examine_number(number, cases), cases.remark(group), preset)
        for number in publication.numbers
        if (group := cases.find(number.about)) is not None
    ]
    claims = [
        Examined(claim, examine_claim(claim, cases), cases.remark(group), preset)
        for claim in publication.claims
        if (group := cases.find(claim.about)) is not None
    ]
    return [*numbers, *claims]


def correct(found: Sequence[tuple[Publication, Sequence[Examined]]]) -> list[tuple[Publication, list[Judged]]]:
    """The judgements by evidence that is corrected by Holm's method for each family, and for each paper."""
    rows = [(publication, one) for publication, some in found for one in some]
    own, tests = _corrected(rows, family_of)
    over_paper, _ = _corrected(rows, lambda publication, printed: (publication.paper, printed.added_after_runs))
    judged = map(_judged, (one for _, one in rows), own, over_paper, tests)
    return [(publication, [next(judged) for _ in some]) for publication, some in found]


def family_of(publication: Publication, printed: Number | Claim) -> Hashable:
    """What a paper says in one place of one quantity; rows that were added after runs had been seen apart."""
    return publication.paper, type(printed), printed.where, printed.measure, printed.added_after_runs


def _corrected(
    rows: Sequence[tuple[Publication, Examined]], key: Callable[[Publication, Number | Claim], Hashable]
) -> tuple[list[Evidence | None], list[int]]:
    """The evidence of each row, corrected within its family, and the number of tests in that; None if unjudged."""
    families: dict[Hashable, list[int]] = {}
    for index, (publication, one) in enumerate(rows):
        if isinstance(one.found, Evidence):
            families.setdefault(key(publication, one.printed), []).append(index)
    corrected: list[Evidence | None] = [None] * len(rows)
    sizes = [0] * len(rows)
    for members in families.values():
        evidences = [one.found for _, one in (rows[i] for i in members) if isinstance(one.found, Evidence)]
        tested = sum(e.is_tested for e in evidences)
        for index, evidence in zip(members, holm_corrected(evidences), strict=True):
            corrected[index], sizes[index] = evidence, tested
    return corrected, sizes


def _judged(one: Examined, evidence: Evidence | None, over_paper: Evidence | None, tests: int) -> Judged:
    if isinstance(one.found, Unjudged):
        return Judged(one.printed, None, one.found.reason, one.preset)
    note = one.printed.note if isinstance(one.printed, Claim) else ""
    detail = "; ".join(part for part in (one.found.detail, note, one.remark) if part)
    strict: Verdict = "not judged" if over_paper is None else over_paper.verdict
    return Judged(one.printed, evidence, detail, one.preset, strict, tests)


def verdicts_by_id(judged: Iterable[Judged]) -> dict[str, Verdict]:
    """The verdicts by the ids of what is judged.

    Where several presets are about the same, those count that have a verdict; if these are several, too, each has the
    name of its preset behind the id.
    """
    by_id: dict[str, list[Judged]] = {}
    for one in judged:
        by_id.setdefault(one.printed.id, []).append(one)
    found: dict[str, Verdict] = {}
    for name, some in by_id.items():
        decided = [one for one in some if one.evidence is not None] or some[:1]
        alone = len(decided) == 1
        found |= {name if alone else f"{name} ({one.preset})": one.verdict for one in decided}
    return found


@dataclass(frozen=True)
class Omnibus:
    """The standardised errors of `num` printed numbers: standard normal, if each is one more run of ours.

    `p_value`: that of the sum of their squares (chi squared with `num` degrees of freedom). It takes the numbers as
    independent, while those of one run at several rounds are not: it is a description rather than a test.
    """

    num: int
    mean: float
    sd: float
    p_value: float


def omnibus(errors: Sequence[float]) -> Omnibus | None:
    """The omnibus check of standardised errors; None of fewer than two. Those that are nan are left out."""
    z = np.array([error for error in errors if math.isfinite(error)])
    if len(z) < 2:
        return None
    return Omnibus(len(z), float(z.mean()), float(z.std(ddof=1)), float(special.chdtrc(len(z), float((z**2).sum()))))


def standardised_errors(judged: Sequence[Judged]) -> dict[tuple[str, str], list[float]]:
    """The standardised errors of the numbers that were judged, by (table, row), and by (table, "") for all its rows.

    Rows that were added after runs had been seen count by themselves alone.
    """
    errors: dict[tuple[str, str], list[float]] = {}
    for one in judged:
        if not isinstance(one.printed, Number) or one.evidence is None or not isinstance(one.evidence.ours, Estimate):
            continue
        table, row, _ = one.printed.id.split("/", 2)
        error = one.evidence.ours.standardised_error(one.printed.value)
        errors.setdefault((table, row), []).append(error)
        if not one.printed.added_after_runs:
            errors.setdefault((table, ""), []).append(error)
    return errors
