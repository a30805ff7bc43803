"""Examples by hand and statistics of the selectors; what all of them must satisfy is in
test_selector_contract.py."""

from collections import Counter
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
    toy_clients,
    toy_cohort,
    toy_population,
)


class FixedLosses(ToyEngine):
    """Clients of one sample each whose losses are given."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__([1] * len(losses))
        self.given = np.array(losses)

    def losses(self, params, positions):  # type: ignore[no-untyped-def]
        return np.array([self.given[p[0]] for p in positions])


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def pow_d(
    n: int, k: int, d: int | None, estimate: Any = "full", sizes: Any = (), **more: Any
) -> PowerOfChoice:
    population = toy_population(sizes or [1] * n, k, more.pop("num_rounds", 10))
    return PowerOfChoice(
        population, num_candidates=d, estimate=estimate, **{"schedule": "constant", **more}
    )


def test_random_and_md_draw_uniformly_or_by_size_among_those_available() -> None:
    assert chances(Random(toy_population([1] * 10, 3), mode="uniform")) == pytest.approx(
        np.full(10, 0.3), abs=0.041
    )
    for sizes, available, expected in (
        ([0, 1, 1, 8], None, [0, 0.1, 0.1, 0.8]),
        ([50, 1, 9], [1, 2], [0, 0.1, 0.9]),
    ):
        population = toy_population(sizes, 1)
        for selector in (Random(population, mode="size"), MultinomialRandom(population)):
            assert chances(selector, available=available) == pytest.approx(expected, abs=0.036)


def test_the_control_draws_apart_from_random_at_the_same_seed() -> None:
    one, other = (
        kind(toy_population([1] * 10, 3), mode="uniform") for kind in (Random, OtherRandom)
    )
    shared = [
        len({*selection_of(one, seed=s).ids} & {*selection_of(other, seed=s).ids})
        for s in range(2000)
    ]
    assert np.mean(shared) == pytest.approx(0.9, abs=0.06)  # K^2 / N


def test_md_is_unbiased_and_weighs_by_multiplicity() -> None:
    selector, total = MultinomialRandom(toy_population([1, 2, 3, 4], 3)), np.zeros(4)
    for seed in range(4000):
        selection = selection_of(selector, seed=seed)
        assert selection.weights is not None
        assert selection.weights.sum() == pytest.approx(1)
        assert np.allclose(selection.weights * 3, np.round(selection.weights * 3))
        total[selection.ids] += selection.weights
    assert np.allclose(total / 4000, [0.1, 0.2, 0.3, 0.4], atol=4 * np.sqrt(0.25 / 3 / 4000))


def test_full_takes_everyone_with_data_and_k_is_at_most_the_number_of_those_available() -> None:
    assert picked(Full(toy_population([1, 0, 2], 1))) == [0, 2]
    clients = toy_clients([1] * 5, frozenset(), available=[1, 4])
    assert [Full(toy_population([1] * 5, k)).cohort_size(clients) for k in (3, 1)] == [2, 1]


def test_round_robin_covers_everyone_in_turn_differs_by_seed_and_keeps_the_turn_of_the_unavailable() -> (
    None
):
    orders = []
    for seed in (0, 1):
        selector = RoundRobin(toy_population([1] * 10, 3))
        picks = [picked(selector, t, seed) for t in range(1, 11)]
        assert len(set(sum(picks[:4], []))) == 10
        assert Counter(sum(picks, [])) == dict.fromkeys(range(10), 3)
        orders.append(picks)
    assert orders[0] != orders[1]
    selector, first = RoundRobin(toy_population([1] * 4, 2)), int(rng().permutation(4)[0])
    assert first not in picked(selector, available=[i for i in range(4) if i != first])
    assert first in picked(selector, 2)
    selector.load_state_dict(
        {"queue": (state := np.array([3, 2, 1, 0]))}
    )  # which going on does not change
    selector.queue[:] = 9
    assert state.tolist() == [3, 2, 1, 0]


def test_pow_d_takes_the_highest_losses_of_its_candidates_and_breaks_ties_at_random() -> None:
    engine = FixedLosses([0.5, 2.0, 1.0, 2.0])
    assert picked(pow_d(4, 2, 4), engine=engine) == [1, 3]
    assert chances(pow_d(4, 1, 4), 1000, engine=engine) == pytest.approx(
        [0, 0.5, 0, 0.5], abs=0.064
    )
    found = chances(pow_d(10, 1, 3), engine=FixedLosses([float(i) for i in range(10)]))
    assert found[0] == found[1] == 0  # never the best of three
    assert found[9] == pytest.approx(0.3, abs=0.041)  # as often as it is a candidate


def test_pow_d_selects_by_the_law_of_its_two_steps() -> None:
    """Shares p = .4, .3, .2, .1; the losses rise with the id. {i, j} are the two candidates with
    probability p_i p_j / (1 - p_i) + p_j p_i / (1 - p_j), and the higher id of them is selected: 1
    with that of {0, 1}, .4 (.3 / .6) + .3 (.4 / .7) = .371429; 2 with {0, 2} or {1, 2}, .233333 +
    .160714; 3 with the rest, .234524."""
    sizes, losses = [4, 3, 2, 1], FixedLosses([1.0, 2.0, 3.0, 4.0])
    losses.data.train[:] = [np.full(n, i) for i, n in enumerate(sizes)]  # type: ignore[index]
    found = chances(pow_d(4, 1, 2, sizes=sizes), 1000, engine=losses, available=range(4))
    assert found == pytest.approx([0, 0.371429, 0.394048, 0.234524], abs=4 * np.sqrt(0.25 / 1000))


def test_pow_d_with_d_equal_k_is_its_candidates_and_asks_nothing() -> None:
    silent = toy_clients([1] * 10, frozenset())  # a question would raise
    assert len(pow_d(10, 3, 3).select(1, silent, rng()).ids) == 3


@pytest.mark.parametrize("estimate", ["full", "batch", "trained", "last"])
@pytest.mark.parametrize("loss", [np.nan, np.inf])
def test_pow_d_takes_a_loss_that_is_not_finite_last(
    loss: float, estimate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a client whose report overflows would be selected in every round, with K = 1 nobody
    else."""
    selector, losses = pow_d(3, 2, 3, estimate), [loss, 0.1, 0.2]
    clients = toy_clients([1] * 3, selector.needs, engine=FixedLosses(losses))
    cohort = toy_cohort([0, 1, 2], [1] * 3, [[0.0, 0.0]] * 3, loss=np.array(losses))
    monkeypatch.setattr(clients, "collect", lambda ids: cohort)
    selector.last_tried[:] = 1
    selector.observe(1, cohort, None)  # type: ignore[arg-type]
    assert selector.select(2, clients, rng()).ids.tolist() == [1, 2]


