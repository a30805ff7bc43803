"""The Triton kernels of linear layers equal the passes in torch, on a CPU by Triton's interpreter.

On a GPU, tests/test_cuda_path.py runs them (TEST_ON_GPU=1).
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from fedsim.core.rng import Streams
from fedsim.core.types import Stack
from fedsim.engine.chain import ChainLayer, LayerChain
from fedsim.engine.graph import backend as graph_backend
from fedsim.engine.linear_passes import forward_and_backward, layers_of, write_gradients
from fedsim.engine.model import initial
from fedsim.engine.stacked import StackedBatch
from tests.engines import graph, reference, schedule_of
from tests.test_engine import OPTIMIZERS, WORKS, model_of, problem
from tests.triton_on_cpu import interpreted

kernels = interpreted("linear_kernels")
SIZES = (70, 33, 20, 10)
CHAIN = LayerChain(
    [
        ChainLayer("a.weight", "a.bias", dropout=0, rate=0.3),
        ChainLayer("b.weight", None),
        ChainLayer("c.weight", "c.bias"),
    ]
)
KEYS = torch.tensor([5, -7, 2**60])
GAP = 3
WIDTH = sum((num_in + 1) * num_out + 2 * GAP for num_in, num_out in pairwise(SIZES))


def views(flat: Tensor) -> Stack:
    """Return weights and biases in `flat` [R, WIDTH], with gaps as in ModelBuffers."""
    stack = {}
    column = 0
    for name, num_in, num_out in zip("abc", SIZES[:-1], SIZES[1:], strict=True):
        for kind, shape in (("weight", (num_out, num_in)), ("bias", (num_out,))):
            size = int(np.prod(shape))
            stack[f"{name}.{kind}"] = flat[:, column : column + size].view(-1, *shape)
            column += size + GAP
    return stack


def a_batch(num_samples: int) -> StackedBatch:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, num_samples, SIZES[0], generator=generator)
    y = torch.randint(SIZES[-1], (3, num_samples), generator=generator)
    weights = torch.rand(3, num_samples, generator=generator)
    weights[1, num_samples // 2 :] = 0  # padding
    return StackedBatch(x, y, weights, KEYS)


def computed(params: Tensor, batch: StackedBatch, clients: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return gradients [R, WIDTH] and losses [R, B] of some clients by the kernels."""
    rows = list(clients)
    assert batch.weights is not None
    part = StackedBatch(batch.x[rows], batch.y[rows], batch.weights[rows], KEYS[rows])
    grads = torch.zeros(len(rows), WIDTH)
    passes = kernels.LinearKernels(CHAIN, views(params[rows]), views(grads), "float32")
    return grads, passes(part)


@pytest.mark.parametrize("num_samples", [5, 37])
def test_kernels_equal_the_passes_in_float64(num_samples: int) -> None:
    params = 0.2 * torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))
    batch = a_batch(num_samples)
    grads, losses = computed(params, batch, [0, 1, 2])

    def passes(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        expected = torch.zeros(3, WIDTH, dtype=dtype)
        assert batch.weights is not None
        exact = StackedBatch(batch.x.to(dtype), batch.y, batch.weights.to(dtype), KEYS)
        layers = layers_of(CHAIN, views(params.to(dtype)))
        losses, inputs, slopes = forward_and_backward(CHAIN, layers, exact)
        write_gradients(layers_of(CHAIN, views(expected)), inputs, slopes)
        return expected, losses

    expected, expected_losses = passes(torch.float64)
    in_float32, _ = passes(torch.float32)
    error_of_torch = float((in_float32 - expected).norm())
    # Sums of so few numbers round by chance: the kernels add in blocks, and torch in its own order.
    assert float((grads - expected).norm()) < 2 * error_of_torch
    torch.testing.assert_close(losses.double(), expected_losses, rtol=1e-5, atol=1e-6)
    assert not grads[views_mask()].any()


def test_nan_in_a_hidden_layer_reaches_the_losses() -> None:
    params = torch.full((3, WIDTH), 0.1)
    views(params)["b.weight"][1, 0, 0] = torch.nan
    _, losses = computed(params, a_batch(5), [0, 1, 2])
    assert losses[1].isnan().all()
    assert losses[[0, 2]].isfinite().all()


def test_samples_of_weight_zero_add_nothing_to_gradients_if_their_logits_are_infinite() -> None:
    params = 0.2 * torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))
    views(params)["c.weight"][1] *= 1_000
    batch = a_batch(6)
    expected, _ = computed(params, batch, [0, 1, 2])
    batch.x[1, 3:] *= 1e37  # The second client's padding. The hidden layers stay finite.
    grads, losses = computed(params, batch, [0, 1, 2])
    assert losses[1, 3:].isnan().all()
    assert torch.equal(grads, expected)


