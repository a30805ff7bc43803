"""A run's parts are made of what its config says, and its summary of what its rounds were."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsim.config.compose import search_path
from fedsim.config.plan import Plan
from fedsim.core.errors import DataError
from fedsim.core.record import CLOCK_FIELDS, Record
from fedsim.data.digits import Digits
from fedsim.results.reading import read_summary
from fedsim.rounds.loop import Simulation
from fedsim.running import assembly
from fedsim.running.assembly import Experiment, build
from fedsim.running.experiment import execute
from fedsim.running.outcome import totals_of
from fedsim.tracking.base import Trackers
from tests.run_toys import plan_of

FEW = ("num_rounds=2", "local.epochs=1", "tracker=files_only", "num_clients=6", "cohort_size=2")


@pytest.fixture(scope="module", autouse=True)
def _conf() -> Iterator[None]:
    with search_path():
        yield


def plan(*words: str) -> Plan:
    return plan_of(*FEW, *words)


def same(one: Any, other: Any) -> bool:
    return len(one) == len(other) and all(
        np.array_equal(a, b) for a, b in zip(one, other, strict=True)
    )


HELD = ("local.holdout_fraction=0.25", "server.validation_fraction=0.1", "server.public_samples=30")


def test_accuracy_is_of_the_test_set_and_nothing_else(tmp_path: Path) -> None:
    data = Digits(tmp_path, tmp_path, mean=[0.3053], std=[0.3759]).load()
    made = build(plan(*HELD)).simulation
    test = made.components.server_data.test
    assert torch.equal(test.y, data.test.y)
    assert torch.equal(test.x, data.normalise(data.test.x))
    with torch.no_grad():
        correct = made.components.engine.predict(made.params, test.x).argmax(1) == data.test.y
    assert made.evaluate().accuracy == pytest.approx(float(correct.double().mean()))


@pytest.mark.parametrize("evaluate_on", ["train", "holdout"])
def test_clients_train_on_their_own_and_report_on_what_is_asked(evaluate_on: str) -> None:
    made = build(plan(*HELD, f"local.evaluate_on={evaluate_on}"))
    data, division = made.simulation.components.engine.data, made.division
    assert same(data.train, division.train)
    assert same(data.evaluate, division.train if evaluate_on == "train" else division.holdout)
    assert not same(division.train, division.holdout)
    shares = [
        len(h) / (len(h) + len(t)) for h, t in zip(division.holdout, division.train, strict=True)
    ]
    assert shares == pytest.approx([0.25] * 6, abs=0.02)
    assert made.simulation.components.population.sizes.tolist() == [len(t) for t in division.train]


def test_the_server_holds_what_the_division_gives_it() -> None:
    made = build(plan(*HELD, "selector=gpfl"))
    held, division, data = (
        made.simulation.components.server_data,
        made.division,
        made.simulation.components.engine.data,
    )
    assert held.validation is not None
    assert held.public is not None
    assert torch.equal(held.validation.x, data.x[division.validation])
    assert torch.equal(held.validation.y, data.y[division.validation])
    assert torch.equal(held.public, data.x[division.public])
    assert (len(division.validation), len(division.public)) == (144, 30)
    bare = build(plan("server.validation_fraction=0")).simulation.components.server_data
    assert (bare.validation, bare.public) == (None, None)


def weights(made: Experiment) -> torch.Tensor:
    return torch.cat([w.flatten() for w in made.simulation.params.values()])


def test_seeds_of_partition_and_model_are_their_own() -> None:
    base, partition, model, root = (
        build(plan(*HELD, *w)) for w in ([], ["partition_seed=9"], ["init_seed=9"], ["seed=9"])
    )
    assert (
        partition.division.hash != base.division.hash,
        model.division.hash != base.division.hash,
    ) == (True, False)
    assert torch.equal(weights(partition), weights(base))
    assert not torch.equal(weights(model), weights(base))
    assert same(partition.division.train, root.division.train)
    assert same(partition.division.holdout, root.division.holdout)
    assert np.array_equal(partition.division.validation, root.division.validation)
    assert torch.equal(weights(model), weights(root))
    assert torch.equal(weights(build(plan(*HELD))), weights(base))


def test_running_statistics_are_no_parameters_for_the_aggregator() -> None:
    class Normed(torch.nn.Sequential):
        def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
            super().__init__(
                torch.nn.Flatten(), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, num_classes)
            )

    given = plan()
    model = Normed((1, 8, 8), 10)
    streams = assembly.Streams(0)
    made = build(given)
    simulation = assembly._simulation(given, assembly.prepare(given), made.division, model, streams)
    assert simulation.components.aggregator.buffers == {"1.running_mean", "1.running_var"}


def test_samples_are_kept_for_runs_that_have_the_same_and_a_model_is_built_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded: list[Any] = []
    load = assembly._load
    built: list[Any] = []
    build_model = assembly.build_model
    monkeypatch.setattr(
        assembly, "build_model", lambda *a: (built.append(a[0]), build_model(*a))[1]
    )
    monkeypatch.setattr(assembly, "_load", lambda p, device: (loaded.append(p), load(p, device))[1])
    assembly._latest.clear()
    first, model, mean, folder = (
        [],
        ["model=logistic"],
        ["dataset.mean=[0.5]"],
        ["data_dir=elsewhere"],
    )
    for words in (
        first,
        ["seed=1", "selector=md"],
        model,
        [*model, *mean],
        [*model, *mean, *folder],
    ):
        assembly.prepare(plan(*words))
    assert len(loaded) == 4
    assert [p.config["dataset"]["mean"] for p in loaded] == [[0.3053], [0.3053], [0.5], [0.5]]
    monkeypatch.chdir("/")  # paths in a config may be relative
    assembly.prepare(plan(*model, *mean, *folder))
    assert len(loaded) == 5
    assert not built
    build(plan())
    assert len(built) == 1


def entry(round: int, accuracy: float | None, **more: Any) -> Record:
    names = [n for n in Record.__dataclass_fields__ if n not in more]
    values = {"round": round, "test_accuracy": accuracy, "selected": [0], **more}
    return Record(**(dict.fromkeys(names, 1) | dict.fromkeys(CLOCK_FIELDS) | values))


def test_results_are_those_of_the_rounds() -> None:
    rounds = [
        entry(1, 0.2, coverage=0.3, participation_ratio=0.5),
        entry(2, 0.7, coverage=0.6, participation_ratio=1.0),
        entry(3, 0.5, coverage=0.9, participation_ratio=0.0, wall_seconds=8.0),
        entry(4, None, coverage=0.95, participation_ratio=0.5, wall_seconds=11.0, bytes_up=9),
    ]
    found = totals_of(rounds, 0.1)
    expected = {
        **{
            "rounds": 4,
            "initial_accuracy": 0.1,
            "last_accuracy": 0.5,
            "best_accuracy": 0.7,
            "coverage": 0.95,
        },
        **{
            "smoothed_accuracy": pytest.approx(1.4 / 3),
            "mean_participation_ratio": 0.5,
            "wall_seconds": 11.0,
        },
    }
    assert {name: found[name] for name in expected} == expected
    assert (found["totals"]["bytes_up"], found["totals"]["seconds_train"]) == (1 + 1 + 1 + 9, 4)
    nothing = totals_of([], 0.1)
    assert (nothing["rounds"], nothing["last_accuracy"], nothing["coverage"]) == (0, None, 0.0)


@pytest.mark.usefixtures("empty_folder")
def test_evaluations_come_as_often_as_asked_and_the_first_is_before_training() -> None:
    given = plan("num_rounds=5", "eval_every=3")
    before = build(given).simulation.evaluate().accuracy
    summary = execute(given).summary
    assert summary["initial_accuracy"] == before > 0
    lines = (given.folder / "metrics.jsonl").read_text().splitlines()
    assert ['"test_accuracy": null' in line for line in lines] == [True, True, False, True, False]


@pytest.mark.usefixtures("empty_folder")
def test_a_failure_is_in_the_summary_with_its_reason_and_is_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = Simulation.step

    def broken(self: Simulation) -> Record:
        if self.round == 1:
            raise KeyError("mine")
        return step(self)

    given, told = plan("seed=3"), list[Any]()
    monkeypatch.setattr(Trackers, "start", lambda self, info: told.append(info.seed))
    with monkeypatch.context() as patch:
        patch.setattr(Simulation, "step", broken)
        assert execute(given).status == "failed"
    summary = read_summary(given.folder) or {}
    values = [summary[name] for name in ("status", "rounds", "seed", "error")]
    line = broken.__code__.co_firstlineno + 2
    assert values == [
        "failed",
        1,
        3,
        f"KeyError: 'mine' (round 2, test_experiment.py, line {line}, in broken)",
    ]
    assert [execute(one).skipped for one in (given, given, plan("seed=3", "overwrite=true"))] == [
        False,
        True,
        False,
    ]
    assert told == [3] * 3


def test_runs_share_prepared_data_of_equal_data_set_model_and_places() -> None:
    same, *others = [
        plan(),
        plan("seed=1"),
        plan("model=logistic"),
        plan("dataset.mean=[0.1]"),
        plan("cache_dir=elsewhere"),
    ]
    keys = [assembly.data_key(plan) for plan in (same, *others)]
    assert keys[0] == keys[1]
    assert len({*keys}) == 4


def test_a_holdout_of_no_sample_is_told_before_round_1() -> None:
    """300 clients of 4 or 5 samples."""
    told = r"local\.holdout_fraction=0\.1: holds out no sample of any client, of whom the largest has 5; raise it"
    with pytest.raises(DataError, match=told):
        build(
            plan(
                "num_clients=300",
                "partition=iid",
                "local.holdout_fraction=0.1",
                "local.evaluate_on=holdout",
            )
        )
    assert build(
        plan("num_clients=300", "partition=iid", "local.holdout_fraction=0.2")
    ).division.holdout


@pytest.mark.parametrize(
    ("size", "model", "count"), [(2, "resnet20", 2), (1, "resnet20", 6), (2, "mlp", None)]
)
def test_batch_norm_with_a_batch_of_one_sample_is_told(
    size: int, model: str, count: int | None
) -> None:
    words = ("partition=iid", f"local.batch_size={size}", f"model={model}")
    warning = build(plan(*words)).simulation.components.engine.warning
    if count is None:
        assert warning is None
    else:
        told = f"local.batch_size={size}: {count} of 6 clients have a batch of one sample, in which batch norm sees no"
        assert str(warning).startswith(told)


def test_the_warning_about_batch_norm_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "partition=iid",
        "local.epochs=null",
        "local.steps=1",
        "local.batch_size=2",
        "model=resnet20",
    )
    execute(
        plan(
            *words,
            "num_rounds=1",
            "tracker=default",
            "tracker.wandb.mode=disabled",
            f"output_dir={tmp_path}",
        )
    )
    assert "in which batch norm sees no variance" in " ".join("".join(capsys.readouterr()).split())
