"""Runs side by side are, bit for bit, the runs that they are alone."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsim.cli import run
from fedsim.engine.batched.backend import BatchedEngine
from fedsim.engine.batched.chunks import Piece, chunks, starting_models
from fedsim.engine.engine import ClientData, Engine, LocalWork, Request, Trained
from fedsim.engine.model.parameters import initial
from fedsim.engine.schedule import round_batches
from fedsim.errors import ConfigError
from fedsim.models.mlp import MLP
from fedsim.rng import Streams
from fedsim.running.interleaving import Lane, run_lanes
from fedsim.tracking.files import read_metrics, read_summary
from tests.test_engine import MODELS, OPTIMIZERS, SIZES, WORKS, engines, model_of, problem

Run = Callable[..., int]
LANES = "hydra/launcher=lanes"
QUICK = ("num_rounds=4", "local.epochs=1", "tracker=files_only")


@pytest.fixture
def fedsim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> int:
        argv = ["-m", *QUICK, *words]
        monkeypatch.setattr(sys, "argv", ["fedsim", *argv])
        return run(argv)

    return call


def results(folder: Path) -> dict[str, list[dict[str, Any]]]:
    found = {p.parent.name: read_metrics(p.parent) for p in folder.glob("*/summary.json")}
    return {n: [{k: v for k, v in r.items() if "seconds" not in k} for r in rs] for n, rs in found.items()}


SWEEPS = {
    "selectors that train once, all, and what-if": ["selector=random,pncs,fedcor", "partition=dirichlet_qp"],
    "ragged clients": ["selector=random,gpfl", "partition=dirichlet_class", "seed=0,1"],
    "dropout and momentum": ["model.dropout=0.5", "optimizer.momentum=0.9", "selector=oort,ocs"],
    "one client a round": ["cohort_size=1", "selector=oort,random", "seed=0,1"],
    "a model that is differentiated": ["+model.activation=tanh", "seed=0,1,2"],
    "native": ["engine=native", "model.dropout=0.5", "optimizer.momentum=0.9", "selector=oort,pncs,delta", "seed=0,1"],
    "sequential": ["engine=sequential", "seed=0,1", "cohort_size=3"],
    "small chunks": ["engine=batched", "engine.chunk_size=3", "seed=0,1,2"],
    "learning rates that part": ["optimizer/schedule=exponential", "selector=random,fedcor", "seed=0,1"],
    "short runs and long ones": ["num_rounds=3,400", "local.epochs=1", "seed=0,1"],
    "two groups": ["optimizer.lr=0.05,0.1", "seed=0,1"],
}


@pytest.mark.parametrize("sweep", SWEEPS)
def test_lanes_are_the_runs_that_they_are_alone(fedsim: Run, tmp_path: Path, sweep: str) -> None:
    words = SWEEPS[sweep]
    if sweep == "a model that is differentiated":
        words = ["model._target_=tests.test_lanes.Tanh", *words[1:]]
    assert fedsim(*words, "name=alone") == 0
    assert fedsim(*words, "name=lanes", LANES) == 0
    alone, together = (results(tmp_path / "outputs" / name) for name in ("alone", "lanes"))
    assert len(alone) >= 2
    assert alone == together


class Tanh(torch.nn.Sequential):
    """Not a chain that is written out."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, *, hidden: list[int], dropout: float) -> None:
        size = int(np.prod(input_shape))
        super().__init__(
            torch.nn.Flatten(),
            torch.nn.Linear(size, hidden[0]),
            torch.nn.Tanh(),
            torch.nn.Linear(hidden[0], num_classes),
        )


