"""FL-DP3S (Zhang et al., "FL-DP3S: Diversifying Client Selection via Determinantal Point Processes
in Federated Learning", 2023), with exact sampling after Kulesza and Taskar, "k-DPPs: Fixed-Size
Determinantal Point Processes", ICML 2011."""

import math

import numpy as np
import torch
from torch import Tensor

from fedsim.core.arrays import Floats
from fedsim.core.types import Ids, Positions
from fedsim.selectors.base import Clients, Selection, Selector, Signal, ascending, parameters
from fedsim.selectors.similarity import among, euclidean_distances, inner_products, with_latest

# as a share of the largest: clients with the same profile leave fewer than K positive ones
LEAST_EIGENVALUE = 1e-12


@parameters
class FLDP3S(Selector):
    """Draws K clients S with a probability proportional to det(L_S), a k-DPP, which favours unlike
    profiles.

    L = S^T S with similarities s_ij = 1 - |f_i - f_j| / (the largest distance) of profiles f, which
    each client sends once, when it is first available. Deviation: the paper's profile is the mean
    output of the first layer of the initial model, for which there is no question to clients. Here
    it is the gradient of the mean training loss with respect to the first layer, at the model of
    that round, the initial one in round 1; like the paper's, it is a mean over a client's samples
    at that layer. Where some clients are away, the process is that of the others (the rows and
    columns of L that are theirs).
    """

    start_up_rounds = 1
    needs = frozenset({Signal.GRADIENTS})
    exact = False  # eigenvectors are LAPACK's
    pair_bytes = (
        48  # distances, similarities, L, its part and eigenvectors, and a copy for a checkpoint
    )
    state = ("known", "profiles", "kernel")

    def __post_init__(self) -> None:
        self.known = np.zeros(self.population.num_clients, dtype=bool)
        self.profiles: Tensor | None = None
        self.kernel = np.empty((0, 0))  # L of the known clients

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        ids = clients.available
        new = ids[~self.known[ids]]
        if len(new):
            self._ask(new, clients)
        rows = np.searchsorted(np.flatnonzero(self.known), ids)
        kernel = self.kernel[np.ix_(rows, rows)]
        return Selection(ascending(ids[draw_k_dpp(kernel, self.cohort_size(clients), rng)]))

    def _ask(self, new: Ids, clients: Clients) -> None:
        first = clients.layer_names(None)[0]
        found = torch.stack(
            list(clients.gradients(new, layers=[first.rpartition(".")[0] or first]))
        )
        self.profiles = with_latest(self.profiles, self.population.num_clients, new, found)
        self.known[new] = True
        products = among(inner_products([self.profiles]), np.flatnonzero(self.known))
        distances = euclidean_distances(products).astype(np.float64)
        similarity = 1 - distances / (distances.max() or 1.0)
        self.kernel = similarity.T @ similarity


def draw_k_dpp(kernel: Floats, count: int, rng: np.random.Generator) -> Positions:
    """`count` positions, drawn with a probability proportional to the determinant of their part of
    `kernel` [n, n]."""
    values, vectors = np.linalg.eigh(kernel)
    values = np.maximum(values, LEAST_EIGENVALUE * values.max())
    return draw_projection(vectors[:, draw_eigenvectors(values, count, rng)], rng)


def draw_eigenvectors(values: Floats, count: int, rng: np.random.Generator) -> Positions:
    """`count` positions J of the eigenvalues `values` [n] > 0, with a probability proportional to
    their product, by logarithms of the elementary symmetric polynomials e_l of the first m
    eigenvalues."""
    logs = np.log(values)
    table = np.full((len(values) + 1, count + 1), -np.inf)  # ln e_l, by m and l
    table[:, 0] = 0
    for m, own in enumerate(logs, 1):
        table[m, 1:] = np.logaddexp(table[m - 1, 1:], own + table[m - 1, :-1])
    picks: list[int] = []
    for m in range(len(values), 0, -1):
        left = count - len(picks)
        if left and (
            m == left
            or rng.random() < math.exp(logs[m - 1] + table[m - 1, left - 1] - table[m, left])
        ):
            picks.append(m - 1)
    return np.array(picks, dtype=np.int64)


def draw_projection(vectors: Floats, rng: np.random.Generator) -> Positions:
    """As many positions as the orthonormal columns of `vectors` [n, k], from the DPP whose marginal
    kernel projects on them: one by one, by the squared lengths of rows after what the rows drawn
    before explain."""
    left, basis = (vectors**2).sum(1), np.zeros_like(vectors)
    picks: list[int] = []
    for step in range(vectors.shape[1]):
        left[picks] = 0
        weights = np.maximum(left, 0)
        pick = int(rng.choice(len(left), p=weights / weights.sum()))
        row = vectors @ vectors[pick] - basis[:, :step] @ basis[pick, :step]
        basis[:, step] = row / math.sqrt(left[pick])
        left -= basis[:, step] ** 2
        picks.append(pick)
    return np.array(picks, dtype=np.int64)
