"""The schedules of GPFL's weight of exploration."""

from abc import ABC, abstractmethod

from fedsim.errors import at_least, check, positive


class Exploration(ABC):
    """The weight alpha of exploration in round t (1-based) of T."""

    @abstractmethod
    def alpha(self, t: int, num_rounds: int) -> float:
        """alpha_t >= 0."""


class Linear(Exploration):
    """rho t / T (Eq. 7); `reference` rounds take the place of T, or that share of T where it is below 1.

    GPFL's Fig. 7 ran 800 rounds with a reference of 500, a share of .625: alpha reaches 1.6 rho (the authors' logs).
    """

    def __init__(self, *, rho: float, reference: float | None) -> None:
        check(at_least("rho", rho, 0), None if reference is None else positive("reference", reference))
        self.rho, self.reference = rho, reference

    def alpha(self, t: int, num_rounds: int) -> float:
        rounds = num_rounds if self.reference is None else self.reference
        return self.rho * t / (rounds if rounds >= 1 else rounds * num_rounds)


class Fixed(Exploration):
    """The same alpha throughout (Fig. 7a)."""

    def __init__(self, *, value: float) -> None:
        check(at_least("value", value, 0))
        self.value = value

    def alpha(self, t: int, num_rounds: int) -> float:
        return self.value


class Decreasing(Exploration):
    """rho (1 - (t - 1) / T)."""

    def __init__(self, *, rho: float) -> None:
        check(at_least("rho", rho, 0))
        self.rho = rho

    def alpha(self, t: int, num_rounds: int) -> float:
        return self.rho * (1 - (t - 1) / num_rounds)


class Triangular(Exploration):
    """t / peak up to round `peak`, then 2 peak / (t + peak) (the default of the authors' code, with peak 100)."""

    def __init__(self, *, peak: int) -> None:
        check(at_least("peak", peak, 1))
        self.peak = peak

    def alpha(self, t: int, num_rounds: int) -> float:
        return t / self.peak if t < self.peak else 2 * self.peak / (t + self.peak)
