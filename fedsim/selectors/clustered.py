"""Clustered sampling (Fraboni, Vidal, Kameni and Lorenzi, "Clustered Sampling: Low-Variance and
Improved Representativity for Clients Selection in Federated Learning", ICML 2021)."""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedsim.core.arrays import Floats
from fedsim.core.exact import arccos
from fedsim.core.types import Ids, Positions
from fedsim.selectors.base import (
    Clients,
    Cohort,
    Population,
    Selection,
    Selector,
    Server,
    parameters,
)
from fedsim.selectors.similarity import (
    among,
    euclidean_distances,
    update_inner_products,
    with_latest,
)
from fedsim.selectors.tools import WardInput

MASS_TOLERANCE = (
    1e-9  # rounding tolerance when the mass of a bin or cluster is compared with its capacity 1
)
CLEARLY = 1e-6  # room beyond which a running sum of masses decides as the exact one does


class ClusteredBySize(Selector):
    """Algorithm 1: K bins of capacity 1 are filled with the clients' masses K p_i, in descending
    order of n_i.

    The bins are distributions r_1..r_K over the clients with sum_k r_ki = K p_i; one client is
    drawn from each. A client drawn m times gets the aggregation weight m / K, so that the average
    is an unbiased estimate of full participation's. If some clients are unavailable, p is
    renormalised over the others.
    """

    adaptive = True

    def distributions(self, clients: Clients) -> Floats:
        """r [K, len(available)]."""
        masses = client_masses(clients.available, self.population)
        bins = np.zeros((self.population.cohort_size, len(masses)))
        return fill_bins(bins, masses, np.argsort(-masses, kind="stable"))

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        return draw_one_each(self.distributions(clients), clients.available, rng)


@parameters
class ClusteredBySimilarity(ClusteredBySize):
    """Algorithm 2: the distributions of `ClusteredBySize` are clusters of clients with similar
    updates.

    Clients are compared by their latest updates; before its first one a client is at distance 0
    from all others. `distance` is the angle arccos(cosine), or the L1 or L2 norm of the difference
    (L1 takes N^2 P operations a round). Ward's tree over these distances is cut into the largest
    clusters of mass at most 1, where client i has mass K p_i. The K heaviest clusters become the
    distributions, and the clients of the others fill what they leave free. A client of mass above 1
    first fills whole distributions by itself.

    `ward_on: distances` (the paper) builds the tree on the distances; `rows` uses the rows of their
    matrix [N, N] as points, as the published code does. (That code also squares the L2 norm, which
    is not done here.)
    """

    # products and distances in float32, as they are for many clients; for the tree, halves in
    # float64
    pair_bytes = 20
    state = ("updates", "products")

    distance: Literal["cosine", "l1", "l2"]
    ward_on: WardInput

    def __post_init__(self) -> None:
        from fedsim.selectors.ward import ward_linkage  # which takes long, and here no round's time

        self.linkage = ward_linkage
        self.updates: Tensor | None = None
        self.products: Tensor | None = None

    def distributions(self, clients: Clients) -> Floats:
        ids, tree = (
            clients.available,
            self.linkage(self._distances(clients.available), self.ward_on),
        )
        return similarity_distributions(
            tree, client_masses(ids, self.population), self.population.cohort_size
        )

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        self.updates = with_latest(
            self.updates, self.population.num_clients, cohort.ids, cohort.updates
        )
        if self.distance != "l1":
            self.products = update_inner_products(self.products, self.updates, cohort.ids)

    def _distances(self, ids: Ids) -> Floats:
        if self.updates is None:
            return np.zeros((len(ids), len(ids)))
        if self.distance == "l1":
            from scipy.spatial.distance import pdist, squareform

            return squareform(
                pdist(self.updates[torch.as_tensor(ids)].double().cpu().numpy(), "cityblock")
            )
        assert self.products is not None
        products = among(self.products, ids)
        return (
            euclidean_distances(products) if self.distance == "l2" else angular_distances(products)
        )


def client_masses(ids: Ids, population: Population) -> Floats:
    """K p_i [len(ids)], with p_i the share of client i in the samples of the clients `ids`."""
    sizes = population.sizes[ids]
    return population.cohort_size * sizes / sizes.sum()


