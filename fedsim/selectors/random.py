from typing import Literal

import numpy as np

from fedsim.selectors.base import Clients, Selection, Selector, ascending, parameters, weighted_without_replacement


@parameters
class Random(Selector):
    """K clients without replacement, with equal probability (`uniform`) or proportional to n_k (`size`).

    McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017, Algorithm 1.
    """

    mode: Literal["uniform", "size"]

    def __post_init__(self) -> None:
        self.uniform = self.mode == "uniform"
        self.draws_by_size = self.mode == "size"

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        count = self.cohort_size(clients)
        if self.mode == "uniform":
            return Selection(ascending(rng.choice(clients.available, count, replace=False)))
        drawn = weighted_without_replacement(self.population.shares[clients.available], count, rng)
        return Selection(ascending(clients.available[drawn]))


class OtherRandom(Random):
    """`Random` by draws that are independent of its own at the same seed: what differs between the two is chance."""

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        return super().select(round, clients, rng.spawn(1)[0])


class MultinomialRandom(Selector):
    """MD (multinomial distribution) sampling: K draws with replacement with probabilities p_k = n_k / n.

    Scheme I of Li et al., "On the Convergence of FedAvg on Non-IID Data", 2020 (used by FedProx). A client drawn m
    times gets the aggregation weight m / K, so that the average is an unbiased estimate of full participation's. If
    some clients are unavailable, p is renormalised over the others.
    """

    adaptive = True

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        sizes = self.population.sizes[clients.available]
        counts = rng.multinomial(self.population.cohort_size, sizes / sizes.sum())
        drawn = np.flatnonzero(counts)
        return Selection(clients.available[drawn], counts[drawn] / counts.sum())
