"""Examples by hand and statistics of the selectors; what all of them must satisfy is in
test_selector_contract.py."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedsim.core.errors import ConfigError
from fedsim.core.types import Evaluation
from fedsim.selectors.base import highest, softmax, weighted_without_replacement
from fedsim.selectors.full import Full
from fedsim.selectors.pair_study import PairStudy, pair_features
from fedsim.selectors.power_of_choice import PowerOfChoice
from fedsim.selectors.random import MultinomialRandom, OtherRandom, Random
from fedsim.selectors.round_robin import RoundRobin
from tests.toys import (
    ToyEngine,
    chances,
    picked,
    selection_of,
    shipped,
    toy_clients,
    toy_cohort,
    toy_population,
)


class FixedLosses(ToyEngine):
    """Clients of one sample each, with fixed losses."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__([1] * len(losses))
        self.fixed = np.array(losses)

    def losses(self, params, positions):  # type: ignore[no-untyped-def]
        return np.array([self.fixed[p[0]] for p in positions])


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# --- random selection


def test_random_selects_each_client_with_probability_k_over_n() -> None:
    selector = Random(toy_population([1] * 10, 3), mode="uniform")
    assert chances(selector) == pytest.approx(np.full(10, 0.3), abs=0.041)


@pytest.mark.parametrize(
    ("sizes", "available", "expected"),
    [([0, 1, 1, 8], None, [0, 0.1, 0.1, 0.8]), ([50, 1, 9], [1, 2], [0, 0.1, 0.9])],
)
def test_draws_by_size_are_among_the_available_clients(
    sizes: list[int], available: list[int] | None, expected: list[float]
) -> None:
    population = toy_population(sizes, 1)
    for selector in (Random(population, mode="size"), MultinomialRandom(population)):
        assert chances(selector, available=available) == pytest.approx(expected, abs=0.036)


def test_the_control_overlaps_with_random_by_chance_only() -> None:
    """Two independent draws of K of N clients share K^2 / N = 0.9 on average."""
    population = toy_population([1] * 10, 3)
    random, control = (kind(population, mode="uniform") for kind in (Random, OtherRandom))
    shared = [len({*picked(random, seed=s)} & {*picked(control, seed=s)}) for s in range(2000)]
    assert np.mean(shared) == pytest.approx(0.9, abs=0.06)


def test_md_is_unbiased_and_weighs_by_multiplicity() -> None:
    selector = MultinomialRandom(toy_population([1, 2, 3, 4], 3))
    total = np.zeros(4)
    for seed in range(4000):
        selection = selection_of(selector, seed=seed)
        assert selection.weights is not None
        assert selection.weights.sum() == pytest.approx(1)
        assert np.allclose(selection.weights * 3, np.round(selection.weights * 3))
        total[selection.ids] += selection.weights
    assert np.allclose(total / 4000, [0.1, 0.2, 0.3, 0.4], atol=4 * np.sqrt(0.25 / 3 / 4000))


def test_full_selects_everyone_with_data() -> None:
    assert picked(Full(toy_population([1, 0, 2], 1))) == [0, 2]


@pytest.mark.parametrize(("k", "expected"), [(3, 2), (1, 1)])
def test_a_cohort_has_at_most_the_available_clients(k: int, expected: int) -> None:
    clients = toy_clients([1] * 5, frozenset(), available=[1, 4])
    assert Full(toy_population([1] * 5, k)).cohort_size(clients) == expected


# --- round robin


def cohorts_of_ten_rounds(seed: int) -> list[list[int]]:
    selector = RoundRobin(toy_population([1] * 10, 3))
    return [picked(selector, t, seed) for t in range(1, 11)]


def test_round_robin_covers_everyone_in_turn() -> None:
    """ceil(10 / 3) = 4 rounds. Ten rounds of three clients are three turns of ten."""
    cohorts = cohorts_of_ten_rounds(0)
    assert len(set(sum(cohorts[:4], []))) == 10
    assert Counter(sum(cohorts, [])) == dict.fromkeys(range(10), 3)


def test_the_order_of_round_robin_depends_on_the_seed() -> None:
    assert cohorts_of_ten_rounds(0) != cohorts_of_ten_rounds(1)


def test_round_robin_keeps_the_turn_of_an_unavailable_client() -> None:
    selector = RoundRobin(toy_population([1] * 4, 2))
    first = int(rng().permutation(4)[0])
    assert first not in picked(selector, available=[i for i in range(4) if i != first])
    assert first in picked(selector, 2)


