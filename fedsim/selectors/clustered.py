"""Clustered sampling: draw one client from each of K distributions, without bias.

Fraboni, Vidal, Kameni and Lorenzi, "Clustered Sampling: Low-Variance and Improved Representativity
for Clients Selection in Federated Learning", ICML 2021 (arXiv 2105.05883).

With K draws from one distribution p (MD sampling), a cohort may miss whole groups of clients. If
each of the K draws has its own distribution over a group of clients, every group is represented.
Let r_ki be the probability that draw k selects client i, and p_i = n_i / n the share of client i in
the samples of all clients. The average stays an unbiased estimate of the average over all clients
as long as

    sum_i r_ki = 1 for each distribution k
    sum_k r_ki = K p_i for each client i

A client that is drawn m times gets the aggregation weight m / K, so fewer than K clients may take
part. Think of K bins of capacity 1, into which the clients' masses K p_i are poured.

- Algorithm 1 (`ClusteredBySize`) pours the clients in descending order of size.
- Algorithm 2 (`ClusteredBySimilarity`) pours clients with similar updates into the same bin.

What the paper leaves open: If some clients are unavailable, p is renormalised over the others.
"""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedsim.core.exact import arccos
from fedsim.selectors.base import (
    Clients,
    Cohort,
    Floats,
    Generator,
    Ids,
    Population,
    Positions,
    Selection,
    Selector,
    Server,
    Signal,
    parameters,
)
from fedsim.selectors.similarity import (
    among,
    euclidean_distances,
    update_inner_products,
    with_latest,
)

TOLERANCE = 1e-9
"""Rounding tolerance when the mass of a bin or cluster is compared with its capacity 1."""
SAFE_MARGIN = 1e-6
"""Free capacity beyond which a running sum of masses is exact enough."""


class ClusteredBySize(Selector):
    """Algorithm 1: fills K distributions with the clients in descending order of size."""

    adaptive = True

    def distributions(self, clients: Clients) -> Floats:
        """Return r [K, n] for the n available clients, up to a factor for each distribution."""
        masses = client_masses(clients.available, self.population)
        bins = np.zeros((self.population.cohort_size, len(masses)))
        by_mass = np.argsort(-masses, kind="stable")
        return fill_bins(bins, masses, by_mass)

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        return draw_one_each(self.distributions(clients), clients.available, rng)


@parameters
class ClusteredBySimilarity(ClusteredBySize):
    """Algorithm 2: the distributions are clusters of clients with similar updates.

    1. Clients are compared by their latest updates. A client without an update counts as having
       the update 0, and an angle of 0 to all others.
    2. Ward's tree over these distances is cut into the largest clusters of mass at most 1. A client
       of mass above 1 first fills whole distributions by itself.
    3. The heaviest clusters become the other distributions, K in all. The clients of the remaining
       clusters fill the gaps.

    `ward_on: distances` (the paper) builds the tree on the distances. `rows` uses the rows of their
    matrix [N, N] as points, as the published code does.

    Deviations from the published code, which leave the average unbiased:

    - In step 3, fedsim pours the remaining clusters by descending mass, each by ascending client
      id, and fills the distribution of the heaviest cluster first. The code pours the lightest one
      first, its clients in random order, and fills the lightest kept cluster first.
    - The code squares the L2 norm, which fedsim does not.
    """

    # With many clients, products and distances are float32. The tree takes half as many in float64.
    pair_bytes = 20
    needs = frozenset({Signal.UPDATES})
    state = ("updates", "products")

    distance: Literal["cosine", "l1", "l2"]  # angle arccos(cosine), or norm (L1: N^2 P operations)
    ward_on: Literal["distances", "rows"]  # input of Ward's tree, see above

    def __post_init__(self) -> None:
        # not imported above: it takes long, and no round should have to wait for it
        from fedsim.selectors.ward import ward_linkage

        self.linkage = ward_linkage
        self.updates: Tensor | None = None  # latest updates [N, P], 0 without any; None: no update
        self.products: Tensor | None = None  # their inner products [N, N]

    def distributions(self, clients: Clients) -> Floats:
        tree = self.linkage(self._distances(clients.available), self.ward_on)
        masses = client_masses(clients.available, self.population)
        return similarity_distributions(tree, masses, self.population.cohort_size)

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        num_clients = self.population.num_clients
        self.updates = with_latest(self.updates, num_clients, cohort.ids, cohort.updates)
        if self.distance != "l1":
            self.products = update_inner_products(self.products, self.updates, cohort.ids)

    def _distances(self, ids: Ids) -> Floats:
        """Return the distances [n, n] between the latest updates of the clients `ids`."""
        if self.updates is None:
            return np.zeros((len(ids), len(ids)))
        if self.distance == "l1":
            from scipy.spatial.distance import pdist, squareform

            updates = self.updates[torch.as_tensor(ids)].double().cpu().numpy()
            return squareform(pdist(updates, "cityblock"))
        assert self.products is not None
        products = among(self.products, ids)
        distances = euclidean_distances if self.distance == "l2" else angular_distances
        return distances(products)


