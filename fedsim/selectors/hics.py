"""HiCS-FL (Chen and Vikalo, "Heterogeneity-Guided Client Sampling: Towards Fast and Efficient Non-IID Federated
Learning", NeurIPS 2024)."""

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.clients import Clients
from fedsim.cohort import Cohort, Ids, Population, Selection
from fedsim.errors import FedsimError, at_least, check, positive
from fedsim.selectors.base import Selector, ascending, softmax
from fedsim.selectors.clustered import angles
from fedsim.selectors.tools.gram import refreshed
from fedsim.selectors.tools.trees import cut, ward
from fedsim.server import Server

Floats = NDArray[np.float64]


class HiCS(Selector):
    """Clusters clients by their latest updates of the output layer, and prefers clusters of balanced data, less so with
    time.

    H_k is the entropy of softmax(db_k / `temperature`), with db_k the update of the output layer's bias (`source:
    bias`, the paper) or the row means of its weights' update (`weight`, the code). Clients are
    arccos(cos of output-layer updates) + `entropy_weight` |H_i - H_j| apart; Ward's tree is cut into K clusters. Each
    of K picks draws a cluster with probability proportional to exp(gamma_t mean H), gamma_t = `gamma` (1 - t / T), then
    one of its clients, uniformly, that is not yet picked. First every client is selected once, in random blocks.
    """

    state = ("updates", "products", "entropy", "seen")

    def __init__(
        self,
        population: Population,
        *,
        source: Literal["bias", "weight"],
        temperature: float,
        entropy_weight: float,
        gamma: float,
    ) -> None:
        super().__init__(population)
        check(
            positive("temperature", temperature),
            at_least("entropy_weight", entropy_weight, 0),
            at_least("gamma", gamma, 0),
        )
        self.source, self.temperature, self.entropy_weight, self.gamma = source, temperature, entropy_weight, gamma
        self.updates: Tensor | None = None
        self.products: Tensor | None = None
        self.entropy = np.zeros(population.num_clients)
        self.seen = np.zeros(population.num_clients, dtype=bool)

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        ids, count = clients.available, self.cohort_size(clients)
        chosen = rng.permutation(ids[~self.seen[ids]])[:count]
        if len(chosen) < count:
            known = ids[self.seen[ids]]
            chosen = np.concatenate([chosen, known[self._draw(known, count - len(chosen), round, rng)]])
        return Selection(ascending(chosen))

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        layer = output_layer(cohort)
        slopes = class_slopes(cohort, layer, self.source).double().cpu().numpy() / self.temperature
        self.entropy[cohort.ids] = [entropy(softmax(np.nan_to_num(row))) for row in slopes]
        new = torch.cat([cohort.delta[name].flatten(1) for name in layer], dim=1)
        if self.updates is None:
            self.updates = new.new_zeros(self.population.num_clients, new.shape[1])
        self.updates[torch.as_tensor(cohort.ids, device=new.device)] = new
        self.products = refreshed(self.products, self.updates, cohort.ids)
        self.seen[cohort.ids] = True

    def _draw(self, ids: Ids, count: int, t: int, rng: np.random.Generator) -> NDArray[np.int64]:
        labels = self._clusters(ids)
        gamma = self.gamma * (1 - t / self.population.num_rounds)
        means = np.array([self.entropy[ids[labels == c]].mean() for c in range(labels.max() + 1)])
        weights, left = np.exp(gamma * (means - means.max())), np.ones(len(ids), dtype=bool)
        picks = []
        for _ in range(count):
            open_ = np.bincount(labels[left], minlength=len(weights)) > 0
            cluster = rng.choice(len(weights), p=weights * open_ / (weights * open_).sum())
            pick = int(rng.choice(np.flatnonzero(left & (labels == cluster))))
            left[pick] = False
            picks.append(pick)
        return np.array(picks, dtype=np.int64)

    def _clusters(self, ids: Ids) -> NDArray[np.int64]:
        if len(ids) == 1 or self.products is None:
            return np.zeros(len(ids), np.int64)
        rows = torch.as_tensor(ids, device=self.products.device)
        apart = angles(self.products if len(ids) == len(self.products) else self.products[rows][:, rows])
        spread = np.abs(self.entropy[ids][:, None] - self.entropy[ids][None, :])
        return cut(ward(apart + self.entropy_weight * spread), self.population.cohort_size)


def output_layer(cohort: Cohort) -> list[str]:
    """Names of the trained tensors of the last layer."""
    prefix = cohort.trained[-1].rpartition(".")[0]
    return [name for name in cohort.trained if name.rpartition(".")[0] == prefix]


def class_slopes(cohort: Cohort, layer: list[str], source: str) -> Tensor:
    """The bias update, or the row means of the weight update, of the output layer [K, C].

    Raises `FedsimError` where the layer has none.
    """
    dims = 2 if source == "bias" else 3
    found = [cohort.delta[n] for n in layer if cohort.delta[n].dim() == dims]
    if not found:
        other = "weight" if source == "bias" else "bias"
        raise FedsimError(f"selector.source={source}: the model's output layer has no {source}; use {other}")
    return found[-1] if source == "bias" else found[-1].mean(2)


def entropy(shares: Floats) -> float:
    """-sum p ln p, in nats."""
    positive_ = shares[shares > 0]
    return float(-(positive_ * np.log(positive_)).sum())
