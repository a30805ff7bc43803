"""Optimal client sampling (Chen, Horváth and Richtárik, "Optimal Client Sampling for Federated Learning", 2022)."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedsim.communication.clients import Clients
from fedsim.communication.signals import Signal
from fedsim.errors import at_least, check
from fedsim.selectors.base import Selector
from fedsim.types import Population, Selection

Floats = NDArray[np.float64]


class OptimalSampling(Selector):
    """All clients train and report u_k = p_k |Delta_k|; each uploads with a probability that grows with u_k.

    `probabilities: exact` (OCS, Algorithm 1, Eq. 7) minimises the variance of the average at an expected number of
    uploads K; `aggregated` (AOCS, Algorithm 2) comes close from sums only, which secure aggregation allows, in up to
    `iterations` exchanges of two numbers a client. Coins are independent, so the number of uploads is random and may be
    0 (the model then stays). Weights are p_k / P_k, which makes the average unbiased; p_k = n_k / n over those
    available.
    """

    adaptive = True
    needs = frozenset({Signal.TRAINING})

    def __init__(
        self, population: Population, *, probabilities: Literal["exact", "aggregated"], iterations: int
    ) -> None:
        super().__init__(population)
        check(at_least("iterations", iterations, 1))
        self.probabilities, self.iterations = probabilities, iterations

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        ids = clients.available
        shares = self.population.sizes[ids] / self.population.sizes[ids].sum()
        scores = np.nan_to_num(shares * clients.update_norms(ids), nan=0, posinf=0)
        if self.probabilities == "exact":
            chances = exact(scores, self.cohort_size(clients))
        else:
            chances, exchanges = aggregated(scores, self.cohort_size(clients), self.iterations)
            clients.send_numbers(ids, 2 * exchanges)
        drawn = rng.random(len(ids)) < chances
        return Selection(ids[drawn], shares[drawn] / chances[drawn])


def exact(scores: Floats, count: int) -> Floats:
    """Probabilities [N] of sum `count` that minimise sum_k u_k^2 / P_k."""
    positive = scores > 0
    if positive.sum() <= count:
        return _all_positive(positive, count)
    u = np.sort(scores[positive])
    num = len(u)
    room = np.cumsum(u) / u  # sum of the l smallest over the l-th
    left = count + np.arange(1, num + 1) - num
    last = np.flatnonzero((left > 0) & (left <= room + 1e-12))[-1]
    chances = np.ones(len(scores))
    chances[scores <= u[last]] = left[last] * _shares(scores[scores <= u[last]])
    return np.minimum(chances, 1.0)


def aggregated(scores: Floats, count: int, iterations: int) -> tuple[Floats, int]:
    """Probabilities [N], and how many times the clients were asked for two more numbers."""
    positive = scores > 0
    if positive.sum() <= count:
        return _all_positive(positive, count), 0
    chances = np.minimum(count * _shares(scores), 1.0)
    for exchange in range(1, iterations + 1):
        open_ = positive & (chances < 1)
        room = count - (positive & ~open_).sum()
        if room <= chances[open_].sum() * (1 + 1e-12) or not open_.any():
            return chances, exchange
        chances[open_] = np.minimum(room * _shares(scores[open_]), 1.0)
    return chances, iterations


def _shares(scores: Floats) -> Floats:
    """Scores over their sum, which may be so small that its reciprocal overflows."""
    shares: Floats = scores / scores.sum()
    return shares


def _all_positive(positive: NDArray[np.bool_], count: int) -> Floats:
    """1 for whoever has anything to send, and what is left of `count` spread over the others."""
    others = (~positive).sum()
    return np.where(positive, 1.0, (count - positive.sum()) / max(others, 1))
