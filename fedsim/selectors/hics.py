"""HiCS-FL: prefer clients with balanced labels, which their output-layer updates give away.

Chen and Vikalo, "Heterogeneity-Guided Client Sampling: Towards Fast and Efficient Non-IID Federated
Learning", NeurIPS 2024 (arXiv 2310.00198).

The update of the output layer's bias tells how balanced a client's labels are. HiCS-FL clusters the
clients by their output-layer updates and draws from clusters with balanced labels more often,
decreasingly over time.

    H_k = entropy of softmax(db_k / temperature)
    distance of two clients = arccos(cosine of their output-layer updates)
                              + entropy_weight |H_i - H_j|
    P(cluster) proportional to exp(gamma_t * mean H of its clients)
    gamma_t = gamma (1 - (t - 1) / T)

db_k is the update of the output layer's bias of client k. t is the round, and T the number of
rounds. K of the N clients are to be selected in each round.

1. At first every client is selected once, in random blocks.
2. After that, Ward's method makes a tree of the clients from their distances.
3. The tree is cut into M clusters. Each of the K picks draws a cluster from P, and then uniformly
   one of its clients that is not picked yet.

Deviations: The first rounds of the published code go through the ids and skip the last N mod K of
them. A client whose update did not arrive in time or was not finite is selected again now and then
(`clients_to_try`), and otherwise only if there are too few others.

The published code differs from the paper. These switches select it:

- `source: weight` takes the row means of the update of the output layer's weights for db_k.
- `ward_on: rows` builds the tree from the rows of the distance matrix as points.
- `kept_update: first` keeps each client's first update for the whole run.
- `fallback` replaces step 3 by clustered sampling on the same tree (Algorithm 2 of Fraboni et al.),
  depending on the variance of the clients' H. With `above`, the code's last version, it does so if
  the variance is at least `fallback_variance`. With `below`, close to the version before, it does
  so if the variance is smaller.
"""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedsim.core.exact import mean_row
from fedsim.core.flat import to_device
from fedsim.selectors.base import (
    Clients,
    Cohort,
    Count,
    FedsimError,
    Floats,
    Generator,
    Ids,
    NonNegative,
    Positive,
    Selection,
    Selector,
    Server,
    Signal,
    ascending,
    exp,
    log,
    parameters,
    softmax,
)
from fedsim.selectors.candidates import clients_to_try, fill_up
from fedsim.selectors.clustered import (
    angular_distances,
    client_masses,
    draw_one_each,
    similarity_distributions,
)
from fedsim.selectors.similarity import among, update_inner_products, with_latest
from fedsim.selectors.ward import cut_tree, ward_linkage


