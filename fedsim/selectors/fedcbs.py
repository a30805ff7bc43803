"""Fed-CBS: draw clients such that their pooled labels are balanced.

Zhang, Li, Tang, Sun, Chen, Zhang, Chen, Chen and Li, "Fed-CBS: A Heterogeneity-Aware Client
Sampling Mechanism for Federated Learning via Class-Imbalance Reduction", ICML 2023 (arXiv
2209.15245).

A model that is trained on a balanced pool of labels favours no class. Fed-CBS measures the
imbalance of a set S of clients by the quadratic class-imbalance degree, which is 0 for a balanced
pool:

    QCID(S) = sum_{i,j in S} n_i n_j <h_i, h_j> / (sum_{i in S} n_i)^2 - 1 / C

Client i has n_i samples with the label distribution h_i. C is the number of classes. The K clients
are drawn one by one:

1. Draw the first client with weight 1 / QCID({k}) + lambda sqrt(3 ln t / (2 m_k)). m_k >= 1 is the
   number of selections of client k so far, t the round.
2. Draw the m-th client with weight QCID(S)^(m-1) / QCID(S + {k})^m. S is the set of the clients
   drawn so far.

Deviations: The paper obtains the inner products under encryption. Here clients report their label
counts once, and the server sees them. QCID is at least 1e-9, because 0 has no inverse.
"""

import numpy as np

from fedsim.selectors.base import (
    Clients,
    Floats,
    Generator,
    NonNegative,
    Selection,
    Selector,
    Signal,
    ascending,
    exp,
    log,
    parameters,
)
from fedsim.selectors.label_counts import collect_label_counts

MIN_QCID = 1e-9
"""Lower bound of QCID values: 0, the value of a balanced pool, has no inverse."""


@parameters
class FedCBS(Selector):
    """Draws clients one by one with probabilities that favour a balanced pool of labels."""

    start_up_rounds = 1
    needs = frozenset({Signal.LABEL_COUNTS})
    state = ("counts", "pulls")

    exploration: NonNegative  # lambda, the weight of the bonus for clients seldom selected

    def __post_init__(self) -> None:
        num_clients = self.population.num_clients
        self.counts = np.empty((num_clients, 0), np.int64)  # label counts [N, C]
        self.pulls = np.zeros(num_clients, np.int64)  # m, selections of each client [N]

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        available = clients.available
        self.counts = collect_label_counts(self.counts, clients)
        counts = self.counts[available].astype(np.float64)
        # 1. The first client
        bonus = np.sqrt(3 * log(round) / (2 * np.maximum(self.pulls[available], 1)))
        weights = 1 / qcid_with_each(counts, np.zeros(counts.shape[1])) + self.exploration * bonus
        picks = [_draw(weights, rng)]
        # 2. The others
        for m in range(2, self.cohort_size(clients) + 1):
            log_qcid = log(qcid_with_each(counts, counts[picks].sum(0)))
            log_qcid[picks] = np.inf  # weight 0
            # Weights up to a factor: QCID(S)^(m-1) is the same for all clients.
            picks.append(_draw(exp(-m * (log_qcid - log_qcid.min())), rng))
        chosen = ascending(available[picks])
        self.pulls[chosen] += 1
        return Selection(chosen)


def _draw(weights: Floats, rng: Generator) -> int:
    """Return a position drawn in proportion to `weights`."""
    return int(rng.choice(len(weights), p=weights / weights.sum()))


def qcid_with_each(counts: Floats, pool: Floats) -> Floats:
    """Return the QCID [n] of the label counts `pool` [C] after adding each row of `counts`
    [n, C]."""
    pooled = counts + pool
    concentration = (pooled**2).sum(1) / pooled.sum(1) ** 2
    return np.maximum(concentration - 1 / counts.shape[1], MIN_QCID)
