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
                        exp(F^{t-1} - F^t) otherwise

u_i is the index of client i (GPCB). n_i is the number of its selections, t the round and T the
number of rounds. A is the accuracy and F the loss of the global model. In every round all clients
get a reward. The factor multiplies the rewards of the clients that were selected last.

Algorithm 1:

1. Initialisation, in the first round with available clients: All of them train and upload. g is
   the mean of all g_i. The K clients of highest c_i are selected, and their models averaged.
2. Later rounds, before training: Add the rewards, and select the K clients of highest u_i.
3. After training: For the clients i that trained, g_i = (w - w_i) / lr, with w the global model
   before the round and w_i the client's model. c_i is the projection of g_i on the server's own
   step g of the previous round.

What the paper leaves open is a parameter. Its default is how we read the paper: The softmax is over
all clients with their stale c. The mean reward is over rounds. n_i is 1 after the initialisation.
Algorithm 1 sorts by c, while the text says "highest GPCB". As printed, the second case of Eq. 8
rewards a growing loss; `tie_sign: intent` reverses it. The accuracy is that of a validation split.
`weights: by_gp` is another reading of FedAvg(w, S, C) in Algorithm 1.

If no update arrived in a round, its rewards are not multiplied. Values that are not finite are
ignored. After a global direction of zero, c is kept. Ties are broken at random.
"""

import math
from abc import ABC, abstractmethod
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedsim.clients.local_results import row_blocks
from fedsim.core.exact import mean_row, row_sums
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
    """alpha_t = rho t / T (Eq. 7).

    GPFL's Fig. 7 ran 800 rounds with T replaced by 500, a share of 0.625. alpha then reaches 1.6
    rho, as the authors' logs show.
    """

    rho: NonNegative  # alpha in the last round
    reference: Positive | None  # replaces T: a number of rounds if >= 1, else a share of T

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
    """alpha_t = t / peak before round `peak`, then 2 peak / (t + peak)."""

    peak: Count  # the round in which alpha is 1; 100 by default in the authors' code

    def alpha(self, t: int, num_rounds: int) -> float:
        return t / self.peak if t < self.peak else 2 * self.peak / (t + self.peak)


@parameters
class GPFL(Selector):
    """Selects the K clients with the highest index of gradient projections and exploration.

    - `init: all_clients` is step 1 of Algorithm 1. `cover` selects random clients that were not
      selected before, for `cover_rounds` rounds, as the authors' code does. With `none` clients
      that were never selected rank first.
    - `local_direction` is g_i: (w - w_i) / lr (`per_lr`), w - w_i (`update`), (w - w_i) / (lr
      steps) (`per_step`), the client's last momentum buffer, or its full gradient at the model it
      trained. The last two are sent in addition.
    - `global_direction` is g: the server's step of the previous round, of the same round (the
      authors' code), or steps accumulated with `server_momentum`.
    """

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

    exploration: Exploration  # alpha over the rounds
    init: Literal["all_clients", "cover", "none"]  # how the method starts
    cover_rounds: Count  # number of rounds of `cover`
    init_aggregate: Literal["topk", "all", "none"]  # models averaged in round 1 of `all_clients`
    metric: Literal["projection", "cosine", "dot"]  # c_i: <g_i, g> / |g|, cosine, or <g_i, g>
    local_direction: LocalDirection  # g_i
    global_direction: Literal["previous", "same_round", "server_momentum"]  # g
    server_momentum: Positive  # factor of g before the step is added
    per_tensor: bool  # whether c is the mean of one projection for each parameter tensor
    softmax_over: Literal["all", "selected"]  # clients in the softmax of Eq. 5
    reward_average: Literal["rounds", "pulls", "pulls_plus_one"]  # divisor of the sum of rewards
    rank_by: Literal["gpcb", "gp"]  # u_i, or c_i (Algorithm 1 to the letter)
    weights: Literal["aggregator", "by_gp"]  # aggregation weights: as usual, or softmax(c)
    factor: Literal["literal2", "centred"]  # factor of Eq. 8 with the 2, or without
    tie_sign: Literal["intent", "literal"]  # sign of the second case of Eq. 8
    reward_eval: Literal["validation", "test"]  # data on which A and F are evaluated

    def __post_init__(self) -> None:
        num_clients = self.population.num_clients
        self.adaptive = self.init == "cover" or self.init_aggregate != "topk"
        self.start_up_rounds = {"all_clients": 1, "cover": self.cover_rounds, "none": 0}[self.init]
        reported = REPORTED_DIRECTIONS.get(self.local_direction, ())
        self.needs = frozenset({Signal(self.reward_eval), Signal.UPDATES, *reported})
        self.first_pulls = 1.0 if self.init == "all_clients" else 0.0  # step 1 counts once for all
        self.projections = np.zeros(num_clients)  # c [N]
        self.reward_sum = np.zeros(num_clients)  # sum of each client's rewards [N]
        self.pulls = np.full(num_clients, self.first_pulls)  # n_i, selections [N]
        self.direction: Params = {}  # g by tensor; {}: no direction that can be used
        # The global model's evaluations after and before the latest round in which updates arrived.
        # None: no update has arrived yet. `evaluation_before` is also None if no update arrived in
        # the latest round.
        self.evaluation_after: Evaluation | None = None
        self.evaluation_before: Evaluation | None = None
        self.selected = np.empty(0, np.int64)  # the clients selected last
        # `select` sets these, and `observe` reads them in the same round.
        self._initialises = False  # whether this round is step 1 of Algorithm 1
        self._lr = 1.0  # the local learning rate
        self._reported: Stack = {}  # directions that the selected clients sent; {}: none

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        available = clients.available
        self._lr = clients.lr
        self._initialises = clients.in_first_round and self.init == "all_clients"
        if self._initialises:
            # 1. Initialisation
            self._project_everybody(clients)
            self.selected = self.select_highest(self.projections[available], clients, rng)
            if self.init_aggregate == "none":
                return Selection(available[:0])
            if self.init_aggregate == "all":
                self.selected = available
            else:
                self.pulls[self.selected] += 1
        else:
            # 2. Rewards and selection
            if not clients.in_first_round:
                self._add_rewards()
            self.evaluation_before = None
            self.selected = self._choose(round, clients, rng)
            self.pulls[self.selected] += 1
            self._reported = self._reported_directions(self.selected, clients)
        if self.weights == "aggregator":
            return Selection(self.selected)
        return Selection(self.selected, softmax(self.projections[self.selected]))

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        evaluate = server.validate if self.reward_eval == "validation" else server.test
        self.evaluation_before = self.evaluation_after
        if self.evaluation_before is None:
            self.evaluation_before = evaluate(cohort.start)
        self.evaluation_after = evaluate(server.params)
        # 3. Projections
        step = {n: (cohort.start[n] - server.params[n]) / self._lr for n in cohort.trained}
        if self.global_direction == "same_round":
            self.direction = usable(step)
        if self.direction and not self._initialises:
            self._project(self.selected if self._reported else cohort.ids, cohort)
        if self.global_direction == "server_momentum" and self.direction:
            step = {n: self.server_momentum * g + step[n] for n, g in self.direction.items()}
        self.direction = usable(step)

    def _project_everybody(self, clients: Clients) -> None:
        """Train all clients and project their directions on the mean direction."""
        cohort = clients.collect(clients.available)
        finite, *_ = drop_nonfinite(cohort, None)
        self.direction = {n: -mean_row(finite.delta[n]) / self._lr for n in finite.trained}
        self._reported = self._reported_directions(clients.available, clients)
        self._project(clients.available, cohort)
        self._reported = {}

    def _add_rewards(self) -> None:
        """Add the rewards of all clients (Eq. 5 and 8)."""
        rewards = np.zeros(len(self.projections))
        rewarded = self.selected if self.softmax_over == "selected" else np.arange(len(rewards))
        if len(rewarded):
            rewards[rewarded] = softmax(self.projections[rewarded])
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
        scores = np.where(self.pulls == 0, np.inf, scores)
        return self.select_highest(scores[available], clients, rng)

    def gpcb(self, t: int) -> Floats:
        """Return the index u [N] in round t (Eq. 6)."""
        pulls = self.pulls - self.first_pulls  # without the initialisation, which gave no rewards
        divisors = {
            "rounds": np.full(len(pulls), t - 1.0),
            "pulls": pulls,
            "pulls_plus_one": pulls + 1,
        }[self.reward_average]
        mean = np.where(divisors > 0, self.reward_sum / np.maximum(divisors, 1), 0.0)
        alpha = self.exploration.alpha(t, self.population.num_rounds)
        log_total = log(max(self.pulls.sum(), 1))
        bonus: Floats = alpha * np.sqrt(2 * log_total / np.maximum(self.pulls, 1))
        return mean + bonus

    def _project(self, ids: Ids, cohort: Cohort) -> None:
        """Set c of the clients `ids`, from the directions that they sent or from their updates."""
        if self._reported:
            values = projections(self._reported, self.direction, self.metric, self.per_tensor)
        else:  # a gradient points against the update
            updates = {n: cohort.delta[n] for n in cohort.trained}
            values = -projections(updates, self.direction, self.metric, self.per_tensor)
        if self.metric != "cosine":
            if self.local_direction in ("per_lr", "per_step"):
                values = values / self._lr
            if self.local_direction == "per_step":
                values = values / np.maximum(cohort.steps, 1)
        is_finite = np.isfinite(values)
        self.projections[ids[is_finite]] = values[is_finite]

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


def usable(direction: Params) -> Params:
    """Return `direction`, or {} if it is zero or not finite."""
    squares = [tensor.double().square().sum() for tensor in direction.values()]
    return direction if 0 < float(torch.stack(squares).sum()) < math.inf else {}


def projections(local: Stack, direction: Params, metric: str, per_tensor: bool) -> Floats:
    """Return the projections <g_i, g> / |g| [K] of the K directions g_i on g.

    `local` holds the g_i by tensor [K, ...], and `direction` g. `metric: cosine` also divides by
    |g_i|, and `dot` by nothing. A projection is 0 if its denominator is 0. With `per_tensor` the
    result is the mean of one projection for each tensor.
    """
    products = []  # <g_i, g>, |g_i|^2 and |g|^2 of each tensor
    for name, vectors in local.items():
        products.append(_products(vectors.flatten(1), direction[name].flatten().double()))
    dots, local_squares, squares = (torch.stack(parts) for parts in zip(*products, strict=True))
    if not per_tensor:
        dots = row_sums(dots.T)[None]
        local_squares = row_sums(local_squares.T)[None]
        squares = row_sums(squares.T)[None]
    norms = squares.sqrt().expand_as(dots)
    if metric == "cosine":
        norms = norms * local_squares.sqrt()
    if metric == "dot":
        norms = torch.ones_like(dots)
    return mean_row(torch.where(norms > 0, dots / norms, 0.0)).cpu().numpy()


def _products(vectors: Tensor, direction: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return <g_i, g> [K], |g_i|^2 [K] and |g|^2 [1] in float64."""
    dots = direction.new_zeros(len(vectors))
    squares = direction.new_zeros(len(vectors))
    for rows, block in row_blocks(vectors):
        dots[rows] = row_sums(block * direction)
        squares[rows] = row_sums(block.square_())
    return dots, squares, row_sums(direction.square()[None])
