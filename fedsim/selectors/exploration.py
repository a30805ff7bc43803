"""Schedules of the exploration weight alpha in GPFL's bandit index."""

from abc import ABC, abstractmethod

from fedsim.selectors.base import Count, NonNegative, Positive, parameters


class Exploration(ABC):
    """The exploration weight alpha_t in round t (1-based) of T."""

    @abstractmethod
    def alpha(self, t: int, num_rounds: int) -> float:
        """alpha_t >= 0 in round `t` (1-based) of `num_rounds`."""


@parameters
class Linear(Exploration):
    """alpha_t = rho t / T (Eq. 7).

    `reference` replaces T: a number of rounds if it is >= 1, a share of T if it is below 1. GPFL's Fig. 7 ran 800
    rounds with a reference of 500 (a share of .625), so that alpha reaches 1.6 rho, as the authors' logs show.
    """

    rho: NonNegative
    reference: Positive | None

    def alpha(self, t: int, num_rounds: int) -> float:
        rounds = num_rounds if self.reference is None else self.reference
        return self.rho * t / (rounds if rounds >= 1 else rounds * num_rounds)


@parameters
class Fixed(Exploration):
    """A constant alpha (Fig. 7a)."""

    value: NonNegative

    def alpha(self, t: int, num_rounds: int) -> float:
        return self.value


@parameters
class Decreasing(Exploration):
    """alpha_t = rho (1 - (t - 1) / T)."""

    rho: NonNegative

    def alpha(self, t: int, num_rounds: int) -> float:
        return self.rho * (1 - (t - 1) / num_rounds)


@parameters
class Triangular(Exploration):
    """alpha_t = t / peak before round `peak`, then 2 peak / (t + peak); the authors' code has peak 100 by default."""

    peak: Count

    def alpha(self, t: int, num_rounds: int) -> float:
        return t / self.peak if t < self.peak else 2 * self.peak / (t + self.peak)
