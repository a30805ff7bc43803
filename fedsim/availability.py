"""Who can be reached in a round."""

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from fedsim.errors import between, check, rule


class Availability(ABC):
    """Subclasses take their hyper-parameters keyword-only, annotated, without defaults."""

    @abstractmethod
    def available(self, round: int, num_clients: int, rng: np.random.Generator) -> NDArray[np.bool_]:
        """Mask [num_clients] of the clients that can be reached in `round` (1-based); `rng` is the round's own."""


class Always(Availability):
    """Everybody, every round."""

    def available(self, round: int, num_clients: int, rng: np.random.Generator) -> NDArray[np.bool_]:
        return np.ones(num_clients, dtype=bool)


class Bernoulli(Availability):
    """Each client independently with `probability`, afresh every round."""

    def __init__(self, *, probability: float) -> None:
        check(rule(0 < probability <= 1, "probability", probability, "must lie in (0, 1]"))
        self.probability = probability

    def available(self, round: int, num_clients: int, rng: np.random.Generator) -> NDArray[np.bool_]:
        return rng.random(num_clients) < self.probability


class Intermittent(Availability):
    """Cho et al.'s test of power-of-choice: the two halves of the clients take turns, some of each being away.

    In even rounds the first half of the ids, in odd rounds the second half, minus a random share `absent` of it
    (rounded down), drawn afresh every round.
    """

    def __init__(self, *, absent: float) -> None:
        check(between("absent", absent, 0, 1, open_high=True))
        self.absent = absent

    def available(self, round: int, num_clients: int, rng: np.random.Generator) -> NDArray[np.bool_]:
        half = num_clients // 2
        group = np.arange(half) if round % 2 == 0 else np.arange(half, num_clients)
        num_absent = int(self.absent * len(group) + 1e-9)  # 0.29 of 100 is 28.999999999999996 in floats
        present = rng.permutation(group)[num_absent:]
        mask = np.zeros(num_clients, dtype=bool)
        mask[present] = True
        return mask