def client_masses(ids: Ids, population: Population) -> Floats:
    """Return K p_i [n], with p_i the share of client i in the samples of the n clients `ids`."""
    sizes = population.sizes[ids]
    return population.cohort_size * sizes / sizes.sum()


def draw_one_each(distributions: Floats, ids: Ids, rng: Generator) -> Selection:
    """Draw one of the clients `ids` [n] from each of the `distributions` [K, n].

    The rows of `distributions` need not sum to 1. A client's aggregation weight is the number of
    its draws divided by K.
    """
    draws = [int(rng.choice(len(ids), p=row / row.sum())) for row in distributions]
    counts = np.bincount(draws)
    drawn = np.flatnonzero(counts)
    return Selection(ids[drawn], counts[drawn] / len(distributions))


def similarity_distributions(tree: Floats, masses: Floats, count: int) -> Floats:
    """Return the distributions [count, N] of Algorithm 2, not normalised.

    `tree` [N - 1, 4] is a SciPy linkage of the clients, and `masses` [N] are their K p_i.
    """
    bins = np.zeros((count, len(masses)))
    masses = masses.copy()
    # 1. Clients of mass above 1
    num_full = 0
    for client in np.flatnonzero(masses > 1 + TOLERANCE):
        num_whole = int(masses[client] + TOLERANCE)
        bins[num_full : num_full + num_whole, client] = 1
        masses[client] -= num_whole
        num_full += num_whole
    # 2. The heaviest clusters
    clusters = clusters_within_capacity(tree, masses)
    clusters.sort(key=lambda members: -masses[members].sum())
    num_free = count - num_full
    for row, members in enumerate(clusters[:num_free], start=num_full):
        bins[row, members] = masses[members]
    # 3. The clients of the remaining clusters
    remaining = np.concatenate([np.empty(0, np.int64), *clusters[num_free:]])
    return fill_bins(bins, masses, remaining)


def clusters_within_capacity(tree: Floats, masses: Floats) -> list[Positions]:
    """Return the largest clusters of mass at most 1, as arrays of ascending client positions.

    `tree` [N - 1, 4] is a SciPy linkage: its row m merges two nodes to the node N + m.
    """
    mass = masses.tolist()
    # the clients below each node; [] if the node is too heavy
    members: list[list[int]] = [[client] for client in range(len(masses))]
    clusters: list[list[int]] = []
    for left, right in tree[:, :2].astype(np.int64).tolist():
        mass.append(mass[left] + mass[right])
        if mass[-1] <= 1 + TOLERANCE and members[left] and members[right]:
            members.append(members[left] + members[right])
        else:
            clusters += [members[left], members[right]]
            members.append([])
    clusters.append(members[-1])
    return [np.array(sorted(cluster)) for cluster in clusters if cluster]


def fill_bins(bins: Floats, masses: Floats, order: Positions) -> Floats:
    """Pour the `masses` [N] of the clients in `order` into the free capacity of `bins` [K, N].

    Each bin has capacity 1. A client that does not fit is split between bins. Changes and returns
    `bins`.
    """
    row = 0
    bin_mass = float(bins[0].sum()) if len(bins) else 0.0  # running sum of bins[row]
    for client in order:
        remaining = masses[client]
        while remaining > TOLERANCE and row < len(bins):
            # Far below the capacity the running sum suffices to see that the client fits. Near it
            # the sum over all N numbers decides.
            if bin_mass + remaining < 1 - SAFE_MARGIN:
                bins[row, client] += remaining
                bin_mass += remaining
                break
            poured = max(min(1 - bins[row].sum(), remaining), 0)
            bins[row, client] += poured
            remaining -= poured
            if bins[row].sum() >= 1 - TOLERANCE:
                row += 1
            bin_mass = float(bins[row].sum()) if row < len(bins) else 1.0
    return bins


def angular_distances(products: Tensor) -> Floats:
    """Return angles [N, N] in radians between vectors with the inner products `products` [N, N].

    The angle to a zero vector is 0. Vectors whose squares overflow float32 count as at right angles
    to all others.
    """
    lengths = products.diagonal().clamp(min=0).sqrt()
    inverse = torch.where(lengths > 0, 1 / lengths, 0.0)
    cosines = (products * inverse[:, None]).mul_(inverse[None, :]).clamp_(-1, 1)
    angles = torch.from_numpy(arccos(cosines.nan_to_num_(nan=0.0).cpu().numpy()))
    is_zero = (lengths == 0).cpu()
    angles.masked_fill_(is_zero[:, None] | is_zero[None, :], 0)
    return angles.fill_diagonal_(0).numpy()
