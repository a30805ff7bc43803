"""REFL: select the clients that are least likely to be available again soon.

Abdelmoniem, Sahu, Canini and Fahmy, "REFL: Resource-Efficient Federated Learning", EuroSys 2023
(arXiv 2111.01108): its Intelligent Participant Selection.

Clients that are seldom available are selected when they are, so that the data of all clients reach
the model. A participant is then held off for some rounds.

In each round:

1. Predict for each available client the probability that it is available in the next round.
2. Select the K clients with the lowest probabilities, ties at random. A client is not eligible in
   the `hold_off` rounds after its selection. If fewer than K clients are eligible, those that have
   waited longest are released first.

Deviations: In the paper clients forecast their own availability in the slot that begins a round
from now, from traces of days. Here the server counts: the prediction is the share of the rounds in
which a client was available that were followed by another one, 0 before the first. The second half
of the paper, about stale updates and the number of participants that depends on them, belongs to
aggregation and is not part of this selector.
"""

import numpy as np

from fedsim.selectors.base import (
    Clients,
    CountOrZero,
    Floats,
    Generator,
    Ids,
    Selection,
    Selector,
    parameters,
)


@parameters
class REFL(Selector):
    """Selects the K clients that are least likely to be available in the next round."""

    state = ("followed", "returned", "reached", "round", "last_round")

    hold_off: CountOrZero  # rounds after its selection in which a client is not eligible

    def __post_init__(self) -> None:
        num_clients = self.population.num_clients
        # rounds before the latest one in which each client was available
        self.followed = np.zeros(num_clients, np.int64)
        # how many of them were followed by a round in which it was available again
        self.returned = np.zeros(num_clients, np.int64)
        self.round = 0  # the latest round with a selection
        self.reached = np.empty(0, np.int64)  # the clients available in it
        # the round in which each client was last selected
        self.last_round = np.full(num_clients, -self.hold_off - 1)

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        available = clients.available
        # 1. Predictions
        self._count(round, available)
        predictions = self.predictions()[available]
        # 2. The lowest ones; those that still have to wait come after all others
        waits = self.last_round[available] + self.hold_off + 1 - round
        scores = np.where(waits > 0, -1.0 - waits, -predictions)
        chosen = self.select_highest(scores, clients, rng)
        self.last_round[chosen] = round
        return Selection(chosen)

    def predictions(self) -> Floats:
        """Return the shares [N] of rounds with a client after which it was available again."""
        return self.returned / np.maximum(self.followed, 1)

    def _count(self, round: int, available: Ids) -> None:
        """Count who of the clients that were available in the latest round is available again."""
        self.followed[self.reached] += 1
        if round == self.round + 1:  # otherwise nobody could be reached in between
            self.returned[np.intersect1d(self.reached, available)] += 1
        self.reached = available.copy()
        self.round = round
