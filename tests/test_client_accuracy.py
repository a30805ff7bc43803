"""The accuracy of each client: what it is by hand, and that nothing else changes by it."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsim.config.compose import compose_jobs, make_plan, search_path
from fedsim.config.plan import hash_config
from fedsim.core.errors import ConfigError
from fedsim.core.record import CLIENT_ACCURACY_MEASURES
from fedsim.jobs.cli import run
from fedsim.partitions.division import Division
from fedsim.results.files import CLIENTS
from fedsim.results.reading import read_metrics, read_summary
from fedsim.rounds.client_accuracy import (
    aggregates,
    by_labels,
    client_accuracy,
)
from fedsim.rounds.loop import Simulation
from fedsim.running.assembly import build, prepare
from tests.run_toys import without_seconds
from tests.toys import ToyEngine, toy_params

Run = Callable[..., int]
QUICK = ("num_rounds=4", "local.epochs=1", "tracker=files_only", "eval_every=2")
KINDS = ("labels", "test", "holdout", "train")
WRITERS = (
    *("dataset=femnist_generated", "partition=natural", "num_clients=8", "model=logistic"),
    *("dataset.num_writers=12", "dataset.test_samples=100", "partition.min_samples=5"),
)


@pytest.fixture
def fedsim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> int:
        argv = [*QUICK, f"cache_dir={tmp_path / 'cache'}", *words]
        monkeypatch.setattr(sys, "argv", ["fedsim", *argv])
        return run(argv)

    return call


def folder_of(tmp_path: Path, name: str) -> Path:
    (found,) = (p.parent for p in tmp_path.glob(f"outputs/{name}/*/summary.json"))
    return found


# --- the numbers ---------------------------------------------------------------------------------------------------


def a_division(histograms: Any, train: Any = ((0,), (1,)), holdout: Any = ()) -> Division:
    none, counts = np.empty(0, np.int64), np.asarray(histograms)
    return Division(
        [np.asarray(t, np.int64) for t in train],
        [np.asarray(h, np.int64) for h in holdout],
        none,
        none,
        counts,
    )


def test_by_labels_weights_the_accuracy_of_each_class_by_the_clients_labels() -> None:
    """Classes 0, 1, 2 of the test set are right in 1/2, 1 and 1/4 of the cases; class 3 has no test
    sample."""
    labels = np.array([0, 0, 1, 2, 2, 2, 2])
    hits = np.array([1, 0, 1, 0, 0, 1, 0], bool)
    of_clients = by_labels(
        np.array([[4, 0, 0, 0], [1, 3, 0, 0], [0, 2, 2, 4], [0, 0, 0, 5], [0, 0, 0, 0]]), labels
    )
    expected = [1 / 2, (1 / 2 + 3) / 4, (2 + 2 / 4) / 4, np.nan, np.nan]
    np.testing.assert_allclose(of_clients.measure(ToyEngine([1]), toy_params(), hits), expected)
    assert of_clients.samples.tolist() == [4, 4, 4, 0, 0]


def test_on_the_test_samples_of_a_clients_owner() -> None:
    """Clients 0, 1, 2 are writers 7, 3 and 5; writer 5 has no test sample, writer 9 is no
    client."""
    owners, test_owners = np.array([7, 7, 3, 5]), np.array([3, 9, 7, 3, 7, -1])
    division = a_division(np.ones((3, 2), int), train=[[1, 0], [2], [3]])
    of_clients = client_accuracy("test", division, np.zeros(6, int), owners, test_owners)
    hits = np.array([1, 1, 1, 0, 1, 1], bool)
    np.testing.assert_array_equal(
        of_clients.measure(ToyEngine([1]), toy_params(), hits), [1, 1 / 2, np.nan]
    )
    assert of_clients.samples.tolist() == [2, 2, 0]
    for some, its, train, text in (
        (None, None, [[0], [1]], "names the owner of each test sample"),
        (np.array([1, 2]), None, [[0], [1]], "names the owner of each test sample"),
        (np.array([1, 2, 2]), np.array([1]), [[0, 1], [2]], "one owner each"),
        (
            np.array([1, 1, 2]),
            np.array([1]),
            [[0], [1]],
            "one owner each, and different owners",
        ),
    ):
        with pytest.raises(ConfigError, match=text):
            client_accuracy(
                "test", a_division(np.ones((2, 2), int), train), np.zeros(1, int), some, its
            )


class Guesses(ToyEngine):
    """Right on even positions."""

    def hits(self, params: Any, positions: Any) -> Any:
        return positions % 2 == 0


def test_on_own_samples() -> None:
    nobody = np.empty(0, np.int64)
    for positions, expected in (
        ([np.array([0, 1, 2]), nobody, np.array([3]), np.array([4, 6])], [2 / 3, np.nan, 0, 1]),
        ([nobody, nobody], [np.nan, np.nan]),
    ):
        division = a_division(np.ones((len(positions), 2), int), positions)
        of_clients = client_accuracy("train", division, nobody, None, None)
        found = of_clients.measure(Guesses([7]), toy_params(), np.empty(0, bool))
        np.testing.assert_array_equal(found, expected)


def test_aggregates_by_hand() -> None:
    """Eleven clients, one of them without accuracy: a tenth of ten is one client; of eleven it
    would be two."""
    accuracies = np.array([0.9, 0.1, np.nan, *[0.5] * 8])
    selected = np.ones(11, bool)
    selected[[0, 2, 3]] = False
    found = aggregates(accuracies, selected)
    assert found == pytest.approx(
        {
            "mean": 0.5,
            "std": np.sqrt(0.032),
            "worst_tenth": 0.1,
            "best_tenth": 0.9,
            "never_selected": 0.7,
        }
    )
    assert tuple(found) == CLIENT_ACCURACY_MEASURES
    eleven = aggregates(np.array([0.0, 0.2, *[1.0] * 9]), np.ones(11, bool))
    assert (eleven["worst_tenth"], eleven["never_selected"]) == (pytest.approx(0.1), None)
    assert aggregates(np.full(3, np.nan), np.zeros(3, bool)) == dict.fromkeys(
        CLIENT_ACCURACY_MEASURES
    )


# --- whole runs ----------------------------------------------------------------------------------------------------


def own_accuracies(folder: Path, kind: str, words: tuple[str, ...]) -> list[float]:
    """The accuracy of the saved model on each client, sample by sample in plain PyTorch."""
    from safetensors.torch import load_file

    with search_path():
        (job,) = compose_jobs(
            [*QUICK, f"cache_dir={folder.parents[2] / 'cache'}", *words], multirun=False
        )
    made_plan = make_plan(job.config, job.choices)
    made = build(made_plan)
    model, parts = made.model, made.simulation.components
    model.load_state_dict(load_file(folder / "model.safetensors"))
    model.eval()
    data, test = parts.engine.data, parts.server_data.test
    positions = made.division.holdout if kind == "holdout" else made.division.train
    with torch.no_grad():
        right = model(data.x).argmax(1) == data.y
        tested = (model(test.x).argmax(1) == test.y).double()
    if kind in ("holdout", "train"):
        return [float(right[torch.as_tensor(own)].double().mean()) for own in positions]
    if kind == "test":
        found = prepare(made_plan)
        assert found.owners is not None
        return [
            float(tested[found.test_owners == found.owners[own[0]]].mean())
            for own in made.division.train
        ]
    by_class = torch.stack([tested[test.y == c].mean() for c in range(10)])
    return [float(by_class[data.y[torch.as_tensor(own)]].mean()) for own in positions]


@pytest.mark.parametrize(
    ("kind", "words", "num"),
    [
        *((kind, ("local.holdout_fraction=0.3",), 20) for kind in ("labels", "holdout", "train")),
        ("test", WRITERS, 8),
    ],
    ids=["labels", "holdout", "train", "writers"],
)
def test_a_run_records_what_its_model_gets_right_on_each_client(
    kind: str, words: tuple[str, ...], num: int, fedsim: Run, tmp_path: Path
) -> None:
    assert fedsim(*words, "name=x", f"client_accuracy={kind}") == 0
    folder = folder_of(tmp_path, "x")
    records, summary = read_metrics(folder), read_summary(folder)
    assert summary is not None
    with np.load(folder / CLIENTS) as file:
        arrays = dict(file)
    np.testing.assert_allclose(arrays["accuracy"], own_accuracies(folder, kind, words), atol=1e-12)
    selected = np.isin(np.arange(num), [i for r in records for i in r["selected"]])
    assert (arrays["selected"] == selected).all()
    assert [sorted(k for k in r if k.startswith("client")) for r in records[::2]] == [[], []]
    expected = aggregates(arrays["accuracy"], selected)
    assert {
        name: records[-1][f"client_accuracy_{name}"] for name in CLIENT_ACCURACY_MEASURES
    } == expected
    told = {
        "clients": int((arrays["samples"] > 0).sum()),
        "clients_never_selected": int((~selected).sum()),
    }
    assert summary["client_accuracy"] == {**expected, **told}
    totals = summary["totals"]
    assert (totals["forward_samples"], totals["server_forward_samples"]) == (
        0,
        0,
    )  # nothing is charged for it


@pytest.mark.parametrize(
    ("engine", "selector", "kind"),
    [("batched", "power_of_choice", "labels"), ("native", "gpfl", "holdout")],
)
def test_measuring_changes_no_other_bit(
    engine: str, selector: str, kind: str, fedsim: Run, tmp_path: Path
) -> None:
    words = (f"engine={engine}", f"selector={selector}", "local.holdout_fraction=0.3")
    assert fedsim(*words, "name=without") == 0
    assert fedsim(*words, "name=with", f"client_accuracy={kind}") == 0
    without, measured = (folder_of(tmp_path, name) for name in ("without", "with"))
    kept = [
        {k: v for k, v in r.items() if not k.startswith("client_accuracy")}
        for r in without_seconds(measured)
    ]
    assert kept == without_seconds(without)
    assert (measured / "model.safetensors").read_bytes() == (
        without / "model.safetensors"
    ).read_bytes()
    assert read_metrics(measured)[1]["client_accuracy_mean"] > 0
    assert not (without / CLIENTS).exists()
    assert "client_accuracy" not in (read_summary(without) or {})


def test_a_run_that_goes_on_records_the_same(
    fedsim: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (
        "client_accuracy=labels",
        "num_rounds=6",
        "eval_every=1",
        "checkpoint.every=1",
        "selector=oort",
    )
    assert fedsim(*words, "name=whole") == 0
    original = Simulation.step

    def stop_before_the_fifth(self: Any) -> Any:
        if self.round == 4:
            raise KeyboardInterrupt
        return original(self)

    with monkeypatch.context() as patched:
        patched.setattr(Simulation, "step", stop_before_the_fifth)
        with pytest.raises(KeyboardInterrupt):
            fedsim(*words, "name=parts")
    assert not (folder_of(tmp_path, "parts") / CLIENTS).exists()
    assert fedsim(*words, "name=parts") == 0
    whole, parts = folder_of(tmp_path, "whole"), folder_of(tmp_path, "parts")
    assert without_seconds(parts) == without_seconds(whole)
    assert (parts / CLIENTS).read_bytes() == (whole / CLIENTS).read_bytes()


# --- configs -------------------------------------------------------------------------------------------------------


def test_folders_of_runs_without_it_keep_their_names() -> None:
    with search_path():
        words: list[list[str]] = [[], *([f"client_accuracy={kind}"] for kind in KINDS)]
        plain, *others = (compose_jobs(some, multirun=False)[0].config for some in words)
    assert plain["client_accuracy"] is None
    assert hash_config(plain) == hash_config(
        {k: v for k, v in plain.items() if k != "client_accuracy"}
    )
    assert len({hash_config(config) for config in (plain, *others)}) == 5


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["client_accuracy=writers"], "must be one of labels, test, holdout, train or null"),
        (["client_accuracy=holdout"], "local.holdout_fraction=0.2"),
    ],
)
def test_mistakes_are_told_before_anything_runs(words: list[str], text: str) -> None:
    with search_path():
        (job,) = compose_jobs(words, multirun=False)
    with pytest.raises(ConfigError, match=text) as caught:
        make_plan(job.config, job.choices)
    assert "client_accuracy" in str(caught.value)
