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
from fedsim.selectors.fedgs import shortest_paths
from fedsim.selectors.refl import REFL
from tests.checkpoint_toys import through_a_file
from tests.test_selector_contract import UNEQUAL, build, results
from tests.toys import (
    ToyEngine,
    picked,
    selection_of,
    shipped,
    toy_components,
    toy_params,
    toy_population,
)


def over_rounds(
    selector: Selector, availability: list[float], num_rounds: int
) -> tuple[np.ndarray, list[Selection]]:
    """Return who was available [num_rounds, N] and what was selected in each round.

    Client k is available in a share `availability[k]` of the rounds.
    """
    random = np.random.default_rng(1)
    present = random.random((num_rounds, len(availability))) < availability
    present[:, 0] |= ~present.any(1)
    selections = []
    for t, is_present in enumerate(present, 1):
        ids = np.flatnonzero(is_present).tolist()
        selections.append(selection_of(selector, t, seed=t, available=ids))
    return present, selections


# --- F3AST


def f3ast(k: int = 1, beta: float | None = 0.5) -> F3AST:
    """Return F3AST for three clients with p = 1/4, 1/4, 1/2."""
    return F3AST(toy_population([1, 1, 2], k), beta=beta)


def test_three_rounds_of_f3ast_by_hand() -> None:
    """Rates start with K p. A round halves them and adds 1/2 to the selected ones. A weight is p
    divided by the new rate."""
    selector = f3ast()
    first = selection_of(selector, 1, available=[2])
    np.testing.assert_allclose(selector.rates, [1 / 8, 1 / 8, 1 / 4 + 1 / 2])
    np.testing.assert_allclose(first.weights, [1 / 2 / (3 / 4)])
    # after two rounds without anybody p / r is 8 x 2 and 8 x 2/3
    second = selection_of(selector, 4, available=[1, 2])
    assert second.ids.tolist() == [1]
    np.testing.assert_allclose(selector.rates, [1 / 64, 1 / 64 + 1 / 2, 3 / 32])
    np.testing.assert_allclose(second.weights, [1 / 4 / (33 / 64)])
    # p / r is 16/33 and 16/3
    assert picked(selector, 5, available=[1, 2]) == [2]


def test_f3ast_breaks_ties_at_random() -> None:
    """In the first round all p / r are 1."""
    assert {picked(f3ast(), seed=seed)[0] for seed in range(20)} == {0, 1, 2}


def test_rounding_errors_break_no_ties_of_f3ast() -> None:
    """In the first round each of 30 clients of different sizes is among the six selected ones with
    probability 1/5. In the second one, the others are still equal."""
    sizes = np.random.default_rng(0).integers(20, 200, 30).tolist()
    in_first: set[int] = set()
    in_second: set[int] = set()
    for seed in range(100):
        selector = F3AST(toy_population(sizes, 6), beta=None)
        in_first.update(picked(selector, 1, seed=seed))
        in_second.update(picked(selector, 2, seed=seed))
    assert in_first == in_second == set(range(30))


@pytest.mark.parametrize(
    ("k", "rates"), [(1, [0.25, 0.25, 0.5]), (2, [0.5, 0.5, 1]), (3, [0.75, 0.75, 1])]
)
def test_rates_start_at_k_p_and_at_most_at_1(k: int, rates: list[float]) -> None:
    assert f3ast(k).rates.tolist() == rates


def test_beta_is_a_hundredth_of_k_over_n_by_default() -> None:
    assert f3ast(2, beta=None).round_weight == 0.01 * 2 / 3


def test_f3ast_tends_to_the_rates_that_availability_allows_with_unbiased_weights() -> None:
    """Client 5 is there in a tenth of the rounds and has a quarter of the data: it is selected
    whenever it is there, and its weights make up for its absence."""
    selector = F3AST(toy_population([2, 2, 2, 2, 1, 3], 2), beta=0.004)
    present, selections = over_rounds(selector, [0.9, 0.9, 0.9, 0.9, 0.2, 0.1], 5000)
    weights, counts = np.zeros(6), np.zeros(6)
    for selection in selections[1500:]:
        weights[selection.ids] += selection.weights
        counts[selection.ids] += 1
    assert counts[5] == present[1500:, 5].sum()
    np.testing.assert_allclose(selector.rates, counts / 3500, atol=0.04)
    np.testing.assert_allclose(weights / 3500, selector.population.shares, rtol=0.08)
    assert weights[5] / 3500 > 1.5 * counts[5] / counts.sum()  # its weight in a plain average


@pytest.mark.parametrize(
    ("beta", "of_all", "of_the_smallest"), [(None, 1.0, 1.0), (0.01, 0.92, 0.69)]
)
def test_weights_of_f3ast_are_unbiased_where_beta_is_much_smaller_than_the_rate_of_selection(
    beta: float | None, of_all: float, of_the_smallest: float
) -> None:
    """N = 100, K = 5: E[weight] / p is 1 - beta N / (2 K) over all clients, and less for clients
    that are seldom selected."""
    sizes = np.maximum(1, 50 * np.exp(np.random.default_rng(0).standard_normal(100))).astype(int)
    selector = F3AST(toy_population(sizes.tolist(), 5), beta=beta)
    total = np.zeros(100)
    for round in range(1, 3001):
        selection = selection_of(selector, round, seed=round)
        if round > 1000:
            total[selection.ids] += selection.weights
    mean = total / 2000
    assert mean.sum() == pytest.approx(of_all, abs=0.01)
    smallest = np.argsort(sizes)[:20]
    ratios = mean[smallest] / selector.population.shares[smallest]
    assert ratios.mean() == pytest.approx(of_the_smallest, abs=0.04)


