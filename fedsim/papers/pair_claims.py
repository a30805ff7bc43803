"""Judgements of PNCS's claims about Table I, by the conditions of the pair study (`pair_study`).

`RULE` says how they are judged. It was written after the runs at `scale=small` had been seen. cos_4
is the feature that the paper chooses. Its rival is the best other feature.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from fedsim.core.arrays import Floats
from fedsim.papers.evidence import Evidence, Sign, majority_evidence, sign_evidence
from fedsim.papers.judge import Judgement, correct_within_families
from fedsim.papers.pair_study import (
    COSINE_PREFIX,
    PNCS_FEATURE,
    Condition,
    Fold,
    fit,
    fit_on,
    labels_of,
    standardised,
)
from fedsim.papers.published import Claim
from fedsim.papers.tables import claims_table
from fedsim.report.table import Table
from fedsim.results.labels import sort_key
from fedsim.results.statistics import MIN_SEEDS, Share, differences

RULE = (
    "Every seed is held out once; directions and rivals are chosen on the others. Two-sided t "
    "tests over the held-out seeds, for the claim and against it. The p-values for claims and "
    "those against claims are corrected separately (Holm): over the settings of one claim, and "
    "for the stricter reading (over the paper) over all claims here. A claim on a rank is about "
    "the share of seeds for which it holds."
)
TEXTS = {
    "negative": "the weight of cos_4 is negative: the more opposed two gradients are, the better "
    "the pair",
    "random": "the pair with the most negative cos_4 is better than a random pair",
    "rank": "cos_4 is first in the importance of features (size of its weight among all)",
    "best": "cos_4 is the most predictive single feature (cross-entropy of the model with it "
    "alone)",
    "power": "of the cosines by power norm, cos_4 picks the best pairs (relative loss)",
    "smaller": "another feature has a smaller relative loss than cos_4",
    "wider": "the feature of smallest relative loss has a higher deviation than cos_4",
}
Score = Callable[[Fold, Sequence[Condition]], Floats]
"""A function that returns a number for each feature on some conditions, [F]; smaller is better."""


def judge_conditions(names: Sequence[str], conditions: Sequence[Condition]) -> list[Judgement]:
    """Return the judgements of all claims by these conditions, whose features have these `names`.

    There are none without conditions.
    """
    if not conditions:
        return []
    table = replace(_claim("best", "Table I"), id="pncs.table1")
    if PNCS_FEATURE not in names:
        return [Judgement(table, None, f"{PNCS_FEATURE} was not measured")]
    seeds = sorted({condition.seed for condition in conditions})
    if len(seeds) < MIN_SEEDS:
        return [Judgement(table, Evidence(None), f"{len(seeds)} seeds")]
    folds = []
    for seed in seeds:
        held = [condition for condition in conditions if condition.seed == seed]
        others = [condition for condition in conditions if condition.seed != seed]
        folds.append(Fold(list(names), held, others))
    settings = sorted({condition.setting for condition in conditions}, key=sort_key)
    judged = [_negative(folds), _against_random(folds, None)]
    judged += [_against_random(folds, setting) for setting in settings]
    judged += [
        _rank(folds),
        _against_rival("best", folds, Fold.entropies, Fold.entropies, "difference to {}"),
        _power(folds),
        _against_rival("smaller", folds, _mean_loss, _mean_loss, "cos_4 minus {}", sign="positive"),
        _against_rival("wider", folds, _mean_loss, _spread, "deviation of cos_4 minus {}"),
    ]
    families = [row.printed.id.split(".")[2] for row in judged]  # the claim without its setting
    return correct_within_families(judged, families, ["Table I"] * len(judged))


def pair_claims_table(judged: Sequence[Judgement]) -> Table:
    """Return the judged claims as a table."""
    table = claims_table(judged)
    values = table.values.rename(columns={"ours [95 %]": "ours"})
    title = "Claims on PNCS's Table I (written after runs had been seen)"
    return Table("pair_claims", title, values, table.formats, RULE, styles=table.styles)


def _claim(name: str, where: str = "V-B", setting: str | None = None) -> Claim:
    """Return one of the claims in `TEXTS`, about all settings or one."""
    identity = f"pncs.table1.{name}"
    text = TEXTS[name]
    if setting is not None:
        identity += f".{setting}"
        text += f" (shards: {setting})"
    return Claim(identity, where, text, {}, "")


def _negative(folds: Sequence[Fold]) -> Judgement:
    """Judge the sign of the weight of cos_4 alone, in models of each seed's own data."""
    weights = []
    for fold in folds:
        features = standardised(fold.held, fold.held)[:, [fold.pncs]]
        weights.append(float(fit(features, labels_of(fold.held))[0]))
    return _tested("negative", weights, "weight of each seed's own model")


