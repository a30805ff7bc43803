"""Clustered sampling (Fraboni, Vidal, Kameni and Lorenzi, "Clustered Sampling: Low-Variance and Improved
Representativity for Clients Selection in Federated Learning", ICML 2021)."""

from abc import abstractmethod
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.communication.clients import Clients
from fedsim.communication.server import Server
from fedsim.selectors.base import Selector
from fedsim.selectors.tools.hierarchical_clustering import WardOn, ward
from fedsim.selectors.tools.inner_products import distances, refreshed
from fedsim.types import Cohort, Ids, Population, Selection

Floats = NDArray[np.float64]
FULL = 1e-9
"""Slack of a bin or cluster of mass 1."""


class _Clustered(Selector):
    """One client from each of K distributions r_1..r_K with sum_k r_ki = K p_i; weights are draws / K, so the average
    is an unbiased estimate of full participation's sum_i p_i w_i. A client drawn twice trains and uploads once. Where
    clients are away, p is that of the others."""

    adaptive = True

    @abstractmethod
    def distributions(self, clients: Clients) -> Floats:
        """r [K, len(available)], rows of sum 1."""

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        return drawn(self.distributions(clients), clients.available, rng)


class ClusteredBySize(_Clustered):
    """Algorithm 1: clients by falling n_k, poured into K bins."""

    def distributions(self, clients: Clients) -> Floats:
        masses = masses_of(clients.available, self.population)
        return pour(np.zeros((self.population.cohort_size, len(masses))), masses, np.argsort(-masses, kind="stable"))


class ClusteredBySimilarity(_Clustered):
    """Algorithm 2: clusters of clients with like updates, each of at most 1/K of the data.

    The latest update of each client (zero, and at distance 0 from all, before its first) gives `distance`: the angle
    arccos of the cosine, or the L1 or L2 norm of the difference (L1 takes N^2 P operations a round, without a matrix
    product). Ward's tree is cut into the largest clusters of mass at most 1 (clients carry K p_i); the K heaviest are
    kept, and the members of the others poured into their gaps. A client of mass above 1 first fills bins of its own.

    `ward_on: distances` (the paper) builds the tree on these distances; `rows` on the rows of their table [N, N] as if
    they were points: the published code hands scipy the square table (and squares the L2 norm, which is not done here).
    """

    state = ("updates", "products")

    def __init__(self, population: Population, *, distance: Literal["cosine", "l1", "l2"], ward_on: WardOn) -> None:
        super().__init__(population)
        self.distance, self.ward_on = distance, ward_on
        self.updates: Tensor | None = None
        self.products: Tensor | None = None

    def distributions(self, clients: Clients) -> Floats:
        tree = ward(self._distances(clients), self.ward_on)
        return by_similarity(tree, masses_of(clients.available, self.population), self.population.cohort_size)

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        new = cohort.updates
        if self.updates is None:
            self.updates = new.new_zeros(self.population.num_clients, new.shape[1])
        self.updates[torch.as_tensor(cohort.ids, device=new.device)] = new
        if self.distance != "l1":
            self.products = refreshed(self.products, self.updates, cohort.ids)

    def _distances(self, clients: Clients) -> Floats:
        ids = torch.as_tensor(clients.available)
        if self.updates is None:
            return np.zeros((len(ids), len(ids)))
        if self.distance == "l1":
            rows = self.updates[ids.to(self.updates.device)].double()
            return torch.cdist(rows, rows, p=1).cpu().numpy()
        assert self.products is not None
        gram = self.products
        if len(ids) < len(gram):
            gram = gram[ids.to(gram.device)][:, ids.to(gram.device)]
        return distances(gram) if self.distance == "l2" else angles(gram)


def masses_of(ids: Ids, population: Population) -> Floats:
    """K p_i of the clients `ids`, with p their shares of each other's data."""
    sizes = population.sizes[ids]
    masses: Floats = population.cohort_size * sizes / sizes.sum()
    return masses


def by_similarity(tree: Floats, masses: Floats, count: int) -> Floats:
    """Algorithm 2's `count` distributions [count, N] over clients of these `masses` [N], from a linkage of them."""
    rows, masses, alone = np.zeros((count, len(masses))), masses.copy(), 0
    for client in np.flatnonzero(masses > 1 + FULL):
        whole = int(masses[client] + FULL)
        rows[alone : alone + whole, client] = 1
        masses[client] -= whole
        alone += whole
    clusters = sorted(heaviest_within(tree, masses), key=lambda c: -masses[c].sum())
    kept, others = clusters[: count - alone], clusters[count - alone :]
    for row, members in zip(rows[alone:], kept, strict=False):
        row[members] = masses[members]
    return pour(rows, masses, np.concatenate([np.empty(0, np.int64), *others]))


def drawn(rows: Floats, ids: Ids, rng: np.random.Generator) -> Selection:
    """One of `ids` from each distribution in `rows` [K, len(ids)], weighing its draws / K."""
    draws = [int(rng.choice(len(row), p=row / row.sum())) for row in rows]
    counts = np.bincount(draws, minlength=len(ids))
    chosen = np.flatnonzero(counts)
    return Selection(ids[chosen], counts[chosen] / len(rows))


def angles(gram: Tensor) -> Floats:
    """arccos of the cosines of vectors with these inner products [N, N]; 0 to a zero vector."""
    lengths = gram.diagonal().clamp(min=0).sqrt()
    inverse = torch.where(lengths > 0, 1 / lengths, 0.0)
    table = (gram * inverse[:, None]).mul_(inverse[None, :]).clamp_(-1, 1).arccos_()
    zero = lengths == 0
    table[zero] = 0
    table[:, zero] = 0
    return table.fill_diagonal_(0).cpu().numpy()


def pour(rows: Floats, masses: Floats, order: NDArray[np.int64]) -> Floats:
    """`masses` of the clients in `order` poured into the gaps of `rows` (each holds at most 1), row after row."""
    row = 0
    for client in order:
        left = masses[client]
        while left > FULL and row < len(rows):
            poured = min(1 - rows[row].sum(), left)
            rows[row, client] += max(poured, 0)
            left -= max(poured, 0)
            if rows[row].sum() >= 1 - FULL:
                row += 1
    return rows


def heaviest_within(tree: Floats, masses: Floats) -> list[NDArray[np.int64]]:
    """The largest clusters of a linkage `tree` [N - 1, 4] whose mass is at most 1: positions of their members."""
    num = len(masses)
    weight = np.concatenate([masses, np.zeros(len(tree))])
    members: list[list[int] | None] = [[i] for i in range(num)]
    clusters: list[NDArray[np.int64]] = []
    for node, (a, b) in enumerate(tree[:, :2].astype(np.int64), start=num):
        weight[node] = weight[a] + weight[b]
        left, right = members[a], members[b]
        if weight[node] <= 1 + FULL and left is not None and right is not None:
            members.append(left + right)
            continue
        clusters += [np.array(sorted(part)) for part in (left, right) if part is not None]
        members.append(None)
    last = members[-1]
    return [*clusters, np.array(sorted(last))] if last is not None else clusters
