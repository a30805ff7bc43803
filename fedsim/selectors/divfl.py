"""DivFL (Balakrishnan et al., "Diverse Client Selection for Federated Learning via Submodular
Maximization", 2022)."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import numpy as np
from torch import Tensor

from fedsim.core.arrays import Floats
from fedsim.selectors.base import (
    Clients,
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


@parameters
class DivFL(Selector):
    """Selects the K clients S that minimise G(S) = sum_k min_{i in S} |grad_k - grad_i|, greedily
    (facility location).

    `mode: ideal` requests full gradients of all clients in every round; `no_overhead` requests each
    client's gradient once (when it is first available) and then only those of the selected clients,
    before they train. `greedy: plain` evaluates all candidates in every step; `lazy` finds the same
    set with fewer evaluations; `stochastic` evaluates max(K, share * N) random candidates per step.
    `weights: gamma` weights client i by the share of clients whose nearest selected client is i
    (the paper), `aggregator` leaves that to the aggregator (the official code: by size). Ties are
    broken at random.
    """

    needs = frozenset({Signal.GRADIENTS})
    # products and distances in float32, as they are for many clients, and a copy for a checkpoint
    pair_bytes = 12
    state = ("known", "gradients", "products")

    mode: Literal["ideal", "no_overhead"]
    greedy: Literal["plain", "lazy", "stochastic"]
    share: Share
    weights: Literal["gamma", "aggregator"]

    def __post_init__(self) -> None:
        self.start_up_rounds = int(self.mode == "no_overhead")
        self.gradients: Tensor | None = None
        self.products: Tensor | None = None
        self.known = np.zeros(self.population.num_clients, dtype=bool)

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        ids = clients.available
        fresh = ids if self.mode == "ideal" else ids[~self.known[ids]]
        self._query_gradients(fresh, clients)
        assert self.products is not None
        distance = euclidean_distances(among(self.products, ids))
        count = self.cohort_size(clients)
        some = (
            max(count, floor(self.share * self.population.num_clients))
            if self.greedy == "stochastic"
            else None
        )
        lazy = self.greedy == "lazy"
        picked = (
            lazy_greedy(distance, count, rng) if lazy else plain_greedy(distance, count, rng, some)
        )
        order = np.argsort(picked)
        chosen = ids[picked[order]]
        self._query_gradients(np.setdiff1d(chosen, fresh), clients)
        return Selection(
            chosen, cluster_shares(distance, picked)[order] if self.weights == "gamma" else None
        )

    def _query_gradients(self, ids: Ids, clients: Clients) -> None:
        for client, gradient in zip(ids, clients.gradients(ids), strict=True):
            if self.gradients is None:
                self.gradients = gradient.new_zeros(self.population.num_clients, len(gradient))
            self.gradients[int(client)] = (
                gradient  # entries that are not finite count as 0 in the products
            )
            self.known[client] = True
        if len(ids) and self.gradients is not None:
            self.products = update_inner_products(self.products, self.gradients, ids)


def plain_greedy(
    distance: Floats, count: int, rng: np.random.Generator, candidates: int | None = None
) -> Positions:
    """`count` positions, in the order chosen; each one lowers G the most.

    `distance` [n, n] is symmetric. With `candidates`, each step evaluates only that many random
    positions.
    """
    nearest = np.full(len(distance), np.inf)
    largest = random_tie_breaker(distance, rng)
    chosen: list[int] = []
    for _ in range(min(count, len(distance))):
        left = np.setdiff1d(np.arange(len(distance)), chosen)
        pool = (
            left
            if candidates is None
            else np.sort(rng.choice(left, min(candidates, len(left)), replace=False))
        )
        best = largest(-_row_sums(distance, pool, partial(np.minimum, nearest)), pool)
        chosen.append(best)
        nearest = np.minimum(nearest, distance[best])
    return np.array(chosen, dtype=np.int64)


def lazy_greedy(distance: Floats, count: int, rng: np.random.Generator) -> Positions:
    """The same set as `plain_greedy`, re-evaluating only gains that can still be the largest
    (Minoux, 1978): as the set grows, a gain can only shrink."""
    all_positions, largest = np.arange(len(distance)), random_tie_breaker(distance, rng)
    first = largest(-distance.sum(1, dtype=np.float64), all_positions)
    chosen, nearest = [first], distance[first].copy()
    gains = _row_sums(distance, all_positions, lambda block: np.maximum(nearest - block, 0))
    gains[first] = -np.inf
    while len(chosen) < min(count, len(distance)):
        fresh = np.zeros(len(distance), dtype=bool)
        while True:
            top = int(np.argmax(gains))
            if fresh[top]:
                top = largest(gains, all_positions)
            if fresh[top]:
                break
            gains[top] = np.maximum(nearest - distance[top], 0).sum(dtype=np.float64)
            fresh[top] = True
        chosen.append(top)
        nearest = np.minimum(nearest, distance[top])
        gains[top] = -np.inf
    return np.array(chosen, dtype=np.int64)


def random_tie_breaker(
    distance: Floats, rng: np.random.Generator
) -> Callable[[Floats, Positions], int]:
    """Which of `positions` [n] has the largest of `values` [n]; of those that differ by rounding
    errors only, the first in a random order of the clients."""
    rank = rng.permutation(len(distance))
    tolerance = 1e-10 * float(distance.sum(1, dtype=np.float64).max(initial=0))

    def largest(values: Floats, positions: Positions) -> int:
        tied = positions[values >= values.max() - tolerance]
        return int(tied[np.argmin(rank[tied])])

    return largest


def _row_sums(table: Floats, rows: Positions, function: Callable[[Floats], Floats]) -> Floats:
    """Sums [len(rows)] of function(row) for some `rows` of `table` [n, n], 500 rows at a time to
    save memory."""
    parts = np.array_split(rows, -(-len(rows) // 500))
    return np.concatenate([function(table[part]).sum(1, dtype=np.float64) for part in parts])


def cluster_shares(distance: Floats, chosen: Positions) -> Floats:
    """For each of `chosen` [K], the share of clients to which it is the nearest (a tie counts for
    the earlier one)."""
    nearest = np.argmin(distance[:, chosen], axis=1)
    return np.bincount(nearest, minlength=len(chosen)) / len(distance)
