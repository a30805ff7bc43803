"""Active federated learning (Goetz et al., "Active Federated Learning", 2019). Not agnostic FL, which shares its
initials."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedsim.communication.clients import Clients
from fedsim.communication.signals import Signal
from fedsim.errors import at_least, between, check
from fedsim.selectors.base import Selector, ascending
from fedsim.types import Ids, Population, Selection


class AFL(Selector):
    """Draws by a softmax over values v_k = sqrt(n_k) * (mean loss at the model that k last received).

    The int(alpha1 N) clients of lowest value are left out; int((1 - alpha3) K) come from the others with probability
    softmax(alpha2 v), without replacement; the rest uniformly from everybody not drawn yet. Only the selected report a
    new value, of the model before their training. `init: query` asks everybody in round 1 (FedCor's code);
    `equal` starts from equal values. Where too few clients are left to draw from, uniform draws fill up (numpy's
    choice would raise). Ties at the border of the lowest are broken at random.
    """

    needs = frozenset({Signal.LOSSES})
    state = ("values",)

    def __init__(
        self, population: Population, *, alpha1: float, alpha2: float, alpha3: float, init: Literal["query", "equal"]
    ) -> None:
        super().__init__(population)
        check(between("alpha1", alpha1, 0, 1), at_least("alpha2", alpha2, 0), between("alpha3", alpha3, 0, 1))
        self.alpha1, self.alpha2, self.alpha3 = alpha1, alpha2, alpha3
        self.init = init
        self.values = np.zeros(population.num_clients)

    @property
    def start_up_rounds(self) -> int:
        return int(self.init == "query")

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        if round == 1 and self.init == "query":
            self._report(clients.available, clients)
        ids, count = clients.available, self.cohort_size(clients)
        probabilities = self.probabilities(self.values[ids], rng)
        by_value = min(int(round_up((1 - self.alpha3) * count)), int((probabilities > 0).sum()))
        first = rng.choice(len(ids), by_value, replace=False, p=probabilities)
        rest = rng.choice(np.setdiff1d(np.arange(len(ids)), first), count - by_value, replace=False)
        chosen = ascending(ids[np.concatenate([first, rest])])
        self._report(chosen, clients)
        return Selection(chosen)

    def probabilities(self, values: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
        """Softmax over all but the int(alpha1 N) lowest values, 0 for those [len(values)]."""
        values = np.nan_to_num(values, nan=-np.inf)
        order = rng.permutation(len(values))
        order = order[np.argsort(values[order], kind="stable")]
        kept = order[int(round_up(self.alpha1 * len(values))) :]
        weights = np.zeros(len(values))
        if len(kept) and np.isfinite(values[kept]).any():
            weights[kept] = np.exp(self.alpha2 * (values[kept] - values[kept].max()))
        return weights / weights.sum() if weights.sum() > 0 else np.full(len(values), 1 / max(len(values), 1))

    def _report(self, ids: Ids, clients: Clients) -> None:
        self.values[ids] = np.sqrt(self.population.sizes[ids]) * clients.losses(ids)


def round_up(value: float) -> float:
    """`value` with float error removed, so that int() of .3 * 10 is 3."""
    return value + 1e-9
