"""The claims of PNCS about its Table I, judged on the traces of `selector=pair_study`.

Cross-validation over seeds: every seed is held out once; the directions of features, and the rival features to compare
with, are chosen on the other seeds and evaluated on the held-out one, so that no rival is picked on the data that it is
compared on. A comparison is a t test on one number per held-out seed; one claim in all settings is a family (see
`rules`).
These claims were written after the table of the runs at `scale=small` had been seen.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fedsim.report.groups import sort_key
from fedsim.report.pair_study.analysis import Condition, Scale, cross_entropy, fit, labels_of, pick, read_conditions
from fedsim.report.runs import Floats, Run
from fedsim.report.statistics import MIN_SEEDS, Share, differences
from fedsim.report.tables.formatting import show_both, show_result
from fedsim.report.tables.table import Table
from fedsim.report.verdicts.evidence import Evidence, clipped, holm_corrected
from fedsim.report.verdicts.rules import Verdict
from fedsim.report.verdicts.values import holds_for_most

PNCS_FEATURE, COSINE_PREFIX = "cos_4", "cos_"
"""The feature that the paper chooses (p = 4 by its public summary), and the name prefix of cosines for other p."""
RULE = (
    "Every seed is held out once; directions and rivals are chosen on the others. Two-sided t tests over the held-out"
    " seeds, for the claim and against it. Holm's correction is for those for and those against by themselves: of one"
    " claim in all its settings, and for the stricter reading (over the paper) of all claims here. A claim on a rank is"
    " about the share of seeds for which it holds."
)


@dataclass(frozen=True)
class JudgedRow:
    """A claim of the paper, our result as text, and the verdict."""

    id: str
    where: str
    text: str
    ours: str
    verdict: Verdict
    detail: str = ""
    evidence: Evidence | None = None
    over_paper: Verdict = "not judged"


@dataclass(frozen=True)
class _Tested:
    """A claim, and the evidence from the held-out seeds."""

    id: str
    text: str
    evidence: Evidence
    where: str = "V-B"

    @property
    def family(self) -> str:
        """The name of the claim, without a setting."""
        return self.id.split(".")[2]

    def judged(self, evidence: Evidence, over_paper: Evidence) -> JudgedRow:
        shown = show_result(evidence.ours), evidence.verdict, evidence.detail
        return JudgedRow(self.id, self.where, self.text, *shown, evidence, over_paper.verdict)


def judge_runs(runs: Sequence[Run]) -> list[JudgedRow]:
    """Judge the paper's claims about features of pairs; [] if the runs have no traces."""
    names, conditions = read_conditions(runs)
    return judge_conditions(names, conditions) if conditions else []


def judge_conditions(names: Sequence[str], conditions: Sequence[Condition]) -> list[JudgedRow]:
    """Judge the claims on `conditions`, whose features have the given `names`."""
    if PNCS_FEATURE not in names:
        return [
            JudgedRow("pncs.table1", "Table I", TEXTS["best"], "-", "not judged", f"{PNCS_FEATURE} was not measured")
        ]
    seeds = sorted({c.seed for c in conditions})
    if len(seeds) < MIN_SEEDS:
        return [JudgedRow("pncs.table1", "Table I", TEXTS["best"], "-", "undecided", f"{len(seeds)} seeds")]
    folds = [Fold.of(list(names), conditions, seed) for seed in seeds]
    judged = [
        _negative(folds),
        _against_random(folds, None),
        *(_against_random(folds, setting) for setting in sorted({c.setting for c in conditions}, key=sort_key)),
        _rank(folds),
        _most_predictive(folds),
        _best_power(folds),
        *_smaller_but_wider(folds),
    ]
    tested = [claim for claim in judged if isinstance(claim, _Tested)]
    families = {claim.family: [one for one in tested if one.family == claim.family] for claim in tested}
    own = {
        claim.id: evidence
        for some in families.values()
        for claim, evidence in zip(some, holm_corrected([one.evidence for one in some]), strict=True)
    }
    names, evidences = [claim.id for claim in tested], [claim.evidence for claim in tested]
    over_paper = dict(zip(names, holm_corrected(evidences), strict=True))
    return [one.judged(own[one.id], over_paper[one.id]) if isinstance(one, _Tested) else one for one in judged]


