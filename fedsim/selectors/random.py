"""Random selection: the baseline of every paper, and its variants.

Symbols: N clients, K of them to select in a round, n_k samples of client k, n samples of all
clients.
"""

from typing import Annotated, Literal

import numpy as np
from annotated_types import Interval

from fedsim.selectors.base import (
    Clients,
    Generator,
    Sampling,
    Selection,
    Selector,
    ascending,
    parameters,
    weighted_without_replacement,
)


@parameters
class Random(Selector):
    """Draws K clients without replacement.

    Source: McMahan, Moore, Ramage, Hampson and Agüera y Arcas, "Communication-Efficient Learning
    of Deep Networks from Decentralized Data", AISTATS 2017 (arXiv 1602.05629), Algorithm 1.
    """

    mode: Literal["uniform", "size"]  # equal probabilities, or proportional to n_k

    def __post_init__(self) -> None:
        self.draws_by_size = self.mode == "size"

    @property
    def sampling(self) -> Sampling | None:
        return Sampling.FIXED_SIZE if self.mode == "uniform" else None

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        available = clients.available
        count = self.cohort_size(clients)
        if self.mode == "uniform":
            return Selection(ascending(rng.choice(available, count, replace=False)))
        drawn = weighted_without_replacement(self.population.shares[available], count, rng)
        return Selection(ascending(available[drawn]))


@parameters
class OtherRandom(Random):
    """Draws as `Random`, but with other random numbers at the same seed.

    The two differ by chance only, so a report must not find a difference between them. Different
    numbers `stream` give different controls; None is 1.
    """

    stream: Annotated[int, Interval(ge=1, le=9)] | None = None

    sampling = Random.sampling

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        other_rng = rng.spawn(self.stream or 1)[-1]
        return super().select(round, clients, other_rng)


class Poisson(Selector):
    """Draws each client with probability K / N, independently of the others.

    If all clients are available, K clients take part on average. In some rounds no client does. The
    random numbers of all N clients are drawn, and unavailable clients are then skipped. So the
    chance of a client does not depend on which other clients are available.

    Source: McMahan, Ramage, Talwar and Zhang, "Learning Differentially Private Recurrent Language
    Models", ICLR 2018 (arXiv 1710.06963), Algorithm 1.
    """

    adaptive = True
    sampling = Sampling.POISSON

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        num_clients = self.population.num_clients
        takes_part = rng.random(num_clients) < self.population.cohort_size / num_clients
        return Selection(clients.available[takes_part[clients.available]])


class MultinomialRandom(Selector):
    """Draws K clients with replacement, with probabilities p_k = n_k / n (MD sampling).

    A client that is drawn m times gets the aggregation weight m / K. The average is then an
    unbiased estimate of the average over all clients. If some clients are unavailable, p is
    renormalised over the others.

    Source: scheme I of Li, Huang, Yang, Wang and Zhang, "On the Convergence of FedAvg on Non-IID
    Data", ICLR 2020 (arXiv 1907.02189). FedProx uses it.
    """

    adaptive = True

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        sizes = self.population.sizes[clients.available]
        counts = rng.multinomial(self.population.cohort_size, sizes / sizes.sum())
        drawn = np.flatnonzero(counts)
        return Selection(clients.available[drawn], counts[drawn] / counts.sum())
