"""Judgements of papers' numbers and claims by finished runs, by the `RULES` (`published`).

`protocol` says which runs may be judged, and `examine` finds the evidence. This file corrects the
p-values for multiple tests, by Holm's method, in two readings. In the usual reading the tests of a
family are corrected together: what a paper says in one place of one quantity. In the stricter
reading all tests of a paper are corrected together. In both, rows that were added after runs had
been seen are corrected apart, so that they cannot change the others.

The omnibus check asks about all printed numbers of a table at once: can they, together, be draws
from the distributions of our runs?
"""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import numpy as np
from scipy import special

from fedsim.papers.evidence import Evidence, holm_corrected
from fedsim.papers.examine import estimated, examine_claim, examine_number
from fedsim.papers.protocol import Cases, UnjudgedError
from fedsim.papers.published import Claim, Number, Publication, Verdict, publications_about
from fedsim.results.frames import by, finished_rows, runs_frame
from fedsim.results.runs import Run
from fedsim.results.statistics import Estimate

ALL_ROWS = ""
"""The name under which `standardised_errors` has the errors of all rows of a table."""


@dataclass(frozen=True)
class Judgement:
    """A number or claim of a paper, and the evidence about it from our runs.

    - `paper`: the paper's short name; `preset`: the preset of the runs, "" where it does not
      matter.
    - `evidence`: None if the number or claim cannot be judged.
    - `detail`: the reason why it cannot be judged, or otherwise remarks.
    - `ours`: the mean of our runs that are compared with a printed number. It is also given for
      runs that cannot be judged.
    - `rounds`: how long such runs are, if they are not as long as the preset's.
    - `tests`: the number of tests in the family; `over_paper`: the verdict of the stricter reading.
      `corrected` sets both.
    """

    printed: Number | Claim
    evidence: Evidence | None
    detail: str = ""
    paper: str = ""
    preset: str = ""
    ours: Estimate | None = None
    rounds: str = ""
    tests: int = 0
    over_paper: Verdict = "not judged"

    @property
    def verdict(self) -> Verdict:
        return "not judged" if self.evidence is None else self.evidence.verdict

    @property
    def family(self) -> Hashable:
        """A key that all tests of a family have."""
        printed = self.printed
        return *self.paper_family, type(printed), printed.where, printed.measure

    @property
    def paper_family(self) -> tuple[str, bool]:
        """A key that all tests have which the stricter reading corrects together."""
        return self.paper, self.printed.added_after_runs


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
    result = []
    for (preset, scale), runs_of_preset in sorted(by_preset.items()):
        publications = publications_about(preset, scale)
        groups = by(runs_frame(runs_of_preset), "group") if publications else {}
        for publication in publications:
            cases = Cases(groups, preset, scale, publication.substitutes)
            result.append((publication, judge_publication(publication, cases)))
    return result


def judge_publication(publication: Publication, cases: Cases) -> list[Judgement]:
    """Return the judgements of a publication's numbers and claims for which there are runs.

    P-values are not yet corrected.
    """
    judgements = []
    everything: list[Number | Claim] = [*publication.numbers, *publication.claims]
    for printed in everything:
        groups = cases.nearest(printed.about)
        if groups:
            judgements.append(_judge(printed, publication.paper, cases, groups))
    return judgements


def _judge(printed: Number | Claim, paper: str, cases: Cases, groups: Sequence[str]) -> Judgement:
    """Return the judgement of a number or claim by the `groups` of runs that it may be about."""
    ours = None
    if isinstance(printed, Number) and len(groups) == 1:
        ours = estimated(finished_rows(cases.groups[groups[0]]), printed.measure)
    try:
        if isinstance(printed, Number):
            evidence, note = examine_number(printed, cases), ""
        else:
            evidence, note = examine_claim(printed, cases), printed.note
    except UnjudgedError as reason:
        rounds = cases.rounds(groups[0])
        return Judgement(printed, None, str(reason), paper, cases.preset, ours, rounds)
    remarks = [evidence.detail, note, cases.remark(groups[0])]
    detail = "; ".join(remark for remark in remarks if remark)
    return Judgement(printed, evidence, detail, paper, cases.preset, ours)


