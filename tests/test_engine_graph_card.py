"""The backend of recorded steps on a pretended CUDA device: equal to the CPU, and what it costs the host."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedsim.core.rng import Streams
from fedsim.core.types import Cohort
from fedsim.engine import torch_backend
from fedsim.engine.data import ClientData
from fedsim.engine.engine import Engine
from fedsim.engine.graph import recorder
from fedsim.engine.graph import steps as graph_steps
from fedsim.engine.model import initial
from fedsim.engine.schedule import LocalWork
from fedsim.models.cnn import CNN
from fedsim.models.mlp import MLP
from fedsim.models.resnet20 import ResNet20
from tests.engines import graph
from tests.pretended_cuda import PretendedCard, held
from tests.test_engine import OPTIMIZERS, taped


@dataclass(frozen=True)
class Case:
    """Local training of clients with so many samples of a shape."""

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    sizes: list[int]
    work: LocalWork
    optimizer: str

    def engine(self, device: str) -> Engine:
        total = sum(self.sizes)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model = self.model()
            x, y = torch.randn(total, *self.shape), torch.randint(10, (total,))
        positions = np.split(np.arange(total), np.cumsum(self.sizes)[:-1])
        data = ClientData(x.to(device), y.to(device), positions, positions, 10)
        build = taped if device == "cpu" else graph
        return build(model.to(device), data, self.work, OPTIMIZERS[self.optimizer], Streams(0))


def train(engine: Engine, round: int) -> Cohort:
    return engine.train(initial(engine.workload.model), np.arange(len(engine.data.train)), round, 0.1 / round)


def mlp(hidden: list[int], dropout: float) -> Callable[[], nn.Module]:
    return lambda: MLP((1, 4, 4), 10, hidden=hidden, dropout=dropout)


def cnn() -> nn.Module:
    return CNN((1, 18, 18), 10)


def resnet() -> nn.Module:
    return ResNet20((1, 4, 4), 10, shortcut="pad", norm="batch", groups=4)


W1 = Case(mlp([8, 6], 0.0), (1, 4, 4), [4] * 10, LocalWork(None, 30, 4), "decay")
W2 = Case(cnn, (1, 18, 18), [2] * 5, LocalWork(None, 40, 2), "decay")
RESNET = Case(resnet, (1, 4, 4), [2, 3, 4, 5, 6, 7, 8, 8, 8, 9], LocalWork(1, None, 2), "adam")
SMALL_RESNET = Case(resnet, (1, 4, 4), [2, 5], LocalWork(1, None, 2), "adam")
DROPOUT = Case(mlp([8], 0.5), (1, 4, 4), [3, 0, 9], LocalWork(2, None, 4), "nesterov")
SMALL_CNN = Case(cnn, (1, 18, 18), [3, 2], LocalWork(1, None, 2), "momentum")


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


COSTS = {"W1": (W1, 12), "W2": (W2, 20), "two ResNets": (SMALL_RESNET, 40), "ResNet-20": (RESNET, 60)}
LONG = ("W2", "ResNet-20")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in LONG else ()) for n in COSTS])
def test_what_a_trained_cohort_costs_the_host(name: str) -> None:
    """Number of clients and steps as in the workloads of docs/performance.md; their sizes do not matter here."""
    case, launches = COSTS[name]
    with PretendedCard() as card:
        engine = case.engine("cuda")
        params = initial(engine.workload.model)
        train(engine, 1)
        card.counts.reset()
        engine.train(params, np.arange(len(engine.data.train)), 2, 0.1)
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

    gathered = graph_steps.gathered
    monkeypatch.setattr(graph_steps, "gathered", waiting)
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


def test_graphs_are_for_torch_versions_that_keep_their_libraries_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "FIRST_WITH_OWN_WORKSPACES", "99.1")
    found = recorder.recorder_for(torch.device("cuda"))
    assert found.description == "step by step (CUDA graphs of libraries need torch 99.1)"
