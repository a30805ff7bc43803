"""LEFL: draw one client from each of K groups of clients whose models predict alike.

Abebe, Munoz and Jannesari, "LEFL: Low Entropy Client Sampling in Federated Learning", 2023 (arXiv
2312.17430).

Clients with similar data train similar models. LEFL clusters the clients once by what their models
predict, and then samples from every cluster, so that each cohort covers all kinds of data.

1. When it is first available, every client trains once and sends its predicted class probabilities
   for the server's public samples.
2. The server clusters all clients of which it has predictions into K strata by Ward's method. K is
   the number of clients to select. The distance of two clients is the mean of the Kullback-Leibler
   divergences of their predictions in both directions.
3. In every round it draws one client at random from each stratum.

What the paper leaves open: If fewer than K strata have available clients, other random clients fill
up. New predictions cluster all clients again. A prediction of nan, from a model that has diverged,
counts as equal probabilities of all classes.
"""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedsim.selectors.base import (
    Clients,
    Floats,
    Generator,
    Ids,
    Selection,
    Selector,
    Signal,
    ascending,
    log,
    parameters,
)
from fedsim.selectors.candidates import fill_up
from fedsim.selectors.predictions import kl_divergences
from fedsim.selectors.ward import cut_tree, ward_linkage


@parameters
class LEFL(Selector):
    """Draws one client at random from each of K strata in every round."""

    start_up_rounds = 1
    needs = frozenset({Signal.TRAINING, Signal.PUBLIC})
    # Divergences in float32 and float64. Ward's tree takes half as many distances in float64.
    pair_bytes = 24
    state = ("predictions", "strata")

    weights: Literal["aggregator", "strata"]  # aggregation weights: as usual, or shares of strata

    def __post_init__(self) -> None:
        self.predictions: dict[int, Tensor] = {}  # log-probabilities [M, C] by client
        self.strata = np.full(self.population.num_clients, -1)  # [N], -1: no predictions yet

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        self._query_predictions(clients)
        available = clients.available
        count = self.cohort_size(clients)
        strata = self.strata[available]
        picks = [
            int(rng.choice(np.flatnonzero(strata == stratum)))
            for stratum in rng.permutation(np.unique(strata))[:count]
        ]
        everybody = np.arange(len(available))
        chosen = ascending(available[fill_up(np.array(picks), everybody, count, rng)])
        if self.weights == "aggregator":
            return Selection(chosen)
        return Selection(chosen, self._stratum_shares(chosen))

    def _query_predictions(self, clients: Clients) -> None:
        """Request the predictions of new clients, and cluster all known clients (steps 1, 2)."""
        new = np.setdiff1d(clients.available, list(self.predictions))
        if not len(new):
            return
        for client, log_p in zip(new.tolist(), clients.public_labels(new), strict=True):
            equal = -float(log(log_p.shape[1]))
            self.predictions[client] = torch.nan_to_num(log_p, nan=equal).float().cpu()
        known = sorted(self.predictions)
        log_p = torch.stack([self.predictions[client] for client in known])
        divergences = kl_divergences(log_p, "sum")
        distances = np.maximum(divergences + divergences.T, 0) / 2
        self.strata[known] = cut_tree(ward_linkage(distances), self.population.cohort_size)

    def _stratum_shares(self, chosen: Ids) -> Floats:
        """Return weights [K] of sum 1 for the clients `chosen`.

        A stratum's number of samples is divided equally among its chosen clients.
        """
        known = self.strata >= 0
        samples = np.bincount(self.strata[known], self.population.sizes[known])
        strata = self.strata[chosen]
        num_chosen = np.bincount(strata, minlength=len(samples))
        weights = samples[strata] / num_chosen[strata]
        return weights / weights.sum()
