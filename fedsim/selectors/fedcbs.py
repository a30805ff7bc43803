"""Fed-CBS (Zhang et al., "Fed-CBS: A Heterogeneity-Aware Client Sampling Mechanism for Federated
Learning via Class-Imbalance Reduction", ICML 2023)."""

import numpy as np

from fedsim.core.arrays import Floats
from fedsim.core.exact import exp, log
from fedsim.selectors.base import (
    Clients,
    NonNegative,
    Selection,
    Selector,
    Signal,
    ascending,
    parameters,
)
from fedsim.selectors.tools import collect_label_counts

MIN_QCID = (
    1e-9  # lower bound of QCID values: a perfectly balanced pool has QCID 0, which has no inverse
)


@parameters
class FedCBS(Selector):
    """Draws clients one by one with probabilities that favour a balanced pool of labels.

    The imbalance of a set S of clients is QCID(S) = sum_ij n_i n_j <h_i, h_j> / (sum_S n_i)^2 - 1 /
    C, where h_i is the label distribution of client i; it is 0 for a balanced pool. The first
    client is drawn with weight 1 / QCID({k}) + `exploration` sqrt(3 ln t / (2 m_k)), where m_k >= 1
    counts the selections of client k so far; the m-th client with weight QCID(S)^(m-1) / QCID(S +
    {k})^m. Clients report their label counts once. Deviation: the paper obtains the inner products
    under encryption; here the server sees the counts.
    """

    start_up_rounds = 1
    needs = frozenset({Signal.LABEL_COUNTS})
    state = ("counts", "pulls")

    exploration: NonNegative

    def __post_init__(self) -> None:
        self.counts = np.empty((self.population.num_clients, 0), np.int64)
        self.pulls = np.zeros(self.population.num_clients, np.int64)

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        self.counts, ids = collect_label_counts(self.counts, clients), clients.available
        counts = self.counts[ids].astype(np.float64)
        bonus = np.sqrt(3 * log(round) / (2 * np.maximum(self.pulls[ids], 1)))
        weights = 1 / qcid_with_each(counts, np.zeros(counts.shape[1])) + self.exploration * bonus
        remaining, picks = np.ones(len(ids), dtype=bool), []
        for m in range(2, self.cohort_size(clients) + 2):
            picks.append(
                int(rng.choice(len(ids), p=weights * remaining / (weights * remaining).sum()))
            )
            remaining[picks[-1]] = False
            if not remaining.any():
                break
            after = np.where(remaining, log(qcid_with_each(counts, counts[picks].sum(0))), np.inf)
            weights = exp(
                -m * (after - after.min())
            )  # 0 for those picked, whose own would overflow
        chosen = ascending(ids[picks])
        self.pulls[chosen] += 1
        return Selection(chosen)


def qcid_with_each(counts: Floats, pool: Floats) -> Floats:
    """QCID [n] of the label counts `pool` [C] after adding each row of `counts` [n, C] to it."""
    pooled = counts + pool
    qcid = (pooled**2).sum(1) / pooled.sum(1) ** 2 - 1 / counts.shape[1]
    return np.maximum(qcid, MIN_QCID)
