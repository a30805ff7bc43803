"""A reference for selection: the cohort whose average has the lowest loss on held-out samples.

It is a yardstick, not a method. In every round all available clients train and upload. The server
then selects the cohort of K clients whose average of models has the lowest loss on its validation
split. So it shows what the best choice for the next round gives.

1. If there are at most `max_cohorts` cohorts of K of the available clients, all are candidates.
2. Otherwise the candidates are
   - `cohorts` random cohorts;
   - one cohort that is grown from nothing, each time by the best of `candidates` random clients
     (stochastic greedy, Mirzasoleiman et al., 2015). While it has s < K clients, it is judged by
     the model that lies s / K of the way from the global model to the clients' average.
3. After step 2, the best candidate is improved: `swaps` times a random member is exchanged for a
   random other client. An exchange that lowers the loss is kept.

With `horizon` h > 1 all cohorts must be candidates (step 1). Each sequence of h cohorts is then
tried in virtual rounds, fewer than h at the run's end. In a virtual round all clients train from
the previous cohort's average, with this round's batches, learning rate and availability. The first
cohort of the sequence with the lowest sum of losses is selected. The sum counts and not the last
loss, because the plan is made anew in each round. By the last loss alone, each round would only
prepare for a next one.

The selector is no upper bound. The best choice of each round is not the best over many rounds: with
one client per round it may end far below random selection (docs/benchmark.md). Validation loss is
not test loss, either. The selector assumes that the server averages models as `average`
says. It ignores a server optimiser, robust aggregation, local algorithms and late clients. Clients
whose updates are not finite are selected only if there are too few others. Losses that are not
finite rank last. Ties are broken at random.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Ge, Le

from fedsim.core.errors import DivergedError
from fedsim.core.flat import flat_rows, split_flat
from fedsim.selectors.base import (
    Clients,
    Cohort,
    Floats,
    Generator,
    Ids,
    Params,
    Problems,
    Selection,
    Selector,
    Signal,
    ascending,
    drop_nonfinite,
    highest,
    parameters,
    rule,
)
from fedsim.selectors.shapley import average_model

Average = Literal["uniform", "by_size"]
Rows = frozenset[int]
"""A cohort: positions of clients among the clients with finite updates."""
LossOf = Callable[[Rows, float], float]
"""A function of a cohort and a share. It returns the validation loss of the model that lies this
share of the way from the global model to the average of the cohort's models."""


