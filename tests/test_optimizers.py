"""Stacked optimisers equal torch.optim's, row by row; learning-rate schedules over rounds."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedsim.core.errors import ConfigError
from fedsim.engine.optimizers import (
    SGD,
    Adam,
    Constant,
    Cosine,
    Exponential,
    LearningRateSchedule,
    LocalOptimizer,
    Step,
)


def sgd(**values: Any) -> SGD:
    plain = {
        "lr": 0.1,
        "momentum": 0.0,
        "nesterov": False,
        "weight_decay": 0.0,
        "schedule": Constant(),
    }
    return SGD(**(plain | values))


def adam(**values: Any) -> Adam:
    plain = {
        "lr": 0.1,
        "beta1": 0.9,
        "beta2": 0.99,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "decoupled": False,
    }
    return Adam(**(plain | {"schedule": Constant()} | values))


OPTIMIZERS: dict[str, LocalOptimizer] = {
    "sgd": sgd(),
    "decay": sgd(weight_decay=0.3),
    "momentum": sgd(momentum=0.9),
    "momentum and decay": sgd(momentum=0.9, weight_decay=0.3),
    "nesterov": sgd(momentum=0.9, nesterov=True, weight_decay=0.3),
    "adam": adam(),
    "adam with decay": adam(weight_decay=0.3),
    "adam with large eps": adam(eps=0.5),
    "adamw": adam(weight_decay=0.3, decoupled=True),
}


def gradients(row: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * row + step)
    shapes = {"matrix": (3, 2), "vector": (4,)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def by_torch(optimizer: LocalOptimizer, row: int, steps: int) -> dict[str, Tensor]:
    params = {name: nn.Parameter(value) for name, value in gradients(row, 99).items()}
    theirs = optimizer.torch_optimizer(list(params.values()), optimizer.lr)
    for step in range(steps):
        for name, gradient in gradients(row, step).items():
            params[name].grad = gradient
        theirs.step()
    return {name: p.detach() for name, p in params.items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_row_is_what_torch_makes_of_it_also_after_others_have_finished(name: str) -> None:
    optimizer, steps = OPTIMIZERS[name], [6, 4, 4, 1]
    starts = [gradients(row, 99) for row in range(4)]
    stack = {key: torch.stack([s[key] for s in starts]) for key in starts[0]}
    state = optimizer.init(stack)
    for step in range(max(steps)):
        live = sum(s > step for s in steps)
        each = [gradients(row, step) for row in range(live)]
        grads = {key: torch.stack([g[key] for g in each]) for key in stack}
        optimizer.step(
            {key: value[:live] for key, value in stack.items()}, grads, state, optimizer.lr
        )
    for row, count in enumerate(steps):
        for key, expected in by_torch(optimizer, row, count).items():
            torch.testing.assert_close(stack[key][row], expected, rtol=1e-12, atol=1e-13)


def one_weight(optimizer: LocalOptimizer, *slopes: float) -> float:
    stack = {"w": torch.ones(1, 1, dtype=torch.float64)}
    state = optimizer.init(stack)
    for slope in slopes:
        optimizer.step(
            stack, {"w": torch.full((1, 1), slope, dtype=torch.float64)}, state, optimizer.lr
        )
    return float(stack["w"])


def test_steps_by_hand() -> None:
    assert one_weight(sgd(), 2.0, 1.0) == pytest.approx(1 - 0.2 - 0.1)
    assert one_weight(sgd(weight_decay=0.5), 2.0) == pytest.approx(1 - 0.1 * 2.5)
    assert one_weight(sgd(momentum=0.5), 2.0, 1.0) == pytest.approx(1 - 0.2 - 0.1 * (0.5 * 2 + 1))
    assert one_weight(sgd(momentum=0.5, nesterov=True), 2.0) == pytest.approx(
        1 - 0.1 * (2 + 0.5 * 2)
    )
    assert one_weight(adam(), 1e-3) == pytest.approx(
        0.9, abs=1e-5
    )  # the learning rate, whatever the slope
    assert one_weight(adam(), -50.0) == pytest.approx(1.1, abs=1e-5)
    assert one_weight(adam(), 3.0, 1.0) == one_weight(adam(), 3.0, 1.0)


@pytest.mark.parametrize(
    ("build", "values", "messages"),
    [
        (
            sgd,
            {"lr": 0.0, "momentum": 1.0},
            ["lr=0.0: must be > 0", "momentum=1.0: must lie in [0, 1)"],
        ),
        (sgd, {"lr": float("nan")}, ["lr=nan: must be finite and > 0"]),
        (sgd, {"nesterov": True}, ["nesterov=True: needs momentum > 0", "optimizer.momentum=0.9"]),
        (sgd, {"weight_decay": -1.0}, ["weight_decay=-1.0: must be >= 0"]),
        (
            adam,
            {"beta1": -0.1, "beta2": 1.0},
            ["beta1=-0.1: must lie in [0, 1)", "beta2=1.0: must lie in [0, 1)"],
        ),
        (adam, {"eps": 0.0, "lr": -1.0}, ["eps=0.0: must be > 0", "lr=-1.0: must be > 0"]),
        *(
            (Step, {"milestones": m, "factor": 0.5}, ["must be ascending rounds >= 1"])
            for m in ([0], [5, 3], [3, 3])
        ),
        (Step, {"milestones": [], "factor": 0.0}, ["factor="]),
        (Exponential, {"gamma": -1.0}, ["gamma="]),
        (Cosine, {"final": float("inf")}, ["final="]),
    ],
)
def test_values_out_of_range_are_told_together(
    build: Any, values: dict[str, Any], messages: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        build(**values)
    assert all(message in str(caught.value) for message in messages)


# --- schedules -------------------------------------------------------------------------------------------------------


def factors(schedule: LearningRateSchedule, num_rounds: int) -> list[float]:
    return [schedule.factor(t, num_rounds) for t in range(1, num_rounds + 1)]


def test_factors_by_hand() -> None:
    """A step takes effect in the round after its milestone."""
    assert factors(Constant(), 4) == [1, 1, 1, 1]
    assert factors(Step(milestones=[3, 5], factor=0.5), 7) == [1, 1, 1, 0.5, 0.5, 0.25, 0.25]
    assert factors(Step(milestones=[1], factor=0.1), 2) == [1, 0.1]
    assert factors(Step(milestones=[], factor=0.1), 2) == [1, 1]
    assert factors(Exponential(gamma=0.5), 4) == [1, 0.5, 0.25, 0.125]
    cosine = [1, 0.6 + 0.4 * math.sqrt(0.5), 0.6, 0.6 - 0.4 * math.sqrt(0.5), 0.2]
    assert factors(Cosine(final=0.2), 5) == pytest.approx(cosine)
    assert factors(Cosine(final=0.2), 1) == [1]
    assert all(
        later <= earlier + 1e-12 for earlier, later in pairwise(factors(Cosine(final=0.01), 60))
    )
    halved = sgd(lr=0.4, schedule=Step(milestones=[1], factor=0.5))
    assert [halved.lr_at(t, 3) for t in (1, 2, 3)] == [0.4, 0.2, 0.2]
