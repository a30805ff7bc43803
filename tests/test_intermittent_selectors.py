"""F3AST, REFL and FedGS, which are made for clients that come and go."""

import itertools
from typing import Any

import numpy as np
import pytest

from fedsim.core.types import Selection
from fedsim.rounds.availability import Intermittent
from fedsim.rounds.loop import Simulation
from fedsim.selectors.base import Selector
from fedsim.selectors.f3ast import F3AST
from fedsim.selectors.fedgs import FedGS, shortest_paths
from fedsim.selectors.refl import REFL
from tests.checkpoint_toys import through_a_file
from tests.test_selector_contract import UNEQUAL, build, results
from tests.toys import ToyEngine, picked, selection_of, toy_components, toy_params, toy_population


def over_rounds(
    selector: Selector, shares: list[float], num: int
) -> tuple[np.ndarray, list[Selection]]:
    """Who was available, [num, N], each client in its share of all rounds, and what was
    selected."""
    present = np.random.default_rng(1).random((num, len(shares))) < shares
    present[:, 0] |= ~present.any(1)
    available = [np.flatnonzero(mask).tolist() for mask in present]
    return present, [
        selection_of(selector, t, seed=t, available=ids) for t, ids in enumerate(available, 1)
    ]


def test_f3ast_by_hand() -> None:
    """p = 1/4, 1/4, 1/2, at which rates start with K = 1."""
    selector = F3AST(toy_population([1, 1, 2], 1), beta=0.5)
    first = selection_of(selector, 1, available=[2])
    np.testing.assert_allclose(selector.rates, [1 / 8, 1 / 8, 1 / 4 + 1 / 2])
    np.testing.assert_allclose(first.weights, [1 / 2 / (3 / 4)])
    second = selection_of(
        selector, 4, available=[1, 2]
    )  # after two rounds without anybody: p / r = 2 and 2/3, times 8
    assert second.ids.tolist() == [1]
    np.testing.assert_allclose(selector.rates, [1 / 64, 1 / 64 + 1 / 2, 3 / 32])
    np.testing.assert_allclose(second.weights, [1 / 4 / (33 / 64)])
    assert picked(selector, 5, available=[1, 2]) == [2]  # p / r = 16/33 and 16/3
    ties = [
        picked(F3AST(toy_population([1, 1, 2], 1), beta=0.5), seed=seed)[0] for seed in range(20)
    ]
    assert set(ties) == {0, 1, 2}  # all p / r are 1
    assert F3AST(toy_population([1, 1, 2], 2), beta=None).step == 0.01 * 2 / 3
    assert F3AST(toy_population([1, 1, 2], 2), beta=0.5).rates.tolist() == [0.5, 0.5, 1]
    assert F3AST(toy_population([1, 1, 2], 3), beta=0.5).rates.tolist() == [0.75, 0.75, 1]


def test_f3ast_tends_to_the_rates_that_availability_allows_and_its_weights_are_unbiased() -> None:
    shares = [0.9, 0.9, 0.9, 0.9, 0.2, 0.1]
    selector = F3AST(toy_population([2, 2, 2, 2, 1, 3], 2), beta=0.004)
    present, selections = over_rounds(selector, shares, 5000)
    total, counts = np.zeros(6), np.zeros(6)
    for selection in selections[1500:]:
        total[selection.ids] += selection.weights
        counts[selection.ids] += 1
    assert counts[5] == present[1500:, 5].sum()  # it is selected whenever it can be
    np.testing.assert_allclose(selector.rates, counts / 3500, atol=0.04)
    np.testing.assert_allclose(total / 3500, selector.population.shares, rtol=0.08)
    assert total[5] / 3500 > 1.5 * counts[5] / counts.sum()  # as plain averages would not be


@pytest.mark.parametrize(
    ("beta", "of_all", "of_the_smallest"), [(None, 1.0, 1.0), (0.01, 0.92, 0.69)]
)
def test_weights_of_f3ast_are_unbiased_where_beta_is_much_smaller_than_the_rate_of_selection(
    beta: float | None, of_all: float, of_the_smallest: float
) -> None:
    """N = 100, K = 5: E[weight] / p is 1 - beta N / (2 K) over all clients, and less for those
    seldom selected."""
    sizes = np.maximum(1, 50 * np.exp(np.random.default_rng(0).standard_normal(100))).astype(int)
    selector, total = F3AST(toy_population(sizes.tolist(), 5), beta=beta), np.zeros(100)
    for round in range(1, 3001):
        selection = selection_of(selector, round, seed=round)
        total[selection.ids] += selection.weights if round > 1000 else 0.0
    mean, smallest = total / 2000, np.argsort(sizes)[:20]
    assert mean.sum() == pytest.approx(of_all, abs=0.01)
    ratio = float((mean / selector.population.shares)[smallest].mean())
    assert ratio == pytest.approx(of_the_smallest, abs=0.04)


