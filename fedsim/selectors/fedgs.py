"""FedGS (Wang, Fan, Qi et al., "FedGS: Federated Graph-based Sampling with Arbitrary Client
Availability", AAAI 2023)."""

from typing import Literal

import numpy as np

from fedsim.core.arrays import Floats, Ints
from fedsim.core.parameters import CountOrZero, NonNegative, Positive, Problems, Share, parameters
from fedsim.selectors.base import (
    Clients,
    Ids,
    Selection,
    Selector,
    Signal,
    ascending,
    exp,
    highest,
)
from fedsim.selectors.tools import collect_label_counts, least_similar_subset, subsets_problem


@parameters
class FedGS(Selector):
    """Selects the K available clients that maximise `alpha` (mean distance of their pairs) -
    (variance of the numbers of selections of all N clients after this one).

    Distances are shortest paths in a graph of all clients (3DG), in which those of similarity V_ij
    > `epsilon` are joined by an edge of length exp(-V_ij^2 / `sigma2`); they are divided by the
    longest one, which also stands for pairs without a path. The paths take N^3 operations, once. V
    is the cosine of label distributions, the authors' oracle, scaled to [0, 1] over all pairs:
    clients report their label counts once. (Their other signals, local updates and outputs of local
    models, approximate it.) A client that cannot be reached in the first round joins the graph when
    it can, for which the paper assumes that all are there.

    The variance is that of the sample (divided by N - 1). `search` and `swap_passes` are those of
    `least_similar_subset`, in place of the authors' commercial solver with a limit of 5 s; ties are
    broken at random.
    """

    start_up_rounds = 1
    needs = frozenset({Signal.LABEL_COUNTS})
    pair_bytes = (
        48  # similarities, lengths and sums of two of them, distances, and a copy for a checkpoint
    )
    state = ("counts", "pulls", "distances")

    alpha: NonNegative
    epsilon: Share
    sigma2: Positive
    search: Literal["auto", "exact", "greedy"]
    swap_passes: CountOrZero

    def problems(self) -> Problems:
        yield from super().problems()
        yield subsets_problem(self.population, self.search)

    def __post_init__(self) -> None:
        self.counts = np.empty((self.population.num_clients, 0), np.int64)
        self.pulls = np.zeros(self.population.num_clients, np.int64)
        self.distances = np.empty((0, 0))  # of the clients that have reported

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        ids, count = clients.available, self.cohort_size(clients)
        self.counts = collect_label_counts(self.counts, clients)
        known = np.flatnonzero((self.counts >= 0).any(1))
        if len(known) > len(self.distances):
            self.distances = shortest_paths(self.counts[known], self.epsilon, self.sigma2)
        if count == 1:
            picks = highest(-self.pulls[ids].astype(np.float64), 1, rng)
        else:
            picks = least_similar_subset(
                -self.gains(known, ids, count), count, self.search, self.swap_passes, rng
            )
        chosen = ascending(ids[picks])
        self.pulls[chosen] += 1
        return Selection(chosen)

    def gains(self, known: Ids, ids: Ids, count: int) -> Floats:
        """What each pair of the clients `ids` adds, [n, n]: its sum over all pairs of `count` > 1
        clients is what is maximised, times count - 1 and but for a constant."""
        num, rows = self.population.num_clients, np.searchsorted(known, ids)
        growth = (2 * (self.pulls[ids] - self.pulls.mean() - count / num) + 1) / (
            num - 1
        )  # of the variance, by each
        distances = self.distances[np.ix_(rows, rows)]
        return 2 * self.alpha / count * distances - growth[:, None] - growth[None, :]


def shortest_paths(counts: Ints, epsilon: float, sigma2: float) -> Floats:
    """Distances [n, n] in [0, 1] in the graph of n clients with the label counts `counts` [n, C]
    (Floyd, Warshall)."""
    numbers = counts.astype(np.float64)  # whole ones, whose products and sums are exact
    similarity = numbers @ numbers.T
    lengths = np.sqrt(similarity.diagonal())
    similarity /= lengths[:, None] * lengths
    pairs = similarity[~np.eye(len(counts), dtype=bool)]
    low, high = pairs.min(initial=1.0), pairs.max(initial=0.0)
    scaled = (similarity - low) / (high - low) if high > low else np.ones_like(similarity)
    paths = np.where(scaled > epsilon, exp(-(scaled**2) / sigma2), np.inf)
    np.fill_diagonal(paths, 0)
    for through in range(len(paths)):
        np.minimum(paths, paths[:, through, None] + paths[through], out=paths)
    longest = paths[np.isfinite(paths)].max()
    return np.where(np.isfinite(paths), paths / (longest or 1.0), 1.0)
