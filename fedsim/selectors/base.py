"""The interface of selectors, and operations that many of them share: all that a selector needs
besides NumPy."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import field
from enum import StrEnum
from typing import Any

import numpy as np

from fedsim.clients.clients import Clients
from fedsim.clients.context import Signal
from fedsim.clients.server import Server
from fedsim.clients.system import Resources
from fedsim.core.arrays import Floats
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
    "Clients",
    "Cohort",
    "Count",
    "CountOrZero",
    "Evaluation",
    "FedsimError",
    "Floats",
    "Ids",
    "NonNegative",
]
__all__ += [
    "Params",
    "Population",
    "Positions",
    "Positive",
    "Problem",
    "Problems",
    "Resources",
    "Selection",
]
__all__ += [
    "Sampling",
    "Selector",
    "Server",
    "Share",
    "Signal",
    "ascending",
    "at_least",
    "at_most",
    "between",
    "ceil",
]
__all__ += [
    "check",
    "drop_nonfinite",
    "exp",
    "floor",
    "highest",
    "log",
    "parameters",
    "positive",
    "rule",
]
__all__ += ["softmax", "weighted_without_replacement", "without_infinity"]

MAX_BYTES = 16 * 2**30  # of tables [N, N] that a selector holds at once


class Sampling(StrEnum):
    """How a selector draws its cohorts, on which the epsilon of a private run rests
    (docs/privacy.md)."""

    ALL = "all"
    """All available clients take part."""
    POISSON = "poisson"
    """Each available client takes part with probability K / N, independently of the others."""
    FIXED_SIZE = "fixed_size"
    """min(K, available) clients take part, and every set of so many available clients is as likely
    as any other."""


REMEDY = "lower num_clients, or take a selector whose cost is linear in it (docs/scale.md)"


@parameters
class Selector(Stateful, ABC):
    """Selects the clients of each round.

    Hyper-parameters are fields of a class with the decorator `parameters`, with their ranges in the
    annotations; their values stand in the YAML file. The constructor must be cheap: it also runs
    when a config is validated.
    """

    population: Population = field(kw_only=False)

    needs = frozenset[Signal]()
    """All signals that `select` and `observe` may request; an instance may narrow it by its
    hyper-parameters."""
    adaptive = False
    """True if the method decides how many clients take part; if False, exactly min(K, available)
    must be selected."""
    draws_by_size = False
    """Whether clients of more data are likelier, so that equal weights already count sizes once."""
    exact = True
    """With engine=native, selections are the same on every processor (docs/reliability.md); False
    where they depend on BLAS or LAPACK: their last bits differ with the instruction set."""
    start_up_rounds = 0
    """Initial rounds whose cost differs from that of later ones, which alone are extrapolated to
    more rounds."""
    pair_bytes = 0
    """Of the tables [N, N] that the method holds at their peak, for each pair of clients: 16 GiB in
    all are refused."""

    def __init_subclass__(cls) -> None:
        """A class that selects in its own way draws as none of `Sampling` unless it says so
        itself."""
        super().__init_subclass__()
        if {"select", "cohort_size"} & vars(cls).keys() and "sampling" not in vars(cls):
            cls.sampling = None  # type: ignore[method-assign, assignment]

    @property
    def sampling(self) -> Sampling | None:
        """How cohorts are drawn in every round, whatever the clients hold and whatever has
        happened; None: otherwise. An attribute of the class will do: `sampling =
        Sampling.FIXED_SIZE`."""
        return None

    def problems(self) -> Problems:
        yield pairs_problem(self.population, self.pair_bytes)

    def unfit_for(self, trained: Sequence[str]) -> Problem | None:
        """What a hyper-parameter, the problem's key, asks of the model that its `trained`
        parameters do not have."""
        return None

    @abstractmethod
    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        """Select the clients of `round` (1-based) from `clients.available`.

        `clients` answers what `needs` declares and charges its cost. Every draw is of `rng`, the
        stream of this round.
        """

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        """Called after aggregation with the updates that have arrived, if there are any.

        `server` computes on the server's own data (validation split, public samples) and holds the
        new global model.
        """

    @property
    def warning(self) -> str | None:
        """One line that is shown to the user before the run with these hyper-parameters, or
        None."""
        if Signal.LABEL_COUNTS in self.needs:
            return "every client tells the server how many samples of each class it holds"
        if Signal.TEST in self.needs:
            return "this selection sees the test set (selector.reward_eval=test)"
        return None

    @property
    def trace(self) -> Mapping[str, Any] | None:
        """Values of the round just observed to record as one line of trace.jsonl (JSON types), or
        None."""
        return None

    def cohort_size(self, clients: Clients) -> int:
        """min(K, number of available clients)."""
        return min(self.population.cohort_size, len(clients.available))


def pairs_problem(population: Population, pair_bytes: int, remedy: str = REMEDY) -> Problem | None:
    """The problem of tables [N, N] of so many bytes for each pair, or None; its key is the selector
    itself."""
    n, most = (
        population.num_clients,
        math.isqrt(MAX_BYTES // pair_bytes) if pair_bytes else math.inf,
    )
    told = f"compares all pairs of num_clients={n} clients, in tables of {pair_bytes * n**2 / 2**30:,.0f} GiB; "
    told += f"must take at most {MAX_BYTES // 2**30} GiB, as they do up to num_clients={most}"
    return rule(n <= most, "", ..., told, remedy)


def highest(scores: Floats, count: int, rng: np.random.Generator) -> Positions:
    """Positions [count] of the highest `scores` [n], in descending order; ties are broken at
    random, nan ranks last."""
    shuffled = rng.permutation(len(scores))
    values = scores[shuffled]
    order = np.lexsort((-np.nan_to_num(values, nan=-np.inf), np.isnan(values)))
    return shuffled[order][:count]


def without_infinity(reported: Floats) -> Floats:
    """`reported` losses or norms with nan in place of infinity, so that `highest` ranks those last
    that overflowed."""
    return np.where(np.isinf(reported), np.nan, reported)


def weighted_without_replacement(
    weights: Floats, count: int, rng: np.random.Generator
) -> Positions:
    """Up to `count` positions of `weights` [n], drawn one by one with probability proportional to
    the weights left.

    Method of Efraimidis and Spirakis (2006): the positions of the largest keys u^(1/w), computed as
    log(u) / w. Positions of weight zero are never drawn, so that fewer than `count` may come back.
    """
    possible = np.flatnonzero(weights > 0)
    keys = log(rng.random(len(possible))) / weights[possible]
    return possible[leading(keys, count)]


def leading(values: Floats, count: int) -> Positions:
    """Positions [min(count, n)] of the highest `values` [n], none of them nan, as a stable sort
    would give them."""
    count = min(count, len(values))
    if not count:
        return np.empty(0, np.int64)
    possible = np.flatnonzero(values >= np.partition(values, -count)[-count])
    return possible[np.argsort(-values[possible], kind="stable")][:count]


def softmax(values: Floats) -> Floats:
    """exp(values) / sum exp(values), [n]; computed without overflow."""
    exponents = exp(values - values.max())
    return exponents / exponents.sum()


def ascending(ids: Positions) -> Ids:
    """`ids` as sorted int64, the form that `Selection` requires."""
    return np.sort(np.asarray(ids, dtype=np.int64))
