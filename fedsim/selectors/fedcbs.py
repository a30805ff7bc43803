"""Fed-CBS (Zhang et al., "Fed-CBS: A Heterogeneity-Aware Client Sampling Mechanism for Federated Learning via
Class-Imbalance Reduction", ICML 2023)."""

import numpy as np
from numpy.typing import NDArray

from fedsim.communication.clients import Clients
from fedsim.communication.signals import Signal
from fedsim.errors import at_least, check
from fedsim.selectors.base import Selector, ascending
from fedsim.selectors.tools.label_counts import asked
from fedsim.types import Population, Selection

Floats = NDArray[np.float64]
SMALLEST = 1e-9
"""QCID of a perfectly balanced set, so that its inverse exists."""


class FedCBS(Selector):
    """Draws clients one by one so that their pooled labels are balanced.

    QCID(S) = sum_ij n_i n_j <h_i, h_j> / (sum_S n_i)^2 - 1 / C, 0 for a balanced pool. The first client is drawn with
    weight 1 / QCID(k) + `exploration` sqrt(3 ln t / (2 n_k)), n_k its selections so far (at least 1); the m-th with
    weight QCID(S)^(m-1) / QCID(S + k)^m. Clients tell their label counts once. (The paper obtains the inner products
    under encryption; here the server sees the counts.)
    """

    needs = frozenset({Signal.LABEL_COUNTS})
    state = ("counts", "pulls")

    def __init__(self, population: Population, *, exploration: float) -> None:
        super().__init__(population)
        check(at_least("exploration", exploration, 0))
        self.exploration = exploration
        self.counts = np.empty((population.num_clients, 0), np.int64)
        self.pulls = np.zeros(population.num_clients, np.int64)

    @property
    def start_up_rounds(self) -> int:
        return 1

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        self.counts, ids = asked(self.counts, clients), clients.available
        counts = self.counts[ids].astype(np.float64)
        bonus = np.sqrt(3 * np.log(round) / (2 * np.maximum(self.pulls[ids], 1)))
        weights = 1 / imbalances(counts, np.zeros(counts.shape[1])) + self.exploration * bonus
        left, picks = np.ones(len(ids), dtype=bool), []
        for m in range(2, self.cohort_size(clients) + 2):
            picks.append(int(rng.choice(len(ids), p=weights * left / (weights * left).sum())))
            left[picks[-1]] = False
            if not left.any():
                break
            after = np.log(imbalances(counts, counts[picks].sum(0)))
            weights = np.exp(-m * (after - after[left].min()))
        chosen = ascending(ids[picks])
        self.pulls[chosen] += 1
        return Selection(chosen)


def imbalances(counts: Floats, pool: Floats) -> Floats:
    """QCID of the `pool` [C] with each row of `counts` [n, C] added [n]."""
    pooled = counts + pool
    qcid = (pooled**2).sum(1) / pooled.sum(1) ** 2 - 1 / counts.shape[1]
    result: Floats = np.maximum(qcid, SMALLEST)
    return result
