"""FL-DP3S: draws of a k-DPP against determinants of all subsets, and its kernel."""

import itertools

import numpy as np
import pytest

from fedsim.clients.ledger import Ledger
from fedsim.selectors.fl_dp3s import FLDP3S, draw_k_dpp
from tests.toys import picked, toy_population


@pytest.mark.parametrize("count", [1, 3, 5])
def test_subsets_are_drawn_by_their_determinants(count: int) -> None:
    rows, num = np.random.default_rng(3).normal(size=(6, 6)), 3000
    kernel = rows @ rows.T
    subsets = list(itertools.combinations(range(6), count))
    weights = np.array([np.linalg.det(kernel[np.ix_(s, s)]) for s in subsets])
    drawn = [
        tuple(sorted(draw_k_dpp(kernel, count, np.random.default_rng(seed)))) for seed in range(num)
    ]
    found, expected = np.array([drawn.count(s) for s in subsets]) / num, weights / weights.sum()
    assert (np.abs(found - expected) <= 4 * np.sqrt(expected * (1 - expected) / num)).all()
    assert np.abs(expected - 1 / len(subsets)).max() > 0.1  # far from a uniform draw


def test_alike_clients_fill_up_where_there_are_too_few_unlike_ones() -> None:
    kernel = np.ones((6, 6))  # five of them, and one unlike them
    kernel[0, 1:] = kernel[1:, 0] = 0
    draws = [set(draw_k_dpp(kernel, 3, np.random.default_rng(seed)).tolist()) for seed in range(50)]
    assert all(len(drawn) == 3 and 0 in drawn for drawn in draws)
    assert set.union(*draws) == set(range(6))
    large = np.eye(1200) + 1
    assert (
        len(set(draw_k_dpp(large, 500, np.random.default_rng(0)).tolist())) == 500
    )  # C(1200, 500) is no float64


def test_the_kernel_by_hand_and_profiles_are_asked_for_once() -> None:
    """Client k's gradient is (m + 1, -m^2 / 7) with m the mean of its sample's positions: 0, 1, 2,
    3."""
    selector, spent = FLDP3S(toy_population([1] * 4, 2)), [Ledger() for _ in range(3)]
    picked(selector, 1, available=[0, 2], ledger=spent[0])
    np.testing.assert_allclose(selector.kernel, np.eye(2))
    picked(selector, 2, available=[0, 1, 2, 3], ledger=spent[1])
    picked(selector, 3, available=[1, 3], ledger=spent[2])
    assert [ledger.bytes_up for ledger in spent] == [2 * 8, 2 * 8, 0]
    profiles = [np.array([m + 1, -m * m / 7]) for m in range(4)]
    similarity = np.array(
        [[1 - np.hypot(*(f - g)) / np.hypot(3, 9 / 7) for f in profiles] for g in profiles]
    )
    np.testing.assert_allclose(selector.kernel, similarity @ similarity, rtol=1e-6)
