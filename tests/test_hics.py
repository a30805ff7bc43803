from typing import Any

import numpy as np
import pytest
import torch

from fedsim.cohort import Cohort
from fedsim.errors import FedsimError
from fedsim.selectors.base import softmax
from fedsim.selectors.hics import HiCS, class_slopes, entropy, output_layer
from tests.toys import toy_door, toy_population

SERVER: Any = None


def hics(n: int = 6, k: int = 2, **more: Any) -> HiCS:
    values: dict[str, Any] = {"source": "bias", "temperature": 0.0025, "entropy_weight": 10.0, "gamma": 4.0}
    return HiCS(toy_population([1] * n, k, 100), **(values | more))


def cohort(biases: list[list[float]]) -> Cohort:
    num = len(biases)
    delta = {"hidden.weight": torch.zeros(num, 3, 2), "out.weight": torch.zeros(num, 2, 3)}
    delta["out.weight"][:] = torch.tensor(biases)[:, :, None] * torch.tensor([1.0, 2, 3])
    delta["out.bias"] = torch.tensor(biases)
    ones = np.ones(num)
    start = {name: d[0] * 0 for name, d in delta.items()}
    return Cohort(np.arange(num), ones.astype(np.int64), start, delta, ones, ones, ones.astype(np.int64), list(delta))


def test_entropies_by_hand() -> None:
    assert entropy(softmax(np.zeros(10))) == pytest.approx(np.log(10))
    assert entropy(np.array([1.0, 0.0])) == 0
    selector = hics(2)
    selector.observe(1, cohort([[0.001, 0.001], [0.1, -0.1]]), SERVER)
    assert selector.entropy == pytest.approx([np.log(2), 0], abs=1e-9)


def test_the_output_layer_and_both_sources() -> None:
    both = cohort([[1.0, -1.0]])
    assert output_layer(both) == ["out.weight", "out.bias"]
    assert class_slopes(both, output_layer(both), "bias").tolist() == [[1, -1]]
    assert class_slopes(both, output_layer(both), "weight").tolist() == [[2, -2]]
    with pytest.raises(FedsimError, match=r"selector\.source=bias: the model's output layer has no bias; use weight"):
        class_slopes(both, ["out.weight"], "bias")


def test_everybody_once_then_clusters_of_like_updates() -> None:
    selector = hics(6, 2)
    first = [selector.select(1, toy_door([1] * 6, frozenset()), np.random.default_rng(0)).ids.tolist()]
    assert len(first[0]) == 2
    selector.observe(1, cohort([[1, -1], [1, -1], [1, -1], [0, 0.1], [0, 0.1], [0, 0.1]]), SERVER)
    labels = selector._clusters(np.arange(6))
    assert len(set(labels[:3])) == 1
    assert len(set(labels)) == 2


def test_without_gamma_clusters_are_equally_likely_and_with_it_balanced_ones_come_first() -> None:
    selector = hics(6, 2, gamma=0.0, temperature=0.1)
    selector.observe(1, cohort([[1, -1]] * 5 + [[0.01, 0.01]]), SERVER)
    taken = sum(5 in selector._draw(np.arange(6), 1, 2, np.random.default_rng(s)) for s in range(400)) / 400
    assert taken == pytest.approx(0.5, abs=0.08)
    selector.gamma = 4.0
    preferred = sum(5 in selector._draw(np.arange(6), 1, 2, np.random.default_rng(s)) for s in range(400)) / 400
    odds = np.exp(4 * (1 - 2 / 100) * (np.log(2) - selector.entropy[0]))
    assert preferred == pytest.approx(odds / (1 + odds), abs=0.08)


def test_picks_are_different_clients_even_from_small_clusters() -> None:
    selector = hics(6, 4)
    selector.observe(1, cohort([[1, -1]] * 5 + [[0.01, 0.01]]), SERVER)
    for s in range(30):
        assert len(set(selector._draw(np.arange(6), 4, 1, np.random.default_rng(s)))) == 4
