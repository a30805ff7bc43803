"""LEFL (Abebe, Munoz and Jannesari, "LEFL: Low Entropy Client Sampling in Federated Learning", 2023): strata of
clients whose models predict alike, one client from each."""

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.communication.clients import Clients
from fedsim.communication.signals import Signal
from fedsim.selectors.base import Selector
from fedsim.selectors.tools.hierarchical_clustering import cut, ward
from fedsim.selectors.tools.kl_divergence import divergences
from fedsim.types import Ids, Population, Selection


class LEFL(Selector):
    """Once, every client trains and sends its soft labels of the public samples; clients are clustered into K strata by
    the symmetrised Kullback-Leibler divergence between them (Ward's tree), and every round takes one client at random
    from each stratum.

    `weights: aggregator`, or `strata`: the share of data that the stratum holds. Where strata are fewer than K, or have
    nobody available, others fill up at random. A client that is away in round 1 is asked when it first appears.
    """

    needs = frozenset({Signal.TRAINING, Signal.PUBLIC})
    state = ("predictions", "strata")

    def __init__(self, population: Population, *, weights: Literal["aggregator", "strata"]) -> None:
        super().__init__(population)
        self.weights = weights
        self.predictions: dict[int, Tensor] = {}
        self.strata = np.full(population.num_clients, -1)

    @property
    def start_up_rounds(self) -> int:
        return 1

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        self._ask(clients)
        ids, count = clients.available, self.cohort_size(clients)
        labels = self.strata[ids]
        present = rng.permutation(np.unique(labels))[:count]
        picks = [int(rng.choice(np.flatnonzero(labels == s))) for s in present]
        others = np.setdiff1d(np.arange(len(ids)), picks)
        fill = rng.choice(others, count - len(picks), replace=False)
        chosen = np.sort(np.concatenate([np.array(picks, dtype=np.int64), fill]))
        return Selection(ids[chosen], self._stratum_shares(ids[chosen]) if self.weights == "strata" else None)

    def _ask(self, clients: Clients) -> None:
        new = np.array([i for i in clients.available if int(i) not in self.predictions], dtype=np.int64)
        if not len(new):
            return
        for client, labels in zip(new, clients.public_labels(new), strict=True):
            self.predictions[int(client)] = torch.nan_to_num(labels, nan=0.0).float().cpu()
        known = np.array(sorted(self.predictions), dtype=np.int64)
        self.strata[known] = self._strata_of(known)

    def _strata_of(self, known: Ids) -> NDArray[np.int64]:
        if len(known) == 1:
            return np.zeros(1, np.int64)
        apart = divergences(torch.stack([self.predictions[int(i)] for i in known]), "sum")
        return cut(ward(np.maximum(apart + apart.T, 0) / 2), self.population.cohort_size)

    def _stratum_shares(self, chosen: Ids) -> NDArray[np.float64]:
        """The data of each chosen client's stratum, divided among its chosen clients, over all [K]."""
        totals = np.bincount(self.strata[self.strata >= 0], self.population.sizes[self.strata >= 0])
        times = np.bincount(self.strata[chosen], minlength=len(totals))
        data = totals[self.strata[chosen]] / times[self.strata[chosen]]
        shares: NDArray[np.float64] = data / data.sum()
        return shares
