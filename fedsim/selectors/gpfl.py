"""GPFL: select clients whose gradients point along the global step, by a bandit that explores.

Na, Liang and Yiu, "GPFL: A Gradient Projection-Based Client Selection Framework for Efficient
Federated Learning", 2024 (arXiv 2403.17833). This file follows the paper. The authors' published
code is a different algorithm, see gpfl_official.py.

A client is valuable if its gradient g_i points in the direction g of the server's step. Only the
clients that train reveal their gradients, so the values of the others are stale, and a bandit
balances clients of high value with clients that were selected seldom:

    c_i = <g_i, g> / |g|, the gradient projection                      (Eq. 3)
    reward of client i = softmax(c)_i                                  (Eq. 5)
    u_i = mean reward of i + alpha sqrt(2 ln(sum_j n_j) / n_i)         (Eq. 6)
    alpha = rho t / T                                                  (Eq. 7)
    factor of rewards = 2 exp(A^t - A^{t-1}) if the accuracy changed   (Eq. 8)
                        exp(F^t - F^{t-1}) otherwise

u_i is the index of client i, which the paper calls GPCB. It is an upper confidence bound. n_i is
the number of the client's selections, t the round and T the number of rounds. A is the accuracy and
F the loss of the global model. In every round all clients get a reward, also those that did not
train. The factor multiplies the rewards of the clients that were selected in the round before.

Algorithm 1:

1. Initialisation, in the first round with available clients: All of them train and upload. g is
   the mean of all g_i. The K clients of highest c_i are selected, and their models averaged.
2. Later rounds, before training: Add the rewards, and select the K clients of highest u_i.
3. After training: For the clients i that trained, g_i = (w - w_i) / lr, with w the global model
   before the round and w_i the client's model. c_i is the projection of g_i on the server's own
   step g of the previous round.

Where the paper leaves something open, the class has a parameter. The defaults are in
conf/selector/gpfl.yaml. They are how we read the paper:

- The softmax is over all clients, most of which have a stale c (`softmax_over: all`).
- The mean reward is over rounds (`reward_average: rounds`).
- n_i is 1 after the initialisation, in which every client trained once, and 2 for the K clients
  that it selected.
- Algorithm 1 sorts by c, while the text says "highest GPCB". Clients are ranked by the index, GPCB
  (`rank_by: gpcb`).
- As printed, the second case of Eq. 8 rewards a growing loss. It is read as exp(F^{t-1} - F^t)
  (`tie_sign: intent`).
- The accuracy is that of a validation split (`reward_eval: validation`).
- FedAvg(w, S, C) in Algorithm 1 has the usual weights (`weights: aggregator`). C, the projections,
  may also be meant as weights (`by_gp`).

In each round, the loop calls `select`, lets the selected clients train, and calls `observe` with
their updates. If no update arrives, it does not call `observe`. The rewards of such a round are not
multiplied by the factor. Projections and rewards that are not finite are ignored. If g is zero, all
c stay as they are. Ties are broken at random.
"""

from abc import ABC, abstractmethod
from typing import Literal

import numpy as np
import torch

from fedsim.core.exact import mean_row
from fedsim.core.flat import split_flat
from fedsim.core.types import Stack
from fedsim.selectors.base import (
    Clients,
    Cohort,
    Count,
    Evaluation,
    Floats,
    Generator,
    Ids,
    NonNegative,
    Params,
    Positive,
    Selection,
    Selector,
    Server,
    Signal,
    ascending,
    drop_nonfinite,
    exp,
    log,
    parameters,
    softmax,
)
from fedsim.selectors.gradient_projection import Metric, project, usable

LocalDirection = Literal["per_lr", "update", "per_step", "momentum_buffer", "full_gradient"]
REPORTED_DIRECTIONS = {
    "momentum_buffer": {Signal.TRAINING},
    "full_gradient": {Signal.TRAINING, Signal.GRADIENTS},
}
"""Local directions that clients send in addition to their updates, with the signals they need."""


class Exploration(ABC):
    """The weight of exploration over the rounds."""

    @abstractmethod
    def alpha(self, t: int, num_rounds: int) -> float:
        """Return alpha_t >= 0 in round `t` (from 1) of T = `num_rounds`."""


