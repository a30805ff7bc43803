"""HiCS-FL (Chen and Vikalo, "Heterogeneity-Guided Client Sampling: Towards Fast and Efficient Non-IID Federated
Learning", NeurIPS 2024)."""

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.communication.clients import Clients
from fedsim.communication.server import Server
from fedsim.errors import FedsimError, at_least, check, positive
from fedsim.selectors.base import Selector, ascending, softmax
from fedsim.selectors.clustered import angles, by_similarity, drawn, masses_of
from fedsim.selectors.tools.hierarchical_clustering import WardOn, cut, ward
from fedsim.selectors.tools.inner_products import refreshed
from fedsim.types import Cohort, Ids, Population, Selection

Floats = NDArray[np.float64]


class HiCS(Selector):
    """Clusters clients by their latest updates of the output layer, and prefers clusters of balanced data, less so with
    time.

    H_k is the entropy of softmax(db_k / `temperature`), with db_k the update of the output layer's bias (`source:
    bias`, the paper) or the row means of its weights' update (`weight`, the code). Clients are
    arccos(cos of output-layer updates) + `entropy_weight` |H_i - H_j| apart; Ward's tree is cut into M clusters
    (`num_clusters`, null: K). Each of K picks draws a cluster with probability proportional to exp(gamma_t mean H),
    gamma_t = `gamma` (1 - (t - 1) / T), then one of its clients, uniformly, that is not yet picked. First every client
    is selected once, in random blocks (by rising id in the code, which leaves out the last N mod K).

    Switches for what the published code does besides: `ward_on: rows` builds the tree on the rows of the table of
    distances as if they were points; `kept_update: first` keeps each client's first update for good (the code, where
    clients' Dirichlet concentrations differ), not its `latest` (the paper). `fallback` puts clustered sampling
    (Algorithm 2 of Fraboni et al., weights draws / K) on the same tree in place of the picks: `above`, where the
    variance of the clients' H is at least `fallback_variance`, is the code's last version; `below`, where it is
    smaller, is closer to the version before, which took that branch where all clients have one concentration; `never`
    is the paper's algorithm.
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
        num_clusters: int | None,
        ward_on: WardOn,
        kept_update: Literal["latest", "first"],
        fallback: Literal["never", "below", "above"],
        fallback_variance: float,
    ) -> None:
        super().__init__(population)
        check(
            positive("temperature", temperature),
            at_least("entropy_weight", entropy_weight, 0),
            at_least("gamma", gamma, 0),
            None if num_clusters is None else at_least("num_clusters", num_clusters, 1),
            at_least("fallback_variance", fallback_variance, 0),
        )
        self.source, self.temperature, self.entropy_weight, self.gamma = source, temperature, entropy_weight, gamma
        self.num_clusters = population.cohort_size if num_clusters is None else num_clusters
        self.ward_on, self.kept_update = ward_on, kept_update
        self.fallback, self.fallback_variance = fallback, fallback_variance
        self.adaptive = fallback != "never"
        self.updates: Tensor | None = None
        self.products: Tensor | None = None
        self.entropy = np.zeros(population.num_clients)
        self.seen = np.zeros(population.num_clients, dtype=bool)

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        ids, count = clients.available, self.cohort_size(clients)
        chosen = rng.permutation(ids[~self.seen[ids]])[:count]
        if not len(chosen) and self._falls_back(ids):
            tree = ward(self._distances(ids), self.ward_on)
            rows = by_similarity(tree, masses_of(ids, self.population), self.population.cohort_size)
            return drawn(rows, ids, rng)
        if len(chosen) < count:
            known = ids[self.seen[ids]]
            chosen = np.concatenate([chosen, known[self._draw(known, count - len(chosen), round, rng)]])
        return Selection(ascending(chosen))

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        taken = np.flatnonzero(~self.seen[cohort.ids] | (self.kept_update == "latest"))
        if not len(taken):
            return
        layer, ids = output_layer(cohort), cohort.ids[taken]
        slopes = class_slopes(cohort, layer, self.source).double().cpu().numpy()[taken] / self.temperature
        self.entropy[ids] = [entropy(softmax(np.nan_to_num(row))) for row in slopes]
        new = torch.cat([cohort.delta[name].flatten(1)[taken] for name in layer], dim=1)
        if self.updates is None:
            self.updates = new.new_zeros(self.population.num_clients, new.shape[1])
        self.updates[torch.as_tensor(ids, device=new.device)] = new
        self.products = refreshed(self.products, self.updates, ids)
        self.seen[ids] = True

    def _falls_back(self, ids: Ids) -> bool:
        flat = bool(self.entropy[ids].var() < self.fallback_variance)
        return self.fallback == ("below" if flat else "above")

    def _draw(self, ids: Ids, count: int, t: int, rng: np.random.Generator) -> NDArray[np.int64]:
        labels = self._clusters(ids)
        gamma = self.gamma * (1 - (t - 1) / self.population.num_rounds)
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
        return cut(ward(self._distances(ids), self.ward_on), self.num_clusters)

    def _distances(self, ids: Ids) -> Floats:
        assert self.products is not None
        rows = torch.as_tensor(ids, device=self.products.device)
        apart = angles(self.products if len(ids) == len(self.products) else self.products[rows][:, rows])
        return apart + self.entropy_weight * np.abs(self.entropy[ids][:, None] - self.entropy[ids][None, :])


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
