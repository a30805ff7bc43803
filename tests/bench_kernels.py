"""Times of the hot kernels, each by itself, at the sizes of workload W1 (docs/performance.md).

    uv run pytest tests/bench_kernels.py

Not collected by `pytest` alone. Figures of one machine are comparable with each other only
(`--benchmark-save=<name>`, later `--benchmark-compare`).
"""

from collections.abc import Callable
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
from fedsim.engine.stacked import stacked_batches
from fedsim.models.cnn import CNN
from fedsim.models.mlp import MLP
from fedsim.selectors.divfl import lazy_greedy
from fedsim.selectors.similarity import inner_products, similarities
from fedsim.selectors.tools import least_similar_subset
from tests import engines

NUM_CLIENTS, SAMPLES, COHORT = 100, 600, 10

Benchmark = Callable[..., Any]
SGD_PLAIN = SGD(lr=0.005, momentum=0.0, nesterov=False, weight_decay=1e-4, schedule=Constant())


def fashion() -> ClientData:
    """As many random images as Fashion-MNIST has, 600 a client."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_CLIENTS * SAMPLES, 1, 28, 28, generator=generator)
    y = torch.randint(10, (len(x),), generator=generator)
    positions = np.split(np.random.default_rng(0).permutation(len(x)), NUM_CLIENTS)
    return ClientData(x, y, positions, positions, 10)


class Tanh(nn.Sequential):
    """The MLP with another activation, which is not written out but differentiated."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(784, 64), nn.Tanh(), nn.Linear(64, 30), nn.Tanh(), nn.Linear(30, 10))


@pytest.fixture(scope="module")
def data() -> ClientData:
    return fashion()


@pytest.fixture(scope="module")
def engine(data: ClientData) -> Engine:
    return written_out(data)


@pytest.fixture(scope="module", params=["native", "written_out"])
def either(data: ClientData, request: pytest.FixtureRequest) -> Engine:
    """For questions that both answer."""
    return native(data) if request.param == "native" else written_out(data)


WORK = LocalWork(None, 30, 64)


def written_out(data: ClientData) -> Engine:
    return engines.batched(MLP((1, 28, 28), 10, hidden=[64, 30], dropout=0.0), data, WORK, SGD_PLAIN, Streams(0))


def differentiated(data: ClientData) -> Engine:
    return engines.batched(Tanh(), data, WORK, SGD_PLAIN, Streams(0))


def compiled(data: ClientData) -> Engine:
    return engines.batched(Tanh(), data, WORK, SGD_PLAIN, Streams(0), compile=True)


def native(data: ClientData, model: nn.Module | None = None, work: LocalWork = WORK) -> Engine:
    model = model or MLP((1, 28, 28), 10, hidden=[64, 30], dropout=0.0)
    return engines.native(model, data, work, SGD_PLAIN, Streams(0), workers="auto")


@pytest.mark.parametrize("build", [native, written_out, differentiated, compiled])
def test_local_training_of_ten_clients(benchmark: Benchmark, data: ClientData, build: Any) -> None:
    engine = build(data)
    params = initial(engine.workload.model)
    benchmark(engine.train, params, np.arange(COHORT), 1, 0.005)


def sequential(data: ClientData, model: nn.Module, work: LocalWork) -> Engine:
    return engines.reference(model, data, work, SGD_PLAIN, Streams(0), workers="auto")


@pytest.mark.parametrize("clients", [1, 2])
@pytest.mark.parametrize("build", [native, sequential])
def test_convolutional_clients(benchmark: Benchmark, build: Any, clients: int) -> None:
    x, y = torch.randn(1000, 3, 32, 32), torch.randint(10, (1000,))
    positions = np.split(np.arange(1000), 2)
    model = CNN((3, 32, 32), 10)
    engine = build(ClientData(x, y, positions, positions, 10), model, LocalWork(None, 10, 50))
    benchmark(engine.train, initial(model), np.arange(clients), 1, 0.01)


def test_schedule_of_a_round(benchmark: Benchmark, engine: Engine) -> None:
    benchmark(engines.schedule_of, engine, np.arange(COHORT), 1)


def test_gathering_a_rounds_samples(benchmark: Benchmark, engine: Engine) -> None:
    schedule = engines.schedule_of(engine, np.arange(COHORT), 1)
    benchmark(lambda: [len(batch.x) for batch in stacked_batches(engine.data, schedule)])


def test_evaluation_of_ten_thousand_images(benchmark: Benchmark, either: Engine) -> None:
    params = initial(either.workload.model)
    benchmark(either.evaluate, params, either.data.x[:10_000], either.data.y[:10_000])


def test_losses_of_all_clients(benchmark: Benchmark, either: Engine) -> None:
    benchmark(either.losses, initial(either.workload.model), either.data.evaluate)


def test_gradients_of_all_clients(benchmark: Benchmark, either: Engine) -> None:
    params = initial(either.workload.model)
    benchmark(lambda: sum(1 for _ in either.client_gradients(params, either.data.train, None)))


def test_inner_products_of_a_hundred_updates(benchmark: Benchmark) -> None:
    benchmark(inner_products, [torch.randn(100, 52_500)])


def test_power_norm_similarities_of_a_hundred_updates(benchmark: Benchmark) -> None:
    benchmark(similarities, [torch.randn(100, 52_500)], 4.0)


def test_the_ten_least_alike_of_a_hundred(benchmark: Benchmark) -> None:
    table = np.corrcoef(np.random.default_rng(0).standard_normal((100, 50)))
    benchmark(least_similar_subset, table, COHORT, "greedy", 3, np.random.default_rng(0))


def test_facility_location_over_a_thousand(benchmark: Benchmark) -> None:
    points = np.random.default_rng(0).standard_normal((1000, 10))
    apart = np.linalg.norm(points[:, None] - points[None], axis=2)
    benchmark(lazy_greedy, apart, COHORT, np.random.default_rng(0))
