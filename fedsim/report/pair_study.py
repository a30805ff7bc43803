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
from fedsim.report.table import Table
from fedsim.tracking.files import TRACE, read_metrics

PENALTY = 1e-3
TEST_SHARE = 0.3
SETTING = "partition.shards_per_client"


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


def table_one(runs: Sequence[Run]) -> list[Table]:
    """The table over all settings, and relative losses by setting; none where no run has a trace of pairs."""
    names, conditions = read_conditions(runs)
    if not conditions:
        return []
    training, testing = split_by_seed(conditions)
    scale = Scale.of(training)
    joint = fit(scale.apply(training), labels_of(training))
    alone = {name: fit(scale.apply(training)[:, [n]], labels_of(training)) for n, name in enumerate(names)}
    ranks = np.argsort(np.argsort(-np.abs(joint[:-1]))) + 1
    rows, by_setting = [], []
    settings = sorted({c.setting for c in testing}, key=rank)
    for number, name in enumerate(names):
        weight = alone[name]
        entropy = cross_entropy(weight, scale.apply(testing)[:, [number]], labels_of(testing))
        found = [c.relative_loss(pick(c, number, weight[0])) for c in testing]
        spread = f"{np.mean(found):.3f} ± {np.std(found):.3f}"
        rows.append([name, f"{weight[0]:+.3f}", f"{joint[number]:+.3f}", str(ranks[number]), f"{entropy:.4f}", spread])
        by_setting.append([name, *(_mean_of(testing, found, setting) for setting in settings)])
    random = [float(np.mean(1 - c.labels)) for c in testing]
    rows.append(["a random pair", "", "", "", "", f"{np.mean(random):.3f} ± {np.std(random):.3f}"])
    by_setting.append(["a random pair", *(_mean_of(testing, random, setting) for setting in settings)])
    order = sorted(range(len(rows)), key=lambda n: float(rows[n][-1].partition(" ")[0]))
    note = (
        f"{len(training)} conditions for fitting, {len(testing)} for testing, split by seed. weight: alone, on"
        " standardised features; below 0 the smaller value promises more. rank: by weight among all in one model."
        " relative loss: of the pair that the feature picks, 0 the best of its round and 1 the worst, with standard"
        " deviation."
    )
    head = ["feature", "weight", "weight among all", "rank", "cross-entropy", "relative loss"]
    return [
        Table("pair_features", "Features of pairs of gradients (PNCS, Table I)", head, [rows[n] for n in order], note),
        Table(
            "pair_features_by_setting",
            "Relative loss by shards a client",
            ["feature", *settings],
            [by_setting[n] for n in order],
        ),
    ]


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


def _mean_of(conditions: Sequence[Condition], values: Sequence[float], setting: str) -> str:
    chosen = [v for c, v in zip(conditions, values, strict=True) if c.setting == setting]
    return f"{np.mean(chosen):.3f}"


def _setting(config: Mapping[str, Any]) -> str:
    value: Any = config
    for key in SETTING.split("."):
        value = value.get(key, "-") if isinstance(value, Mapping) else "-"
    return str(value)
