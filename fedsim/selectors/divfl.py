"""DivFL: select clients whose gradients represent the gradients of all clients.

Balakrishnan, Li, Zhou, Himayat, Smith and Bilmes, "Diverse Client Selection for Federated Learning
via Submodular Maximization", ICLR 2022.

Each client is represented by the selected client whose gradient is nearest to its own. DivFL looks
for the set S of K clients that makes the sum of these distances small, which is the facility
location problem:

    G(S) = sum_k min_{i in S} |grad_k - grad_i|,  k over all available clients

The server starts from the empty set and adds, K times, the client that lowers G most. The
aggregation weight of a selected client is the share of clients that it represents
(`weights: gamma`). The official code weights by size.

What the paper leaves open: Ties are broken at random.
"""

from collections.abc import Callable
from typing import Literal

import numpy as np
from torch import Tensor

from fedsim.selectors.base import (
    Clients,
    Floats,
    Generator,
    Ids,
    Positions,
    Selection,
    Selector,
    Share,
    Signal,
    floor,
    parameters,
)
from fedsim.selectors.similarity import among, euclidean_distances, update_inner_products

BLOCK_ROWS = 500
"""Rows of the table of distances that are summed at once, to save memory."""


@parameters
class DivFL(Selector):
    """Selects K clients with a small sum of distances G(S) by a greedy search.

    - `mode: ideal` requests full gradients of all clients in every round. `no_overhead` requests
      each client's gradient once, when it is first available, and later only the gradients of the
      selected clients, before they train.
    - `greedy: plain` evaluates all candidates in every step. `lazy` finds the same set with fewer
      evaluations. `stochastic` evaluates max(K, `share` N) random candidates in a step.
    """

    needs = frozenset({Signal.GRADIENTS})
    # With many clients, products and distances are float32. A checkpoint copies the products.
    pair_bytes = 12
    state = ("known", "gradients", "products")

    mode: Literal["ideal", "no_overhead"]  # whose gradients are requested
    greedy: Literal["plain", "lazy", "stochastic"]  # which candidates are evaluated
    share: Share  # share of all clients that are candidates of a step of `stochastic`
    weights: Literal["gamma", "aggregator"]  # aggregation weights: represented clients, or as usual

    def __post_init__(self) -> None:
        self.start_up_rounds = int(self.mode == "no_overhead")
        self.gradients: Tensor | None = None  # latest gradients [N, P]; None before the first
        self.products: Tensor | None = None  # their inner products [N, N]
        self.known = np.zeros(self.population.num_clients, dtype=bool)  # clients with a gradient

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        available = clients.available
        fresh = available if self.mode == "ideal" else available[~self.known[available]]
        self._query_gradients(fresh, clients)
        assert self.products is not None
        distances = euclidean_distances(among(self.products, available))
        count = self.cohort_size(clients)
        if self.greedy == "lazy":
            picked = lazy_greedy(distances, count, rng)
        elif self.greedy == "plain":
            picked = plain_greedy(distances, count, rng)
        else:
            num_candidates = max(count, floor(self.share * self.population.num_clients))
            picked = plain_greedy(distances, count, rng, num_candidates)
        order = np.argsort(picked)
        chosen = available[picked[order]]
        self._query_gradients(np.setdiff1d(chosen, fresh), clients)
        if self.weights == "aggregator":
            return Selection(chosen)
        return Selection(chosen, cluster_shares(distances, picked)[order])

    def _query_gradients(self, ids: Ids, clients: Clients) -> None:
        """Request the gradients of `ids` and update the inner products."""
        for client, gradient in zip(ids.tolist(), clients.gradients(ids), strict=True):
            if self.gradients is None:
                self.gradients = gradient.new_zeros(self.population.num_clients, len(gradient))
            self.gradients[client] = gradient  # entries not finite count as 0 in the products
            self.known[client] = True
        if len(ids) and self.gradients is not None:
            self.products = update_inner_products(self.products, self.gradients, ids)