def test_refl_by_hand() -> None:
    selector = REFL(toy_population([1, 1, 1], 1), hold_off=0)
    for t, available in enumerate([[0, 1, 2], [0, 1], [0, 2]], 1):
        picked(selector, t, available=available)
    assert picked(selector, 4, available=[0, 1]) == [
        1
    ]  # 0 was followed by itself 3 times of 3, 1 once of 2
    assert picked(selector, 5) == [2]  # never of 2
    assert selector.predictions().tolist() == [1, 2 / 3, 0]
    picked(selector, 7)  # after a round without anybody
    assert selector.predictions().tolist() == [4 / 5, 2 / 4, 0]


def test_refl_takes_the_least_available_first() -> None:
    present, selections = over_rounds(
        REFL(toy_population([1] * 5, 1), hold_off=0), [0.95, 0.75, 0.55, 0.35, 0.1], 1500
    )
    counts = np.bincount([selection.ids[0] for selection in selections[300:]], minlength=5)
    chances = counts / present[300:].sum(0)
    assert (np.diff(chances) > 0).all()
    assert chances[0] < 0.1
    assert chances[4] > 0.9


@pytest.mark.parametrize(("hold_off", "seed"), [(4, 0), *((2, seed) for seed in range(5))])
def test_refl_holds_off_and_releases_whom_it_selected_first(hold_off: int, seed: int) -> None:
    selector = REFL(toy_population([1] * 6, 2), hold_off=hold_off)
    rounds = [picked(selector, t, seed + t) for t in range(1, 7)]
    assert sorted(sum(rounds[:3], [])) == list(range(6))
    assert rounds[3:] == rounds[:3]
    assert picked(selector, 7, available=[rounds[3][0], *rounds[5]]) != rounds[5]


COUNTS = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 0], [0, 0, 1]])


def test_paths_of_the_graph_by_hand() -> None:
    """Cosines 0 and 1 / sqrt(2), scaled to 0 and 1; edges of length e^-1 between 0, 1 and 2, no
    path to 3."""
    expected = [[0, 0.5, 1, 1], [0.5, 0, 0.5, 1], [1, 0.5, 0, 1], [1, 1, 1, 0]]
    np.testing.assert_allclose(shortest_paths(COUNTS, 0.1, 1.0), expected, rtol=1e-14)
    assert shortest_paths(COUNTS[:1], 0.1, 1.0).tolist() == [[0]]
    assert shortest_paths(COUNTS[[0, 0]], 0.1, 1.0).tolist() == [[0, 1], [1, 0]]
    similar = np.array([[3, 1], [1, 3], [0, 1]])  # cosines .6, .32, .95: scaled .45, 0, 1
    edges = np.exp(-(np.array([(0.6 - 0.1**0.5) / (0.9**0.5 - 0.1**0.5), 1]) ** 2) / 0.5)
    np.testing.assert_allclose(shortest_paths(similar, 0.1, 0.5)[2], [1, edges[1] / edges.sum(), 0])


@pytest.mark.parametrize("alpha", [0.0, 0.3, 5.0])
def test_fedgs_maximises_distances_minus_the_variance_of_counts(alpha: float) -> None:
    rng = np.random.default_rng(0)
    for _ in range(10):
        values: dict[str, Any] = {
            "alpha": alpha,
            "epsilon": 0.1,
            "sigma2": 0.5,
            "search": "exact",
            "swap_passes": 0,
        }
        selector = FedGS(toy_population([1] * 7, 3), **values)
        selector.counts, selector.pulls = rng.integers(0, 9, (7, 4)) + 1, rng.integers(0, 5, 7)
        distances, pulls = shortest_paths(selector.counts, 0.1, 0.5), selector.pulls.copy()

        def value(
            ids: tuple[int, ...], distances: np.ndarray = distances, pulls: np.ndarray = pulls
        ) -> float:
            pairs = [distances[pair] for pair in itertools.combinations(ids, 2)]
            return alpha * float(np.mean(pairs)) - float(
                np.var(pulls + np.isin(range(7), ids), ddof=1)
            )

        best = max(value(ids) for ids in itertools.combinations([0, 1, 3, 4, 5, 6], 3))
        assert value(tuple(picked(selector, available=[0, 1, 3, 4, 5, 6]))) == pytest.approx(
            best, abs=1e-12
        )


def test_fedgs_without_distances_and_with_one_client_balances_counts() -> None:
    for choice, cohort_size, alpha in (("fedgs", 3, 0.0), ("fedgs", 1, 1.0)):
        selector: Any = build(choice, toy_population(UNEQUAL, cohort_size))
        selector.alpha = alpha
        for t in range(1, 16):
            picked(selector, t, seed=t)
        assert np.ptp(selector.pulls) <= 1


@pytest.mark.parametrize("choice", ["linucb", "fedgs", "refl", "fl_dp3s", "f3ast"])
def test_a_run_with_clients_that_come_and_go_continues_from_its_state(choice: str) -> None:
    def run() -> Simulation:
        population = toy_population(UNEQUAL, 3, 12)
        parts = toy_components(
            ToyEngine(UNEQUAL),
            population,
            build(choice, population),
            availability=Intermittent(absent=0.3),
        )
        return Simulation(parts, toy_params())

    whole, first, second = results(run()), run(), run()
    for _ in range(5):
        first.step()
    second.load_state_dict(
        through_a_file(first.state_dict(), first.components.selector, first.components.aggregator)
    )
    assert results(second) == whole[5:]
