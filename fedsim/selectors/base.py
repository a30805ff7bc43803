"""The interface of selectors, and operations that many of them share.

To add a selector, write a Python file with a subclass of `Selector` and a YAML file in conf/selector/; no other file is
edited. The contract tests find it by listing conf/selector/. This module exports everything that a selector needs
besides NumPy.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, ClassVar

import numpy as np

from fedsim.clients.clients import Clients
from fedsim.clients.context import Signal
from fedsim.clients.server import Server
from fedsim.clients.system import Resources
from fedsim.core.errors import (
    FedsimError,
    Problem,
    at_least,
    at_most,
    between,
    ceil,
    check,
    floor,
    one_of,
    positive,
    rule,
)
from fedsim.core.exact import exp, log
from fedsim.core.parameters import Count, CountOrZero, NonNegative, Positive, Problems, Share, parameters
from fedsim.core.types import (
    Cohort,
    Evaluation,
    Floats,
    Ids,
    Params,
    Population,
    Positions,
    Selection,
    Stack,
    drop_nonfinite,
)

__all__ = ["Clients", "Cohort", "Count", "CountOrZero", "Evaluation", "FedsimError", "Floats", "Ids", "NonNegative"]
__all__ += ["Params", "Population", "Positions", "Positive", "Problem", "Problems", "Resources", "Selection"]
__all__ += ["Selector", "Server", "Share", "Signal", "Stack", "ascending", "at_least", "at_most", "between", "ceil"]
__all__ += ["check", "drop_nonfinite", "exp", "floor", "highest", "log", "one_of", "parameters", "positive", "rule"]
__all__ += ["softmax", "weighted_without_replacement", "without_infinity"]


@parameters
class Selector(ABC):
    """Selects the clients of each round.

    Hyper-parameters are keyword-only fields of a class with the decorator `parameters`, with their ranges in the
    annotations and without defaults: their values stand in the YAML file. The constructor must be cheap, because it
    also runs once when a config is validated before any work is done.
    """

    population: Population = field(kw_only=False)

    needs = frozenset[Signal]()
    """All signals that `select` and `observe` may request; an instance may narrow it by its hyper-parameters."""
    adaptive = False
    """True if the method decides how many clients take part; if False, exactly min(K, available) must be selected."""
    exact = True
    """With engine=native, selections are the same on every processor (docs/reliability.md); False where they depend on
    BLAS or LAPACK: their last bits differ with the instruction set."""
    start_up_rounds = 0
    """Initial rounds whose cost differs from that of later ones, which alone are extrapolated to more rounds."""
    state: ClassVar[tuple[str, ...]] = ()
    """Names of the attributes that persist between rounds: everything that an exact resume has to restore."""

    def unfit_for(self, trained: Sequence[str]) -> Problem | None:
        """What a hyper-parameter asks of the model that it does not have, by the names of its trained parameters.

        Asked once before round 1; the key of the problem is that of the hyper-parameter.
        """
        return None

    @abstractmethod
    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        """Select the clients of `round` (1-based) from `clients.available`.

        `clients` answers the requests declared in `needs` and charges their cost. `rng` is a random stream of this
        round; use no other source of randomness.
        """

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:  # noqa: B027
        """Called after aggregation with the cohort's updates, which the server has at no extra cost.

        Not called in a round in which nobody is available or no update arrives in time.

        `server` computes on the server's own data (validation split, public samples) and holds the new global model.
        """

    @property
    def warning(self) -> str | None:
        """One line that is shown to the user before the run with these hyper-parameters, or None."""
        if Signal.LABEL_COUNTS in self.needs:
            return "every client tells the server how many samples of each class it holds"
        if Signal.TEST in self.needs:
            return "this selection sees the test set (selector.reward_eval=test)"
        return None

    @property
    def trace(self) -> Mapping[str, Any] | None:
        """Values of the round just observed to record as one line of trace.jsonl (JSON types), or None.

        Read after rounds in which `observe` was called; the others leave no line.
        """
        return None

    def state_dict(self) -> dict[str, Any]:
        """A deep copy of the attributes named in `state`."""
        return {name: copy.deepcopy(getattr(self, name)) for name in self.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state taken by `state_dict`."""
        for name in self.state:
            setattr(self, name, copy.deepcopy(state[name]))

    def cohort_size(self, clients: Clients) -> int:
        """min(K, number of available clients)."""
        return min(self.population.cohort_size, len(clients.available))


def highest(scores: Floats, count: int, rng: np.random.Generator) -> Positions:
    """Positions [count] of the highest `scores` [n], in descending order; ties are broken at random, nan ranks last."""
    shuffled = rng.permutation(len(scores))
    values = scores[shuffled]
    order = np.lexsort((-np.nan_to_num(values, nan=-np.inf), np.isnan(values)))
    return shuffled[order][:count]


def without_infinity(reported: Floats) -> Floats:
    """`reported` losses or norms with nan in place of infinity, so that `highest` ranks those last that overflowed."""
    return np.where(np.isinf(reported), np.nan, reported)


def weighted_without_replacement(weights: Floats, count: int, rng: np.random.Generator) -> Positions:
    """Up to `count` positions of `weights` [n], drawn one by one with probability proportional to the weights left.

    Method of Efraimidis and Spirakis (2006): the positions of the largest keys u^(1/w), computed as log(u) / w.
    Positions of weight zero are never drawn, so that fewer than `count` may come back.
    """
    possible = np.flatnonzero(weights > 0)
    keys = log(rng.random(len(possible))) / weights[possible]
    return possible[leading(keys, count)]


def leading(values: Floats, count: int) -> Positions:
    """Positions [min(count, n)] of the highest `values` [n], none of them nan, in descending order, of equal ones the
    first: as a stable sort of all of them would give."""
    count = min(count, len(values))
    if not count:
        return np.empty(0, np.int64)
    least = np.partition(values, len(values) - count)[len(values) - count]
    above = np.flatnonzero(values > least)
    tied = np.flatnonzero(values == least)[: count - len(above)]
    return np.concatenate([above[np.argsort(-values[above], kind="stable")], tied])


def softmax(values: Floats) -> Floats:
    """exp(values) / sum exp(values), [n]; computed without overflow."""
    exponents = exp(values - values.max())
    return exponents / exponents.sum()


def ascending(ids: Positions) -> Ids:
    """`ids` as sorted int64, the form that `Selection` requires."""
    return np.sort(np.asarray(ids, dtype=np.int64))
