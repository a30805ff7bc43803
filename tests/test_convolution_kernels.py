"""Triton kernels of convolutional networks equal PyTorch, on a CPU by Triton's interpreter.

On a GPU, `scripts/benchmark.py gpu --only convolutions` shows their errors.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsim.core.flat import flat_rows
from fedsim.core.rng import Streams
from fedsim.core.types import Params
from fedsim.engine.backend import Workload
from fedsim.engine.data import ClientData
from fedsim.engine.graph import backend as graph_backend
from fedsim.engine.graph.buffers import ModelBuffers, ScheduleTable
from fedsim.engine.model import initial
from fedsim.engine.schedule import LocalWork
from fedsim.engine.stacked import StackedBatch
from tests.engines import graph, reference, schedule_of
from tests.test_engine import OPTIMIZERS
from tests.triton_on_cpu import interpreted

interpreted("convolution_kernels")
convolution_steps = interpreted("convolution_steps")
BATCH = 3
COUNTS = (3, 2)
"""Samples of two clients in a batch; the second one has padding."""
CLASSES = 4


@dataclass(frozen=True)
class Case:
    """A network for images of `shape`."""

    layers: Sequence[nn.Module]
    shape: tuple[int, int, int]

    @property
    def model(self) -> nn.Module:
        return nn.Sequential(*self.layers)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes milliseconds for each program."""
    monkeypatch.setattr(convolution_steps, "PART_PROGRAMS", 6)


def cases() -> dict[str, Case]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return {
            # Pooling drops the last row and column of 7 pixels.
            "3x3": Case(
                [
                    *(nn.Conv2d(2, 5, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()),
                    *(nn.Conv2d(5, 6, 3, padding=1, bias=False), nn.ReLU()),
                    *(nn.Flatten(), nn.Linear(54, CLASSES)),
                ],
                (2, 7, 7),
            ),
            "5x5": Case(
                [
                    *(nn.Conv2d(1, 5, 5, padding=1), nn.ReLU()),
                    *(nn.Conv2d(5, 4, 2, padding=1), nn.MaxPool2d(2), nn.ReLU()),
                    *(nn.Flatten(), nn.Linear(16, CLASSES)),
                ],
                (1, 5, 6),
            ),
        }


def workload_of(case: Case, num_samples: int = BATCH) -> Workload:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_samples, *case.shape, generator=generator)
    y = torch.randint(CLASSES, (num_samples,), generator=generator)
    positions = np.array_split(np.arange(num_samples), 2)
    data = ClientData(x, y, positions, positions, CLASSES)
    return Workload(case.model, data, OPTIMIZERS["sgd"])


