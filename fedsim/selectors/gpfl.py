"""GPFL: gradient projection and an exploit-explore bandit, as the paper reads. The authors' published code does
something else: gpfl_official.py."""

from abc import ABC, abstractmethod
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.clients import Clients
from fedsim.cohort import Cohort, Evaluation, Params, Population, Selection
from fedsim.errors import at_least, check, positive
from fedsim.selectors.base import Selector, ascending, highest
from fedsim.server import Server
from fedsim.signals import Signal

Floats = NDArray[np.float64]


class Exploration(ABC):
    """The weight alpha of exploration in round t (1-based) of T."""

    @abstractmethod
    def alpha(self, t: int, num_rounds: int) -> float:
        """alpha_t >= 0."""


class Linear(Exploration):
    """rho t / T (Eq. 7); `reference` replaces T (500 gives the curves of Fig. 7, which ran 800 rounds)."""

    def __init__(self, *, rho: float, reference: int | None) -> None:
        check(at_least("rho", rho, 0), None if reference is None else at_least("reference", reference, 1))
        self.rho, self.reference = rho, reference

    def alpha(self, t: int, num_rounds: int) -> float:
        return self.rho * t / (self.reference or num_rounds)


class Fixed(Exploration):
    """The same alpha throughout (Fig. 7a)."""

    def __init__(self, *, value: float) -> None:
        check(at_least("value", value, 0))
        self.value = value

    def alpha(self, t: int, num_rounds: int) -> float:
        return self.value


class Decreasing(Exploration):
    """rho (1 - (t - 1) / T)."""

    def __init__(self, *, rho: float) -> None:
        check(at_least("rho", rho, 0))
        self.rho = rho

    def alpha(self, t: int, num_rounds: int) -> float:
        return self.rho * (1 - (t - 1) / num_rounds)


class Triangular(Exploration):
    """t / peak up to round `peak`, then 2 peak / (t + peak) (the default of the authors' code, with peak 100)."""

    def __init__(self, *, peak: int) -> None:
        check(at_least("peak", peak, 1))
        self.peak = peak

    def alpha(self, t: int, num_rounds: int) -> float:
        return t / self.peak if t < self.peak else 2 * self.peak / (t + self.peak)


