"""Active federated learning (AFL): clients with high losses are drawn more often.

Goetz, Malik, Bui, Moon, Liu and Kumar, "Active Federated Learning", 2019 (arXiv 1909.12641). It is
not agnostic federated learning, which has the same initials.

Each client has a value: how much there is to gain from training on it. The server draws clients by
a softmax over the values. Only the selected clients report a new value, so that the method costs
little; the values of the other clients are stale.

    v_k = sqrt(n_k) * (mean loss of client k at the model that it received last)

with n_k the number of samples of client k.

Algorithm of a round with n available clients, of which K are selected:

1. The int(alpha1 n) clients of lowest value get probability 0.
2. The other clients get probabilities softmax(alpha2 v).
3. int((1 - alpha3) K) clients are drawn from these probabilities, without replacement.
4. The rest of the K clients is drawn uniformly from the clients that are not drawn yet.

What the paper leaves open: Initial values are requested from all clients, as in FedCor's code, or
are equal. If too few clients have a positive probability in step 3, more are drawn in step 4. Ties
at the border of the excluded clients are broken at random. Clients with values that are not finite
have probability 0 in step 2.
"""

from typing import Literal

import numpy as np

from fedsim.selectors.base import (
    Clients,
    Floats,
    Generator,
    Ids,
    NonNegative,
    Selection,
    Selector,
    Share,
    Signal,
    ascending,
    exp,
    floor,
    parameters,
)
from fedsim.selectors.candidates import fill_up


@parameters
class AFL(Selector):
    """Draws most clients by a softmax over sqrt(n_k) * loss, and the rest uniformly."""

    needs = frozenset({Signal.LOSSES})
    state = ("values", "has_value")

    alpha1: Share  # share of clients with the lowest values that are excluded
    alpha2: NonNegative  # inverse temperature of the softmax
    alpha3: Share  # share of the cohort that is drawn uniformly
    init: Literal["query", "equal"]  # initial values: requested when first available, or equal

    def __post_init__(self) -> None:
        num_clients = self.population.num_clients
        self.values = np.zeros(num_clients)  # v [N]
        # clients [N] whose value need not be requested any more
        self.has_value = np.full(num_clients, self.init == "equal")
        self.start_up_rounds = int(self.init == "query")

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        available = clients.available
        new = available[~self.has_value[available]]
        if len(new):
            self._update_values(new, clients)
        count = self.cohort_size(clients)
        probabilities = self.probabilities(self.values[available], rng)
        num_by_value = min(floor((1 - self.alpha3) * count), int((probabilities > 0).sum()))
        by_value = rng.choice(len(available), num_by_value, replace=False, p=probabilities)
        positions = fill_up(by_value, np.arange(len(available)), count, rng)
        chosen = ascending(available[positions])
        self._update_values(chosen, clients)
        return Selection(chosen)

    def probabilities(self, values: Floats, rng: Generator) -> Floats:
        """Return the probabilities [n] of clients with the `values` [n] (steps 1 and 2).

        They are uniform if no finite value remains.
        """
        num = len(values)
        values = np.where(np.isfinite(values), values, -np.inf)
        shuffled = rng.permutation(num)  # so that the stable sort breaks ties at random
        order = shuffled[np.argsort(values[shuffled], kind="stable")]
        included = order[floor(self.alpha1 * num) :]
        included = included[np.isfinite(values[included])]
        if not len(included):
            return np.full(num, 1 / max(num, 1))
        weights = np.zeros(num)
        excess = values[included] - values[included].max()  # at most 0: exp cannot overflow
        weights[included] = exp(self.alpha2 * excess)
        return weights / weights.sum()

    def _update_values(self, ids: Ids, clients: Clients) -> None:
        """Request the losses of `ids` and set their values."""
        self.values[ids] = np.sqrt(self.population.sizes[ids]) * clients.losses(ids)
        self.has_value[ids] = True
