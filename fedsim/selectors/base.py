"""The interface of selectors, and the operations that most of them use.

`Selector` states the calling contract: what a selector must do, and what fedsim guarantees to it.
A selector needs nothing besides this module, NumPy and, for tensors, PyTorch. Everything in
`__all__` may be imported from here.

Symbols, here and in all files of this folder: N is the number of clients. K is the number of
clients to select in a round (`cohort_size`). T is the number of rounds, and t the current round,
from 1. Client k has n_k training samples, and p_k = n_k / (n_1 + ... + n_N) is its share of all
samples. n is the length of an array for some of the clients, such as the available ones.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

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
    parameters,
)
from fedsim.core.rounding import ceil, floor
from fedsim.core.state import Stateful
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
"""Maximum memory for the tables [N, N] that a selector holds at once: 16 GiB."""
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

    The calling contract. fedsim makes one selector for a run. Rounds count from 1 to T. In each
    round:

    1. fedsim finds the available clients: they can be reached in this round and have training
       samples. If there are none, fedsim calls neither `select` nor `observe` in this round. The
       next call of `select` then has a `round` that is higher by more than 1.
    2. fedsim calls `select` once. `clients.available` [n] holds the ids of the available clients,
       n >= 1. Ids are unique, ascending and lie in 0..N-1.
    3. The selected clients train. Updates that are late or not finite are dropped. The server
       aggregates the other updates.
    4. fedsim calls `observe` once if at least one update remains. `cohort.ids` are the selected
       clients whose updates remain, unique and ascending. They may be fewer than the selected ones.

    `select` must return ids of available clients, unique and ascending (int64). There must be
    min(K, n) of them unless `adaptive` is True. An adaptive selector may select nobody.

    Values that a selector keeps between rounds are attributes, which `__post_init__` creates.
    `state` names them. fedsim copies these attributes into checkpoints, which it saves between
    rounds. To resume, it makes a new selector and sets the attributes from the checkpoint. An
    attribute that is only read in the round that sets it need not be in `state`.

    Hyper-parameters are fields of a class with the decorator `parameters`. Their ranges stand in
    the annotations and their values in the YAML file. The constructor must be cheap, because it
    also runs when a config is validated.
    """

    population: Population = field(kw_only=False)
    """What the server knows for free: n_k for all clients, K and T."""

    needs = frozenset[Signal]()
    """The kinds of information that `select` and `observe` may request. A request that is not
    declared ends the run. `__post_init__` may set a smaller set that fits the hyper-parameters."""
    adaptive = False
    """True if the method decides how many clients take part. If False, exactly min(K, n) of the n
    available clients must be selected."""
    draws_by_size = False
    """True if clients with more data are more likely to be selected. The average then favours
    their data even with equal aggregation weights."""
    exact = True
    """True if, with engine=native, selections are the same on every processor
    (docs/reliability.md). False if they depend on BLAS or LAPACK, whose last bits differ with the
    instruction set."""
    start_up_rounds = 0
    """Number of initial rounds whose cost differs from the cost of later rounds. Only later rounds
    are extrapolated to longer runs. If no client can be reached in the initial rounds, reports take
    the start-up to end with the first round with clients."""
    pair_bytes = 0
    """Bytes for each of the N^2 pairs of clients in the tables [N, N] that the method holds at its
    peak. fedsim rejects a config whose tables take more than 16 GiB."""

    def __init_subclass__(cls) -> None:
        """Set `sampling` to None in a class that overrides the selection but not `sampling`.

        Otherwise the class would inherit a statement about its parent's way of selection. Raises
        `TypeError` if `needs` is no set of signals.
        """
        super().__init_subclass__()
        needs = vars(cls).get("needs", frozenset())
        if not isinstance(needs, property | frozenset | set):
            raise TypeError(
                f"{cls.__name__}.needs must be a set of signals, as in frozenset({{Signal.LOSSES}})"
                f", not {type(needs).__name__}"
            )
        overrides = {"select", "cohort_size"} & vars(cls).keys()
        if overrides and "sampling" not in vars(cls):
            cls.sampling = None  # type: ignore[method-assign, assignment]

    @property
    def sampling(self) -> Sampling | None:
        """The way in which cohorts are drawn in every round, or None for any other way.

        The draw must depend neither on the clients' data nor on earlier rounds. A class may set an
        attribute instead of a property: `sampling = Sampling.FIXED_SIZE`.
        """
        return None

    def problems(self) -> Problems:
        """Yield, for each rule that annotations cannot state, a `Problem` if it is broken.

        None stands for a rule that holds. The constructor reports all problems at once.
        """
        yield pairs_problem(self.population, self.pair_bytes)

    def unfit_for(self, trained: Sequence[str]) -> Problem | None:
        """Return a problem if a hyper-parameter does not fit the model, or None.

        `trained` holds the names of the parameter tensors that the model trains.
        """
        return None

    @abstractmethod
    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        """Return the clients of `round` (from 1), all of them in `clients.available`.

        The class docstring says when this is called and what is valid. `clients` answers the
        requests that `needs` declares and charges their cost. All random numbers must come from
        `rng`. fedsim makes it anew for each round from the seed of the run and the round.
        """

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        """Learn from the updates of `cohort`, after `select` and aggregation in the same `round`.

        fedsim does not call this in a round in which no update arrives. `cohort.loss` and
        `cohort.rms_loss` are None unless `needs` declares them. `server` computes on the server's
        own data (validation split, public samples) and holds the new global model. By default a
        selector learns nothing.
        """

    @property
    def warning(self) -> str | None:
        """One line that the user sees before a run with these hyper-parameters, or None.

        By default it names requests that disclose much about clients, or use the test set.
        """
        if Signal.LABEL_COUNTS in self.needs:
            return "every client tells the server how many samples of each class it holds"
        if Signal.TEST in self.needs:
            return "this selection sees the test set (selector.reward_eval=test)"
        return None

    @property
    def trace(self) -> Mapping[str, Any] | None:
        """Values of the round to record as one line of trace.jsonl (JSON types), or None.

        fedsim reads it after each round in which it called `observe`.
        """
        return None

    def cohort_size(self, clients: Clients) -> int:
        """Return min(K, n): the number of clients to select of the n available ones."""
        return min(self.population.cohort_size, len(clients.available))

    def select_highest(self, scores: Floats, clients: Clients, rng: Generator) -> Ids:
        """Return the ids of the min(K, n) available clients with the highest scores, ascending.

        `scores` [n] belong to `clients.available` [n], in this order. Ties are broken at random. A
        score of nan ranks below all others, -inf included. With at most K available clients all of
        them are returned, whatever their scores.
        """
        positions = highest(scores, self.cohort_size(clients), rng)
        return ascending(clients.available[positions])