def similarity_distributions(tree: Floats, masses: Floats, count: int) -> Floats:
    """The distributions [count, N] of Algorithm 2, not normalised.

    `tree` [N - 1, 4] is a scipy linkage of the clients, `masses` [N] are their K p_i with K =
    `count`.
    """
    rows, masses, num_full = np.zeros((count, len(masses))), masses.copy(), 0
    for client in np.flatnonzero(masses > 1 + MASS_TOLERANCE):
        whole = int(masses[client] + MASS_TOLERANCE)
        rows[num_full : num_full + whole, client] = 1
        masses[client] -= whole
        num_full += whole
    clusters = sorted(clusters_within_capacity(tree, masses), key=lambda c: -masses[c].sum())
    kept, others = clusters[: count - num_full], clusters[count - num_full :]
    for row, members in zip(rows[num_full:], kept, strict=False):
        row[members] = masses[members]
    return fill_bins(rows, masses, np.concatenate([np.empty(0, np.int64), *others]))


def draw_one_each(rows: Floats, ids: Ids, rng: np.random.Generator) -> Selection:
    """Draw one of `ids` from each row of `rows` [K, len(ids)]; a client's weight is its number of
    draws / K."""
    draws = [int(rng.choice(len(row), p=row / row.sum())) for row in rows]
    counts = np.bincount(draws, minlength=len(ids))
    chosen = np.flatnonzero(counts)
    return Selection(ids[chosen], counts[chosen] / len(rows))


def angular_distances(products: Tensor) -> Floats:
    """Angles [N, N] in radians between vectors with the inner products `products` [N, N]; 0 to a
    zero vector.

    Vectors whose squares overflow float32 count as at right angles to all others.
    """
    lengths = products.diagonal().clamp(min=0).sqrt()
    inverse = torch.where(lengths > 0, 1 / lengths, 0.0)
    cosines = (products * inverse[:, None]).mul_(inverse[None, :]).clamp_(-1, 1)
    angles = torch.from_numpy(arccos(cosines.nan_to_num_(nan=0.0).cpu().numpy()))
    zero = (lengths == 0).cpu()
    angles.masked_fill_(zero[:, None] | zero[None, :], 0)
    return angles.fill_diagonal_(0).numpy()


def fill_bins(rows: Floats, masses: Floats, order: Positions) -> Floats:
    """Distribute the `masses` [N] of the clients in `order` over the free capacity of `rows` [K,
    N], row after row.

    Each row has capacity 1; a client that does not fit is split between rows. Changes and returns
    `rows`.
    """
    row, held = 0, float(rows[0].sum()) if len(rows) else 0.0
    for client in order:
        left = masses[client]
        while left > MASS_TOLERANCE and row < len(rows):
            if (
                held + left < 1 - CLEARLY
            ):  # it fits, and the exact sum over N numbers is not needed to say so
                rows[row, client] += left
                held += left
                break
            poured = min(1 - rows[row].sum(), left)
            rows[row, client] += max(poured, 0)
            left -= max(poured, 0)
            if rows[row].sum() >= 1 - MASS_TOLERANCE:
                row += 1
            held = float(rows[row].sum()) if row < len(rows) else 1.0
    return rows


def clusters_within_capacity(tree: Floats, masses: Floats) -> list[Positions]:
    """The largest clusters of the linkage `tree` [N - 1, 4] with a mass of at most 1, as arrays of
    client positions."""
    num = len(masses)
    weight = np.concatenate([masses, np.zeros(len(tree))])
    members: list[list[int] | None] = [[i] for i in range(num)]
    clusters: list[Positions] = []
    for node, (a, b) in enumerate(tree[:, :2].astype(np.int64), start=num):
        weight[node] = weight[a] + weight[b]
        left, right = members[a], members[b]
        if weight[node] <= 1 + MASS_TOLERANCE and left is not None and right is not None:
            members.append(left + right)
            continue
        clusters += [np.array(sorted(part)) for part in (left, right) if part is not None]
        members.append(None)
    last = members[-1]
    return [*clusters, np.array(sorted(last))] if last is not None else clusters
