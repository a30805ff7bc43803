"""FedABC: attention-based client selection. Section and equation numbers are the paper's."""

from abc import ABC, abstractmethod
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedsim.core.arrays import Floats
from fedsim.core.parameters import Count, NonNegative, Positive, Problems, parameters
from fedsim.selectors.base import (
    Clients,
    Cohort,
    Ids,
    Selection,
    Selector,
    Server,
    Signal,
    exp,
    log,
    rule,
)
from fedsim.selectors.tools import kl_divergences

BLOCK_ENTRIES = 2**18
"""Of attention that is computed at once, so that it stays in the cache: all of it up to 512
clients."""
# rounding tolerance when sums of shares are compared with tau: .1 * 3 > .3 in floating point
TOLERANCE = 1e-9


class Threshold(ABC):
    """The rule for how many of the highest scores are selected in round t (0-based) of T."""

    @abstractmethod
    def count(self, shares: Floats, t: int, num_rounds: int) -> int:
        """Number of clients to select, >= 1; `shares` [N] are their scores' shares, descending,
        with sum 1."""


@parameters
class Cumulative(Threshold):
    """The smallest number of top clients whose shares sum to tau_t (section V-A, used in place of
    Eq. 14).

    `schedule: step` is the paper's tau_t = start + increment * floor(t / every). The others go from `start` to `end`
    with u = t / (T - 1): `linear` as u, `convex` as u^2, `concave` as ln(1 + 9u) / ln 10. `mode: reach` stops at a sum
    >= tau, which gives the paper's 32% fewer participants; `exceed` at > tau, as printed. tau >= 1 selects all.
    """

    schedule: Literal["step", "linear", "convex", "concave"]
    start: Positive
    increment: NonNegative
    every: Count
    end: float
    mode: Literal["reach", "exceed"]

    def problems(self) -> Problems:
        yield rule(self.end >= self.start, "end", self.end, f"must be >= start={self.start}")

    def tau(self, t: int, num_rounds: int) -> float:
        """The threshold tau_t of round `t` (0-based)."""
        if self.schedule == "step":
            return self.start + self.increment * (t // self.every)
        u = t / max(num_rounds - 1, 1)
        shape = {"linear": u, "convex": u**2, "concave": log(1 + 9 * u) / log(10)}[self.schedule]
        return float(self.start + (self.end - self.start) * shape)

    def count(self, shares: Floats, t: int, num_rounds: int) -> int:
        tau, sums = self.tau(t, num_rounds), np.cumsum(shares)
        below = sums < tau - TOLERANCE if self.mode == "reach" else sums <= tau + TOLERANCE
        return min(int(below.sum()) + 1, len(shares)) if tau < 1 - TOLERANCE else len(shares)


@parameters
class Lambda(Threshold):
    """Clients whose share exceeds lambda / eta_t, with lambda = `strength` and eta_t = 1 + `growth`
    * t (the rule below Eq. 14, without values there; eta_t in (0, 1] differs by a constant factor
    that lambda can absorb).
    """

    strength: Positive
    growth: NonNegative

    def count(self, shares: Floats, t: int, num_rounds: int) -> int:
        return max(int((shares > self.strength / (1 + self.growth * t)).sum()), 1)


@parameters
class FedABC(Selector):
    """Selects by the losses of all clients, smoothed by attention over the similarity of their
    models on public data.

    Scores: d_kj = KL(P_k || P_j) on the public samples (Eq. 9, 10; `kl_reduction: mean` also
    divides by the number of classes, as printed); attention c_kj = softmax_j(-d_kj), including j =
    k unless `self_term` is false (Eq. 11); v_j is the loss of the global model on client j's data
    (Eq. 12); S_k = sum_j c_kj v_j (Eq. 13). Normalised to shares S_k / sum S, as the paper's
    thresholds require, the highest are selected, as many as `threshold` says. `weights: score`
    averages their models in proportion to S (Eq. 15).

    In the first round in which clients can be reached (round 0 of the paper) all of these take
    part, with the aggregator's average. The server keeps the latest predictions of each client
    without nan, which may be stale; without any, a client has divergence 0 to and from all others.
    A loss that is not finite counts as the largest finite one. Shares are uniform if all scores are
    0.
    """

    adaptive = True
    start_up_rounds = 1
    needs = frozenset({Signal.LOSSES, Signal.PUBLIC})
    pair_bytes = 36  # divergences in float32 and 64, and the attention with what it is made of
    state = ("predictions",)

    threshold: Threshold
    kl_reduction: Literal["mean", "sum"]
    self_term: bool
    weights: Literal["score", "uniform", "by_size"]

    def __post_init__(self) -> None:
        self.predictions: dict[int, Tensor] = {}

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        ids = clients.available
        if clients.in_first_round:
            return Selection(ids)
        scores = self.scores(finite_losses(clients.losses(ids)), self._divergences(ids))
        shares = scores / scores.sum() if scores.sum() > 0 else np.full(len(ids), 1 / len(ids))
        shuffled = rng.permutation(len(ids))
        order = shuffled[np.argsort(-shares[shuffled], kind="stable")]
        count = self.threshold.count(shares[order], round - 1, self.population.num_rounds)
        chosen = np.sort(order[:count])
        sizes = self.population.sizes[ids[chosen]].astype(np.float64)
        weights = {"score": shares[chosen], "uniform": np.ones(len(chosen)), "by_size": sizes}[
            self.weights
        ]
        return Selection(ids[chosen], weights / weights.sum())

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        for client, prediction in zip(cohort.ids, server.predict_public(cohort).cpu(), strict=True):
            if not prediction.isnan().any():
                self.predictions[int(client)] = (
                    prediction.clone()
                )  # a view would keep those of the whole cohort

    def scores(self, losses: Floats, divergences: Floats) -> Floats:
        """The scores S [N] from losses v [N] and divergences d [N, N] of the available clients (Eq.
        11, 13)."""
        size, found = max(BLOCK_ENTRIES // max(len(losses), 1), 1), [np.empty(0)]
        for first in range(0, len(losses), size):
            logits = -divergences[first : first + size]
            if not self.self_term and len(losses) > 1:
                np.fill_diagonal(logits[:, first:], -np.inf)
            logits -= logits.max(1, keepdims=True)
            attention = exp(logits)
            attention /= attention.sum(1, keepdims=True)
            found.append((attention * losses).sum(1))
        return np.concatenate(found)

    def _divergences(self, ids: Ids) -> Floats:
        known = [row for row, i in enumerate(ids) if int(i) in self.predictions]
        if not known:
            return np.zeros((len(ids), len(ids)))
        among = kl_divergences(
            torch.stack([self.predictions[int(ids[row])] for row in known]), self.kl_reduction
        )
        if len(known) == len(ids):
            return among
        result = np.zeros((len(ids), len(ids)))
        result[np.ix_(known, known)] = among
        return result


def finite_losses(losses: Floats) -> Floats:
    """`losses` [N] with values that are not finite replaced by the largest finite one (0 if there
    is none)."""
    finite = np.isfinite(losses)
    largest = losses[finite].max() if finite.any() else 0.0
    return np.where(finite, losses, largest)
