"""HACCS: select the fastest clients of each cluster of clients whose labels are distributed alike.

Clusters of low latency and high loss get more places.

Wolfrath, Sreekumar, Kumar, Wang and Chandra, "HACCS: Heterogeneity-Aware Clustered Client Selection
for Accelerated Federated Learning", IPDPS 2022 (doi 10.1109/IPDPS53621.2022.00100). Code:
NS-PhD-Research/HACCS, `common/summary/` and `server/scheduler/`.

1. Each client sends its label counts once. Counts above 0 carry Laplace noise of scale 1 / epsilon,
   and a count that becomes negative is replaced by 1. The server divides each client's counts by
   their total.
2. The server clusters the clients by the distances of these label distributions (OPTICS). A client
   outside of all clusters gets one of its own.
3. After the first round, all available clients report the accuracy of the model on their training
   data. Their loss is 1 - accuracy. Cluster c gets the weight

       theta_c = rho (1 - latency_c / max latency) + (1 - rho) loss_c / sum loss

   where latency_c is the mean latency of its available clients, and loss_c their mean squared loss.
   The maximum and the sum are over clusters.
4. Of each cluster, the floor(K theta_c / sum theta) fastest clients are selected.
5. Until there are K clients, a cluster that has clients left is drawn in proportion to theta. Its
   fastest client that is left is selected.

Sources: Only the abstract of the paper could be read, so this docstring cites no equation. The
formulas and the defaults of epsilon and rho are those of the authors' code. For label
distributions, their code clusters by Euclidean distances. It extracts clusters from OPTICS as
DBSCAN does, up to a distance of 0.25 (`distance: euclidean`). A line that is commented out there
has Hellinger distances with the default extraction (`distance: hellinger`).

Deviations from the authors' code:

- The code divides a cluster's latencies and losses by the number of all its clients. Here absent
  clients do not count.
- The code measures losses on test data. Here clients use their training data, and in the first
  round, before there are losses, all losses are 1.
- The code averages models without sizes. Here the aggregator decides
  (`aggregator.weighting=uniform`).
- The code also has summaries P(X | y) of features. They are left out.

fedsim's decisions:

- If all losses or all latencies are 0, their term is left out. If the weights of all clusters with
  clients are 0, these clusters are equally likely.
- A client's latency is the sum of its seconds for download, training and upload. It reports them
  once. With rho = 0 it does not, and the order within a cluster is random.
- A client reports in the first round in which it is available. All clients that have reported are
  then clustered anew.
- Accuracies that are not finite count as 1. Clients of equal latency come in random order.
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
from fedsim.selectors.label_counts import collect_label_counts

MAX_DISTANCE = 0.25
"""Distance up to which clients are neighbours, with `distance: euclidean`."""


@parameters
class HACCS(Selector):
    """Selects the fastest clients of each cluster, in numbers by the cluster's loss and speed."""

    pair_bytes = 24  # distances as pairs and as a matrix, and scikit-learn's copy
    start_up_rounds = 1  # in most runs, all clients send their label counts in the first round
    state = ("label_counts", "label_shares", "clusters", "latencies")

    rho: Share  # weight of latencies against losses; 0: no latencies
    epsilon: Positive | None  # scale 1 / epsilon of the noise in label counts; None: no noise
    distance: Literal["euclidean", "hellinger"]  # of label distributions

    def __post_init__(self) -> None:
        import fedsim.selectors.optics  # noqa: F401 - takes long: no round waits for it

        always = {Signal.LABEL_COUNTS, Signal.ACCURACIES}
        with_latencies = always | {Signal.RESOURCES}
        self.needs = frozenset(with_latencies if self.rho > 0 else always)
        num_clients = self.population.num_clients
        self.label_counts = np.empty((num_clients, 0), np.int64)  # without noise [N, C]
        self.label_shares = np.empty((num_clients, 0))  # label distributions with noise [N, C]
        self.clusters = np.full(num_clients, -1)  # cluster of each client [N]; -1: not reported yet
        self.latencies = np.zeros(num_clients)  # seconds [N]

    @property
    def warning(self) -> str | None:
        text = super().warning
        if self.epsilon is None:
            return text
        return f"{text}; counts above 0 carry Laplace noise of scale {1 / self.epsilon:g}"

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        available = clients.available
        # 1 and 2. Clusters: they change only if a client reports for the first time.
        new = available[self.clusters[available] < 0]
        if len(new):
            self._add_to_clusters(new, clients, rng)
        # 3. Losses, and weights of clusters
        losses = np.ones(len(available))
        if not clients.in_first_round:
            losses = 1 - np.nan_to_num(clients.accuracies(available), nan=1.0)
        clusters, latencies = self.clusters[available], self.latencies[available]
        weights = cluster_weights(clusters, losses, latencies, self.rho)
        # 4 and 5. The cohort. A stable sort after a shuffle leaves equal clients in random order.
        shuffled = rng.permutation(len(available))
        by_speed = shuffled[np.argsort(latencies[shuffled], kind="stable")]
        picks = pick_fastest(clusters, by_speed, weights, self.cohort_size(clients), rng)
        return Selection(ascending(available[picks]))

    def _add_to_clusters(self, new: Ids, clients: Clients, rng: Generator) -> None:
        """Ask the clients `new` for their label counts and latencies. Cluster all that have
        reported."""
        from fedsim.selectors.optics import density_clusters, label_distances

        self.label_counts = collect_label_counts(self.label_counts, clients)
        if not self.label_shares.shape[1]:  # the number of classes was not known before
            self.label_shares = np.zeros(self.label_counts.shape)
        self.label_shares[new] = noisy_shares(self.label_counts[new], self.epsilon, rng)
        if self.rho > 0:
            seconds = clients.resources(new)
            self.latencies[new] = seconds.download + seconds.training + seconds.upload
        reported = np.flatnonzero((self.label_counts >= 0).any(1))
        distances = label_distances(self.label_shares[reported], self.distance)
        max_distance = MAX_DISTANCE if self.distance == "euclidean" else None
        self.clusters[reported] = density_clusters(distances, max_distance)


