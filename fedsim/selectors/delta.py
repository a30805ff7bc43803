"""DELTA: draw clients whose gradients are diverse, and correct the bias by weights.

Wang, Guo, Lin and Tang, "DELTA: Diverse Client Sampling for Fasting Federated Learning", NeurIPS
2023 (arXiv 2205.13925), the practical algorithm.

Clients that differ from the others, or whose own mini-batches differ from each other, teach the
model more. DELTA draws them more often. Aggregation weights make the average an unbiased estimate
of the average over all clients.

    P_k  proportional to  sqrt(alpha_1 zeta_k^2 + alpha_2 sigma_k^2)

A client's mean gradient is its update, divided by minus the learning rate and by its number of
steps. zeta_k is the distance of client k's mean gradient from the average over the cohort. sigma_k
is the root mean square distance of client k's mini-batch gradients from their mean. It is one
number, which the client sends after a pass over its data.

Algorithm, starting from P_k = p_k = n_k / n, the share of client k in all n samples:

1. Draw K clients with replacement from P. A client that is drawn m times gets the aggregation
   weight m p_k / (K P_k).
2. After the round, redistribute the sum of P over the clients whose updates arrived among these
   clients by the formula above. The other clients keep their P_k.

The authors' code (L3030/DELTA_FL) has several versions. Two were read, and both differ from this
docstring. They start from P_k = 1 / N and draw without replacement. The update of a drawn client
gets the weight n_k / (N P_k), divided by the sum of n over the drawn clients.

- `LEAF/local_update_FEMNIST.py`: Before each round, all N clients train for an epoch. Then P_k is
  proportional to beta p_k zeta_k + (1 - beta) sqrt(p_k). The second term, a share of samples,
  stands in place of sigma_k. The weights read P in another order of the clients than the draw.
- `local_update.py` for FEMNIST and CIFAR-10: The drawn clients redistribute the sum of their P, as
  in step 2. P_k is proportional to n_k, here a number of mini-batches, times a weighted mean of
  zeta_k and the norm of the client's mean gradient. There is no sigma_k.

What the paper leaves open: If some clients are unavailable, p and P are renormalised over the
others.
"""

import numpy as np

from fedsim.selectors.base import (
    Clients,
    Cohort,
    Floats,
    Generator,
    NonNegative,
    Selection,
    Selector,
    Server,
    Signal,
    parameters,
)


@parameters
class Delta(Selector):
    """Draws K clients with replacement by the diversity and the variance of their gradients."""

    adaptive = True
    needs = frozenset({Signal.GRADIENTS, Signal.UPDATES})
    state = ("probabilities",)

    diversity: NonNegative  # alpha_1, the weight of zeta_k^2
    variance: NonNegative  # alpha_2, the weight of sigma_k^2

    def __post_init__(self) -> None:
        self.probabilities = self.population.shares.copy()  # P [N]
        # `select` sets these, and `observe` reads them in the same round.
        self._drawn = np.empty(0, np.int64)  # the ids of the drawn clients
        self._spreads = np.empty(0)  # their sigma
        self._lr = 1.0  # the local learning rate

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        available = clients.available
        sizes = self.population.sizes[available]
        p = sizes / sizes.sum()
        probabilities = self.probabilities[available] / self.probabilities[available].sum()
        cohort_size = self.population.cohort_size
        counts = rng.multinomial(cohort_size, probabilities)  # m_k
        drawn = np.flatnonzero(counts)
        self._drawn = available[drawn]
        self._lr = clients.lr
        self._spreads = clients.gradient_spreads(self._drawn)
        weights = counts[drawn] * p[drawn] / (cohort_size * probabilities[drawn])
        return Selection(self._drawn, weights)

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        gradient_sums = (cohort.updates.double() / -self._lr).cpu().numpy()
        gradients = (gradient_sums.T / np.maximum(cohort.steps, 1)).T
        zeta = np.linalg.norm(gradients - gradients.mean(0), axis=1)
        sigma = self._spreads[np.searchsorted(self._drawn, cohort.ids)]
        scores = np.sqrt(self.diversity * zeta**2 + self.variance * sigma**2)
        self.probabilities[cohort.ids] = redistribute_mass(self.probabilities[cohort.ids], scores)


def redistribute_mass(mass: Floats, scores: Floats) -> Floats:
    """Return the sum of `mass` [K], distributed in proportion to `scores` [K].

    The result is `mass` itself if a score is not finite or not positive.
    """
    if not (np.isfinite(scores) & (scores > 0)).all():
        return mass
    return mass.sum() * scores / scores.sum()
