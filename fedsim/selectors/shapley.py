"""Shapley values: select the clients whose models improved the average most.

- GreedyFed (`ShapleyBandit` with `confidence: 0`): Singhal, Pandey and Popovski, "Greedy Shapley
  Client Selection for Communication-Efficient Federated Learning", 2024 (arXiv 2312.09108).
- S-FedAvg: Nagalapatti and Narayanam, "Game of Gradients: Mitigating Irrelevant Clients in
  Federated Learning", AAAI 2021 (arXiv 2110.12257).

The value V(A) of a coalition A of clients is the performance of the average of their models on the
server's validation split. The Shapley value of client k is its mean contribution to V over all
orders in which the clients of the cohort may join. It divides the gain of a round among them:

    SV_k = sum over A without k of |A|! (K - |A| - 1)! / K! (V(A + k) - V(A))

K is the number of clients in the cohort, and |A| the number in the coalition.

GreedyFed and the bandit select the K clients with the highest

    mean SV_k + confidence sqrt(ln t / m_k)

with t the round and m_k the number of Shapley values of client k so far.

S-FedAvg keeps a relevance phi_k, at first 1 / N with N clients, and draws clients from
softmax(phi):

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
from fedsim.selectors.candidates import clients_to_try

CoalitionValue = Callable[[frozenset[int]], float]
"""V(A), the value of a coalition A: a set of positions in the cohort."""
MAX_EXACT = 15
"""Maximum number of clients with `method: exact`: 2^15 = 32,768 evaluations in every round."""


@parameters
class Valuation:
    """The way to compute Shapley values (the config group selector/valuation).

    The model of the empty coalition is the round's initial model. `method: exact` evaluates all 2^K
    coalitions of the K clients, which may be at most 15. `sampled` averages contributions over
    random orders. `auto` is exact up to 10 clients.
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
    """Return the model that lies `share` of the way from the round's initial model to an average.

    It is the average of the models of the `coalition`, a set of positions in the cohort. `by_size`
    weights them by their numbers of samples. If the coalition is empty, the result is the round's
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

    The code of a coalition is the number whose bit i is set if client i is a member.
    """
    codes = np.arange(2**num)
    values = np.empty(2**num)
    sizes = np.empty(2**num, np.int64)
    for code in codes.tolist():
        coalition = frozenset(i for i in range(num) if code >> i & 1)
        values[code] = coalition_value(coalition)
        sizes[code] = len(coalition)
    # |A|! (K - |A| - 1)! / K! for each size |A|
    weights = np.array([1 / (num * math.comb(num - 1, size)) for size in range(num)])
    shapley = np.zeros(num)
    for i in range(num):
        without = codes[(codes >> i & 1) == 0]  # the coalitions without client i
        gains = values[without | (1 << i)] - values[without]
        shapley[i] = (weights[sizes[without]] * gains).sum()
    return shapley


def sampled_values(
    coalition_value: CoalitionValue, num: int, permutations: int, tolerance: float, rng: Generator
) -> Floats:
    """Return Shapley values [num] estimated from `permutations` random orders.

    The value of a client is its mean contribution when it joins the clients before it in the order.
    An order ends when the value of the coalition is within `tolerance` of the value of all clients.
    The contributions of the remaining clients count as 0. Source: Ghorbani and Zou, "Data Shapley",
    ICML 2019, Algorithm 1.
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
    """Computes the Shapley values of each round. Subclasses learn from them and select.

    Subclasses implement `choose` and `learn`.
    """

    needs = frozenset({Signal.VALIDATION, Signal.UPDATES})
    # The random stream of the round. `select` sets it, and `observe` continues it.
    _rng = np.random.default_rng(0)

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

    state = ("value_sum", "num_values", "last_tried")

    confidence: NonNegative  # weight of the confidence bound; 0 is GreedyFed

    def __post_init__(self) -> None:
        num_clients = self.population.num_clients
        self.value_sum = np.zeros(num_clients)  # sum of each client's Shapley values [N]
        self.num_values = np.zeros(num_clients, np.int64)  # m [N], the number of these values
        self.last_tried = np.zeros(num_clients, np.int64)  # latest selection [N], 0: never

    def choose(self, round: int, clients: Clients, rng: Generator) -> Ids:
        available = clients.available
        is_known = self.num_values > 0
        num_values = np.maximum(self.num_values, 1)  # so as not to divide by 0
        widths = np.sqrt(log(round) / num_values)
        scores = self.value_sum / num_values + self.confidence * widths
        # Clients without a value rank last, except clients to try next, which rank first.
        scores[~is_known] = -np.inf
        scores[clients_to_try(available, is_known, self.last_tried, round)] = np.inf
        chosen = self.select_highest(scores[available], clients, rng)
        self.last_tried[chosen] = round
        return chosen

    def learn(self, ids: Ids, values: Floats) -> None:
        self.value_sum[ids] += values
        self.num_values[ids] += 1


@parameters
class SFedAvg(ByShapleyValues):
    """Draws clients without replacement with probabilities softmax(phi), phi their relevance."""

    state = ("relevance",)

    keep: Share  # weight of the old relevance

    def __post_init__(self) -> None:
        num_clients = self.population.num_clients
        self.relevance = np.full(num_clients, 1 / num_clients)  # phi [N]

    def choose(self, round: int, clients: Clients, rng: Generator) -> Ids:
        # The clients with the largest keys u^(1/w) are drawn, with weights w = exp(phi) and u
        # uniform (Efraimidis and Spirakis, 2006). The keys below are -log(-log(u^(1/w))), which
        # have the same order. In this form no weight becomes 0.
        available = clients.available
        keys = self.relevance[available] - log(-log(rng.random(len(available))))
        drawn = leading(keys, self.cohort_size(clients))
        return ascending(available[drawn])

    def learn(self, ids: Ids, values: Floats) -> None:
        self.relevance[ids] = self.keep * self.relevance[ids] + (1 - self.keep) * values
