"""The convolutional network for sequences of measurements (model=cnn1d)."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedsim.core.errors import ConfigError
from fedsim.core.rng import Streams
from fedsim.data.base import TokenShape
from fedsim.engine.data import ClientData
from fedsim.engine.schedule import LocalWork
from fedsim.models.cnn1d import CNN1D
from tests.engines import batched, graph, reference
from tests.test_engine import OPTIMIZERS, assert_engines_equal


def test_the_parameters_are_counted_by_hand() -> None:
    convolutions = (6 * 5 * 32 + 32) + (32 * 5 * 64 + 64) + (64 * 5 * 64 + 64)
    output = 64 * 7 + 7
    model = CNN1D((6, 100), 7)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert num_parameters == convolutions + output == 32295


def test_logits_are_linear_in_the_mean_over_time() -> None:
    model = CNN1D((1, 32), 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.layers[0].weight[:, :, 0] = 1.0  # copies the input; the next two add 32 and 64 copies
        model.layers[3].weight[:, :, 0] = 1.0
        model.layers[6].weight[:, :, 0] = 1.0
        model.layers[10].weight[1] = 1.0
    x = torch.full((1, 1, 32), 2.0)
    # The third convolution gives 2 x 32 x 64 in each of 64 channels, and the output sums these.
    assert model(x).tolist() == [[0.0, 2.0 * 32 * 64 * 64]]


@pytest.mark.parametrize("shape", [(1, 8, 8), (6, 31), (64,), TokenShape(40, 9)])
def test_samples_that_are_no_sequences_are_rejected(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        ConfigError, match=r"model=cnn1d (needs sequences \[C, L\] of at least 32 steps|reads)"
    ):
        CNN1D(shape, 7)
    CNN1D((6, 32), 7)


@pytest.fixture
def double() -> Iterator[None]:
    """Let new tensors have float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def task(model: nn.Module) -> tuple[Any, ...]:
    """Return a model's training on random sequences [2, 32] of clients of different sizes."""
    sizes = [6, 1]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes), 2, 32, generator=generator)
    y = torch.randint(3, (sum(sizes),), generator=generator)
    positions = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    data = ClientData(x, y, positions, positions, 3)
    return model, data, LocalWork(1, None, 4), OPTIMIZERS["momentum"], Streams(3)


@pytest.mark.parametrize("backend", [batched, graph])
@pytest.mark.usefixtures("double")
def test_clients_train_together_as_one_by_one(backend: Any) -> None:
    torch.manual_seed(1)
    model = CNN1D((2, 32), 3)
    assert_engines_equal(backend(*task(model)), reference(*task(model)), np.arange(2))
