"""Shapley values of the clients of a cohort, by the performance of averaged models on the validation split.

Selection by mean Shapley values: greedy (GreedyFed: Singhal, Pandey and Popovski, "Greedy Shapley Client Selection
for Communication-Efficient Federated Learning", 2024) or as a bandit with an upper confidence bound.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Ge, Le

from fedsim.core.errors import rule
from fedsim.core.exact import log, weighted_sum
from fedsim.core.flat import flat_rows, split_flat, to_device
from fedsim.core.parameters import NonNegative, Problems, parameters
from fedsim.core.types import Cohort, Floats, Params, Population, Selection
from fedsim.selectors.base import Clients, Problem, Selector, Server, Signal, ascending, highest
from fedsim.selectors.tools import clients_to_try

CoalitionValue = Callable[[frozenset[int]], float]
"""V(A), the value of a coalition A: a set of positions in the cohort."""

MOST_EXACT = 15
"""Clients whose Shapley values are computed exactly, by 2^15 = 32,768 evaluations of a model in every round."""
MAX_PERMUTATIONS = 100_000


@parameters
class Valuation:
    """How Shapley values are computed (the config group selector/valuation).

    The value V(A) of a coalition A is that of the average of its models (`average`: uniform or by_size) on the
    validation split: the accuracy, or minus the loss, as `utility` says. V of the empty set is that of the round's
    initial model. `method: exact` evaluates all 2^K averages; `sampled` averages marginal values over `permutations`
    random orders, each of which ends when V is within `tolerance` of V(all); `auto` is exact up to 10 clients. `exact`
    is refused for more than 15 (`cost_problem`).
    """

    utility: Literal["loss", "accuracy"]
    average: Literal["uniform", "by_size"]
    method: Literal["auto", "exact", "sampled"]
    permutations: Annotated[int, Ge(1), Le(MAX_PERMUTATIONS)]
    tolerance: NonNegative

    def cost_problem(self, population: Population) -> Problem | None:
        """The problem of `exact` taking too many evaluations for the cohorts of `population`, or None."""
        count = population.cohort_size
        told = (
            f"evaluates 2^{count} models in every round for cohort_size={count}; must have at most {MOST_EXACT} clients"
        )
        remedy = "selector/valuation=sampled estimates the values from random orders, as auto does from 11 clients on"
        return rule(self.method != "exact" or count <= MOST_EXACT, "valuation.method", self.method, told, remedy)

    def values(self, cohort: Cohort, server: Server, rng: np.random.Generator) -> Floats:
        """Shapley values [K] of the cohort's clients; costs one validation pass per coalition evaluated."""

        @cache
        def coalition_value(coalition: frozenset[int]) -> float:
            evaluation = server.validate(average_model(cohort, coalition, self.average == "by_size"))
            return evaluation.accuracy if self.utility == "accuracy" else -evaluation.loss

        num = len(cohort.ids)
        if self.method == "exact" or (self.method == "auto" and num <= 10):
            return exact_values(coalition_value, num)
        return sampled_values(coalition_value, num, self.permutations, self.tolerance, rng)


def average_model(cohort: Cohort, coalition: frozenset[int], by_size: bool) -> Params:
    """The average model of the `coalition` (positions in the cohort); the round's initial model if it is empty."""
    if not coalition:
        return cohort.start
    rows = sorted(coalition)
    weights = cohort.sizes[rows].astype(np.float64) if by_size else np.ones(len(rows))
    row = torch.zeros(len(cohort.ids))
    row[rows] = torch.as_tensor(weights / weights.sum(), dtype=row.dtype)
    if any(delta.is_cuda for delta in cohort.delta.values()):
        flat = flat_rows(cohort.delta)
        deltas = split_flat(to_device(row, flat.device) @ flat, {n: cohort.start[n] for n in cohort.delta})
    else:
        deltas = {n: weighted_sum(d, row.to(d)) for n, d in cohort.delta.items()}
    new = torch._foreach_add(list(cohort.start.values()), [deltas[n] for n in cohort.start])
    return dict(zip(cohort.start, new, strict=True))


def exact_values(coalition_value: CoalitionValue, num: int) -> Floats:
    """Shapley values [num] by enumeration of all 2^num coalitions."""
    coalition_values = np.array(
        [coalition_value(frozenset(i for i in range(num) if code >> i & 1)) for code in range(2**num)]
    )
    codes = np.arange(2**num)
    sizes = np.array([code.bit_count() for code in codes.tolist()])
    weights = np.array([1 / (num * math.comb(num - 1, s)) for s in range(num)])
    values = np.zeros(num)
    for i in range(num):
        without = codes[(codes >> i & 1) == 0]
        values[i] = (weights[sizes[without]] * (coalition_values[without | (1 << i)] - coalition_values[without])).sum()
    return values


def sampled_values(
    coalition_value: CoalitionValue, num: int, permutations: int, tolerance: float, rng: np.random.Generator
) -> Floats:
    """Shapley values [num] by truncated Monte Carlo over random orders (Ghorbani and Zou 2019, Algorithm 1)."""
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
class ShapleyBandit(Selector):
    """Selects the K clients of highest mean SV_k + `confidence` sqrt(ln t / m_k), m_k = number of Shapley values so
    far.

    Clients that have not been selected yet rank first, in random order, so that every client is valued once before any
    is chosen by value. `confidence: 0` is GreedyFed. Values that are not finite are ignored. A client without a value
    because its update did not arrive in time or was not finite, of which the papers say nothing, is selected again now
    and then (`clients_to_try`), else only where there are too few others.
    """

    needs = frozenset({Signal.VALIDATION})
    state = ("total", "times", "last_tried")

    valuation: Valuation
    confidence: NonNegative

    def problems(self) -> Problems:
        yield self.valuation.cost_problem(self.population)

    def __post_init__(self) -> None:
        self.total = np.zeros(self.population.num_clients)
        self.times = np.zeros(self.population.num_clients, np.int64)
        self.last_tried = np.zeros(self.population.num_clients, np.int64)
        self._rng = np.random.default_rng(0)

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

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        values = self.valuation.values(cohort, server, self._rng)
        usable = np.isfinite(values)
        self.total[cohort.ids[usable]] += values[usable]
        self.times[cohort.ids[usable]] += 1
