"""Clipping of gradients in local training (`optimizer.max_grad_norm`), as torch clips them."""

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedsim.core.errors import ConfigError
from fedsim.core.rng import Streams
from fedsim.core.types import Correction
from fedsim.engine.engine import Engine
from fedsim.engine.model import initial
from fedsim.engine.optimizers import LocalOptimizer, clip
from fedsim.engine.schedule import LocalWork
from tests.engines import auto, batched, native, reference
from tests.run_toys import Run, refused
from tests.test_engine import (
    BACKENDS,
    OPTIMIZERS,
    WORKS,
    WithUnused,
    assert_engines_equal,
    model_of,
    problem,
    sgd,
    supports,
)

MAX_NORM = 0.3
"""Most gradients of `problem` are longer, and some are not."""


def clipped(optimizer: str) -> LocalOptimizer:
    limited = copy.copy(OPTIMIZERS[optimizer])
    limited.max_grad_norm = MAX_NORM
    return limited


def test_each_row_is_clipped_as_torch_clips_it() -> None:
    """The norms of the rows are about 0.4, 4 and 0, and the limit is 1."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([0.1, 1.0, 0.0])
    grads = {
        "weight": torch.randn(3, 2, 5, generator=generator) * scales.view(3, 1, 1),
        "bias": torch.randn(3, 6, generator=generator) * scales.view(3, 1),
    }
    expected = copy.deepcopy(grads)
    for row in range(3):
        parameters = [nn.Parameter(torch.zeros_like(value[row])) for value in grads.values()]
        for parameter, value in zip(parameters, expected.values(), strict=True):
            parameter.grad = value[row]
        nn.utils.clip_grad_norm_(parameters, 1.0)
    before = copy.deepcopy(grads)
    clip(grads, 1.0)
    torch.testing.assert_close(grads, expected)
    assert torch.equal(grads["bias"][0], before["bias"][0])
    assert not torch.equal(grads["bias"][1], before["bias"][1])


CASES = [
    (backend, name, optimizer)
    for backend in BACKENDS
    for name in ("mlp", "dropout", "batch norm and dropout")
    for optimizer in ("sgd", "nesterov", "adam")
    if backend != "native" and supports(backend, name, optimizer)
]


@pytest.mark.parametrize(("backend", "name", "optimizer"), CASES)
def test_engines_clip_as_the_reference(backend: str, name: str, optimizer: str) -> None:
    model, data = model_of(name), problem([7, 1, 13, 4, 2])
    task = (model, data, WORKS["epochs"], clipped(optimizer), Streams(3))
    expected = reference(*task)
    assert_engines_equal(BACKENDS[backend](*task), expected, np.arange(5))
    free = reference(model, data, WORKS["epochs"], OPTIMIZERS[optimizer], Streams(3))
    params = initial(model)
    deltas = [each.train(params, np.arange(5), 2, 0.1).updates for each in (expected, free)]
    assert not torch.allclose(*deltas)


def one_step(engine: Engine, correction: Correction | None = None) -> torch.Tensor:
    """Return the change of the trained parameters [P] of client 0 by a step."""
    params = initial(engine.workload.model)
    return engine.train(params, np.array([0]), 1, 1.0, correction=correction).updates[0]


@pytest.mark.parametrize("build", [reference, *(BACKENDS[name] for name in ("batched", "graph"))])
def test_the_sum_of_gradient_and_correction_is_clipped_before_weight_decay(build: object) -> None:
    """With lr = 1, plain SGD moves by -(clip(g + shift) + decay w)."""
    model, data = model_of("mlp"), problem([6])
    work = LocalWork(epochs=None, steps=1, batch_size=6)
    free = sgd(momentum=0.0, nesterov=False, weight_decay=0.0)
    gradient = -one_step(reference(model, data, work, free, Streams(0)))
    shift = {name: torch.full((1, *value.shape), 0.1) for name, value in initial(model).items()}
    shift = {name: value.double() for name, value in shift.items()}
    corrected = gradient + 0.1
    weights = torch.cat([value.flatten() for value in initial(model).values()])
    expected = -(corrected * (MAX_NORM / (corrected.norm() + 1e-6)) + 0.5 * weights)
    assert corrected.norm() > MAX_NORM
    limited = sgd(momentum=0.0, nesterov=False, weight_decay=0.5, max_grad_norm=MAX_NORM)
    engine = build(model, data, work, limited, Streams(0))  # type: ignore[operator]
    torch.testing.assert_close(one_step(engine, Correction(shift=shift)), expected)


def test_unused_parameters_do_not_disturb_clipping() -> None:
    task = (WithUnused().double(), problem([7, 3]), WORKS["epochs"], clipped("sgd"), Streams(3))
    assert_engines_equal(batched(*task), reference(*task), np.arange(2))


@pytest.mark.parametrize("name", ["mlp", "conv"])
def test_a_clipped_clients_bits_do_not_depend_on_the_others(name: str) -> None:
    task = (model_of(name), problem([8] * 5), WORKS["epochs"], clipped("sgd"), Streams(3))
    engine, params = batched(*task), initial(model_of(name))
    of_five = engine.train(params, np.arange(5), 1, 0.1).updates
    of_two = engine.train(params, np.array([1, 4]), 1, 0.1).updates
    assert torch.equal(of_two, of_five[[1, 4]])


def test_the_c_engine_declines_and_auto_takes_another() -> None:
    data = problem([6])
    data = replace(data, x=data.x.float())
    task = (model_of("mlp").float(), data, WORKS["epochs"], clipped("sgd"), Streams(3))
    with pytest.raises(ConfigError, match=r"does not clip gradients \(optimizer\.max_grad_norm\)"):
        native(*task)
    assert auto(*task, rounds=10**6).backend.description.startswith("batched")


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_norm_that_is_not_positive_is_rejected(
    optimizer: str, fedsim: Run, tmp_path: Path
) -> None:
    error = refused(fedsim, tmp_path, f"optimizer={optimizer}", "optimizer.max_grad_norm=0")
    assert "optimizer.max_grad_norm=0.0: must be > 0" in error
