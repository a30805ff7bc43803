"""Judgements of a paper's numbers and claims by finished runs, by the `RULES`.

`fedsim.papers.protocol` says which runs may be judged; `examine` finds the evidence; here the tests
of a family are corrected together, and for the stricter reading those of a paper. All printed
numbers of a table are also checked at once: are they, together, draws from the distributions of our
runs?
"""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import special

from fedsim.papers.examine import Evidence, examine_claim, examine_number, holm_corrected
from fedsim.papers.protocol import Cases, UnjudgedError
from fedsim.papers.published import Claim, Number, Publication, Verdict, publications_about
from fedsim.results.groups import group_runs
from fedsim.results.runs import Run
from fedsim.results.statistics import Estimate


@dataclass(frozen=True)
class Judged:
    """A printed number or claim, the evidence from our runs with corrected p-values, and what is to
    be said of it.

    `preset`: that of the runs, "" where it does not matter. `over_paper`: the verdict of the
    stricter reading, where all tests of the paper are one family. `tests`: how many tests its own
    family has.
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


Compared = list[tuple[Publication, list[Judged]]]


def examine_all(runs: Iterable[Run]) -> Compared:
    """The evidence for every publication about the runs' presets and sizes, each preset by its own
    runs alone."""
    by_preset: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        if preset := run.choices.get("preset"):
            by_preset.setdefault((preset, run.choices.get("scale", "full")), []).append(run)
    examined = []
    for (preset, scale), own in sorted(by_preset.items()):
        ours = group_runs(own)
        for publication in publications_about(preset, scale):
            cases = Cases(ours, preset, scale, publication.substitutes)
            examined.append((publication, examine(publication, cases)))
    return examined


def examine(publication: Publication, cases: Cases) -> list[Judged]:
    """All numbers and claims of a publication for which there are runs, with evidence that is not
    yet corrected."""
    judged = []
    everything: list[Number | Claim] = [*publication.numbers, *publication.claims]
    for printed in everything:
        if (group := cases.find(printed.about)) is None:
            continue
        try:
            found = (
                examine_number(printed, cases)
                if isinstance(printed, Number)
                else examine_claim(printed, cases)
            )
        except UnjudgedError as reason:
            judged.append(Judged(printed, None, str(reason), cases.preset))
            continue
        note = printed.note if isinstance(printed, Claim) else ""
        detail = "; ".join(filter(None, (found.detail, note, cases.remark(group))))
        judged.append(Judged(printed, found, detail, cases.preset))
    return judged


def correct(found: Compared) -> Compared:
    """The judgements by evidence that is corrected by Holm's method for each family, and for each
    paper."""
    rows = [(publication, one) for publication, some in found for one in some]
    families = [family_of(publication, one.printed) for publication, one in rows]
    papers = [(publication.paper, one.printed.added_after_runs) for publication, one in rows]
    judged = iter(corrected([one for _, one in rows], families, papers))
    return [(publication, [next(judged) for _ in some]) for publication, some in found]


def family_of(publication: Publication, printed: Number | Claim) -> Hashable:
    """What a paper says in one place of one quantity; rows that were added after runs had been seen
    apart."""
    return (
        publication.paper,
        type(printed),
        printed.where,
        printed.measure,
        printed.added_after_runs,
    )


def corrected(
    judged: Sequence[Judged], families: Sequence[Hashable], papers: Sequence[Hashable]
) -> list[Judged]:
    """The judgements with evidence corrected within their families, and for `over_paper` within
    their papers."""
    own, over = _corrected(judged, families), _corrected(judged, papers)
    found = list(judged)
    for at, (evidence, tests) in own.items():
        found[at] = replace(
            found[at], evidence=evidence, tests=tests, over_paper=over[at][0].verdict
        )
    return found


def _corrected(
    judged: Sequence[Judged], keys: Sequence[Hashable]
) -> dict[int, tuple[Evidence, int]]:
    """By position the evidence that there is, corrected among that of the same key, and how many
    tests these are."""
    by_key: dict[Hashable, dict[int, Evidence]] = {}
    for at, (key, one) in enumerate(zip(keys, judged, strict=True)):
        if one.evidence is not None:
            by_key.setdefault(key, {})[at] = one.evidence
    found: dict[int, tuple[Evidence, int]] = {}
    for members in by_key.values():
        evidences = holm_corrected(list(members.values()))
        tests = sum(evidence.is_tested for evidence in evidences)
        found |= {at: (evidence, tests) for at, evidence in zip(members, evidences, strict=True)}
    return found


def verdicts_by_id(judged: Iterable[Judged]) -> dict[str, Verdict]:
    """The verdicts by the ids of what is judged.

    Where several presets are about the same, those count that have a verdict; if these are several,
    too, each has the name of its preset behind the id.
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


def omnibus(errors: Sequence[float]) -> tuple[int, float, float, float] | None:
    """The number, mean and standard deviation of standardised errors: standard normal, if each
    printed number is one more run of ours; and the p-value of the sum of their squares. None of
    fewer than two; nan are left out.

    It takes the numbers as independent, while those of one run at several rounds are not: a
    description, no test.
    """
    z = np.array([error for error in errors if math.isfinite(error)])
    if len(z) < 2:
        return None
    return (
        len(z),
        float(z.mean()),
        float(z.std(ddof=1)),
        float(special.chdtrc(len(z), float((z**2).sum()))),
    )


def standardised_errors(judged: Sequence[Judged]) -> dict[tuple[str, str], list[float]]:
    """The standardised errors of the numbers that were judged, by (table, row), and by (table, "")
    for all its rows.

    Rows that were added after runs had been seen count by themselves alone.
    """
    errors: dict[tuple[str, str], list[float]] = {}
    for one in judged:
        if (
            not isinstance(one.printed, Number)
            or one.evidence is None
            or not isinstance(one.evidence.ours, Estimate)
        ):
            continue
        table, row, _ = one.printed.id.split("/", 2)
        error = one.evidence.ours.standardised_error(one.printed.value)
        for key in [(table, row)] if one.printed.added_after_runs else [(table, row), (table, "")]:
            errors.setdefault(key, []).append(error)
    return errors
