"""The accuracy of each client: by hand, and in whole runs, in which it changes nothing else."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsim.config.compose import compose_jobs, make_plan, search_path
from fedsim.config.plan import hash_config
from fedsim.core.arrays import Floats
from fedsim.core.errors import ConfigError
from fedsim.core.record import CLIENT_ACCURACY_MEASURES
from fedsim.jobs.cli import run
from fedsim.partitions.division import Division
from fedsim.results.files import CLIENTS
from fedsim.results.reading import read_metrics, read_summary
from fedsim.rounds.client_accuracy import (
    ClientAccuracy,
    aggregates,
    client_accuracy,
)
from fedsim.rounds.loop import Simulation
from fedsim.running.assembly import build, prepare
from tests.run_toys import without_seconds
from tests.toys import ToyEngine, toy_params

Run = Callable[..., int]
QUICK = ("num_rounds=4", "local.epochs=1", "tracker=files_only", "eval_every=2")
WRITERS = (
    "dataset=femnist_generated",
    "partition=natural",
    "num_clients=8",
    "model=logistic",
    "dataset.num_writers=12",
    "dataset.test_samples=100",
    "partition.min_samples=5",
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
    (summary,) = tmp_path.glob(f"outputs/{name}/*/summary.json")
    return summary.parent


def division_of(train: Any, holdout: Any = (), histograms: Any = None) -> Division:
    nothing = np.empty(0, np.int64)
    return Division(
        train=[np.array(positions, np.int64) for positions in train],
        holdout=[np.array(positions, np.int64) for positions in holdout],
        validation=nothing,
        public=nothing,
        histograms=np.ones((len(train), 2), int) if histograms is None else histograms,
    )


def measure(client_accuracy: ClientAccuracy, hits: Any) -> Floats:
    """Return the accuracies of the clients if `hits` says which test samples are correct."""
    return client_accuracy.measure(ToyEngine([1]), toy_params(), np.array(hits, bool))


# --- by hand ---


def test_by_labels_weighs_the_accuracy_of_each_class_by_the_clients_labels() -> None:
    """The model is correct on 1/2, 1/1 and 1/4 of the test samples of the classes 0, 1 and 2. Class
    3 has no test sample, so it does not count."""
    test_labels = np.array([0, 0, 1, 2, 2, 2, 2])
    hits = [1, 0, 1, 0, 0, 1, 0]
    histograms = [[4, 0, 0, 0], [1, 3, 0, 0], [0, 2, 2, 4], [0, 0, 0, 5], [0, 0, 0, 0]]
    division = division_of([[]] * 5, histograms=np.array(histograms))
    accuracy = client_accuracy("labels", division, test_labels, None, None)
    expected = [1 / 2, (1 / 2 + 3 * 1) / 4, (2 * 1 + 2 / 4) / 4, np.nan, np.nan]
    np.testing.assert_allclose(measure(accuracy, hits), expected)
    assert accuracy.samples.tolist() == [4, 4, 4, 0, 0]


def test_on_the_test_samples_of_a_clients_owner() -> None:
    """The clients 0, 1 and 2 are the writers 7, 3 and 5. Writer 5 has no test sample, and writers 9
    and -1 are no clients."""
    owners = np.array([7, 7, 3, 5])
    test_owners = np.array([3, 9, 7, 3, 7, -1])
    hits = [1, 1, 1, 0, 1, 1]
    division = division_of([[1, 0], [2], [3]])
    accuracy = client_accuracy("test", division, np.zeros(6, int), owners, test_owners)
    np.testing.assert_array_equal(measure(accuracy, hits), [2 / 2, 1 / 2, np.nan])
    assert accuracy.samples.tolist() == [2, 2, 0]


NOT_BY_OWNER = [
    (None, None, [[0], [1]], "names the owner of each test sample"),
    ([1, 2], None, [[0], [1]], "names the owner of each test sample"),
    ([1, 2, 2], [1], [[0, 1], [2]], "one owner each"),
    ([1, 1, 2], [1], [[0], [1]], "one owner each, and different owners"),
]


@pytest.mark.parametrize(("owners", "test_owners", "train", "message"), NOT_BY_OWNER)
def test_test_samples_must_belong_to_clients(
    owners: Any, test_owners: Any, train: Any, message: str
) -> None:
    arrays = [None if names is None else np.array(names) for names in (owners, test_owners)]
    with pytest.raises(ConfigError, match=message):
        client_accuracy("test", division_of(train), np.zeros(1, int), *arrays)


class EvenPositions(ToyEngine):
    """An engine whose model is correct on even positions."""

    def hits(self, params: Any, positions: Any) -> Any:
        return positions % 2 == 0


OWN_SAMPLES = [
    ([[0, 1, 2], [], [3], [4, 6]], [2 / 3, np.nan, 0 / 1, 2 / 2]),
    ([[], []], [np.nan, np.nan]),
]


@pytest.mark.parametrize(("positions", "expected"), OWN_SAMPLES)
@pytest.mark.parametrize("measured_on", ["train", "holdout"])
def test_on_samples_of_the_client(measured_on: Any, positions: Any, expected: list[float]) -> None:
    division = division_of(train=positions, holdout=positions)
    accuracy = client_accuracy(measured_on, division, np.empty(0, int), None, None)
    accuracies = accuracy.measure(EvenPositions([7]), toy_params(), np.empty(0, bool))
    np.testing.assert_array_equal(accuracies, expected)


def test_measures_over_all_clients() -> None:
    """Ten clients with 0.9, 0.1 and eight times 0.5, and one without accuracy. A tenth of ten is
    one client. The variance is 2 x 0.4^2 / 10. Clients with 0.9 and 0.5 were never selected."""
    accuracies = np.array([0.9, 0.1, np.nan, *[0.5] * 8])
    selected = np.ones(11, bool)
    selected[[0, 2, 3]] = False
    expected = {
        "mean": 0.5,
        "std": np.sqrt(2 * 0.4**2 / 10),
        "worst_tenth": 0.1,
        "best_tenth": 0.9,
        "never_selected": (0.9 + 0.5) / 2,
    }
    measures = aggregates(accuracies, selected)
    assert measures == pytest.approx(expected)
    assert tuple(measures) == CLIENT_ACCURACY_MEASURES


def test_a_tenth_of_eleven_clients_is_two() -> None:
    measures = aggregates(np.array([0.0, 0.2, *[1.0] * 9]), np.ones(11, bool))
    assert measures["worst_tenth"] == pytest.approx((0.0 + 0.2) / 2)
    assert measures["never_selected"] is None


def test_measures_of_no_client_are_none() -> None:
    measures = aggregates(np.full(3, np.nan), np.zeros(3, bool))
    assert measures == dict.fromkeys(CLIENT_ACCURACY_MEASURES)


# --- whole runs ---


def expected_accuracies(folder: Path, measured_on: str, words: tuple[str, ...]) -> list[float]:
    """Return the accuracy of the saved model on each client, computed in plain PyTorch."""
    from safetensors.torch import load_file

    cache = f"cache_dir={folder.parents[2] / 'cache'}"
    with search_path():
        (job,) = compose_jobs([*QUICK, cache, *words], multirun=False)
    plan = make_plan(job.config, job.choices)
    experiment = build(plan)
    components = experiment.simulation.components
    data, test = components.engine.data, components.server_data.test
    model = experiment.model
    model.load_state_dict(load_file(folder / "model.safetensors"))
    model.eval()
    with torch.no_grad():
        hits = (model(data.x).argmax(1) == data.y).double()
        test_hits = (model(test.x).argmax(1) == test.y).double()
    division = experiment.division
    positions = division.holdout if measured_on == "holdout" else division.train
    accuracies = []
    for samples in positions:
        if measured_on in ("holdout", "train"):
            mean = hits[torch.as_tensor(samples)].mean()
        elif measured_on == "test":
            loaded = prepare(plan)
            assert loaded.owners is not None
            mean = test_hits[loaded.test_owners == loaded.owners[samples[0]]].mean()
        else:
            by_class = torch.stack([test_hits[test.y == c].mean() for c in range(10)])
            mean = by_class[data.y[torch.as_tensor(samples)]].mean()
        accuracies.append(float(mean))
    return accuracies


HOLDOUT = ("local.holdout_fraction=0.3",)


@pytest.mark.parametrize(
    ("measured_on", "words", "num_clients"),
    [
        ("labels", HOLDOUT, 20),
        ("holdout", HOLDOUT, 20),
        ("train", HOLDOUT, 20),
        ("test", WRITERS, 8),
    ],
)
def test_a_run_records_the_accuracy_of_its_model_on_each_client(
    measured_on: str, words: tuple[str, ...], num_clients: int, fedsim: Run, tmp_path: Path
) -> None:
    assert fedsim(*words, "name=x", f"client_accuracy={measured_on}") == 0
    folder = folder_of(tmp_path, "x")
    records = read_metrics(folder)

    # 1. The file with all accuracies
    with np.load(folder / CLIENTS) as file:
        arrays = dict(file)
    expected = expected_accuracies(folder, measured_on, words)
    np.testing.assert_allclose(arrays["accuracy"], expected, atol=1e-12)
    selected = np.zeros(num_clients, bool)
    for record in records:
        selected[record["selected"]] = True
    assert (arrays["selected"] == selected).all()

    # 2. Records: measures in rounds that are evaluated
    measures = aggregates(arrays["accuracy"], selected)
    for name, value in measures.items():
        assert records[-1][f"client_accuracy_{name}"] == value
    for record in records[::2]:
        assert not any(key.startswith("client_accuracy") for key in record)

    # 3. The summary, in which nothing is charged for it
    summary = read_summary(folder)
    assert summary is not None
    assert summary["client_accuracy"] == measures | {
        "clients": np.count_nonzero(arrays["samples"]),
        "clients_never_selected": np.count_nonzero(~selected),
    }
    assert summary["totals"]["forward_samples"] == 0
    assert summary["totals"]["server_forward_samples"] == 0


@pytest.mark.parametrize(
    ("engine", "selector", "measured_on"),
    [("batched", "power_of_choice", "labels"), ("native", "gpfl", "holdout")],
)
def test_measuring_changes_no_other_bit(
    engine: str, selector: str, measured_on: str, fedsim: Run, tmp_path: Path
) -> None:
    words = (f"engine={engine}", f"selector={selector}", "local.holdout_fraction=0.3")
    assert fedsim(*words, "name=without") == 0
    assert fedsim(*words, "name=with", f"client_accuracy={measured_on}") == 0
    without, measured = folder_of(tmp_path, "without"), folder_of(tmp_path, "with")
    assert read_metrics(measured)[1]["client_accuracy_mean"] > 0
    records = without_seconds(measured)
    for record in records:
        for key in [key for key in record if key.startswith("client_accuracy")]:
            del record[key]
    assert records == without_seconds(without)
    model = (without / "model.safetensors").read_bytes()
    assert (measured / "model.safetensors").read_bytes() == model
    assert not (without / CLIENTS).exists()
    assert "client_accuracy" not in (read_summary(without) or {})


def test_a_resumed_run_records_the_same(
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
    step = Simulation.step

    def stop_before_round_5(self: Any) -> Any:
        if self.round == 4:
            raise KeyboardInterrupt
        return step(self)

    with monkeypatch.context() as patched:
        patched.setattr(Simulation, "step", stop_before_round_5)
        with pytest.raises(KeyboardInterrupt):
            fedsim(*words, "name=resumed")
    resumed, whole = folder_of(tmp_path, "resumed"), folder_of(tmp_path, "whole")
    assert not (resumed / CLIENTS).exists()
    assert fedsim(*words, "name=resumed") == 0
    assert without_seconds(resumed) == without_seconds(whole)
    assert (resumed / CLIENTS).read_bytes() == (whole / CLIENTS).read_bytes()


# --- configs ---


def test_the_key_changes_the_name_of_a_folder_only_if_it_is_set() -> None:
    words: list[list[str]] = [[]]
    for measured_on in ("labels", "test", "holdout", "train"):
        words.append([f"client_accuracy={measured_on}"])
    with search_path():
        configs = [compose_jobs(some, multirun=False)[0].config for some in words]
    plain = dict(configs[0])
    assert plain.pop("client_accuracy") is None
    assert hash_config(plain) == hash_config(configs[0])
    assert len({hash_config(config) for config in configs}) == 5


@pytest.mark.parametrize(
    ("word", "rule"),
    [
        ("client_accuracy=writers", "must be one of labels, test, holdout, train or null"),
        ("client_accuracy=holdout", "local.holdout_fraction=0.2"),
    ],
)
def test_mistakes_are_reported_before_anything_runs(word: str, rule: str) -> None:
    with search_path():
        (job,) = compose_jobs([word], multirun=False)
    with pytest.raises(ConfigError, match=rf"client_accuracy(.|\n)*{rule}"):
        make_plan(job.config, job.choices)
