"""Examples by hand and statistics of the selectors; what all of them must satisfy is in test_selector_contract.py."""

from collections import Counter

import numpy as np
import pytest

from fedsim.clients.clients import Clients
from fedsim.clients.server import Server
from fedsim.core.errors import ConfigError
from fedsim.core.rng import Purpose, Streams
from fedsim.selectors.base import highest, weighted_without_replacement
from fedsim.selectors.full import Full
from fedsim.selectors.power_of_choice import PowerOfChoice
from fedsim.selectors.random import MultinomialRandom, Random
from fedsim.selectors.round_robin import RoundRobin
from tests.toys import ToyEngine, toy_clients, toy_cohort, toy_population


class FixedLosses(ToyEngine):
    """Clients of one sample each whose losses are given."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__([1] * len(losses))
        self.given = np.array(losses)

    def losses(self, params, positions):  # type: ignore[no-untyped-def]
        return np.array([self.given[p[0]] for p in positions])


def rng(t: int, seed: int = 0) -> np.random.Generator:
    return Streams(seed).generator(Purpose.SELECT, t)


def door_on(losses: list[float], selector: PowerOfChoice) -> Clients:
    return toy_clients([1] * len(losses), selector.needs, engine=FixedLosses(losses))


def pow_d(n: int, k: int, d: int | None, estimate: str = "full", **more: object) -> PowerOfChoice:
    return PowerOfChoice(toy_population([1] * n, k), num_candidates=d, estimate=estimate, schedule="constant", **more)  # type: ignore[arg-type]


def test_random_includes_every_client_with_probability_k_over_n() -> None:
    selector = Random(toy_population([1] * 10, 3), mode="uniform")
    clients = toy_clients([1] * 10, frozenset())
    counts = Counter(i for t in range(2000) for i in selector.select(t, clients, rng(t)).ids)
    assert all(abs(counts[i] / 2000 - 0.3) < 4 * np.sqrt(0.3 * 0.7 / 2000) for i in range(10))


@pytest.mark.parametrize(("k", "mean", "low", "high"), [(5, 103, 75, 136), (10, 50, 37, 65)])
def test_random_covers_a_hundred_clients_as_predicted(k: int, mean: int, low: int, high: int) -> None:
    """selectors.md 2.1: 103 rounds on average at K=5 (10-90%: 75-136), 50 at K=10 (37-65)."""
    selector = Random(toy_population([1] * 100, k), mode="uniform")
    clients = toy_clients([1] * 100, frozenset())
    rounds = []
    for seed in range(150):
        seen: set[int] = set()
        t = 0
        while len(seen) < 100:
            t += 1
            seen.update(selector.select(t, clients, rng(t, seed)).ids)
        rounds.append(t)
    assert abs(np.mean(rounds) - mean) < 4 * np.std(rounds) / np.sqrt(150) + 1
    assert np.quantile(rounds, 0.1) == pytest.approx(low, abs=6)
    assert np.quantile(rounds, 0.9) == pytest.approx(high, abs=12)


def test_random_by_size_never_takes_a_client_without_data_and_prefers_large_ones() -> None:
    sizes = [0, 1, 1, 8]
    selector = Random(toy_population(sizes, 1), mode="size")
    clients = toy_clients(sizes, frozenset())
    counts = Counter(int(selector.select(t, clients, rng(t)).ids[0]) for t in range(2000))
    assert counts[0] == 0
    assert abs(counts[3] / 2000 - 0.8) < 4 * np.sqrt(0.8 * 0.2 / 2000)


def test_md_is_unbiased_and_weighs_by_multiplicity() -> None:
    sizes = [1, 2, 3, 4]
    selector = MultinomialRandom(toy_population(sizes, 3))
    clients = toy_clients(sizes, frozenset())
    total = np.zeros(4)
    for t in range(4000):
        selection = selector.select(t, clients, rng(t))
        assert selection.weights is not None
        assert selection.weights.sum() == pytest.approx(1)
        assert np.allclose(selection.weights * 3, np.round(selection.weights * 3))
        total[selection.ids] += selection.weights
    assert np.allclose(total / 4000, [0.1, 0.2, 0.3, 0.4], atol=4 * np.sqrt(0.25 / 3 / 4000))


def test_full_takes_everyone_with_data() -> None:
    assert Full(toy_population([1, 0, 2], 1)).select(1, toy_clients([1, 0, 2], frozenset()), rng(1)).ids.tolist() == [
        0,
        2,
    ]


def test_round_robin_covers_everyone_in_ceil_n_over_k_rounds_and_differs_by_seed() -> None:
    clients = toy_clients([1] * 10, frozenset())
    orders = []
    for seed in (0, 1):
        selector = RoundRobin(toy_population([1] * 10, 3))
        picks = [selector.select(t, clients, rng(t, seed)).ids.tolist() for t in range(1, 11)]
        assert len(set(sum(picks[:4], []))) == 10
        assert Counter(sum(picks, [])) == dict.fromkeys(range(10), 3)
        orders.append(picks)
    assert orders[0] != orders[1]


def test_round_robin_keeps_the_turn_of_an_unavailable_client() -> None:
    selector = RoundRobin(toy_population([1] * 4, 2))
    first = int(rng(1).permutation(4)[0])
    others = [i for i in range(4) if i != first]
    assert first not in selector.select(1, toy_clients([1] * 4, frozenset(), available=others), rng(1)).ids
    assert first in selector.select(2, toy_clients([1] * 4, frozenset()), rng(2)).ids


def test_pow_d_takes_the_highest_losses_among_all_candidates() -> None:
    selector = pow_d(4, 2, 4)
    assert selector.select(1, door_on([0.5, 2.0, 1.0, 2.0], selector), rng(1)).ids.tolist() == [1, 3]


def test_pow_d_breaks_ties_at_random() -> None:
    selector = pow_d(4, 1, 4)
    clients = door_on([0.5, 2.0, 1.0, 2.0], selector)
    counts = Counter(int(selector.select(t, clients, rng(t)).ids[0]) for t in range(1000))
    assert set(counts) == {1, 3}
    assert abs(counts[1] / 1000 - 0.5) < 4 * np.sqrt(0.25 / 1000)


def test_pow_d_with_few_candidates_returns_ids_and_not_positions() -> None:
    """d < N: the highest loss of the candidates, which is client 9's only when 9 is a candidate."""
    selector = pow_d(10, 1, 3)
    clients = door_on([float(i) for i in range(10)], selector)
    counts = Counter(int(selector.select(t, clients, rng(t)).ids[0]) for t in range(2000))
    assert counts[0] == counts[1] == 0  # never the best of three
    assert abs(counts[9] / 2000 - 0.3) < 4 * np.sqrt(0.3 * 0.7 / 2000)


