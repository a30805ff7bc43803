"""What every selector is, and the few operations that many of them share.

To add one: a Python file with a subclass and a YAML in conf/selector/. Nothing else is edited; the contract tests find
it by listing conf/selector/.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedsim.communication.clients import Clients
from fedsim.communication.server import Server
from fedsim.communication.signals import Signal
from fedsim.types import Cohort, Ids, Population, Selection


class Selector(ABC):
    """Picks the clients of a round.

    Hyper-parameters are keyword-only constructor parameters, annotated, without defaults; ranges are checked there
    (`fedsim.errors.check`). The constructor must be cheap: it also runs once to check a config before any work.
    """

    needs: frozenset[Signal] = frozenset()
    """Every signal that `select` or `observe` asks for; may be narrowed per object by its hyper-parameters."""
    adaptive: bool = False
    """True if the method itself decides how many clients take part; else exactly min(K, available) are expected."""
    state: ClassVar[tuple[str, ...]] = ()
    """Names of the attributes that cross rounds: all that must be saved for an exact resume."""

    def __init__(self, population: Population) -> None:
        self.population = population

    @property
    def start_up_rounds(self) -> int:
        """How many of the first rounds cost other than the later ones. Reports scale costs by the later ones alone."""
        return 0

    @abstractmethod
    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        """The clients of `round` (1-based), among `clients.available`. `rng` is the round's own stream."""

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:  # noqa: B027
        """What the server learns anyway: the cohort's updates, and what it can compute by itself."""

    @property
    def caveat(self) -> str | None:
        """One line that a user of these hyper-parameters should read before the run, or None."""
        if Signal.LABEL_COUNTS in self.needs:
            return "every client tells the server how many samples of each class it holds"
        return None

    @property
    def trace(self) -> Mapping[str, Any] | None:
        """What is worth keeping of the round observed last, as JSON values: a line of trace.jsonl. None: nothing."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """A copy of everything that crosses rounds."""
        return {name: copy.deepcopy(getattr(self, name)) for name in self.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken."""
        for name in self.state:
            setattr(self, name, copy.deepcopy(state[name]))

    def cohort_size(self, clients: Clients) -> int:
        """K, or fewer if fewer clients are available."""
        return min(self.population.cohort_size, len(clients.available))


def highest(scores: NDArray[np.float64], count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Positions of the `count` highest scores, best first; ties at random; nan ranks last (selectors.md section 1)."""
    shuffled = rng.permutation(len(scores))
    values = scores[shuffled]
    order = np.lexsort((-np.nan_to_num(values, nan=-np.inf), np.isnan(values)))
    return shuffled[order][:count]


def weighted_without_replacement(
    weights: NDArray[np.float64], count: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Up to `count` positions drawn one after another with probability proportional to the remaining weights.

    Efraimidis and Spirakis (2006): the largest u^(1/w), here as log(u)/w. Positions of weight zero are never drawn.
    """
    possible = np.flatnonzero(weights > 0)
    keys = np.log(rng.random(len(possible))) / weights[possible]
    return possible[np.argsort(-keys, kind="stable")[:count]]


def softmax(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """exp(values) over their sum."""
    exponents = np.exp(values - values.max())
    shares: NDArray[np.float64] = exponents / exponents.sum()
    return shares


def ascending(ids: NDArray[np.int64]) -> Ids:
    """`ids` as a selection wants them."""
    return np.sort(np.asarray(ids, dtype=np.int64))
