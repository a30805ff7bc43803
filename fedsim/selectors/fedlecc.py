"""FedLECC: the clients of highest loss in the clusters of highest loss.

Jimenez-Gutierrez, Giunta, Hassanzadeh, Anagnostopoulos, Chatzigiannakis and Vitaletti, "FedLECC:
Cluster- and Loss-Guided Client Selection for Federated Learning under Non-IID Data", 2026 (arXiv
2603.08911).

Of this paper only the abstract and the first page could be read, and no code was found. So this
docstring cites no equation. The abstract confirms the idea: clients are grouped by the similarity
of their label distributions, and clusters and clients with higher local loss are preferred.

1. Clients report their label counts once. OPTICS clusters them by the Hellinger distances of their
   label distributions (optics.py).
2. In each round all available clients report the loss of the current model on their data. Clusters
   are ordered by the mean loss of their available clients, the highest first.
3. Each of the first J clusters in this order gives its z = ceil(K / J) clients of highest loss,
   until there are K.
4. If these are fewer than K, the next clusters give z clients each. After the last cluster the
   other clients follow by their losses.

Not confirmed by the authors: Hellinger's distance and the ranking by mean losses follow summaries
by others. These points are fedsim's decisions:

- OPTICS is the algorithm that clusters. HACCS uses it (Wolfrath et al. 2022).
- J is half the number of clusters by default, rounded up.
- Each cluster gives z clients, and step 4 says what follows after J clusters.
- The losses are those of the current model, not of the clients' latest participation.

OPTICS finds many clusters of one client. It was run on 100 clients of 100 to 899 samples in 10
classes, whose label shares follow a Dirichlet law, 18 times for each concentration:

- With the concentration 0.1 it finds 43 to 64 clusters, of which 14 to 42 have one client.
- With the concentration 1 it finds 62 to 80 clusters, of which 39 to 68 have one client.

A client joins the clusters in the first round in which it is available, and all clients are then
clustered anew. Losses that are not finite rank last, and do not enter the means. Ties are broken at
random.
"""

import numpy as np

from fedsim.selectors.base import (
    Clients,
    Count,
    Floats,
    Generator,
    Ints,
    Positions,
    Selection,
    Selector,
    Signal,
    ascending,
    highest,
    parameters,
    without_infinity,
)
from fedsim.selectors.label_counts import collect_label_counts


@parameters
class FedLECC(Selector):
    """Selects the clients with the highest losses in the clusters with the highest losses."""

    pair_bytes = 24  # distances in two forms, and scikit-learn's copy
    start_up_rounds = 1
    needs = frozenset({Signal.LABEL_COUNTS, Signal.LOSSES})
    state = ("counts", "labels")

    num_clusters: Count | None  # J; None: half of the clusters, rounded up

    def __post_init__(self) -> None:
        import fedsim.selectors.optics  # noqa: F401 - takes long: no round waits for it

        num_clients = self.population.num_clients
        self.counts = np.empty((num_clients, 0), np.int64)  # label counts [N, C]
        self.labels = np.full(num_clients, -1)  # each client's cluster [N], -1: not reported yet

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        available = clients.available
        # 1. Clusters. They are only made anew if a client has reported for the first time.
        self.counts = collect_label_counts(self.counts, clients)
        known = np.flatnonzero((self.counts >= 0).any(1))
        if (self.labels[known] < 0).any():
            from fedsim.selectors.optics import density_clusters, label_distances

            counts = self.counts[known]
            shares = counts / counts.sum(1, keepdims=True)
            self.labels[known] = density_clusters(label_distances(shares, "hellinger"))
        # 2 to 4. Losses and picks
        losses = without_infinity(clients.losses(available))
        count = self.cohort_size(clients)
        clusters = self.labels[available]
        picks = pick_by_loss(clusters, losses, self.num_clusters, count, rng)
        return Selection(ascending(available[picks]))


def pick_by_loss(
    clusters: Ints, losses: Floats, num_preferred: int | None, count: int, rng: Generator
) -> Positions:
    """Return the positions of `count` of n clients, picked by steps 2 to 4.

    `clusters` [n] are the clients' clusters, and `losses` [n] are finite or nan. `num_preferred` is
    J. None stands for half the number of clusters, rounded up. A J above the number of clusters
    counts as that number.
    """
    # 2. Clusters and clients in the order of their losses
    distinct = np.unique(clusters)
    means = np.full(len(distinct), np.nan)
    for row, cluster in enumerate(distinct):
        is_counted = (clusters == cluster) & np.isfinite(losses)
        if is_counted.any():
            means[row] = losses[is_counted].mean()
    clients_by_loss = highest(losses, len(losses), rng)
    clusters_by_loss = distinct[highest(means, len(means), rng)]
    # 3 and 4. Each cluster gives z clients. The first J suffice if all have z: J z >= K.
    if num_preferred is None:
        num_preferred = -(-len(distinct) // 2)  # rounded up
    num_each = -(-count // min(num_preferred, len(distinct)))  # z, rounded up
    picks = np.empty(0, np.int64)
    for cluster in clusters_by_loss:
        members = clients_by_loss[clusters[clients_by_loss] == cluster]
        picks = np.concatenate([picks, members[:num_each]])
    others = clients_by_loss[~np.isin(clients_by_loss, picks)]
    return np.concatenate([picks, others])[:count]
