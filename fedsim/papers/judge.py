"""Judgements of a paper's numbers and claims by finished runs, by the `RULES`.

`fedsim.papers.protocol` says which runs may be judged, and `examine` finds the evidence. Here the
tests of a family are corrected together, and for the stricter reading those of a paper. All printed
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
from fedsim.results.frames import by, runs_frame
from fedsim.results.runs import Run
from fedsim.results.statistics import Estimate


@dataclass(frozen=True)
class Judged:
    """A printed number or claim, the evidence from our runs with corrected p-values, and remarks.

    `preset` is that of the runs, "" where it does not matter. `over_paper` is the verdict of the
    stricter reading, where all tests of the paper are one family. `tests` says how many tests its
    own family has.
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
"""The judgements of each publication."""


def examine_all(runs: Iterable[Run]) -> Compared:
    """Return the evidence for every publication about the runs' presets and sizes, each preset by
    its own runs alone."""
    by_preset: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        preset = run.choices.get("preset", "")
        by_preset.setdefault((preset, run.choices.get("scale", "full")), []).append(run)
    examined = []
    for (preset, scale), members in sorted(by_preset.items()):
        publications = publications_about(preset, scale) if preset else []
        groups = by(runs_frame(members), "group") if publications else {}
        for publication in publications:
            cases = Cases(groups, preset, scale, publication.substitutes)
            examined.append((publication, examine(publication, cases)))
    return examined


def examine(publication: Publication, cases: Cases) -> list[Judged]:
    """Return all numbers and claims of a publication for which there are runs, with evidence that
    is not yet corrected."""
    judged = []
    everything: list[Number | Claim] = [*publication.numbers, *publication.claims]
    for printed in everything:
        nearest = cases.nearest(printed.about)
        if not nearest:
            continue
        try:
            if isinstance(printed, Number):
                evidence = examine_number(printed, cases)
                note = ""
            else:
                evidence = examine_claim(printed, cases)
                note = printed.note
        except UnjudgedError as reason:
            judged.append(Judged(printed, None, str(reason), cases.preset))
            continue
        remarks = [evidence.detail, note, cases.remark(nearest[0])]
        detail = "; ".join(remark for remark in remarks if remark)
        judged.append(Judged(printed, evidence, detail, cases.preset))
    return judged


def correct(compared: Compared) -> Compared:
    """Return the judgements by evidence that is corrected by Holm's method for each family, and for
    each paper."""
    rows, families, papers = [], [], []
    for publication, judgements in compared:
        for judged in judgements:
            rows.append(judged)
            families.append(family_of(publication, judged.printed))
            papers.append((publication.paper, judged.printed.added_after_runs))
    after = iter(corrected(rows, families, papers))
    return [
        (publication, [next(after) for _ in judgements]) for publication, judgements in compared
    ]


def family_of(publication: Publication, printed: Number | Claim) -> Hashable:
    """Return the family of tests: what a paper says in one place of one quantity. Rows that were
    added after runs had been seen have their own."""
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
    """Return the judgements with evidence corrected within their families, and for `over_paper`
    within their papers."""
    in_family = _corrected(judged, families)
    in_paper = _corrected(judged, papers)
    after = list(judged)
    for at, (evidence, tests) in in_family.items():
        over_paper = in_paper[at][0].verdict
        after[at] = replace(after[at], evidence=evidence, tests=tests, over_paper=over_paper)
    return after


def _corrected(
    judged: Sequence[Judged], keys: Sequence[Hashable]
) -> dict[int, tuple[Evidence, int]]:
    """Return by position the evidence, corrected among that of the same key, and the number of
    tests there."""
    by_key: dict[Hashable, dict[int, Evidence]] = {}
    for at, (key, judgement) in enumerate(zip(keys, judged, strict=True)):
        if judgement.evidence is not None:
            by_key.setdefault(key, {})[at] = judgement.evidence
    after: dict[int, tuple[Evidence, int]] = {}
    for members in by_key.values():
        evidences = holm_corrected(list(members.values()))
        tests = sum(evidence.is_tested for evidence in evidences)
        for at, evidence in zip(members, evidences, strict=True):
            after[at] = evidence, tests
    return after


def verdicts_by_id(judged: Iterable[Judged]) -> dict[str, Verdict]:
    """Return the verdicts by the ids of what is judged.

    If several presets are about the same, those count that have a verdict. If several have one, the
    name of its preset follows each id.
    """
    by_id: dict[str, list[Judged]] = {}
    for judgement in judged:
        by_id.setdefault(judgement.printed.id, []).append(judgement)
    verdicts: dict[str, Verdict] = {}
    for name, judgements in by_id.items():
        decided = [judgement for judgement in judgements if judgement.evidence is not None]
        for judgement in decided or judgements[:1]:
            key = f"{name} ({judgement.preset})" if len(decided) > 1 else name
            verdicts[key] = judgement.verdict
    return verdicts


def omnibus(errors: Sequence[float]) -> tuple[int, float, float, float] | None:
    """Return the number, mean and standard deviation of standardised errors, and the p-value of the
    sum of their squares; None for fewer than two. nan are left out.

    They are standard normal, if each printed number is one more run of ours. The p-value takes the
    numbers as independent, which those of one run at several rounds are not: it describes, and does
    not test.
    """
    z = np.array([error for error in errors if math.isfinite(error)])
    if len(z) < 2:
        return None
    p_value = float(special.chdtrc(len(z), float((z**2).sum())))
    return len(z), float(z.mean()), float(z.std(ddof=1)), p_value


def standardised_errors(judged: Sequence[Judged]) -> dict[tuple[str, str], list[float]]:
    """Return the standardised errors of the numbers that were judged, by (table, row), and by
    (table, "") for all its rows.

    Rows that were added after runs had been seen count by themselves alone.
    """
    errors: dict[tuple[str, str], list[float]] = {}
    for judgement in judged:
        printed = judgement.printed
        ours = judgement.evidence.ours if judgement.evidence else None
        if isinstance(printed, Number) and isinstance(ours, Estimate):
            table, row, _ = printed.id.split("/", 2)
            error = ours.standardised_error(printed.value)
            errors.setdefault((table, row), []).append(error)
            if not printed.added_after_runs:
                errors.setdefault((table, ""), []).append(error)
    return errors
