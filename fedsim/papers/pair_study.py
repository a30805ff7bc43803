"""PNCS's Table I from the traces of `selector=pair_study`: which feature of a pair of gradients
predicts its quality.

A condition is one round of one run. The label of a pair is its negated validation loss, min-max
scaled within the condition; features are standardised over the training conditions. Training and
test conditions are split by seed.

Claims about the table are judged as `RULE` says. They were written after that of the runs at
`scale=small` was seen.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from scipy.special import expit

from fedsim.core.arrays import Floats
from fedsim.core.configs import leaves
from fedsim.papers.examine import Evidence, below_zero, holds_for_most
from fedsim.papers.judge import Judged, corrected
from fedsim.papers.published import Claim
from fedsim.papers.tables import claims
from fedsim.report.table import Table, make_frame
from fedsim.results.files import TRACE
from fedsim.results.frames import sort_key
from fedsim.results.reading import DamagedError, read_metrics
from fedsim.results.runs import Run, tell_left_out
from fedsim.results.statistics import MIN_SEEDS, Share, differences

PENALTY = 1e-3
TEST_SHARE = 0.3
SETTING_KEY = "partition.shards_per_client"
RANDOM_PAIR = "a random pair"


@dataclass(frozen=True)
class Condition:
    """One round of one run: `features` [P, F] of its P pairs, and validation `losses` [P] after
    each pair's step."""

    seed: int
    setting: str
    round: int
    features: Floats
    losses: Floats

    @property
    def labels(self) -> Floats:
        """Labels [P]: 1 for the pair with the lowest loss, 0 for that with the highest; .5 if all
        losses are equal. A pair's relative loss is 1 minus its label."""
        low, high = self.losses.min(), self.losses.max()
        return (
            np.full(len(self.losses), 0.5) if high == low else (high - self.losses) / (high - low)
        )


def read_conditions(runs: Sequence[Run]) -> tuple[list[str], list[Condition]]:
    """The names of the features that all runs have, and all conditions of all runs whose values are
    finite. A damaged trace is left out with a line."""
    traces = [(run, lines) for run in runs if (lines := _trace_of(run))]
    common = (
        set.intersection(*(set(line["features"]) for _, lines in traces for line in lines))
        if traces
        else set()
    )
    names = [name for name in (traces[0][1][0]["features"] if traces else ()) if name in common]
    conditions = []
    for run, lines in traces:
        setting = str(dict(leaves(run.config)).get(SETTING_KEY, "-"))
        for line in lines:
            features = np.array([line["features"][name] for name in names], dtype=np.float64).T
            losses = np.array(line["loss"], dtype=np.float64)
            if np.isfinite(features).all() and np.isfinite(losses).all():
                conditions.append(Condition(run.seed, setting, line["round"], features, losses))
    return names, conditions


def _trace_of(run: Run) -> list[dict[str, Any]]:
    """The lines of a run's trace that have pairs, each with as many values of each feature as
    losses."""
    try:
        lines = [
            line
            for line in read_metrics(run.folder, TRACE)
            if line.get("pairs") and "features" in line
        ]
        for line in lines:
            values = [line["loss"], *line["features"].values()]
            if not isinstance(line["round"], int) or np.array(values, np.float64).shape != (
                len(values),
                len(values[0]),
            ):
                raise ValueError("a line has not as many values of each feature as losses")
        return lines
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


def split_by_seed(conditions: Sequence[Condition]) -> tuple[list[Condition], list[Condition]]:
    """Training and test conditions: the last 30 % of the seeds are for testing, at least one; a
    single one for both."""
    seeds = sorted({c.seed for c in conditions})
    held = set(seeds[-max(1, round(TEST_SHARE * len(seeds))) :])
    testing = [c for c in conditions if c.seed in held]
    return [c for c in conditions if c.seed not in held] or testing, testing


def standardised(conditions: Sequence[Condition], by: Sequence[Condition]) -> Floats:
    """All features by the mean and the standard deviation of those of `by`; features constant there
    become 0."""
    values, given = (np.concatenate([c.features for c in some]) for some in (conditions, by))
    deviation = given.std(0)
    varies = deviation > 1e-12 * np.abs(given).max(0, initial=0)
    return (values - given.mean(0)) / np.where(varies, deviation, np.inf)


