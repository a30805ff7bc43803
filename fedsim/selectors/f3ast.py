"""F3AST (Ribero, Vikalo and de Veciana, "Federated Learning Under Intermittent Client Availability and Time-Varying
Communication Constraints", IEEE JSTSP 2023; preprint 2022)."""

import numpy as np

from fedsim.core.parameters import Problems, parameters
from fedsim.selectors.base import Clients, Selection, Selector, ascending, highest, rule


@parameters
class F3AST(Selector):
    """Selects, of the available clients, the K with the highest marginal utility p_k^2 / r_k^2.

    That is the gradient of -sum_k p_k^2 / r_k, the negative of a bound of the variance that selection adds, at the
    tracked long-term rates r_k <- (1 - `beta`) r_k + `beta` [k selected]; p_k = n_k / n. Aggregation weights p_k / r_k,
    with the rate that counts this selection (the authors' code), make the mean update unbiased once the rates have
    settled, which takes some 1 / `beta` rounds. Left open: rates start at K p_k (at most 1), where all utilities are
    equal and weights sum to 1; in the code at p_k, and the update is divided by K. Ties are broken at random.

    The paper lets the number of clients vary over time; here it is K, or all where fewer are available.
    """

    state = ("rates", "round")

    beta: float

    def problems(self) -> Problems:
        yield rule(0 < self.beta <= 1, "beta", self.beta, "must lie in (0, 1]", "0.01 is the authors'")

    def __post_init__(self) -> None:
        self.rates = np.minimum(self.population.cohort_size * self.population.shares, 1)
        self.round = 0  # whose selection is in the rates

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        ids, shares = clients.available, self.population.shares
        chosen = ascending(ids[highest(-self.rates[ids] / shares[ids], self.cohort_size(clients), rng)])
        for _ in range(round - self.round):  # also for rounds in which nobody could be reached
            self.rates *= 1 - self.beta
        self.rates[chosen] += self.beta
        self.round = round
        return Selection(chosen, shares[chosen] / self.rates[chosen])