@parameters
class Clairvoyant(Selector):
    """Selects the cohort whose average of models has the lowest validation loss."""

    needs = frozenset({Signal.VALIDATION, Signal.UPDATES})

    average: Average  # how the models of a cohort are averaged
    max_cohorts: Annotated[int, Ge(1), Le(100_000)]  # number of cohorts up to which all are tried
    cohorts: Annotated[int, Ge(1), Le(100_000)]  # number of random cohorts otherwise
    candidates: Annotated[int, Ge(1), Le(100_000)]  # clients tried for each place of the grown one
    swaps: Annotated[int, Ge(0), Le(100_000)]  # exchanges of one client that are tried
    horizon: Annotated[int, Ge(1), Le(3)]  # rounds to look ahead

    def problems(self) -> Problems:
        n, k = self.population.num_clients, self.population.cohort_size
        text = (
            f"tries sequences of all cohorts of cohort_size={k} of num_clients={n} clients; these "
            f"must be at most selector.max_cohorts={self.max_cohorts}"
        )
        remedy = "selector.horizon=1, fewer clients, or a higher selector.max_cohorts"
        holds = self.horizon == 1 or self._tries_all(n, k)
        yield rule(holds, "horizon", self.horizon, text, remedy)

    @property
    def warning(self) -> str:
        n, k = self.population.num_clients, self.population.cohort_size
        passes = self.cohorts + k * self.candidates + self.swaps
        trainings = n
        if self._tries_all(n, k):
            # A virtual round follows each sequence of fewer than `horizon` cohorts, the empty one
            # included. A pass validates each cohort of each round.
            num_cohorts = math.comb(n, k)
            num_rounds = sum(num_cohorts**length for length in range(self.horizon))
            passes = num_rounds * num_cohorts
            trainings = num_rounds * n
        return (
            f"a yardstick and no method: each round takes up to {trainings:,} trainings by {n} "
            f"clients, who all upload, and {passes:,} validation passes; the best cohort of each "
            "round is not the best over many rounds"
        )

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        count = self.cohort_size(clients)
        cohort, _, _ = drop_nonfinite(clients.collect(clients.available), None)
        num = len(cohort.ids)
        if num <= count:
            others = rng.permutation(np.setdiff1d(clients.available, cohort.ids))
            return Selection(ascending(np.concatenate([cohort.ids, others])[:count]))
        if self._tries_all(num, count):
            horizon = min(self.horizon, self.population.num_rounds - round + 1)
            cohorts, sums = self._all_cohorts(clients, cohort, horizon)
            best = cohorts[_argmin(sums, rng)]
        else:
            best = self._search(self._loss_of(clients, cohort), num, count, rng)
        return Selection(ascending(cohort.ids[sorted(best)]))

    def _tries_all(self, num: int, count: int) -> bool:
        """Return whether there are at most `max_cohorts` cohorts of `count` of `num` clients."""
        # With more clients than max_cohorts there are more cohorts than that, too. Their number
        # may be too long to compute.
        few_clients = num <= self.max_cohorts
        return count >= num or (few_clients and math.comb(num, count) <= self.max_cohorts)

    def _all_cohorts(
        self, clients: Clients, cohort: Cohort, horizon: int
    ) -> tuple[list[Rows], Floats]:
        """Return all cohorts, and for each the lowest sum of losses that it allows.

        The sum is over `horizon` rounds. The first of these selects the cohort, and the later ones
        select the best cohorts that follow. `cohort` has the updates of all available clients.
        """
        num = len(cohort.ids)
        count = min(self.cohort_size(clients), num)
        cohorts = [frozenset(rows) for rows in itertools.combinations(range(num), count)]
        loss_of = self._loss_of(clients, cohort)
        sums = np.array([loss_of(rows, 1.0) for rows in cohorts])
        if horizon > 1:
            model_of = average_models(cohort, self.average)
            for number, rows in enumerate(cohorts):
                next_clients = clients.broadcast(model_of(rows, 1.0))
                sums[number] += self._lowest_sum(next_clients, horizon - 1)
        return cohorts, sums

    def _lowest_sum(self, clients: Clients, horizon: int) -> float:
        """Return the lowest sum of losses over `horizon` virtual rounds.

        They start from the model of `clients`. The sum is infinite if no update is finite.
        """
        try:
            cohort, _, _ = drop_nonfinite(clients.collect(clients.available), None)
        except DivergedError:
            return math.inf
        _, sums = self._all_cohorts(clients, cohort, horizon)
        return float(sums.min())

    def _search(self, loss_of: LossOf, num: int, count: int, rng: Generator) -> Rows:
        """Return the best cohort of steps 2 and 3."""
        cohorts = [
            frozenset(rng.choice(num, count, replace=False).tolist()) for _ in range(self.cohorts)
        ]
        cohorts.append(self._grow(loss_of, num, count, rng))
        best = _best(loss_of, cohorts, 1.0, rng)
        for _ in range(self.swaps):
            leaving = int(rng.choice(sorted(best)))
            entering = int(rng.choice(_others(num, best)))
            swapped = best - {leaving} | {entering}
            if loss_of(swapped, 1.0) < loss_of(best, 1.0):
                best = swapped
        return best

    def _grow(self, loss_of: LossOf, num: int, count: int, rng: Generator) -> Rows:
        """Return a cohort of `count` clients, grown client by client (step 2)."""
        cohort: Rows = frozenset()
        for size in range(1, count + 1):
            candidates = rng.permutation(_others(num, cohort))[: self.candidates].tolist()
            grown = [cohort | {client} for client in candidates]
            cohort = _best(loss_of, grown, size / count, rng)
        return cohort

    def _loss_of(self, clients: Clients, cohort: Cohort) -> LossOf:
        """Return the function `LossOf` for the updates of `cohort`. It evaluates each model once.

        A loss of nan becomes infinity.
        """
        model_of = average_models(cohort, self.average)

        @cache
        def loss_of(rows: Rows, share: float) -> float:
            loss = clients.validate(model_of(rows, share)).loss
            return math.inf if math.isnan(loss) else loss

        return loss_of


def average_models(cohort: Cohort, average: Average) -> Callable[[Rows, float], Params]:
    """Return a function of a cohort's rows and a share. It makes the model that lies this share of
    the way from the global model to the average of the rows' models."""
    # All tensors are joined to one, so that an average takes one sum instead of many.
    start = torch.cat([value.flatten() for value in cohort.start.values()])
    flat = replace(cohort, start={"all": start}, delta={"all": flat_rows(cohort.delta)})
    by_size = average == "by_size"

    def model_of(rows: Rows, share: float) -> Params:
        # `average_model` sums over all rows that it gets, so it gets those of the members only.
        members = flat.rows(np.array(sorted(rows)))
        everybody = frozenset(range(len(rows)))
        model = average_model(members, everybody, by_size, share)
        return split_flat(model["all"], cohort.start)

    return model_of


def _best(loss_of: LossOf, cohorts: Sequence[Rows], share: float, rng: Generator) -> Rows:
    """Return the cohort of lowest loss at `share` of the way to its average, ties at random."""
    losses = np.array([loss_of(rows, share) for rows in cohorts])
    return cohorts[_argmin(losses, rng)]


def _argmin(losses: Floats, rng: Generator) -> int:
    """Return the position of the lowest loss; ties are broken at random."""
    return int(highest(-losses, 1, rng)[0])


def _others(num: int, rows: Rows) -> Ids:
    """Return the positions below `num` that are not in `rows`, ascending."""
    return np.setdiff1d(np.arange(num), sorted(rows))
