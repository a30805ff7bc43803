"""The interface of selectors, and the operations that most of them use.

A selector needs nothing besides this module, NumPy and, for tensors, PyTorch: everything in
`__all__` may be imported from here. Symbols: N clients, K of them selected in each of T rounds.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.random import Generator

from fedsim.clients.clients import Clients
from fedsim.clients.context import Signal
from fedsim.clients.server import Server
from fedsim.clients.system import Resources
from fedsim.core.arrays import Bools, Floats, Ints
from fedsim.core.errors import (
    FedsimError,
    Problem,
    at_least,
    at_most,
    between,
    check,
    positive,
    rule,
)
from fedsim.core.exact import exp, log
from fedsim.core.parameters import (
    Count,
    CountOrZero,
    NonNegative,
    Positive,
    Problems,
    Share,
    Stateful,
    parameters,
)
from fedsim.core.rounding import ceil, floor
from fedsim.core.types import (
    Cohort,
    Evaluation,
    Ids,
    Params,
    Population,
    Positions,
    Selection,
    drop_nonfinite,
)

__all__ = [
    "Bools",
    "Clients",
    "Cohort",
    "Count",
    "CountOrZero",
    "Evaluation",
    "FedsimError",
    "Floats",
    "Generator",
    "Ids",
    "Ints",
    "NonNegative",
    "Params",
    "Population",
    "Positions",
    "Positive",
    "Problem",
    "Problems",
    "Resources",
    "Sampling",
    "Selection",
    "Selector",
    "Server",
    "Share",
    "Signal",
    "ascending",
    "at_least",
    "at_most",
    "between",
    "ceil",
    "check",
    "drop_nonfinite",
    "exp",
    "floor",
    "highest",
    "leading",
    "log",
    "parameters",
    "positive",
    "rule",
    "softmax",
    "weighted_without_replacement",
    "without_infinity",
]

MAX_BYTES = 16 * 2**30
"""Maximum memory for the tables [N, N] that a selector holds at once."""
REMEDY = "lower num_clients, or choose a selector whose cost is linear in it (docs/scale.md)"


class Sampling(StrEnum):
    """The ways to draw cohorts on which the epsilon of a private run may rest
    (docs/privacy.md)."""

    ALL = "all"
    """All available clients take part."""
    POISSON = "poisson"
    """Each available client takes part with probability K / N, independently of the others."""
    FIXED_SIZE = "fixed_size"
    """min(K, available) clients take part, and all sets of this size are equally likely."""


@parameters
class Selector(Stateful, ABC):
    """Selects the clients of each round.

    Hyper-parameters are fields of a class with the decorator `parameters`. Their ranges stand in
    the annotations and their values in the YAML file. The constructor must be cheap, because it
    also runs when a config is validated.
    """

    population: Population = field(kw_only=False)

    needs = frozenset[Signal]()
    """All signals that `select` and `observe` may request. An instance may narrow it by its
    hyper-parameters."""
    adaptive = False
    """True if the method decides how many clients take part. If False, exactly min(K, available)
    clients must be selected."""
    draws_by_size = False
    """True if clients with more data are more likely to be selected. Equal aggregation weights
    then count sizes once already."""
    exact = True
    """True if, with engine=native, selections are the same on every processor
    (docs/reliability.md). False if they depend on BLAS or LAPACK, whose last bits differ with the
    instruction set."""
    start_up_rounds = 0
    """Number of initial rounds whose cost differs from the cost of later rounds. Only later rounds
    are extrapolated to longer runs."""
    pair_bytes = 0
    """Bytes for each pair of clients in the tables [N, N] that the method holds at its peak. More
    than 16 GiB in all are rejected."""

    def __init_subclass__(cls) -> None:
        """Reset `sampling` in a class that selects in its own way and does not set it itself."""
        super().__init_subclass__()
        overrides = {"select", "cohort_size"} & vars(cls).keys()
        if overrides and "sampling" not in vars(cls):
            cls.sampling = None  # type: ignore[method-assign, assignment]

    @property
    def sampling(self) -> Sampling | None:
        """The way in which cohorts are drawn in every round, whatever clients hold or happened.

        None stands for a way that is not listed. A class may set an attribute instead of a
        property: `sampling = Sampling.FIXED_SIZE`.
        """
        return None

    def problems(self) -> Problems:
        """Yield a `Problem` or None for each rule that concerns several parameters."""
        yield pairs_problem(self.population, self.pair_bytes)

    def unfit_for(self, trained: Sequence[str]) -> Problem | None:
        """Return a problem if a hyper-parameter does not fit a model with the `trained`
        parameters."""
        return None

    @abstractmethod
    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        """Select the clients of `round` (1-based) from `clients.available`.

        `clients` answers the requests that `needs` declares and charges their cost. All random
        numbers must come from `rng`, the random stream of this round.
        """

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        """Learn from the updates that arrived. Called after aggregation if any update arrived.

        `server` computes on the server's own data (validation split, public samples) and holds the
        new global model.
        """

    @property
    def warning(self) -> str | None:
        """One line that the user sees before a run with these hyper-parameters, or None."""
        if Signal.LABEL_COUNTS in self.needs:
            return "every client tells the server how many samples of each class it holds"
        if Signal.TEST in self.needs:
            return "this selection sees the test set (selector.reward_eval=test)"
        return None

    @property
    def trace(self) -> Mapping[str, Any] | None:
        """Values of the observed round to record as one line of trace.jsonl (JSON types), or
        None."""
        return None

    def cohort_size(self, clients: Clients) -> int:
        """Return min(K, number of available clients)."""
        return min(self.population.cohort_size, len(clients.available))

    def select_highest(self, scores: Floats, clients: Clients, rng: Generator) -> Ids:
        """Return the min(K, available) clients of highest score, ascending.

        `scores` [n] belong to the n available clients. Ties are broken at random, nan ranks last.
        """
        positions = highest(scores, self.cohort_size(clients), rng)
        return ascending(clients.available[positions])


def pairs_problem(population: Population, pair_bytes: int, remedy: str = REMEDY) -> Problem | None:
    """Return a problem if tables [N, N] of `pair_bytes` for each pair of clients are too large.

    The problem's key is the selector itself.
    """
    num_clients = population.num_clients
    limit = math.isqrt(MAX_BYTES // pair_bytes) if pair_bytes else math.inf
    size = pair_bytes * num_clients**2 / 2**30
    text = (
        f"compares all pairs of num_clients={num_clients} clients in tables of {size:,.0f} GiB; "
        f"these must take at most {MAX_BYTES // 2**30} GiB, which suffices up to "
        f"num_clients={limit}"
    )
    return rule(num_clients <= limit, "", ..., text, remedy)


def highest(scores: Floats, count: int, rng: Generator) -> Positions:
    """Return the positions [count] of the highest `scores` [n], in descending order.

    Ties are broken at random, nan ranks last.
    """
    shuffled = rng.permutation(len(scores))
    order = np.argsort(-scores[shuffled], kind="stable")  # which puts nan last
    return shuffled[order][:count]


def without_infinity(reported: Floats) -> Floats:
    """Return `reported` losses or norms with nan for infinity, so that `highest` ranks overflows
    last."""
    return np.where(np.isinf(reported), np.nan, reported)


def weighted_without_replacement(weights: Floats, count: int, rng: Generator) -> Positions:
    """Return up to `count` positions of `weights` [n], drawn one by one in proportion to them.

    Method of Efraimidis and Spirakis (2006): the positions of the largest keys u^(1/w), computed as
    log(u) / w. Positions of weight zero are never drawn, so fewer than `count` may be returned.
    """
    possible = np.flatnonzero(weights > 0)
    uniform = rng.random(len(possible))
    keys = log(uniform) / weights[possible]
    return possible[leading(keys, count)]


def leading(values: Floats, count: int) -> Positions:
    """Return the positions [min(count, n)] of the highest `values` [n], in descending order.

    Of equal values the earlier one comes first. None may be nan.
    """
    count = min(count, len(values))
    if not count:
        return np.empty(0, np.int64)
    threshold = np.partition(values, -count)[-count]
    possible = np.flatnonzero(values >= threshold)
    order = np.argsort(-values[possible], kind="stable")
    return possible[order][:count]


def softmax(values: Floats) -> Floats:
    """Return exp(values) / sum exp(values) [n], computed without overflow."""
    exponents = exp(values - values.max())
    return exponents / exponents.sum()


def ascending(ids: Positions) -> Ids:
    """Return `ids` sorted as int64, the form that `Selection` requires."""
    return np.sort(np.asarray(ids, dtype=np.int64))
