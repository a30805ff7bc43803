from abc import ABC, abstractmethod
from typing import Annotated

import numpy as np
from annotated_types import Interval

from fedsim.core.arrays import Bools
from fedsim.core.errors import rule
from fedsim.core.parameters import Problems, parameters
from fedsim.core.rounding import floor


class Availability(ABC):
    """The interface of availability models. Hyper-parameters are keyword-only fields, as of
    selectors."""

    @abstractmethod
    def available(self, round: int, num_clients: int, rng: np.random.Generator) -> Bools:
        """Mask [num_clients] of the clients available in `round` (1-based); `rng` is a random
        stream of this round."""


class Always(Availability):
    """All clients are available in every round."""

    def available(self, round: int, num_clients: int, rng: np.random.Generator) -> Bools:
        return np.ones(num_clients, dtype=bool)


@parameters
class Bernoulli(Availability):
    """Each client is available with `probability`, independently of others and of other rounds."""

    probability: float

    def problems(self) -> Problems:
        yield rule(0 < self.probability <= 1, "probability", self.probability, "must lie in (0, 1]")

    def available(self, round: int, num_clients: int, rng: np.random.Generator) -> Bools:
        return rng.random(num_clients) < self.probability


@parameters
class Intermittent(Availability):
    """Intermittent availability as in Cho et al.'s experiments with power-of-choice: two halves of
    the clients alternate.

    Available in even rounds are the first half of the ids, in odd rounds the second half, without a
    random share `absent` of it (rounded down), which is drawn anew in every round.
    """

    absent: Annotated[float, Interval(ge=0, lt=1)]

    def available(self, round: int, num_clients: int, rng: np.random.Generator) -> Bools:
        half = num_clients // 2
        group = np.arange(half) if round % 2 == 0 else np.arange(half, num_clients)
        num_absent = floor(self.absent * len(group))
        present = rng.permutation(group)[num_absent:]
        mask = np.zeros(num_clients, dtype=bool)
        mask[present] = True
        return mask
