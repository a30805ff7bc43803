"""Times of training and of questions to clients, each by itself, at the sizes of workload W1 (docs/performance.md).

    uv run pytest tests/bench_kernels.py

Not collected by `pytest` alone. Figures of one machine are comparable with each other only
(`--benchmark-save=<name>`, later `--benchmark-compare`).
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedsim.core.rng import Streams
from fedsim.engine.data import ClientData
from fedsim.engine.engine import Engine
from fedsim.engine.model import initial
from fedsim.engine.optimizers import SGD, Constant
from fedsim.engine.schedule import LocalWork
from fedsim.models.cnn import CNN
from fedsim.models.mlp import MLP
from tests import engines

COHORT, WORK = 10, LocalWork(None, 30, 64)
PLAIN = SGD(lr=0.005, momentum=0.0, nesterov=False, weight_decay=1e-4, schedule=Constant())
Benchmark = Callable[..., Any]


def written_out() -> nn.Module:
    return MLP((1, 28, 28), 10, hidden=[64, 30], dropout=0.0)


def differentiated() -> nn.Module:
    """The MLP with another activation."""
    hidden = nn.Linear(784, 64), nn.Tanh(), nn.Linear(64, 30), nn.Tanh(), nn.Linear(30, 10)
    return nn.Sequential(nn.Flatten(), *hidden)


@cache
def engine_of(kind: str) -> Engine:
    """On as many random images as Fashion-MNIST has, 600 a client."""
    x = torch.randn(60_000, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    positions = np.split(np.random.default_rng(0).permutation(len(x)), 100)
    data = ClientData(x, torch.arange(len(x)) % 10, positions, positions, 10)
    model = written_out() if kind in ("native", "batched") else differentiated()
    if kind == "native":
        return engines.native(model, data, WORK, PLAIN, Streams(0), workers="auto")
    return engines.batched(model, data, WORK, PLAIN, Streams(0), compile=kind == "compiled")


@pytest.mark.parametrize("kind", ["native", "batched", "differentiated", "compiled"])
def test_local_training_of_ten_clients(benchmark: Benchmark, kind: str) -> None:
    engine = engine_of(kind)
    benchmark(engine.train, initial(engine.workload.model), np.arange(COHORT), 1, 0.005)


@pytest.mark.parametrize("clients", [1, 2])
@pytest.mark.parametrize("build", [engines.native, engines.reference])
def test_convolutional_clients(benchmark: Benchmark, build: Any, clients: int) -> None:
    positions = np.split(np.arange(1000), 2)
    data = ClientData(torch.randn(1000, 3, 32, 32), torch.arange(1000) % 10, positions, positions, 10)
    model = CNN((3, 32, 32), 10)
    engine = build(model, data, LocalWork(None, 10, 50), PLAIN, Streams(0), workers="auto")
    benchmark(engine.train, initial(model), np.arange(clients), 1, 0.01)


@pytest.mark.parametrize("question", ["evaluate", "losses", "client_gradients"])
@pytest.mark.parametrize("kind", ["native", "batched"])
def test_questions(benchmark: Benchmark, kind: str, question: str) -> None:
    """Of ten thousand images, or of all clients."""
    engine = engine_of(kind)
    x, y = engine.data.x[:10_000], engine.data.y[:10_000]
    given = (x, y) if question == "evaluate" else (engine.data.evaluate,)
    params, ask = initial(engine.workload.model), getattr(engine, question)
    benchmark(lambda: list(ask(params, *given)) if question == "client_gradients" else ask(params, *given))
