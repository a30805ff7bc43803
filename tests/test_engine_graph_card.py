"""The backend of recorded steps on a pretended CUDA device: equal to the CPU, and what it costs the host."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedsim.core.rng import Streams
from fedsim.core.types import Cohort, Params
from fedsim.engine import torch_backend
from fedsim.engine.data import ClientData
from fedsim.engine.engine import Engine
from fedsim.engine.graph import recorder
from fedsim.engine.graph import steps as linear
from fedsim.engine.graph.backend import GraphBackend
from fedsim.engine.model import initial
from fedsim.engine.optimizers import LocalOptimizer
from fedsim.engine.schedule import LocalWork
from fedsim.models.cnn import CNN
from fedsim.models.mlp import MLP
from fedsim.models.resnet20 import ResNet20
from tests.engines import graph
from tests.pretended_cuda import PretendedCard, held
from tests.tape import TapeRecorder
from tests.test_engine import OPTIMIZERS


@dataclass(frozen=True)
class Case:
    """Local training of clients with so many samples of a shape."""

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    sizes: list[int]
    work: LocalWork
    optimizer: LocalOptimizer

    def engine(self, device: str) -> Engine:
        total = sum(self.sizes)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model = self.model()
            x, y = torch.randn(total, *self.shape), torch.randint(10, (total,))
        positions = np.split(np.arange(total), np.cumsum(self.sizes)[:-1])
        data = ClientData(x.to(device), y.to(device), positions, positions, 10)
        engine = graph(model.to(device), data, self.work, self.optimizer, Streams(0))
        assert isinstance(engine.backend, GraphBackend)
        if device == "cpu":
            engine.backend.recorder = TapeRecorder()
        return engine


def train(engine: Engine, round: int, params: Params | None = None) -> Cohort:
    params = initial(engine.workload.model) if params is None else params
    return engine.train(params, np.arange(len(engine.data.train)), round, 0.1 / round)


W1 = Case(
    lambda: MLP((1, 4, 4), 10, hidden=[8, 6], dropout=0.0),
    (1, 4, 4),
    [4] * 10,
    LocalWork(None, 30, 4),
    OPTIMIZERS["decay"],
)
W2 = Case(lambda: CNN((1, 18, 18), 10), (1, 18, 18), [2] * 5, LocalWork(None, 40, 2), OPTIMIZERS["decay"])
RESNET = Case(
    lambda: ResNet20((1, 4, 4), 10, shortcut="pad", norm="batch", groups=4),
    (1, 4, 4), [2, 3, 4, 5, 6, 7, 8, 8, 8, 9], LocalWork(1, None, 2), OPTIMIZERS["adam"],
)  # fmt: skip
SMALL_RESNET = Case(RESNET.model, RESNET.shape, [2, 5], RESNET.work, RESNET.optimizer)
DROPOUT = Case(
    lambda: MLP((1, 4, 4), 10, hidden=[8], dropout=0.5),
    (1, 4, 4),
    [3, 0, 9],
    LocalWork(2, None, 4),
    OPTIMIZERS["nesterov"],
)
SMALL_CNN = Case(W2.model, W2.shape, [3, 2], LocalWork(1, None, 2), OPTIMIZERS["momentum"])


@pytest.mark.parametrize("case", [DROPOUT, SMALL_CNN, SMALL_RESNET], ids=["dropout", "convolutions", "batch norm"])
def test_replays_on_the_card_equal_those_on_the_cpu_to_the_last_bit(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case is not DROPOUT:  # images
        monkeypatch.setattr(torch_backend, "layout_for", lambda model, x: torch.channels_last)
    engine = case.engine("cpu")
    wanted = [train(engine, round) for round in (1, 2)]
    with PretendedCard():
        engine = case.engine("cuda")
        for round, want in enumerate(wanted, 1):
            got = train(engine, round)
            assert all(torch.equal(held(got.delta[name]), value) for name, value in want.delta.items())
            np.testing.assert_array_equal(got.loss, want.loss)


@pytest.mark.parametrize(
    ("case", "launches"),
    [
        (W1, 12),
        pytest.param(W2, 20, marks=pytest.mark.slow),
        (SMALL_RESNET, 40),
        pytest.param(RESNET, 60, marks=pytest.mark.slow),
    ],
    ids=["W1", "W2", "two ResNets", "ResNet-20"],
)
def test_what_a_trained_cohort_costs_the_host(case: Case, launches: int) -> None:
    """Number of clients and steps as in the workloads of docs/performance.md; their sizes do not matter here."""
    with PretendedCard() as card:
        engine = case.engine("cuda")
        params = initial(engine.workload.model)
        train(engine, 1, params)
        card.counts.reset()
        train(engine, 2, params)
        totals = card.counts.totals()
    assert totals["launches"] <= launches, card.counts.table("launches")
    assert totals["waits"] <= 1, card.counts.table("waits")
    assert totals["captured"] == 0
    assert totals["replayed"] > 300


def test_a_step_that_waits_for_the_device_is_not_recorded_and_breaks_the_budget(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def waiting(*args: Any) -> Any:
        batch = gathered(*args)
        assert not batch.x.isnan().any().item()
        return batch

    gathered = linear.gathered
    monkeypatch.setattr(linear, "gathered", waiting)
    with PretendedCard() as card:
        engine = DROPOUT.engine("cuda")
        train(engine, 1)
        card.counts.reset()
        train(engine, 2)
        totals = card.counts.totals()
    reason = "_local_scalar_dense: operation not permitted when stream is capturing"
    assert engine.description == f"graph, linear layers, step by step ({reason})"
    assert capfd.readouterr().err == f"engine=graph: not recorded, which is slower and else the same: {reason}\n"
    assert totals["waits"] > 3
    assert totals["launches"] > 120


def test_what_is_replayed_side_by_side_is_recorded_on_streams_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library's workspace belongs to the stream on which a step is recorded."""
    streams: list[Any] = []

    def watched(graph: Any, pool: Any = None, stream: Any = None) -> Any:
        streams.append(stream)
        return captured(graph, pool, stream)

    with PretendedCard():
        captured = torch.cuda.graph
        monkeypatch.setattr(torch.cuda, "graph", watched)
        train(SMALL_RESNET.engine("cuda"), 1)
        monkeypatch.undo()
    assert None not in streams
    assert len({id(stream) for stream in streams}) == 2  # clients


def test_graphs_of_libraries_are_for_torch_versions_that_keep_their_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "FIRST_WITH_OWN_WORKSPACES", "99.1")
    found = recorder.recorder_for(torch.device("cuda"))
    assert found.description == "step by step (CUDA graphs of libraries need torch 99.1)"