def claims_table(rows: Sequence[JudgedRow]) -> Table:
    """The judged claims as a table."""
    cells = []
    for row in rows:
        e = row.evidence or Evidence(None)
        p_values = show_both(e.p_for, e.p_against), show_both(e.holm_for, e.holm_against)
        cells.append([row.where, row.text, row.ours, *p_values, row.verdict, row.over_paper, row.detail])
    header = ["where", "claim", "ours", "p for / against", "the same (Holm)", "verdict", "over the paper", ""]
    return Table("pair_claims", "Claims on PNCS's Table I (written after runs had been seen)", header, cells, RULE)


TEXTS = {
    "negative": "the weight of cos_4 is negative: the more opposed two gradients are, the better the pair",
    "random": "the pair with the most negative cos_4 is better than a random pair",
    "rank": "cos_4 is first in the importance of features (size of its weight among all)",
    "best": "cos_4 is the most predictive single feature (cross-entropy of the model with it alone)",
    "power": "of the cosines by power norm, cos_4 picks the best pairs (relative loss)",
    "smaller": "another feature has a smaller relative loss than cos_4",
    "wider": "the feature of smallest relative loss has a higher deviation than cos_4",
}


@dataclass(frozen=True)
class Fold:
    """One fold: the conditions of the held-out seed, `held`, and those of the `others`; the F features have `names`."""

    names: list[str]
    held: Sequence[Condition]
    others: Sequence[Condition]

    @classmethod
    def of(cls, names: list[str], conditions: Sequence[Condition], seed: int) -> "Fold":
        return cls(names, [c for c in conditions if c.seed == seed], [c for c in conditions if c.seed != seed])

    @cached_property
    def scale(self) -> Scale:
        return Scale.of(self.others)

    @cached_property
    def alone(self) -> list[Floats]:
        """Weight and intercept of the model of each single feature, fitted on the others, [F][2]."""
        features, labels = self.scale.apply(self.others), labels_of(self.others)
        return [fit(features[:, [number]], labels) for number in range(len(self.names))]

    @cached_property
    def weights(self) -> Floats:
        """Weights [F] of the model of all features, fitted on the held-out seed alone."""
        found: Floats = fit(Scale.of(self.held).apply(self.held), labels_of(self.held))[:-1]
        return found

    def entropies(self, conditions: Sequence[Condition]) -> Floats:
        """Cross-entropy [F] of the model of each single feature."""
        features, labels = self.scale.apply(conditions), labels_of(conditions)
        return np.array([cross_entropy(w, features[:, [number]], labels) for number, w in enumerate(self.alone)])

    def relative_losses(self, conditions: Sequence[Condition]) -> Floats:
        """Relative losses [F, len(conditions)] of the pair that each feature picks in each condition."""
        negative = np.array([w[0] < 0 for w in self.alone])
        losses = []
        for c in conditions:
            picked = np.where(negative, c.features.argmin(0), c.features.argmax(0))
            losses.append(1 - c.labels[picked])
        return np.array(losses, dtype=np.float64).T

    @property
    def pncs(self) -> int:
        return self.names.index(PNCS_FEATURE)

    def rival(self, score: Floats, among: Callable[[str], bool] = lambda name: True) -> int:
        """The feature with the lowest `score` [F], cos_4 excluded, among those whose names satisfy `among`."""
        candidates = [f for f, name in enumerate(self.names) if f != self.pncs and among(name)]
        return min(candidates, key=lambda f: float(score[f]))


def _negative(folds: Sequence[Fold]) -> _Tested:
    weights = []
    for fold in folds:
        values = Scale.of(fold.held).apply(fold.held)[:, [fold.pncs]]
        weights.append(float(fit(values, labels_of(fold.held))[0]))
    return _tested_claim("pncs.table1.negative", TEXTS["negative"], weights, "weight of each seed's own model")


