"""PNCS's Table I from the traces of `selector=pair_study`: which feature of a pair of gradients predicts its quality.

A condition is one round of one run. The label of a pair is its negated validation loss, min-max scaled within the
condition; features are standardised over the training conditions. Training and test conditions are split by seed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import expit

from fedsim.report.groups import sort_key
from fedsim.report.runs import Floats, Run
from fedsim.report.tables.table import Table
from fedsim.tracking.files import TRACE, read_metrics

PENALTY = 1e-3
TEST_SHARE = 0.3
SETTING_KEY = "partition.shards_per_client"
Losses = list[float]


@dataclass(frozen=True)
class Condition:
    """One round of one run: `features` [P, F] of its P pairs, and validation `losses` [P] after each pair's step."""

    seed: int
    setting: str
    round: int
    features: Floats
    losses: Floats

    @property
    def labels(self) -> Floats:
        """Labels [P]: 1 for the pair with the lowest loss, 0 for that with the highest; .5 if all losses are equal."""
        low, high = self.losses.min(), self.losses.max()
        return np.full(len(self.losses), 0.5) if high == low else (high - self.losses) / (high - low)

    def relative_loss(self, pair: int) -> float:
        """The relative loss of a pair: 0 for the best pair, 1 for the worst."""
        return float(1 - self.labels[pair])


RANDOM_PAIR = "a random pair"


def make_tables(runs: Sequence[Run]) -> list[Table]:
    """Tables of the features over all conditions, and of relative losses by setting and by round; [] without traces."""
    names, conditions = read_conditions(runs)
    if not conditions:
        return []
    training, testing = split_by_seed(conditions)
    scale = Scale.of(training)
    features, labels = scale.apply(training), labels_of(training)
    joint = fit(features, labels)
    ranks = np.argsort(np.argsort(-np.abs(joint[:-1]))) + 1
    cells: dict[str, list[str]] = {RANDOM_PAIR: [""] * 4}
    losses: dict[str, Losses] = {RANDOM_PAIR: [float(np.mean(1 - c.labels)) for c in testing]}
    for number, name in enumerate(names):
        single = fit(features[:, [number]], labels)
        entropy = cross_entropy(single, scale.apply(testing)[:, [number]], labels_of(testing))
        cells[name] = [f"{single[0]:+.3f}", f"{joint[number]:+.3f}", str(ranks[number]), f"{entropy:.4f}"]
        losses[name] = [c.relative_loss(pick(c, number, single[0])) for c in testing]
    losses = dict(sorted(losses.items(), key=lambda item: float(np.mean(item[1]))))
    return [
        _features(cells, losses, _split(training, testing)),
        _losses_by("setting", "Relative loss by shards a client", losses, [c.setting for c in testing]),
        _losses_by("rounds", "Relative loss by rounds", losses, [_round_range(c.round) for c in testing]),
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


def _split(training: Sequence[Condition], testing: Sequence[Condition]) -> str:
    if training is testing:
        return f"{len(training)} conditions of one seed, fitted and tested on the same: several seeds tell more."
    return f"{len(training)} conditions for fitting, {len(testing)} for testing, split by seed."


def _losses_by(name: str, title: str, losses: Mapping[str, Losses], kinds: Sequence[str]) -> Table:
    """A table of mean relative losses per feature, with one column for each of the `kinds` of conditions."""
    columns = sorted(set(kinds), key=sort_key)
    rows = [
        [feature, *(f"{np.mean([v for v, kind in zip(found, kinds, strict=True) if kind == c]):.3f}" for c in columns)]
        for feature, found in losses.items()
    ]
    return Table(f"pair_features_by_{name}", title, ["feature", *columns], rows)


def _round_range(round: int) -> str:
    first = (round - 1) // 5 * 5 + 1
    return f"{first} to {first + 4}"


def read_conditions(runs: Sequence[Run]) -> tuple[list[str], list[Condition]]:
    """The names of the features that all runs have, and all conditions of all runs whose values are finite."""
    found = [(run, line) for run in runs for line in read_metrics(run.folder, TRACE) if line.get("pairs")]
    found = [(run, line) for run, line in found if "features" in line]
    common = set.intersection(*(set(line["features"]) for _, line in found)) if found else set()
    names = [name for name in (found[0][1]["features"] if found else ()) if name in common]
    conditions = []
    for run, line in found:
        features = np.array([line["features"][name] for name in names], dtype=np.float64).T
        losses = np.array(line["loss"], dtype=np.float64)
        if np.isfinite(features).all() and np.isfinite(losses).all():
            conditions.append(Condition(run.seed, _setting(run.config), line["round"], features, losses))
    return names, conditions


def split_by_seed(conditions: Sequence[Condition]) -> tuple[list[Condition], list[Condition]]:
    """Training and test conditions: the last 30 % of the seeds, at least one, are for testing.

    A single seed is for both.
    """
    seeds = sorted({c.seed for c in conditions})
    held = set(seeds[-max(1, round(TEST_SHARE * len(seeds))) :])
    testing = [c for c in conditions if c.seed in held]
    return [c for c in conditions if c.seed not in held] or testing, testing


@dataclass(frozen=True)
class Scale:
    """Standardisation by the mean and standard deviation [F] of every feature; constant features become 0."""

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
    """Weights and, last, intercept [F + 1] of a logistic regression with soft labels and penalty 1e-3 |weights|^2."""

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
    """The pair with the lowest value of `feature` if its `weight` is negative, else with the highest."""
    values: NDArray[np.float64] = condition.features[:, feature]
    return int(values.argmin() if weight < 0 else values.argmax())


def _setting(config: Mapping[str, Any]) -> str:
    value: Any = config
    for key in SETTING_KEY.split("."):
        value = value.get(key, "-") if isinstance(value, Mapping) else "-"
    return str(value)
