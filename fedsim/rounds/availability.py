"""Availability models, which say which clients can be reached in a round.

fedsim calls `begin` once before the first round. The round loop calls `available` at the beginning
of each round, and checks the mask. Clients without training samples are never available, whatever
the mask says.

Most models give each client a probability and draw independently (`Independent`). The probabilities
of `ByLabel`, `BySize`, `LogNormalRates` and `SineOfDay` are those of FLGo's code (Wang et al. 2023,
"FLGo: A Fully Customizable Federated Learning Platform", arXiv 2306.12079). Those of `Cycles` are
from FedGS's code (arXiv 2211.13975), by the same authors. If nobody is available, FLGo draws again.
In fedsim the round passes without training.

Symbols: N clients, L classes. Client i has n_i training samples. Rounds t count from 1.
"""

import math
from abc import ABC, abstractmethod
from typing import Annotated, ClassVar, Literal

import numpy as np
from annotated_types import Ge, Interval

from fedsim.core.arrays import Bools, Floats, Ints
from fedsim.core.errors import rule
from fedsim.core.exact import exp, normal, power
from fedsim.core.parameters import Count, NonNegative, Problems, Share, parameters
from fedsim.core.rounding import floor


class Availability(ABC):
    """The interface of availability models. Hyper-parameters are keyword-only fields, as in
    selectors."""

    depends_on_data: ClassVar[bool] = False
    """True if a client's data decide when it can be reached. A private run then has no epsilon."""
    needs_labels: ClassVar[bool] = False
    """True if `begin` reads label counts, which the server of real nodes does not have."""

    def begin(  # noqa: B027 - most models need no preparation
        self, sizes: Ints, label_counts: Ints, rng: np.random.Generator
    ) -> None:
        """Prepare for the run; called once, before the first round. By default nothing is done.

        `sizes` [N] are the clients' numbers of training samples. `label_counts` [N, L] are their
        numbers of training samples of each class. `rng` is a random stream of the run.
        """

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


class Independent(Availability, ABC):
    """A model in which each client has a probability, independently of other clients and rounds."""

    @abstractmethod
    def probabilities(self, round: int, num_clients: int) -> Floats:
        """Return the probability of each client in `round` (from 1) [num_clients]."""

    def available(self, round: int, num_clients: int, rng: np.random.Generator) -> Bools:
        """Return a mask with one independent draw for each client."""
        return rng.random(num_clients) < self.probabilities(round, num_clients)


@parameters
class Bernoulli(Independent):
    """Each client is available with the same `probability`."""

    probability: float

    def problems(self) -> Problems:
        """Yield a problem unless the probability lies in (0, 1]."""
        holds = 0 < self.probability <= 1
        yield rule(holds, "probability", self.probability, "must lie in (0, 1]")

    def probabilities(self, round: int, num_clients: int) -> Floats:
        """Return `probability` for each client."""
        return np.full(num_clients, self.probability)


class Unchanging(Independent, ABC):
    """A model whose probabilities are the same in all rounds: `begin` sets `fixed` [N]."""

    def __post_init__(self) -> None:
        self.fixed: Floats = np.empty(0)

    def probabilities(self, round: int, num_clients: int) -> Floats:
        """Return the probabilities that `begin` has set."""
        return self.fixed


@parameters
class ByLabel(Unchanging):
    """A client's probability is 1 - beta + beta x, where x in [0, 1] depends on its labels.

    With `measure=lowest`, x is the lowest label that the client has, divided by L - 1. This is the
    setting of MIFA's experiments (Gu et al. 2021, arXiv 2106.04159). With `measure=number`, x is
    the number of its different labels, divided by L. `favours=low` turns the order round: the
    client with the lowest label, or with a single one, has x = 1.
    """

    depends_on_data: ClassVar[bool] = True
    needs_labels: ClassVar[bool] = True

    beta: Share
    measure: Literal["lowest", "number"]
    favours: Literal["high", "low"]

    def begin(self, sizes: Ints, label_counts: Ints, rng: np.random.Generator) -> None:
        """Compute the probabilities from the labels that clients have."""
        num_classes = label_counts.shape[1]
        has_label = label_counts > 0
        if self.measure == "lowest":
            # `argmax` is the first True: the lowest label
            lowest = has_label.argmax(1)
            x = lowest / max(num_classes - 1, 1)
            if self.favours == "low":
                x = 1 - x
        else:
            number = has_label.sum(1)
            if self.favours == "low":
                number = num_classes + 1 - number
            x = number / num_classes
        self.fixed = 1 - self.beta + self.beta * x