def _against_random(folds: Sequence[Fold], setting: str | None) -> _Tested:
    """The pair of lowest cos_4 against the mean pair, in all conditions or those of one `setting`."""
    gains = []
    for fold in folds:
        chosen = [c for c in fold.held if setting in (None, c.setting)]
        found = [c.relative_loss(pick(c, fold.pncs, -1.0)) - float(np.mean(1 - c.labels)) for c in chosen]
        gains += [float(np.mean(found))] if found else []
    name, where = ("", "") if setting is None else (f".{setting}", f" (shards: {setting})")
    return _tested_claim(f"pncs.table1.random{name}", TEXTS["random"] + where, gains, "difference in relative loss")


def _rank(folds: Sequence[Fold]) -> _Tested:
    """Whether cos_4 has the largest weight in the model of each seed's own data, which makes seeds independent."""
    ranks = [1 + int((np.abs(fold.weights) > abs(fold.weights[fold.pncs])).sum()) for fold in folds]
    found = holds_for_most(Share(ranks.count(1), len(ranks)))
    detail = f"rank {min(ranks)} to {max(ranks)} of {len(folds[0].names)}"
    return _Tested("pncs.table1.rank", TEXTS["rank"], replace(found, detail=detail), "Table I")


def _most_predictive(folds: Sequence[Fold]) -> _Tested:
    rivals = [fold.rival(fold.entropies(fold.others)) for fold in folds]
    held = [fold.entropies(fold.held) for fold in folds]
    values = [float(h[fold.pncs] - h[rival]) for fold, h, rival in zip(folds, held, rivals, strict=True)]
    return _tested_claim("pncs.table1.best", TEXTS["best"], values, f"difference to {_rival_names(folds, rivals)}")


def _best_power(folds: Sequence[Fold]) -> JudgedRow | _Tested:
    if not any(name.startswith(COSINE_PREFIX) and name != PNCS_FEATURE for name in folds[0].names):
        return JudgedRow("pncs.table1.power", "V-B", TEXTS["power"], "-", "not judged", "no other power was measured")
    rivals = [
        fold.rival(fold.relative_losses(fold.others).mean(1), lambda name: name.startswith(COSINE_PREFIX))
        for fold in folds
    ]
    values = _differences_to(folds, rivals, np.mean)
    return _tested_claim("pncs.table1.power", TEXTS["power"], values, f"difference to {_rival_names(folds, rivals)}")


def _smaller_but_wider(folds: Sequence[Fold]) -> list[_Tested]:
    """Claims that the best other feature has a smaller relative loss than cos_4, but a higher deviation of it."""
    rivals = [fold.rival(fold.relative_losses(fold.others).mean(1)) for fold in folds]
    against = f"cos_4 minus {_rival_names(folds, rivals)}"
    smaller, wider = (_differences_to(folds, rivals, of) for of in (np.mean, np.std))
    return [
        _tested_claim("pncs.table1.smaller", TEXTS["smaller"], smaller, against, below=False),
        _tested_claim("pncs.table1.wider", TEXTS["wider"], wider, f"deviation of {against}"),
    ]


def _differences_to(folds: Sequence[Fold], rivals: Sequence[int], of: Callable[[Floats], np.floating]) -> list[float]:
    """cos_4 minus its rival, in the statistic `of` of the relative losses, one value per held-out seed."""
    held = [fold.relative_losses(fold.held) for fold in folds]
    return [float(of(h[fold.pncs]) - of(h[rival])) for fold, h, rival in zip(folds, held, rivals, strict=True)]


def _rival_names(folds: Sequence[Fold], rivals: Sequence[int]) -> str:
    return " or ".join(sorted({fold.names[rival] for fold, rival in zip(folds, rivals, strict=True)}))


def _tested_claim(id: str, text: str, values: Sequence[float], detail: str, *, below: bool = True) -> _Tested:
    """Test the claim that the mean of `values`, one per seed, is below 0 (or above 0 if `below` is false)."""
    found = differences(values)
    if found is None:
        return _Tested(id, text, Evidence(None, detail=detail))
    sides = clipped(2 * found.p_below(0.0)), clipped(2 * found.p_above(0.0))
    return _Tested(id, text, Evidence(found, *(sides if below else sides[::-1]), detail=detail))