def _against_random(folds: Sequence[Fold], setting: str | None) -> Judgement:
    """Judge whether the pair with the lowest cos_4 is better than the mean pair, in all conditions
    or in one setting."""
    by_seed = []
    for fold in folds:
        losses = []
        for condition in fold.held:
            if setting in (None, condition.setting):
                labels = condition.labels
                lowest = condition.features[:, fold.pncs].argmin()
                losses.append(float(np.mean(labels) - labels[lowest]))
        if losses:
            by_seed.append(float(np.mean(losses)))
    return _tested("random", by_seed, "difference in relative loss", setting=setting)


def _rank(folds: Sequence[Fold]) -> Judgement:
    """Judge whether cos_4 has the largest weight in the model with all features.

    Each seed has a model of its own data, so that seeds are independent.
    """
    ranks = []
    for fold in folds:
        weights = np.abs(fit_on(fold.held)[:-1])
        ranks.append(1 + int((weights > weights[fold.pncs]).sum()))
    evidence = majority_evidence(Share(ranks.count(1), len(ranks)))
    detail = f"rank {min(ranks)} to {max(ranks)} of {len(folds[0].names)}"
    return Judgement(_claim("rank", "Table I"), evidence, detail)


def _power(folds: Sequence[Fold]) -> Judgement:
    """Judge cos_4 against the other cosines."""
    cosines = [name for name in folds[0].names if name.startswith(COSINE_PREFIX)]
    if cosines == [PNCS_FEATURE]:
        return Judgement(_claim("power"), None, "no other power was measured")
    detail = "difference to {}"
    return _against_rival("power", folds, _mean_loss, _mean_loss, detail, prefix=COSINE_PREFIX)


def _mean_loss(fold: Fold, conditions: Sequence[Condition]) -> Floats:
    """Return the mean relative loss of the pairs that each feature picks, [F]."""
    return fold.relative_losses(conditions).mean(1)


def _spread(fold: Fold, conditions: Sequence[Condition]) -> Floats:
    """Return the standard deviation of the relative losses of these pairs, [F]."""
    return fold.relative_losses(conditions).std(1)


def _against_rival(
    name: str,
    folds: Sequence[Fold],
    chosen_by: Score,
    compared_by: Score,
    detail: str,
    *,
    prefix: str = "",
    sign: Sign = "negative",
) -> Judgement:
    """Judge the score of cos_4 minus that of its rival, with a value for each held-out seed.

    For each fold the rival is the other feature with the lowest score `chosen_by` on the other
    seeds. Both are compared by the score `compared_by` on the held-out seed. `prefix` is that of
    the names of possible rivals. `detail` describes the difference, with {} for the rivals.
    """
    values = []
    rivals = set()
    for fold in folds:
        rival = fold.rival(chosen_by(fold, fold.others), prefix)
        scores = compared_by(fold, fold.held)
        values.append(float(scores[fold.pncs] - scores[rival]))
        rivals.add(fold.names[rival])
    return _tested(name, values, detail.format(" or ".join(sorted(rivals))), sign=sign)


def _tested(
    name: str,
    values: Sequence[float],
    detail: str,
    *,
    setting: str | None = None,
    sign: Sign = "negative",
) -> Judgement:
    """Judge the claim that the mean of `values`, one for each seed, has this `sign`."""
    evidence = sign_evidence(differences(values), sign)
    return Judgement(_claim(name, setting=setting), evidence, detail)
