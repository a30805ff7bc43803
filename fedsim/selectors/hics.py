"""HiCS-FL (Chen and Vikalo, "Heterogeneity-Guided Client Sampling: Towards Fast and Efficient
Non-IID Federated Learning", NeurIPS 2024)."""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedsim.core.arrays import Floats
from fedsim.core.exact import exp, log, mean_row
from fedsim.core.flat import to_device
from fedsim.core.parameters import Count, NonNegative, Positive, parameters
from fedsim.core.types import Ids, Positions
from fedsim.selectors.base import (
    Clients,
    Cohort,
    FedsimError,
    Selection,
    Selector,
    Server,
    ascending,
    softmax,
)
from fedsim.selectors.clustered import (
    angular_distances,
    client_masses,
    draw_one_each,
    similarity_distributions,
)
from fedsim.selectors.similarity import among, update_inner_products, with_latest
from fedsim.selectors.tools import WardInput, clients_to_try
from fedsim.selectors.ward import cut_tree, ward_linkage


@parameters
class HiCS(Selector):
    """Clusters clients by their output-layer updates and prefers clusters with balanced data,
    decreasingly over time.

    H_k is the entropy of softmax(db_k / `temperature`), an estimate of how balanced client k's
    labels are; db_k is the update of the output layer's bias (`source: bias`, the paper) or the row
    means of that of its weights (`weight`, the code). The distance of two clients is the angle
    arccos(cosine) between their output-layer updates + `entropy_weight` |H_i - H_j|. Ward's tree
    over these distances is cut into M clusters (`num_clusters`; None: K). Each of the K picks draws
    a cluster with probability proportional to exp(gamma_t mean H), where gamma_t = `gamma` (1 - (t
    - 1) / T), and then uniformly one of its clients that is not yet picked.

    At first every client is selected once, in random blocks (in the code by ids, without the last N
    mod K). Deviation: a client whose update did not arrive in time or was not finite is selected
    again now and then (`clients_to_try`), else only where there are too few others.

    The published code, by switches: `ward_on: rows` builds the tree from the rows of the distance
    matrix as points; `kept_update: first` keeps each client's first update for the whole run;
    `fallback` replaces the picks by clustered sampling on the same tree (Algorithm 2 of Fraboni et
    al.) if the variance of the clients' H is at least `fallback_variance` (`above`, its last
    version), or smaller (`below`, close to the version before).
    """

    # products and angles in float32, as they are for many clients, and entropies' distances in
    # float64
    pair_bytes = 36
    state = ("updates", "products", "entropy", "seen", "last_tried")

    source: Literal["bias", "weight"]
    temperature: Positive
    entropy_weight: NonNegative
    gamma: NonNegative
    num_clusters: Count | None
    ward_on: WardInput
    kept_update: Literal["latest", "first"]
    fallback: Literal["never", "below", "above"]
    fallback_variance: NonNegative

    def __post_init__(self) -> None:
        self.adaptive = self.fallback != "never"
        self.updates: Tensor | None = None
        self.products: Tensor | None = None
        self.entropy = np.zeros(self.population.num_clients)
        self.seen = np.zeros(self.population.num_clients, dtype=bool)
        self.last_tried = np.zeros(self.population.num_clients, np.int64)

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        ids, count = clients.available, self.cohort_size(clients)
        known = ids[self.seen[ids]]
        chosen = rng.permutation(clients_to_try(ids, self.seen, self.last_tried, round))[:count]
        flat = len(known) > 0 and self.entropy[known].var() < self.fallback_variance
        if not len(chosen) and len(known) and self.fallback == ("below" if flat else "above"):
            tree = ward_linkage(self._distances(known), self.ward_on)
            rows = similarity_distributions(
                tree, client_masses(known, self.population), self.population.cohort_size
            )
            return draw_one_each(rows, known, rng)
        if num_known := min(count - len(chosen), len(known)):
            chosen = np.concatenate(
                [chosen, known[self._draw_clients(known, num_known, round, rng)]]
            )
        if len(chosen) < count:
            others = np.setdiff1d(ids, chosen)
            chosen = np.concatenate(
                [chosen, rng.choice(others, count - len(chosen), replace=False)]
            )
        self.last_tried[chosen] = round
        return Selection(ascending(chosen))

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        rows = np.flatnonzero(~self.seen[cohort.ids] | (self.kept_update == "latest"))
        if not len(rows):
            return
        layer, ids = output_layer(cohort), cohort.ids[rows]
        slopes = (
            class_updates(cohort, layer, self.source).double().cpu().numpy()[rows]
            / self.temperature
        )
        self.entropy[ids] = [entropy(softmax(np.nan_to_num(row))) for row in slopes]
        new = torch.cat([cohort.delta[name].flatten(1) for name in layer], dim=1)
        new = new[to_device(torch.as_tensor(rows), new.device)]
        self.updates = with_latest(self.updates, self.population.num_clients, ids, new)
        self.products = update_inner_products(self.products, self.updates, ids)
        self.seen[ids] = True

    def _draw_clients(self, ids: Ids, count: int, t: int, rng: np.random.Generator) -> Positions:
        labels = self._clusters(ids)
        gamma = self.gamma * (1 - (t - 1) / self.population.num_rounds)
        means = np.array([self.entropy[ids[labels == c]].mean() for c in range(labels.max() + 1)])
        remaining = np.ones(len(ids), dtype=bool)
        picks = []
        for _ in range(count):
            left = np.unique(labels[remaining])
            weights = exp(gamma * (means[left] - means[left].max()))
            cluster = rng.choice(left, p=weights / weights.sum())
            pick = int(rng.choice(np.flatnonzero(remaining & (labels == cluster))))
            remaining[pick] = False
            picks.append(pick)
        return np.array(picks, dtype=np.int64)

    def _clusters(self, ids: Ids) -> Positions:
        tree = ward_linkage(self._distances(ids), self.ward_on)
        return cut_tree(tree, self.num_clusters or self.population.cohort_size)

    def _distances(self, ids: Ids) -> Floats:
        assert self.products is not None
        distances = angular_distances(among(self.products, ids))
        return distances + self.entropy_weight * np.abs(
            self.entropy[ids][:, None] - self.entropy[ids][None, :]
        )


def output_layer(cohort: Cohort) -> list[str]:
    """Names of the trained tensors of the output layer, taken to be the layer of the last trained
    tensor."""
    prefix = cohort.trained[-1].rpartition(".")[0]
    return [name for name in cohort.trained if name.rpartition(".")[0] == prefix]


def class_updates(cohort: Cohort, layer: list[str], source: str) -> Tensor:
    """The update of the output layer's bias, or the row means of the update of its weight, [K, C].

    Raises `FedsimError` if the layer has no such tensor.
    """
    dims = 2 if source == "bias" else 3
    candidates = [cohort.delta[n] for n in layer if cohort.delta[n].dim() == dims]
    if not candidates:
        other = "weight" if source == "bias" else "bias"
        raise FedsimError(
            f"selector.source={source}: the model's output layer has no {source}; use {other}"
        )
    return candidates[-1] if source == "bias" else mean_row(candidates[-1].movedim(2, 0))


def entropy(shares: Floats) -> float:
    """-sum p ln p of the probabilities `shares` [C], in nats."""
    nonzero = shares[shares > 0]
    return float(-(nonzero * log(nonzero)).sum())
