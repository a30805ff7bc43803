"""DELTA (Wang et al., "DELTA: Diverse Client Sampling for Fasting Federated Learning", NeurIPS
2023), the practical algorithm."""

import numpy as np

from fedsim.core.arrays import Floats
from fedsim.selectors.base import (
    Clients,
    Cohort,
    NonNegative,
    Selection,
    Selector,
    Server,
    Signal,
    parameters,
)


@parameters
class Delta(Selector):
    """K draws with replacement from probabilities P that grow with gradient diversity and local
    gradient variance.

    Initially P_k = p_k = n_k / n. After a round, the probability mass of its participants is
    redistributed among them in proportion to sqrt(`diversity` zeta_k^2 + `variance` sigma_k^2).
    zeta_k is the distance of client k's mean gradient (its update divided by learning rate and
    number of steps) from the cohort's mean; sigma_k is the root mean square distance of its
    mini-batch gradients from their mean, one number that the client sends after a pass over its
    data. A client drawn m times gets the aggregation weight m p_k / (K P_k), so that the average is
    an unbiased estimate of full participation's. If some clients are unavailable, p and P are
    renormalised over the others.
    """

    adaptive = True
    needs = frozenset({Signal.GRADIENTS})
    state = ("probabilities",)

    diversity: NonNegative
    variance: NonNegative

    def __post_init__(self) -> None:
        self.probabilities = self.population.shares.copy()
        self._spreads = np.empty(0)
        self._ids = np.empty(0, np.int64)
        self._lr = 1.0

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        ids, count = clients.available, self.population.cohort_size
        p = self.population.sizes[ids] / self.population.sizes[ids].sum()
        probabilities = self.probabilities[ids] / self.probabilities[ids].sum()
        draws = rng.multinomial(count, probabilities)
        chosen = np.flatnonzero(draws)
        self._ids, self._lr = ids[chosen], clients.lr
        self._spreads = clients.gradient_spreads(self._ids)
        return Selection(self._ids, draws[chosen] * p[chosen] / (count * probabilities[chosen]))

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        gradient_sums = cohort.updates.double() / -self._lr
        gradients = (gradient_sums.cpu().numpy().T / np.maximum(cohort.steps, 1)).T
        zeta = np.linalg.norm(gradients - gradients.mean(0), axis=1)
        sigma = self._spreads[np.searchsorted(self._ids, cohort.ids)]
        scores = np.sqrt(self.diversity * zeta**2 + self.variance * sigma**2)
        self.probabilities[cohort.ids] = redistribute_mass(self.probabilities[cohort.ids], scores)


def redistribute_mass(mass: Floats, scores: Floats) -> Floats:
    """sum(`mass`) distributed in proportion to `scores`, both [K]; `mass` unless all scores are
    finite and > 0."""
    if not (np.isfinite(scores) & (scores > 0)).all():
        return mass
    return mass.sum() * scores / scores.sum()
