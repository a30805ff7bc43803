"""F3AST: select clients by tracked participation rates, for clients that come and go.

Ribero, Vikalo and de Veciana, "Federated Learning Under Intermittent Client Availability and
Time-Varying Communication Constraints", IEEE JSTSP 2023 (arXiv 2205.06730).

The server tracks the rate r_k at which each client k is selected in the long run. It selects the K
clients whose selection lowers a bound of the variance most, and divides by the rates in
aggregation. Clients that are seldom available thus get large weights, and the average stays
unbiased.

    r_k <- (1 - beta) r_k + beta * (1 if client k is selected in this round, otherwise 0)
    marginal utility = p_k^2 / r_k^2
    aggregation weight = p_k / r_k

with p_k = n_k / n, the share of client k in the n samples of all N clients. The bound is
sum_k p_k^2 / r_k, and the utility is minus its derivative by r_k. The rates in the weights include
this round's selection, as in the authors' code.

beta must be much smaller than K / N. A client that is selected in a share r of the rounds gets an
average weight of about p_k (1 - beta / (2 r)). The average sum of all weights is about
1 - beta N / (2 K). So the weights are unbiased only in the limit of a small beta. In addition, the
rates must have settled, which takes about 1 / beta rounds. The authors' code has beta = 0.01 as its
default. The command in its README has 0.001, which is 0.05 K / N there.

What the paper leaves open: Rates start at K p_k, and at most at 1. If no K p_k is above 1, all
utilities are equal then. In the code they start at p_k, and the update is divided by K. Ties are
broken at random. Deviation: The paper lets the number of clients vary over time. Here it is K, or
all available clients if they are fewer.
"""

import numpy as np

from fedsim.selectors.base import (
    Clients,
    Generator,
    Problems,
    Selection,
    Selector,
    parameters,
    rule,
)


@parameters
class F3AST(Selector):
    """Selects the K available clients with the highest marginal utility p_k^2 / r_k^2."""

    state = ("rates", "latest_round")

    beta: float | None  # weight of a round in the rates, in (0, 1]; None: 0.01 K / N

    def problems(self) -> Problems:
        in_range = self.beta is None or 0 < self.beta <= 1
        yield rule(in_range, "beta", self.beta, "must lie in (0, 1]", "null stands for 0.01 K / N")

    def __post_init__(self) -> None:
        cohort_size = self.population.cohort_size
        default = 0.01 * cohort_size / self.population.num_clients
        self.round_weight = default if self.beta is None else self.beta  # beta
        self.rates = np.minimum(cohort_size * self.population.shares, 1)  # r [N]
        self.latest_round = 0  # the latest round that the rates count

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        shares = self.population.shares  # p [N]
        # 1. The clients of highest utility have the lowest r_k / (K p_k). It is rounded, because
        # equal utilities, such as those at the start, must not differ by rounding errors.
        available = clients.available
        first_rates = self.population.cohort_size * shares[available]
        ratios = np.round(self.rates[available] / first_rates, 12)
        chosen = self.select_highest(-ratios, clients, rng)
        # 2. The rates. They also fall for each round in which nobody was available.
        for _ in range(round - self.latest_round):
            self.rates *= 1 - self.round_weight
        self.rates[chosen] += self.round_weight
        self.latest_round = round
        # 3. The weights
        return Selection(chosen, shares[chosen] / self.rates[chosen])
