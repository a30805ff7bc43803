from pathlib import Path

import numpy as np

from fedsim.core.parameters import Problems, parameters
from fedsim.results.reading import read_metrics
from fedsim.selectors.base import (
    Clients,
    Selection,
    Selector,
    Signal,
    ascending,
    highest,
    rule,
    without_infinity,
)


@parameters
class TopLoss(Selector):
    """All clients report their losses; the `count` clients with the highest are selected
    (power-of-choice with d = N).

    `count` is fixed (FedABC's figures fit 7 of 10; None: `cohort_size`), or round by round the
    number of uploads of the run whose folder is `match`. `first_round_full`: all clients take part
    in the first round in which clients can be reached, as in FedABC, of which it is a baseline.
    Losses that are not finite rank last.
    """

    adaptive = True
    needs = frozenset({Signal.LOSSES})

    count: int | None
    match: str | None
    first_round_full: bool

    def problems(self) -> Problems:
        n, rounds, count = self.population.num_clients, self.population.num_rounds, self.count
        yield rule(
            count is None or 1 <= count <= n, "count", count, f"must lie in [1, num_clients={n}]"
        )
        told = f"must be the folder of a run with at least num_rounds={rounds} rounds"
        yield rule(
            self.match is None or len(read_metrics(Path(self.match))) >= rounds,
            "match",
            self.match,
            told,
        )

    def __post_init__(self) -> None:
        self.counts = (
            [] if self.match is None else [r["uploaded"] for r in read_metrics(Path(self.match))]
        )
        self.start_up_rounds = int(self.first_round_full)

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        if self.first_round_full and clients.in_first_round:
            return Selection(clients.available)
        count = self.counts[round - 1] if self.counts else self.count or self.population.cohort_size
        losses = without_infinity(clients.losses(clients.available))
        return Selection(ascending(clients.available[highest(losses, count, rng)]))
