"""Shapley values: select the clients whose models improved the average most.

- GreedyFed (`ShapleyBandit` with `confidence: 0`): Singhal, Pandey and Popovski, "Greedy Shapley
  Client Selection for Communication-Efficient Federated Learning", 2024 (arXiv 2312.09108).
- S-FedAvg: Nagalapatti and Narayanam, "Game of Gradients: Mitigating Irrelevant Clients in
  Federated Learning", AAAI 2021 (arXiv 2110.12257).

The value V(A) of a coalition A of clients is the performance of the average of their models on the
server's validation split. The Shapley value of client k is its mean contribution to V over all
orders in which the clients of the cohort may join. It divides the gain of a round among them:

    SV_k = sum over A without k of |A|! (K - |A| - 1)! / K! (V(A + k) - V(A))

GreedyFed and the bandit select the K clients with the highest

    mean SV_k + confidence sqrt(ln t / m_k)

with m_k the number of Shapley values of client k so far.

S-FedAvg keeps a relevance phi_k, 1 / N at first, and draws clients from softmax(phi):

    phi_k <- keep phi_k + (1 - keep) SV_k  for the clients that took part

What the papers leave open: In the bandit, clients that were never selected rank first, in random
order. A client whose update did not arrive in time or was not finite is selected again now and then
(`clients_to_try`), and otherwise only if there are too few others. Shapley values that are not
finite are ignored.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from functools import cache
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Le

from fedsim.core.flat import add_models, weighted_sums
from fedsim.selectors.base import (
    Clients,
    Cohort,
    Floats,
    Generator,
    Ids,
    NonNegative,
    Params,
    Problems,
    Selection,
    Selector,
    Server,
    Share,
    Signal,
    ascending,
    leading,
    log,
    parameters,
    rule,
)
from fedsim.selectors.tools import clients_to_try

CoalitionValue = Callable[[frozenset[int]], float]
"""V(A), the value of a coalition A: a set of positions in the cohort."""
MAX_EXACT = 15
"""Maximum number of clients with `method: exact`: 2^15 = 32,768 evaluations in every round."""


@parameters
class Valuation:
    """The way to compute Shapley values (the config group selector/valuation).

    V of the empty coalition is that of the round's initial model. `method: exact` evaluates all 2^K
    coalitions, of at most 15 clients. `sampled` averages contributions over random orders. `auto`
    is exact up to 10 clients.
    """

    utility: Literal["loss", "accuracy"]  # V: minus the validation loss, or the accuracy
    average: Literal["uniform", "by_size"]  # how the models of a coalition are averaged
    method: Literal["auto", "exact", "sampled"]  # see above
    permutations: Annotated[int, Ge(1), Le(100_000)]  # random orders of `sampled`
    tolerance: NonNegative  # an order ends when V is this close to V of all clients

    def values(self, cohort: Cohort, server: Server, rng: Generator) -> Floats:
        """Return the Shapley values [K] of the cohort's clients.

        It costs one validation pass for each coalition that is evaluated.
        """

        @cache
        def coalition_value(coalition: frozenset[int]) -> float:
            model = average_model(cohort, coalition, self.average == "by_size")
            evaluation = server.validate(model)
            return evaluation.accuracy if self.utility == "accuracy" else -evaluation.loss

        num = len(cohort.ids)
        if self.method == "exact" or (self.method == "auto" and num <= 10):
            return exact_values(coalition_value, num)
        return sampled_values(coalition_value, num, self.permutations, self.tolerance, rng)


def average_model(
    cohort: Cohort, coalition: frozenset[int], by_size: bool, share: float = 1.0
) -> Params:
    """Return the model after a `share` of the step to the average model of a `coalition`.

    The coalition is a set of positions in the cohort. If it is empty, the result is the round's
    initial model.
    """
    if not coalition:
        return cohort.start
    rows = sorted(coalition)
    sizes = cohort.sizes[rows].astype(np.float64) if by_size else np.ones(len(rows))
    weights = np.zeros(len(cohort.ids), np.float32)
    weights[rows] = sizes / sizes.sum() * share
    return add_models(cohort.start, weighted_sums(cohort.delta, weights, cohort.start))


def exact_values(coalition_value: CoalitionValue, num: int) -> Floats:
    """Return Shapley values [num] by enumeration of all 2^num coalitions.

    Coalitions are numbered by the bits of their members.
    """
    codes = np.arange(2**num)
    values = np.empty(2**num)
    sizes = np.empty(2**num, np.int64)
    for code in codes.tolist():
        coalition = frozenset(i for i in range(num) if code >> i & 1)
        values[code] = coalition_value(coalition)
        sizes[code] = len(coalition)
    # |A|! (K - |A| - 1)! / K! by the size of A
    weights = np.array([1 / (num * math.comb(num - 1, size)) for size in range(num)])
    shapley = np.zeros(num)
    for i in range(num):
        without = codes[(codes >> i & 1) == 0]
        gains = values[without | (1 << i)] - values[without]
        shapley[i] = (weights[sizes[without]] * gains).sum()
    return shapley


def sampled_values(
    coalition_value: CoalitionValue, num: int, permutations: int, tolerance: float, rng: Generator
) -> Floats:
    """Return Shapley values [num] by truncated Monte Carlo over random orders.

    Ghorbani and Zou, "Data Shapley", ICML 2019, Algorithm 1.
    """
    shapley = np.zeros(num)
    value_of_all = coalition_value(frozenset(range(num)))
    for _ in range(permutations):
        coalition: frozenset[int] = frozenset()
        before = coalition_value(coalition)
        for i in rng.permutation(num).tolist():
            if abs(value_of_all - before) < tolerance:
                break
            coalition = coalition | {i}
            after = coalition_value(coalition)
            shapley[i] += after - before
            before = after
    return shapley / permutations


@parameters
class ByShapleyValues(Selector):
    """Learns from the Shapley values of each round; subclasses say what and how they select."""

    needs = frozenset({Signal.VALIDATION})
    _rng = np.random.default_rng(0)  # the random stream of the round, which `observe` continues

    valuation: Valuation  # the way to compute Shapley values

    def problems(self) -> Problems:
        method, count = self.valuation.method, self.population.cohort_size
        text = (
            f"evaluates 2^{count} models a round for cohort_size={count}; must have at most "
            f"{MAX_EXACT} clients"
        )
        remedy = "selector/valuation=sampled estimates the values; so does auto from 11 clients on"
        holds = method != "exact" or count <= MAX_EXACT
        yield rule(holds, "valuation.method", method, text, remedy)

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        self._rng = rng
        return Selection(self.choose(round, clients, rng))

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        values = self.valuation.values(cohort, server, self._rng)
        is_finite = np.isfinite(values)
        self.learn(cohort.ids[is_finite], values[is_finite])

    @abstractmethod
    def choose(self, round: int, clients: Clients, rng: Generator) -> Ids:
        """Return the clients of `round`, ascending."""

    @abstractmethod
    def learn(self, ids: Ids, values: Floats) -> None:
        """Learn from the Shapley values [n] that the clients `ids` have in this round."""


@parameters
class ShapleyBandit(ByShapleyValues):
    """Selects the K clients of highest mean Shapley value plus a confidence bound."""

    state = ("total", "times", "last_tried")

    confidence: NonNegative  # weight of the confidence bound; 0 is GreedyFed

    def __post_init__(self) -> None:
        num_clients = self.population.num_clients
        self.total = np.zeros(num_clients)  # sums of Shapley values
        self.times = np.zeros(num_clients, np.int64)  # m
        self.last_tried = np.zeros(num_clients, np.int64)

    def choose(self, round: int, clients: Clients, rng: Generator) -> Ids:
        available = clients.available
        is_known = self.times > 0
        times = np.maximum(self.times, 1)
        widths = np.sqrt(log(round) / times)
        scores = self.total / times + self.confidence * widths
        scores[~is_known] = -np.inf
        scores[clients_to_try(available, is_known, self.last_tried, round)] = np.inf
        chosen = self.select_highest(scores[available], clients, rng)
        self.last_tried[chosen] = round
        return chosen

    def learn(self, ids: Ids, values: Floats) -> None:
        self.total[ids] += values
        self.times[ids] += 1


@parameters
class SFedAvg(ByShapleyValues):
    """Draws clients without replacement with probabilities softmax(phi), phi their relevance."""

    state = ("relevance",)

    keep: Share  # weight of the old relevance

    def __post_init__(self) -> None:
        num_clients = self.population.num_clients
        self.relevance = np.full(num_clients, 1 / num_clients)  # phi

    def choose(self, round: int, clients: Clients, rng: Generator) -> Ids:
        # The largest keys u^(1/w), w = exp(phi) and u uniform (Efraimidis and Spirakis, 2006),
        # twice in logarithms, so that no weight becomes 0.
        available = clients.available
        keys = self.relevance[available] - log(-log(rng.random(len(available))))
        drawn = leading(keys, self.cohort_size(clients))
        return ascending(available[drawn])

    def learn(self, ids: Ids, values: Floats) -> None:
        self.relevance[ids] = self.keep * self.relevance[ids] + (1 - self.keep) * values