def labels_of(conditions: Sequence[Condition]) -> Floats:
    return np.concatenate([c.labels for c in conditions])


def fit(features: Floats, labels: Floats) -> Floats:
    """Weights and, last, intercept [F + 1] of a logistic regression with soft labels and penalty
    1e-3 |weights|^2."""

    from scipy.optimize import minimize  # here: most reports have no traces

    def objective(w: Floats) -> tuple[float, Floats]:
        scores = features @ w[:-1] + w[-1]
        slope = (expit(scores) - labels) / len(labels)
        value = cross_entropy(w, features, labels) + float(PENALTY * w[:-1] @ w[:-1])
        return value, np.append(features.T @ slope + 2 * PENALTY * w[:-1], slope.sum())

    return minimize(objective, np.zeros(features.shape[1] + 1), jac=True, method="L-BFGS-B").x


def cross_entropy(w: Floats, features: Floats, labels: Floats) -> float:
    scores = features @ w[:-1] + w[-1]
    return float(np.mean(np.logaddexp(0, scores) - labels * scores))


PNCS_FEATURE, COSINE_PREFIX = "cos_4", "cos_"
"""The feature that the paper chooses (p = 4 by its public summary), and the name prefix of cosines
for other p."""


@dataclass(frozen=True)
class Fold:
    """Conditions that are `held` out, and the `others`, by which features are judged; the F
    features have `names`."""

    names: list[str]
    held: Sequence[Condition]
    others: Sequence[Condition]

    @cached_property
    def alone(self) -> list[Floats]:
        """Weight and intercept of the model of each single feature, fitted on the others,
        [F][2]."""
        features, labels = standardised(self.others, self.others), labels_of(self.others)
        return [fit(features[:, [number]], labels) for number in range(len(self.names))]

    def entropies(self, conditions: Sequence[Condition]) -> Floats:
        """Cross-entropy [F] of the model of each single feature."""
        features, labels = standardised(conditions, self.others), labels_of(conditions)
        return np.array(
            [cross_entropy(w, features[:, [number]], labels) for number, w in enumerate(self.alone)]
        )

    def relative_losses(self, conditions: Sequence[Condition]) -> Floats:
        """Relative losses [F, len(conditions)] of the pair that each feature picks in each
        condition: that of its lowest value if its weight is negative, else of its highest."""
        negative = np.array([w[0] < 0 for w in self.alone])
        picked = [
            np.where(negative, c.features.argmin(0), c.features.argmax(0)) for c in conditions
        ]
        return np.array(
            [1 - c.labels[pairs] for c, pairs in zip(conditions, picked, strict=True)]
        ).T

    @property
    def pncs(self) -> int:
        return self.names.index(PNCS_FEATURE)

    def rival(self, score: Floats, prefix: str = "") -> int:
        """The feature with the lowest `score` [F], cos_4 excluded, among those whose names begin
        so."""
        candidates = [
            f for f, name in enumerate(self.names) if f != self.pncs and name.startswith(prefix)
        ]
        return min(candidates, key=lambda f: float(score[f]))


