"""GPFL as its authors' published code runs it, which is not the algorithm of the paper.

Na, Liang and Yiu, "GPFL: A Gradient Projection-Based Client Selection Framework for Efficient
Federated Learning", 2024 (arXiv 2403.17833); code: joapolarbear/PBFL on GitHub. gpfl.py is the
algorithm of the paper.

The code rewards clients by the sign of the change of the test accuracy, shared among the selected
clients by the projections of their updates on the server's step of the same round.

1. Warm-up: In each of the first `warmup` rounds, select ceil(N / warmup) random clients that were
   not selected before. N is the number of clients. K, the usual number to select, has no effect.
2. Later rounds, with t the round: Select the K clients with the highest index. Of equal ones the
   higher id comes first. The index of a client is

       (sum of its rewards) / (number of its selections + 1)
       + alpha(t - 1) sqrt(2 ln(t - 1) / (number of its selections))

3. After each round: c_i is the mean over the trained tensors of <w_i - w, g> / |g|. w is the global
   model before the round, w_i the client's model, and g the server's step of this round. The reward
   of a client is its share of the softmax of c over the clients whose updates arrived, times a
   factor. The factor is 1 if the accuracy rose and -1 if it fell. If the accuracy did not change,
   the factor is 0.5, -0.5 or 0 if the loss fell, rose or did not change.

Round 1 is compared with accuracy 0 and loss 10^6, because the code does not evaluate the initial
model. The code averages models by data size (`average: null`) and evaluates on the test set
(`reward_eval: test`).
"""

from typing import Literal

import numpy as np

from fedsim.selectors.base import (
    Clients,
    Cohort,
    Count,
    Evaluation,
    Floats,
    Generator,
    Selection,
    Selector,
    Server,
    Signal,
    ascending,
    log,
    parameters,
    softmax,
)
from fedsim.selectors.gpfl import Exploration, cover
from fedsim.selectors.gradient_projection import project


@parameters
class GPFLOfficial(Selector):
    """Selects every client once, then by a bandit on the sign of the change of accuracy."""

    adaptive = True
    state = ("reward_sum", "pulls", "latest_evaluation")

    warmup: Count  # rounds in which every client is selected once
    exploration: Exploration  # alpha over the rounds
    reward_eval: Literal["validation", "test"]  # data on which rewards are evaluated
    average: Literal["aggregator"] | None  # None: weights by data size; or those of the aggregator

    def __post_init__(self) -> None:
        num_clients = self.population.num_clients
        self.needs = frozenset({Signal(self.reward_eval), Signal.UPDATES})
        self.reward_sum = np.zeros(num_clients)  # sum of each client's rewards [N]
        self.pulls = np.zeros(num_clients)  # selections of each client [N]
        # of the global model after the latest round in which updates arrived
        self.latest_evaluation = Evaluation(accuracy=0.0, loss=1e6)
        self.start_up_rounds = self.warmup

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        available = clients.available
        new = available[self.pulls[available] == 0]
        if round <= self.warmup and len(new):
            # 1. Warm-up
            chosen = cover(new, self.population.num_clients, self.warmup, rng)
        else:
            # 2. The highest index
            index = self.index(round)[available]
            order = np.lexsort((available, index))[::-1]  # by index, then by id, descending
            chosen = ascending(available[order[: self.cohort_size(clients)]])
        self.pulls[chosen] += 1
        if self.average == "aggregator":
            return Selection(chosen)
        sizes = self.population.sizes[chosen]
        return Selection(chosen, sizes / sizes.sum())

    def index(self, t: int) -> Floats:
        """Return the index [N] in round t; infinite for clients that were never selected."""
        alpha = self.exploration.alpha(t - 1, self.population.num_rounds)
        bonus = alpha * np.sqrt(2 * log(max(t - 1, 1)) / np.maximum(self.pulls, 1))
        return np.where(self.pulls > 0, self.reward_sum / (self.pulls + 1) + bonus, np.inf)

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        # 3. Rewards
        evaluate = server.validate if self.reward_eval == "validation" else server.test
        before = self.latest_evaluation
        self.latest_evaluation = evaluate(server.params)
        step = {n: server.params[n] - cohort.start[n] for n in cohort.trained}
        updates = {n: cohort.delta[n] for n in cohort.trained}
        c = np.nan_to_num(project(updates, step, "projection", per_tensor=True))
        self.reward_sum[cohort.ids] += softmax(c) * reward_sign(before, self.latest_evaluation)


def reward_sign(before: Evaluation, after: Evaluation) -> float:
    """Return the factor of rewards after a change of accuracy or loss; 0 if the loss is nan."""
    if after.accuracy != before.accuracy:
        return float(np.sign(after.accuracy - before.accuracy))
    return ((after.loss < before.loss) - (after.loss > before.loss)) / 2
