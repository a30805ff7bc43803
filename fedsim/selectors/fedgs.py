"""FedGS: select clients with different data, each about equally often.

Wang, Fan, Qi, Jin, Yang, Shen and Wang, "FedGS: Federated Graph-based Sampling with Arbitrary
Client Availability", AAAI 2023 (arXiv 2211.13975).

If some clients are available more often than others, random selection favours their data. FedGS
keeps the numbers of selections balanced, and selects clients that are far apart in a graph (3DG) in
which clients with similar data are neighbours:

    maximise  alpha (mean distance of the pairs of selected clients)
              - (variance of all clients' numbers of selections after the round)

In a round with N clients, of which K are to be selected:

1. The similarity V_ij is the cosine of label distributions (the authors' oracle), scaled to [0, 1]
   over all pairs i, j of clients.
2. Clients with V_ij > epsilon are joined by an edge of length exp(-V_ij^2 / sigma2).
3. The distance of two clients is their shortest path, divided by the longest one. Pairs without a
   path have distance 1. The paths take N^3 operations, once.
4. The server searches the K available clients that maximise the quantity above, exactly or
   greedily.

Clients report their label counts once. The authors' other signals (local updates, outputs of local
models) approximate the oracle.

Deviations: A client joins the graph in the first round in which it is available. The paper assumes
that all clients are available in the first round. The search replaces the authors' commercial
solver with a limit of 5 s. Ties are broken at random. The variance is that of a sample (divided by
N - 1).
"""

from typing import Literal

import numpy as np

from fedsim.selectors.base import (
    Clients,
    CountOrZero,
    Floats,
    Generator,
    Ids,
    Ints,
    NonNegative,
    Positive,
    Problems,
    Selection,
    Selector,
    Share,
    Signal,
    ascending,
    exp,
    parameters,
)
from fedsim.selectors.label_counts import collect_label_counts
from fedsim.selectors.subset_search import least_similar_subset, subsets_problem


@parameters
class FedGS(Selector):
    """Selects available clients far apart in a graph of all clients, with balanced selections."""

    start_up_rounds = 1
    needs = frozenset({Signal.LABEL_COUNTS})
    # Similarities, lengths of edges and their sums, distances, and a checkpoint's copy of them.
    pair_bytes = 48
    state = ("counts", "pulls", "distances")

    alpha: NonNegative  # weight of distances against the variance of selections
    epsilon: Share  # similarity above which two clients have an edge
    sigma2: Positive  # scale of the lengths of edges
    search: Literal["auto", "exact", "greedy"]  # see least_similar_subset
    swap_passes: CountOrZero  # maximum number of swaps after a greedy search

    def problems(self) -> Problems:
        yield from super().problems()
        yield subsets_problem(self.population, self.search)

    def __post_init__(self) -> None:
        num_clients = self.population.num_clients
        self.counts = np.empty((num_clients, 0), np.int64)  # label counts [N, C]
        self.pulls = np.zeros(num_clients, np.int64)  # selections of each client [N]
        self.distances = np.empty((0, 0))  # of all pairs of clients that have reported

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        available = clients.available
        count = self.cohort_size(clients)
        # 1 to 3. The graph. It is only made anew if a client has joined it.
        self.counts = collect_label_counts(self.counts, clients)
        known = np.flatnonzero((self.counts >= 0).any(1))
        if len(known) > len(self.distances):
            self.distances = shortest_paths(self.counts[known], self.epsilon, self.sigma2)
        # 4. The search
        if count == 1:  # without pairs: the client with the fewest selections
            chosen = self.select_highest(-self.pulls[available].astype(np.float64), clients, rng)
        else:
            gains = self.gains(known, available, count)
            picks = least_similar_subset(-gains, count, self.search, self.swap_passes, rng)
            chosen = ascending(available[picks])
        self.pulls[chosen] += 1
        return Selection(chosen)

    def gains(self, known: Ids, ids: Ids, count: int) -> Floats:
        """Return a gain for each pair of the clients `ids`, [n, n].

        The sum of the gains over all pairs of `count` > 1 clients is count - 1 times the quantity
        to maximise, up to a constant. `known` are the clients of the graph, ascending.
        """
        num_clients = self.population.num_clients
        # The selection of a client changes the variance by (2 excess + 1) / (N - 1). It occurs in
        # count - 1 pairs, so each of its pairs takes the whole change.
        excess = self.pulls[ids] - self.pulls.mean() - count / num_clients
        variance_growth = (2 * excess + 1) / (num_clients - 1)
        rows = np.searchsorted(known, ids)
        distances = self.distances[np.ix_(rows, rows)]
        by_distance = 2 * self.alpha / count * distances
        return by_distance - variance_growth[:, None] - variance_growth[None, :]


def shortest_paths(counts: Ints, epsilon: float, sigma2: float) -> Floats:
    """Return the distances [n, n] in [0, 1] in the graph of n clients.

    `counts` [n, C] are their label counts. The algorithm is Floyd and Warshall's.
    """
    # 1. Cosines, scaled to [0, 1]. Products and sums of whole numbers are exact in float64.
    label_counts = counts.astype(np.float64)
    similarity = label_counts @ label_counts.T
    lengths = np.sqrt(similarity.diagonal())
    similarity /= lengths[:, None] * lengths
    pairs = similarity[~np.eye(len(counts), dtype=bool)]
    low = pairs.min(initial=1.0)
    high = pairs.max(initial=0.0)
    scaled = (similarity - low) / (high - low) if high > low else np.ones_like(similarity)
    # 2. Edges
    paths = np.where(scaled > epsilon, exp(-(scaled**2) / sigma2), np.inf)
    np.fill_diagonal(paths, 0)
    # 3. Shortest paths
    for through in range(len(paths)):
        np.minimum(paths, paths[:, through, None] + paths[through], out=paths)
    is_path = np.isfinite(paths)
    longest = paths[is_path].max()
    return np.where(is_path, paths / (longest if longest > 0 else 1.0), 1.0)
