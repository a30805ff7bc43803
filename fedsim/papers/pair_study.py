"""PNCS's Table I: which feature of a pair of gradients predicts how good the pair is.

The values come from the traces of runs with `selector=pair_study`. A condition is one round of one
run. Features are standardised over the training conditions. Training and testing conditions differ
in their seeds. `fedsim.papers.pair_claims` judges the paper's claims about the table.

A pair is two clients whose gradients could be averaged. It is good if the validation loss after a
step with their mean update is low. The relative loss of a pair is this loss, scaled within the
condition: 0 for the best pair and 1 for the worst. A model predicts the label of a pair, which is 1
minus its relative loss. The feature cos_p is the signed-power similarity of the two updates
(`fedsim.selectors.similarity`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
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
ROUNDS_IN_SPAN = 5
"""Number of rounds whose relative losses are averaged in a column of the table by rounds."""
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
ERRORS_OF_TRACES = (
    DamagedError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    OverflowError,
)
"""Errors that reading a damaged trace may raise: a line may hold any JSON."""


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
        """Labels [P], from 1 for the lowest loss to 0 for the highest; 0.5 if all are equal."""
        low, high = self.losses.min(), self.losses.max()
        if high == low:
            return np.full(len(self.losses), 0.5)
        return (high - self.losses) / (high - low)

    @property
    def relative_losses(self) -> Floats:
        """Relative losses [P], from 0 for the best pair to 1 for the worst."""
        return 1 - self.labels


def read_conditions(runs: Sequence[Run]) -> tuple[list[str], list[Condition]]:
    """Return the names of the features that all runs have, and the conditions.

    If runs have no feature in common, there are no conditions. Conditions with values that are not
    finite are skipped. A damaged trace is skipped with a line on stderr.
    """
    traces = {run: _trace_of(run) for run in runs}
    all_lines = list(chain.from_iterable(traces.values()))
    names = list(all_lines[0]["features"]) if all_lines else []
    for line in all_lines:
        names = [name for name in names if name in line["features"]]
    if not names:
        return [], []
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
    except ERRORS_OF_TRACES as error:
        tell_left_out(run.folder / TRACE, error)
        return []
    return lines


def split_by_seed(conditions: Sequence[Condition]) -> tuple[list[Condition], list[Condition]]:
    """Return training and testing conditions.

    The last 30 % of the seeds are for testing, at least one. A single seed is for both.
    """
    seeds = sorted({condition.seed for condition in conditions})
    num_testing = max(1, round(TEST_SHARE * len(seeds)))
    first_seed = seeds[-num_testing]
    testing = [condition for condition in conditions if condition.seed >= first_seed]
    training = [condition for condition in conditions if condition.seed < first_seed]
    return training or testing, testing


@dataclass(frozen=True)
class Model:
    """A logistic regression that predicts labels from F features, with `weights` [F]."""

    weights: Floats
    intercept: float

    def scores(self, features: Floats) -> Floats:
        """Return the logits [pairs] of the labels, for features [pairs, F]."""
        return features @ self.weights + self.intercept

    def cross_entropy(self, features: Floats, labels: Floats) -> float:
        """Return the mean cross-entropy for features [pairs, F] and labels [pairs]."""
        scores = self.scores(features)
        return float(np.mean(np.logaddexp(0, scores) - labels * scores))


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


def fit(features: Floats, labels: Floats) -> Model:
    """Return the model for features [pairs, F] and labels [pairs] between 0 and 1.

    It minimises the mean cross-entropy plus 1e-3 |weights|^2.
    """
    from scipy.optimize import minimize  # imported late, because most reports have no traces

    def objective(parameters: Floats) -> tuple[float, Floats]:
        weights = parameters[:-1]
        model = Model(weights, parameters[-1])
        slopes = (expit(model.scores(features)) - labels) / len(labels)
        gradient = features.T @ slopes + 2 * PENALTY * weights
        loss = model.cross_entropy(features, labels) + float(PENALTY * weights @ weights)
        return loss, np.append(gradient, slopes.sum())

    start = np.zeros(features.shape[1] + 1)
    parameters = minimize(objective, start, jac=True, method="L-BFGS-B").x
    return Model(parameters[:-1], parameters[-1])


def fit_on(conditions: Sequence[Condition]) -> Model:
    """Return the model with all features, fitted on some conditions."""
    return fit(standardised(conditions, conditions), labels_of(conditions))


@dataclass(frozen=True)
class Fold:
    """A split of conditions into those for `training` and those for `testing`.

    Models are fitted and features are chosen on the former. `names` are those of the F features.
    """

    names: Sequence[str]
    training: Sequence[Condition]
    testing: Sequence[Condition]

    @cached_property
    def single_models(self) -> list[Model]:
        """The models that have a single feature each, fitted on the training conditions, [F]."""
        features = standardised(self.training, self.training)
        labels = labels_of(self.training)
        return [fit(features[:, [index]], labels) for index in range(len(self.names))]

    def cross_entropies(self, conditions: Sequence[Condition]) -> Floats:
        """Return the cross-entropy [F] of each of the `single_models` on some conditions."""
        features, labels = standardised(conditions, self.training), labels_of(conditions)
        models = enumerate(self.single_models)
        return np.array([model.cross_entropy(features[:, [f]], labels) for f, model in models])

    def relative_losses(self, conditions: Sequence[Condition]) -> Floats:
        """Return the relative loss of the pair that each feature picks, [F, len(conditions)].

        A feature picks the pair of its lowest value if the weight of its model is negative, and of
        its highest value otherwise.
        """
        picks_lowest = np.array([model.weights[0] < 0 for model in self.single_models])
        losses = []
        for condition in conditions:
            lowest, highest = condition.features.argmin(0), condition.features.argmax(0)
            picked_pairs = np.where(picks_lowest, lowest, highest)
            losses.append(condition.relative_losses[picked_pairs])
        return np.array(losses).T

    @property
    def pncs_index(self) -> int:
        """The index of the paper's feature in `names`."""
        return self.names.index(PNCS_FEATURE)

    def rival(self, scores: Floats, prefix: str = "") -> int:
        """Return the index of the feature with the lowest of `scores` [F], except the paper's.

        Only features whose names begin with `prefix` count.
        """
        rivals = [name for name in self.names if name != PNCS_FEATURE and name.startswith(prefix)]
        return min(map(self.names.index, rivals), key=scores.item)