def make_tables(names: Sequence[str], conditions: Sequence[Condition]) -> list[Table]:
    """Tables of the features over all `conditions`, and of relative losses by setting and by round;
    [] without them."""
    if not conditions:
        return []
    training, testing = split_by_seed(conditions)
    fold = Fold(list(names), testing, training)
    joint = fit(standardised(training, training), labels_of(training))
    ranks = np.argsort(np.argsort(-np.abs(joint[:-1]))) + 1
    entropies, relative = fold.entropies(testing), fold.relative_losses(testing)
    cells: dict[str, list[Any]] = {RANDOM_PAIR: [""] * 4}
    losses: dict[str, Floats] = {RANDOM_PAIR: np.array([np.mean(1 - c.labels) for c in testing])}
    for feature, name in enumerate(names):
        weight, rank = float(fold.alone[feature][0]), int(ranks[feature])
        cells[name] = [weight, float(joint[feature]), rank, float(entropies[feature])]
        losses[name] = relative[feature]
    losses = dict(sorted(losses.items(), key=lambda item: float(np.mean(item[1]))))
    rows = [
        [name, *cells[name], (float(np.mean(values)), float(np.std(values)))]
        for name, values in losses.items()
    ]
    sizes = f"{len(training)} conditions for fitting, {len(testing)} for testing, split by seed."
    if training is testing:
        sizes = f"{len(training)} conditions of one seed, fitted and tested on the same: several seeds tell more."
    head = ["feature", "weight", "weight among all", "rank", "cross-entropy", "relative loss"]
    formats = {
        "weight": "+.3f",
        "weight among all": "+.3f",
        "cross-entropy": ".4f",
        "relative loss": "{0[0]:.3f} ± {0[1]:.3f}".format,
    }
    rounds = [(c.round - 1) // 5 * 5 + 1 for c in testing]
    return [
        Table(
            "pair_features",
            "Features of pairs of gradients (PNCS, Table I)",
            make_frame(head, rows),
            formats,
            f"{sizes} {NOTE}",
        ),
        _losses_by(
            "setting", "Relative loss by shards a client", losses, [c.setting for c in testing]
        ),
        _losses_by(
            "rounds",
            "Relative loss by rounds",
            losses,
            [f"{first} to {first + 4}" for first in rounds],
        ),
    ]


NOTE = (
    "weight: alone, on standardised features; below 0 the smaller value promises more. rank: by weight among all in one"
    " model. relative loss: of the pair that the feature picks, 0 the best of its round and 1 the worst, with standard"
    " deviation."
)


def _losses_by(name: str, title: str, losses: Mapping[str, Floats], kinds: Sequence[str]) -> Table:
    """A table of mean relative losses per feature, with one column for each of the `kinds` of
    conditions."""
    columns = sorted(set(kinds), key=sort_key)
    rows = [
        [
            feature,
            *(float(np.mean(found[np.array(kinds) == column])) for column in columns),
        ]
        for feature, found in losses.items()
    ]
    frame = make_frame(["feature", *columns], rows)
    return Table(f"pair_features_by_{name}", title, frame, dict.fromkeys(columns, ".3f"))


RULE = (
    "Every seed is held out once; directions and rivals are chosen on the others. Two-sided t tests over the held-out"
    " seeds, for the claim and against it. Holm's correction is for those for and those against by themselves: of one"
    " claim in all its settings, and for the stricter reading (over the paper) of all claims here. A claim on a rank is"
    " about the share of seeds for which it holds."
)


def judge_conditions(names: Sequence[str], conditions: Sequence[Condition]) -> list[Judged]:
    """Judge the paper's claims on `conditions`, whose features have the given `names`; [] without
    conditions."""
    if not conditions:
        return []
    table = replace(_claim("best", "Table I"), id="pncs.table1")
    if PNCS_FEATURE not in names:
        return [Judged(table, None, f"{PNCS_FEATURE} was not measured")]
    seeds = sorted({c.seed for c in conditions})
    if len(seeds) < MIN_SEEDS:
        return [Judged(table, Evidence(None), f"{len(seeds)} seeds")]
    held = [[c for c in conditions if c.seed == seed] for seed in seeds]
    others = [[c for c in conditions if c.seed != seed] for seed in seeds]
    folds = [Fold(list(names), *parts) for parts in zip(held, others, strict=True)]
    settings = sorted({c.setting for c in conditions}, key=sort_key)
    means, against = (_mean_loss, _mean_loss), "difference to {}"
    power = Judged(_claim("power"), None, "no other power was measured")
    if any(name.startswith(COSINE_PREFIX) and name != PNCS_FEATURE for name in names):
        power = _against_rival("power", folds, means, against, COSINE_PREFIX)
    judged = [
        _negative(folds),
        *(_against_random(folds, setting) for setting in [None, *settings]),
        _rank(folds),
        _against_rival("best", folds, (Fold.entropies, Fold.entropies), against),
        power,
        _against_rival("smaller", folds, means, "cos_4 minus {}", above=True),
        _against_rival("wider", folds, (_mean_loss, _spread), "deviation of cos_4 minus {}"),
    ]
    families = [one.printed.id.split(".")[2] for one in judged]  # the claim, without a setting
    return corrected(judged, families, ["Table I"] * len(judged))


def _claim(name: str, where: str = "V-B", setting: str | None = None) -> Claim:
    place, words = ("", "") if setting is None else (f".{setting}", f" (shards: {setting})")
    return Claim(f"pncs.table1.{name}{place}", where, TEXTS[name] + words, {}, "")


def claims_table(judged: Sequence[Judged]) -> Table:
    """The judged claims as a table."""
    table = claims(judged)
    values = table.values.rename(columns={"ours [95 %]": "ours"})
    title = "Claims on PNCS's Table I (written after runs had been seen)"
    return Table("pair_claims", title, values, table.formats, RULE, styles=table.styles)


TEXTS = {
    "negative": "the weight of cos_4 is negative: the more opposed two gradients are, the better the pair",
    "random": "the pair with the most negative cos_4 is better than a random pair",
    "rank": "cos_4 is first in the importance of features (size of its weight among all)",
    "best": "cos_4 is the most predictive single feature (cross-entropy of the model with it alone)",
    "power": "of the cosines by power norm, cos_4 picks the best pairs (relative loss)",
    "smaller": "another feature has a smaller relative loss than cos_4",
    "wider": "the feature of smallest relative loss has a higher deviation than cos_4",
}


def _negative(folds: Sequence[Fold]) -> Judged:
    values = [
        (standardised(fold.held, fold.held)[:, [fold.pncs]], labels_of(fold.held)) for fold in folds
    ]
    weights = [float(fit(features, labels)[0]) for features, labels in values]
    return _tested_claim("negative", weights, "weight of each seed's own model")


def _against_random(folds: Sequence[Fold], setting: str | None) -> Judged:
    """The pair of lowest cos_4 against the mean pair, in all conditions or those of one
    `setting`."""
    gains = []
    for fold in folds:
        chosen = [c for c in fold.held if setting in (None, c.setting)]
        found = [
            float(np.mean(c.labels) - c.labels[c.features[:, fold.pncs].argmin()]) for c in chosen
        ]
        gains += [float(np.mean(found))] if found else []
    return _tested_claim("random", gains, "difference in relative loss", setting=setting)


def _rank(folds: Sequence[Fold]) -> Judged:
    """Whether cos_4 has the largest weight in the model of each seed's own data, which makes seeds
    independent."""
    ranks = []
    for fold in folds:
        weights = np.abs(fit(standardised(fold.held, fold.held), labels_of(fold.held))[:-1])
        ranks.append(1 + int((weights > weights[fold.pncs]).sum()))
    found = holds_for_most(Share(ranks.count(1), len(ranks)))
    detail = f"rank {min(ranks)} to {max(ranks)} of {len(folds[0].names)}"
    return Judged(_claim("rank", "Table I"), found, detail)


def _mean_loss(fold: Fold, conditions: Sequence[Condition]) -> Floats:
    return fold.relative_losses(conditions).mean(1)


def _spread(fold: Fold, conditions: Sequence[Condition]) -> Floats:
    return fold.relative_losses(conditions).std(1)


Score = Callable[[Fold, Sequence[Condition]], Floats]
"""A number of each feature on some conditions, [F]."""


def _against_rival(
    name: str,
    folds: Sequence[Fold],
    by: tuple[Score, Score],
    detail: str,
    prefix: str = "",
    *,
    above: bool = False,
) -> Judged:
    """cos_4 minus its rival, one value per held-out seed: the best other feature `by` the first
    score on the other seeds; they are compared by the second."""
    values, names = [], set()
    for fold in folds:
        rival, found = fold.rival(by[0](fold, fold.others), prefix), by[1](fold, fold.held)
        values.append(float(found[fold.pncs] - found[rival]))
        names.add(fold.names[rival])
    return _tested_claim(name, values, detail.format(" or ".join(sorted(names))), above=above)


def _tested_claim(
    name: str,
    values: Sequence[float],
    detail: str,
    *,
    setting: str | None = None,
    above: bool = False,
) -> Judged:
    """Test the claim that the mean of `values`, one per seed, is below 0, or `above` it."""
    return Judged(
        _claim(name, setting=setting), below_zero(differences(values), above=above), detail
    )
