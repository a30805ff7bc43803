"""FLIPS: examples by hand, and its clusters by the definitions of what they minimise."""

import itertools

import numpy as np
import pytest

from fedsim.selectors.flips import FLIPS, label_clusters
from tests.test_sampling_selectors import clients_with
from tests.toys import toy_population

# Shares of class 0: 1.0, 0.9, 0.1 and 0.0.
FOUR = np.array([[10, 0], [9, 1], [1, 9], [0, 10]])


def partition_of(labels: np.ndarray) -> set[frozenset[int]]:
    return {frozenset(np.flatnonzero(labels == c).tolist()) for c in np.unique(labels)}


def davies_bouldin(points: np.ndarray, labels: np.ndarray) -> float:
    """The index by its definition."""
    members = [points[labels == c] for c in np.unique(labels)]
    centres = [m.mean(0) for m in members]
    spreads = [np.linalg.norm(m - c, axis=1).mean() for m, c in zip(members, centres, strict=True)]
    worst = []
    for a in range(len(members)):
        ratios = [
            (spreads[a] + spreads[b]) / np.linalg.norm(centres[a] - centres[b])
            for b in range(len(members))
            if b != a
        ]
        worst.append(max(ratios))
    return float(np.mean(worst))


def test_flips_clusters_by_shares_of_labels_not_by_sizes() -> None:
    counts = np.array([[1, 0], [90, 10], [10, 90], [0, 1]])
    labels = label_clusters(counts, 2, np.random.default_rng(0))
    assert partition_of(labels) == {frozenset({0, 1}), frozenset({2, 3})}


def test_flips_takes_the_number_of_clusters_of_lowest_davies_bouldin_index() -> None:
    """k = 2 has (2 * 0.0707) / 1.2728 = 0.1111, and k = 3 with two single clients 0.0568."""
    shares = FOUR / 10
    assert davies_bouldin(shares, np.array([0, 0, 1, 1])) == pytest.approx(1 / 9)
    labels = label_clusters(FOUR, None, np.random.default_rng(0))
    assert davies_bouldin(shares, labels) == pytest.approx(0.0568, abs=1e-4)
    assert sorted(np.bincount(labels)) == [1, 1, 2]


def test_flips_clusters_are_those_of_least_squares() -> None:
    """All divisions of seven clients into three clusters."""
    counts = np.random.default_rng(3).integers(1, 30, (7, 3))
    shares = counts / counts.sum(1, keepdims=True)

    def squares(labels: np.ndarray) -> float:
        parts = [shares[labels == c] for c in np.unique(labels)]
        return float(sum(((part - part.mean(0)) ** 2).sum() for part in parts))

    least = min(squares(np.array(labels)) for labels in itertools.product(range(3), repeat=7))
    labels = label_clusters(counts, 3, np.random.default_rng(0))
    assert squares(labels) == pytest.approx(least)


@pytest.mark.parametrize("num_clusters", [None, 5])
def test_flips_puts_equal_clients_into_one_cluster(num_clusters: int | None) -> None:
    counts = np.array([[1, 2], [2, 4], [5, 10]])
    assert label_clusters(counts, num_clusters, np.random.default_rng(0)).tolist() == [0, 0, 0]


def test_flips_selects_equally_often_from_each_cluster() -> None:
    """Clusters {0, 1, 2, 3} and {4, 5}, K = 3: after two rounds each cluster has been selected
    three times, and after four rounds six times."""
    labels = [[0]] * 4 + [[1]] * 2
    for seed in range(5):
        selector = FLIPS(toy_population([1] * 6, 3), num_clusters=2)
        rng = np.random.default_rng(seed)
        for round in range(1, 5):
            selector.select(round, clients_with(labels), rng)
            pulls = selector.pulls.tolist()
            if round == 2:
                assert sorted(pulls[:4]) == [0, 1, 1, 1]
                assert sorted(pulls[4:]) == [1, 2]
        assert sorted(pulls[:4]) == [1, 1, 2, 2]
        assert pulls[4:] == [3, 3]


def test_flips_goes_on_in_other_clusters_if_one_has_no_client_left() -> None:
    labels = [[0]] * 4 + [[1]] * 2
    selector = FLIPS(toy_population([1] * 6, 3), num_clusters=2)
    rng = np.random.default_rng(0)
    selector.select(1, clients_with(labels), rng)
    assert selector.select(2, clients_with(labels, available=[0, 1, 2]), rng).ids.tolist() == [
        *range(3)
    ]