@parameters
class HiCS(Selector):
    """Draws clients from clusters, preferring clusters whose clients have balanced labels."""

    # With many clients, products and angles are float32. Differences of entropies are float64.
    pair_bytes = 36
    needs = frozenset({Signal.UPDATES})
    state = ("updates", "products", "entropy", "seen", "last_tried")

    source: Literal["bias", "weight"]  # tensor of the output layer that gives db_k
    temperature: Positive  # of the softmax in H_k
    entropy_weight: NonNegative  # weight of |H_i - H_j| in distances
    gamma: NonNegative  # preference for clusters of high entropy in round 1
    num_clusters: Count | None  # M; None: K
    ward_on: Literal["distances", "rows"]  # input of Ward's tree
    kept_update: Literal["latest", "first"]  # update by which clients are compared
    fallback: Literal["never", "below", "above"]  # when clustered sampling takes over
    fallback_variance: NonNegative  # threshold of the variance of H

    def __post_init__(self) -> None:
        num_clients = self.population.num_clients
        self.adaptive = self.fallback != "never"
        self.max_clusters = self.population.cohort_size
        if self.num_clusters is not None:
            self.max_clusters = self.num_clusters
        # latest (or first) updates of the output layer [N, D], 0 without one; None before any
        self.updates: Tensor | None = None
        self.products: Tensor | None = None  # their inner products [N, N]
        self.entropy = np.zeros(num_clients)  # H [N]
        self.seen = np.zeros(num_clients, dtype=bool)  # clients of which an update arrived [N]
        self.last_tried = np.zeros(num_clients, np.int64)  # latest selection [N], 0: never

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        available = clients.available
        count = self.cohort_size(clients)
        known = available[self.seen[available]]
        # 1. Clients that were never selected
        new = clients_to_try(available, self.seen, self.last_tried, round)
        chosen = rng.permutation(new)[:count]
        if len(known) and len(chosen) < count:
            # 2. Tree of the known clients
            tree = ward_linkage(self._distances(known), self.ward_on)
            # 3. Clustered sampling, or picks
            if not len(chosen) and self._falls_back(known):
                masses = client_masses(known, self.population)
                distributions = similarity_distributions(tree, masses, self.population.cohort_size)
                selection = draw_one_each(distributions, known, rng)
                self.last_tried[selection.ids] = round
                return selection
            clusters = cut_tree(tree, self.max_clusters)
            gamma = self.gamma * (1 - (round - 1) / self.population.num_rounds)
            num_picks = min(count - len(chosen), len(known))
            picks = draw_from_clusters(clusters, self.entropy[known], gamma, num_picks, rng)
            chosen = np.concatenate([chosen, known[picks]])
        chosen = ascending(fill_up(chosen, available, count, rng))
        self.last_tried[chosen] = round
        return Selection(chosen)

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        rows = np.arange(len(cohort.ids))
        if self.kept_update == "first":
            rows = np.flatnonzero(~self.seen[cohort.ids])
        if not len(rows):
            return
        ids = cohort.ids[rows]
        layer = output_layer(cohort)
        by_class = class_updates(cohort, layer, self.source).double().cpu().numpy()[rows]
        for client, db in zip(ids, by_class / self.temperature, strict=True):
            self.entropy[client] = entropy(softmax(np.nan_to_num(db)))
        updates = torch.cat([cohort.delta[name].flatten(1) for name in layer], dim=1)
        updates = updates[to_device(torch.as_tensor(rows), updates.device)]
        self.updates = with_latest(self.updates, self.population.num_clients, ids, updates)
        self.products = update_inner_products(self.products, self.updates, ids)
        self.seen[ids] = True

    def _falls_back(self, known: Ids) -> bool:
        """Return whether clustered sampling replaces the picks."""
        is_below = self.entropy[known].var() < self.fallback_variance
        return self.fallback == ("below" if is_below else "above")

    def _distances(self, ids: Ids) -> Floats:
        """Return the distances [n, n] of the clients `ids`."""
        assert self.products is not None
        angles = angular_distances(among(self.products, ids))
        entropies = self.entropy[ids]
        differences = np.abs(entropies[:, None] - entropies[None, :])
        return angles + self.entropy_weight * differences


def draw_from_clusters(
    clusters: Ids, entropies: Floats, gamma: float, count: int, rng: Generator
) -> list[int]:
    """Return `count` different positions. For each a cluster is drawn, then one of its clients.

    `clusters` [n] are the clusters 0..M-1 of n clients, and `entropies` [n] their H.
    """
    means = np.array([entropies[clusters == c].mean() for c in range(clusters.max() + 1)])
    is_left = np.ones(len(clusters), dtype=bool)
    picks: list[int] = []
    for _ in range(count):
        nonempty = np.unique(clusters[is_left])
        weights = exp(gamma * (means[nonempty] - means[nonempty].max()))
        cluster = rng.choice(nonempty, p=weights / weights.sum())
        members = np.flatnonzero(is_left & (clusters == cluster))
        pick = int(rng.choice(members))
        picks.append(pick)
        is_left[pick] = False
    return picks


def output_layer(cohort: Cohort) -> list[str]:
    """Return the names of the trained tensors of the output layer.

    It is taken to be the layer of the last trained tensor. In contrast to `layer_names.layer_of`,
    parameters without a dot in their names are one layer. A model of a single module has only such.
    """
    prefix = cohort.trained[-1].rpartition(".")[0]
    return [name for name in cohort.trained if name.rpartition(".")[0] == prefix]


def class_updates(cohort: Cohort, layer: list[str], source: str) -> Tensor:
    """Return the update of the output layer for each class, [K, C].

    It is the update of the bias, or the row means of the update of the weight. Raises `FedsimError`
    if the layer has no such tensor.
    """
    num_dims = 2 if source == "bias" else 3  # [K, C] or [K, C, inputs of the layer]
    updates = [cohort.delta[name] for name in layer if cohort.delta[name].dim() == num_dims]
    if not updates:
        remedy = "weight" if source == "bias" else "bias"
        raise FedsimError(
            f"selector.source={source}: the model's output layer has no {source}; set {remedy}"
        )
    if source == "bias":
        return updates[-1]
    by_input = updates[-1].movedim(2, 0)  # [inputs, K, C]
    return mean_row(by_input)


def entropy(shares: Floats) -> float:
    """Return -sum p ln p of the probabilities `shares` [C], in nats."""
    nonzero = shares[shares > 0]
    return float(-(nonzero * log(nonzero)).sum())
