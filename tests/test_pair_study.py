"""The feature study of PNCS: its features, its models, the judged claims, and the command.

PNCS (Power-Norm Cosine Similarity) selects clients whose gradients are least similar to each other.
Its Table I asks which feature of a pair of gradients predicts the validation loss after a step
along the pair's mean gradient. The paper claims that the feature cos_4 predicts it best (p = 4 is
its choice). It also claims that a pair is the better, the lower its cos_4 is.

Terms of this file:

- cos_p of two vectors: raise the magnitude of every coordinate to the power p / 2 and keep its
  sign; cos_p is the cosine of the angle between the results. cos_2 is the usual cosine.
- A condition is one round of one run: the features of all pairs of clients, and the validation loss
  after a step along each pair's mean gradient.
- The setting of a run is its number of shards per client, as text ("1", "10").
- The label of a pair is 1 for the lowest loss of the condition's pairs, 0 for the highest, and
  linear between them. The relative loss is 1 - label, so 0 is best.
- A model is a logistic regression of labels on features. A negative weight means that small values
  of the feature are good.
- A fold holds one seed out: it fits its models on the other seeds and measures them on this one.

Ids of the claims, without their prefix "pncs.table1.":

- negative: the weight of cos_4 is negative.
- random: the pair of lowest cos_4 is better than the mean pair.
- random.1, random.10: the same claim in the setting "1" or "10" alone.
- rank: in the model of all features, cos_4 has the largest weight by magnitude.
- best: of all models with a single feature, that of cos_4 has the lowest cross-entropy.
- power: of all cos_p, cos_4 picks the pairs of lowest relative loss.
- smaller: another feature picks pairs of a smaller relative loss than cos_4 does.
- wider: the relative loss of the best other feature has a larger deviation than that of cos_4.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.spatial.distance import pdist
from sklearn.linear_model import LogisticRegression

from fedsim.jobs.cli import run
from fedsim.papers.judge import Judgement
from fedsim.papers.pair_claims import judge_conditions, pair_claims_table
from fedsim.papers.pair_study import (
    Condition,
    Fold,
    fit,
    fit_on,
    make_tables,
    read_conditions,
    split_by_seed,
)
from fedsim.results.reading import read_metrics
from fedsim.results.runs import Run
from fedsim.selectors.pair_study import pair_features
from fedsim.selectors.similarity import similarities
from tests.report_toys import make_report

NAMES = ["cos_4", "cos_2", "norm_2 sum"]
"""The features of `toy_conditions`, in the order of their columns."""
NUM_PAIRS = 45
"""The pairs of ten clients."""
FIVE_SEEDS = 5
"""Enough for the t tests of all claims but rank. That claim counts the seeds for which it holds: if
all five agree, the two-sided binomial test has p = 2 / 2^5 = 6 %."""
EIGHT_SEEDS = 8
"""Enough for the claim rank, too: p = 2 / 2^8 = 0.8 % if all eight agree."""


def toy_conditions(effects: dict[str, float], num_seeds: int) -> list[Condition]:
    """Make conditions with four rounds and two settings for each seed.

    The features are independent normal numbers. The loss of a pair is the sum of its features times
    their `effects` (0 for a feature that is not named) and a little noise.
    """
    weights = np.array([effects.get(name, 0.0) for name in NAMES])
    conditions = []
    for seed in range(num_seeds):
        for round in range(4):
            for setting in ("1", "10"):
                rng = np.random.default_rng((seed, round, int(setting)))
                features = rng.standard_normal((NUM_PAIRS, len(NAMES)))
                losses = features @ weights + 0.01 * rng.standard_normal(NUM_PAIRS)
                condition = Condition(
                    seed=seed, setting=setting, round=round, features=features, losses=losses
                )
                conditions.append(condition)
    return conditions


# --- features ---


def test_features_by_hand() -> None:
    vectors = np.array([[3.0, -4.0], [0.0, 2.0], [1.0, 1.0]])
    features = pair_features(vectors, [1, 2])
    by_hand = {  # the values of the pairs (0, 1), (0, 2) and (1, 2)
        "norm_2 sum": [7, 5 + 2**0.5, 2 + 2**0.5],
        "norm_1 difference": [5, 5, 0],
        "norm_inf sum": [6, 5, 3],
        "distance_1": [9, 7, 2],
        "distance_inf": [6, 5, 1],
        "inner product": [-8, -1, 2],
        "cos_2": [-0.8, -1 / (5 * 2**0.5), 1 / 2**0.5],
        "sign agreement": [0.25, 0.5, 0.75],  # a coordinate that is 0 agrees by half
        "mean sum": [0.5, 0.5, 2],
        "variance difference": [12.25 - 1, 12.25, 1],
        "sparsity sum": [0.5, 0, 0.5],
    }
    for name, values in by_hand.items():
        assert features[name] == pytest.approx(values), name


# cubes of normal numbers have long tails, so that skewness and kurtosis are far from 0
VECTORS = np.random.default_rng(0).standard_normal((5, 200)) ** 3
FIRST, SECOND = np.triu_indices(5, 1)  # both members of each pair


@pytest.mark.parametrize("p", [1, 3, 4])
def test_norms_distances_and_cosines_by_scipy(p: int) -> None:
    features = pair_features(VECTORS, [1, 3, 4])
    norms = np.linalg.norm(VECTORS, ord=p, axis=1)
    assert features[f"norm_{p} sum"] == pytest.approx(norms[FIRST] + norms[SECOND])
    assert features[f"distance_{p}"] == pytest.approx(pdist(VECTORS, "minkowski", p=p))
    signed_powers = np.sign(VECTORS) * np.abs(VECTORS) ** (p / 2)
    assert features[f"cos_{p}"] == pytest.approx(1 - pdist(signed_powers, "cosine"))


def test_moments_and_correlations_by_scipy_and_numpy() -> None:
    features = pair_features(VECTORS, [4])
    moments = {"skewness": stats.skew, "kurtosis": stats.kurtosis, "variance": np.var}
    for name, moment in moments.items():
        values = moment(VECTORS, axis=1)
        differences = np.abs(values[FIRST] - values[SECOND])
        assert features[f"{name} difference"] == pytest.approx(differences), name
    assert features["correlation"] == pytest.approx(np.corrcoef(VECTORS)[FIRST, SECOND])
    assert features["covariance"] == pytest.approx(np.cov(VECTORS, bias=True)[FIRST, SECOND])


@pytest.mark.parametrize("scale", [1.0, 1e-100])
def test_cos_p_is_the_similarity_of_the_selector_pncs_whatever_the_scale(scale: float) -> None:
    vectors = np.random.default_rng(0).standard_normal((4, 50))
    vectors *= np.array([[1], [1e-8], [1e8], [0]])  # lengths differ; one vector is zero
    table = similarities([torch.as_tensor(vectors)], 4.0)
    expected = table[np.triu_indices(4, 1)]
    assert pair_features(vectors * scale, [4])["cos_4"] == pytest.approx(expected)


@pytest.mark.parametrize("constant", [0.0, 1.0])
def test_features_of_constant_vectors_are_finite(constant: float) -> None:
    """Their variance is 0, so that correlation, skewness and kurtosis are 0 / 0 by the formula."""
    features = pair_features(np.full((3, 5), constant), [1, 4])
    for name, values in features.items():
        assert len(values) == 3, name
        assert np.isfinite(values).all(), name


def test_a_single_client_has_no_pair() -> None:
    features = pair_features(np.ones((1, 5)), [1, 4])
    assert "cos_4" in features
    assert all(values == [] for values in features.values())


# --- models ---


def test_the_fit_is_that_of_scikit_learn() -> None:
    """A soft label y is a sample of class 1 with weight y, and one of class 0 with weight 1 - y.

    Scikit-learn minimises |w|^2 / 2 + C * (sum of losses), and fedsim minimises (mean loss) +
    1e-3 |w|^2. Divide fedsim's objective by 2e-3: both agree if C = 1 / (2e-3 n).
    """
    rng = np.random.default_rng(0)
    features, labels = rng.standard_normal((60, 4)), rng.random(60)
    model = LogisticRegression(C=1 / (2e-3 * 60), tol=1e-10, max_iter=10_000)
    weights = np.concatenate([labels, 1 - labels])
    model.fit(np.concatenate([features, features]), np.repeat([1, 0], 60), weights)
    ours = fit(features, labels)
    assert ours.weights == pytest.approx(model.coef_[0], abs=1e-4)
    assert ours.intercept == pytest.approx(model.intercept_[0], abs=1e-4)


@pytest.mark.parametrize(
    ("losses", "labels"),
    [([1.0, 2.0, 5.0], [1.0, 0.75, 0.0]), ([3.0, 3.0], [0.5, 0.5])],
)
def test_labels_scale_losses_within_a_condition(losses: list[float], labels: list[float]) -> None:
    features = np.zeros((len(losses), 1))
    condition = Condition(seed=0, setting="1", round=0, features=features, losses=np.array(losses))
    assert condition.labels.tolist() == labels


def deciding_conditions() -> list[Condition]:
    """Make conditions of four seeds: the first feature is the loss itself, the second is unrelated,
    and the third is constant."""
    conditions = []
    for seed in range(4):
        for round in range(5):
            rng = np.random.default_rng((seed, round))
            features = rng.standard_normal((NUM_PAIRS, 3)) * [1, 1, 0]
            condition = Condition(
                seed=seed, setting="1", round=round, features=features, losses=features[:, 0]
            )
            conditions.append(condition)
    return conditions


def test_the_last_30_percent_of_the_seeds_are_for_testing() -> None:
    training, testing = split_by_seed(deciding_conditions())
    assert {condition.seed for condition in training} == {0, 1, 2}
    assert {condition.seed for condition in testing} == {3}


def test_a_feature_that_decides_gets_the_weight_and_picks_the_best_pairs() -> None:
    training, testing = split_by_seed(deciding_conditions())
    deciding_weight, unrelated_weight, constant_weight = fit_on(training).weights
    assert deciding_weight < -10 * abs(unrelated_weight)  # negative: small values are good
    assert constant_weight == pytest.approx(0, abs=1e-9)
    fold = Fold(names=["cos_4", "unrelated", "constant"], training=training, testing=testing)
    relative_losses_of_cos_4 = fold.relative_losses(testing)[0]
    assert relative_losses_of_cos_4.tolist() == [0] * 5  # the best pair in each of five rounds


def test_a_fold_picks_pairs_by_other_seeds_than_the_one_that_it_is_measured_on() -> None:
    """In the held-out seed 1 all losses have the opposite sign. So the pairs that seem best by the
    other seeds are the worst there."""
    training, testing = [], []
    for condition in toy_conditions({"cos_4": 1.0}, num_seeds=3):
        if condition.seed == 1:
            testing.append(replace(condition, losses=-condition.losses))
        else:
            training.append(condition)
    fold = Fold(names=NAMES, training=training, testing=testing)
    assert fold.relative_losses(testing)[0].mean() > 0.95  # 1 is the worst pair
    for feature, model in enumerate(fold.single_models):
        by_hand = []
        for condition in testing:
            values = condition.features[:, feature]
            pair = values.argmin() if model.weights[0] < 0 else values.argmax()
            by_hand.append(1 - condition.labels[pair])
        assert fold.relative_losses(testing)[feature].tolist() == by_hand


# --- claims ---


def judged_by_id(effects: dict[str, float], num_seeds: int) -> dict[str, Judgement]:
    """Judge toy conditions. Return the judgements by the ids of the module docstring."""
    judged = judge_conditions(NAMES, toy_conditions(effects, num_seeds))
    return {row.printed.id.removeprefix("pncs.table1."): row for row in judged}


def verdicts(effects: dict[str, float], num_seeds: int) -> dict[str, str]:
    return {claim: row.verdict for claim, row in judged_by_id(effects, num_seeds).items()}


def test_claims_hold_if_cos_4_alone_decides() -> None:
    assert verdicts({"cos_4": 1.0}, EIGHT_SEEDS) == {
        "negative": "reproduced",
        "random": "reproduced",
        "random.1": "reproduced",
        "random.10": "reproduced",
        "rank": "reproduced",
        "best": "reproduced",
        "power": "reproduced",
        "smaller": "not reproduced",  # no feature picks better pairs than cos_4
        "wider": "reproduced",  # cos_4 always picks the best pair; other features vary
    }


def test_claims_fail_if_another_feature_decides_and_high_cos_4_is_good() -> None:
    assert verdicts({"cos_4": -0.5, "norm_2 sum": 1.0}, EIGHT_SEEDS) == {
        "negative": "not reproduced",  # the loss falls with cos_4
        "random": "not reproduced",  # so the pair of lowest cos_4 is worse than the mean pair
        "random.1": "not reproduced",
        "random.10": "not reproduced",
        "rank": "not reproduced",  # the effect of "norm_2 sum" is twice as large
        "best": "not reproduced",  # for the same reason
        "power": "reproduced",  # the only other cos_p is cos_2, which decides nothing
        "smaller": "reproduced",  # "norm_2 sum" picks better pairs
        "wider": "not reproduced",  # and it picks them more reliably
    }


def test_the_claim_on_powers_fails_if_another_cosine_decides() -> None:
    assert verdicts({"cos_2": 1.0}, FIVE_SEEDS)["power"] == "not reproduced"


def test_noise_decides_no_claim() -> None:
    by_claim = verdicts({}, FIVE_SEEDS)
    assert len(by_claim) == 9
    assert set(by_claim.values()) == {"undecided"}


def test_too_few_seeds_decide_nothing() -> None:
    [row] = judge_conditions(NAMES, toy_conditions({"cos_4": 1.0}, num_seeds=2))
    assert (row.verdict, row.detail) == ("undecided", "2 seeds")


def test_no_claim_is_judged_without_cos_4() -> None:
    [row] = judge_conditions(["cos_3", "a", "b"], toy_conditions({}, FIVE_SEEDS))
    assert (row.verdict, row.detail) == ("not judged", "cos_4 was not measured")


def test_no_claim_is_judged_without_another_feature() -> None:
    conditions = toy_conditions({"cos_4": 1.0}, FIVE_SEEDS)
    with_cos_4 = [replace(item, features=item.features[:, :1]) for item in conditions]
    [row] = judge_conditions(["cos_4"], with_cos_4)
    assert (row.verdict, row.detail) == ("not judged", "no other feature was measured")


def test_the_claim_on_powers_is_not_judged_without_another_cosine() -> None:
    conditions = toy_conditions({"cos_4": 1.0}, FIVE_SEEDS)
    judged = judge_conditions(["cos_4", "a", "b"], conditions)
    [power] = [row for row in judged if row.printed.id == "pncs.table1.power"]
    assert (power.verdict, power.detail) == ("not judged", "no other power was measured")


def test_the_claim_on_ranks_counts_seeds() -> None:
    rank = judged_by_id({"cos_4": 1.0}, FIVE_SEEDS)["rank"]
    assert rank.detail == "rank 1 to 1 of 3"
    assert rank.verdict == "undecided"  # five seeds are too few
    table = pair_claims_table([rank])
    assert list(table.texts["ours"]) == ["holds for 5 of 5 seeds [0.48, 1.00]"]


def test_the_table_of_claims_has_a_row_for_each() -> None:
    judged = judged_by_id({"cos_4": 1.0}, FIVE_SEEDS)
    table = pair_claims_table(list(judged.values()))
    assert len(judged) == 9
    assert list(table.texts["verdict"]) == [row.verdict for row in judged.values()]


def test_claims_are_tested_seed_by_seed() -> None:
    for claim, row in judged_by_id({"cos_4": 1.0}, FIVE_SEEDS).items():
        assert row.evidence is not None, claim
        assert row.evidence.ours is not None, claim
        assert row.evidence.ours.num == 5, claim


def test_a_claim_and_its_settings_are_corrected_together_by_holm() -> None:
    """The smallest of three p-values is multiplied by 3, the next by 2, and none falls below the
    one before it. A claim without settings is alone, so its p-value stays."""
    raw, corrected = {}, {}
    for claim, row in judged_by_id({"cos_4": 1.0}, FIVE_SEEDS).items():
        assert row.evidence is not None
        raw[claim] = row.evidence.p_for
        corrected[claim] = row.evidence.holm_for
    smallest, middle, largest = sorted(["random", "random.1", "random.10"], key=raw.__getitem__)
    expected = raw.copy()
    expected[smallest] = 3 * raw[smallest]
    expected[middle] = max(2 * raw[middle], expected[smallest])
    expected[largest] = max(raw[largest], expected[middle])
    assert corrected == pytest.approx(expected, rel=1e-12)


# --- traces and the command ---


def traced_run(folder: Path, seed: int, names: list[str]) -> Run:
    """Write the trace of a run with one round, three pairs and random features `names`."""
    rng = np.random.default_rng(seed)
    line = {
        "round": 1,
        "pairs": [[0, 1], [0, 2], [1, 2]],
        "features": {name: rng.standard_normal(3).tolist() for name in names},
        "loss": [1.0, 2.0, 3.0],
    }
    run_folder = folder / str(seed)
    run_folder.mkdir()
    (run_folder / "trace.jsonl").write_text(json.dumps(line) + "\n")
    return Run(run_folder, {"seed": seed}, {})


def test_features_that_all_runs_have_are_compared(tmp_path: Path) -> None:
    first = traced_run(tmp_path, 0, ["cos_4", "cos_2", "inner product"])
    second = traced_run(tmp_path, 1, ["inner product", "cos_2"])
    names, conditions = read_conditions([first, second])
    assert names == ["cos_2", "inner product"]
    assert [condition.features.shape for condition in conditions] == [(3, 2), (3, 2)]
    table = make_tables(names, conditions)[0]
    assert set(table.texts["feature"]) == {"cos_2", "inner product", "a random pair"}
    assert "Conditions: 1 for fitting, 1 for testing, split by seed" in table.note


def test_runs_without_a_common_feature_have_no_conditions(tmp_path: Path) -> None:
    first = traced_run(tmp_path, 0, ["cos_4"])
    second = traced_run(tmp_path, 1, ["cos_2"])
    names, conditions = read_conditions([first, second])
    assert (names, conditions) == ([], [])
    assert make_tables(names, conditions) == []


def test_the_table_of_a_single_seed_says_so(tmp_path: Path) -> None:
    names, conditions = read_conditions([traced_run(tmp_path, 0, ["cos_4", "cos_2"])])
    note = make_tables(names, conditions)[0].note
    assert "Conditions: 1, all of one seed, fitted and tested on the same" in note


def test_runs_without_a_trace_have_neither_tables_nor_claims(tmp_path: Path) -> None:
    names, conditions = read_conditions([Run(tmp_path, {}, {})])
    assert make_tables(names, conditions) == []
    assert judge_conditions(names, conditions) == []


def test_the_study_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = (
        "-m selector=pair_study seed=0,1 num_clients=5 cohort_size=2 num_rounds=3 "
        "tracker=files_only partition.shards_per_client=1,2"
    )
    assert run(arguments.split()) == 0

    # 1. each of the four runs has a trace with all ten pairs of five clients in every round
    folders = [path.parent for path in tmp_path.glob("outputs/default/*/trace.jsonl")]
    assert len(folders) == 4
    trace = read_metrics(folders[0], "trace.jsonl")
    assert [line["round"] for line in trace] == [1, 2, 3]
    for line in trace:
        assert line["pairs"] == [[i, j] for i in range(5) for j in range(i + 1, 5)]

    # 2. the server validates a model for each of the ten pairs, on 72 samples: 5 % of the 1,438
    # training samples of the data set digits
    samples = [record["server_forward_samples"] for record in read_metrics(folders[0])]
    assert samples == [10 * 72] * 3

    # 3. the report has the tables; rounds are in spans of five
    assert make_report(["outputs/default", "--no-figures", "--all"]) == 0
    assert "a random pair" in capsys.readouterr().out
    report = tmp_path / "outputs" / "default" / "report"
    assert (report / "pair_features.csv").is_file()
    assert (report / "pair_features_by_setting.csv").read_text().startswith("feature,1,2\n")
    assert (report / "pair_features_by_rounds.csv").read_text().startswith("feature,1 to 5\n")


def traced_rounds(arguments: str = "") -> list[int]:
    """Run three rounds with four clients in the working directory. Return the rounds of its trace.

    All three rounds are in the metrics.
    """
    words = "selector=pair_study num_clients=4 cohort_size=2 num_rounds=3 tracker=files_only"
    assert run([*words.split(), "local.epochs=1", *arguments.split()]) == 0
    [summary] = Path().glob("outputs/*/*/summary.json")
    assert len(read_metrics(summary.parent)) == 3
    return [line["round"] for line in read_metrics(summary.parent, "trace.jsonl")]


def test_a_round_without_available_clients_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "fedsim.rounds.availability.Always.available",
        lambda self, round, num_clients, rng: np.full(num_clients, round != 2),
    )
    assert traced_rounds() == [1, 3]


def test_a_round_whose_updates_are_all_late_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert traced_rounds("system=uniform system.deadline=1e-6") == []  # a microsecond