class GPFL(Selector):
    """The K clients of highest GPCB u_i = mean reward + alpha sqrt(2 ln(sum_j n_j) / n_i) (Eq. 6).

    Round 1: every client trains and uploads (Algorithm 1); c_i = <g_i, g> / |g| with g their mean direction, the K
    highest are selected and counted, and their models averaged. Later rounds: the reward of *every* client is its
    share of the softmax over all (stale) c (Eq. 5), for those selected last times 2 exp(A^{t-1} - A^{t-2}), or, if the
    accuracy did not change, exp of the fall of the loss (Eq. 8, whose second branch is printed with the opposite sign:
    `tie_sign: literal`); the mean is over rounds. g_i = (w - w_i) / lr for those that trained, c_i its projection on
    the global direction of the round before (Eq. 3), which is then the server's own step.

    Switches: `metric` projection | cosine | dot; `local_direction` per_lr | update | per_step (divided by lr and
    steps); `global_direction` previous | same_round | server_momentum; `per_tensor`: the mean of one projection per
    parameter tensor instead of one flat one; `softmax_over` all | selected; `reward_average` rounds | pulls |
    pulls_plus_one; `rank_by` gpcb | gp (Algorithm 1 to the letter: sort by c); `factor` literal2 | centred (without
    the 2, which makes small losses of accuracy a reward); `reward_eval` validation | test (the authors' code).
    A direction or reward that is not finite is dropped for the round.
    """

    needs = frozenset({Signal.VALIDATION})
    state = ("projections", "reward_sum", "pulls", "direction", "last", "previous", "selected")

    def __init__(
        self,
        population: Population,
        *,
        exploration: Exploration,
        metric: Literal["projection", "cosine", "dot"],
        local_direction: Literal["per_lr", "update", "per_step"],
        global_direction: Literal["previous", "same_round", "server_momentum"],
        server_momentum: float,
        per_tensor: bool,
        softmax_over: Literal["all", "selected"],
        reward_average: Literal["rounds", "pulls", "pulls_plus_one"],
        rank_by: Literal["gpcb", "gp"],
        factor: Literal["literal2", "centred"],
        tie_sign: Literal["intent", "literal"],
        reward_eval: Literal["validation", "test"],
    ) -> None:
        super().__init__(population)
        check(positive("server_momentum", server_momentum))
        n = population.num_clients
        self.exploration = exploration
        self.metric, self.per_tensor = metric, per_tensor
        self.local_direction, self.global_direction = local_direction, global_direction
        self.server_momentum = server_momentum
        self.softmax_over, self.reward_average, self.rank_by = softmax_over, reward_average, rank_by
        self.factor, self.tie_sign = factor, tie_sign
        self.reward_eval = reward_eval
        self.needs = frozenset({Signal.VALIDATION if reward_eval == "validation" else Signal.TEST})
        self.projections = np.zeros(n)
        self.reward_sum = np.zeros(n)
        self.pulls = np.ones(n)
        self.direction: Params = {}
        self.last: Evaluation | None = None
        self.previous: Evaluation | None = None
        self.selected = np.empty(0, np.int64)
        self._lr = 1.0

    @property
    def caveat(self) -> str | None:
        return "selector.reward_eval=test: this selection sees the test set" if self.reward_eval == "test" else None

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        self._lr = clients.lr
        ids, count = clients.available, self.cohort_size(clients)
        if round == 1:
            self._meet_everybody(clients)
            scores = self.projections
        else:
            self._reward()
            scores = self.projections if self.rank_by == "gp" else self.gpcb(round)
        self.selected = ascending(ids[highest(scores[ids], count, rng)])
        self.pulls[self.selected] += 1
        return Selection(self.selected)

    def gpcb(self, t: int) -> Floats:
        """u [N] in round t (Eq. 6)."""
        by_pulls = {"pulls": self.pulls - 1, "pulls_plus_one": self.pulls}
        divisor = by_pulls.get(self.reward_average, np.full(len(self.pulls), float(t - 1)))
        mean = np.where(divisor > 0, self.reward_sum / np.maximum(divisor, 1), 0.0)
        alpha = self.exploration.alpha(t, self.population.num_rounds)
        bonus: Floats = mean + alpha * np.sqrt(2 * np.log(self.pulls.sum()) / self.pulls)
        return bonus

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        evaluate = server.validate if self.reward_eval == "validation" else server.test
        if round == 1:
            self.previous = evaluate(cohort.start)
        else:
            self.previous = self.last
        self.last = evaluate(server.params)
        step = {n: (w - server.params[n]) / self._lr for n, w in cohort.start.items()}
        if self.global_direction == "same_round":
            self.direction = step
        if round > 1:
            self._project(cohort)
        if self.global_direction == "server_momentum" and self.direction:
            self.direction = {n: self.server_momentum * d + step[n] for n, d in self.direction.items()}
        else:
            self.direction = step

    def _meet_everybody(self, clients: Clients) -> None:
        everybody = clients.collect(clients.available)
        self.direction = {n: -d.mean(0) / self._lr for n, d in everybody.delta.items()}
        self._project(everybody)

    def _project(self, cohort: Cohort) -> None:
        values = projections(cohort.delta, self.direction, self.metric, self.per_tensor)
        if self.metric != "cosine" and self.local_direction != "update":
            values = values / self._lr
        if self.metric != "cosine" and self.local_direction == "per_step":
            values = values / np.maximum(cohort.steps, 1)
        values = -values  # directions of descent are w - w_k
        usable = np.isfinite(values)
        self.projections[cohort.ids[usable]] = values[usable]

    def _reward(self) -> None:
        shares = np.zeros(len(self.projections))
        over = np.arange(len(shares)) if self.softmax_over == "all" else self.selected
        exponents = np.exp(self.projections[over] - self.projections[over].max())
        shares[over] = exponents / exponents.sum()
        shares[self.selected] *= self.reward_factor()
        self.reward_sum += np.where(np.isfinite(shares), shares, 0)

    def reward_factor(self) -> float:
        """Eq. 8 from the last two evaluations."""
        assert self.last is not None
        assert self.previous is not None
        gain = self.last.accuracy - self.previous.accuracy
        if gain != 0:
            return float(np.exp(gain)) * (2 if self.factor == "literal2" else 1)
        fall = self.previous.loss - self.last.loss
        return float(np.exp(fall if self.tie_sign == "intent" else -fall))


def projections(delta: dict[str, Tensor], direction: Params, metric: str, per_tensor: bool) -> Floats:
    """<d_i, g> / |g| of each row [K]; `cosine` divides by |d_i| too, `dot` by nothing. 0 where a norm is 0.

    Over all parameters at once, or as the mean over tensors.
    """
    dots = torch.stack([d.flatten(1).double() @ direction[n].flatten().double() for n, d in delta.items()])
    ours = torch.stack([d.flatten(1).double().square().sum(1) for d in delta.values()])
    theirs = torch.stack([direction[n].double().square().sum() for n in delta])[:, None]
    if not per_tensor:
        dots, ours, theirs = dots.sum(0, True), ours.sum(0, True), theirs.sum(0, True)
    scale = torch.ones_like(dots)
    if metric != "dot":
        scale = theirs.sqrt().expand_as(dots) * (ours.sqrt() if metric == "cosine" else 1)
    result: Floats = torch.where(scale > 0, dots / scale, 0.0).mean(0).cpu().numpy()
    return result
