"""Power-of-choice (Cho, Wang, Joshi: "Towards Understanding Biased Client Selection in Federated
Learning", 2022)."""

from typing import Literal

import numpy as np

from fedsim.core.arrays import Floats
from fedsim.core.parameters import Problems, parameters
from fedsim.core.types import Cohort, Ids, Selection
from fedsim.selectors.base import (
    Clients,
    Selector,
    Server,
    Signal,
    ascending,
    highest,
    rule,
    without_infinity,
)
from fedsim.selectors.base import weighted_without_replacement as drawn_by_weight
from fedsim.selectors.tools import clients_to_try


@parameters
class PowerOfChoice(Selector):
    """Draws d candidates with probability proportional to n_k, then selects the K with the highest
    local losses.

    `num_candidates` is d, K <= d <= N (None: 2K, at most N). `estimate` says how a candidate's loss
    is obtained:

    - `full` (pow-d): on all its data at the current model.
    - `batch` (cpow-d): on one random mini-batch at the current model.
    - `last` (rpow-d): its mean training loss at its latest participation, without a request; clients that have never
      been selected rank first, and those whose update has never arrived last, but first now and then
      (`clients_to_try`).
    - `trained`: all candidates train and upload, and their mean training losses are ranked (GPFL's code, which uses
      those of the last epoch).

    `schedule`: `constant`, or `adaptive` (adapow-d: d = N in the first half of the rounds, then d =
    K; known only from a public re-implementation of the authors' scripts). Candidates are drawn one
    by one without replacement. Ties among losses are broken at random; losses that are not finite
    rank last. With d = K it is random selection by size. The paper averages the selected models
    with equal weights: `aggregator=uniform`.
    """

    draws_by_size = True
    state = ("last_loss", "seen", "last_tried")

    num_candidates: int | None
    estimate: Literal["full", "batch", "last", "trained"]
    schedule: Literal["constant", "adaptive"]

    def problems(self) -> Problems:
        n, k = self.population.num_clients, self.population.cohort_size
        range_ = f"must lie in [cohort_size={k}, num_clients={n}]"
        yield rule(k <= self.drawn <= n, "num_candidates", self.drawn, range_, "2 * K is usual")

    def __post_init__(self) -> None:
        n = self.population.num_clients
        self.last_loss = np.zeros(n)
        self.seen = np.zeros(n, dtype=bool)
        self.last_tried = np.zeros(n, np.int64)
        self.start_up_rounds = 0 if self.schedule == "constant" else self.population.num_rounds // 2
        self.needs = frozenset(
            {Signal.TRAINING_LOSS if self.estimate in ("last", "trained") else Signal.LOSSES}
        )

    @property
    def drawn(self) -> int:
        """d."""
        usual = min(2 * self.population.cohort_size, self.population.num_clients)
        return usual if self.num_candidates is None else self.num_candidates

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        count, available = self.cohort_size(clients), clients.available
        drawn = drawn_by_weight(
            self.population.shares[available], self._num_candidates_in(round), rng
        )
        chosen = candidates = ascending(available[drawn])
        if len(candidates) > count:
            chosen = ascending(
                candidates[highest(self._scores(candidates, clients, round), count, rng)]
            )
        self.last_tried[chosen] = round
        return Selection(chosen)

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        if self.estimate == "last":
            assert cohort.loss is not None
            self.last_loss[cohort.ids] = cohort.loss
            self.seen[cohort.ids] = True

    def _num_candidates_in(self, round: int) -> int:
        if self.schedule == "constant":
            return self.drawn
        first_half = round <= self.population.num_rounds / 2
        return self.population.num_clients if first_half else self.population.cohort_size

    def _scores(self, candidates: Ids, clients: Clients, round: int) -> Floats:
        if self.estimate == "last":
            scores = np.where(self.seen, without_infinity(self.last_loss), -np.inf)
            scores[clients_to_try(candidates, self.seen, self.last_tried, round)] = np.inf
            return scores[candidates]
        if self.estimate == "trained":
            return without_infinity(np.asarray(clients.collect(candidates).loss))
        ask = clients.losses if self.estimate == "full" else clients.batch_losses
        return without_infinity(ask(candidates))
