"""K-Vib: learn from round to round which clients to include more often, without bias.

Zeng, Xu, Pan, Luo, Wang and Tang, "Enhanced Federated Optimization: Adaptive Unbiased Client
Sampling with Reduced Variance", TMLR 2025 (arXiv 2310.02698). Code: dunzeng/K-Vib, `sampler.py`.

The average over the cohort is an unbiased estimate of the average over all clients. Its variance is
lowest if clients with long updates take part more often. The lengths are known only for clients
that took part, and so the server learns the probabilities online. Clients are included
independently of each other.

    theta = (N / (T K))^(1/3), at most 1        share of equal probabilities
    gamma = reg N / (theta K)                   feedback that every client is taken to have
    a_k   = sqrt(omega_k + gamma)
    P_k   = min(1, (K + l - N) a_k / (sum of the l smallest a))
    q_k   = (1 - theta) P_k + theta K / N       probability of client k
    aggregation weight of an included client: p_k / q_k
    omega_k += (p_k |Delta_k|)^2 / q_k          after the round, if it was included

omega_k starts at 0. p_k is the share of client k in all samples. l is the largest number of clients
for which none of the l smallest a gets a probability above 1. K clients take part on average; in a
round it may be nobody. The server computes |Delta_k| from the updates that it receives anyway.

Of the paper only the abstract and the first pages could be read, so this docstring cites no
equation. The abstract confirms the online learning, the independent sampling and the unbiased
estimate. The formulas are those of the code, which differs in two points:

- The code uses omega_k + gamma without the root. The root minimises sum_k (omega_k + gamma) / P_k,
  the estimated variance, for probabilities of sum K.
- In the code the client of rank l + 1 gets a probability above 1, so its weight is too small.

fedsim's decisions: If some clients are unavailable, N in P_k and q_k is the number of available
clients, and p is renormalised over them. A client whose update does not arrive leaves omega as it
is, and its absence biases the average.
"""

import numpy as np

from fedsim.core.exact import power, row_sums
from fedsim.selectors.base import (
    Clients,
    Cohort,
    Generator,
    Positive,
    Selection,
    Selector,
    Server,
    Signal,
    parameters,
)
from fedsim.selectors.optimal_sampling import exact_probabilities


@parameters
class KVib(Selector):
    """Includes each client with a probability that grows with the lengths of its past updates."""

    adaptive = True
    needs = frozenset({Signal.UPDATES})
    state = ("feedback",)

    reg: Positive  # scale of gamma: higher values keep the probabilities equal for longer

    def __post_init__(self) -> None:
        num_clients, cohort_size = self.population.num_clients, self.population.cohort_size
        ratio = num_clients / (self.population.num_rounds * cohort_size)
        self.theta = min(float(power(ratio, 1 / 3)), 1.0)
        self.gamma = self.reg * num_clients / (self.theta * cohort_size)
        self.feedback = np.zeros(num_clients)  # omega [N]
        # `select` sets these [N] for the available clients, and `observe` reads them in the same
        # round. Other clients keep earlier values, which nothing reads.
        self._shares = np.zeros(num_clients)  # p
        self._probabilities = np.ones(num_clients)  # q

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        available = clients.available
        count = self.cohort_size(clients)
        scores = np.sqrt(self.feedback[available] + self.gamma)  # a
        best = exact_probabilities(scores, count)  # P
        q = (1 - self.theta) * best + self.theta * count / len(available)
        sizes = self.population.sizes[available]
        p = sizes / sizes.sum()
        self._shares[available] = p
        self._probabilities[available] = q
        is_included = rng.random(len(available)) < q
        return Selection(available[is_included], p[is_included] / q[is_included])

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        squares = row_sums(cohort.updates.double().square()).cpu().numpy()  # |Delta|^2 [K]
        ids = cohort.ids
        self.feedback[ids] += self._shares[ids] ** 2 * squares / self._probabilities[ids]
