from typing import Any

import numpy as np
import pytest
import torch

from fedsim.clients.ledger import Ledger
from fedsim.selectors import lefl as lefl_module
from fedsim.selectors.lefl import LEFL
from fedsim.selectors.tools import ward_linkage
from tests.toys import picked, selection_of, toy_population


def lefl(sizes: list[int], k: int, weights: Any = "aggregator") -> LEFL:
    selector = LEFL(toy_population(sizes, k), weights=weights)
    kinds = torch.tensor([[0.9, 0.1], [0.1, 0.9], [0.5, 0.5]]).log()
    selector.predictions = {i: kinds[i % 3].expand(4, 2).clone() for i in range(len(sizes))}
    selector.strata = selector._cluster(np.arange(len(sizes)))
    return selector


def test_one_client_of_each_stratum_whose_data_may_weigh() -> None:
    sizes = [1, 2, 3] * 3
    for seed in range(20):
        assert sorted(i % 3 for i in picked(lefl(sizes, 3), 2, seed)) == [0, 1, 2]
    assert 1 in picked(lefl(sizes, 3), 2, available=[0, 3, 6, 1])  # filled up from others: strata 1 and 2 are one each
    assert len(picked(lefl(sizes, 3), 2, available=[0, 3, 6, 1])) == 3
    for weights, given in (("aggregator", False), ("strata", True)):
        selector = lefl(sizes, 3, weights)
        selection = selection_of(selector, 2)
        expected = pytest.approx([(1 + i % 3) / 6 for i in selection.ids])
        assert selection.weights == (expected if given else None)


def test_newcomers_are_asked_when_they_appear() -> None:
    selector, ledger = LEFL(toy_population([2] * 6, 2), weights="aggregator"), Ledger()
    for available, asked_now in (([0, 1, 2], 3), ([0, 1, 2], 0), ([0, 5], 1)):
        before = ledger.forward_samples
        picked(selector, available=available, ledger=ledger)
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