@parameters
class BySize(Unchanging):
    """A client's probability is (n_i / n_max)^beta if large clients are favoured, and
    (n_min / n_i)^beta if small ones are.

    n_max and n_min are the largest and the smallest number of training samples of a client that has
    any.
    """

    depends_on_data: ClassVar[bool] = True

    beta: NonNegative
    favours: Literal["large", "small"]

    def begin(self, sizes: Ints, label_counts: Ints, rng: np.random.Generator) -> None:
        """Compute the probabilities from the clients' numbers of samples."""
        has_samples = sizes > 0
        present = sizes[has_samples].astype(np.float64)
        # never above 1 in both cases
        ratios = present / present.max() if self.favours == "large" else present.min() / present
        self.fixed = np.zeros(len(sizes))
        self.fixed[has_samples] = power(ratios, self.beta)


@parameters
class LogNormalRates(Unchanging):
    """A client's probability is c_i / max_j c_j, with log-normal c_i that are drawn once a run.

    The logarithm of c_i has mean 0 and standard deviation -ln(1 - beta) (Ribero et al. 2023,
    "Federated Learning Under Intermittent Client Availability and Time-Varying Communication
    Constraints", arXiv 2205.06730).
    """

    beta: Annotated[float, Interval(ge=0, lt=1)]

    def begin(self, sizes: Ints, label_counts: Ints, rng: np.random.Generator) -> None:
        """Draw the probabilities."""
        sigma = -math.log(1 - self.beta)
        draws = sigma * normal(rng, len(sizes))
        self.fixed = exp(draws - draws.max())


@parameters
class SineOfDay(LogNormalRates):
    """The probabilities of `LogNormalRates`, times 0.4 sin(2 pi (t mod T) / (T - 1)) + 0.5.

    T is the number of rounds of a day, `period`. The factor has the mean 0.5 over a day. Its sine
    is 0 in the first and in the last round of a day.
    """

    period: Annotated[int, Ge(2)]

    def probabilities(self, round: int, num_clients: int) -> Floats:
        """Return the probabilities in this round of the day."""
        return day_factor(round, self.period) * self.fixed


def day_factor(t: int, period: int) -> float:
    """Return 0.4 sin(2 pi (t mod `period`) / (`period` - 1)) + 0.5."""
    angle = 2 * math.pi * (t % period) / (period - 1)
    # rounded, because the last bits of a sine differ between processors
    return round(0.4 * math.sin(angle) + 0.5, 12)


@parameters
class Cycles(Independent):
    """The labels take turns: a client is available with probability 1 if it has the label whose
    turn it is, and otherwise with probability 1 - beta.

    It is the turn of label y in round t if y / L < (1 + t mod T) / T <= (y + 1) / L, with
    T = L x `rounds_per_label`. So each label has as many rounds in a row.
    """

    depends_on_data: ClassVar[bool] = True
    needs_labels: ClassVar[bool] = True

    beta: Share
    rounds_per_label: Count

    def begin(self, sizes: Ints, label_counts: Ints, rng: np.random.Generator) -> None:
        """Note which labels each client has."""
        self.has_label: Bools = label_counts > 0

    def probabilities(self, round: int, num_clients: int) -> Floats:
        """Return the probabilities in this round."""
        num_classes = self.has_label.shape[1]
        label = round % (num_classes * self.rounds_per_label) // self.rounds_per_label
        return np.where(self.has_label[:, label], 1.0, 1 - self.beta)


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
