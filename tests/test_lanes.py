"""Runs in lanes are, bit for bit, the runs that they are alone."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedsim import compose, run_sweep
from fedsim.core.rng import Streams
from fedsim.core.types import Correction
from fedsim.engine.backend import TrainingResult
from fedsim.engine.batched import BatchedBackend
from fedsim.engine.data import ClientData
from fedsim.engine.engine import Engine
from fedsim.engine.model import initial
from fedsim.engine.schedule import LocalWork, Schedule
from fedsim.jobs.sweep import Attempts, Lanes
from fedsim.models.mlp import MLP
from fedsim.results.reading import read_summary
from fedsim.running import lanes
from fedsim.running.lanes import Lane, TrainingCall, run_in_lanes, train_jointly
from fedsim.running.outcome import Outcome
from tests.engines import batched, reference, schedule_of
from tests.run_toys import Run, without_seconds
from tests.test_engine import (
    BACKENDS,
    MODELS,
    OPTIMIZERS,
    SIZES,
    WORKS,
    model_of,
    problem,
    task_of,
)

LANES = "hydra/launcher=lanes"


def results(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the records of all runs by the names of their folders, without seconds."""
    runs = [path.parent for path in folder.glob("*/summary.json")]
    return {run.name: without_seconds(run) for run in runs}


FROZEN = "model._target_=tests.test_lanes.FrozenLayer"
SWEEPS = {
    "selectors that train once, all, and what-if": [
        "selector=random,pncs,fedcor",
        "partition=dirichlet_qp",
    ],
    "ragged clients": ["selector=random,gpfl", "partition=dirichlet_class", "seed=0,1"],
    "dropout and momentum": ["model.dropout=0.5", "optimizer.momentum=0.9", "selector=oort,ocs"],
    "one client a round": ["cohort_size=1", "selector=oort,random", "seed=0,1"],
    "untrained layers that differ": ["model=logistic", FROZEN, "engine=batched", "seed=0,1"],
    "untrained layers that differ, in turn": [
        "model=logistic",
        FROZEN,
        "engine=sequential",
        "seed=0,1",
    ],
    "native": [
        "engine=native",
        "model.dropout=0.5",
        "optimizer.momentum=0.9",
        "selector=oort,pncs,delta",
        "seed=0,1",
    ],
    "sequential": ["engine=sequential", "seed=0,1", "cohort_size=3"],
    "samples made on demand": [
        "dataset=synthetic",
        "partition=natural",
        "selector=random,gpfl",
        "seed=0,1",
    ],
    "small chunks": ["engine=batched", "engine.chunk_size=3", "seed=0,1,2"],
    "learning rates that part": [
        "optimizer/schedule=exponential",
        "selector=random,fedcor",
        "seed=0,1",
    ],
    "short runs and long ones": ["num_rounds=3,30", "local.epochs=1", "seed=0,1"],
    "labels and updates that differ": [
        "clients=honest,label_noise,random_update",
        "selector=pncs",
        "seed=0,1",
    ],
    "aggregators": [
        "aggregator=median,krum,geometric_median,norm_clipping,dp_fedavg,mifa",
        "cohort_size=5",
    ],
    "cohorts of nobody": [
        "selector=poisson",
        "aggregator=uniform,dp_fedavg",
        "cohort_size=1",
        "seed=0,1",
    ],
    "two groups": ["optimizer.lr=0.05,0.1", "seed=0,1"],
}


@pytest.mark.parametrize("sweep", SWEEPS)
def test_lanes_are_the_runs_that_they_are_alone(fedsim: Run, tmp_path: Path, sweep: str) -> None:
    assert fedsim("-m", *SWEEPS[sweep], "name=alone") == 0
    assert fedsim("-m", *SWEEPS[sweep], "name=lanes", LANES) == 0
    alone = results(tmp_path / "outputs" / "alone")
    assert len(alone) >= 2
    assert results(tmp_path / "outputs" / "lanes") == alone


class FrozenLayer(torch.nn.Sequential):
    """A first layer that is random by the seed, and never trained: no chain that is written out."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        size = int(np.prod(input_shape))
        super().__init__(
            torch.nn.Flatten(), torch.nn.Linear(size, 8), torch.nn.Linear(8, num_classes)
        )
        self[1].requires_grad_(False)


def test_runs_in_lanes_are_trained_in_one_call(
    fedsim: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[int] = []
    train_chunk = BatchedBackend._train_chunk

    def watched(self: BatchedBackend, start: Any, schedule: Schedule) -> TrainingResult:
        trained.append(len(schedule))
        return train_chunk(self, start, schedule)

    monkeypatch.setattr(BatchedBackend, "_train_chunk", watched)
    assert (
        fedsim(
            "-m",
            "seed=0,1,2",
            "partition=iid",
            "num_clients=8",
            "hydra.launcher.max_lanes=2",
            LANES,
        )
        == 0
    )
    assert trained == [10] * 3 + [5] * 3


def test_jobs_that_have_ended_take_no_lanes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Seeds 0 and 2 have ended: seeds 1 and 3 share the two lanes."""
    monkeypatch.chdir(tmp_path)
    words = ["num_rounds=1", "num_clients=6", "cohort_size=2", "tracker=files_only"]
    run_sweep([*words, "seed=0,2"])
    sizes = []

    def run_in_turn(jobs: Sequence[Callable[[], Outcome]], show: object) -> None:
        sizes.append(len(jobs))
        for job in jobs:
            job()

    monkeypatch.setattr(lanes, "run_in_lanes", run_in_turn)
    attempts = Attempts()
    plans = compose([*words, "seed=0,1,2,3"])
    Lanes(max_lanes=2).run(attempts, plans)
    assert sizes == [2]
    assert {plan.folder for plan in plans} == set(attempts.ended)
    assert [attempts.ended[plan.folder].skipped for plan in plans] == [True, False, True, False]


