"""K-Vib: a round by hand, probabilities by scipy, and no bias over all cohorts."""

import itertools
from typing import Any

import numpy as np
import pytest
import scipy.optimize

from fedsim.selectors.kvib import KVib
from tests.toys import toy_clients, toy_cohort, toy_population


class Included:
    """A generator by which the clients at `positions` are included, and no others."""

    def __init__(self, *positions: int) -> None:
        self.positions = positions

    def random(self, count: int) -> np.ndarray:
        numbers = np.full(count, 1 - 1e-12)
        numbers[list(self.positions)] = 0.0
        return numbers


def kvib(sizes: list[int], cohort_size: int, **more: Any) -> KVib:
    """Return the selector with theta = 1/2 and gamma = 1 for four clients, K = 2."""
    return KVib(toy_population(sizes, cohort_size, 16), **{"reg": 0.25} | more)


def weights_of(selector: KVib, *included: int) -> np.ndarray:
    sizes = selector.population.sizes.tolist()
    selection = selector.select(1, toy_clients(sizes, selector.needs), Included(*included))  # type: ignore[arg-type]
    assert selection.ids.tolist() == list(included)
    assert selection.weights is not None
    return np.asarray(selection.weights)


def test_kvib_by_hand() -> None:
    """theta = (4 / (16 * 2))^(1/3) = 1/2, gamma = 0.25 * 4 / (1/2 * 2) = 1. At first all q are 1/2.
    Client 0 has an update of length 8, so omega_0 = (8 / 4)^2 / (1/2) = 8. After that a = (3, 1, 1,
    1), P = (1, 1/3, 1/3, 1/3) and q = (3/4, 5/12, 5/12, 5/12)."""
    selector = kvib([1] * 4, 2)
    assert (selector.theta, selector.gamma) == (pytest.approx(0.5), pytest.approx(1.0))
    assert weights_of(selector, 0) == pytest.approx(np.array([0.25 / 0.5]))
    server: Any = None
    selector.observe(1, toy_cohort([0], [1], [[8.0]]), server)
    assert selector.feedback == pytest.approx(np.array([8.0, 0, 0, 0]))
    q = np.array([3 / 4, 5 / 12, 5 / 12, 5 / 12])
    assert weights_of(selector, 0, 1, 2, 3) == pytest.approx(0.25 / q)
    assert len(weights_of(selector)) == 0


def test_kvib_minimises_the_estimated_variance() -> None:
    """sum_k (omega_k + gamma) / P_k for probabilities of sum K, by scipy. One of them is 1."""
    selector = kvib([1, 2, 3, 4, 5], 2)
    selector.feedback[:] = [200.0, 3.0, 0.0, 8.0, 1.0]
    objective = selector.feedback + selector.gamma
    best = scipy.optimize.minimize(
        lambda p: float((objective / p).sum()),
        np.full(5, 0.4),
        bounds=[(1e-6, 1)] * 5,
        constraints={"type": "eq", "fun": lambda p: p.sum() - 2},
        options={"ftol": 1e-14},
    )
    q = selector.population.shares / weights_of(selector, 0, 1, 2, 3, 4)
    probabilities = (q - selector.theta * 2 / 5) / (1 - selector.theta)
    assert probabilities == pytest.approx(best.x, abs=1e-4)
    assert probabilities[0] == pytest.approx(1.0)


def test_kvib_is_unbiased_over_all_cohorts() -> None:
    """The mean of the weights over all 16 cohorts, each with its probability, is p."""
    selector = kvib([1, 2, 3, 4], 2)
    selector.feedback[:] = [9.0, 0.0, 4.0, 1.0]
    p = selector.population.shares
    q = p / weights_of(selector, 0, 1, 2, 3)
    assert q.sum() == pytest.approx(2)
    mean = np.zeros(4)
    for is_included in itertools.product([False, True], repeat=4):
        probability = np.where(is_included, q, 1 - q).prod()
        included = np.flatnonzero(is_included)
        mean[included] += probability * weights_of(selector, *included.tolist())
    assert mean == pytest.approx(p)


def test_kvib_includes_everybody_if_k_clients_are_available() -> None:
    """q = 1, and the weights are the shares among the available clients."""
    selector = kvib([1, 2, 3, 4], 2)
    clients = toy_clients([1, 2, 3, 4], selector.needs, available=[0, 2])
    selection = selector.select(1, clients, np.random.default_rng(0))
    assert selection.ids.tolist() == [0, 2]
    assert selection.weights == pytest.approx(np.array([0.25, 0.75]))


def test_kvib_in_a_short_run_only_draws_with_equal_probabilities() -> None:
    """N / (T K) > 1: theta is 1."""
    selector = KVib(toy_population([1] * 9, 1, 3), reg=0.1)
    selector.feedback[0] = 1e6
    assert weights_of(selector, 0) == pytest.approx(np.array([1 / 9 / (1 / 9)]))
