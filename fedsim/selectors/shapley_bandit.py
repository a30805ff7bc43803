"""Clients of highest mean Shapley value: greedily (GreedyFed: Singhal, Pandey and Popovski, "Greedy Shapley Client
Selection for Communication-Efficient Federated Learning", 2024) or as a bandit with an upper confidence bound."""

import numpy as np

from fedsim.communication.clients import Clients
from fedsim.communication.server import Server
from fedsim.communication.signals import Signal
from fedsim.errors import at_least, check
from fedsim.selectors.base import Selector, ascending, highest
from fedsim.selectors.shapley import Valuation
from fedsim.types import Cohort, Population, Selection


class ShapleyBandit(Selector):
    """The K highest of mean SV_k + `confidence` sqrt(ln t / n_k), n_k the number of values so far.

    Clients without a value come first, in random order, so that everybody is valued once before anybody is chosen.
    `confidence` 0 is GreedyFed. Values that are not finite are dropped.
    """

    needs = frozenset({Signal.VALIDATION})
    state = ("total", "times")

    def __init__(self, population: Population, *, valuation: Valuation, confidence: float) -> None:
        super().__init__(population)
        check(at_least("confidence", confidence, 0))
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
