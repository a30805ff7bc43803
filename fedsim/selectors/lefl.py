"""LEFL (Abebe, Munoz and Jannesari, "LEFL: Low Entropy Client Sampling in Federated Learning",
2023): stratified sampling over clusters of clients whose models make similar predictions."""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedsim.core.arrays import Ints
from fedsim.selectors.base import Clients, Floats, Ids, Selection, Selector, Signal, parameters
from fedsim.selectors.tools import kl_divergences
from fedsim.selectors.ward import cut_tree, ward_linkage


@parameters
class LEFL(Selector):
    """Draws one client at random from each of K strata in every round.

    Once, when it is first available, every client trains and sends its predicted class
    probabilities for the public samples. Clients are clustered into K strata by Ward's method on
    the symmetrised Kullback-Leibler divergences between these predictions. If there are fewer than
    K strata with available clients, other random clients fill up.

    `weights: aggregator` leaves the aggregation weights to the aggregator; `strata` uses each
    stratum's share of data.
    """

    start_up_rounds = 1
    needs = frozenset({Signal.TRAINING, Signal.PUBLIC})
    pair_bytes = 24  # divergences in float32 and 64, and halves in float64 for Ward's tree
    state = ("predictions", "strata")

    weights: Literal["aggregator", "strata"]

    def __post_init__(self) -> None:
        self.predictions: dict[int, Tensor] = {}
        self.strata = np.full(self.population.num_clients, -1)

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        self._query_predictions(clients)
        ids, count = clients.available, self.cohort_size(clients)
        labels = self.strata[ids]
        present = rng.permutation(np.unique(labels))[:count]
        picks = [int(rng.choice(np.flatnonzero(labels == s))) for s in present]
        unpicked = np.setdiff1d(np.arange(len(ids)), picks)
        fill = rng.choice(unpicked, count - len(picks), replace=False)
        chosen = np.sort(np.concatenate([np.array(picks, dtype=np.int64), fill]))
        return Selection(
            ids[chosen], self._stratum_shares(ids[chosen]) if self.weights == "strata" else None
        )

    def _query_predictions(self, clients: Clients) -> None:
        new = np.array(
            [i for i in clients.available if int(i) not in self.predictions], dtype=np.int64
        )
        if not len(new):
            return
        found = torch.stack(
            [torch.nan_to_num(labels, nan=0.0).float() for labels in clients.public_labels(new)]
        ).cpu()
        self.predictions.update(zip(new.tolist(), found.unbind(), strict=True))
        known = np.array(sorted(self.predictions), dtype=np.int64)
        self.strata[known] = self._cluster(known)

    def _cluster(self, known: Ids) -> Ints:
        divergence = kl_divergences(torch.stack([self.predictions[int(i)] for i in known]), "sum")
        return cut_tree(
            ward_linkage(np.maximum(divergence + divergence.T, 0) / 2), self.population.cohort_size
        )

    def _stratum_shares(self, chosen: Ids) -> Floats:
        """Weights [K] of sum 1: each stratum's amount of data, divided equally among its chosen
        clients."""
        totals = np.bincount(self.strata[self.strata >= 0], self.population.sizes[self.strata >= 0])
        counts = np.bincount(self.strata[chosen], minlength=len(totals))
        data = totals[self.strata[chosen]] / counts[self.strata[chosen]]
        return data / data.sum()
