"""Selection by mean Shapley values: greedy (GreedyFed: Singhal, Pandey and Popovski, "Greedy Shapley Client Selection
for Communication-Efficient Federated Learning", 2024) or as a bandit with an upper confidence bound."""

import numpy as np

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


class ShapleyBandit(Selector):
    """Selects the K clients of highest mean SV_k + `confidence` sqrt(ln t / m_k), m_k = number of Shapley values so
    far.

    Clients without a Shapley value rank first, in random order, so that every client is valued once before any is
    chosen by value. `confidence: 0` is GreedyFed. Values that are not finite are ignored.
    """

    needs = frozenset({Signal.VALIDATION})
    state = ("total", "times")

    def __init__(self, population: Population, *, valuation: Valuation, confidence: float) -> None:
        super().__init__(population)
        check(at_least("confidence", confidence, 0))
        valuation.require_affordable(population)
        self.valuation, self.confidence = valuation, confidence
        self.total = np.zeros(population.num_clients)
        self.times = np.zeros(population.num_clients, np.int64)
        self._rng = np.random.default_rng(0)

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        ids = clients.available
        times = np.maximum(self.times, 1)
        scores = self.total / times + self.confidence * np.sqrt(np.log(round) / times)
        scores = np.where(self.times > 0, scores, np.inf)
        chosen = highest(scores[ids], self.cohort_size(clients), rng)
        self._rng = rng
        return Selection(ascending(ids[chosen]))

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        values = self.valuation.values(cohort, server, self._rng)
        usable = np.isfinite(values)
        self.total[cohort.ids[usable]] += values[usable]
        self.times[cohort.ids[usable]] += 1
