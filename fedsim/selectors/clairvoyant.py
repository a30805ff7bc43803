"""A ceiling for selection: the cohort whose average has the lowest loss on held-out samples. A
yardstick, no method."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Ge, Le

from fedsim.core.arrays import Floats
from fedsim.core.errors import DivergedError
from fedsim.core.flat import flat_rows, split_flat
from fedsim.core.parameters import Problems, parameters
from fedsim.core.types import Cohort, Ids, Params, Selection, drop_nonfinite
from fedsim.selectors.base import Clients, Selector, Signal, ascending, highest, rule
from fedsim.selectors.shapley import average_model

Rows = frozenset[int]
"""Positions of clients among those with finite updates."""
Loss = Callable[[Rows, float], float]
"""The validation loss of the model after a share of the step to the average of these clients'
models."""


@parameters
class Clairvoyant(Selector):
    """Everybody available trains and uploads; of the candidate cohorts, the one is selected whose
    `average` of models (uniform or by_size) has the lowest loss on the server's validation split.

    Candidates are all cohorts where these are at most `max_cohorts`. Else they are `cohorts` random
    ones; one that is grown from nothing, each time by the best of `candidates` random clients
    (stochastic greedy, Mirzasoleiman et al. 2015), s of K members being judged at s / K of the step
    to their average; and what `swaps` random exchanges of a member of the best of these for another
    client find, each of which is kept if it lowers the loss.

    With `horizon` h > 1, where all cohorts are candidates, each sequence of h cohorts (fewer at the
    run's end) is tried in virtual rounds, in which all train from the average again, with this
    round's batches, learning rate and availability: the first cohort of the sequence whose models
    have the lowest mean loss is selected. (By the last model alone, each round would only prepare
    for a next one, which is then planned anew.)

    It is no upper bound: the best choice of each round is not the best over many rounds, and
    validation is not test loss. Aggregation other than by `average` (a server optimiser, robust
    aggregation, what a local algorithm makes of the updates, late clients) is not looked through.
    Updates that are not finite are selected only where there are too few others; losses that are
    not rank last; ties are broken at random.
    """

    needs = frozenset({Signal.VALIDATION})

    average: Literal["uniform", "by_size"]
    max_cohorts: Annotated[int, Ge(1), Le(100_000)]
    cohorts: Annotated[int, Ge(1), Le(100_000)]
    candidates: Annotated[int, Ge(1), Le(100_000)]
    swaps: Annotated[int, Ge(0), Le(100_000)]
    horizon: Annotated[int, Ge(1), Le(3)]

    def problems(self) -> Problems:
        n, k = self.population.num_clients, self.population.cohort_size
        told = f"tries sequences of all cohorts of cohort_size={k} of num_clients={n} clients; these must be at most "
        told += f"selector.max_cohorts={self.max_cohorts}"
        remedy = "selector.horizon=1, fewer clients, or a higher selector.max_cohorts"
        yield rule(
            self.horizon == 1 or self._tries_all(n, k), "horizon", self.horizon, told, remedy
        )

    @property
    def warning(self) -> str:
        n, k = self.population.num_clients, self.population.cohort_size
        passes, trainings = self.cohorts + k * self.candidates + self.swaps, n
        if self._tries_all(n, k):
            passes, trainings = (
                sum(math.comb(n, k) ** (a + b) for a in range(self.horizon)) for b in (1, 0)
            )
            trainings *= n
        told = f"a yardstick and no method: each round up to {trainings:,} trainings by {n} clients, who all upload, "
        return f"{told}and {passes:,} validation passes; best round by round is not best over many rounds"

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        count, available = self.cohort_size(clients), clients.available
        cohort, _, _ = drop_nonfinite(clients.collect(available), None)
        if len(cohort.ids) <= count:
            others = rng.permutation(np.setdiff1d(available, cohort.ids))
            return Selection(ascending(np.concatenate([cohort.ids, others])[:count]))
        if self._tries_all(len(cohort.ids), count):
            rows, losses = self._after(
                clients, cohort, min(self.horizon, self.population.num_rounds - round + 1)
            )
            best = rows[lowest(losses, rng)]
        else:
            best = self._search(
                loss_on(clients, cohort, self.average == "by_size"), len(cohort.ids), count, rng
            )
        return Selection(ascending(cohort.ids[sorted(best)]))

    def _tries_all(self, n: int, count: int) -> bool:
        """Whether there are at most `max_cohorts` cohorts; of n > max_cohorts clients there are
        not."""
        return count >= n or (n <= self.max_cohorts and math.comb(n, count) <= self.max_cohorts)

    def _after(self, clients: Clients, cohort: Cohort, horizon: int) -> tuple[list[Rows], Floats]:
        """All cohorts, and the lowest sum of losses over `horizon` rounds that begin with each of
        them."""
        count, by_size = min(self.cohort_size(clients), len(cohort.ids)), self.average == "by_size"
        rows = [frozenset(some) for some in itertools.combinations(range(len(cohort.ids)), count)]
        loss, average = loss_on(clients, cohort, by_size), averages(cohort, by_size)
        losses = np.array([loss(some, 1.0) for some in rows])
        if horizon > 1:
            losses += [
                self._lowest_from(clients.broadcast(average(some, 1.0)), horizon - 1)
                for some in rows
            ]
        return rows, losses

    def _lowest_from(self, clients: Clients, horizon: int) -> float:
        try:
            cohort, _, _ = drop_nonfinite(clients.collect(clients.available), None)
        except DivergedError:
            return math.inf
        return float(self._after(clients, cohort, horizon)[1].min())

    def _search(self, loss: Loss, n: int, count: int, rng: np.random.Generator) -> Rows:
        tried = [
            frozenset(rng.choice(n, count, replace=False).tolist()) for _ in range(self.cohorts)
        ]
        tried.append(self._grown(loss, n, count, rng))
        best = tried[lowest(np.array([loss(some, 1.0) for some in tried]), rng)]
        for _ in range(self.swaps):
            other = best - {int(rng.choice(sorted(best)))} | {int(rng.choice(outside(n, best)))}
            best = other if loss(other, 1.0) < loss(best, 1.0) else best
        return best

    def _grown(self, loss: Loss, n: int, count: int, rng: np.random.Generator) -> Rows:
        grown: Rows = frozenset()
        for size in range(1, count + 1):
            tried = [
                grown | {int(i)} for i in rng.permutation(outside(n, grown))[: self.candidates]
            ]
            grown = tried[lowest(np.array([loss(some, size / count) for some in tried]), rng)]
        return grown


def averages(cohort: Cohort, by_size: bool) -> Callable[[Rows, float], Params]:
    """What gives the model after a share of the step to the average of some clients' models."""
    start = torch.cat([value.flatten() for value in cohort.start.values()])
    flat = replace(
        cohort, start={"all": start}, delta={"all": flat_rows(cohort.delta)}
    )  # one sum for all tensors

    def average(rows: Rows, share: float) -> Params:
        members = flat.rows(np.array(sorted(rows)))  # so that only these are summed
        model = average_model(members, frozenset(range(len(rows))), by_size, share)
        return split_flat(model["all"], cohort.start)

    return average


def loss_on(clients: Clients, cohort: Cohort, by_size: bool) -> Loss:
    """Losses of averages of the `cohort` on the validation split, each evaluated once; infinity for
    nan."""

    average = averages(cohort, by_size)

    @cache
    def loss(rows: Rows, share: float) -> float:
        found = clients.validate(average(rows, share)).loss
        return math.inf if math.isnan(found) else found

    return loss


def lowest(losses: Floats, rng: np.random.Generator) -> int:
    """The position of the lowest of `losses` [n]; ties are broken at random."""
    return int(highest(-losses, 1, rng)[0])


def outside(n: int, rows: Rows) -> Ids:
    """The positions below n that are not in `rows`, ascending."""
    return np.setdiff1d(np.arange(n), sorted(rows))