def pairs_problem(population: Population, pair_bytes: int, remedy: str = REMEDY) -> Problem | None:
    """Return a problem if tables with `pair_bytes` bytes for each of the N^2 pairs are too large.

    The problem concerns the selector as a whole, not one of its hyper-parameters.
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
    """Return the positions of the highest `scores` [n], the highest first.

    There are min(count, n) positions. Ties are broken at random. nan ranks below all other scores.
    """
    scores = with_sign(scores)
    # A stable sort keeps the order of equal scores, which is random after the shuffle.
    shuffled = rng.permutation(len(scores))
    order = np.argsort(-scores[shuffled], kind="stable")  # argsort puts nan last
    return shuffled[order][:count]


def with_sign(scores: NDArray[Any]) -> NDArray[Any]:
    """Return `scores`, as float64 if their type has no negative numbers (unsigned and boolean)."""
    return scores.astype(np.float64) if scores.dtype.kind in "ub" else scores


def without_infinity(reported: Floats) -> Floats:
    """Return `reported` losses or norms with nan in place of infinity.

    A client whose loss or norm overflows then ranks last in `highest`, not first.
    """
    return np.where(np.isinf(reported), np.nan, reported)


def weighted_without_replacement(weights: Floats, count: int, rng: Generator) -> Positions:
    """Return up to `count` positions, drawn one by one in proportion to their `weights` [n].

    Method of Efraimidis and Spirakis (2006): position i gets the key u^(1/w) with its weight w and
    a uniform u in [0, 1). The positions with the largest keys are drawn. Positions of weight zero
    are never drawn, so fewer than `count` may be returned.
    """
    possible = np.flatnonzero(weights > 0)
    uniform = rng.random(len(possible))
    keys = log(uniform) / weights[possible]  # the logarithms of the keys, in the same order
    return possible[leading(keys, count)]


def leading(values: Floats, count: int) -> Positions:
    """Return the min(count, n) positions of the highest `values` [n], the highest first.

    Of equal values the earlier one comes first. No value may be nan. In contrast to `highest` this
    draws no random numbers.
    """
    count = min(count, len(values))
    if not count:
        return np.empty(0, np.int64)
    values = with_sign(values)
    # Only the values from the `count`-th highest one up are sorted, which is faster.
    threshold = np.partition(values, -count)[-count]
    possible = np.flatnonzero(values >= threshold)
    order = np.argsort(-values[possible], kind="stable")
    return possible[order][:count]


def softmax(values: Floats) -> Floats:
    """Return exp(values) / sum exp(values) [n], computed without overflow."""
    exponentials = exp(values - values.max())
    return exponentials / exponentials.sum()


def ascending(ids: Positions) -> Ids:
    """Return the unique `ids` sorted, as int64: the form that `Selection` requires."""
    return np.sort(np.asarray(ids, dtype=np.int64))