def make_tables(names: Sequence[str], conditions: Sequence[Condition]) -> list[Table]:
    """Return the table of features, and their relative losses by setting and by round.

    There are no tables without conditions.
    """
    if not conditions:
        return []
    fold = Fold(names, *split_by_seed(conditions))
    losses = {RANDOM_PAIR: np.array([np.mean(item.relative_losses) for item in fold.testing])}
    losses.update(zip(names, fold.relative_losses(fold.testing), strict=True))
    best_first = dict(sorted(losses.items(), key=lambda item: np.mean(item[1])))
    settings = [condition.setting for condition in fold.testing]
    spans = [_span(condition.round) for condition in fold.testing]
    return [
        _features_table(fold, best_first),
        _losses_by("setting", "Relative loss by shards a client", best_first, settings),
        _losses_by("rounds", "Relative loss by rounds", best_first, spans),
    ]


def _span(round: int) -> str:
    """Return the span of rounds that a round is in: "1 to 5", "6 to 10", ..."""
    first = (round - 1) // ROUNDS_IN_SPAN * ROUNDS_IN_SPAN + 1
    return f"{first} to {first + ROUNDS_IN_SPAN - 1}"


def _features_table(fold: Fold, losses: Mapping[str, Floats]) -> Table:
    """Return a table with a row for each key of `losses`: a feature, or `RANDOM_PAIR`.

    `losses` has the relative loss in each testing condition.
    """
    joint_model = fit_on(fold.training)
    by_weight = np.argsort(-np.abs(joint_model.weights)).tolist()  # features, largest weight first
    cross_entropies = fold.cross_entropies(fold.testing)
    rows: list[list[Any]] = []
    for name, values in losses.items():
        cells: list[Any] = ["", "", "", ""]
        if name != RANDOM_PAIR:
            index = fold.names.index(name)
            cells = [
                fold.single_models[index].weights[0],
                joint_model.weights[index],
                by_weight.index(index) + 1,
                cross_entropies[index],
            ]
        rows.append([name, *cells, (np.mean(values), np.std(values))])
    sizes = (
        f"Conditions: {len(fold.training)} for fitting, {len(fold.testing)} for testing, split by "
        "seed."
    )
    if fold.training is fold.testing:
        sizes = (
            f"Conditions: {len(fold.training)}, all of one seed, fitted and tested on the same. "
            "Several seeds tell more."
        )
    header = ["feature", "weight", "weight among all", "rank", "cross-entropy", "relative loss"]
    formats = {
        "weight": "+.3f",
        "weight among all": "+.3f",
        "cross-entropy": ".4f",
        "relative loss": _show_loss,
    }
    title = "Features of pairs of gradients (PNCS, Table I)"
    return Table("pair_features", title, make_frame(header, rows), formats, f"{sizes} {NOTE}")


def _show_loss(mean_and_deviation: tuple[float, float]) -> str:
    return "{:.3f} ± {:.3f}".format(*mean_and_deviation)


def _losses_by(name: str, title: str, losses: Mapping[str, Floats], kinds: Sequence[str]) -> Table:
    """Return a table of mean relative losses: a row for each feature, and a column for each kind of
    condition.

    `losses` and `kinds` have the losses and the kinds of the same conditions.
    """
    columns = sorted(set(kinds), key=sort_key)
    rows: list[list[Any]] = []
    for feature, values in losses.items():
        means = [np.mean(values[np.array(kinds) == column]) for column in columns]
        rows.append([feature, *means])
    frame = make_frame(["feature", *columns], rows)
    return Table(f"pair_features_by_{name}", title, frame, dict.fromkeys(columns, ".3f"))
