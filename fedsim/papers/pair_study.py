"""PNCS's Table I: which feature of a pair of gradients predicts how good the pair is.

The values come from the traces of runs with `selector=pair_study`. A condition is one round of one
run. The label of a pair is its negated validation loss, scaled to 0 .. 1 within the condition.
Features are standardised over the training conditions. Training and test conditions differ in their
seeds. `fedsim.papers.pair_claims` judges the paper's claims about the table.

A pair is two clients whose gradients could be averaged. It is good if the validation loss after a
step with their mean update is low. The feature cos_p is the signed-power similarity of their
updates (`fedsim.selectors.similarity`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.special import expit

from fedsim.core.arrays import Floats
from fedsim.core.configs import leaves
from fedsim.report.table import Table, make_frame
from fedsim.results.files import TRACE
from fedsim.results.labels import sort_key
from fedsim.results.reading import DamagedError, read_metrics
from fedsim.results.runs import Run, tell_left_out

PENALTY = 1e-3
"""Factor of the squared weights in the loss of a logistic regression."""
TEST_SHARE = 0.3
"""Share of the seeds that are for testing."""
SETTING_KEY = "partition.shards_per_client"
"""The config key whose value is the setting of a condition."""
RANDOM_PAIR = "a random pair"
"""Row of the table for the mean over all pairs."""
COSINE_PREFIX = "cos_"
PNCS_FEATURE = "cos_4"
"""The feature that the paper chooses, with p = 4 by its public summary."""
NOTE = (
    "weight: alone, on standardised features; below 0 the smaller value promises more. rank: by "
    "weight among all in one model. relative loss: of the pair that the feature picks, 0 the best "
    "of its round and 1 the worst, with standard deviation."
)


@dataclass(frozen=True)
class Condition:
    """One round of one run, with P pairs and F features of each pair.

    `features` is [P, F]. `losses` [P] are the validation losses after each pair's step. `setting`
    is the value of `SETTING_KEY` as text.
    """

    seed: int
    setting: str
    round: int
    features: Floats
    losses: Floats

    @property
    def labels(self) -> Floats:
        """Labels [P]: 1 for the pair with the lowest loss, 0 for the pair with the highest loss,
        and 0.5 for all pairs if all losses are equal.

        The relative loss of a pair is 1 minus its label.
        """
        low, high = self.losses.min(), self.losses.max()
        if high == low:
            return np.full(len(self.losses), 0.5)
        return (high - self.losses) / (high - low)


# --- reading traces ---


def read_conditions(runs: Sequence[Run]) -> tuple[list[str], list[Condition]]:
    """Return the names of the features that all runs have, and the conditions.

    Conditions with values that are not finite are skipped. A damaged trace is skipped with a line
    on stderr.
    """
    traces = {}
    for run in runs:
        lines = _trace_of(run)
        if lines:
            traces[run] = lines
    all_lines = [line for lines in traces.values() for line in lines]
    names: list[str] = []
    if all_lines:
        in_all = set.intersection(*(set(line["features"]) for line in all_lines))
        names = [name for name in all_lines[0]["features"] if name in in_all]
    conditions = []
    for run, lines in traces.items():
        setting = str(dict(leaves(run.config)).get(SETTING_KEY, "-"))
        for line in lines:
            features = np.array([line["features"][name] for name in names], dtype=np.float64).T
            losses = np.array(line["loss"], dtype=np.float64)
            if np.isfinite(features).all() and np.isfinite(losses).all():
                conditions.append(Condition(run.seed, setting, line["round"], features, losses))
    return names, conditions


def _trace_of(run: Run) -> list[dict[str, Any]]:
    """Return the lines of a run's trace that have pairs and features; none of a damaged trace."""
    lines = []
    try:
        for line in read_metrics(run.folder, TRACE):
            if not line.get("pairs") or "features" not in line:
                continue
            values = np.array([line["loss"], *line["features"].values()], np.float64)
            if not isinstance(line["round"], int) or values.ndim != 2:
                raise ValueError("a line has not as many values of each feature as losses")
            lines.append(line)
    except (
        DamagedError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        OverflowError,
    ) as error:
        tell_left_out(run.folder / TRACE, error)
        return []
    return lines


