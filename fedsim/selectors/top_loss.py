"""Selection of the highest losses among all clients: Cho et al.'s method as FedABC uses it as a baseline."""

from pathlib import Path

import numpy as np

from fedsim.results.files import read_metrics
from fedsim.selectors.base import (
    Clients,
    Population,
    Selection,
    Selector,
    Signal,
    ascending,
    check,
    highest,
    rule,
    without_infinity,
)


class TopLoss(Selector):
    """All clients report their losses; the `count` clients with the highest are selected (power-of-choice with d = N).

    `count` is fixed (FedABC's figures fit 7 of 10; None: `cohort_size`). If `match` is given, the folder of another
    run, that run's number of uploads is copied round by round instead. `first_round_full`: all clients take part in
    the first round in which clients can be reached, as in FedABC. Losses that are not finite rank last.
    """

    adaptive = True
    needs = frozenset({Signal.LOSSES})

    def __init__(self, population: Population, *, count: int | None, match: str | None, first_round_full: bool) -> None:
        super().__init__(population)
        n = population.num_clients
        self.count = population.cohort_size if count is None else count
        check(
            rule(1 <= self.count <= n, "count", count, f"must lie in [1, num_clients={n}]", "null: cohort_size"),
            rule(
                match is None or len(read_metrics(Path(match))) >= population.num_rounds,
                "match",
                match,
                f"must be the folder of a run with at least num_rounds={population.num_rounds} rounds",
            ),
        )
        self.counts = None if match is None else [r["uploaded"] for r in read_metrics(Path(match))]
        self.first_round_full = first_round_full

    @property
    def start_up_rounds(self) -> int:
        return int(self.first_round_full)

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        if self.first_round_full and clients.in_first_round:
            return Selection(clients.available)
        count = self.count if self.counts is None else self.counts[round - 1]
        losses = without_infinity(clients.losses(clients.available))
        return Selection(ascending(clients.available[highest(losses, count, rng)]))