# --- REFL


def test_refl_by_hand() -> None:
    """A prediction is the share of a client's rounds after which it was there again."""
    selector = REFL(toy_population([1, 1, 1], 1), hold_off=0)
    for t, available in enumerate([[0, 1, 2], [0, 1], [0, 2]], 1):
        picked(selector, t, available=available)
    assert picked(selector, 4, available=[0, 1]) == [1]
    assert selector.predictions().tolist() == [3 / 3, 1 / 2, 0]
    assert picked(selector, 5) == [2]
    assert selector.predictions().tolist() == [4 / 4, 2 / 3, 0]
    picked(selector, 7)  # nobody was there in round 6
    assert selector.predictions().tolist() == [4 / 5, 2 / 4, 0]


def test_refl_prefers_clients_that_are_seldom_available() -> None:
    selector = REFL(toy_population([1] * 5, 1), hold_off=0)
    present, selections = over_rounds(selector, [0.95, 0.75, 0.55, 0.35, 0.1], 1500)
    counts = np.bincount([selection.ids[0] for selection in selections[300:]], minlength=5)
    rates = counts / present[300:].sum(0)
    assert (np.diff(rates) > 0).all()
    assert rates[0] < 0.1
    assert rates[4] > 0.9


@pytest.mark.parametrize(("hold_off", "seed"), [(4, 0), *((2, seed) for seed in range(5))])
def test_refl_holds_off_and_releases_the_clients_selected_first(hold_off: int, seed: int) -> None:
    """Three cohorts of two of six clients, and the same again. Then a client of the fourth round
    comes before one of the sixth."""
    selector = REFL(toy_population([1] * 6, 2), hold_off=hold_off)
    cohorts = [picked(selector, t, seed + t) for t in range(1, 7)]
    assert sorted(sum(cohorts[:3], [])) == list(range(6))
    assert cohorts[3:] == cohorts[:3]
    assert cohorts[3][0] in picked(selector, 7, available=[cohorts[3][0], *cohorts[5]])


# --- FedGS

COUNTS = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 0], [0, 0, 1]])
"""Label counts of four clients: 1 shares labels with 0 and 2, and 3 with nobody."""


def test_paths_of_the_graph_by_hand() -> None:
    """Cosines 0 and 1 / sqrt(2), scaled to 0 and 1. Edges of equal length lead from 0 to 1 and from
    1 to 2, no path leads to 3."""
    expected = [[0, 0.5, 1, 1], [0.5, 0, 0.5, 1], [1, 0.5, 0, 1], [1, 1, 1, 0]]
    np.testing.assert_allclose(shortest_paths(COUNTS, 0.1, 1.0), expected, rtol=1e-14)


def test_lengths_of_edges_by_hand() -> None:
    """Cosines 0.6, 0.32 and 0.95, scaled to 0.45, 0 and 1. The longest path leads from 0 over 1 to
    2."""
    counts = np.array([[3, 1], [1, 3], [0, 1]])
    scaled = np.array([(0.6 - 0.1**0.5) / (0.9**0.5 - 0.1**0.5), 1])
    edges = np.exp(-(scaled**2) / 0.5)
    distances = shortest_paths(counts, 0.1, 0.5)
    np.testing.assert_allclose(distances[2], [1, edges[1] / edges.sum(), 0])


def test_graphs_of_one_client_or_of_equal_ones() -> None:
    assert shortest_paths(COUNTS[:1], 0.1, 1.0).tolist() == [[0]]
    assert shortest_paths(COUNTS[[0, 0]], 0.1, 1.0).tolist() == [[0, 1], [1, 0]]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("alpha", [0.0, 0.3, 5.0])
def test_fedgs_maximises_distances_minus_the_variance_of_counts(alpha: float, seed: int) -> None:
    """Compared with all cohorts of three of the six available clients."""
    random = np.random.default_rng(seed)
    available = [0, 1, 3, 4, 5, 6]
    population = toy_population([1] * 7, 3)
    selector = shipped("fedgs", population, alpha=alpha, sigma2=0.5, search="exact")
    selector.counts = random.integers(0, 9, (7, 4)) + 1
    pulls = random.integers(0, 5, 7)
    selector.pulls = pulls.copy()
    distances = shortest_paths(selector.counts, 0.1, 0.5)

    def value(ids: Any) -> float:
        pairs = [distances[pair] for pair in itertools.combinations(ids, 2)]
        variance = np.var(pulls + np.isin(range(7), ids), ddof=1)
        return alpha * float(np.mean(pairs)) - float(variance)

    best = max(value(ids) for ids in itertools.combinations(available, 3))
    assert value(picked(selector, available=available)) == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize(("cohort_size", "alpha"), [(3, 0.0), (1, 1.0)])
def test_fedgs_without_distances_or_with_one_client_balances_counts(
    cohort_size: int, alpha: float
) -> None:
    selector = shipped("fedgs", toy_population(UNEQUAL, cohort_size), alpha=alpha)
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

    first, second = run(), run()
    for _ in range(5):
        first.step()
    parts = first.components
    second.load_state_dict(through_a_file(first.state_dict(), parts.selector, parts.aggregator))
    assert results(second) == results(run())[5:]
