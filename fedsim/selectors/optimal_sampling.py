"""Optimal client sampling (Chen, Horváth and Richtárik, "Optimal Client Sampling for Federated
Learning", 2022)."""

from typing import Any, Literal

import numpy as np

from fedsim.selectors.base import Clients, Count, Floats, Selection, Selector, Signal, parameters


@parameters
class OptimalSampling(Selector):
    """All clients train and report u_k = p_k |Delta_k|; each uploads with a probability P_k that
    grows with u_k.

    `probabilities: exact` (OCS, Algorithm 1, Eq. 7) minimises the variance of the average for an
    expected number K of uploads. `aggregated` (AOCS, Algorithm 2) approximates that from sums only,
    as secure aggregation needs it, in up to `iterations` exchanges of two numbers per client. The
    number of uploads is random and may be 0. Aggregation weights p_k / P_k make the average
    unbiased, with p_k = n_k / n over the available clients.
    """

    adaptive = True
    needs = frozenset({Signal.TRAINING})

    probabilities: Literal["exact", "aggregated"]
    iterations: Count

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        ids = clients.available
        shares = self.population.sizes[ids] / self.population.sizes[ids].sum()
        scores = np.nan_to_num(shares * clients.update_norms(ids), nan=0, posinf=0)
        if self.probabilities == "exact":
            probabilities = exact_probabilities(scores, self.cohort_size(clients))
        else:
            probabilities, exchanges = aggregated_probabilities(
                scores, self.cohort_size(clients), self.iterations
            )
            for _ in range(exchanges):
                clients.send_numbers(ids, 2)
        drawn = rng.random(len(ids)) < probabilities
        return Selection(ids[drawn], shares[drawn] / probabilities[drawn])


def exact_probabilities(scores: Floats, count: int) -> Floats:
    """Probabilities P [N] with sum `count` that minimise sum_k u_k^2 / P_k, for the `scores` u [N]
    (Eq. 7)."""
    positive = scores > 0
    if positive.sum() <= count:
        return _all_positive_upload(positive, count)
    u = np.sort(scores[positive])
    num = len(u)
    ratios = np.cumsum(u) / u  # sum of the l smallest scores divided by the l-th
    left = count + np.arange(1, num + 1) - num
    last = np.flatnonzero((left > 0) & (left <= ratios + 1e-12))[-1]
    last = (
        np.searchsorted(u, u[last], side="right") - 1
    )  # rounding may have left some of several equal ones out
    probabilities = np.ones(len(scores))
    probabilities[scores <= u[last]] = left[last] * (
        scores[scores <= u[last]] / scores[scores <= u[last]].sum()
    )
    return np.minimum(probabilities, 1.0)


def aggregated_probabilities(scores: Floats, count: int, iterations: int) -> tuple[Floats, int]:
    """The probabilities [N] of Algorithm 2, and the number of exchanges of two numbers per client
    that it took."""
    positive = scores > 0
    if positive.sum() <= count:
        return _all_positive_upload(positive, count), 0
    probabilities = np.minimum(count * (scores / scores.sum()), 1.0)
    for exchange in range(1, iterations + 1):
        below_one = positive & (probabilities < 1)
        remaining = count - (positive & ~below_one).sum()
        if remaining <= probabilities[below_one].sum() * (1 + 1e-12) or not below_one.any():
            return probabilities, exchange
        probabilities[below_one] = np.minimum(
            remaining * (scores[below_one] / scores[below_one].sum()), 1.0
        )
    return probabilities, iterations


def _all_positive_upload(positive: Any, count: int) -> Floats:
    """Probabilities [N] if at most `count` scores are positive: 1 for those, equal ones for the
    others."""
    others = (~positive).sum()
    return np.where(positive, 1.0, (count - positive.sum()) / max(others, 1))