def test_progress_counts_the_runs_that_are_left(
    fedsim: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fedsim("-m", "seed=0,1", LANES) == 0
    assert "2 runs in lanes" in capsys.readouterr().out
    progress: list[tuple[int, int]] = []
    call = call_of(_engine("equal"), [0, 1], 7)
    run_in_lanes(
        [lambda run: run.train(call)] * 3, lambda left, round: progress.append((left, round))
    )
    assert progress == [(3, 0)]


def test_ctrl_c_stops_all_runs_and_is_recorded(
    fedsim: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, calls = BatchedBackend.train, []

    def interrupted(self: BatchedBackend, start: Any, schedule: Schedule) -> TrainingResult:
        calls.append(len(schedule))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return train(self, start, schedule)

    with monkeypatch.context() as patch:
        patch.setattr(BatchedBackend, "train", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fedsim("-m", "partition=iid", "num_clients=8", "seed=0,1", LANES)
    summaries = [read_summary(p.parent) for p in tmp_path.glob("outputs/*/*/summary.json")]
    assert [(s["status"], s["rounds"]) for s in summaries if s] == [("interrupted", 2)] * 2
    assert fedsim("-m", "partition=iid", "num_clients=8", "seed=0,1", LANES) == 0


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit])
def test_an_error_in_the_common_training_reaches_every_run(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    caught, call = [], call_of(_engine("equal"), [0], 1)

    def fails(start: Any, schedule: Any) -> Any:
        raise kind("no memory")

    def work(run: Lane) -> None:
        try:
            run.train(call)
        except kind as error:
            caught.append(str(error))

    monkeypatch.setattr(call.backend, "train", fails)
    run_in_lanes([work, work], lambda *_: None)
    assert caught == ["no memory"] * 2


def test_an_unexpected_error_in_a_run_interrupts_the_others_and_is_raised() -> None:
    interrupted = []

    def waits(run: Lane) -> None:
        try:
            run.train(call_of(_engine("equal"), [0], 1))
        except KeyboardInterrupt:
            interrupted.append(run)
            raise

    def fails(run: Lane) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_in_lanes([waits, fails], lambda *_: None)
    assert len(interrupted) == 1


def test_a_selectors_no_grad_stays_its_own() -> None:
    engine, seen = _engine("equal", 1), []

    def careful(run: Lane) -> None:
        with torch.no_grad():
            run.train(call_of(engine, [0], 1))
            seen.append(torch.is_grad_enabled())

    run_in_lanes([careful, careful], lambda *_: seen.append(torch.is_grad_enabled()))
    assert seen == [True, False, True, False]


def _engine(sizes: str, number: int = 0) -> Engine:
    build = (batched, reference)[number]
    work, optimizer = WORKS["epochs"], OPTIMIZERS["sgd"]
    return build(model_of("mlp"), problem(SIZES[sizes]), work, optimizer, Streams(3))


def call_of(
    engine: Engine,
    ids: list[int],
    round: int,
    lr: float = 0.1,
    factor: float = 1.0,
    pull: float = 0.0,
    shift: int = 0,
) -> TrainingCall:
    """What a run calls for that trains clients `ids` from the engine's model times `factor`, with a
    correction."""
    params = {name: value * factor for name, value in initial(engine.workload.model).items()}
    random = torch.Generator().manual_seed(shift)
    shifts = {
        n: torch.randn(len(ids), *params[n].shape, generator=random).to(params[n])
        for n in engine.trained
    }
    schedule = schedule_of(engine, np.array(ids), round, lr)
    correction = Correction(pull, shifts if shift else None)
    return TrainingCall(
        engine.backend, [params] * len(ids), replace(schedule, correction=correction)
    )


def test_only_schedules_of_one_shape_and_rate_are_trained_jointly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = _engine("ragged")
    calls = [
        call_of(engine, [0, 1], 1),  # 7 and 1 samples: batches of 4, 3
        call_of(engine, [0, 4], 3, factor=2.0),  # the same
        call_of(engine, [2, 3], 1),  # 13 and 4: 4, 4, 4, 1
        call_of(engine, [0, 1], 1, lr=0.2),
        call_of(engine, [0], 1),  # alone
        call_of(engine, [0], 1),
        call_of(engine, [0, 1], 1, pull=0.1),
        call_of(engine, [0, 1], 1, shift=1),
        call_of(engine, [0, 1], 1, shift=2),
    ]
    train, trained = engine.backend.train, []

    def watched(start: Any, schedule: Schedule) -> TrainingResult:
        trained.append(len(schedule))
        return train(start, schedule)

    monkeypatch.setattr(engine.backend, "train", watched)
    train_jointly(calls)
    assert trained == [4, 2, 2, 1, 1, 2, 4]


@pytest.mark.parametrize("sizes", ["equal", "ragged"])
@pytest.mark.parametrize("name", MODELS)
def test_no_model_changes_a_bit_beside_others(name: str, sizes: str) -> None:
    data = problem(SIZES[sizes], torch.float32)
    _assert_exact(
        batched(
            model_of(name, torch.float32), data, WORKS["epochs"], OPTIMIZERS["momentum"], Streams(3)
        )
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("optimizer", ["decay", "nesterov"])
def test_no_correction_changes_a_bit_beside_others(backend: str, optimizer: str) -> None:
    engine = BACKENDS[backend](*task_of(("dropout", "ragged", "epochs", optimizer), torch.float32))
    both = {"pull": 0.3, "shift": 2}
    _assert_exact(
        engine, [{}, {"shift": 1}, both, {"pull": 0.3}, {"shift": 3}, {"pull": 0.2, "shift": 4}]
    )


@pytest.mark.parametrize("optimizer", ["decay", "adam"])
def test_no_bit_changes_at_the_size_of_fashion_mnist(optimizer: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (
        torch.randn(400, 784, generator=generator),
        torch.randint(10, (400,), generator=generator),
    )
    positions = np.split(np.arange(400), [90, 180, 250, 330])
    data = ClientData(x, y, positions, positions, 10)
    model = MLP((784,), 10, hidden=[64, 30], dropout=0.0)
    _assert_exact(batched(model, data, LocalWork(2, None, 64), OPTIMIZERS[optimizer], Streams(0)))


def _assert_exact(engine: Engine, corrections: Sequence[dict[str, Any]] = ({},) * 6) -> None:
    """Every call alone is what it is among others of other models, rounds and clients."""
    everyone = list(range(len(engine.data.train)))
    parts = [everyone, everyone[:2], everyone[1:], everyone[::-1], everyone[1:2], everyone]
    pairs = enumerate(zip(parts, corrections, strict=True))
    calls = [call_of(engine, ids, t, factor=1 + t / 10, **own) for t, (ids, own) in pairs]
    for call, joint in zip(calls, train_jointly(calls), strict=True):
        alone = engine.backend.train(call.start, call.schedule)
        for one, other in (
            (joint.delta, alone.delta),
            (joint.momentum or {}, alone.momentum or {}),
        ):
            assert all(torch.equal(one[n], other[n]) for n in other)
        assert np.array_equal(joint.losses[call.schedule.mask], alone.losses[call.schedule.mask])


# --- whose time it is when runs train together ---


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, as runs side by side see it."""
    found = [100.0]
    monkeypatch.setattr(lanes, "time", SimpleNamespace(perf_counter=lambda: found[0]))
    return found


def common(seconds: float, now: list[float], samples: int) -> TrainingCall:
    """One client's single step by a backend that takes so long for those of several runs, which it
    trains at once."""

    def train(start: Any, schedule: Schedule) -> TrainingResult:
        now[0] += seconds
        return TrainingResult({}, np.zeros(schedule.positions.shape), None)

    backend: Any = SimpleNamespace(
        max_joint_clients=10, buffer_size=None, joint_key=lambda schedule: 0, train=train
    )
    schedule = Schedule(np.zeros((1, 1, samples), np.int64), np.full((1, 1), samples), None, 0.1)
    return TrainingCall(backend, [{}], schedule)


def test_runs_pay_for_their_samples_of_the_common_training(now: list[float]) -> None:
    """Two runs that work 1 and 2 seconds, train 30 and 10 samples together in 8 s, and work 3 and 4
    seconds more."""
    times: dict[str, list[float]] = {"a": [], "b": []}

    def work(name: str, before: float, samples: int, after: float) -> Any:
        def run(own: Lane) -> None:
            start = own.now()
            now[0] += before
            times[name].append(own.now() - start)
            assert own.train(common(8, now, samples)).losses.shape == (1, 1, samples)
            times[name].append(own.now() - start)
            now[0] += after
            times[name].append(own.now() - start)

        return run

    run_in_lanes([work("a", 1, 30, 3), work("b", 2, 10, 4)], lambda *_: None)
    assert times == {"a": [1, 1 + 6, 1 + 6 + 3], "b": [2, 2 + 2, 2 + 2 + 4]}


def test_time_until_the_second_training_is_kept(now: list[float]) -> None:
    seen = []

    def work(own: Lane) -> None:
        for _ in range(3):
            now[0] += 1
            own.train(common(5, now, 4))
            seen.append(own.now())

    run_in_lanes([work], lambda *_: None)
    assert seen == [6, 12, 18]