def test_requests_of_lanes_are_served_in_one_batch(
    fedsim: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[list[int]] = []
    train_chunk = BatchedEngine._train_chunk

    def watched(self: BatchedEngine, chunk: list[Piece]) -> list[Trained]:
        served.append([len(p.batches) for p in chunk])
        return train_chunk(self, chunk)

    monkeypatch.setattr(BatchedEngine, "_train_chunk", watched)
    assert fedsim("seed=0,1,2", "partition=iid", "num_clients=8", "hydra.launcher.max_lanes=2", LANES) == 0
    assert served == [[5, 5]] * 4 + [[5]] * 4


def test_progress_counts_the_runs_that_are_left(fedsim: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert fedsim("seed=0,1", LANES) == 0
    assert "2 runs side by side" in capsys.readouterr().out
    told: list[tuple[int, int]] = []
    engine = _engine("equal")
    request = Request(engine, initial(engine.model), np.array([0, 1]), 7, 0.1)
    run_lanes([lambda lane: lane.train(request)] * 3, lambda left, round: told.append((left, round)))
    assert told == [(3, 7)]


def test_what_is_finished_is_not_run_again_and_the_time_is_divided(fedsim: Run, tmp_path: Path) -> None:
    assert fedsim("seed=0,1", LANES) == 0
    summaries = [read_summary(p.parent) for p in sorted(tmp_path.glob("outputs/default/*/summary.json"))]
    assert all(s is not None and s["totals"]["seconds_train"] > 0 for s in summaries)
    before = {p: p.read_bytes() for p in tmp_path.glob("outputs/default/*/summary.json")}
    assert fedsim("seed=0,1,2", LANES) == 0
    assert {p: p.read_bytes() for p in before} == before
    assert len(list(tmp_path.glob("outputs/default/*/summary.json"))) == 3


def test_a_lane_that_fails_leaves_the_others_alone(
    fedsim: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedsim.selectors.round_robin import RoundRobin

    def fails(*_: Any) -> Any:
        raise KeyError("mine")

    monkeypatch.setattr(RoundRobin, "select", fails)
    assert fedsim("selector=random,round_robin", LANES) == 1
    status = {p.parent.name.split("-")[3]: read_summary(p.parent) for p in tmp_path.glob("outputs/*/*/summary.json")}
    assert {k: v and v["status"] for k, v in status.items()} == {"random": "done", "round_robin": "failed"}


def test_ctrl_c_stops_all_lanes_and_is_recorded(fedsim: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_all, calls = BatchedEngine.train_all, []

    def interrupted(self: BatchedEngine, requests: list[Request]) -> list[Trained]:
        calls.append(len(requests))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return train_all(self, requests)

    with monkeypatch.context() as patch:
        patch.setattr(BatchedEngine, "train_all", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fedsim("seed=0,1", LANES)
    summaries = [read_summary(p.parent) for p in tmp_path.glob("outputs/*/*/summary.json")]
    assert [(s["status"], s["rounds"]) for s in summaries if s] == [("interrupted", 2)] * 2
    assert fedsim("seed=0,1", LANES) == 0


def test_an_error_in_the_common_training_reaches_every_lane(fedsim: Run, tmp_path: Path) -> None:
    caught = []

    class Broken:
        common_clients, description = 2, "broken"

        def train_all(self, requests: Any) -> Any:
            raise RuntimeError("no memory")

    def work(lane: Lane) -> None:
        try:
            lane.train(Request(Broken(), {}, np.array([0]), 1, 0.1))  # type: ignore[arg-type]
        except RuntimeError as error:
            caught.append(str(error))

    run_lanes([work, work], lambda *_: None)
    assert caught == ["no memory"] * 2


def test_an_unexpected_error_in_a_lane_interrupts_the_others_and_is_raised() -> None:
    interrupted = []

    def waits(lane: Lane) -> None:
        try:
            lane.train(Request(None, {}, np.array([0]), 1, 0.1))  # type: ignore[arg-type]
        except KeyboardInterrupt:
            interrupted.append(lane)
            raise

    def fails(lane: Lane) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_lanes([waits, fails], lambda *_: None)
    assert len(interrupted) == 1


def test_a_selectors_no_grad_stays_its_own() -> None:
    engine = engines(model_of("mlp"), problem(SIZES["equal"]), WORKS["epochs"], OPTIMIZERS["sgd"])[1]
    seen = []

    def careful(lane: Lane) -> None:
        with torch.no_grad():
            lane.train(Request(engine, initial(engine.model), np.array([0]), 1, 0.1))
            seen.append(torch.is_grad_enabled())

    run_lanes([careful, careful], lambda *_: seen.append(torch.is_grad_enabled()))
    assert seen == [True, False, True, False]


def test_a_sweep_of_one_job_runs_as_if_alone(fedsim: Run, tmp_path: Path) -> None:
    assert fedsim("seed=0", LANES) == 0  # Hydra cannot launch with this launcher
    assert len(results(tmp_path / "outputs" / "default")) == 1


def test_max_lanes_is_checked(fedsim: Run) -> None:
    with pytest.raises(ConfigError, match=r"hydra\.launcher\.max_lanes"):
        fedsim("seed=0,1", LANES, "hydra.launcher.max_lanes=0")


def _engine(sizes: str) -> Engine:
    return engines(model_of("mlp"), problem(SIZES[sizes]), WORKS["epochs"], OPTIMIZERS["sgd"])[0]


def test_only_requests_of_one_shape_and_rate_share_a_chunk() -> None:
    engine = _engine("ragged")
    params = initial(engine.model)
    other = {name: value + 1 for name, value in params.items()}
    requests = [
        Request(engine, params, np.array([0, 1]), 1, 0.1),  # 7 and 1 samples: batches of 4, 3
        Request(engine, other, np.array([0, 4]), 3, 0.1),  # the same
        Request(engine, params, np.array([2, 3]), 1, 0.1),  # 13 and 4: 4, 4, 4, 1
        Request(engine, params, np.array([0, 1]), 1, 0.2),
        Request(engine, params, np.array([0]), 1, 0.1),  # alone
    ]
    pieces = [Piece(r, round_batches(r)) for r in requests]
    assert [[pieces.index(p) for p in chunk] for chunk in chunks(pieces, 8)] == [[0, 1], [2], [3], [4]]
    assert [[pieces.index(p) for p in chunk] for chunk in chunks(pieces, 2)] == [[0], [1], [2], [3], [4]]
    start = starting_models(requests[:2], np.array([3, 0, 1]))
    for name, value in start.items():
        assert torch.equal(value, torch.stack([other[name], params[name], params[name]]))


@pytest.mark.parametrize("sizes", ["equal", "ragged"])
@pytest.mark.parametrize("name", MODELS)
def test_no_model_changes_a_bit_in_company(name: str, sizes: str) -> None:
    data = problem(SIZES[sizes], torch.float32)
    _assert_exact(engines(model_of(name, torch.float32), data, WORKS["epochs"], OPTIMIZERS["momentum"])[0])


@pytest.mark.parametrize("optimizer", ["decay", "adam"])
def test_no_bit_changes_at_the_size_of_fashion_mnist(optimizer: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(400, 784, generator=generator), torch.randint(10, (400,), generator=generator)
    positions = np.split(np.arange(400), [90, 180, 250, 330])
    data = ClientData(x, y, positions, positions, 10)
    model = MLP((784,), 10, hidden=[64, 30], dropout=0.0)
    work = LocalWork(2, None, 64)
    _assert_exact(
        BatchedEngine(
            model, data, work, OPTIMIZERS[optimizer], Streams(0), precision="float32", chunk_size="auto", compile=False
        )
    )


def _assert_exact(engine: Engine) -> None:
    """Every request alone is what it is among others of other models, rounds and clients."""
    params = initial(engine.model)
    everyone = np.arange(len(engine.data.train))
    parts = [everyone, everyone[:2], everyone[1:], everyone[::-1], everyone[1:2]]
    models = [{name: value * (1 + i / 10) for name, value in params.items()} for i in range(5)]
    requests = [Request(engine, p, ids, t, 0.1) for t, (p, ids) in enumerate(zip(models, parts, strict=True))]
    for request, trained in zip(requests, engine.train_all(requests), strict=True):
        (alone,) = engine.train_all([request])
        for one, other in ((trained.delta, alone.delta), (trained.momentum or {}, alone.momentum or {})):
            assert all(torch.equal(one[n], other[n]) for n in other)
        assert np.array_equal(trained.loss, alone.loss)
        assert np.array_equal(trained.rms_loss, alone.rms_loss)
