"""DivFL (Balakrishnan et al., "Diverse Client Selection for Federated Learning via Submodular Maximization", 2022)."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.communication.clients import Clients
from fedsim.communication.signals import Signal
from fedsim.errors import at_least, check
from fedsim.selectors.base import Selector
from fedsim.selectors.tools.inner_products import distances, refreshed
from fedsim.types import Ids, Population, Selection

Floats = NDArray[np.float64]


class DivFL(Selector):
    """The K clients S that minimise G(S) = sum_k min_{i in S} |grad_k - grad_i|, greedily (facility location).

    `mode: ideal` asks everybody for a full gradient every round; `no_overhead` asks everybody once (in round 1, or when
    first available) and then only those selected, before they train. `greedy: lazy` gives the plain greedy set with
    fewer evaluations; `stochastic` looks at max(K, share * N) random candidates in each step. `weights: gamma` averages
    by |clients nearest to i| / N (the paper), `aggregator` leaves it to the aggregator (the official code: by size).

    Ties are broken at random: of two clients that are nearest to each other, say, either is as good as the other.
    """

    needs = frozenset({Signal.GRADIENTS})
    state = ("known", "gradients", "products")

    def __init__(
        self,
        population: Population,
        *,
        mode: Literal["ideal", "no_overhead"],
        greedy: Literal["plain", "lazy", "stochastic"],
        share: float,
        weights: Literal["gamma", "aggregator"],
    ) -> None:
        super().__init__(population)
        check(at_least("share", share, 0))
        self.mode, self.greedy, self.share, self.weights = mode, greedy, share, weights
        self.gradients: Tensor | None = None
        self.products: Tensor | None = None
        self.known = np.zeros(population.num_clients, dtype=bool)

    @property
    def start_up_rounds(self) -> int:
        return int(self.mode == "no_overhead")

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        ids = clients.available
        fresh = ids if self.mode == "ideal" else ids[~self.known[ids]]
        self._refresh(fresh, clients)
        apart = self._distances(ids)
        picked = self._pick(apart, self.cohort_size(clients), rng)
        order = np.argsort(picked)
        chosen = ids[picked[order]]
        self._refresh(np.setdiff1d(chosen, fresh), clients)
        return Selection(chosen, cluster_shares(apart, picked)[order] if self.weights == "gamma" else None)

    def _refresh(self, ids: Ids, clients: Clients) -> None:
        for client, gradient in zip(ids, clients.gradients(ids), strict=True):
            if self.gradients is None:
                self.gradients = gradient.new_zeros(self.population.num_clients, len(gradient))
            self.gradients[int(client)] = gradient  # what is not finite counts as 0 in the products
            self.known[client] = True
        if len(ids) and self.gradients is not None:
            self.products = refreshed(self.products, self.gradients, ids)

    def _distances(self, ids: Ids) -> Floats:
        """Euclidean distances between the latest gradients of `ids` [len(ids), len(ids)]."""
        assert self.products is not None
        if len(ids) == len(self.products):
            return distances(self.products)
        rows = torch.as_tensor(ids, device=self.products.device)
        return distances(self.products[rows][:, rows])

    def _pick(self, apart: Floats, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        if self.greedy == "lazy":
            return lazy_greedy(apart, count, rng)
        candidates = None
        if self.greedy == "stochastic":
            candidates = max(count, int(self.share * self.population.num_clients))
        return plain_greedy(apart, count, rng, candidates)


def plain_greedy(
    apart: Floats, count: int, rng: np.random.Generator, candidates: int | None = None
) -> NDArray[np.int64]:
    """`count` positions in the order chosen; each lowers G the most (of `candidates` random ones, if given)."""
    nearest = np.full(len(apart), np.inf)
    ties = Ties(apart, rng)
    chosen: list[int] = []
    for _ in range(min(count, len(apart))):
        left = np.setdiff1d(np.arange(len(apart)), chosen)
        pool = left if candidates is None else np.sort(rng.choice(left, min(candidates, len(left)), replace=False))
        best = ties.largest(-_row_sums(apart, pool, partial(np.minimum, nearest)), pool)
        chosen.append(best)
        nearest = np.minimum(nearest, apart[best])
    return np.array(chosen, dtype=np.int64)


def lazy_greedy(apart: Floats, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """The plain greedy set, with gains re-evaluated only where they could still win (Minoux, 1978).

    A gain can only shrink as the set grows, so a stale gain below the best fresh one never needs a look.
    """
    everybody, ties = np.arange(len(apart)), Ties(apart, rng)
    first = ties.largest(-apart.sum(1, dtype=np.float64), everybody)
    chosen, nearest = [first], apart[first].copy()
    gains = _row_sums(apart, everybody, lambda block: np.maximum(nearest - block, 0))
    gains[first] = -np.inf
    while len(chosen) < min(count, len(apart)):
        fresh = np.zeros(len(apart), dtype=bool)
        while True:
            top = int(np.argmax(gains))
            if fresh[top]:
                top = ties.largest(gains, everybody)
            if fresh[top]:
                break
            gains[top] = np.maximum(nearest - apart[top], 0).sum(dtype=np.float64)
            fresh[top] = True
        chosen.append(top)
        nearest = np.minimum(nearest, apart[top])
        gains[top] = -np.inf
    return np.array(chosen, dtype=np.int64)


class Ties:
    """A random order of the clients, by which ties are broken: values that are equal but for rounding."""

    def __init__(self, apart: Floats, rng: np.random.Generator) -> None:
        self.rank = rng.permutation(len(apart))
        self.slack = 1e-10 * float(apart.sum(1, dtype=np.float64).max(initial=0))

    def largest(self, values: Floats, positions: NDArray[np.int64]) -> int:
        """Of `positions`, that of the largest of `values`; of several, the first in the random order."""
        tied = positions[values >= values.max() - self.slack]
        return int(tied[np.argmin(self.rank[tied])])


def _row_sums(table: Floats, rows: NDArray[np.int64], function: Callable[[Floats], Floats]) -> Floats:
    """Sums of function(row) over the `rows` of a large table, some at a time."""
    parts = np.array_split(rows, -(-len(rows) // 500))
    return np.concatenate([function(table[part]).sum(1, dtype=np.float64) for part in parts])


def cluster_shares(apart: Floats, chosen: NDArray[np.int64]) -> Floats:
    """Share of all clients whose nearest chosen one each is [K] (a tie goes to the one chosen first)."""
    nearest = np.argmin(apart[:, chosen], axis=1)
    return np.bincount(nearest, minlength=len(chosen)) / len(apart)
