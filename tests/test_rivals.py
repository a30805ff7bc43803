"""FLIPS and FedLECC: examples by hand, and clusters by the definitions of what they minimise."""

import itertools
import sys

import numpy as np
import pytest

from fedsim.clients.clients import Clients
from fedsim.clients.context import Signal
from fedsim.clients.ledger import Ledger
from fedsim.selectors.fedlecc import FedLECC, pick_by_loss
from fedsim.selectors.flips import FLIPS, label_clusters
from fedsim.selectors.optics import density_clusters, label_distances
from tests.toys import ToyEngine, shipped, toy_clients, toy_population

ALL_SIGNALS = frozenset(Signal)


def clients_with(
    labels: list[list[int]],
    available: list[int] | None = None,
    ledger: Ledger | None = None,
    round: int = 1,
) -> Clients:
    """Return clients with these labels, who answer every request."""
    sizes = [len(of_client) for of_client in labels]
    engine = ToyEngine(sizes)
    engine.data.y[:] = engine.data.y.new_tensor(sum(labels, []))
    return toy_clients(
        sizes, ALL_SIGNALS, engine=engine, available=available, ledger=ledger, round=round
    )


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


def test_flips_finds_three_groups_of_clients() -> None:
    """Up to ten clusters would be possible. Three have the lowest index."""
    counts = np.array([[90 - k, k, 10] for k in range(5)] + [[10, 90 - k, k] for k in range(5)])
    counts = np.concatenate([counts, [[k, 10, 90 - k] for k in range(5)]])
    labels = label_clusters(counts, None, np.random.default_rng(0))
    groups = {frozenset(range(start, start + 5)) for start in (0, 5, 10)}
    assert partition_of(labels) == groups


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


# --- FedLECC ------------------------------------------------------------------------------------


def test_hellinger_distances_by_hand() -> None:
    """sqrt(1 - sum sqrt(p q)): disjoint labels 1, equal labels 0, and (1/2, 1/2) to (1, 0) 0.5412."""
    distances = label_distances(np.array([[1, 0], [0, 1], [0.5, 0.5], [1, 0]]), "hellinger")
    half = np.sqrt(1 - np.sqrt(0.5))
    expected = [[0, 1, half, 0], [1, 0, half, 1], [half, half, 0, half], [0, 1, half, 0]]
    assert distances == pytest.approx(np.array(expected))


def test_clients_outside_of_clusters_get_one_of_their_own() -> None:
    """Two dense groups, and a client between them."""
    points = np.array([0.0, 0.01, 0.02, 2.5, 5.0, 5.01, 5.02])
    labels = density_clusters(np.abs(points[:, None] - points))
    assert partition_of(labels) == {frozenset({0, 1, 2}), frozenset({3}), frozenset({4, 5, 6})}
    assert sorted(set(labels.tolist())) == [0, 1, 2]
    assert density_clusters(np.zeros((1, 1))).tolist() == [0]


# Clusters A: 2.0, 1.0 (mean 1.5), B: 1.8, 1.6 (1.7), C: 0.5.
LABELS = np.array([0, 0, 1, 1, 2])
LOSSES = np.array([2.0, 1.0, 1.8, 1.6, 0.5])


@pytest.mark.parametrize(
    ("num_clusters", "count", "expected"),
    [
        (2, 3, [2, 3, 0]),  # z = 2: both of B, one of A
        (1, 2, [2, 3]),  # only B, although 2.0 is the highest loss
        (None, 3, [2, 3, 0]),  # J = 2 of 3 clusters
        (9, 3, [2, 0, 4]),  # J = 3, z = 1
        (2, 2, [2, 0]),  # z = 1
        (1, 3, [2, 3, 0]),  # z = 3: B has two, and A follows
        (3, 4, [2, 3, 0, 1]),  # z = 2
        (3, 5, [2, 3, 0, 1, 4]),
    ],
)
def test_fedlecc_picks_by_hand(num_clusters: int | None, count: int, expected: list[int]) -> None:
    picks = pick_by_loss(LABELS, LOSSES, num_clusters, count, np.random.default_rng(0))
    assert picks.tolist() == expected


def test_fedlecc_fills_up_by_the_highest_loss() -> None:
    """J = 2, z = 2: three of A are left after two of A and the only one of B."""
    labels, losses = np.array([0, 0, 0, 0, 1]), np.array([9.0, 8.0, 6.0, 7.0, 1.0])
    picks = pick_by_loss(labels, losses, 2, 4, np.random.default_rng(0))
    assert picks.tolist() == [0, 1, 4, 3]


def test_fedlecc_ranks_losses_that_are_not_finite_last() -> None:
    labels, losses = np.array([0, 0, 1, 2]), np.array([np.nan, 3.0, 2.0, np.nan])
    picks = pick_by_loss(labels, losses, 3, 4, np.random.default_rng(0))
    assert picks.tolist() == [1, 0, 2, 3]


def test_fedlecc_clusters_by_labels_and_asks_for_losses_in_each_round() -> None:
    """Clients 0 to 2 have class 0, and 3 to 5 class 1. With J = 1 one of the two groups is
    selected."""
    labels = [[0]] * 3 + [[1]] * 3
    ledger = Ledger()
    selector = FedLECC(toy_population([1] * 6, 3), num_clusters=1)
    for round in (1, 2):
        clients = clients_with(labels, ledger=ledger)
        chosen = selector.select(round, clients, np.random.default_rng(0)).ids.tolist()
        assert chosen in ([0, 1, 2], [3, 4, 5])
        assert ledger.bytes_up == 6 * 3 * 4 + round * 6 * 4


@pytest.mark.parametrize(
    ("selector", "module"),
    [
        ("flips", "sklearn.cluster"),
        ("fedlecc", "fedsim.selectors.optics"),
        ("haccs", "fedsim.selectors.optics"),
    ],
)
def test_modules_that_take_long_are_imported_before_the_first_round(
    selector: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of an import would count as the selector's."""
    monkeypatch.delitem(sys.modules, module, raising=False)
    shipped(selector, toy_population([1, 1, 1], 1))
    assert module in sys.modules
