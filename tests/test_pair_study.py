"""PNCS's feature study: features by hand, planted outcomes found again, its claims judged, and the
study through the command."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from scipy.spatial.distance import pdist
from sklearn.linear_model import LogisticRegression

from fedsim.jobs.cli import run
from fedsim.papers.pair_study import (
    Condition,
    Fold,
    claims_table,
    fit,
    judge_conditions,
    labels_of,
    make_tables,
    read_conditions,
    split_by_seed,
    standardised,
)
from fedsim.results.reading import read_metrics
from fedsim.results.runs import Run
from fedsim.selectors.pair_study import pair_features
from fedsim.selectors.similarity import similarities
from tests.report_toys import make_report

NAMES = ["cos_4", "cos_2", "norm_2 sum"]


def conditions(causes: dict[str, float], seeds: int = 5, noise: float = 0.01) -> list[Condition]:
    """Losses that are a weighted sum of features which are else independent, and some noise."""
    found = []
    for seed in range(seeds):
        for round in range(4):
            for setting in ("1", "10"):
                rng = np.random.default_rng((seed, round, int(setting)))
                features = rng.standard_normal((45, len(NAMES)))
                losses = features @ [
                    causes.get(name, 0.0) for name in NAMES
                ] + noise * rng.standard_normal(45)
                found.append(Condition(seed, setting, round, features, losses))
    return found


def verdicts(causes: dict[str, float], seeds: int = 5, noise: float = 0.01) -> dict[str, str]:
    rows = judge_conditions(NAMES, conditions(causes, seeds, noise))
    return {row.printed.id.removeprefix("pncs.table1."): row.verdict for row in rows}


def test_claims_hold_where_cos_4_alone_decides_and_fail_where_something_else_does() -> None:
    names = ("negative", "random", "random.1", "random.10", "rank", "best", "power", "wider")
    every = dict.fromkeys(names, "reproduced")
    assert verdicts({"cos_4": 1.0}, seeds=8) == {
        **every,
        "smaller": "not reproduced",
    }  # nothing is better than cos_4
    found = verdicts({"cos_4": -0.5, "norm_2 sum": 1.0}, seeds=12)
    assert {found[name] for name in ("negative", "random", "rank", "best")} == {"not reproduced"}
    assert found["power"] == "reproduced"  # better than cos_2, which decides nothing
    assert found["smaller"] == "reproduced"
    assert (
        found["wider"] == "not reproduced"
    )  # the pair picked by what decides is good in every round
    assert verdicts({"cos_2": 1.0})["power"] == "not reproduced"
    found = verdicts({}, noise=1.0)
    assert found["negative"] == found["random"] == "undecided"


def test_too_few_seeds_and_absent_features_are_told() -> None:
    (row,) = judge_conditions(NAMES, conditions({"cos_4": 1.0}, seeds=2))
    assert (row.verdict, row.detail) == ("undecided", "2 seeds")
    (row,) = judge_conditions(["cos_3", "a", "b"], conditions({}))
    assert (row.verdict, row.detail) == ("not judged", "cos_4 was not measured")
    rows = judge_conditions(["cos_4", "a", "b"], conditions({"cos_4": 1.0}))
    assert {row.printed.id: row.verdict for row in rows}["pncs.table1.power"] == "not judged"


def test_a_fold_picks_pairs_by_other_seeds_than_the_one_that_it_is_measured_on() -> None:
    made = conditions({"cos_4": 1.0}, seeds=3)
    held = [
        Condition(c.seed, c.setting, c.round, c.features, -c.losses) if c.seed == 1 else c
        for c in made
    ]
    fold, same = (
        Fold(NAMES, [c for c in some if c.seed == 1], [c for c in some if c.seed != 1])
        for some in (held, made)
    )
    assert fold.alone[0].tolist() == same.alone[0].tolist()
    assert {c.seed for c in fold.held} == {1}
    assert (
        fold.relative_losses(fold.held)[0].mean() > 0.95
    )  # on the seed that is the other way round
    for feature, weights in enumerate(fold.alone):
        values = [c.features[:, feature] for c in fold.held]
        picked = [int(v.argmin() if weights[0] < 0 else v.argmax()) for v in values]
        by_hand = [1 - c.labels[pair] for c, pair in zip(fold.held, picked, strict=True)]
        assert fold.relative_losses(fold.held)[feature].tolist() == by_hand


def test_claims_are_tested_seed_by_seed_and_corrected_together() -> None:
    judged = judge_conditions(NAMES, conditions({"cos_4": 1.0}))
    tested = [row.evidence for row in judged if row.evidence is not None]
    assert len(tested) == len(judged)
    assert all(one.ours is not None and one.ours.num == 5 for one in tested)
    assert all(one.holm_for >= one.p_for for one in tested)
    table, rank = claims_table(judged), judged[4]
    assert table.texts["ours"][4] == "holds for 5 of 5 seeds [0.48, 1.00]"
    assert (rank.detail, rank.verdict) == (
        "rank 1 to 1 of 3",
        "undecided",
    )  # five seeds decide no share
    assert list(table.texts["verdict"]) == [row.verdict for row in judged]


def test_features_by_hand() -> None:
    vectors = np.array([[3.0, -4.0], [0.0, 2.0], [1.0, 1.0]])
    found = pair_features(vectors, [1, 2])
    assert all(len(values) == 3 for values in found.values())  # pairs 01, 02, 12
    by_hand = {
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
        assert found[name] == pytest.approx(values), name


def test_features_by_scipy_and_numpy() -> None:
    vectors = np.random.default_rng(0).standard_normal((5, 200)) ** 3
    found = pair_features(vectors, [1, 3, 4])
    first, second = np.triu_indices(5, 1)  # row by row, as the pairs are
    for p in (1, 3, 4):
        norms = np.linalg.norm(vectors, ord=p, axis=1)
        assert found[f"norm_{p} sum"] == pytest.approx(norms[first] + norms[second])
        assert found[f"distance_{p}"] == pytest.approx(pdist(vectors, "minkowski", p=p))
        raised = np.sign(vectors) * np.abs(vectors) ** (p / 2)
        assert found[f"cos_{p}"] == pytest.approx(1 - pdist(raised, "cosine"))
    for name, moment in (
        ("skewness", stats.skew),
        ("kurtosis", stats.kurtosis),
        ("variance", np.var),
    ):
        values = moment(vectors, axis=1)
        assert found[f"{name} difference"] == pytest.approx(
            np.abs(values[first] - values[second])
        ), name
    assert found["correlation"] == pytest.approx(np.corrcoef(vectors)[first, second])
    assert found["covariance"] == pytest.approx(np.cov(vectors, bias=True)[first, second])


def test_the_fit_is_that_of_scikit_learn() -> None:
    """A soft label y is a sample of class 1 with weight y and one of class 0 with weight 1 - y. Scikit-learn minimises
    |w|^2 / 2 + C sum of losses, fedsim the mean loss + 1e-3 |w|^2: C = 1 / (2e-3 n)."""
    random = np.random.default_rng(0)
    features, labels = random.standard_normal((60, 4)), random.random(60)
    model = LogisticRegression(C=1 / (2e-3 * 60), tol=1e-10, max_iter=10_000)
    model.fit(
        np.concatenate([features] * 2), np.repeat([1, 0], 60), np.concatenate([labels, 1 - labels])
    )
    assert fit(features, labels) == pytest.approx([*model.coef_[0], model.intercept_[0]], abs=1e-4)


def test_cos_p_is_the_selectors_own_similarity() -> None:
    import torch

    vectors = np.random.default_rng(0).standard_normal((4, 50)) * np.array(
        [[1], [1e-8], [1e8], [0]]
    )
    table = similarities([torch.as_tensor(vectors)], 4.0)
    assert pair_features(vectors, [4])["cos_4"] == pytest.approx(table[np.triu_indices(4, 1)])
    assert pair_features(vectors * 1e-100, [4])["cos_4"] == pytest.approx(
        table[np.triu_indices(4, 1)]
    )
    for equal in (np.zeros((3, 5)), np.ones((3, 5)), np.ones((1, 5))):
        assert all(np.isfinite(values).all() for values in pair_features(equal, [1, 4]).values())


def test_features_that_all_runs_have_are_compared(tmp_path: Path) -> None:
    """Runs with different `selector.powers` in one folder."""
    for seed, names in enumerate((["cos_4", "cos_2", "inner product"], ["inner product", "cos_2"])):
        (tmp_path / str(seed)).mkdir()
        rng = np.random.default_rng(seed)
        features = {name: rng.standard_normal(3).tolist() for name in names}
        line = {
            "round": 1,
            "pairs": [[0, 1], [0, 2], [1, 2]],
            "features": features,
            "loss": [1.0, 2.0, 3.0],
        }
        (tmp_path / str(seed) / "trace.jsonl").write_text(json.dumps(line) + "\n")
    runs = [Run(tmp_path / str(seed), {"seed": seed}, {}) for seed in (0, 1)]
    names, found = read_conditions(runs)
    assert names == ["cos_2", "inner product"]
    assert [condition.features.shape for condition in found] == [(3, 2)] * 2
    table = make_tables(*read_conditions(runs))[0]
    assert set(table.texts["feature"]) == {"cos_2", "inner product", "a random pair"}
    assert "1 conditions for fitting, 1 for testing, split by seed" in table.note
    assert "fitted and tested on the same" in make_tables(*read_conditions(runs[:1]))[0].note
    without = read_conditions([Run(tmp_path, {}, {})])
    assert (make_tables(*without), judge_conditions(*without)) == ([], [])


def test_a_planted_feature_is_found() -> None:
    made = []
    for seed in range(4):
        for round in range(5):
            features = np.random.default_rng((seed, round)).standard_normal((45, 3)) * [1, 1, 0]
            made.append(Condition(seed, "1", round, features, features[:, 0]))
    training, testing = split_by_seed(made)
    assert {c.seed for c in testing} == {3}
    weights = fit(standardised(training, training), labels_of(training))
    assert weights[0] < 0
    assert abs(weights[0]) > 10 * abs(weights[1])
    assert weights[2] == pytest.approx(0, abs=1e-9)  # a constant feature
    fold = Fold(["cos_4", "norm", "none"], testing, training)
    assert fold.relative_losses(testing)[0].tolist() == [0] * 5
    one, other = (
        Condition(0, "1", 0, features, by * features[:, 0] + 7 * (by > 1)) for by in (1, 3)
    )
    assert other.labels == pytest.approx(one.labels)
    assert (one.labels.min(), one.labels.max()) == (0, 1)
    assert Condition(0, "1", 0, features, np.ones(45)).labels.tolist() == [0.5] * 45


def test_the_study_through_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "-m",
        "selector=pair_study",
        "seed=0,1",
        "num_clients=5",
        "cohort_size=2",
        "num_rounds=3",
    ]
    words += ["tracker=files_only", "partition.shards_per_client=1,2"]
    monkeypatch.setattr(sys, "argv", ["fedsim", *words])
    assert run(words) == 0
    folders = [p.parent for p in (tmp_path / "outputs/default").glob("*/trace.jsonl")]
    assert len(folders) == 4
    lines = read_metrics(folders[0], "trace.jsonl")
    assert [line["round"] for line in lines] == [1, 2, 3]
    assert lines[0]["pairs"] == [[i, j] for i in range(5) for j in range(i + 1, 5)]
    records = read_metrics(folders[0])
    held = json.loads((folders[0] / "summary.json").read_text())["totals"]["server_forward_samples"]
    assert held == 3 * records[0]["server_forward_samples"] > 0
    assert (
        records[0]["server_forward_samples"] % 10 == 0
    )  # ten pairs, each on all of the validation split
    assert make_report(["outputs/default", "--no-figures", "--all"]) == 0
    assert "a random pair" in capsys.readouterr().out
    report = tmp_path / "outputs/default/report"
    assert (report / "pair_features.csv").is_file()
    assert (report / "pair_features_by_setting.csv").read_text().startswith("feature,1,2\n")
    assert (report / "pair_features_by_rounds.csv").read_text().startswith("feature,1 to 5\n")


def test_rounds_that_bring_no_update_leave_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "fedsim.rounds.availability.Always.available", lambda self, t, n, rng: np.full(n, t != 2)
    )
    few = ("num_clients=4", "cohort_size=2", "num_rounds=3", "tracker=files_only", "local.epochs=1")
    for words, traced in (
        ((), [1, 3]),
        (("name=late", "system=uniform", "system.deadline=1e-6"), []),
    ):
        assert run(["selector=pair_study", *few, *words]) == 0
        (folder,) = (
            p.parent
            for p in (tmp_path / "outputs").glob(f"{'late' if words else 'default'}/*/summary.json")
        )
        assert len(read_metrics(folder)) == 3
        assert [line["round"] for line in read_metrics(folder, "trace.jsonl")] == traced
