"""FL-DP3S: draws of a k-DPP against determinants of all subsets, and its kernel."""

import itertools
from collections import Counter

import numpy as np
import pytest

from fedsim.clients.ledger import Ledger
from fedsim.selectors.fl_dp3s import FLDP3S, draw_k_dpp
from tests.toys import picked, toy_population


def draw(kernel: np.ndarray, count: int, seed: int) -> list[int]:
    return sorted(draw_k_dpp(kernel, count, np.random.default_rng(seed)).tolist())


@pytest.mark.parametrize("count", [1, 3, 5])
def test_subsets_are_drawn_in_proportion_to_their_determinants(count: int) -> None:
    """Within four standard deviations of a share, over 3000 draws."""
    rows = np.random.default_rng(3).normal(size=(6, 6))
    kernel = rows @ rows.T
    subsets = list(itertools.combinations(range(6), count))
    determinants = np.array([np.linalg.det(kernel[np.ix_(s, s)]) for s in subsets])
    expected = determinants / determinants.sum()
    counts = Counter(tuple(draw(kernel, count, seed)) for seed in range(3000))
    shares = np.array([counts[subset] for subset in subsets]) / 3000
    deviations = np.sqrt(expected * (1 - expected) / 3000)
    assert (np.abs(shares - expected) <= 4 * deviations).all()
    assert np.abs(expected - 1 / len(subsets)).max() > 0.1  # far from a uniform draw


def test_equal_clients_fill_up_if_too_few_are_different() -> None:
    """Client 0 differs from the other five, which are equal."""
    kernel = np.ones((6, 6))
    kernel[0, 1:] = kernel[1:, 0] = 0
    draws = [draw(kernel, 3, seed) for seed in range(50)]
    assert all(len(set(drawn)) == 3 and 0 in drawn for drawn in draws)
    assert set(sum(draws, [])) == set(range(6))


def test_products_of_many_eigenvalues_do_not_overflow() -> None:
    """The number of subsets, C(1200, 500), is beyond float64."""
    assert len(set(draw(np.eye(1200) + 1, 500, 0))) == 500


def test_profiles_are_asked_for_once() -> None:
    """A profile has two numbers of 4 bytes."""
    selector = FLDP3S(toy_population([1] * 4, 2))
    sent = []
    for t, available in enumerate(([0, 2], [0, 1, 2, 3], [1, 3]), 1):
        ledger = Ledger()
        picked(selector, t, available=available, ledger=ledger)
        sent.append(ledger.bytes_up)
    assert sent == [2 * 8, 2 * 8, 0]


def test_the_kernel_by_hand() -> None:
    """Client k's gradient is (k + 1, -k^2 / 7). Clients 0 and 3 are the farthest apart. If only two
    clients are known, their similarity is 0."""
    selector = FLDP3S(toy_population([1] * 4, 2))
    picked(selector, 1, available=[0, 2])
    np.testing.assert_allclose(selector.kernel, np.eye(2))
    picked(selector, 2)
    profiles = np.array([[k + 1, -k * k / 7] for k in range(4)])
    distances = np.linalg.norm(profiles[:, None] - profiles[None], axis=2)
    similarity = 1 - distances / distances[0, 3]
    np.testing.assert_allclose(selector.kernel, similarity @ similarity, rtol=1e-6)
