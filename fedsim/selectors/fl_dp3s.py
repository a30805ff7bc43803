"""FL-DP3S: draw clients with different profiles from a determinantal point process.

Zhang et al., "FL-DP3S: Diversifying Client Selection via Determinantal Point Processes in Federated
Learning", 2023 (arXiv 2303.17358). Exact sampling is from Kulesza and Taskar, "k-DPPs: Fixed-Size
Determinantal Point Processes", ICML 2011.

Each client i has a profile f_i, a vector that describes its data. A determinant is large if the
rows of the matrix point in different directions. So a set S of K clients is drawn with probability
proportional to a determinant of similarities. This favours clients with different profiles:

    s_ij = 1 - |f_i - f_j| / (the largest distance of two profiles)
    L = s^T s,  P(S) proportional to det(L_S)

L_S has the rows and columns of L that belong to S. A distribution of this form is called a k-DPP
with the kernel L.

1. Each client sends its profile once, when it is first available.
2. In every round K clients are drawn from the k-DPP with kernel L. If some clients are unavailable,
   L has the rows and columns of the available ones.

Deviation: In the paper the profile is the mean output of the first layer of the initial model, for
which fedsim has no request. Here it is the gradient of the mean training loss with respect to the
first layer, at the model of that round (in round 1 the initial one). Like the paper's profile, it
is a mean over a client's samples at the first layer.
"""

import math

import numpy as np
import torch
from torch import Tensor

from fedsim.selectors.base import (
    Clients,
    Floats,
    Generator,
    Ids,
    Positions,
    Selection,
    Selector,
    Signal,
    ascending,
    parameters,
)
from fedsim.selectors.layer_names import layer_of
from fedsim.selectors.similarity import among, euclidean_distances, inner_products, with_latest

MIN_EIGENVALUE = 1e-12
"""Lower bound of eigenvalues, as a share of the largest one. Clients with equal profiles would
otherwise leave fewer than K positive eigenvalues."""


@parameters
class FLDP3S(Selector):
    """Draws K clients from a k-DPP over the profiles of the available clients."""

    start_up_rounds = 1
    needs = frozenset({Signal.GRADIENTS})
    exact = False  # eigenvectors depend on LAPACK
    # Distances, similarities, L, its part for a round, eigenvectors, and a checkpoint's copy of L.
    pair_bytes = 48
    state = ("known", "profiles", "kernel")

    def __post_init__(self) -> None:
        self.known = np.zeros(self.population.num_clients, dtype=bool)  # clients with a profile
        self.profiles: Tensor | None = None  # f [N, D], 0 without one; None before the first
        self.kernel = np.empty((0, 0))  # L of the known clients

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        available = clients.available
        new = available[~self.known[available]]
        if len(new):
            self._query_profiles(new, clients)
        rows = np.searchsorted(np.flatnonzero(self.known), available)
        kernel = self.kernel[np.ix_(rows, rows)]
        drawn = draw_k_dpp(kernel, self.cohort_size(clients), rng)
        return Selection(ascending(available[drawn]))

    def _query_profiles(self, new: Ids, clients: Clients) -> None:
        """Request the profiles of the clients `new` and extend the kernel L by them."""
        first_layer = layer_of(clients.layer_names(None)[0])
        profiles = torch.stack(list(clients.gradients(new, layers=[first_layer])))
        self.profiles = with_latest(self.profiles, self.population.num_clients, new, profiles)
        self.known[new] = True
        products = among(inner_products([self.profiles]), np.flatnonzero(self.known))
        distances = euclidean_distances(products).astype(np.float64)
        largest = distances.max()
        similarity = 1 - distances / (largest if largest > 0 else 1.0)
        self.kernel = similarity.T @ similarity


def draw_k_dpp(kernel: Floats, count: int, rng: Generator) -> Positions:
    """Return `count` positions drawn from the k-DPP with the kernel L = `kernel` [n, n].

    First `count` eigenvectors are drawn, then positions from the DPP that these eigenvectors span.
    """
    values, vectors = np.linalg.eigh(kernel)
    values = np.maximum(values, MIN_EIGENVALUE * values.max())
    return draw_projection(vectors[:, draw_eigenvectors(values, count, rng)], rng)


def draw_eigenvectors(values: Floats, count: int, rng: Generator) -> Positions:
    """Return `count` positions drawn from the eigenvalues `values` [n] > 0.

    A set is drawn with probability proportional to the product of its eigenvalues. This takes the
    elementary symmetric polynomials e_l of the first m eigenvalues: e_l is the sum of the products
    of all sets of l of them. Logarithms keep the products from overflowing.
    """
    log_values = np.log(values)
    table = np.full((len(values) + 1, count + 1), -np.inf)  # ln e_l by m (rows) and l (columns)
    table[:, 0] = 0
    for m, log_value in enumerate(log_values, 1):
        table[m, 1:] = np.logaddexp(table[m - 1, 1:], log_value + table[m - 1, :-1])
    picks: list[int] = []
    for m in range(len(values), 0, -1):
        missing = count - len(picks)
        if not missing:
            break
        # With l eigenvalues missing, the m-th one is taken with the probability
        # value_m e_{l-1}(first m - 1) / e_l(first m). If only m are left, all are taken.
        log_probability = log_values[m - 1] + table[m - 1, missing - 1] - table[m, missing]
        if m == missing or rng.random() < math.exp(log_probability):
            picks.append(m - 1)
    return np.array(picks, dtype=np.int64)


def draw_projection(vectors: Floats, rng: Generator) -> Positions:
    """Return k positions drawn from the DPP whose marginal kernel projects on `vectors` [n, k].

    The columns of `vectors` are orthonormal. Positions are drawn one by one. The weight of a
    position is the squared length of the part of its row that is orthogonal to the rows drawn so
    far.
    """
    unexplained = (vectors**2).sum(1)  # the weights [n]
    basis = np.zeros_like(vectors)  # step by step, the factor of the explained part of the kernel
    picks: list[int] = []
    for step in range(vectors.shape[1]):
        unexplained[picks] = 0  # without rounding errors, so that no position is drawn twice
        weights = np.maximum(unexplained, 0)
        probabilities = weights / weights.sum()
        pick = int(rng.choice(len(weights), p=probabilities))
        row = vectors @ vectors[pick] - basis[:, :step] @ basis[pick, :step]
        basis[:, step] = row / math.sqrt(unexplained[pick])
        unexplained -= basis[:, step] ** 2
        picks.append(pick)
    return np.array(picks, dtype=np.int64)
