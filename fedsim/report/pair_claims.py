"""What PNCS claims of its Table I, judged on the traces of `selector=pair_study`.

Every seed is held out once: directions and rivals are chosen on the other seeds, and what they are worth is measured on
that one. A comparison is the mean over held-out seeds of paired differences with its 95 % interval (Student's t). When
these rules were written, the table of runs at small had been seen.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from fedsim.report.groups import rank
from fedsim.report.pair_study import Condition, Scale, cross_entropy, fit, labels_of, pick, read_conditions
from fedsim.report.runs import Floats, Run

PNCS, FAMILY = "cos_4", "cos_"
"""The feature that the paper chooses (p = 4 by its public summary), and how the names of its relatives begin."""
LEAST_SEEDS = 3
LEVEL = 0.95
RULE = (
    "Claims on PNCS's Table I: every seed is held out once; directions and rivals are chosen on the others."
    f" Reproduced if the {LEVEL:.0%} interval (Student's t) of the mean over seeds lies on the claimed side of 0,"
    " not reproduced if it lies on the other, undecided otherwise or with fewer than"
    f" {LEAST_SEEDS} seeds. A claim on a rank is reproduced if it holds for every held-out seed and not reproduced"
    " if it holds for none."
)

Verdict = Literal["reproduced", "not reproduced", "undecided", "not judged"]


@dataclass(frozen=True)
class JudgedRow:
    """A claim of the paper, what came out here as text, and whether they agree."""

    id: str
    where: str
    text: str
    ours: str
    verdict: Verdict
    detail: str = ""


def judge_table_one(runs: Sequence[Run]) -> list[JudgedRow]:
    """The paper's claims about features of pairs; none without a trace."""
    names, conditions = read_conditions(runs)
    return judge_conditions(names, conditions) if conditions else []


def judge_conditions(names: Sequence[str], conditions: Sequence[Condition]) -> list[JudgedRow]:
    """The same for conditions whose features have these names."""
    if PNCS not in names:
        return [JudgedRow("pncs.table1", "Table I", TEXTS["best"], "-", "not judged", f"{PNCS} was not measured")]
    seeds = sorted({c.seed for c in conditions})
    if len(seeds) < LEAST_SEEDS:
        return [JudgedRow("pncs.table1", "Table I", TEXTS["best"], "-", "undecided", f"{len(seeds)} seeds")]
    folds = [Fold.of(list(names), conditions, seed) for seed in seeds]
    return [
        _negative(folds),
        _against_random(folds, None),
        *(_against_random(folds, setting) for setting in sorted({c.setting for c in conditions}, key=rank)),
        _rank(folds),
        _most_predictive(folds),
        _best_power(folds),
        *_smaller_but_wider(folds),
    ]


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
    """All conditions of one seed, `held`, and those of the others; features [F] have `names`."""

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
        """Weight and intercept of each feature's own model, fitted on the others [F][2]."""
        seen, labels = self.scale.apply(self.others), labels_of(self.others)
        return [fit(seen[:, [number]], labels) for number in range(len(self.names))]

    @cached_property
    def weights(self) -> Floats:
        """Weights of all features in one model, fitted on the others [F]."""
        found: Floats = fit(self.scale.apply(self.others), labels_of(self.others))[:-1]
        return found

    def entropies(self, conditions: Sequence[Condition]) -> Floats:
        """Cross-entropy of each feature's own model [F]."""
        seen, labels = self.scale.apply(conditions), labels_of(conditions)
        return np.array([cross_entropy(w, seen[:, [number]], labels) for number, w in enumerate(self.alone)])

    def relative_losses(self, conditions: Sequence[Condition]) -> Floats:
        """Of the pair that each feature picks in each condition [F, len(conditions)]."""
        negative = np.array([w[0] < 0 for w in self.alone])
        found = []
        for c in conditions:
            picked = np.where(negative, c.features.argmin(0), c.features.argmax(0))
            found.append(1 - c.labels[picked])
        return np.array(found, dtype=np.float64).T

    @property
    def pncs(self) -> int:
        return self.names.index(PNCS)

    def rival(self, worth: Floats, among: Callable[[str], bool] = lambda name: True) -> int:
        """The feature of least `worth` [F] besides cos_4."""
        open_to = [f for f, name in enumerate(self.names) if f != self.pncs and among(name)]
        return min(open_to, key=lambda f: float(worth[f]))


def _negative(folds: Sequence[Fold]) -> JudgedRow:
    weights = []
    for fold in folds:
        values = Scale.of(fold.held).apply(fold.held)[:, [fold.pncs]]
        weights.append(float(fit(values, labels_of(fold.held))[0]))
    return _row("pncs.table1.negative", TEXTS["negative"], weights, "weight of each seed's own model")