def plain_greedy(
    distances: Floats, count: int, rng: Generator, num_candidates: int | None = None
) -> Positions:
    """Return `count` positions in the order of choice. Each one lowers G most when it is added.

    `distances` [n, n] is symmetric. Each step evaluates `num_candidates` random positions that are
    not chosen yet, or all of these if it is None.
    """
    nearest = np.full(len(distances), np.inf)  # distance of each client to the nearest chosen one
    largest = random_tie_breaker(distances, rng)
    chosen: list[int] = []
    for _ in range(min(count, len(distances))):
        pool = np.setdiff1d(np.arange(len(distances)), chosen)
        if num_candidates is not None:
            size = min(num_candidates, len(pool))
            pool = np.sort(rng.choice(pool, size, replace=False))
        sums = _row_sums(np.minimum, nearest, distances, pool)  # G after adding each of the pool
        chosen.append(largest(-sums, pool))
        nearest = np.minimum(nearest, distances[chosen[-1]])
    return np.array(chosen, dtype=np.int64)


def lazy_greedy(distances: Floats, count: int, rng: Generator) -> Positions:
    """Return the same set as `plain_greedy` with fewer evaluations (Minoux, 1978).

    The gain of a client is the fall of G if the client is added. As the set grows, gains can only
    shrink. So a gain from an earlier step is an upper bound, and only the largest gains need to be
    evaluated again.
    """
    num = len(distances)
    everybody = np.arange(num)
    largest = random_tie_breaker(distances, rng)
    first = largest(-distances.sum(1, dtype=np.float64), everybody)
    chosen = [first]
    nearest = distances[first]
    gains = _row_sums(_decrease, nearest, distances, everybody)
    gains[first] = -np.inf
    while len(chosen) < min(count, num):
        is_fresh = np.zeros(num, dtype=bool)  # gains that were evaluated in this step
        best = int(np.argmax(gains))
        while not is_fresh[best]:
            gains[best] = _decrease(nearest, distances[best]).sum(dtype=np.float64)
            is_fresh[best] = True
            best = int(np.argmax(gains))
            if is_fresh[best]:  # a client that ties with it may win, whose gain may be stale
                best = largest(gains, everybody)
        chosen.append(best)
        nearest = np.minimum(nearest, distances[best])
        gains[best] = -np.inf
    return np.array(chosen, dtype=np.int64)


def random_tie_breaker(distances: Floats, rng: Generator) -> Callable[[Floats, Positions], int]:
    """Return a function that finds which of `positions` [n] has the largest of `values` [n].

    Values that differ by rounding errors only count as equal. Of equal values the function takes
    the first in a random order of the clients, which is drawn once.
    """
    rank = rng.permutation(len(distances))
    tolerance = 1e-10 * float(distances.sum(1, dtype=np.float64).max(initial=0))

    def largest(values: Floats, positions: Positions) -> int:
        tied = positions[values >= values.max() - tolerance]
        return int(tied[np.argmin(rank[tied])])

    return largest


def _decrease(nearest: Floats, rows: Floats) -> Floats:
    """Return by how much each of the distances `nearest` [n] falls if a client is added.

    `rows` [..., n] holds the distances of the added clients to all n clients, a row for each.
    """
    return np.maximum(nearest - rows, 0)


def _row_sums(
    function: Callable[[Floats, Floats], Floats],
    nearest: Floats,
    distances: Floats,
    positions: Positions,
) -> Floats:
    """Return the sum of `function(nearest, row)` for the rows of `distances` at `positions`."""
    sums = []
    num_blocks = -(-len(positions) // BLOCK_ROWS)  # rounded up
    for block in np.array_split(positions, num_blocks):
        sums.append(function(nearest, distances[block]).sum(1, dtype=np.float64))
    return np.concatenate(sums)


def cluster_shares(distances: Floats, chosen: Positions) -> Floats:
    """Return, for each of `chosen` [K], the share of clients to which it is the nearest.

    A tie counts for the earlier one.
    """
    nearest = np.argmin(distances[:, chosen], axis=1)
    return np.bincount(nearest, minlength=len(chosen)) / len(distances)
