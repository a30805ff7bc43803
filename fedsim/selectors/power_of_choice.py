"""Power-of-choice: of d random candidates, select the K with the highest losses.

Cho, Wang and Joshi, "Towards Understanding Biased Client Selection in Federated Learning",
AISTATS 2022 (arXiv 2010.01243 is its longer preprint).

Clients with high losses hold what the model has not learnt yet, so training on them speeds up
convergence, at the price of a bias towards them. The number d of candidates balances the two: with
d = K the method is random selection by size, with d = N it is the most biased. N is the number of
clients, K the number of clients to select.

In each round:

1. Draw d candidates without replacement, with probability proportional to n_k, the number of
   samples of client k.
2. Estimate the loss F_k(w) of each candidate k at the current model w.
3. Select the K candidates with the highest losses.

The variants of the paper differ in how the loss is estimated: pow-d on all local data, cpow-d on
one mini-batch, rpow-d from the latest participation, without any request.

What the paper leaves open: Ties are broken at random. Losses that are not finite rank last. rpow-d
ranks clients that were never selected first. It ranks clients whose update never arrived last, but
first now and then (`clients_to_try`). The paper averages the selected models with equal weights:
`aggregator=uniform`. adapow-d is known only from a public re-implementation of the authors'
scripts.
"""

from typing import Literal

import numpy as np

from fedsim.selectors.base import (
    Clients,
    Cohort,
    Floats,
    Generator,
    Ids,
    Problems,
    Selection,
    Selector,
    Server,
    Signal,
    ascending,
    highest,
    parameters,
    rule,
    weighted_without_replacement,
    without_infinity,
)
from fedsim.selectors.candidates import clients_to_try

ESTIMATES = {
    "full": {Signal.LOSSES},
    "batch": {Signal.LOSSES},
    "last": {Signal.TRAINING_LOSS},
    # candidates send their updates with the loss
    "trained": {Signal.TRAINING_LOSS, Signal.UPDATES},
}
"""The signals that each estimate of losses needs."""


@parameters
class PowerOfChoice(Selector):
    """Draws d candidates in proportion to n_k and selects the K with the highest losses.

    `estimate` is the loss by which candidates are ranked:

    - `full` (pow-d): the loss of the current model on all local data.
    - `batch` (cpow-d): the loss of the current model on one random mini-batch.
    - `last` (rpow-d): the mean training loss of the client's latest participation.
    - `trained`: all candidates train and upload, and their mean training losses are ranked. GPFL's
      code does so, with the losses of the last epoch.
    """

    draws_by_size = True
    state = ("latest_losses", "seen", "last_tried")

    num_candidates: int | None  # d in [K, N]; None: 2K, at most N
    estimate: Literal["full", "batch", "last", "trained"]  # how losses are estimated, see above
    schedule: Literal["constant", "adaptive"]  # adaptive: d = N in the first half of rounds, then K

    def problems(self) -> Problems:
        n, k = self.population.num_clients, self.population.cohort_size
        text = f"must lie in [cohort_size={k}, num_clients={n}]"
        d = self.usual_num_candidates
        yield rule(k <= d <= n, "num_candidates", d, text, "2 * K is usual")

    def __post_init__(self) -> None:
        num_clients = self.population.num_clients
        self.latest_losses = np.zeros(num_clients)  # training losses [N], for `estimate: last`
        self.seen = np.zeros(num_clients, dtype=bool)  # clients with such a loss [N]
        self.last_tried = np.zeros(num_clients, np.int64)  # latest selection [N], 0: never
        if self.schedule == "adaptive":
            self.start_up_rounds = self.population.num_rounds // 2
        self.needs = frozenset(ESTIMATES[self.estimate])

    @property
    def usual_num_candidates(self) -> int:
        """The number of candidates d of the constant schedule."""
        if self.num_candidates is not None:
            return self.num_candidates
        return min(2 * self.population.cohort_size, self.population.num_clients)

    def num_candidates_in(self, round: int) -> int:
        """Return the number of candidates d in `round`."""
        if self.schedule == "constant":
            return self.usual_num_candidates
        in_first_half = round <= self.population.num_rounds / 2
        return self.population.num_clients if in_first_half else self.population.cohort_size

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        available = clients.available
        # 1. Candidates
        shares = self.population.shares[available]
        drawn = weighted_without_replacement(shares, self.num_candidates_in(round), rng)
        chosen = ascending(available[drawn])
        count = self.cohort_size(clients)
        if len(chosen) > count:
            # 2. Their losses
            losses = self._losses(chosen, clients, round)
            # 3. The highest ones
            chosen = ascending(chosen[highest(losses, count, rng)])
        self.last_tried[chosen] = round
        return Selection(chosen)

    def _losses(self, candidates: Ids, clients: Clients, round: int) -> Floats:
        """Return the estimated losses of the candidates.

        A loss of nan ranks last in `highest`. With `estimate: last`, clients to try next have the
        loss infinity, and other clients without a loss minus infinity.
        """
        if self.estimate == "last":
            losses = np.where(self.seen, without_infinity(self.latest_losses), -np.inf)
            losses[clients_to_try(candidates, self.seen, self.last_tried, round)] = np.inf
            return losses[candidates]
        if self.estimate == "trained":
            return without_infinity(np.asarray(clients.collect(candidates).loss))
        request = clients.losses if self.estimate == "full" else clients.batch_losses
        return without_infinity(request(candidates))

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        if self.estimate == "last":
            assert cohort.loss is not None
            self.latest_losses[cohort.ids] = cohort.loss
            self.seen[cohort.ids] = True
