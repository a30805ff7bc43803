"""Selection by Shapley values of clients, from the performance of averaged models on the validation
split: greedy (GreedyFed: Singhal, Pandey and Popovski, "Greedy Shapley Client Selection for
Communication-Efficient Federated Learning", 2024), as a bandit with an upper confidence bound, and
S-FedAvg (Nagalapatti and Narayanam, "Game of Gradients: Mitigating Irrelevant Clients in Federated
Learning", AAAI 2021)."""

import math
from abc import abstractmethod
from collections.abc import Callable
from functools import cache
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Le

from fedsim.core.arrays import Floats
from fedsim.core.exact import log
from fedsim.core.flat import add_models, weighted_sums
from fedsim.core.parameters import NonNegative, Problems, Share, parameters
from fedsim.core.types import Cohort, Ids, Params, Selection
from fedsim.selectors.base import Clients, Selector, Server, Signal, ascending, highest, rule
from fedsim.selectors.tools import clients_to_try

CoalitionValue = Callable[
    [frozenset[int]], float
]  # V(A), the value of a coalition A: a set of positions in the cohort

MOST_EXACT = 15  # clients, whose values take 2^15 = 32,768 evaluations of a model in every round


@parameters
class Valuation:
    """How Shapley values are computed (the config group selector/valuation).

    The value V(A) of a coalition A is that of the average of its models (`average`: uniform or
    by_size) on the validation split: the accuracy, or minus the loss, as `utility` says. V of the
    empty set is that of the round's initial model. `method: exact` evaluates all 2^K averages, of
    at most 15 clients; `sampled` averages marginal values over `permutations` random orders, each
    of which ends when V is within `tolerance` of V(all); `auto` is exact up to 10 clients.
    """

    utility: Literal["loss", "accuracy"]
    average: Literal["uniform", "by_size"]
    method: Literal["auto", "exact", "sampled"]
    permutations: Annotated[int, Ge(1), Le(100_000)]
    tolerance: NonNegative

    def values(self, cohort: Cohort, server: Server, rng: np.random.Generator) -> Floats:
        """Shapley values [K] of the cohort's clients; costs one validation pass per coalition
        evaluated."""

        @cache
        def coalition_value(coalition: frozenset[int]) -> float:
            evaluation = server.validate(
                average_model(cohort, coalition, self.average == "by_size")
            )
            return evaluation.accuracy if self.utility == "accuracy" else -evaluation.loss

        num = len(cohort.ids)
        if self.method == "exact" or (self.method == "auto" and num <= 10):
            return exact_values(coalition_value, num)
        return sampled_values(coalition_value, num, self.permutations, self.tolerance, rng)


def average_model(
    cohort: Cohort, coalition: frozenset[int], by_size: bool, share: float = 1.0
) -> Params:
    """The average model of the `coalition` (positions in the cohort), or the model after a `share`
    of the step to it; the round's initial model if it is empty."""
    if not coalition:
        return cohort.start
    rows = sorted(coalition)
    weights = cohort.sizes[rows].astype(np.float64) if by_size else np.ones(len(rows))
    row = np.zeros(len(cohort.ids), np.float32)
    row[rows] = weights / weights.sum() * share
    return add_models(cohort.start, weighted_sums(cohort.delta, row, cohort.start))


def exact_values(coalition_value: CoalitionValue, num: int) -> Floats:
    """Shapley values [num] by enumeration of all 2^num coalitions."""
    codes = np.arange(2**num)
    coalitions = [frozenset(i for i in range(num) if code >> i & 1) for code in range(2**num)]
    coalition_values = np.array([coalition_value(coalition) for coalition in coalitions])
    sizes = np.array([code.bit_count() for code in codes.tolist()])
    weights = np.array([1 / (num * math.comb(num - 1, s)) for s in range(num)])
    values = np.zeros(num)
    for i in range(num):
        without = codes[(codes >> i & 1) == 0]
        values[i] = (
            weights[sizes[without]]
            * (coalition_values[without | (1 << i)] - coalition_values[without])
        ).sum()
    return values


