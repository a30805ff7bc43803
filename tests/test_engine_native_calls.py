"""Calls of the compiled library check their arguments: C never reads or writes out of range."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedsim.core.types import Params
from fedsim.engine.chain import find_chain
from fedsim.engine.native.calls import ChainCalls, SampleBatches, SgdRule, cross_entropies, hits

pytestmark = pytest.mark.usefixtures("compiled")
NUM_SAMPLES, CLASSES, STEPS, WIDTH = 20, 3, 2, 5
MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(64, 20), nn.Dropout(0.3), nn.ReLU(), nn.Linear(20, 3)
    ),
    "one convolution": lambda: nn.Sequential(
        nn.Conv2d(1, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(180, 3)
    ),
    "convolutions": lambda: nn.Sequential(
        *(nn.Conv2d(1, 5, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(5, 18, 3), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(72, 7), nn.ReLU(), nn.Linear(7, 3)),
    ),
}


def calls_of(name: str = "linear") -> ChainCalls:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = MODELS[name]().double()
    chain = find_chain(model)
    assert chain is not None
    params = {key: value.detach() for key, value in model.named_parameters()}
    return ChainCalls(chain, params, (1, 8, 8))


def batches() -> SampleBatches:
    """Return valid batches: a step of five samples, and a step of three."""
    generator, rng = torch.Generator().manual_seed(0), np.random.default_rng(0)
    return SampleBatches(
        x=torch.randn(NUM_SAMPLES, 1, 8, 8, generator=generator, dtype=torch.float64),
        y=torch.randint(CLASSES, (NUM_SAMPLES,), generator=generator),
        positions=rng.permutation(NUM_SAMPLES)[: STEPS * WIDTH].reshape(STEPS, WIDTH),
        counts=np.array([WIDTH, 3]),
        losses=np.zeros((STEPS, WIDTH)),
        keys=rng.integers(2**62, size=STEPS),
    )


def zeros(calls: ChainCalls) -> Params:
    return {key: torch.zeros_like(value) for key, value in calls.params.items()}


def train(calls: ChainCalls, work: SampleBatches) -> None:
    calls.train(work, SgdRule(0.1, 0.01, 0.9), zeros(calls), zeros(calls))


def gradient(calls: ChainCalls, work: SampleBatches) -> None:
    calls.gradient(work, zeros(calls))


def outputs(calls: ChainCalls, work: SampleBatches) -> None:
    calls.outputs(work, torch.zeros(int(work.counts.sum()), CLASSES, dtype=torch.float64))


ALL: list[Callable[[ChainCalls, SampleBatches], None]] = [train, gradient, outputs]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("label", label) for label in (-1, 3, 2**62, -100)),
        *(("position", position) for position in (-1, NUM_SAMPLES, 2**62, -(2**62))),
        *(("count", count) for count in (-1, WIDTH + 1)),
    ],
)
def test_values_out_of_range_are_rejected_and_nothing_is_trained(
    name: str, value: int, model: str
) -> None:
    work = batches()
    if name == "label":
        assert work.y is not None
        work.y[int(work.positions[1, 2])] = value
    elif name == "position":
        work.positions[1, 2] = value
    else:
        work.counts[1] = value
    for call in ALL[:2] if name == "label" else ALL:
        with pytest.raises(ValueError, match=f"a {name} is out of range"):
            call(calls_of(model), work)
    assert not work.losses.any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(20, 1, 8, 7).double()}, "samples are"),
        ({"x": torch.zeros(20, 1, 8, 8)}, "samples are torch.float32"),
        ({"x": torch.zeros(20, 1, 8, 16).double()[..., ::2]}, "x must be .* not contiguous"),
        (
            {"y": torch.zeros(19, dtype=torch.int64)},
            r"y must be .* \(20,\) on the CPU, not torch.int64 \(19,\)",
        ),
        ({"positions": np.zeros((2, 5), np.int32)}, "positions must be contiguous, of .*int64"),
        ({"positions": np.zeros((2, 10), np.int64)[:, ::2]}, "positions must be .* not contiguous"),
        ({"positions": np.zeros(10, np.int64)}, r"positions must be \[steps, width\]"),
        (
            {"positions": np.zeros((3, 5), np.int64)},
            r"counts must be .* \(3,\) on the CPU, not int64 \(2,\)",
        ),
        ({"losses": np.zeros((2, 5), np.float32)}, "losses must be contiguous, of float64"),
        ({"keys": np.zeros(1, np.int64)}, r"keys must be .* \(2,\) on the CPU, not int64 \(1,\)"),
    ],
)
@pytest.mark.parametrize("call", ALL)
def test_arrays_of_another_shape_or_type_are_rejected(
    call: Callable[[ChainCalls, SampleBatches], None], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call(calls_of(), replace(batches(), **changes))


def test_results_of_another_shape_or_type_are_rejected() -> None:
    calls = calls_of()
    results = {**zeros(calls), "1.weight": torch.zeros(64, 20).double().T}
    message = "1.weight must be .* not contiguous"
    with pytest.raises(ValueError, match=message):
        calls.train(batches(), SgdRule(0.1, momentum=0.9), zeros(calls), results)
    with pytest.raises(ValueError, match=message):
        calls.gradient(batches(), results)
    with pytest.raises(ValueError, match=r"result must be .* \(8, 3\)"):
        calls.outputs(batches(), torch.zeros(7, 3).double())


@pytest.mark.parametrize("call", [train, gradient])
def test_labels_are_required(call: Callable[[ChainCalls, SampleBatches], None]) -> None:
    with pytest.raises(ValueError, match="needs labels"):
        call(calls_of(), replace(batches(), y=None))


def test_dropout_keys_are_required() -> None:
    with pytest.raises(ValueError, match="keys where the model has dropout"):
        train(calls_of(), replace(batches(), keys=None))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_training_returns_whether_its_change_is_finite(bad: float) -> None:
    calls, work, rule = calls_of(), batches(), SgdRule(0.1, 0.01)
    delta = zeros(calls)
    assert calls.train(work, rule, delta, None)
    work.x[work.positions[0, 0]] = bad
    assert not calls.train(work, rule, delta, None)
    assert not all(bool(change.isfinite().all()) for change in delta.values())


def test_losses_of_logits_have_the_bits_of_losses_of_gradients() -> None:
    calls, labels = calls_of("linear"), torch.arange(150) % CLASSES
    x, positions = 9 * torch.randn(150, 1, 8, 8).double(), np.arange(150)[None]
    work = SampleBatches(x, labels, positions, np.array([150]), np.zeros((1, 150)))
    logits = torch.zeros(150, CLASSES).double()
    calls.outputs(work, logits)
    gradient(calls, work)
    losses = cross_entropies(logits, labels)
    assert torch.equal(losses, torch.from_numpy(work.losses[0]))
    torch.testing.assert_close(
        losses, nn.functional.cross_entropy(logits, labels, reduction="none")
    )


def test_losses_of_logits_that_are_not_finite() -> None:
    """A loss is nan if a logit is nan, or if the largest is infinite."""
    logits = torch.tensor([[0.0, math.nan], [math.inf, 0], [0, -math.inf]])
    losses = cross_entropies(logits, torch.tensor([0, 1, 0]))
    np.testing.assert_array_equal(losses, [math.nan, math.nan, 0])


def test_losses_of_labels_out_of_range_are_rejected() -> None:
    with pytest.raises(ValueError, match="a label is out of range"):
        cross_entropies(torch.zeros(8, 7), torch.arange(8))


def test_hits_are_those_of_argmax() -> None:
    """The first of equal logits counts, and nan is the highest."""
    nan, inf = math.nan, math.inf
    special = [[0, 2, 1], [3, 3, 1], [1, 3, 3], [0, nan, 9], [nan, 1, nan], [-inf, -inf, -inf]]
    logits = torch.cat([torch.tensor(special), torch.randn(500, 3)])
    for label in range(3):
        labels = torch.full((len(logits),), label)
        assert torch.equal(hits(logits, labels), logits.argmax(1) == labels)