def split_by_seed(conditions: Sequence[Condition]) -> tuple[list[Condition], list[Condition]]:
    """Return training and test conditions.

    The last 30 % of the seeds are for testing, at least one. A single seed is for both.
    """
    seeds = sorted({condition.seed for condition in conditions})
    num_testing = max(1, round(TEST_SHARE * len(seeds)))
    testing_seeds = set(seeds[-num_testing:])
    testing = [condition for condition in conditions if condition.seed in testing_seeds]
    training = [condition for condition in conditions if condition.seed not in testing_seeds]
    return training or testing, testing


# --- models of features ---


def standardised(conditions: Sequence[Condition], by: Sequence[Condition]) -> Floats:
    """Return the features of all pairs of `conditions`, standardised, [pairs, F].

    Means and standard deviations are those of the conditions `by`. Features that are constant in
    these become 0.
    """
    values = np.concatenate([condition.features for condition in conditions])
    reference = np.concatenate([condition.features for condition in by])
    deviation = reference.std(0)
    varies = deviation > 1e-12 * np.abs(reference).max(0, initial=0)
    return (values - reference.mean(0)) / np.where(varies, deviation, np.inf)


def labels_of(conditions: Sequence[Condition]) -> Floats:
    """Return the labels of all pairs of `conditions`, [pairs], in the order of `standardised`."""
    return np.concatenate([condition.labels for condition in conditions])


def fit(features: Floats, labels: Floats) -> Floats:
    """Return the weights and, last, the intercept of a logistic regression, [F + 1].

    `features` is [pairs, F]. Labels [pairs] may lie between 0 and 1. The loss has the penalty
    1e-3 |weights|^2.
    """
    from scipy.optimize import minimize  # imported late, because most reports have no traces

    def objective(w: Floats) -> tuple[float, Floats]:
        weights = w[:-1]
        slope = (expit(features @ weights + w[-1]) - labels) / len(labels)
        gradient = features.T @ slope + 2 * PENALTY * weights
        value = cross_entropy(w, features, labels) + float(PENALTY * weights @ weights)
        return value, np.append(gradient, slope.sum())

    return minimize(objective, np.zeros(features.shape[1] + 1), jac=True, method="L-BFGS-B").x


def fit_on(conditions: Sequence[Condition]) -> Floats:
    """Return weights and intercept [F + 1] of a model with all features, fitted on some
    conditions."""
    return fit(standardised(conditions, conditions), labels_of(conditions))


def cross_entropy(w: Floats, features: Floats, labels: Floats) -> float:
    """Return the mean cross-entropy of a model (`fit`) over pairs."""
    scores = features @ w[:-1] + w[-1]
    return float(np.mean(np.logaddexp(0, scores) - labels * scores))


@dataclass(frozen=True)
class Fold:
    """A split into conditions that are `held` out and the `others`.

    Models are fitted and features are chosen on the others, and tested on those held out. `names`
    are the names of the F features.
    """

    names: list[str]
    held: Sequence[Condition]
    others: Sequence[Condition]

    @cached_property
    def alone(self) -> list[Floats]:
        """Weight and intercept of F models that have a single feature each, fitted on the
        others."""
        features, labels = standardised(self.others, self.others), labels_of(self.others)
        return [fit(features[:, [number]], labels) for number in range(len(self.names))]

    def entropies(self, conditions: Sequence[Condition]) -> Floats:
        """Return the cross-entropy [F] of the models in `alone` on some conditions."""
        features, labels = standardised(conditions, self.others), labels_of(conditions)
        values = [cross_entropy(w, features[:, [f]], labels) for f, w in enumerate(self.alone)]
        return np.array(values)

    def relative_losses(self, conditions: Sequence[Condition]) -> Floats:
        """Return the relative loss of the pair that each feature picks, [F, len(conditions)].

        A feature picks the pair of its lowest value if its weight is negative, and of its highest
        value otherwise.
        """
        is_negative = np.array([w[0] < 0 for w in self.alone])
        losses = []
        for condition in conditions:
            lowest, highest = condition.features.argmin(0), condition.features.argmax(0)
            losses.append(1 - condition.labels[np.where(is_negative, lowest, highest)])
        return np.array(losses).T

    @property
    def pncs(self) -> int:
        """The index of the paper's feature in `names`."""
        return self.names.index(PNCS_FEATURE)

    def rival(self, scores: Floats, prefix: str = "") -> int:
        """Return the index of the feature with the lowest of `scores` [F], except the paper's.

        Only features whose names begin with `prefix` count.
        """
        candidates = []
        for number, name in enumerate(self.names):
            if number != self.pncs and name.startswith(prefix):
                candidates.append(number)
        return min(candidates, key=lambda number: float(scores[number]))


