"""FLIPS: select equally often from each cluster of clients with similar labels.

Bhope, Jayaram, Venkatasubramanian, Verma and Thomas, "FLIPS: Federated Learning using Intelligent
Participant Selection", 2023 (arXiv 2308.03901).

Of this paper only the abstract and the first pages could be read, and the authors published no
code. So this docstring cites no equation. The abstract confirms the idea: clients are clustered by
their label distributions before training, and each cluster is equitably represented among the
selected clients. It leaves the algorithm open.

1. Clients report their label counts once. The server divides them by their sums and clusters them
   by k-means.
2. The number of clusters k has the lowest index of Davies and Bouldin, for k from 2 to 10 and below
   the number of clients:

       DB = 1 / k sum_a max_{b != a} (s_a + s_b) / |c_a - c_b|

   c_a is the centre of cluster a, and s_a the mean distance of its members from it.
3. Each of the K picks takes the cluster with the fewest selections so far that still has available
   clients. In it, it takes the client with the fewest selections.

Not confirmed by the authors: k-means, the index and its range follow a public re-implementation.
The abstract does not say whether the paper minimises the index or looks for an elbow. The minimum
prefers clusters of single clients, so `num_clusters` can fix k. Step 3 is our reading of
"equitably". The re-implementation gives each cluster K / k places, rounded down, and the other
places to the largest clusters.

Left out: The paper handles stragglers. How many clients it adds for them could not be found, and
the costs of methods would no longer be comparable. So K clients are selected here.

Deviations: In the paper a trusted execution environment hides label distributions from the server.
Here the server sees them. A client joins the clusters in the first round in which it is available,
and all clients are then clustered anew. Ties are broken at random. The best of `NUM_STARTS` runs of
k-means counts.
"""

import numpy as np

from fedsim.selectors.base import (
    Clients,
    Count,
    Generator,
    Ids,
    Ints,
    Selection,
    Selector,
    Signal,
    ascending,
    parameters,
)
from fedsim.selectors.label_counts import collect_label_counts

MAX_CLUSTERS = 10
"""Maximum number of clusters that the index of Davies and Bouldin may choose."""
NUM_STARTS = 10
"""Number of runs of k-means from different centres."""


@parameters
class FLIPS(Selector):
    """Selects from the cluster, and in it the client, with the fewest selections so far."""

    exact = False  # k-means multiplies matrices by BLAS
    start_up_rounds = 1
    needs = frozenset({Signal.LABEL_COUNTS})
    state = ("counts", "pulls", "labels")

    num_clusters: Count | None  # k, at most the number of clients; None: by Davies and Bouldin

    def __post_init__(self) -> None:
        import sklearn.cluster  # noqa: F401 - takes long: no round waits for it

        num_clients = self.population.num_clients
        self.counts = np.empty((num_clients, 0), np.int64)  # label counts [N, C]
        self.pulls = np.zeros(num_clients, np.int64)  # selections of each client [N]
        self.labels = np.full(num_clients, -1)  # clusters of the clients [N], -1: not reported yet

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        # 1 and 2. Clusters. They are only made anew if a client has reported for the first time.
        self.counts = collect_label_counts(self.counts, clients)
        known = np.flatnonzero((self.counts >= 0).any(1))
        if (self.labels[known] < 0).any():
            self.labels[known] = label_clusters(self.counts[known], self.num_clusters, rng)
        # 3. Picks
        chosen = self._pick(clients.available, self.cohort_size(clients), rng)
        self.pulls[chosen] += 1
        return Selection(ascending(chosen))

    def _pick(self, available: Ids, count: int, rng: Generator) -> Ids:
        """Return the ids of `count` different clients from the `available` [n]."""
        known = np.flatnonzero(self.labels >= 0)
        cluster_pulls = np.bincount(self.labels[known], self.pulls[known])
        # members of each cluster, ordered by their selections, ties at random
        shuffled = rng.permutation(available)
        ordered = shuffled[np.argsort(self.pulls[shuffled], kind="stable")]
        candidates: dict[int, list[int]] = {}
        for cluster in rng.permutation(len(cluster_pulls)).tolist():
            members = ordered[self.labels[ordered] == cluster]
            if len(members):
                candidates[cluster] = members.tolist()
        picks: list[int] = []
        for _ in range(count):
            cluster = min(candidates, key=lambda c: cluster_pulls[c])  # the first one of equals
            picks.append(candidates[cluster].pop(0))
            cluster_pulls[cluster] += 1
            if not candidates[cluster]:
                del candidates[cluster]
        return np.array(picks, dtype=np.int64)


def label_clusters(counts: Ints, num_clusters: int | None, rng: Generator) -> Ints:
    """Return the cluster [n] of each of n clients with the label counts `counts` [n, C].

    There are `num_clusters` clusters, or as many as clients differ if these are fewer. None chooses
    the number with the lowest index of Davies and Bouldin, and 1 if that index is not defined.
    """
    from sklearn.cluster import KMeans
    from sklearn.metrics import davies_bouldin_score

    shares = counts / counts.sum(1, keepdims=True)
    num_different = len(np.unique(shares, axis=0))
    seed = int(rng.integers(2**31))

    def clusters(k: int) -> Ints:
        means = KMeans(k, n_init=NUM_STARTS, random_state=seed)
        return np.asarray(means.fit_predict(shares), dtype=np.int64)

    if num_clusters is not None:
        return clusters(min(num_clusters, num_different))
    best = np.zeros(len(counts), np.int64)
    lowest = np.inf
    for k in range(2, min(MAX_CLUSTERS, len(counts) - 1, num_different) + 1):
        labels = clusters(k)
        index = davies_bouldin_score(shares, labels)
        if index < lowest:
            best, lowest = labels, index
    return best
