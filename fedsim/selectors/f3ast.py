"""F3AST (Ribero, Vikalo and de Veciana, "Federated Learning Under Intermittent Client Availability
and Time-Varying Communication Constraints", IEEE JSTSP 2023; preprint 2022)."""

import numpy as np

from fedsim.core.parameters import Problems, parameters
from fedsim.selectors.base import Clients, Selection, Selector, ascending, highest, rule


@parameters
class F3AST(Selector):
    """Selects, of the available clients, the K with the highest marginal utility p_k^2 / r_k^2.

    That is the gradient of -sum_k p_k^2 / r_k, the negative of a bound of the variance that
    selection adds, at the tracked long-term rates r_k <- (1 - `beta`) r_k + `beta` [k selected];
    p_k = n_k / n. Aggregation weights p_k / r_k, with the rate that counts this selection (the
    authors' code), make the mean update unbiased in the limit of a small `beta`, once the rates
    have settled, which takes some 1 / `beta` rounds. A client that is selected in a share r of the
    rounds gets about 1 - `beta` / (2 r) of p_k on average, and all clients together 1 - `beta` N /
    (2 K). So `beta` must be much smaller than K / N: None takes 0.01 K / N. (The authors' code has
    0.01 as its default; the command in its README 0.001, 0.05 K / N there.) Left open: rates start
    at K p_k (at most 1), where all utilities are equal and weights sum to 1; in the code at p_k,
    and the update is divided by K. Ties are broken at random.

    The paper lets the number of clients vary over time; here it is K, or all where fewer are
    available.
    """

    state = ("rates", "round")

    beta: float | None

    def problems(self) -> Problems:
        sound = self.beta is None or 0 < self.beta <= 1
        yield rule(sound, "beta", self.beta, "must lie in (0, 1]", "null takes 0.01 K / N")

    def __post_init__(self) -> None:
        k, n = self.population.cohort_size, self.population.num_clients
        self.step = 0.01 * k / n if self.beta is None else self.beta
        self.rates = np.minimum(k * self.population.shares, 1)
        self.round = 0  # whose selection is in the rates

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        ids, shares = clients.available, self.population.shares
        chosen = ascending(
            ids[highest(-self.rates[ids] / shares[ids], self.cohort_size(clients), rng)]
        )
        for _ in range(round - self.round):  # also for rounds in which nobody could be reached
            self.rates *= 1 - self.step
        self.rates[chosen] += self.step
        self.round = round
        return Selection(chosen, shares[chosen] / self.rates[chosen])
