"""Models of which clients are available in a round."""

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from fedsim.core.errors import between, check, floor, rule


class Availability(ABC):
    """The interface of availability models.

    Subclasses take their hyper-parameters keyword-only, with type annotations and without defaults.
    """

    @abstractmethod
    def available(self, round: int, num_clients: int, rng: np.random.Generator) -> NDArray[np.bool_]:
        """Mask [num_clients] of the clients available in `round` (1-based); `rng` is a random stream of this round."""


class Always(Availability):
    """All clients are available in every round."""

    def available(self, round: int, num_clients: int, rng: np.random.Generator) -> NDArray[np.bool_]:
        return np.ones(num_clients, dtype=bool)


class Bernoulli(Availability):
    """Each client is available with `probability`, independently of others and of other rounds."""

    def __init__(self, *, probability: float) -> None:
        check(rule(0 < probability <= 1, "probability", probability, "must lie in (0, 1]"))
        self.probability = probability

    def available(self, round: int, num_clients: int, rng: np.random.Generator) -> NDArray[np.bool_]:
        return rng.random(num_clients) < self.probability


class Intermittent(Availability):
    """Intermittent availability as in Cho et al.'s experiments with power-of-choice: two halves of the clients
    alternate.

    Available in even rounds are the first half of the ids, in odd rounds the second half, without a random share
    `absent` of it (rounded down), which is drawn anew in every round.
    """

    def __init__(self, *, absent: float) -> None:
        check(between("absent", absent, 0, 1, open_high=True))
        self.absent = absent

    def available(self, round: int, num_clients: int, rng: np.random.Generator) -> NDArray[np.bool_]:
        half = num_clients // 2
        group = np.arange(half) if round % 2 == 0 else np.arange(half, num_clients)
        num_absent = floor(self.absent * len(group))
        present = rng.permutation(group)[num_absent:]
        mask = np.zeros(num_clients, dtype=bool)
        mask[present] = True
        return mask
