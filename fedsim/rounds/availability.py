"""Availability models, which say which clients can be reached in a round.

The round loop calls `available` at the beginning of each round, and checks the mask. Clients
without training samples are never available, whatever the mask says.
"""

from abc import ABC, abstractmethod
from typing import Annotated

import numpy as np
from annotated_types import Interval

from fedsim.core.arrays import Bools
from fedsim.core.errors import rule
from fedsim.core.parameters import Problems, parameters
from fedsim.core.rounding import floor


class Availability(ABC):
    """The interface of availability models. Hyper-parameters are keyword-only fields, as in
    selectors."""

    @abstractmethod
    def available(self, round: int, num_clients: int, rng: np.random.Generator) -> Bools:
        """Return a mask [num_clients] of the clients that are available in `round` (from 1).

        `rng` is a random stream of this round.
        """


class Always(Availability):
    """All clients are available in every round."""

    def available(self, round: int, num_clients: int, rng: np.random.Generator) -> Bools:
        """Return a mask with all clients."""
        return np.ones(num_clients, dtype=bool)


@parameters
class Bernoulli(Availability):
    """Each client is available with `probability`, independently of other clients and rounds."""

    probability: float

    def problems(self) -> Problems:
        """Yield a problem unless the probability lies in (0, 1]."""
        holds = 0 < self.probability <= 1
        yield rule(holds, "probability", self.probability, "must lie in (0, 1]")

    def available(self, round: int, num_clients: int, rng: np.random.Generator) -> Bools:
        """Return a mask with one independent draw for each client."""
        return rng.random(num_clients) < self.probability


@parameters
class Intermittent(Availability):
    """Two halves of the clients alternate, as in Cho et al.'s experiments with power-of-choice.

    The first half of the ids can be available in even rounds, and the second half in odd rounds. In
    every round, a random share `absent` of the half (rounded down) is not available.
    """

    absent: Annotated[float, Interval(ge=0, lt=1)]

    def available(self, round: int, num_clients: int, rng: np.random.Generator) -> Bools:
        """Return a mask with the clients of this round's half that are not absent."""
        middle = num_clients // 2
        half = np.arange(middle) if round % 2 == 0 else np.arange(middle, num_clients)
        num_absent = floor(self.absent * len(half))
        present = rng.permutation(half)[num_absent:]
        mask = np.zeros(num_clients, dtype=bool)
        mask[present] = True
        return mask
