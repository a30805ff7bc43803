"""A run's components are what its config says, and its summary is what its rounds were."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsim.config.compose import search_path
from fedsim.config.plan import Plan
from fedsim.core.arrays import Ints
from fedsim.core.errors import DataError
from fedsim.core.record import CLOCK_FIELDS, Record
from fedsim.data.digits import Digits
from fedsim.results.reading import read_summary
from fedsim.rounds.loop import Simulation
from fedsim.running import assembly
from fedsim.running.assembly import Experiment, build
from fedsim.running.component_warnings import component_warnings
from fedsim.running.experiment import execute
from fedsim.running.summary import totals_of
from fedsim.selectors.random import Random
from fedsim.tracking.base import Trackers
from tests.run_toys import plan_of

HELD = ("local.holdout_fraction=0.25", "server.validation_fraction=0.1", "server.public_samples=30")


@pytest.fixture(scope="module", autouse=True)
def _conf() -> Iterator[None]:
    with search_path():
        yield


def plan(*words: str) -> Plan:
    """Return the plan of a run of 2 rounds with 2 of 6 clients."""
    few = ("num_rounds=2", "local.epochs=1", "num_clients=6", "cohort_size=2")
    return plan_of(*few, "tracker=files_only", *words)


def same(first: Sequence[Ints], second: Sequence[Ints]) -> bool:
    pairs = zip(first, second, strict=True)
    return all(np.array_equal(positions, others) for positions, others in pairs)


# --- components ---


def test_accuracy_is_that_of_the_test_set(tmp_path: Path) -> None:
    data = Digits(tmp_path, tmp_path, mean=[0.3053], std=[0.3759]).load()
    simulation = build(plan(*HELD)).simulation
    test = simulation.components.server_data.test
    assert torch.equal(test.y, data.test.y)
    assert torch.equal(test.x, data.normalise(data.test.x))
    with torch.no_grad():
        outputs = simulation.components.engine.predict(simulation.params, test.x)
    correct = outputs.argmax(1) == data.test.y
    assert simulation.evaluate().accuracy == pytest.approx(float(correct.double().mean()))


@pytest.mark.parametrize("evaluate_on", ["train", "holdout"])
def test_clients_train_on_their_samples_and_report_on_those_that_are_asked_for(
    evaluate_on: str,
) -> None:
    experiment = build(plan(*HELD, f"local.evaluate_on={evaluate_on}"))
    division = experiment.division
    data = experiment.simulation.components.engine.data
    assert same(data.train, division.train)
    assert same(data.evaluate, division.train if evaluate_on == "train" else division.holdout)
    for train, holdout in zip(division.train, division.holdout, strict=True):
        assert len(holdout) / (len(holdout) + len(train)) == pytest.approx(0.25, abs=0.02)
    sizes = experiment.simulation.components.population.sizes
    assert sizes.tolist() == [len(train) for train in division.train]


def test_the_server_holds_what_the_division_gives_it() -> None:
    experiment = build(plan(*HELD, "selector=gpfl"))
    division = experiment.division
    data = experiment.simulation.components.engine.data
    server = experiment.simulation.components.server_data
    assert (len(division.validation), len(division.public)) == (144, 30)
    assert server.validation is not None
    assert torch.equal(server.validation.x, data.x[division.validation])
    assert torch.equal(server.validation.y, data.y[division.validation])
    assert server.public is not None
    assert torch.equal(server.public, data.x[division.public])


def test_a_server_without_samples_holds_none() -> None:
    server = build(plan("server.validation_fraction=0")).simulation.components.server_data
    assert server.validation is None
    assert server.public is None


def weights(experiment: Experiment) -> torch.Tensor:
    return torch.cat([value.flatten() for value in experiment.simulation.params.values()])


def test_the_seed_of_the_partition_moves_samples_and_not_the_model() -> None:
    base = build(plan(*HELD))
    moved = build(plan(*HELD, "partition_seed=9"))
    assert moved.division.hash != base.division.hash
    assert torch.equal(weights(moved), weights(base))


def test_the_seed_of_the_model_changes_it_and_moves_no_sample() -> None:
    base = build(plan(*HELD))
    changed = build(plan(*HELD, "init_seed=9"))
    assert changed.division.hash == base.division.hash
    assert not torch.equal(weights(changed), weights(base))


def test_the_root_seed_is_that_of_partition_and_model() -> None:
    root = build(plan(*HELD, "seed=9"))
    moved = build(plan(*HELD, "partition_seed=9")).division
    assert same(moved.train, root.division.train)
    assert same(moved.holdout, root.division.holdout)
    assert np.array_equal(moved.validation, root.division.validation)
    assert torch.equal(weights(build(plan(*HELD, "init_seed=9"))), weights(root))


def test_running_statistics_are_no_parameters_for_the_aggregator() -> None:
    layers = (torch.nn.Flatten(), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 10))
    model = torch.nn.Sequential(*layers)
    run = plan()
    division = build(run).division
    streams = assembly.Streams(0)
    data = assembly.prepare(run)
    components = assembly.components_of(
        run.config, run.settings, run.local, data, division, model, streams
    )
    assert components.aggregator.buffers == {"1.running_mean", "1.running_var"}


# --- prepared data ---


def test_samples_are_kept_for_the_next_run_with_the_same_data_set_model_and_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loads: list[Any] = []
    load = assembly._load

    def counted_load(*arguments: Any) -> assembly.PreparedData:
        loads.append(arguments)
        return load(*arguments)

    monkeypatch.setattr(assembly, "_load", counted_load)
    assembly.forget()
    for words, num_loads in (
        ([], 1),
        (["seed=1", "selector=md"], 1),
        (["model=logistic"], 2),
        (["model=logistic", "dataset.mean=[0.5]"], 3),
        (["model=logistic", "dataset.mean=[0.5]", "data_dir=elsewhere"], 4),
    ):
        assembly.prepare(plan(*words))
        assert len(loads) == num_loads
    monkeypatch.chdir("/")  # paths in a config may be relative
    assembly.prepare(plan("model=logistic", "dataset.mean=[0.5]", "data_dir=elsewhere"))
    assert len(loads) == 5


def test_a_model_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes: list[Any] = []
    build_model = assembly.build_model

    def counted_build(node: Any, *arguments: Any) -> torch.nn.Module:
        nodes.append(node)
        return build_model(node, *arguments)

    monkeypatch.setattr(assembly, "build_model", counted_build)
    build(plan())
    assert len(nodes) == 1


# --- the summary ---


def entry(round: int, accuracy: float | None, **values: Any) -> Record:
    """Return a record in which everything else is 1, without a simulated clock."""
    fields = dict.fromkeys(Record.__dataclass_fields__, 1) | dict.fromkeys(CLOCK_FIELDS)
    fields |= {"round": round, "test_accuracy": accuracy, "selected": [0]}
    return Record(**(fields | values))


def test_totals_are_those_of_the_rounds() -> None:
    rounds = [
        entry(1, 0.2, coverage=0.3, participation_ratio=0.5),
        entry(2, 0.7, coverage=0.6, participation_ratio=1.0),
        entry(3, 0.5, coverage=0.9, participation_ratio=0.0, wall_seconds=8.0),
        entry(4, None, coverage=0.95, participation_ratio=0.5, wall_seconds=11.0, bytes_up=9),
    ]
    totals = totals_of(rounds, 0.1)
    assert totals["rounds"] == 4
    assert totals["initial_accuracy"] == 0.1
    assert totals["last_accuracy"] == 0.5  # round 4 was not evaluated
    assert totals["best_accuracy"] == 0.7
    assert totals["final_accuracy"] == pytest.approx((0.2 + 0.7 + 0.5) / 3)
    assert totals["mean_participation_ratio"] == 0.5
    assert totals["coverage"] == 0.95
    assert totals["wall_seconds"] == 11.0
    assert totals["totals"]["bytes_up"] == 1 + 1 + 1 + 9
    assert totals["totals"]["seconds_train"] == 4


def test_without_a_round_there_are_no_accuracies() -> None:
    totals = totals_of([], 0.1)
    assert totals["rounds"] == 0
    assert totals["last_accuracy"] is None
    assert totals["coverage"] == 0.0


@pytest.mark.usefixtures("empty_folder")
def test_evaluations_are_as_frequent_as_asked_and_the_first_is_before_training() -> None:
    run = plan("num_rounds=5", "eval_every=3")
    before = build(run).simulation.evaluate().accuracy
    summary = execute(run).summary
    assert summary["initial_accuracy"] == before > 0
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    is_missing = ['"test_accuracy": null' in line for line in lines]
    assert is_missing == [True, True, False, True, False]


@pytest.mark.usefixtures("empty_folder")
def test_a_failure_is_in_the_summary_with_its_reason_and_is_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = Simulation.step

    def broken(self: Simulation) -> Record:
        if self.round == 1:
            raise KeyError("mine")
        return step(self)

    run = plan("seed=3")
    started: list[int] = []
    monkeypatch.setattr(Trackers, "start", lambda self, info: started.append(info.seed))
    with monkeypatch.context() as patch:
        patch.setattr(Simulation, "step", broken)
        assert execute(run).status == "failed"
    summary = read_summary(run.folder) or {}
    assert (summary["status"], summary["rounds"], summary["seed"]) == ("failed", 1, 3)
    line = broken.__code__.co_firstlineno + 2
    place = f"test_experiment.py, line {line}, in broken"
    assert summary["error"] == f"KeyError: 'mine' (round 2, {place})"
    assert not execute(run).skipped
    assert execute(run).skipped
    assert not execute(plan("seed=3", "overwrite=true")).skipped
    assert started == [3, 3, 3]


def fails_in_round_one(selector: Random) -> dict[str, Any]:
    raise KeyError("mine")


@pytest.mark.parametrize(
    ("trace", "error"),
    [
        (
            fails_in_round_one,
            r"KeyError: 'mine' \(round 1, test_experiment\.py, line \d+, in fails_.*",
        ),
        (
            lambda selector: {"x": lambda: 0},
            r"round 1: Random\.trace must be a dict of JSON values: .*function is not JSON serial.*",
        ),
        (
            lambda selector: [1],
            r"round 1: Random\.trace must be a dict of JSON values: 'list' object is not a mapping",
        ),
    ],
)
def test_an_error_in_a_trace_names_its_round(
    trace: Any, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Random, "trace", property(trace))
    run = plan("overwrite=true")
    assert execute(run).status == "failed"
    assert re.fullmatch(error, (read_summary(run.folder) or {})["error"])


# --- mistakes and warnings ---


def test_a_holdout_without_a_sample_is_an_error_before_round_1() -> None:
    """The 300 clients have 4 or 5 samples."""
    words = ("num_clients=300", "partition=iid", "local.evaluate_on=holdout")
    error = r"local\.holdout_fraction=0\.1: .*: the largest client has 5 samples"
    with pytest.raises(DataError, match=error):
        build(plan(*words, "local.holdout_fraction=0.1"))
    build(plan(*words, "local.holdout_fraction=0.2"))


def test_clients_without_a_loss_to_report_are_a_warning() -> None:
    """The 300 clients have 4 or 5 samples, and a tenth of 5 rounds to a sample."""
    words = ("num_clients=300", "partition=iid", "local.evaluate_on=holdout", "selector=top_loss")
    experiment = build(plan(*words, "local.holdout_fraction=0.12"))
    num_silent = sum(len(held_out) == 0 for held_out in experiment.division.holdout)
    assert 0 < num_silent < 300
    (warning,) = component_warnings(experiment.simulation)
    assert warning.startswith(f"{num_silent} of 300 clients hold out no sample")
    assert component_warnings(build(plan(*words, "local.holdout_fraction=0.2")).simulation) == []


@pytest.mark.parametrize(("batch_size", "count"), [(2, 2), (1, 6)])
def test_a_batch_of_one_sample_with_batch_norm_is_a_warning(batch_size: int, count: int) -> None:
    words = ("partition=iid", f"local.batch_size={batch_size}", "model=resnet20")
    warning = build(plan(*words)).simulation.components.engine.warning
    batches = f"{count} of 6 clients have a batch of one sample, in which batch norm sees no"
    assert str(warning).startswith(f"local.batch_size={batch_size}: {batches}")


def test_a_batch_of_one_sample_without_batch_norm_is_no_warning() -> None:
    experiment = build(plan("partition=iid", "local.batch_size=2", "model=mlp"))
    assert experiment.simulation.components.engine.warning is None


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize(
    ("selector", "aggregator", "ignored"),
    [("kvib", "median", 1), ("kvib", "mifa", 1), ("kvib", "uniform", 0), ("random", "median", 0)],
)
def test_weights_that_the_aggregator_ignores_are_named_once(
    selector: str, aggregator: str, ignored: int, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (f"selector={selector}", f"aggregator={aggregator}", "num_rounds=3", "local.epochs=1")
    execute(plan(*words, "tracker=console"))
    assert capsys.readouterr().out.count("KVib gives its clients weights, but") == ignored


@pytest.mark.usefixtures("empty_folder")
def test_a_warning_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("partition=iid", "local.epochs=null", "local.steps=1", "local.batch_size=2")
    quick = ("num_rounds=1", "tracker=default", "tracker.wandb.mode=disabled")
    execute(plan(*words, *quick, "model=resnet20"))
    printed = " ".join("".join(capsys.readouterr()).split())
    assert "in which batch norm sees no variance" in printed
