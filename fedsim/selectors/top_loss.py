"""Highest losses of all clients: power-of-choice with d = N, as FedABC compares with it.

Cho, Wang and Joshi, "Towards Understanding Biased Client Selection in Federated Learning",
AISTATS 2022 (arXiv 2010.01243).

All available clients report the loss of the current model on their data, and the clients with the
highest losses are selected. In power-of-choice only d random ones of the N clients report.
FedABC does not say how many clients are selected; its participation figures fit 7 of 10 clients. As
in FedABC, all clients take part in the first round with available clients.
"""

from fedsim.selectors.base import (
    Clients,
    Generator,
    Problems,
    Selection,
    Selector,
    Signal,
    ascending,
    highest,
    parameters,
    rule,
    without_infinity,
)


@parameters
class TopLoss(Selector):
    """Selects the `count` clients with the highest losses. Losses that are not finite rank last."""

    adaptive = True
    needs = frozenset({Signal.LOSSES})

    count: int | None  # number of clients in [1, N]; None: cohort_size
    first_round_full: bool  # whether all clients take part in the first round

    def problems(self) -> Problems:
        num_clients, count = self.population.num_clients, self.count
        in_range = count is None or 1 <= count <= num_clients
        yield rule(in_range, "count", count, f"must lie in [1, num_clients={num_clients}]")

    def __post_init__(self) -> None:
        self.start_up_rounds = int(self.first_round_full)

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        available = clients.available
        if self.first_round_full and clients.in_first_round:
            return Selection(available)
        count = self.population.cohort_size if self.count is None else self.count
        losses = without_infinity(clients.losses(available))
        return Selection(ascending(available[highest(losses, count, rng)]))