def test_a_loaded_state_is_a_copy() -> None:
    selector = RoundRobin(toy_population([1] * 4, 2))
    state = {"queue": np.array([3, 2, 1, 0])}
    selector.load_state_dict(state)
    selector.queue[:] = 9
    assert state["queue"].tolist() == [3, 2, 1, 0]


# --- power-of-choice


def pow_d(
    n: int, k: int, d: int | None, estimate: Any = "full", sizes: Any = (), num_rounds: int = 10
) -> PowerOfChoice:
    """Return power-of-choice with d candidates, for n clients of one sample by default."""
    population = toy_population(sizes or [1] * n, k, num_rounds)
    return shipped("power_of_choice", population, num_candidates=d, estimate=estimate)


def test_pow_d_selects_the_highest_losses_and_breaks_ties_at_random() -> None:
    engine = FixedLosses([0.5, 2.0, 1.0, 2.0])
    assert picked(pow_d(4, 2, 4), engine=engine) == [1, 3]
    ties = chances(pow_d(4, 1, 4), 1000, engine=engine)
    assert ties == pytest.approx([0, 0.5, 0, 0.5], abs=0.064)


def test_pow_d_selects_candidates_only() -> None:
    """Losses rise with the id. The lowest two are never the best of three candidates, and the
    highest one is selected as often as it is a candidate."""
    selected = chances(pow_d(10, 1, 3), engine=FixedLosses([float(i) for i in range(10)]))
    assert selected[0] == selected[1] == 0
    assert selected[9] == pytest.approx(0.3, abs=0.041)


def test_pow_d_selects_by_the_law_of_its_two_steps() -> None:
    """Shares p = 0.4, 0.3, 0.2, 0.1; losses rise with the id. {i, j} are the two candidates with
    probability p_i p_j / (1 - p_i) + p_j p_i / (1 - p_j), and the higher id is selected. Client 1
    with that of {0, 1}: 0.4 (0.3 / 0.6) + 0.3 (0.4 / 0.7) = 0.371429. Client 2 with {0, 2} or {1,
    2}: 0.233333 + 0.160714. Client 3 with the rest, 0.234524."""
    sizes = [4, 3, 2, 1]
    engine = FixedLosses([1.0, 2.0, 3.0, 4.0])
    engine.data.train[:] = [np.full(n, i) for i, n in enumerate(sizes)]  # type: ignore[index]
    selected = chances(pow_d(4, 1, 2, sizes=sizes), 1000, engine=engine, available=range(4))
    expected = [0, 0.371429, 0.394048, 0.234524]
    assert selected == pytest.approx(expected, abs=4 * np.sqrt(0.25 / 1000))


def test_pow_d_with_d_equal_to_k_asks_nothing() -> None:
    """A request would raise, because none is declared."""
    clients = toy_clients([1] * 10, frozenset())
    assert len(pow_d(10, 3, 3).select(1, clients, rng()).ids) == 3


