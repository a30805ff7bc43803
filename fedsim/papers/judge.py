"""Judgements of papers' numbers and claims by finished runs, by the `RULES` (`published`).

`protocol` says which runs may be judged, and `examine` finds the evidence. This file corrects the
p-values for multiple tests, by Holm's method, in two readings. In the usual reading the tests of a
family are corrected together: what a paper says in one place of one quantity. In the stricter
reading all tests of a paper are corrected together.

The omnibus check asks about all printed numbers of a table at once: can they, together, be draws
from the distributions of our runs?
"""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import special

from fedsim.papers.evidence import Evidence, holm_corrected
from fedsim.papers.examine import estimated, examine_claim, examine_number
from fedsim.papers.protocol import Cases, UnjudgedError
from fedsim.papers.published import Claim, Number, Publication, Verdict, publications_about
from fedsim.results.frames import by, finished_rows, runs_frame
from fedsim.results.runs import Run
from fedsim.results.statistics import Estimate


@dataclass(frozen=True)
class Judgement:
    """A printed number or claim, and the evidence about it from our runs.

    `evidence` is None if the number or claim cannot be judged. `detail` is then the reason, and
    otherwise holds remarks. `preset` is the preset of the runs, "" where it does not matter.
    `over_paper` is the verdict of the stricter reading, and `tests` the number of tests in the
    family; both are set by `correct_all`. `ours` is the mean of our runs that are like those of a
    printed number, also if they are too short to judge it. `rounds` then says how long they are.
    """

    printed: Number | Claim
    evidence: Evidence | None
    detail: str = ""
    preset: str = ""
    over_paper: Verdict = "not judged"
    tests: int = 0
    ours: Estimate | None = None
    rounds: str = ""

    @property
    def verdict(self) -> Verdict:
        return "not judged" if self.evidence is None else self.evidence.verdict


ByPublication = list[tuple[Publication, list[Judgement]]]
"""The judgements of each publication (a file of numbers/)."""


def judge_all(runs: Iterable[Run]) -> ByPublication:
    """Return the judgements of all publications about the presets and sizes of the runs.

    Each preset is judged by its own runs alone. P-values are not yet corrected.
    """
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
            examined.append((publication, judge_publication(publication, cases)))
    return examined


def judge_publication(publication: Publication, cases: Cases) -> list[Judgement]:
    """Return the judgements of a publication's numbers and claims for which there are runs.

    P-values are not yet corrected.
    """
    judged = []
    everything: list[Number | Claim] = [*publication.numbers, *publication.claims]
    for printed in everything:
        nearest = cases.nearest(printed.about)
        if not nearest:
            continue
        ours = None
        rounds = cases.rounds(nearest[0])
        if isinstance(printed, Number) and len(nearest) == 1:
            ours = estimated(finished_rows(cases.groups[nearest[0]]), printed.measure)
        try:
            if isinstance(printed, Number):
                evidence = examine_number(printed, cases)
                note = ""
            else:
                evidence = examine_claim(printed, cases)
                note = printed.note
        except UnjudgedError as reason:
            detail = str(reason)
            judged.append(Judgement(printed, None, detail, cases.preset, ours=ours, rounds=rounds))
            continue
        remarks = [evidence.detail, note, cases.remark(nearest[0])]
        detail = "; ".join(remark for remark in remarks if remark)
        judged.append(Judgement(printed, evidence, detail, cases.preset, ours=ours))
    return judged


def correct_all(compared: ByPublication) -> ByPublication:
    """Return the judgements with corrected p-values, in the usual and in the stricter reading."""
    all_judged, families, papers = [], [], []
    for publication, judgements in compared:
        for judged in judgements:
            all_judged.append(judged)
            families.append(family_of(publication, judged.printed))
            # Rows that were added after runs had been seen cannot change the others.
            papers.append((publication.paper, judged.printed.added_after_runs))
    all_corrected = iter(correct_within_families(all_judged, families, papers))  # in the same order
    result = []
    for publication, judgements in compared:
        result.append((publication, [next(all_corrected) for _ in judgements]))
    return result


def family_of(publication: Publication, printed: Number | Claim) -> Hashable:
    """Return a key that the tests of a family share.

    A family is what a paper says in one place of one quantity. Rows that were added after runs had
    been seen are a family of their own.
    """
    return (
        publication.paper,
        type(printed),
        printed.where,
        printed.measure,
        printed.added_after_runs,
    )


def correct_within_families(
    judged: Sequence[Judgement], families: Sequence[Hashable], papers: Sequence[Hashable]
) -> list[Judgement]:
    """Return the judgements with corrected evidence, in the same order.

    `families` and `papers` have the key of each judgement. The evidence is corrected within its
    family, and `over_paper` is the verdict after a correction within its paper.
    """
    in_family = _corrected_evidence(judged, families)
    in_paper = _corrected_evidence(judged, papers)
    result = list(judged)
    for place, (evidence, tests) in in_family.items():
        over_paper = in_paper[place][0].verdict
        result[place] = replace(
            judged[place], evidence=evidence, tests=tests, over_paper=over_paper
        )
    return result


def _corrected_evidence(
    judged: Sequence[Judgement], keys: Sequence[Hashable]
) -> dict[int, tuple[Evidence, int]]:
    """Return corrected evidence, and the number of tests with the same key, by position in
    `judged`.

    The evidence of judgements with the same key is corrected together. Judgements without evidence
    are not in the result.
    """
    by_key: dict[Hashable, dict[int, Evidence]] = {}
    for place, (key, judgement) in enumerate(zip(keys, judged, strict=True)):
        if judgement.evidence is not None:
            by_key.setdefault(key, {})[place] = judgement.evidence
    result: dict[int, tuple[Evidence, int]] = {}
    for members in by_key.values():
        evidences = holm_corrected(list(members.values()))
        num_tests = sum(evidence.is_tested for evidence in evidences)
        for place, evidence in zip(members, evidences, strict=True):
            result[place] = evidence, num_tests
    return result


def verdicts_by_id(judged: Iterable[Judgement]) -> dict[str, Verdict]:
    """Return the verdict on each number and claim, by its id.

    Several presets may be about the same number or claim. Then only presets with evidence count. If
    several have evidence, each id is followed by the preset: "id (preset)".
    """
    by_id: dict[str, list[Judgement]] = {}
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
    """Return number, mean and standard deviation of standardised errors, and the p-value of the sum
    of their squares.

    An error is standard normal if the printed number is a draw from the distribution of our runs.
    Errors that are nan (of one seed, or of runs without any spread) are skipped. Returns None if
    fewer than two remain. The p-value assumes independent numbers. Numbers of one run at several
    rounds are not independent: for these it describes and does not test.
    """
    z = np.array([error for error in errors if math.isfinite(error)])
    if len(z) < 2:
        return None
    p_value = float(special.chdtrc(len(z), float((z**2).sum())))
    return len(z), float(z.mean()), float(z.std(ddof=1)), p_value


def standardised_errors(judged: Sequence[Judgement]) -> dict[tuple[str, str], list[float]]:
    """Return the standardised errors of the judged numbers, by (table, row).

    The key (table, "") has the errors of all rows except those added after runs had been seen. An
    id is "table/row/column".
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
