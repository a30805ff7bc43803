"""Weights, switches and scales of DivFL, PNCS and what selectors share, by hand."""

from typing import Any

import numpy as np
import pytest
import torch

from fedsim.clients.ledger import Ledger
from fedsim.core.errors import ConfigError
from fedsim.selectors import divfl as divfl_module
from fedsim.selectors import pncs as pncs_module
from fedsim.selectors.divfl import DivFL
from fedsim.selectors.pair_study import pair_features
from fedsim.selectors.tools import kl_divergences, least_similar_subset, moved_to_front
from tests.test_pncs import pncs
from tests.toys import toy_clients, toy_population


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def divfl(n: int, k: int, **more: Any) -> DivFL:
    values: dict[str, Any] = {"mode": "ideal", "greedy": "lazy", "share": 0.1, "weights": "gamma"}
    return DivFL(toy_population([1] * n, k), **(values | more))


@pytest.mark.parametrize("n", range(4, 12))
def test_a_weight_is_the_share_of_those_nearest_to_its_client(n: int) -> None:
    """The toy's gradient of client i is (i + 1, -i^2 / 7); whoever was picked first is not the lowest id."""
    selector = divfl(n, 2)
    selection = selector.select(1, toy_clients([1] * n, selector.needs), rng())
    vectors = np.array([[i + 1, -i * i / 7] for i in range(n)])
    apart = np.linalg.norm(vectors[:, None] - vectors[None, selection.ids], axis=2)
    expected = np.bincount(apart.argmin(1), minlength=2) / n
    assert selection.weights == pytest.approx(expected)


def test_the_first_picked_of_two_is_often_the_higher_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this the test above would not see weights in the order of the picks."""
    orders: list[list[int]] = []
    pick = divfl_module.lazy_greedy

    def watched(*args: Any) -> Any:
        orders.append((found := pick(*args)).tolist())
        return found

    monkeypatch.setattr(divfl_module, "lazy_greedy", watched)
    for n in range(4, 12):
        selector = divfl(n, 2)
        selector.select(1, toy_clients([1] * n, selector.needs), rng())
    assert any(a > b for a, b in orders)


@pytest.mark.parametrize(("mode", "expected"), [("ideal", [4, 4, 4]), ("no_overhead", [4, 2, 2])])
def test_who_sends_a_gradient_in_later_rounds(mode: str, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    selector, sent = divfl(4, 2, mode=mode), []
    for t in (1, 2, 3):
        clients = toy_clients([1] * 4, selector.needs, round=t)
        asked: list[int] = []
        gradients = clients.gradients
        monkeypatch.setattr(clients, "gradients", lambda ids, a=asked, g=gradients: (a.extend(ids), g(ids))[1])
        selector.select(t, clients, rng())
        sent.append(len(asked))
    assert sent == expected


def test_stochastic_greedy_draws_its_share_of_all_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int | None] = []
    monkeypatch.setattr(
        divfl_module, "plain_greedy", lambda apart, count, rng, few: (seen.append(few), np.arange(count))[1]
    )
    for share, k in ((0.5, 3), (0.1, 3)):
        selector = divfl(10, k, greedy="stochastic", share=share)
        selector.select(1, toy_clients([1] * 10, selector.needs), rng())
    assert seen == [5, 3]  # never fewer than K
    selector = divfl(100, 3, greedy="stochastic", share=0.29)  # .29 * 100 is 28.999999999999996 in floating point
    selector.select(1, toy_clients([1] * 100, selector.needs), rng())
    assert seen[2:] == [29]


def test_a_share_of_all_clients_lies_between_0_and_1() -> None:
    for share in (-0.1, 1.1, 1e308):
        with pytest.raises(ConfigError, match=r"share=.*: must lie in \[0, 1\]"):
            divfl(10, 3, greedy="stochastic", share=share)


def test_age_counts_by_the_mean_of_a_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    tables: list[np.ndarray] = []

    def watched(table: np.ndarray, count: int, *_: Any) -> np.ndarray:
        tables.append(table)
        return np.arange(count)

    monkeypatch.setattr(pncs_module, "least_similar_subset", watched)
    for weight in (0.0, 0.5):
        selector = pncs(3, 2, age_weight=weight, queue_length=0)
        selector.last_round[:] = [4, 1, 0]
        selector.select(5, toy_clients([2] * 3, selector.needs, round=5), rng())
    ages = np.array([1, 4, 5])
    assert tables[0] - tables[1] == pytest.approx(0.5 * (ages[:, None] + ages[None, :]) / 2)


@pytest.mark.parametrize(("grad", "samples"), [("full", 2 * 6), ("batch", 2 * 4)])
def test_a_batch_gradient_is_of_one_batch(grad: str, samples: int) -> None:
    ledger, selector = Ledger(), pncs(2, 1, grad=grad)
    selector.select(1, toy_clients([6, 6], selector.needs, ledger=ledger), rng())
    assert ledger.train_samples == samples


def test_the_one_least_like_the_others_does_not_count_its_likeness_to_itself() -> None:
    table = np.array([[5.0, 0, 1], [0, 0, 2], [1, 2, 0]])
    assert least_similar_subset(table, 1, "auto", 0, rng()).tolist() == [0]


def test_what_may_be_selected_is_moved_to_the_front_of_its_table() -> None:
    table, rows = np.random.default_rng(0).random((9, 9)), np.array([0, 2, 3, 7])
    wanted = table[np.ix_(rows, rows)]
    assert np.array_equal(moved_to_front(table, rows), wanted)


def test_of_several_lowest_pairs_each_is_begun_with() -> None:
    similarity = np.ones((5, 5))
    for i, j in ((0, 3), (1, 4), (1, 2)):
        similarity[i, j] = similarity[j, i] = -1.0
    found = {
        tuple(sorted(least_similar_subset(similarity.copy(), 2, "greedy", 0, np.random.default_rng(s)).tolist()))
        for s in range(40)
    }
    assert found == {(0, 3), (1, 4), (1, 2)}


def test_features_do_not_depend_on_the_order_of_a_pair_nor_sparsity_on_scale() -> None:
    vectors = np.array([[3.0, -4.0, 1e-6, 0.2], [0.0, 2.0, 1.0, -1.0]])
    one, other = pair_features(vectors, [1, 2]), pair_features(vectors[::-1], [1, 2])
    assert set(one) == set(other)
    assert all(one[name] == pytest.approx(other[name]) for name in one)
    small = pair_features(1e-4 * vectors, [1, 2])
    assert small["sparsity sum"] == one["sparsity sum"] == [0.25 + 0.25]


def test_a_probability_of_zero_counts_as_1e_8() -> None:
    p = torch.tensor([[[0.5, 0.5]], [[1.0, 0.0]]], dtype=torch.float64)
    expected = 0.5 * np.log(0.5 / 1e-8) + 0.5 * np.log(0.5)
    assert kl_divergences(p.log(), "sum")[0, 1] == pytest.approx(expected)
