"""DELTA (Wang et al., "DELTA: Diverse Client Sampling for Fasting Federated Learning", NeurIPS 2023), in its practical
form."""

import numpy as np
from numpy.typing import NDArray

from fedsim.communication.clients import Clients
from fedsim.communication.server import Server
from fedsim.communication.signals import Signal
from fedsim.errors import at_least, check
from fedsim.selectors.base import Selector
from fedsim.types import Cohort, Population, Selection

Floats = NDArray[np.float64]


class Delta(Selector):
    """K draws with replacement from P, where P_k grows with how far a client's gradient is from the mean and how much
    its mini-batches disagree.

    P = p at first (p_k = n_k / n). Those that took part in a round share the mass they had anew, in proportion to
    sqrt(`diversity` zeta_k^2 + `variance` sigma_k^2): zeta_k is the distance of k's mean gradient, its update over
    lr and steps, from the cohort's mean; sigma_k the root mean square distance of its mini-batch gradients from their
    mean, one number that it sends after a pass over its data. Weights are draws p_k / (K P_k), an unbiased estimate of
    full participation. Where clients are away, p and P are those of the others.
    """

    adaptive = True
    needs = frozenset({Signal.GRADIENTS})
    state = ("probabilities",)

    def __init__(self, population: Population, *, diversity: float, variance: float) -> None:
        super().__init__(population)
        check(at_least("diversity", diversity, 0), at_least("variance", variance, 0))
        self.diversity, self.variance = diversity, variance
        self.probabilities = population.shares.copy()
        self._spreads = np.empty(0)
        self._ids = np.empty(0, np.int64)
        self._lr = 1.0

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        ids, count = clients.available, self.population.cohort_size
        p = self.population.sizes[ids] / self.population.sizes[ids].sum()
        chances = self.probabilities[ids] / self.probabilities[ids].sum()
        draws = rng.multinomial(count, chances)
        chosen = np.flatnonzero(draws)
        self._ids, self._lr = ids[chosen], clients.lr
        self._spreads = clients.gradient_spreads(self._ids)
        return Selection(self._ids, draws[chosen] * p[chosen] / (count * chances[chosen]))

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        slopes = cohort.updates.double() / -self._lr
        gradients = (slopes.cpu().numpy().T / np.maximum(cohort.steps, 1)).T
        zeta = np.linalg.norm(gradients - gradients.mean(0), axis=1)
        sigma = self._spreads[np.searchsorted(self._ids, cohort.ids)]
        self.probabilities[cohort.ids] = refreshed_mass(
            self.probabilities[cohort.ids], np.sqrt(self.diversity * zeta**2 + self.variance * sigma**2)
        )


def refreshed_mass(mass: Floats, scores: Floats) -> Floats:
    """The sum of `mass` in proportion to `scores`; as it was where they give none."""
    usable = np.isfinite(scores) & (scores > 0)
    if not usable.all():
        return mass
    result: Floats = mass.sum() * scores / scores.sum()
    return result
