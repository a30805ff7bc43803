"""Examples by hand and statistics of the selectors; what all of them must satisfy is in test_selector_contract.py."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from fedsim.clients.clients import Clients
from fedsim.core.errors import ConfigError
from fedsim.core.rng import Purpose, Streams
from fedsim.core.types import Evaluation
from fedsim.selectors.base import highest, softmax, weighted_without_replacement
from fedsim.selectors.full import Full
from fedsim.selectors.pair_study import PairStudy, pair_features
from fedsim.selectors.power_of_choice import PowerOfChoice
from fedsim.selectors.random import MultinomialRandom, Random
from fedsim.selectors.round_robin import RoundRobin
from tests.toys import ToyEngine, picked, toy_clients, toy_cohort, toy_population


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


def pow_d(
    n: int,
    k: int,
    d: int | None,
    estimate: str = "full",
    schedule: str = "constant",
    num_rounds: int = 10,
    sizes: Any = (),
) -> PowerOfChoice:
    values: dict[str, Any] = {"num_candidates": d, "estimate": estimate, "schedule": schedule}
    return PowerOfChoice(toy_population(sizes or [1] * n, k, num_rounds), **values)


def test_random_includes_every_client_with_probability_k_over_n() -> None:
    selector = Random(toy_population([1] * 10, 3), mode="uniform")
    clients = toy_clients([1] * 10, frozenset())
    counts = Counter(i for t in range(2000) for i in selector.select(t, clients, rng(t)).ids)
    assert all(abs(counts[i] / 2000 - 0.3) < 4 * np.sqrt(0.3 * 0.7 / 2000) for i in range(10))


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
    assert picked(Full(toy_population([1, 0, 2], 1))) == [0, 2]


def test_round_robin_covers_everyone_in_turn_differs_by_seed_and_keeps_the_turn_of_the_unavailable() -> None:
    orders = []
    for seed in (0, 1):
        selector = RoundRobin(toy_population([1] * 10, 3))
        picks = [picked(selector, t, seed) for t in range(1, 11)]
        assert len(set(sum(picks[:4], []))) == 10
        assert Counter(sum(picks, [])) == dict.fromkeys(range(10), 3)
        orders.append(picks)
    assert orders[0] != orders[1]
    selector, first = RoundRobin(toy_population([1] * 4, 2)), int(np.random.default_rng(0).permutation(4)[0])
    assert first not in picked(selector, available=[i for i in range(4) if i != first])
    assert first in picked(selector, 2)


def test_pow_d_takes_the_highest_losses_among_all_candidates_and_breaks_ties_at_random() -> None:
    selector = pow_d(4, 2, 4)
    assert selector.select(1, door_on([0.5, 2.0, 1.0, 2.0], selector), rng(1)).ids.tolist() == [1, 3]
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
    silent = toy_clients([1] * 10, frozenset())  # a question would raise
    assert len(selector.select(1, silent, rng(1)).ids) == 3


@pytest.mark.parametrize("estimate", ["full", "batch", "trained", "last"])
@pytest.mark.parametrize("loss", [np.nan, np.inf])
def test_pow_d_takes_a_loss_that_is_not_finite_last(
    loss: float, estimate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a client whose report overflows would be selected in every round, with K = 1 nobody else."""
    selector, losses = pow_d(3, 2, 3, estimate), [loss, 0.1, 0.2]
    clients = door_on(losses, selector)
    cohort = toy_cohort([0, 1, 2], [1] * 3, [[0.0, 0.0]] * 3, loss=np.array(losses))
    monkeypatch.setattr(clients, "collect", lambda ids: cohort)
    selector.last_tried[:] = 1
    selector.observe(1, cohort, None)  # type: ignore[arg-type]
    assert selector.select(2, clients, rng(2)).ids.tolist() == [1, 2]


def test_candidates_are_drawn_by_size_among_those_with_data_that_are_available() -> None:
    assert picked(pow_d(3, 1, 3, sizes=[5, 0, 0])) == [0]
    selector = pow_d(4, 1, 1, sizes=[90, 1, 9, 1])
    found = [picked(selector, seed=s, available=[1, 2])[0] for s in range(2000)]
    assert np.mean(np.array(found) == 2) == pytest.approx(0.9, abs=0.03)


@pytest.mark.parametrize("d", [1, 11])
def test_num_candidates_lies_between_k_and_n_and_is_2k_by_default(d: int) -> None:
    with pytest.raises(ConfigError, match=rf"num_candidates={d}: must lie in \[cohort_size=2, num_clients=10\]"):
        pow_d(10, 2, d)
    assert [pow_d(n, 3, given).drawn for n, given in ((10, None), (5, None), (5, 3))] == [6, 5, 3]


def test_sequential_draws_have_renormalised_probabilities() -> None:
    """Weights 1, 2, 3: P(first = 2) = 1/2; P(second = 1 | first = 2) = 2/3."""
    draws = [tuple(weighted_without_replacement(np.array([1.0, 2.0, 3.0]), 2, rng(t))) for t in range(6000)]
    first = [d for d in draws if d[0] == 2]
    assert abs(len(first) / 6000 - 1 / 2) < 4 * np.sqrt(0.25 / 6000)
    assert abs(sum(d[1] == 1 for d in first) / len(first) - 2 / 3) < 4 * np.sqrt(2 / 9 / len(first))


def test_a_softmax_of_large_values_does_not_overflow() -> None:
    assert softmax(np.array([1000.0, 1000.0, -1000.0])).tolist() == [0.5, 0.5, 0]
    assert softmax(np.log([1.0, 3.0])) == pytest.approx([0.25, 0.75])


