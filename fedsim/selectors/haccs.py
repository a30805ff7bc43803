"""HACCS: the fastest clients of clusters with similar labels, more of fast clusters of high loss.

Wolfrath, Sreekumar, Kumar, Wang and Chandra, "HACCS: Heterogeneity-Aware Clustered Client Selection
for Accelerated Federated Learning", IPDPS 2022 (doi 10.1109/IPDPS53621.2022.00100). Code:
NS-PhD-Research/HACCS, `common/summary/` and `server/scheduler/`.

The selection represents label distributions instead of single clients. If a client is away, another
one of its cluster stands in for it.

1. Each client sends its label counts once. Counts of labels that it has carry Laplace noise of
   scale 1 / epsilon. If the sum is negative, it is replaced by 1. The server divides the counts by
   their sum.
2. OPTICS clusters the clients by the distances of these distributions. A client outside of all
   clusters gets one of its own.
3. After each round all available clients report the accuracy of the new model on their data. Their
   loss is 1 - accuracy. Cluster c gets the weight

       theta_c = rho (1 - latency_c / max latency) + (1 - rho) loss_c / sum loss

   latency_c is the mean latency, and loss_c the mean squared loss, of its available clients.
4. Of each cluster the floor(K theta_c / sum theta) fastest clients are selected.
5. Until there are K clients, a cluster is drawn in proportion to theta, and its fastest client that
   is left is selected.

Of the paper only the abstract could be read. So this docstring cites no equation, and the formulas,
epsilon and rho are those of the code. `distance: euclidean` is what the code runs for label
distributions: clusters are those of DBSCAN at a distance of 0.25. `hellinger` stands there as a
comment, with the default extraction of OPTICS.

Deviations: The code divides the sums of latencies and losses by the numbers of all clients of a
cluster, so that absent clients lower them. It measures losses on test data. It has no losses before
the first round; here they are 1. The latency is the time that a client reports for download,
training and upload. The code averages models without sizes; here the aggregator decides
(`aggregator.weighting=uniform`). The code also has summaries P(X | y) of features, which are left
out.

fedsim's decisions: If all losses or all latencies are 0, their term is left out. If all weights of
clusters with clients are 0, these clusters are equally likely. With rho = 0 clients do not report
latencies, and their order is random. A client joins the clusters in the first round in which it is
available, and all clients are then clustered anew. Accuracies that are not finite count as 1. Equal
clients come in random order.
"""

from typing import Literal

import numpy as np

from fedsim.selectors.base import (
    Clients,
    Floats,
    Generator,
    Ids,
    Ints,
    Positions,
    Positive,
    Selection,
    Selector,
    Share,
    Signal,
    ascending,
    floor,
    log,
    parameters,
)
from fedsim.selectors.tools import collect_label_counts

MAX_DISTANCE = 0.25
"""Distance up to which clients are neighbours, with `distance: euclidean`."""


