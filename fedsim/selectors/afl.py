"""Active federated learning (Goetz et al., "Active Federated Learning", 2019), not agnostic
federated learning."""

from typing import Literal

import numpy as np

from fedsim.core.arrays import Floats
from fedsim.core.parameters import NonNegative, Share, parameters
from fedsim.selectors.base import (
    Clients,
    Ids,
    Selection,
    Selector,
    Signal,
    ascending,
    exp,
    floor,
)


@parameters
class AFL(Selector):
    """Draws clients by a softmax over values v_k = sqrt(n_k) * (mean loss of client k at the model
    it last received).

    The int(alpha1 N) clients with the lowest values are excluded. Of the K clients, int((1 -
    alpha3) K) are drawn from the others with probability softmax(alpha2 v), without replacement,
    and the rest uniformly from all clients not yet drawn. Only the selected clients report a new
    value, computed on the model before their training.

    `init: query` requests the loss of each client when it is first available (FedCor's code),
    `equal` starts with equal values. If fewer clients have a positive probability than are to be
    drawn by softmax, uniform draws fill up. Ties at the border of the excluded clients are broken
    at random.
    """

    needs = frozenset({Signal.LOSSES})
    state = ("values", "asked")

    alpha1: Share
    alpha2: NonNegative
    alpha3: Share
    init: Literal["query", "equal"]

    def __post_init__(self) -> None:
        self.values = np.zeros(self.population.num_clients)
        self.asked = np.full(self.population.num_clients, self.init == "equal")
        self.start_up_rounds = int(self.init == "query")

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        ids, count = clients.available, self.cohort_size(clients)
        if not self.asked[ids].all():
            self._update_values(ids[~self.asked[ids]], clients)
        probabilities = self.probabilities(self.values[ids], rng)
        num_by_value = min(floor((1 - self.alpha3) * count), int((probabilities > 0).sum()))
        by_value = rng.choice(len(ids), num_by_value, replace=False, p=probabilities)
        uniform = rng.choice(
            np.setdiff1d(np.arange(len(ids)), by_value), count - num_by_value, replace=False
        )
        chosen = ascending(ids[np.concatenate([by_value, uniform])])
        self._update_values(chosen, clients)
        return Selection(chosen)

    def probabilities(self, values: Floats, rng: np.random.Generator) -> Floats:
        """Probabilities [n] for `values` [n]: a softmax over all but the int(alpha1 n) lowest,
        which get 0, as do values that are not finite; uniform if no finite value remains."""
        values = np.where(np.isfinite(values), values, -np.inf)
        order = rng.permutation(len(values))
        order = order[np.argsort(values[order], kind="stable")]
        kept = order[floor(self.alpha1 * len(values)) :]
        kept = kept[np.isfinite(values[kept])]
        weights = np.zeros(len(values))
        if len(kept):
            weights[kept] = exp(self.alpha2 * (values[kept] - values[kept].max()))
        return (
            weights / weights.sum()
            if weights.sum() > 0
            else np.full(len(values), 1 / max(len(values), 1))
        )

    def _update_values(self, ids: Ids, clients: Clients) -> None:
        self.values[ids] = np.sqrt(self.population.sizes[ids]) * clients.losses(ids)
        self.asked[ids] = True
