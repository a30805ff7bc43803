"""The schedules of GPFL's weight of exploration."""

from abc import ABC, abstractmethod

from fedsim.errors import at_least, check


class Exploration(ABC):
    """The weight alpha of exploration in round t (1-based) of T."""

    @abstractmethod
    def alpha(self, t: int, num_rounds: int) -> float:
        """alpha_t >= 0."""


class Linear(Exploration):
    """rho t / T (Eq. 7); `reference` replaces T (500 gives the curves of Fig. 7, which ran 800 rounds)."""

    def __init__(self, *, rho: float, reference: int | None) -> None:
        check(at_least("rho", rho, 0), None if reference is None else at_least("reference", reference, 1))
        self.rho, self.reference = rho, reference

    def alpha(self, t: int, num_rounds: int) -> float:
        return self.rho * t / (self.reference or num_rounds)


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