def test_clients_may_begin_behind_2_to_the_31_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    offsets = []
    add = InterpreterBuilder.create_addptr

    def add_and_record(builder: Any, pointer: Any, offset: Any) -> Any:
        offsets.append(offset.data)
        return add(builder, pointer, offset)

    monkeypatch.setattr(InterpreterBuilder, "create_addptr", add_and_record)
    number, label = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    # Without samples, inputs and outputs, kernels compute addresses and load nothing.
    sizes = (0, 0, 0, 2**30)
    options = {"TILE": 16, "DEPTH": 16, "PRECISION": "tf32x3"}
    grid = (3, 1, 1)
    kernels.hidden_kernel[grid](*[number] * 3, None, number, *sizes, 0, 0, 1.0, **options)
    kernels.loss_kernel[grid](*[number] * 3, label, *[number] * 3, *sizes, 0, CLASSES=16, **options)
    kernels.input_slope_kernel[grid](*[number] * 4, 0, 0, 1, 2**30, 1.0, **options)
    kernels.weight_gradient_kernel[grid](*[number] * 4, *sizes, **options)
    assert max(int(offset.max()) for offset in offsets) >= 2**31
    assert min(int(offset.min()) for offset in offsets) >= 0


def views_mask() -> Tensor:
    """Return which numbers of three rows lie in gaps, or belong to the missing bias."""
    marked = torch.ones(3, WIDTH)
    for name, view in views(marked).items():
        if name != "b.bias":
            view.zero_()
    return marked.bool()


def test_a_client_alone_equals_itself_in_company() -> None:
    params = 0.2 * torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))
    batch = a_batch(37)
    grads, losses = computed(params, batch, [0, 1, 2])
    for client in range(3):
        alone, own_losses = computed(params, batch, [client])
        assert torch.equal(alone[0], grads[client])
        assert torch.equal(own_losses[0], losses[client])


@pytest.mark.parametrize(
    ("name", "optimizer"), [("mlp", "momentum"), ("dropout", "decay"), ("mlp", "sgd")]
)
def test_local_training_by_kernels_equals_plain_torch(name: str, optimizer: str) -> None:
    task: Any = (
        model_of(name, torch.float32),
        problem([7, 1, 13], torch.float32),
        WORKS["steps"],
        OPTIMIZERS[optimizer],
    )
    engine: Any = graph(*task, Streams(3))
    engine.backend._use_kernels = True
    start = initial(engine.workload.model)
    schedule = schedule_of(engine, np.arange(3), 2)
    actual = engine.backend.train([start] * 3, schedule)
    expected = reference(*task, Streams(3)).backend.train([start] * 3, schedule)
    for tensor_name, value in expected.delta.items():
        torch.testing.assert_close(actual.delta[tensor_name], value, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(
        actual.losses[schedule.mask], expected.losses[schedule.mask], rtol=1e-5
    )


@pytest.mark.parametrize(
    ("rounds", "failure", "used"), [(1_000, None, True), (1, None, False), (1_000, "no gcc", False)]
)
def test_long_runs_use_kernels_if_they_work(
    rounds: int,
    failure: str | None,
    used: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(graph_backend, "can_run_triton", lambda device: True)
    if failure is not None:
        broken = mock.Mock(side_effect=RuntimeError(f"{failure}\nand more"))
        monkeypatch.setattr(kernels.LinearKernels, "__call__", broken)
    task = (model_of("mlp", torch.float32), problem([7, 9], torch.float32))
    engine: Any = graph(*task, WORKS["steps"], OPTIMIZERS["sgd"], Streams(3), rounds=rounds)
    assert ("in Triton" in engine.backend.description) == used
    message = f"engine=graph: not in Triton (slower, same results): {failure}\n"
    assert capfd.readouterr().err == (message if failure else "")
