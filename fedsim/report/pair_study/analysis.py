"""PNCS's Table I from the traces of `selector=pair_study`: which feature of a pair of gradients tells how good it is.

A condition is one round of one run. Outcomes are min-max scaled within each condition, losses negated; features are
standardised over the training conditions. The split is by seeds, never by pairs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import expit

from fedsim.report.groups import rank
from fedsim.report.runs import Floats, Run
from fedsim.report.tables.table import Table
from fedsim.tracking.files import TRACE, read_metrics

PENALTY = 1e-3
TEST_SHARE = 0.3
SETTING = "partition.shards_per_client"
Losses = list[float]


@dataclass(frozen=True)
class Condition:
    """`features` [P, F] of its pairs, validation `losses` [P] after each pair's step."""

    seed: int
    setting: str
    round: int
    features: Floats
    losses: Floats

    @property
    def labels(self) -> Floats:
        """1 for the pair of lowest loss, 0 for that of the highest; .5 where all are alike."""
        low, high = self.losses.min(), self.losses.max()
        return np.full(len(self.losses), 0.5) if high == low else (high - self.losses) / (high - low)

    def relative_loss(self, pair: int) -> float:
        """0 for the best pair, 1 for the worst."""
        return float(1 - self.labels[pair])


RANDOM = "a random pair"


def table_one(runs: Sequence[Run]) -> list[Table]:
    """The features over all conditions, and their relative losses by setting and by round; none without a trace."""
    names, conditions = read_conditions(runs)
    if not conditions:
        return []
    training, testing = split_by_seed(conditions)
    scale = Scale.of(training)
    seen, labels = scale.apply(training), labels_of(training)
    joint = fit(seen, labels)
    ranks = np.argsort(np.argsort(-np.abs(joint[:-1]))) + 1
    cells: dict[str, list[str]] = {RANDOM: [""] * 4}
    losses: dict[str, Losses] = {RANDOM: [float(np.mean(1 - c.labels)) for c in testing]}
    for number, name in enumerate(names):
        alone = fit(seen[:, [number]], labels)
        entropy = cross_entropy(alone, scale.apply(testing)[:, [number]], labels_of(testing))
        cells[name] = [f"{alone[0]:+.3f}", f"{joint[number]:+.3f}", str(ranks[number]), f"{entropy:.4f}"]
        losses[name] = [c.relative_loss(pick(c, number, alone[0])) for c in testing]
    losses = dict(sorted(losses.items(), key=lambda item: float(np.mean(item[1]))))
    return [
        _features(cells, losses, f"{len(training)} conditions for fitting, {len(testing)} for testing, split by seed."),
        _losses_by("setting", "Relative loss by shards a client", losses, [c.setting for c in testing]),
        _losses_by("rounds", "Relative loss by rounds", losses, [_five_rounds(c.round) for c in testing]),
    ]


def _features(cells: Mapping[str, list[str]], losses: Mapping[str, Losses], sizes: str) -> Table:
    rows = [[name, *cells[name], f"{np.mean(found):.3f} ± {np.std(found):.3f}"] for name, found in losses.items()]
    note = (
        f"{sizes} weight: alone, on standardised features; below 0 the smaller value promises more. rank: by weight"
        " among all in one model. relative loss: of the pair that the feature picks, 0 the best of its round and 1 the"
        " worst, with standard deviation."
    )
    head = ["feature", "weight", "weight among all", "rank", "cross-entropy", "relative loss"]
    return Table("pair_features", "Features of pairs of gradients (PNCS, Table I)", head, rows, note)


def _losses_by(name: str, title: str, losses: Mapping[str, Losses], kinds: Sequence[str]) -> Table:
    """Mean relative losses of the conditions of each kind."""
    columns = sorted(set(kinds), key=rank)
    rows = [
        [feature, *(f"{np.mean([v for v, kind in zip(found, kinds, strict=True) if kind == c]):.3f}" for c in columns)]
        for feature, found in losses.items()
    ]
    return Table(f"pair_features_by_{name}", title, ["feature", *columns], rows)


def _five_rounds(round: int) -> str:
    first = (round - 1) // 5 * 5 + 1
    return f"{first} to {first + 4}"


def read_conditions(runs: Sequence[Run]) -> tuple[list[str], list[Condition]]:
    """The features' names, and every condition of every run whose values are all finite."""
    names: list[str] = []
    found = []
    for run in runs:
        for line in read_metrics(run.folder, TRACE):
            if "features" not in line or not line["pairs"]:
                continue
            names = names or list(line["features"])
            features = np.array([line["features"][name] for name in names], dtype=np.float64).T
            losses = np.array(line["loss"], dtype=np.float64)
            if np.isfinite(features).all() and np.isfinite(losses).all():
                found.append(Condition(run.seed, _setting(run.config), line["round"], features, losses))
    return names, found


def split_by_seed(conditions: Sequence[Condition]) -> tuple[list[Condition], list[Condition]]:
    """The last 30 % of the seeds, one at least, are for testing; with one seed it is for both."""
    seeds = sorted({c.seed for c in conditions})
    held = set(seeds[-max(1, round(TEST_SHARE * len(seeds))) :])
    testing = [c for c in conditions if c.seed in held]
    return [c for c in conditions if c.seed not in held] or testing, testing


@dataclass(frozen=True)
class Scale:
    """Mean and standard deviation of every feature; a constant one becomes 0."""

    mean: Floats
    deviation: Floats

    @classmethod
    def of(cls, conditions: Sequence[Condition]) -> "Scale":
        values = np.concatenate([c.features for c in conditions])
        deviation = values.std(0)
        return cls(values.mean(0), np.where(deviation > 1e-12 * np.abs(values).max(0, initial=0), deviation, np.inf))

    def apply(self, conditions: Sequence[Condition]) -> Floats:
        values: Floats = (np.concatenate([c.features for c in conditions]) - self.mean) / self.deviation
        return values


def labels_of(conditions: Sequence[Condition]) -> Floats:
    return np.concatenate([c.labels for c in conditions])


def fit(features: Floats, labels: Floats) -> Floats:
    """Weights and, last, the intercept that minimise the mean cross-entropy with soft labels plus 1e-3 |weights|^2."""

    def objective(w: Floats) -> tuple[float, Floats]:
        scores = features @ w[:-1] + w[-1]
        slope = (expit(scores) - labels) / len(labels)
        value = float(np.mean(np.logaddexp(0, scores) - labels * scores) + PENALTY * w[:-1] @ w[:-1])
        return value, np.append(features.T @ slope + 2 * PENALTY * w[:-1], slope.sum())

    weights: Floats = minimize(objective, np.zeros(features.shape[1] + 1), jac=True, method="L-BFGS-B").x
    return weights


def cross_entropy(w: Floats, features: Floats, labels: Floats) -> float:
    scores = features @ w[:-1] + w[-1]
    return float(np.mean(np.logaddexp(0, scores) - labels * scores))


def pick(condition: Condition, feature: int, weight: float) -> int:
    """The pair with the feature's lowest value if its weight is negative, else with the highest."""
    values: NDArray[np.float64] = condition.features[:, feature]
    return int(values.argmin() if weight < 0 else values.argmax())


def _setting(config: Mapping[str, Any]) -> str:
    value: Any = config
    for key in SETTING.split("."):
        value = value.get(key, "-") if isinstance(value, Mapping) else "-"
    return str(value)
