"""Selection by the norm of a gradient, and of an update."""

from typing import Any

import numpy as np
import pytest
import torch

from fedsim.selectors.grad_norm import GradNorm
from tests.toys import ToyEngine, picked, toy_population


def selected(of: Any, k: int, engine: ToyEngine, sizes: list[int]) -> list[int]:
    return picked(GradNorm(toy_population(sizes, k), of=of), engine=engine)


@pytest.mark.parametrize(("of", "expected"), [("gradient", [0]), ("update", [2])])
def test_the_largest_norms_of_gradients_or_updates_are_selected(
    of: str, expected: list[int]
) -> None:
    """The toy's gradient is (m + 1, -m^2 / 7), m a client's mean position. Its update is half of
    (i, -i). Client 0's samples come last here, so that it has the largest gradient and the smallest
    update."""
    engine = ToyEngine([2, 2, 2])
    train: Any = engine.data.train
    train[0], train[2] = train[2], train[0]
    assert selected(of, 1, engine, [2, 2, 2]) == expected


def test_the_k_largest_norms_are_those_of_numpy() -> None:
    random = np.random.default_rng(0)
    vectors = random.standard_normal((9, 40)) * random.permutation(9)[:, None]

    class Drawn(ToyEngine):
        def client_gradients(self, params: Any, positions: Any, names: Any = None) -> Any:
            return (torch.tensor(vectors[self.owner[p[0]]]) for p in positions)

    largest = np.argsort(-np.linalg.norm(vectors, axis=1))[:4]
    assert selected("gradient", 4, Drawn([2] * 9), [2] * 9) == sorted(largest.tolist())


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("of", ["gradient", "update"])
def test_a_norm_that_is_not_finite_ranks_last(of: str, value: float) -> None:
    """The update of client 1 would be dropped in every round."""

    class Broken(ToyEngine):
        def client_gradients(self, *args: Any, **named: Any) -> Any:
            gradients = super().client_gradients(*args, **named)
            return (g * factor for g, factor in zip(gradients, (1, value, 1), strict=True))

        def train(self, *args: Any, **named: Any) -> Any:
            updates = super().train(*args, **named)
            updates.delta["w"][1] = torch.full((2,), value)
            return updates

    assert selected(of, 2, Broken([2, 2, 2]), [2, 2, 2]) == [0, 2]