def correct_all(judged: ByPublication) -> ByPublication:
    """Return the judgements of all publications, `corrected` together."""
    everything = []
    for _, judgements in judged:
        everything += judgements
    all_corrected = iter(corrected(everything))
    result = []
    for publication, judgements in judged:
        result.append((publication, list(islice(all_corrected, len(judgements)))))
    return result


def corrected(judgements: Sequence[Judgement]) -> list[Judgement]:
    """Return the judgements, in the same order, with evidence that is corrected in its family.

    The size of the family and the verdict of the stricter reading are added.
    """
    in_family = _corrected_evidence(judgements, [item.family for item in judgements])
    in_paper = _corrected_evidence(judgements, [item.paper_family for item in judgements])
    num_tests = Counter(
        item.family for item in judgements if item.evidence and item.evidence.is_tested
    )
    result = []
    for judgement, evidence, strict in zip(judgements, in_family, in_paper, strict=True):
        if judgement.evidence is not None:
            tests = num_tests[judgement.family]
            judgement = replace(
                judgement, evidence=evidence, tests=tests, over_paper=strict.verdict
            )
        result.append(judgement)
    return result


def _corrected_evidence(
    judgements: Sequence[Judgement], keys: Sequence[Hashable]
) -> list[Evidence]:
    """Return the evidence of each judgement, corrected together with all of the same key.

    For a judgement without evidence it is `Evidence(None)`, which is no test.
    """
    evidences = [judgement.evidence or Evidence(None) for judgement in judgements]
    places_of: dict[Hashable, list[int]] = {}
    for place, key in enumerate(keys):
        places_of.setdefault(key, []).append(place)
    for places in places_of.values():
        together = holm_corrected([evidences[place] for place in places])
        for place, evidence in zip(places, together, strict=True):
            evidences[place] = evidence
    return evidences


def verdicts_by_id(judgements: Iterable[Judgement]) -> dict[str, Verdict]:
    """Return the verdict on each number and claim, by its id.

    Several presets may be about the same number or claim. Then only presets with evidence count. If
    several have evidence, each id is followed by the preset: "id (preset)".
    """
    by_id: dict[str, list[Judgement]] = {}
    for judgement in judgements:
        by_id.setdefault(judgement.printed.id, []).append(judgement)
    verdicts: dict[str, Verdict] = {}
    for name, candidates in by_id.items():
        with_evidence = [judgement for judgement in candidates if judgement.evidence is not None]
        for judgement in with_evidence or candidates[:1]:
            key = f"{name} ({judgement.preset})" if len(with_evidence) > 1 else name
            verdicts[key] = judgement.verdict
    return verdicts


class OmnibusCheck(NamedTuple):
    """The number, mean and standard deviation of standardised errors, and the p-value of the sum of
    their squares."""

    num: int
    mean: float
    deviation: float
    p_value: float


def omnibus(errors: Sequence[float]) -> OmnibusCheck | None:
    """Return the check of standardised errors; None if fewer than two are known.

    An error is standard normal if the printed number is a draw from the distribution of our runs.
    Errors that are nan (of one seed, or of runs without any spread) are skipped. The p-value
    assumes independent numbers. Numbers of one run at several rounds are not independent: for these
    it describes and does not test.
    """
    z = np.array([error for error in errors if math.isfinite(error)])
    if len(z) < 2:
        return None
    p_value = float(special.chdtrc(len(z), float((z**2).sum())))
    return OmnibusCheck(len(z), float(z.mean()), float(z.std(ddof=1)), p_value)


def standardised_errors(judgements: Sequence[Judgement]) -> dict[tuple[str, str], list[float]]:
    """Return the standardised errors of the judged numbers, by (table, row).

    The row `ALL_ROWS` has those of all numbers that were written before runs had been seen. An id
    is "table/row/column".
    """
    errors: dict[tuple[str, str], list[float]] = {}
    for judgement in judgements:
        printed, ours = judgement.printed, judgement.ours
        if isinstance(printed, Number) and judgement.evidence and ours is not None:
            table, row, _ = printed.id.split("/", 2)
            error = ours.standardised_error(printed.value)
            errors.setdefault((table, row), []).append(error)
            if not printed.added_after_runs:
                errors.setdefault((table, ALL_ROWS), []).append(error)
    return errors
