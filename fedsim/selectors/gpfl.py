"""GPFL: gradient projection and an exploit-explore bandit, as the paper describes it;
gpfl_official.py is the different algorithm of the authors' code."""

import math
from abc import ABC, abstractmethod
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedsim.clients.local_results import row_blocks
from fedsim.core.arrays import Floats
from fedsim.core.exact import exp, log, mean_row, row_sums
from fedsim.core.flat import split_flat
from fedsim.core.parameters import Count, NonNegative, Positive, parameters
from fedsim.core.types import Cohort, Evaluation, Ids, Params, Selection, Stack
from fedsim.selectors.base import (
    Clients,
    Selector,
    Server,
    Signal,
    ascending,
    drop_nonfinite,
    highest,
    softmax,
)

LocalDirection = Literal["per_lr", "update", "per_step", "momentum_buffer", "full_gradient"]
REPORTED_DIRECTIONS = {
    "momentum_buffer": {Signal.TRAINING},
    "full_gradient": {Signal.TRAINING, Signal.GRADIENTS},
}
"""Local directions that clients send in addition to their update, and the signals that they
need."""


class Exploration(ABC):
    """The weight of exploration over the rounds."""

    @abstractmethod
    def alpha(self, t: int, num_rounds: int) -> float:
        """alpha_t >= 0 in round `t` (1-based) of T = `num_rounds`."""


@parameters
class Linear(Exploration):
    """alpha_t = rho t / T (Eq. 7).

    `reference` replaces T: a number of rounds if it is >= 1, else a share of T. GPFL's Fig. 7 ran
    800 rounds with a reference of 500 (a share of .625), so that alpha reaches 1.6 rho, as the
    authors' logs show.
    """

    rho: NonNegative
    reference: Positive | None

    def alpha(self, t: int, num_rounds: int) -> float:
        rounds = num_rounds if self.reference is None else self.reference
        return self.rho * t / (rounds if rounds >= 1 else rounds * num_rounds)


@parameters
class Fixed(Exploration):
    """A constant alpha (Fig. 7a)."""

    value: NonNegative

    def alpha(self, t: int, num_rounds: int) -> float:
        return self.value


@parameters
class Decreasing(Exploration):
    """alpha_t = rho (1 - (t - 1) / T)."""

    rho: NonNegative

    def alpha(self, t: int, num_rounds: int) -> float:
        return self.rho * (1 - (t - 1) / num_rounds)


@parameters
class Triangular(Exploration):
    """alpha_t = t / peak before round `peak`, then 2 peak / (t + peak); the authors' code has peak
    100 by default."""

    peak: Count

    def alpha(self, t: int, num_rounds: int) -> float:
        return t / self.peak if t < self.peak else 2 * self.peak / (t + self.peak)