def test_positions_without_weight_are_not_drawn_even_where_others_do_not_suffice() -> None:
    assert sorted(weighted_without_replacement(np.array([0.0, 2, 0, 1]), 3, rng(1))) == [1, 3]


def test_the_highest_come_best_first_and_nan_comes_last() -> None:
    assert highest(np.array([1.0, np.nan, -np.inf, 5.0]), 4, rng(1)).tolist() == [3, 0, 2, 1]


def test_k_is_at_most_the_number_of_those_available() -> None:
    clients = toy_clients([1] * 5, frozenset(), available=[1, 4])
    assert Full(toy_population([1] * 5, 3)).cohort_size(clients) == 2
    assert Full(toy_population([1] * 5, 1)).cohort_size(clients) == 1


def test_sizes_are_those_of_the_clients_that_are_available() -> None:
    """Of sizes 50, 1, 9 the first is away: 9 of 10 go to the last."""
    for selector in (
        Random(toy_population([50, 1, 9], 1), mode="size"),
        MultinomialRandom(toy_population([50, 1, 9], 1)),
    ):
        clients = toy_clients([50, 1, 9], frozenset(), available=[1, 2])
        picks = [int(selector.select(1, clients, rng(1, s)).ids[0]) for s in range(2000)]
        assert np.mean(np.array(picks) == 2) == pytest.approx(0.9, abs=0.03)


def test_a_saved_state_is_not_changed_by_going_on() -> None:
    selector, other = (RoundRobin(toy_population([1] * 4, 2)) for _ in range(2))
    clients = toy_clients([1] * 4, frozenset())
    selector.select(1, clients, rng(1))
    other.load_state_dict({"queue": (state := np.array([3, 2, 1, 0]))})
    other.queue[:] = 9
    assert state.tolist() == [3, 2, 1, 0]


@pytest.mark.parametrize(("num_rounds", "last"), [(10, 5), (9, 4)])
def test_adaptive_asks_everybody_up_to_half_of_the_rounds(num_rounds: int, last: int) -> None:
    selector = pow_d(6, 2, None, num_rounds=num_rounds, schedule="adaptive")
    assert [selector._num_candidates_in(t) for t in (1, last, last + 1, num_rounds)] == [6, 6, 2, 2]


def test_latest_losses_are_of_those_that_took_part_and_others_come_first() -> None:
    selector = pow_d(4, 1, 4, "last")
    selector.observe(1, toy_cohort([0, 2], [1, 1], [[0, 0], [0, 0]], loss=np.array([5.0, 7.0])), None)  # type: ignore[arg-type]
    assert selector.seen.tolist() == [True, False, True, False]
    clients = toy_clients([1] * 4, selector.needs)
    picks = set()
    for s in range(20):
        selector.last_tried[:] = [1, 0, 1, 0]
        picks.add(int(selector.select(2, clients, rng(1, s)).ids[0]))
    assert picks == {1, 3}
    selector.seen[:] = True
    assert selector.select(3, clients, rng(1)).ids.tolist() == [2]


@pytest.mark.parametrize(("estimate", "question"), [("full", "losses"), ("batch", "batch_losses")])
def test_each_estimate_asks_its_own_question(estimate: str, question: str, monkeypatch: pytest.MonkeyPatch) -> None:
    selector = pow_d(3, 1, 3, estimate)
    clients = toy_clients([1] * 3, selector.needs)
    asked: list[str] = []
    for name in ("losses", "batch_losses"):
        monkeypatch.setattr(clients, name, lambda ids, n=name: (asked.append(n), np.array([1.0, 3.0, 2.0])[ids])[1])
    assert selector.select(1, clients, rng(1)).ids.tolist() == [1]
    assert asked == [question]


def test_a_pairs_step_is_against_its_mean_gradient_and_step_times_lr_long() -> None:
    """The toy's gradients are (m + 1, -m^2 / 7), m the mean position: (1, 0), (2, -1/7) and (3, -4/7) at lr 1."""
    tried: list[list[float]] = []

    class Server:
        def validate(self, params: dict[str, torch.Tensor]) -> Evaluation:
            tried.append(params["w"].tolist())
            return Evaluation(0.5, 1.0)

    selector = PairStudy(toy_population([1] * 3, 1), powers=[2], step=0.5)
    selector.select(1, toy_clients([1] * 3, selector.needs), rng(1))
    assert selector._before is not None
    before, lr, *rest = selector._before
    assert lr == 1.0
    selector._before = (before, 0.1, *rest)
    selector.observe(1, toy_cohort([0], [1], [[0, 0]]), Server())  # type: ignore[arg-type]
    means = np.array([[1.5, -1 / 14], [2, -2 / 7], [2.5, -5 / 14]])
    assert np.array(tried) == pytest.approx(-0.05 * means, rel=1e-5)
    assert selector.trace is not None
    assert selector.trace["pairs"] == [[0, 1], [0, 2], [1, 2]]


def test_features_do_not_depend_on_the_order_of_a_pair_nor_sparsity_on_scale() -> None:
    vectors = np.array([[3.0, -4.0, 1e-6, 0.2], [0.0, 2.0, 1.0, -1.0]])
    one, other = pair_features(vectors, [1, 2]), pair_features(vectors[::-1], [1, 2])
    assert set(one) == set(other)
    assert all(one[name] == pytest.approx(other[name]) for name in one)
    small = pair_features(1e-4 * vectors, [1, 2])
    assert small["sparsity sum"] == one["sparsity sum"] == [0.25 + 0.25]
