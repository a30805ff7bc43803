"""GPFL as its authors' published code runs it (PBFL), which is not the algorithm of the paper: see gpfl.py for that."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedsim.communication.clients import Clients
from fedsim.communication.server import Server
from fedsim.communication.signals import Signal
from fedsim.errors import at_least, check
from fedsim.selectors.base import Selector, ascending, softmax
from fedsim.selectors.exploration import Exploration
from fedsim.selectors.gpfl import projections
from fedsim.types import Cohort, Evaluation, Population, Selection

START = Evaluation(accuracy=0.0, loss=1e6)
"""What round 1 is compared with: the code does not evaluate the initial model."""


class GPFLOfficial(Selector):
    """Random coverage first, then a bandit on the sign of the change of accuracy.

    For `warmup` rounds, ceil(N / warmup) random clients that have not been selected before (whatever K is). After each
    round: c_i = the mean over trained tensors of <w_i - w, g> / |g| with g this round's own step; the softmax of c
    over the selected, times 1 if the accuracy rose, -1 if it fell, and .5, -.5 or 0 by the fall of the loss if it
    stayed (round 1 is compared with accuracy 0 and loss 10^6, so that its reward is positive); the score of a client is
    the sum of its rewards / (selections + 1), its index in round t score + alpha(t - 1) sqrt(2 ln(t - 1) / selections):
    `exploration` is asked with the rounds so far, rho (t - 1) / T if linear. The K of highest index are selected (ties:
    the higher id). Averages by data size. The code takes accuracy and loss from the test set (`reward_eval: test`).
    """

    adaptive = True
    state = ("reward_sum", "pulls", "last")

    def __init__(
        self,
        population: Population,
        *,
        warmup: int,
        exploration: Exploration,
        reward_eval: Literal["validation", "test"],
    ) -> None:
        super().__init__(population)
        check(at_least("warmup", warmup, 1))
        self.warmup = warmup
        self.exploration = exploration
        self.reward_eval = reward_eval
        self.needs = frozenset({Signal.VALIDATION if reward_eval == "validation" else Signal.TEST})
        self.reward_sum = np.zeros(population.num_clients)
        self.pulls = np.zeros(population.num_clients)
        self.last = START

    @property
    def caveat(self) -> str | None:
        return "selector.reward_eval=test: this selection sees the test set" if self.reward_eval == "test" else None

    @property
    def start_up_rounds(self) -> int:
        return self.warmup

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        ids = clients.available
        unseen = ids[self.pulls[ids] == 0]
        if round <= self.warmup and len(unseen):
            block = -(-self.population.num_clients // self.warmup)
            chosen = ascending(rng.permutation(unseen)[:block])
        else:
            index = self.index(round)[ids]
            chosen = ascending(ids[np.lexsort((ids, index))[::-1][: self.cohort_size(clients)]])
        self.pulls[chosen] += 1
        sizes = self.population.sizes[chosen]
        return Selection(chosen, sizes / sizes.sum())

    def index(self, t: int) -> NDArray[np.float64]:
        """Score plus exploration in round t [N]; a client never selected comes first."""
        alpha = self.exploration.alpha(t - 1, self.population.num_rounds)
        bonus = alpha * np.sqrt(2 * np.log(max(t - 1, 1)) / np.maximum(self.pulls, 1))
        return np.where(self.pulls > 0, self.reward_sum / (self.pulls + 1) + bonus, np.inf)

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        evaluate = server.validate if self.reward_eval == "validation" else server.test
        before, self.last = self.last, evaluate(server.params)
        step = {n: server.params[n] - cohort.start[n] for n in cohort.trained}
        local = {n: cohort.delta[n] for n in cohort.trained}
        c = np.nan_to_num(projections(local, step, "projection", per_tensor=True))
        self.reward_sum[cohort.ids] += softmax(c) * verdict(before, self.last)


def verdict(before: Evaluation, after: Evaluation) -> float:
    """1 or -1 by the accuracy; where it stayed, .5, -.5 or 0 by the loss."""
    if after.accuracy != before.accuracy:
        return float(np.sign(after.accuracy - before.accuracy))
    return float(np.sign(before.loss - after.loss)) / 2