@parameters
class GPFL(Selector):
    """Selects the K clients of highest index u_i = mean reward + alpha sqrt(2 ln(sum_j n_j) / n_i)
    (GPCB, Eq. 6).

    n_i counts the selections of client i; c_i is its gradient projection.

    Round 1 (Algorithm 1), or the first round in which clients can be reached: all clients train and
    upload. c_i = <g_i, g> / |g|, where g is the mean of all g_i. The K clients of highest c are
    selected and their models averaged.

    Later rounds: g_i = (w - w_i) / lr for the clients that trained; c_i is its projection on the
    server's own step of the previous round (Eq. 3). The c of other clients are kept. The reward of
    *every* client is its share of the softmax over all c (Eq. 5). For the clients selected last it
    is multiplied by 2 exp(A^{t-1} - A^{t-2}), with A the accuracy, or, if that did not change, by
    exp of the decrease of the loss (Eq. 8); by 1 after a round in which nothing arrived. The mean
    reward is over rounds. What is not finite is dropped for the round; after a global direction of
    zero, c is kept.

    The YAML file says what each switch does. `local_direction` is what g_i is: a momentum buffer
    (the client's last one) and a full gradient (at the trained model) are sent in addition.
    `weights: by_gp`, the softmax of the selected clients' c, is another interpretation of FedAvg(w,
    S, C); `factor: centred` is Eq. 8 without the 2.
    """

    needs = frozenset({Signal.VALIDATION})
    state = ("projections", "reward_sum", "pulls", "direction", "last", "previous", "selected")

    exploration: Exploration
    init: Literal["all_clients", "cover", "none"]
    cover_rounds: Count
    init_aggregate: Literal["topk", "all", "none"]
    metric: Literal["projection", "cosine", "dot"]
    local_direction: LocalDirection
    global_direction: Literal["previous", "same_round", "server_momentum"]
    server_momentum: Positive
    per_tensor: bool
    softmax_over: Literal["all", "selected"]
    reward_average: Literal["rounds", "pulls", "pulls_plus_one"]
    rank_by: Literal["gpcb", "gp"]
    weights: Literal["aggregator", "by_gp"]
    factor: Literal["literal2", "centred"]
    tie_sign: Literal["intent", "literal"]
    reward_eval: Literal["validation", "test"]

    def __post_init__(self) -> None:
        n = self.population.num_clients
        self.adaptive = self.init == "cover" or self.init_aggregate != "topk"
        self.start_up_rounds = {"all_clients": 1, "cover": self.cover_rounds, "none": 0}[self.init]
        self.needs = frozenset(
            {Signal(self.reward_eval), *REPORTED_DIRECTIONS.get(self.local_direction, ())}
        )
        self.first_pulls = 1.0 if self.init == "all_clients" else 0.0
        self.projections, self.reward_sum = np.zeros((2, n))
        self.pulls = np.full(n, self.first_pulls)
        self.direction: Params = {}
        self.last: Evaluation | None = None
        self.previous: Evaluation | None = None
        self.selected = np.empty(0, np.int64)
        self._in_first_round = False
        self._lr = 1.0
        self._reported: Stack = {}

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        self._lr = clients.lr
        self._in_first_round = clients.in_first_round
        if self._in_first_round and self.init == "all_clients":
            return self._first_round(clients, rng)
        if not self._in_first_round:
            self._add_rewards()
        self.previous = None
        self.selected = chosen = self._choose(round, clients, rng)
        self.pulls[chosen] += 1
        self._reported = self._reported_directions(chosen, clients)
        return self._selection()

    def _selection(self) -> Selection:
        return Selection(
            self.selected,
            softmax(self.projections[self.selected]) if self.weights == "by_gp" else None,
        )

    def _choose(self, round: int, clients: Clients, rng: np.random.Generator) -> Ids:
        ids, count = clients.available, self.cohort_size(clients)
        unseen = ids[self.pulls[ids] == 0]
        if self.init == "cover" and round <= self.cover_rounds and len(unseen):
            return ascending(
                rng.permutation(unseen)[: -(-self.population.num_clients // self.cover_rounds)]
            )
        scores = self.projections if self.rank_by == "gp" else self.gpcb(round)
        return ascending(ids[highest(np.where(self.pulls == 0, np.inf, scores)[ids], count, rng)])

    def gpcb(self, t: int) -> Floats:
        """The index u [N] in round t (Eq. 6)."""
        pulls = self.pulls - self.first_pulls
        divisor = {"pulls": pulls, "pulls_plus_one": pulls + 1}.get(
            self.reward_average, np.full(len(pulls), t - 1.0)
        )
        mean = np.where(divisor > 0, self.reward_sum / np.maximum(divisor, 1), 0.0)
        alpha = self.exploration.alpha(t, self.population.num_rounds)
        bonus: Floats = alpha * np.sqrt(
            2 * log(max(self.pulls.sum(), 1)) / np.maximum(self.pulls, 1)
        )
        return mean + bonus

    def _first_round(self, clients: Clients, rng: np.random.Generator) -> Selection:
        ids = clients.available
        cohort = clients.collect(ids)
        kept, *_ = drop_nonfinite(cohort, None)
        self.direction = {n: -mean_row(kept.delta[n]) / self._lr for n in kept.trained}
        self._reported = self._reported_directions(ids, clients)
        self._project(ids, cohort)
        self._reported = {}
        if self.init_aggregate == "none":
            return Selection(ids[:0])
        top = ascending(ids[highest(self.projections[ids], self.cohort_size(clients), rng)])
        self.selected = top if self.init_aggregate == "topk" else ids
        self.pulls[self.selected] += self.init_aggregate == "topk"
        return self._selection()

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        evaluate = server.validate if self.reward_eval == "validation" else server.test
        self.previous = evaluate(cohort.start) if self.last is None else self.last
        self.last = evaluate(server.params)
        step = {n: (cohort.start[n] - server.params[n]) / self._lr for n in cohort.trained}
        if self.global_direction == "same_round":
            self.direction = usable(step)
        if self.direction and not (self._in_first_round and self.init == "all_clients"):
            self._project(self.selected if self._reported else cohort.ids, cohort)
        if self.global_direction == "server_momentum" and self.direction:
            step = {n: self.server_momentum * d + step[n] for n, d in self.direction.items()}
        self.direction = usable(step)

    def _project(self, ids: Ids, cohort: Cohort) -> None:
        """Update c of `ids` from the directions that they reported, or else from their updates."""
        local = self._reported or {n: cohort.delta[n] for n in cohort.trained}
        values = projections(local, self.direction, self.metric, self.per_tensor) * (
            1 if self._reported else -1
        )
        if self.metric != "cosine" and self.local_direction in ("per_lr", "per_step"):
            values = values / self._lr
        if self.metric != "cosine" and self.local_direction == "per_step":
            values = values / np.maximum(cohort.steps, 1)
        usable = np.isfinite(values)
        self.projections[ids[usable]] = values[usable]

    def _reported_directions(self, ids: Ids, clients: Clients) -> Stack:
        """By tensor [len(ids), ...]; {} if there are none."""
        if self.local_direction == "momentum_buffer":
            return clients.momentum_buffers(ids)
        if self.local_direction != "full_gradient":
            return {}
        flat = torch.stack(list(clients.gradients_after_training(ids)))
        return split_flat(flat, {name: clients.params[name] for name in clients.layer_names(None)})

    def _add_rewards(self) -> None:
        shares = np.zeros(len(self.projections))
        clients = np.arange(len(shares)) if self.softmax_over == "all" else self.selected
        if len(clients):
            shares[clients] = softmax(self.projections[clients])
        shares[self.selected] *= self.reward_factor()
        self.reward_sum += np.where(np.isfinite(shares), shares, 0)

    def reward_factor(self) -> float:
        """The factor of Eq. 8 for the latest round; 1 if nothing arrived in it."""
        if self.last is None or self.previous is None:
            return 1.0
        gain = self.last.accuracy - self.previous.accuracy
        if gain != 0:
            return float(exp(gain)) * (2 if self.factor == "literal2" else 1)
        fall = self.previous.loss - self.last.loss
        return float(exp(fall if self.tie_sign == "intent" else -fall))


def usable(direction: Params) -> Params:
    """`direction`, or {} if it is zero or not finite."""
    square = float(torch.stack([d.double().square().sum() for d in direction.values()]).sum())
    return direction if 0 < square < math.inf else {}


def projections(local: Stack, direction: Params, metric: str, per_tensor: bool) -> Floats:
    """<g_i, g> / |g| [K] of the K directions in `local` on `direction`; 0 where a norm in the
    denominator is 0.

    `metric` cosine divides by |g_i| as well, dot by nothing. `per_tensor`: the mean of one
    projection per tensor.
    """
    parts = [
        _dots_and_squares(d.flatten(1), direction[n].flatten().double()) for n, d in local.items()
    ]
    dots, local_squares, global_squares = (torch.stack(found) for found in zip(*parts, strict=True))
    if not per_tensor:
        dots, local_squares, global_squares = (
            row_sums(t.T)[None] for t in (dots, local_squares, global_squares)
        )
    scale = torch.ones_like(dots)
    if metric != "dot":
        scale = global_squares.sqrt().expand_as(dots) * (
            local_squares.sqrt() if metric == "cosine" else 1
        )
    return mean_row(torch.where(scale > 0, dots / scale, 0.0)).cpu().numpy()


def _dots_and_squares(local: Tensor, direction: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """<g_i, g> [K], |g_i|^2 [K] and |g|^2 [1] in float64."""
    dots, squares = torch.zeros(2, len(local), dtype=torch.float64, device=local.device)
    for rows, block in row_blocks(local):
        dots[rows] = row_sums(block * direction)
        squares[rows] = row_sums(block.square_())
    return dots, squares, row_sums(direction.square()[None])
