"""Selection by mean Shapley values: greedy (GreedyFed: Singhal, Pandey and Popovski, "Greedy Shapley Client Selection
for Communication-Efficient Federated Learning", 2024) or as a bandit with an upper confidence bound."""

import numpy as np

from fedsim.exact.elementary import log
from fedsim.selectors.base import (
    Clients,
    Cohort,
    Population,
    Selection,
    Selector,
    Server,
    Signal,
    ascending,
    at_least,
    check,
    highest,
)
from fedsim.selectors.shapley import Valuation
from fedsim.selectors.tools.first_updates import clients_to_try


class ShapleyBandit(Selector):
    """Selects the K clients of highest mean SV_k + `confidence` sqrt(ln t / m_k), m_k = number of Shapley values so
    far.

    Clients that have not been selected yet rank first, in random order, so that every client is valued once before any
    is chosen by value. `confidence: 0` is GreedyFed. Values that are not finite are ignored. A client without a value
    because its update did not arrive in time or was not finite, of which the papers say nothing, is selected again now
    and then (`clients_to_try`), else only where there are too few others.
    """

    needs = frozenset({Signal.VALIDATION})
    state = ("total", "times", "last_tried")

    def __init__(self, population: Population, *, valuation: Valuation, confidence: float) -> None:
        super().__init__(population)
        check(at_least("confidence", confidence, 0))
        valuation.require_affordable(population)
        self.valuation, self.confidence = valuation, confidence
        self.total = np.zeros(population.num_clients)
        self.times = np.zeros(population.num_clients, np.int64)
        self.last_tried = np.zeros(population.num_clients, np.int64)
        self._rng = np.random.default_rng(0)

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        ids = clients.available
        times = np.maximum(self.times, 1)
        scores = self.total / times + self.confidence * np.sqrt(log(round) / times)
        scores = np.where(self.times > 0, scores, -np.inf)
        scores[clients_to_try(ids, self.times > 0, self.last_tried, round)] = np.inf
        chosen = ascending(ids[highest(scores[ids], self.cohort_size(clients), rng)])
        self.last_tried[chosen] = round
        self._rng = rng
        return Selection(chosen)

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        values = self.valuation.values(cohort, server, self._rng)
        usable = np.isfinite(values)
        self.total[cohort.ids[usable]] += values[usable]
        self.times[cohort.ids[usable]] += 1
