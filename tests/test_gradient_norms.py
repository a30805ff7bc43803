"""Selection by the norm of a gradient, and of an update."""

from typing import Any, Literal

import numpy as np
import pytest
import torch

from fedsim.selectors.grad_norm import GradNorm
from tests.toys import ToyEngine, toy_clients, toy_population


def test_the_largest_norms_of_what_is_asked_are_taken() -> None:
    """The toy's gradient is (m + 1, -m^2 / 7), m a client's mean position; its update is half of
    (i, -i). Client 0's samples come last here, so that it has the largest gradient and the smallest
    update."""
    engine = ToyEngine([2, 2, 2])
    engine.data.train[0], engine.data.train[2] = engine.data.train[2], engine.data.train[0]  # type: ignore[index]
    for of, expected in (("gradient", [0]), ("update", [2])):
        selector = GradNorm(toy_population([2, 2, 2], 1), of=of)  # type: ignore[arg-type]
        clients = toy_clients([2, 2, 2], selector.needs, engine=engine, cohort_size=1)
        assert selector.select(1, clients, np.random.default_rng(0)).ids.tolist() == expected


def test_the_k_largest_norms_are_those_of_numpy() -> None:
    vectors = (
        np.random.default_rng(0).standard_normal((9, 40))
        * np.random.default_rng(1).permutation(9)[:, None]
    )

    class Drawn(ToyEngine):
        def client_gradients(self, params: Any, positions: Any, names: Any = None) -> Any:
            return (torch.tensor(vectors[self.owner[p[0]]]) for p in positions)

    selector = GradNorm(toy_population([2] * 9, 4), of="gradient")
    clients = toy_clients([2] * 9, selector.needs, engine=Drawn([2] * 9))
    largest = np.argsort(-np.linalg.norm(vectors, axis=1))[:4]
    assert selector.select(1, clients, np.random.default_rng(0)).ids.tolist() == sorted(
        largest.tolist()
    )


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("of", ["gradient", "update"])
def test_a_norm_that_is_not_finite_ranks_last(
    of: Literal["gradient", "update"], value: float
) -> None:
    """That client's update would be dropped in every round, whoever else has something to send."""

    class Broken(ToyEngine):
        def client_gradients(self, *args: Any, **more: Any) -> Any:
            found = super().client_gradients(*args, **more)
            return (g * factor for g, factor in zip(found, (1, value, 1), strict=True))

        def train(self, *args: Any, **more: Any) -> Any:
            updates = super().train(*args, **more)
            updates.delta["w"][1] = torch.full((2,), value)
            return updates

    selector = GradNorm(toy_population([2, 2, 2], 2), of=of)
    clients = toy_clients([2, 2, 2], selector.needs, engine=Broken([2, 2, 2]), cohort_size=2)
    assert selector.select(1, clients, np.random.default_rng(0)).ids.tolist() == [0, 2]
