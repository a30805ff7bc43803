"""Optimal client sampling (OCS): clients with long updates are more likely to upload them.

Chen, Horváth and Richtárik, "Optimal Client Sampling for Federated Learning", TMLR 2022 (arXiv
2010.13723).

All available clients train, and report only the length |Delta_k| of their update. Client k then
uploads its update with a probability P_k that grows with this length. Weights make the average
unbiased, and the probabilities minimise its variance for an expected number K of uploads.

    u_k = p_k |Delta_k|
    P_k = min(1, (K + l - N) u_k / (sum of the l smallest u))           (Eq. 7)
    aggregation weight of an uploading client: p_k / P_k

N is the number of available clients, and p_k the share of client k in their samples. l is the
largest number of clients for which none of the l smallest u gets a probability above 1. Clients
upload independently of each other, so that the number of uploads is random and may be 0.

`probabilities: exact` is Algorithm 1 (OCS). `aggregated` is Algorithm 2 (AOCS), which approximates
the probabilities from sums only, as secure aggregation needs it. Each of its exchanges takes two
numbers from each client.

What the paper leaves open: If at most K of the u_k are positive, these clients upload for certain,
and the other clients with equal probabilities. Lengths that are not finite count as 0.
"""

from typing import Literal

import numpy as np

from fedsim.selectors.base import (
    Bools,
    Clients,
    Count,
    Floats,
    Generator,
    Selection,
    Selector,
    Signal,
    parameters,
)

TOLERANCE = 1e-12
"""Rounding tolerance of comparisons: absolute for ratios of scores, relative for probabilities."""


@parameters
class OptimalSampling(Selector):
    """Lets each client upload with a probability that grows with the norm of its update."""

    adaptive = True

    probabilities: Literal["exact", "aggregated"]  # Algorithm 1 (OCS), or 2 (AOCS)
    iterations: Count  # maximum number of exchanges of `aggregated`

    def __post_init__(self) -> None:
        sums = frozenset({Signal.TRAINING})
        # `exact` needs each client's length, and not only sums of them.
        self.needs = sums if self.probabilities == "aggregated" else sums | {Signal.UPDATES}

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        available = clients.available
        sizes = self.population.sizes[available]
        shares = sizes / sizes.sum()  # p_k
        norms = clients.update_norms(available, only_sum=self.probabilities == "aggregated")
        scores = np.nan_to_num(shares * norms, nan=0, posinf=0)  # u_k
        count = self.cohort_size(clients)
        if self.probabilities == "exact":
            probabilities = exact_probabilities(scores, count)
        else:
            probabilities, num_exchanges = aggregated_probabilities(scores, count, self.iterations)
            for _ in range(num_exchanges):
                clients.send_numbers(available, 2)
        uploads = rng.random(len(available)) < probabilities
        return Selection(available[uploads], shares[uploads] / probabilities[uploads])


def exact_probabilities(scores: Floats, count: int) -> Floats:
    """Return the probabilities P [N] with sum `count` that minimise sum_k u_k^2 / P_k (Eq. 7).

    `scores` [N] are the u_k, and `count` is K.
    """
    positive = scores > 0
    if positive.sum() <= count:
        return _few_positive(positive, count)
    u = np.sort(scores[positive])
    # Position i of these arrays belongs to l = i + 1.
    num_smallest = np.arange(1, len(u) + 1)  # l
    budgets = count + num_smallest - len(u)  # K + l - N, the expected uploads of the l smallest
    ratios = np.cumsum(u) / u  # (sum of the l smallest u) / (the l-th u)
    # The largest of the l probabilities is budget / ratio.
    is_below_one = (budgets > 0) & (budgets <= ratios + TOLERANCE)
    largest = u[np.flatnonzero(is_below_one)[-1]]  # the l-th u for the largest such l
    # Rounding may have excluded some of several equal scores, so count anew.
    num_small = np.searchsorted(u, largest, side="right")
    is_small = scores <= largest
    probabilities = np.ones(len(scores))
    probabilities[is_small] = _proportional(scores[is_small], budgets[num_small - 1])
    return np.minimum(probabilities, 1.0)


def aggregated_probabilities(scores: Floats, count: int, iterations: int) -> tuple[Floats, int]:
    """Return the probabilities [N] of Algorithm 2 and the number of exchanges that it takes.

    `scores` [N] are the u_k, and `count` is K. In an exchange each client sends two numbers. There
    are at most `iterations` exchanges.
    """
    positive = scores > 0
    if positive.sum() <= count:
        return _few_positive(positive, count), 0
    probabilities = _proportional(scores, count)
    for num_exchanges in range(1, iterations + 1):
        below_one = positive & (probabilities < 1)
        budget = count - (positive & ~below_one).sum()  # expected uploads of those below one
        is_spent = budget <= probabilities[below_one].sum() * (1 + TOLERANCE)
        if is_spent or not below_one.any():
            return probabilities, num_exchanges
        probabilities[below_one] = _proportional(scores[below_one], budget)
    return probabilities, iterations


def _proportional(scores: Floats, total: float) -> Floats:
    """Return probabilities proportional to `scores` whose sum is `total`, each at most 1."""
    shares = scores / scores.sum()
    return np.minimum(total * shares, 1.0)


def _few_positive(positive: Bools, count: int) -> Floats:
    """Return the probabilities [N] if at most `count` scores are `positive` [N].

    They are 1 for the clients with positive scores. The other clients share what remains of `count`
    equally.
    """
    num_positive = int(positive.sum())
    num_others = len(positive) - num_positive
    return np.where(positive, 1.0, (count - num_positive) / max(num_others, 1))