def test_pow_d_with_d_equal_k_is_its_candidates_and_asks_nothing() -> None:
    selector = pow_d(10, 3, 3)
    assert selector.warning is not None
    assert "random selection" in selector.warning
    silent = toy_clients([1] * 10, frozenset())  # a question would raise
    assert len(selector.select(1, silent, rng(1)).ids) == 3


def test_pow_d_takes_a_nan_loss_last() -> None:
    selector = pow_d(3, 2, 3)
    assert selector.select(1, door_on([np.nan, 0.1, 0.2], selector), rng(1)).ids.tolist() == [1, 2]


@pytest.mark.parametrize("estimate", ["full", "batch", "trained"])
def test_pow_d_takes_an_infinite_loss_last(estimate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a client whose report overflows would be selected in every round, with K = 1 nobody else."""
    selector, losses = pow_d(3, 2, 3, estimate), [np.inf, 0.1, 0.2]
    clients = door_on(losses, selector)
    cohort = toy_cohort([0, 1, 2], [1] * 3, [[0.0, 0.0]] * 3, loss=np.array(losses))
    monkeypatch.setattr(clients, "collect", lambda ids: cohort)
    assert selector.select(1, clients, rng(1)).ids.tolist() == [1, 2]


def test_rpow_d_takes_an_infinite_loss_last() -> None:
    selector, server = pow_d(3, 2, 3, "last"), Server(ToyEngine([1]), None, None, {})  # type: ignore[arg-type]
    selector.last_tried[:] = 1
    selector.observe(1, toy_cohort([0, 1, 2], [1] * 3, [[0.0, 0.0]] * 3, loss=np.array([np.inf, 0.1, 0.2])), server)
    assert selector.select(2, toy_clients([1] * 3, selector.needs), rng(1)).ids.tolist() == [1, 2]


def test_only_clients_with_data_are_candidates() -> None:
    population = toy_population([5, 0, 0], 1)
    selector = PowerOfChoice(population, num_candidates=3, estimate="full", schedule="constant")
    assert selector.select(1, toy_clients([5, 0, 0], selector.needs), rng(1)).ids.tolist() == [0]


def test_rpow_d_asks_nothing_takes_the_unseen_first_and_then_the_highest_last_loss() -> None:
    selector = pow_d(3, 1, 3, "last")
    clients = toy_clients([1] * 3, selector.needs)
    server = Server(ToyEngine([1]), None, None, {})  # type: ignore[arg-type]
    picked = []
    for t in range(1, 4):
        ids = selector.select(t, clients, rng(t)).ids
        picked += ids.tolist()
        selector.observe(t, toy_cohort(ids, [1], [[0.0, 0.0]], loss=np.array([float(ids[0])])), server)
    assert sorted(picked) == [0, 1, 2]
    assert selector.select(4, clients, rng(4)).ids.tolist() == [2]


def test_adapow_d_asks_everyone_in_the_first_half_and_nobody_after() -> None:
    population = toy_population([1] * 6, 2, num_rounds=10)
    selector = PowerOfChoice(population, num_candidates=None, estimate="full", schedule="adaptive")
    losses = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert selector.select(5, door_on(losses, selector), rng(5)).ids.tolist() == [4, 5]
    assert len(selector.select(6, toy_clients([1] * 6, frozenset()), rng(6)).ids) == 2


@pytest.mark.parametrize("d", [1, 11])
def test_num_candidates_must_lie_between_k_and_n(d: int) -> None:
    with pytest.raises(ConfigError, match=rf"num_candidates={d}: must lie in \[cohort_size=2, num_clients=10\]"):
        pow_d(10, 2, d)


def test_num_candidates_defaults_to_2k_but_never_more_than_n() -> None:
    assert pow_d(10, 2, None).drawn == 4
    assert pow_d(3, 2, None).drawn == 3


def test_highest_ranks_nan_below_minus_infinity() -> None:
    assert highest(np.array([np.nan, -np.inf, np.inf, 1.0]), 4, rng(1)).tolist() == [2, 3, 1, 0]


def test_sequential_draws_have_renormalised_probabilities() -> None:
    """Weights 1, 2, 3: P(first = 2) = 1/2; P(second = 1 | first = 2) = 2/3."""
    draws = [tuple(weighted_without_replacement(np.array([1.0, 2.0, 3.0]), 2, rng(t))) for t in range(6000)]
    first = [d for d in draws if d[0] == 2]
    assert abs(len(first) / 6000 - 1 / 2) < 4 * np.sqrt(0.25 / 6000)
    assert abs(sum(d[1] == 1 for d in first) / len(first) - 2 / 3) < 4 * np.sqrt(2 / 9 / len(first))