def sampled_values(
    coalition_value: CoalitionValue,
    num: int,
    permutations: int,
    tolerance: float,
    rng: np.random.Generator,
) -> Floats:
    """Shapley values [num] by truncated Monte Carlo over random orders (Ghorbani and Zou 2019,
    Algorithm 1)."""
    values = np.zeros(num)
    grand_value = coalition_value(frozenset(range(num)))
    for _ in range(permutations):
        coalition: frozenset[int] = frozenset()
        before = coalition_value(coalition)
        for i in rng.permutation(num):
            if abs(grand_value - before) < tolerance:
                break
            coalition = coalition | {int(i)}
            after = coalition_value(coalition)
            values[i] += after - before
            before = after
    return values / permutations


@parameters
class ByShapleyValues(Selector):
    """Learns from the Shapley values of each round, but for those that are not finite."""

    needs = frozenset({Signal.VALIDATION})
    _rng = np.random.default_rng(0)  # later that of the round, which `observe` goes on with

    valuation: Valuation

    def problems(self) -> Problems:
        method, count = self.valuation.method, self.population.cohort_size
        told = f"evaluates 2^{count} models a round for cohort_size={count}; must have at most {MOST_EXACT} clients"
        remedy = "selector/valuation=sampled estimates the values from random orders, as auto does from 11 clients on"
        yield rule(
            method != "exact" or count <= MOST_EXACT, "valuation.method", method, told, remedy
        )

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        values = self.valuation.values(cohort, server, self._rng)
        usable = np.isfinite(values)
        self.learn(cohort.ids[usable], values[usable])

    @abstractmethod
    def learn(self, ids: Ids, values: Floats) -> None:
        """The `values` [n] of the round of the clients `ids`."""


@parameters
class ShapleyBandit(ByShapleyValues):
    """Selects the K clients of highest mean SV_k + `confidence` sqrt(ln t / m_k), m_k = number of
    Shapley values so far.

    Clients that have not been selected yet rank first, in random order. `confidence: 0` is
    GreedyFed. Deviation: a client whose update did not arrive in time or was not finite is selected
    again now and then (`clients_to_try`), else only where there are too few others.
    """

    state = ("total", "times", "last_tried")

    confidence: NonNegative

    def __post_init__(self) -> None:
        self.total = np.zeros(self.population.num_clients)
        self.times, self.last_tried = np.zeros((2, self.population.num_clients), np.int64)

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        ids = clients.available
        times = np.maximum(self.times, 1)
        scores = self.total / times + self.confidence * np.sqrt(log(round) / times)
        scores = np.where(self.times > 0, scores, -np.inf)
        scores[clients_to_try(ids, self.times > 0, self.last_tried, round)] = np.inf
        chosen = ascending(ids[highest(scores[ids], self.cohort_size(clients), rng)])
        self.last_tried[chosen] = round
        self._rng = rng
        return Selection(chosen)

    def learn(self, ids: Ids, values: Floats) -> None:
        self.total[ids] += values
        self.times[ids] += 1


@parameters
class SFedAvg(ByShapleyValues):
    """Draws clients without replacement with probabilities softmax(phi), phi being a running mean
    of Shapley values.

    phi_k = 1 / N initially; for the clients that took part it becomes `keep` phi_k + (1 - `keep`)
    SV_k, with SV_k the Shapley value of the round. The K clients of the largest keys phi - ln(-ln
    u) are drawn, u uniform: Efraimidis and Spirakis' (2006) u^(1/w) with w = exp(phi), twice in
    logarithms, so that no weight becomes 0.
    """

    state = ("relevance",)

    keep: Share

    def __post_init__(self) -> None:
        self.relevance = np.full(self.population.num_clients, 1 / self.population.num_clients)

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        ids = clients.available
        keys = self.relevance[ids] - log(-log(rng.random(len(ids))))
        drawn = np.argsort(-keys, kind="stable")[: self.cohort_size(clients)]
        self._rng = rng
        return Selection(ascending(ids[drawn]))

    def learn(self, ids: Ids, values: Floats) -> None:
        self.relevance[ids] = self.keep * self.relevance[ids] + (1 - self.keep) * values