@parameters
class HACCS(Selector):
    """Selects the fastest clients of each cluster, in numbers by the cluster's loss and speed."""

    pair_bytes = 24  # distances in two forms, and scikit-learn's copy
    start_up_rounds = 1
    state = ("counts", "summaries", "labels", "latencies")

    rho: Share  # weight of latencies against losses; 0: no latencies
    epsilon: Positive | None  # scale 1 / epsilon of the noise in label counts; None: no noise
    distance: Literal["euclidean", "hellinger"]  # of label distributions

    def __post_init__(self) -> None:
        asked = {Signal.LABEL_COUNTS, Signal.ACCURACIES}
        self.needs = frozenset(asked | {Signal.RESOURCES} if self.rho > 0 else asked)
        num_clients = self.population.num_clients
        self.counts = np.empty((num_clients, 0), np.int64)  # label counts [N, C]
        self.summaries = np.empty((num_clients, 0))  # label distributions with noise [N, C]
        self.labels = np.full(num_clients, -1)  # clusters of the clients [N], -1: not reported yet
        self.latencies = np.zeros(num_clients)  # seconds [N]

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        available = clients.available
        # 1 and 2. Clusters. They are only made anew if a client has reported for the first time.
        new = available[self.labels[available] < 0]
        if len(new):
            self._join(new, clients, rng)
        # 3. Losses, and weights of clusters
        losses = np.ones(len(available))
        if not clients.in_first_round:
            losses = 1 - np.nan_to_num(clients.accuracies(available), nan=1.0)
        labels, latencies = self.labels[available], self.latencies[available]
        weights = cluster_weights(labels, losses, latencies, self.rho)
        # 4 and 5. Picks
        shuffled = rng.permutation(len(available))
        by_speed = shuffled[np.argsort(latencies[shuffled], kind="stable")]
        picks = pick_fastest(labels, by_speed, weights, self.cohort_size(clients), rng)
        return Selection(ascending(available[picks]))

    def _join(self, new: Ids, clients: Clients, rng: Generator) -> None:
        """Ask the clients `new` for their label counts and latencies, and cluster all anew."""
        # scikit-learn takes long to import.
        from fedsim.selectors.optics import density_clusters, label_distances

        self.counts = collect_label_counts(self.counts, clients)
        if not self.summaries.shape[1]:
            self.summaries = np.zeros(self.counts.shape)
        self.summaries[new] = noisy_shares(self.counts[new], self.epsilon, rng)
        if self.rho > 0:
            seconds = clients.resources(new)
            self.latencies[new] = seconds.download + seconds.training + seconds.upload
        known = np.flatnonzero((self.counts >= 0).any(1))
        max_distance = MAX_DISTANCE if self.distance == "euclidean" else None
        between = label_distances(self.summaries[known], self.distance)
        self.labels[known] = density_clusters(between, max_distance)


def noisy_shares(counts: Ints, epsilon: float | None, rng: Generator) -> Floats:
    """Return label distributions [n, C] from `counts` [n, C] with Laplace noise of scale 1 /
    `epsilon`."""
    noisy = counts.astype(np.float64)
    if epsilon is not None:
        centred = rng.random(counts.shape) - 0.5
        # the quantile function of Laplace's law
        noise = -np.sign(centred) * log(1 - 2 * np.abs(centred)) / epsilon
        noisy = np.where(counts > 0, noisy + noise, 0.0)
        noisy = np.where(noisy < 0, np.minimum(counts, 1), noisy)
    return noisy / noisy.sum(1, keepdims=True)


def cluster_weights(labels: Ints, losses: Floats, latencies: Floats, rho: float) -> Floats:
    """Return theta [M] of the clusters 0..M-1, and 0 for a cluster without clients here.

    `labels`, `losses` and `latencies` [n] are those of n clients.
    """
    sizes = np.bincount(labels)
    counts = np.maximum(sizes, 1)
    mean_losses = np.bincount(labels, losses**2) / counts
    mean_latencies = np.bincount(labels, latencies) / counts
    weights = np.zeros(len(sizes))
    if mean_latencies.max() > 0:
        weights += rho * (1 - mean_latencies / mean_latencies.max())
    if mean_losses.sum() > 0:
        weights += (1 - rho) * mean_losses / mean_losses.sum()
    return np.where(sizes > 0, weights, 0.0)


def pick_fastest(
    labels: Ints, by_speed: Positions, weights: Floats, count: int, rng: Generator
) -> Positions:
    """Return the positions of `count` of n clients.

    `labels` [n] are their clusters 0..M-1, `by_speed` [n] their positions, the fastest first, and
    `weights` [M] are theta.
    """
    clusters = np.unique(labels)
    if not weights.sum():
        weights = np.ones(len(weights))
    expected = count * weights[clusters] / weights[clusters].sum()
    waiting: dict[int, list[int]] = {}
    picks: list[int] = []
    for cluster, places in zip(clusters.tolist(), expected.tolist(), strict=True):
        members = by_speed[labels[by_speed] == cluster].tolist()
        num_places = floor(places)
        picks += members[:num_places]
        if members[num_places:]:
            waiting[cluster] = members[num_places:]
    while len(picks) < count:
        left = list(waiting)
        chances = weights[left]
        if not chances.sum():
            chances = np.ones(len(left))
        cluster = int(rng.choice(left, p=chances / chances.sum()))
        picks.append(waiting[cluster].pop(0))
        if not waiting[cluster]:
            del waiting[cluster]
    return np.array(picks, dtype=np.int64)
