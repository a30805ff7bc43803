"""HACCS: weights, picks and noise by hand, and requests to clients."""

import numpy as np
import pytest
import scipy.stats

from fedsim.clients.ledger import Ledger
from fedsim.selectors.haccs import HACCS, cluster_weights, noisy_shares, pick_fastest
from fedsim.selectors.optics import density_clusters, label_distances
from tests.test_rivals import clients_with, partition_of
from tests.toys import toy_population

# Clients a, b (cluster 0), c, d (1) and e (2).
LABELS = np.array([0, 0, 1, 1, 2])
LOSSES = np.array([0.9, 0.7, 0.5, 0.5, 0.2])
LATENCIES = np.array([1.0, 3.0, 4.0, 4.0, 1.0])
BY_SPEED = np.array([0, 4, 1, 2, 3])


def test_weights_of_clusters_by_hand() -> None:
    """Mean squared losses 0.65, 0.25, 0.04, and mean latencies 2, 4, 1."""
    by_latency = np.array([1 - 2 / 4, 0, 1 - 1 / 4])
    by_loss = np.array([0.65, 0.25, 0.04]) / 0.94
    for rho in (0.0, 0.5, 1.0):
        weights = cluster_weights(LABELS, LOSSES, LATENCIES, rho)
        assert weights == pytest.approx(rho * by_latency + (1 - rho) * by_loss)
    assert cluster_weights(LABELS, LOSSES, LATENCIES, 0.5) == pytest.approx(
        np.array([0.5957, 0.1330, 0.3963]), abs=1e-4
    )


def test_terms_without_a_scale_are_left_out_of_the_weights() -> None:
    zero = np.zeros(5)
    assert cluster_weights(LABELS, LOSSES, zero, 0.5).sum() == pytest.approx(0.5)
    assert cluster_weights(LABELS, zero, zero, 0.5).tolist() == [0, 0, 0]
    assert cluster_weights(LABELS[3:], LOSSES[3:], LATENCIES[3:], 0.5)[0] == 0  # nobody is there


def test_the_fastest_clients_of_each_cluster_by_hand() -> None:
    """K = 4: shares 0.5296, 0.1182 and 0.3522 give 2, 0 and 1 places. After that only cluster 1 has
    clients."""
    weights = cluster_weights(LABELS, LOSSES, LATENCIES, 0.5)
    for seed in range(5):
        picks = pick_fastest(LABELS, BY_SPEED, weights, 4, np.random.default_rng(seed))
        assert picks.tolist() == [0, 1, 4, 2]


def test_clusters_of_the_remaining_places_are_drawn_by_their_weights() -> None:
    """K = 1: no cluster has a whole place."""
    weights = np.array([0.5, 0.2, 0.3])
    counts = np.zeros(5)
    rng = np.random.default_rng(0)
    for _ in range(2000):
        counts[pick_fastest(LABELS, BY_SPEED, weights, 1, rng)] += 1
    assert counts[[0, 2, 4]] / 2000 == pytest.approx(weights, abs=0.04)
    assert counts[[1, 3]].tolist() == [0, 0]


def test_clusters_of_weight_0_are_drawn_if_no_other_has_a_client_left() -> None:
    weights = np.array([1.0, 0.0, 0.0])
    picks = pick_fastest(LABELS, BY_SPEED, weights, 5, np.random.default_rng(0))
    assert sorted(picks.tolist()) == [0, 1, 2, 3, 4]
    drawn = [
        pick_fastest(LABELS, BY_SPEED, 0 * weights, 1, np.random.default_rng(s))[0]
        for s in range(50)
    ]
    assert {int(position) for position in drawn} == {0, 2, 4}


def test_noise_of_label_counts_follows_laplaces_law() -> None:
    """Counts so large that none becomes negative. Absent labels get no noise."""
    counts = np.full((1, 2001), 10**6)
    counts[0, 0] = 0
    shares = noisy_shares(counts, 0.1, np.random.default_rng(0))
    assert shares[0, 0] == 0
    assert shares.sum() == pytest.approx(1)
    noise = shares[0, 1:] / shares[0, 1:].mean() * 10**6 - 10**6
    assert scipy.stats.kstest(noise, scipy.stats.laplace(scale=10).cdf).pvalue > 0.01


def test_negative_counts_become_1_and_without_epsilon_there_is_no_noise() -> None:
    counts = np.array([[1, 1, 0]])
    rng = np.random.default_rng(0)
    both_negative = 0
    for _ in range(50):
        shares = noisy_shares(counts, 1e-6, rng)
        assert (shares >= 0).all()
        both_negative += shares.tolist() == [[0.5, 0.5, 0]]
    assert both_negative > 0
    assert noisy_shares(np.array([[1, 3, 0]]), None, rng).tolist() == [[0.25, 0.75, 0]]


@pytest.mark.parametrize(("epsilon", "scale"), [(0.1, "10"), (3.0, "0.333333"), (None, None)])
def test_the_warning_names_the_noise_of_label_counts(
    epsilon: float | None, scale: str | None
) -> None:
    selector = HACCS(toy_population([1] * 6, 2), rho=0.0, epsilon=epsilon, distance="euclidean")
    expected = "every client tells the server how many samples of each class it holds"
    if scale is not None:
        expected += f"; counts above 0 carry Laplace noise of scale {scale}"
    assert selector.warning == expected


def test_clients_within_a_distance_form_clusters() -> None:
    """Euclidean distances 0.2828 between (1, 0) and (0.8, 0.2), and 0.1414 between the next two."""
    shares = np.array([[1, 0], [0.8, 0.2], [0, 1], [0.1, 0.9], [0.5, 0.5]])
    distances = label_distances(shares, "euclidean")
    assert distances[0, 1] == pytest.approx(0.2 * np.sqrt(2))
    assert partition_of(density_clusters(distances, 0.25)) == {
        frozenset({0}),
        frozenset({1}),
        frozenset({2, 3}),
        frozenset({4}),
    }
    assert partition_of(density_clusters(distances, 0.3)) == {
        frozenset({0, 1}),
        frozenset({2, 3}),
        frozenset({4}),
    }


def test_clients_report_accuracies_after_the_first_round() -> None:
    labels = [[0]] * 3 + [[1]] * 3
    ledger = Ledger()
    selector = HACCS(toy_population([1] * 6, 2), rho=0.0, epsilon=None, distance="euclidean")
    for round in (1, 2, 3):
        clients = clients_with(labels, ledger=ledger, round=round)
        chosen = selector.select(round, clients, np.random.default_rng(round)).ids
        assert len(chosen) == 2
        if round == 1:
            assert (chosen < 3).sum() == 1  # both clusters have the loss 1, and so one place
        assert ledger.bytes_up == 6 * 3 * 4 + (round - 1) * 6 * 4
    assert partition_of(selector.clusters) == {frozenset({0, 1, 2}), frozenset({3, 4, 5})}
