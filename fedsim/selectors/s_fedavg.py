"""S-FedAvg (Nagalapatti and Narayanam, "Game of Gradients: Mitigating Irrelevant Clients in Federated Learning",
AAAI 2021)."""

import numpy as np

from fedsim.core.exact import log
from fedsim.selectors.base import (
    Clients,
    Cohort,
    Problems,
    Selection,
    Selector,
    Server,
    Share,
    Signal,
    ascending,
    parameters,
)
from fedsim.selectors.shapley import Valuation


@parameters
class SFedAvg(Selector):
    """Draws clients without replacement with probabilities softmax(phi), phi being a running mean of Shapley values.

    phi_k = 1 / N initially; for the clients that took part it becomes `keep` phi_k + (1 - `keep`) SV_k, with SV_k the
    Shapley value of the round. Shapley values that are not finite are ignored.

    The K clients of the largest keys phi - ln(-ln u) are drawn, u uniform: Efraimidis and Spirakis' (2006) u^(1/w) with
    w = exp(phi), twice in logarithms, so that no weight becomes 0.
    """

    needs = frozenset({Signal.VALIDATION})
    state = ("relevance",)

    valuation: Valuation
    keep: Share

    def problems(self) -> Problems:
        yield self.valuation.cost_problem(self.population)

    def __post_init__(self) -> None:
        self.relevance = np.full(self.population.num_clients, 1 / self.population.num_clients)
        self._rng = np.random.default_rng(0)

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        ids = clients.available
        keys = self.relevance[ids] - log(-log(rng.random(len(ids))))
        drawn = np.argsort(-keys, kind="stable")[: self.cohort_size(clients)]
        self._rng = rng
        return Selection(ascending(ids[drawn]))

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        values = self.valuation.values(cohort, server, self._rng)
        updated = self.keep * self.relevance[cohort.ids] + (1 - self.keep) * values
        self.relevance[cohort.ids] = np.where(np.isfinite(values), updated, self.relevance[cohort.ids])