def noisy_shares(label_counts: Ints, epsilon: float | None, rng: Generator) -> Floats:
    """Return label distributions [n, C] from `label_counts` [n, C] with Laplace noise of scale 1 /
    `epsilon`. None: without noise."""
    noisy = label_counts.astype(np.float64)
    if epsilon is not None:
        centred = rng.random(label_counts.shape) - 0.5
        # the quantile function of Laplace's law
        noise = -np.sign(centred) * log(1 - 2 * np.abs(centred)) / epsilon
        noisy = np.where(label_counts > 0, noisy + noise, 0.0)
        noisy = np.where(noisy < 0, 1.0, noisy)
    return noisy / noisy.sum(1, keepdims=True)


def cluster_weights(clusters: Ints, losses: Floats, latencies: Floats, rho: float) -> Floats:
    """Return theta [M] of the clusters 0..M-1. It is 0 for a cluster without clients here.

    `clusters`, `losses` and `latencies` [n] are those of n clients.
    """
    sizes = np.bincount(clusters)
    divisors = np.maximum(sizes, 1)
    mean_squared_losses = np.bincount(clusters, losses**2) / divisors
    mean_latencies = np.bincount(clusters, latencies) / divisors
    weights = np.zeros(len(sizes))
    if mean_latencies.max() > 0:
        weights += rho * (1 - mean_latencies / mean_latencies.max())
    if mean_squared_losses.sum() > 0:
        weights += (1 - rho) * mean_squared_losses / mean_squared_losses.sum()
    return np.where(sizes > 0, weights, 0.0)  # a cluster without clients would be the fastest


def pick_fastest(
    clusters: Ints, by_speed: Positions, weights: Floats, count: int, rng: Generator
) -> Positions:
    """Return the positions of `count` of n clients.

    `clusters` [n] are their clusters 0..M-1, `by_speed` [n] their positions, the fastest first, and
    `weights` [M] are theta.
    """
    if not weights.sum():
        weights = np.ones(len(weights))
    present = np.unique(clusters)
    quotas = count * weights[present] / weights[present].sum()
    unpicked: dict[int, list[int]] = {}  # clients of each cluster, the fastest first
    picks: list[int] = []
    # 4. Whole places
    for cluster, quota in zip(present.tolist(), quotas.tolist(), strict=True):
        members = by_speed[clusters[by_speed] == cluster].tolist()
        num_places = floor(quota)  # a cluster may have fewer clients than places
        picks += members[:num_places]
        if members[num_places:]:
            unpicked[cluster] = members[num_places:]
    # 5. The remaining places
    while len(picks) < count:
        candidates = list(unpicked)
        chances = weights[candidates]
        if not chances.sum():  # only clusters of weight 0 have clients left
            chances = np.ones(len(candidates))
        cluster = int(rng.choice(candidates, p=chances / chances.sum()))
        picks.append(unpicked[cluster].pop(0))
        if not unpicked[cluster]:
            del unpicked[cluster]
    return np.array(picks, dtype=np.int64)