@parameters
class Linear(Exploration):
    """alpha_t = rho t / T (Eq. 7), or rho t / `reference`.

    The runs of GPFL's Fig. 7 have 800 rounds and divide by 500 (a share of 0.625), as the authors'
    logs show. So alpha reaches 1.6 rho.
    """

    rho: NonNegative  # alpha in round T
    reference: Positive | None  # in place of T: a number of rounds if >= 1, else a share of T

    def alpha(self, t: int, num_rounds: int) -> float:
        rounds = num_rounds if self.reference is None else self.reference
        if rounds < 1:
            rounds *= num_rounds
        return self.rho * t / rounds


@parameters
class Fixed(Exploration):
    """A constant alpha (Fig. 7a)."""

    value: NonNegative  # alpha

    def alpha(self, t: int, num_rounds: int) -> float:
        return self.value


@parameters
class Decreasing(Exploration):
    """alpha_t = rho (1 - (t - 1) / T)."""

    rho: NonNegative  # alpha in the first round

    def alpha(self, t: int, num_rounds: int) -> float:
        return self.rho * (1 - (t - 1) / num_rounds)


@parameters
class Triangular(Exploration):
    """alpha_t = t / peak before round `peak`, then 2 peak / (t + peak), as in the authors' code."""

    peak: Count  # the round in which alpha is 1; 100 by default in the authors' code

    def alpha(self, t: int, num_rounds: int) -> float:
        return t / self.peak if t < self.peak else 2 * self.peak / (t + self.peak)