@pytest.mark.parametrize("estimate", ["full", "batch", "trained", "last"])
@pytest.mark.parametrize("loss", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_ranks_last(
    loss: float, estimate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a client whose loss overflows would be selected in every round."""
    losses = [loss, 0.1, 0.2]
    selector = pow_d(3, 2, 3, estimate)
    clients = toy_clients([1] * 3, selector.needs, engine=FixedLosses(losses))
    cohort = toy_cohort([0, 1, 2], [1] * 3, [[0.0, 0.0]] * 3, loss=np.array(losses))
    monkeypatch.setattr(clients, "collect", lambda ids: cohort)
    selector.last_tried[:] = 1
    selector.observe(1, cohort, None)  # type: ignore[arg-type]
    assert selector.select(2, clients, rng()).ids.tolist() == [1, 2]


def test_candidates_are_drawn_by_size_among_available_clients_with_data() -> None:
    assert picked(pow_d(3, 1, 3, sizes=[5, 0, 0])) == [0]
    selected = chances(pow_d(4, 1, 1, sizes=[90, 1, 9, 1]), available=[1, 2])
    assert selected == pytest.approx([0, 0.1, 0.9, 0], abs=0.03)


@pytest.mark.parametrize("d", [1, 11])
def test_num_candidates_lies_between_k_and_n(d: int) -> None:
    message = rf"num_candidates={d}: must lie in \[cohort_size=2, num_clients=10\]"
    with pytest.raises(ConfigError, match=message):
        pow_d(10, 2, d)


@pytest.mark.parametrize(("n", "d", "expected"), [(10, None, 6), (5, None, 5), (5, 3, 3)])
def test_candidates_are_2k_by_default_and_at_most_n(n: int, d: int | None, expected: int) -> None:
    assert pow_d(n, 3, d).usual_num_candidates == expected


@pytest.mark.parametrize(("num_rounds", "last"), [(10, 5), (9, 4)])
def test_adaptive_candidates_are_everybody_in_the_first_half(num_rounds: int, last: int) -> None:
    selector = pow_d(6, 2, None, num_rounds=num_rounds)
    selector.schedule = "adaptive"
    numbers = [selector.num_candidates_in(t) for t in (1, last, last + 1, num_rounds)]
    assert numbers == [6, 6, 2, 2]


def test_clients_without_a_latest_loss_come_first() -> None:
    """Clients 0 and 2 have taken part. Once all have, the highest latest loss is selected."""
    selector = pow_d(4, 1, 4, "last")
    cohort = toy_cohort([0, 2], [1, 1], [[0, 0], [0, 0]], loss=np.array([5.0, 7.0]))
    selector.observe(1, cohort, None)  # type: ignore[arg-type]
    assert selector.seen.tolist() == [True, False, True, False]
    selected = set()
    for seed in range(20):
        selector.last_tried[:] = [1, 0, 1, 0]
        selected.update(picked(selector, 2, seed))
    assert selected == {1, 3}
    selector.seen[:] = True
    assert picked(selector, 3) == [2]


@pytest.mark.parametrize(("estimate", "request_"), [("full", "losses"), ("batch", "batch_losses")])
def test_each_estimate_makes_its_own_request(
    estimate: str, request_: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another request would raise, because it is removed."""
    selector = pow_d(3, 1, 3, estimate)
    clients = toy_clients([1] * 3, selector.needs)
    for name in ("losses", "batch_losses"):
        monkeypatch.setattr(clients, name, None)
    monkeypatch.setattr(clients, request_, lambda ids: np.array([1.0, 3.0, 2.0])[ids])
    assert selector.select(1, clients, rng()).ids.tolist() == [1]


# --- operations


def test_sequential_draws_have_renormalised_probabilities() -> None:
    """Weights 1, 2, 3: P(first = 2) = 1/2; P(second = 1 | first = 2) = 2/3."""
    weights = np.array([1.0, 2.0, 3.0])
    draws = [weighted_without_replacement(weights, 2, rng(t)).tolist() for t in range(6000)]
    seconds = [second for first, second in draws if first == 2]
    assert len(seconds) / 6000 == pytest.approx(1 / 2, abs=4 * np.sqrt(0.25 / 6000))
    share = np.mean(np.array(seconds) == 1)
    assert share == pytest.approx(2 / 3, abs=4 * np.sqrt(2 / 9 / len(seconds)))


def test_positions_of_weight_zero_are_not_drawn() -> None:
    assert sorted(weighted_without_replacement(np.array([0.0, 2, 0, 1]), 3, rng(1))) == [1, 3]


def test_a_softmax_of_large_values_does_not_overflow() -> None:
    assert softmax(np.array([1000.0, 1000.0, -1000.0])).tolist() == [0.5, 0.5, 0]
    assert softmax(np.log([1.0, 3.0])) == pytest.approx([0.25, 0.75])


def test_the_highest_come_first_and_nan_last() -> None:
    assert highest(np.array([1.0, np.nan, -np.inf, 5.0]), 4, rng(1)).tolist() == [3, 0, 2, 1]


# --- the study of pairs


def test_a_pairs_step_is_against_its_mean_gradient_and_step_times_lr_long() -> None:
    """The toy's gradients are (m + 1, -m^2 / 7), m the mean position: (1, 0), (2, -1/7) and (3,
    -4/7) at lr 1."""
    tried: list[list[float]] = []

    class Server:
        def validate(self, params: dict[str, torch.Tensor]) -> Evaluation:
            tried.append(params["w"].tolist())
            return Evaluation(0.5, 1.0)

    selector = PairStudy(toy_population([1] * 3, 1), powers=[2], step=0.5)
    selection_of(selector)
    before = selector._before_training
    assert before is not None
    assert before.lr == 1.0
    selector._before_training = replace(before, lr=0.1)
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
