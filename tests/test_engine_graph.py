"""Recorded local steps equal those of the reference backend, which is plain PyTorch: to 1e-10 in double precision."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedsim.engine.backend import TrainingResult
from fedsim.engine.data import ClientData
from fedsim.engine.engine import Engine
from fedsim.engine.graph.backend import GraphBackend, capacity
from fedsim.engine.graph.trainer import longest_recording, recordings
from fedsim.engine.model.parameters import initial
from fedsim.engine.schedule import LocalWork, Schedule, concatenate_schedules
from fedsim.errors import ConfigError
from fedsim.models.cnn import CNN
from fedsim.models.resnet20 import ResNet20
from fedsim.optimizers.base import LocalOptimizer
from fedsim.rng import Streams
from fedsim.types import Params
from tests.engines import graph, reference, schedule_of
from tests.tape import TapeRecorder
from tests.test_engine import MODELS, OPTIMIZERS, SIZES, WORKS, assert_equal, model_of, problem


def chain(rate: float = 0.0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        hidden = [nn.Linear(16, 8), nn.Dropout(rate), nn.ReLU(), nn.Linear(8, 6, bias=False), nn.ReLU()]
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(6, 3)).double()


def pair(
    model: nn.Module, data: ClientData, work: LocalWork, optimizer: LocalOptimizer, *, tape: bool = True, **switches: Any
) -> tuple[Engine, Engine]:
    """An engine that replays recorded steps, and the reference."""
    one, other = (build(model, data, work, optimizer, Streams(3)) for build in (graph, reference))
    if switches:
        one = graph(model, data, work, optimizer, Streams(3), **switches)
    if tape:
        backend_of(one).recorder = TapeRecorder()
    return one, other


def backend_of(engine: Engine) -> GraphBackend:
    assert isinstance(engine.backend, GraphBackend)
    return engine.backend


@pytest.mark.parametrize("name", MODELS)
def test_replayed_steps_equal_the_reference_for_every_model(name: str) -> None:
    engines = pair(model_of(name), problem(SIZES["ragged"]), WORKS["epochs"], OPTIMIZERS["sgd"])
    assert_equal(*engines, np.arange(5))


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", ["mlp", "batch norm 1d and dropout"])
def test_replayed_steps_equal_the_reference_for_every_shape_of_work(name: str, sizes: str, work: str) -> None:
    engines = pair(model_of(name), problem(SIZES[sizes]), WORKS[work], OPTIMIZERS["sgd"])
    assert_equal(*engines, np.arange(len(SIZES[sizes])))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_chains_equal_the_reference_for_every_optimiser(rate: float, optimizer: str) -> None:
    engines = pair(chain(rate), problem(SIZES["ragged"]), WORKS["epochs"], OPTIMIZERS[optimizer])
    assert backend_of(engines[0]).description == "graph, linear layers, a tape"
    assert_equal(*engines, np.arange(5))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_other_models_equal_the_reference_for_every_optimiser(optimizer: str) -> None:
    model = model_of("batch norm 1d and dropout")
    engines = pair(model, problem(SIZES["ragged"]), WORKS["epochs"], OPTIMIZERS[optimizer])
    assert backend_of(engines[0]).description == "graph, one client a stream, a tape"
    assert_equal(*engines, np.arange(5))


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_resnet20_equals_the_reference(norm: Any) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = ResNet20((1, 4, 4), 3, shortcut="conv", norm=norm, groups=4).double()
    engines = pair(model, problem([8, 5]), LocalWork(1, None, 4), OPTIMIZERS["momentum"])
    assert_equal(*engines, np.arange(2), tolerance=1e-8)
