"""DivFL (Balakrishnan et al., "Diverse Client Selection for Federated Learning via Submodular Maximization", 2022)."""

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.clients import Clients, Signal
from fedsim.cohort import Ids, Population, Selection
from fedsim.errors import at_least, check
from fedsim.selectors.base import Selector

Floats = NDArray[np.float64]


class DivFL(Selector):
    """The K clients S that minimise G(S) = sum_k min_{i in S} |grad_k - grad_i|, greedily (facility location).

    `mode: ideal` asks everybody for a full gradient every round; `no_overhead` asks everybody in round 1 and then only
    those selected, before they train. `greedy: lazy` gives the plain greedy set with fewer evaluations; `stochastic`
    looks at max(K, share * N) random candidates in each step. `weights: gamma` averages by |clients nearest to i| / N
    (the paper), `aggregator` leaves it to the aggregator (the official code: by size).
    """

    needs = frozenset({Signal.GRADIENTS})
    state = ("known", "gradients")

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
        self.known = np.zeros(population.num_clients, dtype=bool)

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        ids = clients.available
        self._refresh(ids if self.mode == "ideal" else ids[~self.known[ids]], clients)
        assert self.gradients is not None
        distances = pairwise_distances(self.gradients[torch.as_tensor(ids)])
        rows = self._pick(distances, self.cohort_size(clients), rng)
        chosen = np.sort(rows)
        if self.mode == "no_overhead" and round > 1:
            self._refresh(ids[chosen], clients)
        return Selection(ids[chosen], cluster_shares(distances, chosen) if self.weights == "gamma" else None)

    def _refresh(self, ids: Ids, clients: Clients) -> None:
        for client, gradient in zip(ids, clients.gradients(ids), strict=True):
            if self.gradients is None:
                self.gradients = gradient.new_zeros(self.population.num_clients, len(gradient))
            self.gradients[int(client)] = torch.nan_to_num(gradient, nan=0.0, posinf=0.0, neginf=0.0)
            self.known[client] = True

    def _pick(self, distances: Floats, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        if self.greedy == "lazy":
            return lazy_greedy(distances, count)
        candidates = None
        if self.greedy == "stochastic":
            candidates = max(count, int(self.share * self.population.num_clients))
        return plain_greedy(distances, count, rng, candidates)


def pairwise_distances(vectors: Tensor) -> Floats:
    """Euclidean distances [N, N] of the rows, float64."""
    result: Floats = torch.cdist(vectors.double(), vectors.double()).cpu().numpy()
    return result


def plain_greedy(
    distances: Floats, count: int, rng: np.random.Generator, candidates: int | None = None
) -> NDArray[np.int64]:
    """`count` positions in the order chosen; each lowers G the most (of `candidates` random ones, if given)."""
    nearest = np.full(len(distances), np.inf)
    chosen: list[int] = []
    for _ in range(min(count, len(distances))):
        left = np.setdiff1d(np.arange(len(distances)), chosen)
        pool = left if candidates is None else np.sort(rng.choice(left, min(candidates, len(left)), replace=False))
        sums = np.minimum(distances[pool], nearest).sum(1)
        best = int(pool[np.argmin(_without_rounding_errors(sums))])
        chosen.append(best)
        nearest = np.minimum(nearest, distances[best])
    return np.array(chosen, dtype=np.int64)


def lazy_greedy(distances: Floats, count: int) -> NDArray[np.int64]:
    """The plain greedy set, with gains re-evaluated only where they could still win (Minoux, 1978).

    A gain can only shrink as the set grows, so a stale gain below the best fresh one never needs a look.
    """
    first = int(np.argmin(_without_rounding_errors(distances.sum(1))))
    chosen, nearest = [first], distances[first].copy()
    gains = np.maximum(nearest - distances, 0).sum(1)
    gains[first] = -np.inf
    while len(chosen) < min(count, len(distances)):
        fresh = np.zeros(len(distances), dtype=bool)
        while True:
            top = int(np.argmax(_without_rounding_errors(gains)))
            if fresh[top]:
                break
            gains[top] = np.maximum(nearest - distances[top], 0).sum()
            fresh[top] = True
        chosen.append(top)
        nearest = np.minimum(nearest, distances[top])
        gains[top] = -np.inf
    return np.array(chosen, dtype=np.int64)


def _without_rounding_errors(values: Floats) -> Floats:
    """Values that are equal but for rounding made equal, so that a tie goes to the lowest position."""
    finite = np.abs(values[np.isfinite(values)])
    unit = finite.max() * 1e-10 if len(finite) and finite.max() > 0 else 1.0
    return np.round(values / unit).astype(np.float64)


def cluster_shares(distances: Floats, chosen: NDArray[np.int64]) -> Floats:
    """Share of all clients whose nearest chosen one each is [K] (a tie goes to the first)."""
    nearest = np.argmin(distances[:, chosen], axis=1)
    return np.bincount(nearest, minlength=len(chosen)) / len(distances)
