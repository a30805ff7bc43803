"""GPFL as its authors' published code (PBFL) implements it, which is not the algorithm of the paper
(see gpfl.py)."""

from typing import Literal

import numpy as np

from fedsim.core.arrays import Floats
from fedsim.core.types import Cohort, Evaluation, Selection
from fedsim.selectors.base import (
    Clients,
    Count,
    Selector,
    Server,
    Signal,
    ascending,
    log,
    parameters,
    softmax,
)
from fedsim.selectors.gpfl import Exploration, projections


@parameters
class GPFLOfficial(Selector):
    """Selects every client once in a warm-up, then by a bandit on the sign of the change of
    accuracy.

    Warm-up: in each of the first `warmup` rounds, ceil(N / warmup) random clients that have not
    been selected before, whatever K is.

    Reward after each round: c_i is the mean over trained tensors of <w_i - w, g> / |g|, with g the
    server's step of the same round. A selected client's reward is its share of the softmax of c
    over the selected clients, times 1 if the accuracy rose, -1 if it fell, and if it did not change
    .5, -.5 or 0 as the loss fell, rose or did not change. Round 1 is compared with accuracy 0 and
    loss 10^6, because the code does not evaluate the initial model.

    Later rounds: the K clients of highest index sum of rewards / (selections + 1) + alpha(t - 1)
    sqrt(2 ln(t - 1) / selections) are selected; ties go to the higher id. The code averages models
    by data size (`average: null`; `aggregator`: by the aggregator's weights), and evaluates on the
    test set (`reward_eval: test`).
    """

    adaptive = True
    state = ("reward_sum", "pulls", "last")

    warmup: Count
    exploration: Exploration
    reward_eval: Literal["validation", "test"]
    average: Literal["aggregator"] | None

    def __post_init__(self) -> None:
        self.needs = frozenset({Signal(self.reward_eval)})
        self.reward_sum, self.pulls = np.zeros((2, self.population.num_clients))
        self.last, self.start_up_rounds = Evaluation(accuracy=0.0, loss=1e6), self.warmup

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        ids = clients.available
        unseen = ids[self.pulls[ids] == 0]
        if round <= self.warmup and len(unseen):
            chosen = ascending(
                rng.permutation(unseen)[: -(-self.population.num_clients // self.warmup)]
            )
        else:
            index = self.index(round)[ids]
            chosen = ascending(ids[np.lexsort((ids, index))[::-1][: self.cohort_size(clients)]])
        self.pulls[chosen] += 1
        if self.average == "aggregator":
            return Selection(chosen)
        sizes = self.population.sizes[chosen]
        return Selection(chosen, sizes / sizes.sum())

    def index(self, t: int) -> Floats:
        """The bandit index [N] in round t; infinite for clients that have never been selected."""
        alpha = self.exploration.alpha(t - 1, self.population.num_rounds)
        bonus = alpha * np.sqrt(2 * log(max(t - 1, 1)) / np.maximum(self.pulls, 1))
        return np.where(self.pulls > 0, self.reward_sum / (self.pulls + 1) + bonus, np.inf)

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        evaluate = server.validate if self.reward_eval == "validation" else server.test
        before, self.last = self.last, evaluate(server.params)
        step = {n: server.params[n] - cohort.start[n] for n in cohort.trained}
        local = {n: cohort.delta[n] for n in cohort.trained}
        c = np.nan_to_num(projections(local, step, "projection", per_tensor=True))
        self.reward_sum[cohort.ids] += softmax(c) * reward_sign(before, self.last)


def reward_sign(before: Evaluation, after: Evaluation) -> float:
    """1 or -1 if the accuracy rose or fell; else .5, -.5 or 0 if the loss fell, rose or did not
    change, or is nan."""
    if after.accuracy != before.accuracy:
        return float(np.sign(after.accuracy - before.accuracy))
    return ((after.loss < before.loss) - (after.loss > before.loss)) / 2
