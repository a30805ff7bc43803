"""Judgements of PNCS's claims about Table I, by the conditions of the pair study (`pair_study`).

`RULE` says how they are judged. It was written after the runs at `scale=small` had been seen. cos_4
(`PNCS_FEATURE`) is the feature that the paper chooses. Its rival is the best other feature. A fold
holds one seed out for testing. Its models are fitted, and its rival is chosen, on the other seeds.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from fedsim.core.arrays import Floats
from fedsim.papers.evidence import Evidence, Sign, majority_evidence, sign_evidence
from fedsim.papers.judge import Judgement, corrected
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
"""The claims by name."""
Score = Callable[[Fold, Sequence[Condition]], Floats]
"""A function that returns a number for each feature on some conditions, [F]; smaller is better."""


def judge_conditions(names: Sequence[str], conditions: Sequence[Condition]) -> list[Judgement]:
    """Return the judgements of all claims by these conditions, whose features have these `names`.

    If none can be tested, a single judgement stands for all. There is none without conditions.
    """
    if not conditions:
        return []
    all_claims = Claim("pncs.table1", "Table I", TEXTS["best"], about={}, measure="")
    if PNCS_FEATURE not in names:
        return [Judgement(all_claims, None, f"{PNCS_FEATURE} was not measured")]
    if len(names) == 1:
        return [Judgement(all_claims, None, "no other feature was measured")]
    seeds = sorted({condition.seed for condition in conditions})
    if len(seeds) < MIN_SEEDS:
        return [Judgement(all_claims, Evidence(None), f"{len(seeds)} seeds")]
    folds = []
    for seed in seeds:
        training = [condition for condition in conditions if condition.seed != seed]
        testing = [condition for condition in conditions if condition.seed == seed]
        folds.append(Fold(names, training, testing))
    settings = sorted({condition.setting for condition in conditions}, key=sort_key)
    return corrected(
        [
            _negative(folds),
            _against_random(folds, None),
            *(_against_random(folds, setting) for setting in settings),
            _rank(folds),
            _against_rival("best", folds, Fold.cross_entropies),
            _power(folds),
            _against_rival("smaller", folds, _mean_loss, "cos_4 minus {}", sign="positive"),
            _against_rival(
                "wider", folds, _deviation, "deviation of cos_4 minus {}", choose_by=_mean_loss
            ),
        ]
    )


def pair_claims_table(judgements: Sequence[Judgement]) -> Table:
    """Return the judged claims as a table."""
    table = claims_table(judgements)
    return replace(
        table,
        name="pair_claims",
        title="Claims on PNCS's Table I (written after runs had been seen)",
        values=table.values.rename(columns={"ours [95 %]": "ours"}),
        note=RULE,
        rules="",
    )


def _claim(name: str, where: str = "V-B", setting: str | None = None) -> Claim:
    """Return one of the claims in `TEXTS`, about all settings or one.

    The name is also the claim's measure, so that its settings are a family of tests.
    """
    identity = f"pncs.table1.{name}"
    text = TEXTS[name]
    if setting is not None:
        identity += f".{setting}"
        text += f" (shards: {setting})"
    return Claim(identity, where, text, about={}, measure=name)


def _negative(folds: Sequence[Fold]) -> Judgement:
    """Judge the sign of the weight of cos_4 alone, in a model of each held-out seed."""
    weights = []
    for fold in folds:
        features = standardised(fold.testing, fold.testing)[:, [fold.pncs_index]]
        weights.append(fit(features, labels_of(fold.testing)).weights[0])
    return _tested("negative", weights, "weight of each seed's own model")


def _against_random(folds: Sequence[Fold], setting: str | None) -> Judgement:
    """Judge whether the pair with the lowest cos_4 is better than the mean pair, in all conditions
    or in one setting."""
    by_seed = []
    for fold in folds:
        losses = []
        for condition in fold.testing:
            if setting in (None, condition.setting):
                labels = condition.labels
                lowest = condition.features[:, fold.pncs_index].argmin()
                losses.append(float(np.mean(labels) - labels[lowest]))
        if losses:
            by_seed.append(float(np.mean(losses)))
    return _tested("random", by_seed, "difference in relative loss", setting=setting)


def _rank(folds: Sequence[Fold]) -> Judgement:
    """Judge whether cos_4 has the largest weight in the model with all features.

    The model is fitted on the held-out seed alone, so that the seeds are independent.
    """
    ranks = []
    for fold in folds:
        sizes = np.abs(fit_on(fold.testing).weights)
        ranks.append(1 + int((sizes > sizes[fold.pncs_index]).sum()))
    evidence = majority_evidence(Share(ranks.count(1), len(ranks)))
    detail = f"rank {min(ranks)} to {max(ranks)} of {len(folds[0].names)}"
    return Judgement(_claim("rank", "Table I"), evidence, detail)


def _power(folds: Sequence[Fold]) -> Judgement:
    """Judge cos_4 against the other cosines."""
    cosines = [name for name in folds[0].names if name.startswith(COSINE_PREFIX)]
    if cosines == [PNCS_FEATURE]:
        return Judgement(_claim("power"), None, "no other power was measured")
    return _against_rival("power", folds, _mean_loss, rival_prefix=COSINE_PREFIX)


def _mean_loss(fold: Fold, conditions: Sequence[Condition]) -> Floats:
    """Return the mean relative loss of the pairs that each feature picks, [F]."""
    return fold.relative_losses(conditions).mean(1)


def _deviation(fold: Fold, conditions: Sequence[Condition]) -> Floats:
    """Return the standard deviation of these relative losses, [F]."""
    return fold.relative_losses(conditions).std(1)


def _against_rival(
    name: str,
    folds: Sequence[Fold],
    score: Score,
    detail: str = "difference to {}",
    *,
    choose_by: Score | None = None,
    rival_prefix: str = "",
    sign: Sign = "negative",
) -> Judgement:
    """Judge the score of cos_4 minus that of its rival, with a value for each held-out seed.

    The rival of a fold is the other feature with the lowest score on its training conditions. It is
    chosen by the same score, unless another one is given (`choose_by`). Names of possible rivals
    begin with `rival_prefix`. `detail` describes the difference, with {} for the rivals.
    """
    choose_by = choose_by or score
    values = []
    rivals = set()
    for fold in folds:
        rival = fold.rival(choose_by(fold, fold.training), rival_prefix)
        scores = score(fold, fold.testing)
        values.append(scores[fold.pncs_index] - scores[rival])
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
