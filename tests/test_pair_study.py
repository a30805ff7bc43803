"""PNCS's feature study: features by hand, planted outcomes found again, and the study through the command."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from fedsim.jobs.cli import run
from fedsim.papers.pair_study import (
    Condition,
    Fold,
    fit,
    labels_of,
    make_tables,
    read_conditions,
    split_by_seed,
    standardised,
)
from fedsim.report.__main__ import main
from fedsim.results.files import read_metrics
from fedsim.results.runs import Run
from fedsim.selectors.pair_study import pair_features
from fedsim.selectors.similarity import similarities


def test_features_by_hand() -> None:
    vectors = np.array([[3.0, -4.0], [0.0, 2.0], [1.0, 1.0]])
    found = pair_features(vectors, [1, 2])
    assert all(len(values) == 3 for values in found.values())  # pairs 01, 02, 12
    assert found["norm_2 sum"] == pytest.approx([7, 5 + 2**0.5, 2 + 2**0.5])
    assert found["norm_1 difference"] == pytest.approx([5, 5, 0])
    assert found["norm_inf sum"] == pytest.approx([6, 5, 3])
    assert found["distance_1"] == pytest.approx([9, 7, 2])
    assert found["distance_inf"] == pytest.approx([6, 5, 1])
    assert found["inner product"] == pytest.approx([-8, -1, 2])
    assert found["cos_2"] == pytest.approx([-0.8, -1 / (5 * 2**0.5), 1 / 2**0.5])
    assert found["sign agreement"] == pytest.approx([0.25, 0.5, 0.75])  # a zero agrees by half
    assert found["mean sum"] == pytest.approx([0.5, 0.5, 2])
    assert found["variance difference"] == pytest.approx([12.25 - 1, 12.25, 1])
    assert found["sparsity sum"] == pytest.approx([0.5, 0, 0.5])


def test_cos_p_is_the_selectors_own_similarity() -> None:
    import torch

    vectors = np.random.default_rng(0).standard_normal((4, 50)) * np.array([[1], [1e-8], [1e8], [0]])
    table = similarities([torch.as_tensor(vectors)], 4.0)
    assert pair_features(vectors, [4])["cos_4"] == pytest.approx(table[np.triu_indices(4, 1)])
    assert pair_features(vectors * 1e-100, [4])["cos_4"] == pytest.approx(table[np.triu_indices(4, 1)])


def test_features_of_equal_zero_and_lonely_vectors_are_finite() -> None:
    for vectors in (np.zeros((3, 5)), np.ones((3, 5)), np.ones((1, 5))):
        assert all(np.isfinite(values).all() for values in pair_features(vectors, [1, 4]).values())


def planted(seed: int, round: int) -> Condition:
    """Outcomes that are a client's cos_4 to another and nothing else."""
    rng = np.random.default_rng((seed, round))
    vectors = rng.standard_normal((10, 30)) + rng.standard_normal(30)
    found = pair_features(vectors, [2, 4])
    features = np.array([found["cos_4"], found["norm_2 sum"], np.zeros(45)]).T
    return Condition(seed, "1", round, features, features[:, 0])


def test_features_that_all_runs_have_are_compared(tmp_path: Path) -> None:
    """Runs with different `selector.powers` in one folder."""
    for seed, names in enumerate((["cos_4", "cos_2", "inner product"], ["inner product", "cos_2"])):
        (tmp_path / str(seed)).mkdir()
        rng = np.random.default_rng(seed)
        features = {name: rng.standard_normal(3).tolist() for name in names}
        line = {"round": 1, "pairs": [[0, 1], [0, 2], [1, 2]], "features": features, "loss": [1.0, 2.0, 3.0]}
        (tmp_path / str(seed) / "trace.jsonl").write_text(json.dumps(line) + "\n")
    runs = [Run(tmp_path / str(seed), {"seed": seed}, {}) for seed in (0, 1)]
    names, conditions = read_conditions(runs)
    assert names == ["cos_2", "inner product"]
    assert [condition.features.shape for condition in conditions] == [(3, 2)] * 2
    table = make_tables(runs)[0]
    assert {row[0] for row in table.rows} == {"cos_2", "inner product", "a random pair"}
    assert "1 conditions for fitting, 1 for testing, split by seed" in table.note
    assert "fitted and tested on the same" in make_tables(runs[:1])[0].note


def test_a_planted_feature_is_found() -> None:
    conditions = [planted(seed, round) for seed in range(4) for round in range(5)]
    training, testing = split_by_seed(conditions)
    assert {c.seed for c in testing} == {3}
    weights = fit(standardised(training, training), labels_of(training))
    assert weights[0] < 0
    assert abs(weights[0]) > 10 * abs(weights[1])
    assert weights[2] == pytest.approx(0, abs=1e-9)  # a constant feature
    assert Fold(["cos_4", "norm", "0"], testing, training).relative_losses(testing)[0].tolist() == [0] * 5


def test_labels_know_nothing_of_scale_and_shift() -> None:
    one = planted(0, 0)
    other = Condition(0, "1", 0, one.features, 7 + 3 * one.losses)
    assert other.labels == pytest.approx(one.labels)
    assert Condition(0, "1", 0, one.features, np.ones(45)).labels.tolist() == [0.5] * 45
    assert (one.labels.min(), one.labels.max()) == (0, 1)


def test_the_study_through_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["-m", "selector=pair_study", "seed=0,1", "num_clients=5", "cohort_size=2", "num_rounds=3"]
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
    assert records[0]["server_forward_samples"] % 10 == 0  # ten pairs, each on all of the validation split
    assert records[0]["train_samples"] > 0
    assert main(["outputs/default", "--no-figures"]) == 0
    assert "a random pair" in capsys.readouterr().out
    report = tmp_path / "outputs/default/report"
    assert (report / "pair_features.csv").is_file()
    assert (report / "pair_features_by_setting.csv").read_text().startswith("feature,1,2\n")
    assert (report / "pair_features_by_rounds.csv").read_text().startswith("feature,1 to 5\n")


@pytest.mark.parametrize(
    ("absent", "words", "traced"),
    [({2}, (), [1, 3]), ({1, 3}, (), [2]), (set(), ("system=uniform", "system.deadline=1e-6"), [])],
    ids=["nobody there in round 2", "nobody there in rounds 1 and 3", "everybody late"],
)
def test_rounds_that_bring_no_update_leave_no_trace(
    absent: set[int], words: tuple[str, ...], traced: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "fedsim.rounds.availability.Always.available", lambda self, t, n, rng: np.full(n, t not in absent)
    )
    few = ("num_clients=4", "cohort_size=2", "num_rounds=3", "tracker=files_only", "local.epochs=1")
    assert run(["selector=pair_study", *few, *words]) == 0
    (folder,) = (p.parent for p in (tmp_path / "outputs/default").glob("*/summary.json"))
    assert len(read_metrics(folder)) == 3
    lines = read_metrics(folder, "trace.jsonl") if (folder / "trace.jsonl").exists() else []
    assert [line["round"] for line in lines] == traced


def test_runs_without_a_trace_make_no_table(tmp_path: Path) -> None:
    assert make_tables([Run(tmp_path, {}, {})]) == []