def test_candidates_are_drawn_by_size_among_those_with_data_that_are_available() -> None:
    assert picked(pow_d(3, 1, 3, sizes=[5, 0, 0])) == [0]
    found = chances(pow_d(4, 1, 1, sizes=[90, 1, 9, 1]), available=[1, 2])
    assert found == pytest.approx([0, 0.1, 0.9, 0], abs=0.03)


def test_num_candidates_lies_between_k_and_n_is_2k_by_default_and_falls_if_adaptive() -> None:
    for d in (1, 11):
        with pytest.raises(
            ConfigError, match=rf"num_candidates={d}: must lie in \[cohort_size=2, num_clients=10\]"
        ):
            pow_d(10, 2, d)
    assert [pow_d(n, 3, given).drawn for n, given in ((10, None), (5, None), (5, 3))] == [6, 5, 3]
    for num_rounds, last in ((10, 5), (9, 4)):  # everybody up to half of the rounds
        selector = pow_d(6, 2, None, num_rounds=num_rounds, schedule="adaptive")
        assert [selector._num_candidates_in(t) for t in (1, last, last + 1, num_rounds)] == [
            6,
            6,
            2,
            2,
        ]


def test_latest_losses_are_of_those_that_took_part_and_others_come_first() -> None:
    selector = pow_d(4, 1, 4, "last")
    selector.observe(
        1, toy_cohort([0, 2], [1, 1], [[0, 0], [0, 0]], loss=np.array([5.0, 7.0])), None
    )  # type: ignore[arg-type]
    assert selector.seen.tolist() == [True, False, True, False]
    picks = set()
    for seed in range(20):
        selector.last_tried[:] = [1, 0, 1, 0]
        picks |= set(picked(selector, 2, seed))
    assert picks == {1, 3}
    selector.seen[:] = True
    assert picked(selector, 3) == [2]


@pytest.mark.parametrize(("estimate", "question"), [("full", "losses"), ("batch", "batch_losses")])
def test_each_estimate_asks_its_own_question(
    estimate: str, question: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    selector = pow_d(3, 1, 3, estimate)
    clients = toy_clients([1] * 3, selector.needs)
    asked: list[str] = []
    for name in ("losses", "batch_losses"):
        monkeypatch.setattr(
            clients, name, lambda ids, n=name: (asked.append(n), np.array([1.0, 3.0, 2.0])[ids])[1]
        )
    assert selector.select(1, clients, rng()).ids.tolist() == [1]
    assert asked == [question]


def test_sequential_draws_have_renormalised_probabilities_and_none_is_of_weight_0() -> None:
    """Weights 1, 2, 3: P(first = 2) = 1/2; P(second = 1 | first = 2) = 2/3."""
    draws = [
        tuple(weighted_without_replacement(np.array([1.0, 2.0, 3.0]), 2, rng(t)))
        for t in range(6000)
    ]
    first = [d for d in draws if d[0] == 2]
    assert abs(len(first) / 6000 - 1 / 2) < 4 * np.sqrt(0.25 / 6000)
    assert abs(sum(d[1] == 1 for d in first) / len(first) - 2 / 3) < 4 * np.sqrt(2 / 9 / len(first))
    assert sorted(weighted_without_replacement(np.array([0.0, 2, 0, 1]), 3, rng(1))) == [1, 3]


def test_a_softmax_of_large_values_does_not_overflow_and_the_highest_come_first_nan_last() -> None:
    assert softmax(np.array([1000.0, 1000.0, -1000.0])).tolist() == [0.5, 0.5, 0]
    assert softmax(np.log([1.0, 3.0])) == pytest.approx([0.25, 0.75])
    assert highest(np.array([1.0, np.nan, -np.inf, 5.0]), 4, rng(1)).tolist() == [3, 0, 2, 1]


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