# --- tables ---


def make_tables(names: Sequence[str], conditions: Sequence[Condition]) -> list[Table]:
    """Return the table of features, and their relative losses by setting and by round.

    There are no tables without conditions.
    """
    if not conditions:
        return []
    training, testing = split_by_seed(conditions)
    fold = Fold(list(names), testing, training)
    joint = fit_on(training)
    ranks = np.argsort(np.argsort(-np.abs(joint[:-1]))) + 1  # 1: the largest weight
    entropies = fold.entropies(testing)
    of_random = np.array([np.mean(1 - condition.labels) for condition in testing])
    losses: dict[str, Floats] = {RANDOM_PAIR: of_random}
    losses.update(zip(names, fold.relative_losses(testing), strict=True))
    losses = dict(sorted(losses.items(), key=lambda item: float(np.mean(item[1]))))
    rows: list[list[Any]] = []
    for name, values in losses.items():
        cells: list[Any] = [""] * 4
        if name != RANDOM_PAIR:
            number = fold.names.index(name)
            weight, rank = float(fold.alone[number][0]), int(ranks[number])
            cells = [weight, float(joint[number]), rank, float(entropies[number])]
        rows.append([name, *cells, (float(np.mean(values)), float(np.std(values)))])
    sizes = f"Conditions: {len(training)} for fitting, {len(testing)} for testing, split by seed."
    if training is testing:
        sizes = (
            f"Conditions: {len(training)}, all of one seed, fitted and tested on the same. "
            "Several seeds tell more."
        )
    header = ["feature", "weight", "weight among all", "rank", "cross-entropy", "relative loss"]
    formats = {
        "weight": "+.3f",
        "weight among all": "+.3f",
        "cross-entropy": ".4f",
        "relative loss": "{0[0]:.3f} ± {0[1]:.3f}".format,
    }
    title = "Features of pairs of gradients (PNCS, Table I)"
    features = Table("pair_features", title, make_frame(header, rows), formats, f"{sizes} {NOTE}")
    settings = [condition.setting for condition in testing]
    spans = []
    for condition in testing:
        first = (condition.round - 1) // 5 * 5 + 1  # rounds 1 to 5, 6 to 10, ...
        spans.append(f"{first} to {first + 4}")
    return [
        features,
        _losses_by("setting", "Relative loss by shards a client", losses, settings),
        _losses_by("rounds", "Relative loss by rounds", losses, spans),
    ]


def _losses_by(name: str, title: str, losses: Mapping[str, Floats], kinds: Sequence[str]) -> Table:
    """Return the mean relative losses of each feature, with a column for each kind of condition."""
    columns = sorted(set(kinds), key=sort_key)
    rows: list[list[Any]] = []
    for feature, values in losses.items():
        means = [float(np.mean(values[np.array(kinds) == column])) for column in columns]
        rows.append([feature, *means])
    frame = make_frame(["feature", *columns], rows)
    return Table(f"pair_features_by_{name}", title, frame, dict.fromkeys(columns, ".3f"))