def _against_random(folds: Sequence[Fold], setting: str | None) -> JudgedRow:
    """The pair of lowest cos_4 against the mean pair, in all conditions or in those of one setting."""
    gains = []
    for fold in folds:
        chosen = [c for c in fold.held if setting in (None, c.setting)]
        found = [c.relative_loss(pick(c, fold.pncs, -1.0)) - float(np.mean(1 - c.labels)) for c in chosen]
        gains += [float(np.mean(found))] if found else []
    name, where = ("", "") if setting is None else (f".{setting}", f" (shards: {setting})")
    return _row(f"pncs.table1.random{name}", TEXTS["random"] + where, gains, "difference in relative loss")


def _rank(folds: Sequence[Fold]) -> JudgedRow:
    ranks = [1 + int((np.abs(fold.weights) > abs(fold.weights[fold.pncs])).sum()) for fold in folds]
    held = ranks.count(1)
    verdict: Verdict = "undecided" if 0 < held < len(ranks) else "reproduced" if held else "not reproduced"
    ours = f"rank {min(ranks)} to {max(ranks)} of {len(folds[0].names)}"
    return JudgedRow(
        "pncs.table1.rank", "Table I", TEXTS["rank"], ours, verdict, f"first at {held} of {len(ranks)} seeds"
    )


def _most_predictive(folds: Sequence[Fold]) -> JudgedRow:
    rivals = [fold.rival(fold.entropies(fold.others)) for fold in folds]
    held = [fold.entropies(fold.held) for fold in folds]
    values = [float(h[fold.pncs] - h[rival]) for fold, h, rival in zip(folds, held, rivals, strict=True)]
    return _row("pncs.table1.best", TEXTS["best"], values, f"difference to {_named(folds, rivals)}")


def _best_power(folds: Sequence[Fold]) -> JudgedRow:
    if not any(name.startswith(FAMILY) and name != PNCS for name in folds[0].names):
        return JudgedRow("pncs.table1.power", "V-B", TEXTS["power"], "-", "not judged", "no other power was measured")
    rivals = [
        fold.rival(fold.relative_losses(fold.others).mean(1), lambda name: name.startswith(FAMILY)) for fold in folds
    ]
    values = _differences(folds, rivals, np.mean)
    return _row("pncs.table1.power", TEXTS["power"], values, f"difference to {_named(folds, rivals)}")


def _smaller_but_wider(folds: Sequence[Fold]) -> list[JudgedRow]:
    """That the best other feature by relative loss beats cos_4, and that its deviation over conditions is higher."""
    rivals = [fold.rival(fold.relative_losses(fold.others).mean(1)) for fold in folds]
    against = f"cos_4 minus {_named(folds, rivals)}"
    smaller, wider = (_differences(folds, rivals, of) for of in (np.mean, np.std))
    return [
        _row("pncs.table1.smaller", TEXTS["smaller"], smaller, against, below=False),
        _row("pncs.table1.wider", TEXTS["wider"], wider, f"deviation of {against}"),
    ]


def _differences(folds: Sequence[Fold], rivals: Sequence[int], of: Callable[[Floats], np.floating]) -> list[float]:
    """cos_4 minus the rival, by a statistic of the relative losses on each held-out seed."""
    held = [fold.relative_losses(fold.held) for fold in folds]
    return [float(of(h[fold.pncs]) - of(h[rival])) for fold, h, rival in zip(folds, held, rivals, strict=True)]


def _named(folds: Sequence[Fold], rivals: Sequence[int]) -> str:
    return " or ".join(sorted({fold.names[rival] for fold, rival in zip(folds, rivals, strict=True)}))


def _row(id: str, text: str, values: Sequence[float], detail: str, *, below: bool = True) -> JudgedRow:
    """A claim that `values`, one a seed, are below 0 (or above)."""
    if len(values) < LEAST_SEEDS:
        return JudgedRow(id, "V-B", text, "-", "undecided", f"{len(values)} seeds")
    mean, low, high = interval(np.array(values))
    return JudgedRow(id, "V-B", text, f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]", judge_side(low, high, below), detail)


def judge_side(low: float, high: float, below: bool) -> Verdict:
    """By RULE: whether an interval lies below 0, or above it, as claimed."""
    if not below:
        low, high = -high, -low
    if high < 0:
        return "reproduced"
    return "not reproduced" if low > 0 else "undecided"


def interval(values: NDArray[np.float64]) -> tuple[float, float, float]:
    """Mean and the ends of its interval by Student's t; both ends are the mean where all values are alike."""
    mean, error = float(values.mean()), float(values.std(ddof=1)) / len(values) ** 0.5
    reach = float(stats.t.ppf((1 + LEVEL) / 2, len(values) - 1)) * error
    return mean, mean - reach, mean + reach
