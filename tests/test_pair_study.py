"""PNCS's feature study: features by hand, models, claims judged, and the study by the command."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.spatial.distance import pdist
from sklearn.linear_model import LogisticRegression

from fedsim.jobs.cli import run
from fedsim.papers.pair_claims import claims_table, judge_conditions
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


def conditions(
    effects: dict[str, float], seeds: int = 5, noise: float = 0.01, names: list[str] = NAMES
) -> list[Condition]:
    """Make conditions of 45 pairs whose losses are a weighted sum of independent features."""
    weights = np.array([effects.get(name, 0.0) for name in names])
    made = []
    for seed in range(seeds):
        for round in range(4):
            for setting in ("1", "10"):
                rng = np.random.default_rng((seed, round, int(setting)))
                features = rng.standard_normal((45, len(names)))
                losses = features @ weights + noise * rng.standard_normal(45)
                made.append(Condition(seed, setting, round, features, losses))
    return made


# --- features ---


def test_features_by_hand() -> None:
    features = pair_features(np.array([[3.0, -4.0], [0.0, 2.0], [1.0, 1.0]]), [1, 2])
    by_hand = {  # of the pairs 01, 02 and 12
        "norm_2 sum": [7, 5 + 2**0.5, 2 + 2**0.5],
        "norm_1 difference": [5, 5, 0],
        "norm_inf sum": [6, 5, 3],
        "distance_1": [9, 7, 2],
        "distance_inf": [6, 5, 1],
        "inner product": [-8, -1, 2],
        "cos_2": [-0.8, -1 / (5 * 2**0.5), 1 / 2**0.5],
        "sign agreement": [0.25, 0.5, 0.75],  # a zero agrees by half
        "mean sum": [0.5, 0.5, 2],
        "variance difference": [12.25 - 1, 12.25, 1],
        "sparsity sum": [0.5, 0, 0.5],
    }
    for name, values in by_hand.items():
        assert features[name] == pytest.approx(values), name


VECTORS = np.random.default_rng(0).standard_normal((5, 200)) ** 3
FIRST, SECOND = np.triu_indices(5, 1)


@pytest.mark.parametrize("p", [1, 3, 4])
def test_norms_distances_and_cosines_by_scipy(p: int) -> None:
    features = pair_features(VECTORS, [1, 3, 4])
    norms = np.linalg.norm(VECTORS, ord=p, axis=1)
    assert features[f"norm_{p} sum"] == pytest.approx(norms[FIRST] + norms[SECOND])
    assert features[f"distance_{p}"] == pytest.approx(pdist(VECTORS, "minkowski", p=p))
    powers = np.sign(VECTORS) * np.abs(VECTORS) ** (p / 2)
    assert features[f"cos_{p}"] == pytest.approx(1 - pdist(powers, "cosine"))


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
def test_cos_p_is_the_similarity_of_the_selector_pncs(scale: float) -> None:
    vectors = np.random.default_rng(0).standard_normal((4, 50))
    vectors *= np.array([[1], [1e-8], [1e8], [0]])
    table = similarities([torch.as_tensor(vectors)], 4.0)
    expected = table[np.triu_indices(4, 1)]
    assert pair_features(vectors * scale, [4])["cos_4"] == pytest.approx(expected)


@pytest.mark.parametrize("vectors", [np.zeros((3, 5)), np.ones((3, 5)), np.ones((1, 5))])
def test_features_of_equal_vectors_are_finite(vectors: np.ndarray) -> None:
    assert all(np.isfinite(values).all() for values in pair_features(vectors, [1, 4]).values())


# --- models ---


def test_the_fit_is_that_of_scikit_learn() -> None:
    """A soft label y is a sample of class 1 with weight y, and one of class 0 with weight 1 - y.

    Scikit-learn minimises |w|^2 / 2 + C * (sum of losses), and fedsim (mean loss) + 1e-3 |w|^2, so
    that C = 1 / (2e-3 n).
    """
    rng = np.random.default_rng(0)
    features, labels = rng.standard_normal((60, 4)), rng.random(60)
    model = LogisticRegression(C=1 / (2e-3 * 60), tol=1e-10, max_iter=10_000)
    weights = np.concatenate([labels, 1 - labels])
    model.fit(np.concatenate([features, features]), np.repeat([1, 0], 60), weights)
    assert fit(features, labels) == pytest.approx([*model.coef_[0], model.intercept_[0]], abs=1e-4)


@pytest.mark.parametrize(
    ("losses", "labels"),
    [([1.0, 2.0, 5.0], [1.0, 0.75, 0.0]), ([3.0, 3.0], [0.5, 0.5])],
)
def test_labels_scale_losses_within_a_condition(losses: list[float], labels: list[float]) -> None:
    condition = Condition(0, "1", 0, np.zeros((len(losses), 1)), np.array(losses))
    assert condition.labels.tolist() == labels


def test_a_feature_that_decides_gets_the_weight_and_picks_the_best_pairs() -> None:
    made = []
    for seed in range(4):
        for round in range(5):
            features = np.random.default_rng((seed, round)).standard_normal((45, 3)) * [1, 1, 0]
            made.append(Condition(seed, "1", round, features, features[:, 0]))
    training, testing = split_by_seed(made)
    assert {condition.seed for condition in testing} == {3}  # 30 % of four seeds
    weights = fit_on(training)
    assert weights[0] < -10 * abs(weights[1])
    assert weights[2] == pytest.approx(0, abs=1e-9)  # a constant feature
    fold = Fold(["cos_4", "norm", "none"], testing, training)
    assert fold.relative_losses(testing)[0].tolist() == [0] * 5


def test_a_fold_picks_pairs_by_other_seeds_than_the_one_that_it_is_measured_on() -> None:
    made = conditions({"cos_4": 1.0}, seeds=3)
    others = [condition for condition in made if condition.seed != 1]
    held = [
        Condition(c.seed, c.setting, c.round, c.features, -c.losses) for c in made if c.seed == 1
    ]
    fold = Fold(NAMES, held, others)
    # on the held seed the opposite pairs are good
    assert fold.relative_losses(held)[0].mean() > 0.95
    for feature, (weight, _) in enumerate(fold.alone):
        by_hand = []
        for condition in held:
            values = condition.features[:, feature]
            pair = values.argmin() if weight < 0 else values.argmax()
            by_hand.append(1 - condition.labels[pair])
        assert fold.relative_losses(held)[feature].tolist() == by_hand


# --- claims ---


def verdicts(effects: dict[str, float], seeds: int = 5, noise: float = 0.01) -> dict[str, str]:
    judged = judge_conditions(NAMES, conditions(effects, seeds, noise))
    return {row.printed.id.removeprefix("pncs.table1."): row.verdict for row in judged}


def test_claims_hold_if_cos_4_alone_decides() -> None:
    hold = ("negative", "random", "random.1", "random.10", "rank", "best", "power", "wider")
    expected = dict.fromkeys(hold, "reproduced")
    expected["smaller"] = "not reproduced"  # nothing is better than cos_4
    assert verdicts({"cos_4": 1.0}, seeds=8) == expected


def test_claims_fail_if_another_feature_decides() -> None:
    by_claim = verdicts({"cos_4": -0.5, "norm_2 sum": 1.0}, seeds=12)
    failing = ("negative", "random", "rank", "best", "wider")
    assert {by_claim[claim] for claim in failing} == {"not reproduced"}
    assert by_claim["power"] == "reproduced"  # better than cos_2, which decides nothing
    assert by_claim["smaller"] == "reproduced"
    assert verdicts({"cos_2": 1.0})["power"] == "not reproduced"


def test_noise_decides_no_claim() -> None:
    by_claim = verdicts({}, noise=1.0)
    assert by_claim["negative"] == by_claim["random"] == "undecided"


def test_too_few_seeds_decide_nothing() -> None:
    [row] = judge_conditions(NAMES, conditions({"cos_4": 1.0}, seeds=2))
    assert (row.verdict, row.detail) == ("undecided", "2 seeds")


def test_claims_about_features_that_were_not_measured_are_not_judged() -> None:
    [row] = judge_conditions(["cos_3", "a", "b"], conditions({}))
    assert (row.verdict, row.detail) == ("not judged", "cos_4 was not measured")
    judged = judge_conditions(["cos_4", "a", "b"], conditions({"cos_4": 1.0}))
    by_id = {row.printed.id: row.verdict for row in judged}
    assert by_id["pncs.table1.power"] == "not judged"


def test_claims_are_tested_seed_by_seed_and_corrected_together() -> None:
    judged = judge_conditions(NAMES, conditions({"cos_4": 1.0}))
    for row in judged:
        assert row.evidence is not None
        assert row.evidence.ours is not None
        assert row.evidence.ours.num == 5
        assert row.evidence.holm_for >= row.evidence.p_for
    rank = judged[4]
    assert (rank.detail, rank.verdict) == ("rank 1 to 1 of 3", "undecided")  # five seeds are few
    table = claims_table(judged)
    assert table.texts["ours"][4] == "holds for 5 of 5 seeds [0.48, 1.00]"
    assert list(table.texts["verdict"]) == [row.verdict for row in judged]


# --- traces and the command ---


def traced_run(folder: Path, seed: int, names: list[str]) -> Run:
    """Write the trace of a run with one round and three pairs."""
    rng = np.random.default_rng(seed)
    line = {
        "round": 1,
        "pairs": [[0, 1], [0, 2], [1, 2]],
        "features": {name: rng.standard_normal(3).tolist() for name in names},
        "loss": [1.0, 2.0, 3.0],
    }
    path = folder / str(seed)
    path.mkdir()
    (path / "trace.jsonl").write_text(json.dumps(line) + "\n")
    return Run(path, {"seed": seed}, {})


def test_features_that_all_runs_have_are_compared(tmp_path: Path) -> None:
    first = traced_run(tmp_path, 0, ["cos_4", "cos_2", "inner product"])
    second = traced_run(tmp_path, 1, ["inner product", "cos_2"])
    names, found = read_conditions([first, second])
    assert names == ["cos_2", "inner product"]
    assert [condition.features.shape for condition in found] == [(3, 2), (3, 2)]
    table = make_tables(names, found)[0]
    assert set(table.texts["feature"]) == {"cos_2", "inner product", "a random pair"}
    assert "1 conditions for fitting, 1 for testing, split by seed" in table.note


def test_the_table_of_a_single_seed_says_so(tmp_path: Path) -> None:
    alone = read_conditions([traced_run(tmp_path, 0, ["cos_4", "cos_2"])])
    assert "fitted and tested on the same" in make_tables(*alone)[0].note


def test_runs_without_a_trace_have_neither_tables_nor_claims(tmp_path: Path) -> None:
    without = read_conditions([Run(tmp_path, {}, {})])
    assert make_tables(*without) == []
    assert judge_conditions(*without) == []


def test_the_study_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = (
        "-m selector=pair_study seed=0,1 num_clients=5 cohort_size=2 num_rounds=3 "
        "tracker=files_only partition.shards_per_client=1,2"
    )
    assert run(words.split()) == 0
    folders = [path.parent for path in tmp_path.glob("outputs/default/*/trace.jsonl")]
    assert len(folders) == 4
    lines = read_metrics(folders[0], "trace.jsonl")
    assert [line["round"] for line in lines] == [1, 2, 3]
    assert lines[0]["pairs"] == [[i, j] for i in range(5) for j in range(i + 1, 5)]
    samples = [record["server_forward_samples"] for record in read_metrics(folders[0])]
    assert samples[0] > 0
    assert samples == [samples[0]] * 3
    assert samples[0] % 10 == 0  # ten pairs, each on all of the validation samples
    assert make_report(["outputs/default", "--no-figures", "--all"]) == 0
    assert "a random pair" in capsys.readouterr().out
    report = tmp_path / "outputs" / "default" / "report"
    assert (report / "pair_features.csv").is_file()
    assert (report / "pair_features_by_setting.csv").read_text().startswith("feature,1,2\n")
    assert (report / "pair_features_by_rounds.csv").read_text().startswith("feature,1 to 5\n")


FEW = "selector=pair_study num_clients=4 cohort_size=2 num_rounds=3 tracker=files_only"


@pytest.mark.parametrize(
    ("words", "traced"),
    [("name=absent", [1, 3]), ("name=late system=uniform system.deadline=1e-6", [])],
)
def test_rounds_without_an_update_leave_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, traced: list[int]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "fedsim.rounds.availability.Always.available",
        lambda self, round, num_clients, rng: np.full(num_clients, round != 2),
    )
    assert run([*FEW.split(), "local.epochs=1", *words.split()]) == 0
    [folder] = [path.parent for path in tmp_path.glob("outputs/*/*/summary.json")]
    assert len(read_metrics(folder)) == 3
    assert [line["round"] for line in read_metrics(folder, "trace.jsonl")] == traced