@dataclass(frozen=True)
class Problem:
    """Models and a batch of two clients."""

    case: Case
    models: Sequence[Params]
    batch: StackedBatch

    @classmethod
    def of(cls, case: Case) -> "Problem":
        generator = torch.Generator().manual_seed(2)
        models = [initial(case.model), initial(case.model)]
        for model in models:
            for value in model.values():
                value += 0.1 * torch.randn(value.shape, generator=generator)
        x = torch.randn(2, BATCH, *case.shape, generator=generator)
        y = torch.randint(CLASSES, (2, BATCH), generator=generator)
        weights = torch.zeros(2, BATCH)
        for row, count in zip(weights, COUNTS, strict=True):
            row[:count] = 1 / count
        return cls(case, models, StackedBatch(x, y, weights, None))

    def by_kernels(self, clients: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return gradients [R, D] and losses [R, B] of some of the clients."""
        rows = list(clients)
        task = workload_of(self.case)
        network = convolution_steps.find_network(task, "float32")
        like = torch.empty(0)
        models = ModelBuffers(task.model, len(rows), like, 0, False, network.storage)
        table = ScheduleTable(1, len(rows), BATCH, 2, like)
        models.load([self.models[row] for row in rows], None)
        steps = convolution_steps.ConvolutionSteps(
            *(task.data, table, models, task.optimizer, slice(0, len(rows)), network)
        )
        batch, live = self.batch, torch.ones(len(rows), 1, dtype=torch.bool)
        assert batch.weights is not None
        part = StackedBatch(batch.x[rows], batch.y[rows], batch.weights[rows], None)
        losses = steps.compute_gradients(part, live, full=False)
        # Models of zeros that move along the gradients have these in the model's order.
        zeros = {name: torch.zeros_like(value) for name, value in self.models[0].items()}
        models.load([zeros] * len(rows), None)
        models.params.add_(models.grads)
        changes = flat_rows(models.changes(len(rows)))
        assert models.grads.count_nonzero() == changes.count_nonzero()  # Gaps stay 0.
        return changes, losses

    def by_torch(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        gradients, losses = [], []
        assert self.batch.weights is not None
        for client, params in enumerate(self.models):
            model = copy.deepcopy(self.case.model)
            model.load_state_dict(params)
            output = model.to(dtype)(self.batch.x[client].to(dtype))
            loss = F.cross_entropy(output, self.batch.y[client], reduction="none")
            total = (loss * self.batch.weights[client]).sum()
            gradient = torch.autograd.grad(total, list(model.parameters()))
            gradients.append(torch.cat([value.flatten() for value in gradient]))
            losses.append(loss.detach())
        return torch.stack(gradients), torch.stack(losses)


@pytest.mark.parametrize("name", ["3x3 of winners", "3x3", "5x5"])
def test_gradients_equal_float64_and_a_client_alone_equals_itself_in_company(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _, of_winners = name.partition(" of ")
    if not of_winners:  # The first layer has slopes before pooling.
        monkeypatch.setattr(convolution_steps, "FEW_CHANNELS", 0)
    problem = Problem.of(cases()[name])
    gradients, losses = problem.by_kernels([0, 1])
    expected, expected_losses = problem.by_torch(torch.float64)
    in_float32, _ = problem.by_torch(torch.float32)
    # Both add in float32, but in another order, so that errors differ by chance.
    error_of_torch = float((in_float32 - expected).norm())
    assert float((gradients - expected).norm()) < 2 * error_of_torch
    valid = torch.as_tensor(COUNTS)[:, None] > torch.arange(BATCH)
    torch.testing.assert_close(losses[valid].double(), expected_losses[valid], rtol=1e-5, atol=1e-6)

    alone, losses_alone = problem.by_kernels([1])
    assert torch.equal(alone[0], gradients[1])
    assert torch.equal(losses_alone[0], losses[1])


def small_case() -> Case:
    layers = [nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(2, CLASSES)]
    return Case(layers, (1, 4, 4))


@pytest.mark.parametrize("pixel", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_pooling_keeps_nan_of_each_pixel_of_a_window(pixel: tuple[int, int]) -> None:
    layers = [nn.Conv2d(1, 2, 1), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(2, CLASSES)]
    problem = Problem.of(Case(layers, (1, 2, 2)))
    problem.batch.x[1, 0, 0, *pixel] = torch.nan
    _, losses = problem.by_kernels([0, 1])
    assert losses.isnan().nonzero().tolist() == [[1, 0]]


def test_local_training_by_kernels_equals_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_backend, "can_run_triton", lambda device: True)
    task = workload_of(small_case(), 3)
    arguments = (task.model, task.data, LocalWork(None, 2, 2), OPTIMIZERS["momentum"], Streams(3))
    engine = graph(*arguments, rounds=1_000)
    assert "convolutions in Triton" in engine.description
    start = initial(task.model)
    schedule = schedule_of(engine, np.arange(2), 1)
    actual = engine.backend.train([start] * 2, schedule)
    expected = reference(*arguments).backend.train([start] * 2, schedule)
    for name, value in expected.delta.items():
        torch.testing.assert_close(actual.delta[name], value, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(
        actual.losses[schedule.mask], expected.losses[schedule.mask], rtol=1e-5
    )


def test_kernels_that_fail_or_differ_are_not_used(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(graph_backend, "can_run_triton", lambda device: True)
    task = workload_of(small_case())
    arguments = (task.model, task.data, LocalWork(None, 2, 2), OPTIMIZERS["sgd"], Streams(3))
    steps = convolution_steps.ConvolutionSteps
    reasons = []
    for compute in (
        lambda *args, **kwargs: 1 / 0,
        lambda self, batch, *args, **kwargs: batch.weights,
    ):
        monkeypatch.setattr(steps, "compute_gradients", compute)
        engine = graph(*arguments, rounds=1_000)
        assert "one client a stream" in engine.description
        reasons.append(capfd.readouterr().err.strip().rpartition("because they ")[2])
    assert reasons == ["fail: division by zero", "differ from PyTorch on this machine"]


def test_short_runs_and_models_that_the_kernels_cannot_train_do_without_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graph_backend, "can_run_triton", lambda device: True)
    task = workload_of(small_case())
    arguments = (task.data, LocalWork(None, 2, 2), OPTIMIZERS["sgd"], Streams(3))
    assert "one client a stream" in graph(task.model, *arguments, rounds=1).description
    last_layers = [nn.ReLU(), nn.Dropout(0.5), nn.Linear(CLASSES, CLASSES)]
    after_linear = nn.Sequential(*small_case().layers, *last_layers)
    convolution, linear = small_case().layers[:3], small_case().layers[3:]
    after_convolution = nn.Sequential(*convolution, nn.Dropout(0.5), *linear)
    for model in (after_linear, after_convolution):
        with_dropout = Workload(model, task.data, task.optimizer)
        assert with_dropout.chain is not None
        assert convolution_steps.find_network(with_dropout, "float32") is None
