"""Calls of the compiled library: what is out of range or has the wrong shape is an exception, never
an access."""

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
        *(
            nn.Conv2d(1, 5, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(5, 18, 3),
            nn.ReLU(),
        ),
        *(nn.Flatten(), nn.Linear(72, 7), nn.ReLU(), nn.Linear(7, 3)),
    ),
}


class Calls:
    """A model's calls, and arguments for them that are valid."""

    def __init__(
        self, name: str = "linear", counts: tuple[int, ...] = (WIDTH, 3), width: int = WIDTH
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        rng = np.random.default_rng(0)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model = MODELS[name]().double()
        chain = find_chain(model)
        assert chain is not None
        params = {key: value.detach() for key, value in model.named_parameters()}
        self.calls = ChainCalls(chain, params, (1, 8, 8))
        self.work = SampleBatches(
            x=torch.randn(NUM_SAMPLES, 1, 8, 8, generator=generator, dtype=torch.float64),
            y=torch.randint(CLASSES, (NUM_SAMPLES,), generator=generator),
            positions=rng.permuted(np.tile(np.arange(NUM_SAMPLES), (len(counts), 1)), axis=1)[
                :, :width
            ].copy(),
            counts=np.array(counts),
            losses=np.zeros((len(counts), width)),
            keys=rng.integers(2**62, size=len(counts)),
        )

    def zeros(self) -> Params:
        return {key: torch.zeros_like(value) for key, value in self.calls.params.items()}


def train(calls: Calls, work: SampleBatches) -> list[Any]:
    delta, velocity = calls.zeros(), calls.zeros()
    calls.calls.train(work, SgdRule(0.1, 0.01, 0.9), delta, velocity)
    return [*delta.values(), *velocity.values(), work.losses]


def gradient(calls: Calls, work: SampleBatches) -> list[Any]:
    result = calls.zeros()
    calls.calls.gradient(work, result)
    return [*result.values(), work.losses]


def outputs(calls: Calls, work: SampleBatches) -> list[Any]:
    result = torch.zeros(int(work.counts.sum()), CLASSES, dtype=torch.float64)
    calls.calls.outputs(work, result)
    return [result]


WITH_LABELS = [train, gradient]
ALL = [*WITH_LABELS, outputs]
Call = Callable[[Calls, SampleBatches], list[Any]]
WRONG = [
    *(("y", label) for label in (-1, 3, 2**62, -100)),
    *(("positions", position) for position in (-1, NUM_SAMPLES, 2**62, -(2**62))),
    *(("counts", count) for count in (-1, WIDTH + 1)),
]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("name", "value"), WRONG)
def test_values_out_of_range_are_refused_and_nothing_is_trained(
    name: str, value: int, model: str
) -> None:
    calls = Calls(model)
    work = calls.work
    array: Any = {"y": work.y, "positions": work.positions, "counts": work.counts}[name]
    array[{"y": int(work.positions[1, 2]), "positions": (1, 2), "counts": 1}[name]] = value
    for call in WITH_LABELS if name == "y" else ALL:
        with pytest.raises(
            ValueError, match=f"a {'label' if name == 'y' else name[:-1]} is out of range"
        ):
            call(calls, work)
    assert not work.losses.any()


@pytest.mark.parametrize(
    ("changes", "rule"),
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
def test_arrays_of_other_shapes_or_types_are_refused(changes: dict[str, Any], rule: str) -> None:
    calls = Calls()
    for call in ALL:
        with pytest.raises(ValueError, match=rule):
            call(calls, replace(calls.work, **changes))


def test_results_of_other_shapes_or_types_are_refused() -> None:
    calls = Calls()
    results = {**calls.zeros(), "1.weight": torch.zeros(64, 20).double().T}
    rule = "1.weight must be .* not contiguous"
    with pytest.raises(ValueError, match=rule):
        calls.calls.train(calls.work, SgdRule(0.1, momentum=0.9), calls.zeros(), results)
    with pytest.raises(ValueError, match=rule):
        calls.calls.gradient(calls.work, results)
    with pytest.raises(ValueError, match=r"result must be .* \(8, 3\)"):
        calls.calls.outputs(calls.work, torch.zeros(7, 3).double())


def test_what_a_call_needs_must_be_given() -> None:
    calls = Calls()
    for call in WITH_LABELS:
        with pytest.raises(ValueError, match="needs labels"):
            call(calls, replace(calls.work, y=None))
    with pytest.raises(ValueError, match="keys where the model has dropout"):
        train(calls, replace(calls.work, keys=None))


def test_losses_of_logits() -> None:
    """To the bit those of gradients, and nan where a logit is, or the largest is infinite."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(9, 7))
    chain, x, labels = find_chain(model), 9 * torch.randn(150, 9), torch.randint(7, (150,))
    assert chain is not None
    calls = ChainCalls(chain, dict(model.named_parameters()), (9,))
    work = SampleBatches(
        x, labels, np.arange(150)[None], np.array([150]), np.zeros((1, 150), np.float32)
    )
    logits = torch.zeros(150, 7)
    calls.outputs(work, logits)
    calls.gradient(work, {name: torch.zeros_like(value) for name, value in calls.params.items()})
    found = cross_entropies(logits, labels)
    assert torch.equal(found, torch.from_numpy(work.losses[0]))
    expected = nn.functional.cross_entropy(logits.double(), labels, reduction="none")
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    odd = torch.tensor([[0.0, math.nan], [math.inf, 0], [0, -math.inf]])
    np.testing.assert_array_equal(
        cross_entropies(odd, torch.tensor([0, 1, 0])), [math.nan, math.nan, 0]
    )
    with pytest.raises(ValueError, match="a label is out of range"):
        cross_entropies(logits, torch.arange(150) % 8)


def test_hits_of_logits() -> None:
    """As torch's argmax has them: of equal logits the first counts, and nan is the highest."""
    logits = torch.tensor(
        [
            [0.0, 2, 1],
            [3, 3, 1],
            [1, 3, 3],
            [0, math.nan, 9],
            [math.nan, 1, math.nan],
            [-math.inf] * 3,
        ]
    )
    for label in range(3):
        labels = torch.full((6,), label)
        assert torch.equal(hits(logits, labels), logits.argmax(1) == labels)
    many, labels = torch.randn(500, 10), torch.randint(10, (500,))
    assert torch.equal(hits(many, labels), many.argmax(1) == labels)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_training_says_whether_its_change_is_finite(bad: float) -> None:
    calls = Calls()
    rule, results = SgdRule(0.1, 0.01), calls.zeros()
    assert calls.calls.train(calls.work, rule, results, None)
    calls.work.x[calls.work.positions[0, 0]] = bad
    assert not calls.calls.train(calls.work, rule, results, None)
    assert not all(bool(change.isfinite().all()) for change in results.values())
