from typing import Literal

import numpy as np

from fedsim.selectors.base import (
    Clients,
    Sampling,
    Selection,
    Selector,
    ascending,
    parameters,
    weighted_without_replacement,
)


@parameters
class Random(Selector):
    """K clients without replacement, with equal probability (`uniform`) or proportional to n_k
    (`size`).

    McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
    2017, Algorithm 1.
    """

    mode: Literal["uniform", "size"]

    def __post_init__(self) -> None:
        self.draws_by_size = self.mode == "size"

    @property
    def sampling(self) -> Sampling | None:
        return Sampling.FIXED_SIZE if self.mode == "uniform" else None

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        count = self.cohort_size(clients)
        if self.mode == "uniform":
            return Selection(ascending(rng.choice(clients.available, count, replace=False)))
        drawn = weighted_without_replacement(self.population.shares[clients.available], count, rng)
        return Selection(ascending(clients.available[drawn]))


class OtherRandom(Random):
    """`Random` by draws that are independent of its own at the same seed: what differs between the
    two is chance."""

    sampling = Random.sampling

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        return super().select(round, clients, rng.spawn(1)[0])


class Poisson(Selector):
    """Each client takes part with probability K / N, independently of the others: Poisson sampling,
    by which K clients take part on average, and in some rounds nobody does.

    McMahan et al., "Learning Differentially Private Recurrent Language Models", 2018, Algorithm 1.
    All N clients are drawn for, and those that are unavailable are left out, so that nobody's
    chance depends on who else is there.
    """

    adaptive = True
    sampling = Sampling.POISSON

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        num_clients = self.population.num_clients
        drawn = rng.random(num_clients) < self.population.cohort_size / num_clients
        return Selection(clients.available[drawn[clients.available]])


class MultinomialRandom(Selector):
    """MD (multinomial distribution) sampling: K draws with replacement with probabilities p_k = n_k
    / n.

    Scheme I of Li et al., "On the Convergence of FedAvg on Non-IID Data", 2020 (used by FedProx). A
    client drawn m times gets the aggregation weight m / K, so that the average is an unbiased
    estimate of full participation's. If some clients are unavailable, p is renormalised over the
    others.
    """

    adaptive = True

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        sizes = self.population.sizes[clients.available]
        counts = rng.multinomial(self.population.cohort_size, sizes / sizes.sum())
        drawn = np.flatnonzero(counts)
        return Selection(clients.available[drawn], counts[drawn] / counts.sum())
