from typing import Any

import numpy as np
import pytest
import torch

from fedsim.clients.ledger import Ledger
from fedsim.selectors import lefl as lefl_module
from fedsim.selectors.lefl import LEFL
from fedsim.selectors.tools import ward_linkage
from tests.toys import toy_clients, toy_population


def lefl(sizes: list[int], k: int, weights: Any = "aggregator") -> LEFL:
    selector = LEFL(toy_population(sizes, k), weights=weights)
    kinds = torch.tensor([[0.9, 0.1], [0.1, 0.9], [0.5, 0.5]]).log()
    selector.predictions = {i: kinds[i % 3].expand(4, 2).clone() for i in range(len(sizes))}
    selector.strata = selector._cluster(np.arange(len(sizes)))
    return selector


def test_one_client_of_each_stratum() -> None:
    sizes = [1] * 9
    for s in range(20):
        selector = lefl(sizes, 3)
        ids = selector.select(2, toy_clients(sizes, selector.needs), np.random.default_rng(s)).ids
        assert sorted(ids % 3) == [0, 1, 2]


def test_a_stratum_without_anybody_is_filled_up_from_the_others() -> None:
    selector = lefl([1] * 9, 3)
    clients = toy_clients([1] * 9, selector.needs, available=[0, 3, 6, 1])
    ids = selector.select(2, clients, np.random.default_rng(0)).ids
    assert 1 in ids
    assert len(ids) == 3


def test_weights_by_stratum_share_its_data() -> None:
    sizes = [1, 2, 3, 1, 2, 3]
    selector = lefl(sizes, 3, "strata")
    selection = selector.select(2, toy_clients(sizes, selector.needs), np.random.default_rng(0))
    assert selection.weights is not None
    expected = {0: 2 / 12, 1: 4 / 12, 2: 6 / 12}
    assert selection.weights == pytest.approx([expected[i % 3] for i in selection.ids])


def test_newcomers_are_asked_when_they_appear() -> None:
    selector, ledger = LEFL(toy_population([2] * 6, 2), weights="aggregator"), Ledger()
    for available, asked_now in (([0, 1, 2], 3), ([0, 1, 2], 0), ([0, 5], 1)):
        before = ledger.forward_samples
        clients = toy_clients([2] * 6, selector.needs, available=available, ledger=ledger)
        selector.select(1, clients, np.random.default_rng(0))
        assert ledger.forward_samples - before == 3 * asked_now


def test_two_clients_of_one_stratum_share_its_data() -> None:
    """Strata {0, 3} with 2 + 5 samples and {1, 2, 4} with 3 + 4 + 6; clients 0, 1, 2 chosen of 20 samples in all."""
    selector = LEFL(toy_population([2, 3, 4, 5, 6], 3), weights="strata")
    selector.strata = np.array([0, 1, 1, 0, 1])
    raw = np.array([7, 13 / 2, 13 / 2])
    assert selector._stratum_shares(np.array([0, 1, 2])) == pytest.approx(raw / raw.sum())
    assert selector._stratum_shares(np.array([1, 2])) == pytest.approx([0.5, 0.5])
    assert selector._stratum_shares(np.array([0])) == pytest.approx([1.0])


def test_strata_are_as_many_as_the_cohort_and_of_distances_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    tables: list[np.ndarray] = []

    def watched(distances: np.ndarray) -> np.ndarray:
        tables.append(distances)
        return ward_linkage(distances)

    monkeypatch.setattr(lefl_module, "ward_linkage", watched)
    selector = lefl([1] * 6, 3)
    assert len(np.unique(selector.strata)) == 3
    p = np.array([[0.9, 0.1], [0.1, 0.9], [0.5, 0.5]])
    both_ways = [[(a * np.log(a / b)).sum() + (b * np.log(b / a)).sum() for b in p] for a in p]
    assert tables[0][:3, :3] == pytest.approx(np.array(both_ways) / 2, abs=1e-6)


def test_only_weights_by_strata_are_the_selectors_own() -> None:
    sizes = [1] * 6
    for weights, given in (("aggregator", False), ("strata", True)):
        selector = lefl(sizes, 3, weights)
        selection = selector.select(2, toy_clients(sizes, selector.needs), np.random.default_rng(0))
        assert (selection.weights is not None) == given