@parameters
class GPFL(Selector):
    """Selects the K clients with the highest index of gradient projections and exploration."""

    needs = frozenset({Signal.VALIDATION, Signal.UPDATES})
    state = (
        "projections",
        "reward_sum",
        "pulls",
        "direction",
        "evaluation_after",
        "evaluation_before",
        "selected",
    )

    # --- the start ---
    # all_clients: step 1 of Algorithm 1. cover: random clients that were not selected before, as in
    # the authors' code. none: clients that were never selected rank first.
    init: Literal["all_clients", "cover", "none"]
    cover_rounds: Count  # number of rounds of `cover`
    init_aggregate: Literal["topk", "all", "none"]  # models averaged in round 1 of `all_clients`

    # --- the projections c_i ---
    metric: Metric  # <g_i, g> / |g|, the cosine, or <g_i, g>
    # g_i: (w - w_i) / lr, w - w_i, (w - w_i) / (lr steps), the last momentum buffer, or the full
    # gradient at the model that the client trained. The last two are sent besides the update.
    local_direction: LocalDirection
    # g: the server's step of the previous round, of the same round (the authors' code), or the sum
    # of all steps, each multiplied with `server_momentum` in every later round.
    global_direction: Literal["previous", "same_round", "server_momentum"]
    server_momentum: Positive
    per_tensor: bool  # whether c_i is the mean of one projection for each parameter tensor

    # --- the rewards ---
    softmax_over: Literal["all", "selected"]  # clients in the softmax of Eq. 5
    factor: Literal["literal2", "centred"]  # the first case of Eq. 8 with the 2, or without
    tie_sign: Literal["intent", "literal"]  # the second case of Eq. 8 as meant, or as printed
    reward_eval: Literal["validation", "test"]  # data on which A and F are evaluated
    reward_average: Literal["rounds", "pulls", "pulls_plus_one"]  # divisor of the sum of rewards

    # --- the selection ---
    exploration: Exploration  # alpha over the rounds
    rank_by: Literal["gpcb", "gp"]  # u_i, or c_i (Algorithm 1 to the letter)
    weights: Literal["aggregator", "by_gp"]  # aggregation weights: as usual, or softmax(c)

    def __post_init__(self) -> None:
        num_clients = self.population.num_clients
        # In its first rounds the method may select another number of clients than K.
        self.adaptive = self.init == "cover" or self.init_aggregate != "topk"
        self.start_up_rounds = {"all_clients": 1, "cover": self.cover_rounds, "none": 0}[self.init]
        reported = REPORTED_DIRECTIONS.get(self.local_direction, ())
        self.needs = frozenset({Signal(self.reward_eval), Signal.UPDATES, *reported})
        # The initialisation counts as a selection of every client, but gives no reward.
        self.initial_pulls = 1.0 if self.init == "all_clients" else 0.0
        self.projections = np.zeros(num_clients)  # c [N]
        self.reward_sum = np.zeros(num_clients)  # sum of each client's rewards [N]
        self.pulls = np.full(num_clients, self.initial_pulls)  # n_i, selections [N]
        self.direction: Params = {}  # g by tensor; {}: no direction that can be used
        # The global model's evaluations after and before the latest round in which updates arrived.
        # None: no update has arrived yet. `evaluation_before` is also None if no update arrived in
        # the latest round.
        self.evaluation_after: Evaluation | None = None
        self.evaluation_before: Evaluation | None = None
        self.selected = np.empty(0, np.int64)  # the clients selected last
        # `select` sets these, and `observe` reads them in the same round.
        self._is_initialisation = False  # whether this round is step 1 of Algorithm 1
        self._lr = 1.0  # the local learning rate
        self._reported: Stack = {}  # directions that `selected` sent besides updates; {}: none

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        self._lr = clients.lr
        self._is_initialisation = clients.in_first_round and self.init == "all_clients"
        if self._is_initialisation:
            self._initialise(clients, rng)
            if self.init_aggregate == "none":
                return Selection(clients.available[:0])
        else:
            self._select_by_rewards(round, clients, rng)
        if self.weights == "aggregator":
            return Selection(self.selected)
        return Selection(self.selected, softmax(self.projections[self.selected]))

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        self._evaluate(cohort, server)
        step = {n: (cohort.start[n] - server.params[n]) / self._lr for n in cohort.trained}
        if self.global_direction == "same_round":
            self.direction = usable(step)
        # 3. Projections on the direction of the previous round, or of the same one
        if self.direction and not self._is_initialisation:
            if self._reported:
                self._keep(self.selected, self._project(self._reported))
            else:
                self._keep(cohort.ids, self._project_updates(cohort))
        # The direction of the next round. (`same_round` replaces it before it is used.)
        if self.global_direction == "server_momentum" and self.direction:
            step = {n: self.server_momentum * g + step[n] for n, g in self.direction.items()}
        self.direction = usable(step)

    # --- 1. initialisation ---

    def _initialise(self, clients: Clients, rng: Generator) -> None:
        """Train all clients, project their directions on the mean one, and select the highest."""
        available = clients.available
        cohort = clients.collect(available)
        finite, *_ = drop_nonfinite(cohort, None)
        self.direction = {n: -mean_row(finite.delta[n]) / self._lr for n in finite.trained}
        reported = self._reported_directions(available, clients)
        self._keep(
            available, self._project(reported) if reported else self._project_updates(cohort)
        )
        self.selected = self.select_highest(self.projections[available], clients, rng)
        if self.init_aggregate == "topk":
            self.pulls[self.selected] += 1
        elif self.init_aggregate == "all":
            self.selected = available  # `initial_pulls` has counted all of them

    # --- 2. rewards and selection ---

    def _select_by_rewards(self, round: int, clients: Clients, rng: Generator) -> None:
        """Reward the clients for the previous round, and select those of the highest index."""
        if not clients.in_first_round:
            self._add_rewards()
        self.evaluation_before = None  # until `observe`: no update has arrived in this round
        self.selected = self._choose(round, clients, rng)
        self.pulls[self.selected] += 1
        self._reported = self._reported_directions(self.selected, clients)

    def _add_rewards(self) -> None:
        """Add the rewards of all clients (Eq. 5 and 8)."""
        rewards = np.zeros(len(self.projections))
        rewarded = self.selected if self.softmax_over == "selected" else np.arange(len(rewards))
        if len(rewarded):
            rewards[rewarded] = softmax(self.projections[rewarded])
        with np.errstate(invalid="ignore", over="ignore"):  # only finite rewards count below
            rewards[self.selected] *= self.reward_factor()
        self.reward_sum += np.where(np.isfinite(rewards), rewards, 0)

    def reward_factor(self) -> float:
        """Return the factor of Eq. 8 for the latest round; 1 if no update arrived in it."""
        before, after = self.evaluation_before, self.evaluation_after
        if before is None or after is None:
            return 1.0
        gain = after.accuracy - before.accuracy
        if gain != 0:
            return float(exp(gain)) * (2 if self.factor == "literal2" else 1)
        fall = before.loss - after.loss
        return float(exp(fall if self.tie_sign == "intent" else -fall))

    def _choose(self, round: int, clients: Clients, rng: Generator) -> Ids:
        """Return the clients of a round after the initialisation, ascending."""
        available = clients.available
        new = available[self.pulls[available] == 0]
        if self.init == "cover" and round <= self.cover_rounds and len(new):
            return cover(new, self.population.num_clients, self.cover_rounds, rng)
        scores = self.projections if self.rank_by == "gp" else self.gpcb(round)
        scores = np.where(self.pulls == 0, np.inf, scores)  # never selected, whatever `init` is
        return self.select_highest(scores[available], clients, rng)

    def gpcb(self, t: int) -> Floats:
        """Return the index u [N] in round t (Eq. 6)."""
        rewarded_pulls = self.pulls - self.initial_pulls
        divisors = {
            "rounds": np.full(len(self.pulls), t - 1.0),
            "pulls": rewarded_pulls,
            "pulls_plus_one": rewarded_pulls + 1,
        }[self.reward_average]
        mean = np.where(divisors > 0, self.reward_sum / np.maximum(divisors, 1), 0.0)
        alpha = self.exploration.alpha(t, self.population.num_rounds)
        log_total = log(max(self.pulls.sum(), 1))
        bonus: Floats = alpha * np.sqrt(2 * log_total / np.maximum(self.pulls, 1))
        return mean + bonus

    # --- 3. projections ---

    def _evaluate(self, cohort: Cohort, server: Server) -> None:
        """Evaluate the global model before and after the round, for the rewards of Eq. 8."""
        evaluate = server.validate if self.reward_eval == "validation" else server.test
        self.evaluation_before = self.evaluation_after
        if self.evaluation_before is None:
            self.evaluation_before = evaluate(cohort.start)
        self.evaluation_after = evaluate(server.params)

    def _project(self, directions: Stack) -> Floats:
        """Return the projections [n] of n local directions on g."""
        return project(directions, self.direction, self.metric, per_tensor=self.per_tensor)

    def _project_updates(self, cohort: Cohort) -> Floats:
        """Return c [n] of the n clients of a cohort, whose directions follow from their updates."""
        updates = {n: cohort.delta[n] for n in cohort.trained}
        values = -self._project(updates)  # a gradient points against the update
        if self.metric == "cosine":  # which does not depend on the length of g_i
            return values
        if self.local_direction in ("per_lr", "per_step"):
            values = values / self._lr
        if self.local_direction == "per_step":
            values = values / np.maximum(cohort.steps, 1)
        return values

    def _keep(self, ids: Ids, projections: Floats) -> None:
        """Set c of the clients `ids` to their `projections`, where these are finite."""
        is_finite = np.isfinite(projections)
        self.projections[ids[is_finite]] = projections[is_finite]

    def _reported_directions(self, ids: Ids, clients: Clients) -> Stack:
        """Return the directions that `ids` send besides their updates, by tensor [n, ...].

        The result is {} if `local_direction` follows from the updates.
        """
        if self.local_direction == "momentum_buffer":
            return clients.momentum_buffers(ids)
        if self.local_direction != "full_gradient":
            return {}
        gradients = torch.stack(list(clients.gradients_after_training(ids)))
        trained = {name: clients.params[name] for name in clients.layer_names(None)}
        return split_flat(gradients, trained)


def cover(new: Ids, num_clients: int, num_rounds: int, rng: Generator) -> Ids:
    """Return up to ceil(N / `num_rounds`) random clients of `new`, which were never selected."""
    count = -(-num_clients // num_rounds)  # rounded up
    return ascending(rng.permutation(new)[:count])
