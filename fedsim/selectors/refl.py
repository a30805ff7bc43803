"""REFL: select the clients that are least likely to be available again soon.

Abdelmoniem, Sahu, Canini and Fahmy, "REFL: Resource-Efficient Federated Learning", EuroSys 2023
(arXiv 2111.01108): its Intelligent Participant Selection.

Clients that are seldom available are selected when they are, so that the data of all clients reach
the model. A selected client then has to wait for some rounds.

In each round, with K clients to select:

1. Predict for each available client the probability that it is available in the next round.
2. Select the K clients with the lowest predictions, ties at random. A client is not eligible in the
   `hold_off` rounds after its selection. If fewer than K clients are eligible, clients that have to
   wait fill up, those with the fewest rounds left to wait first.

The prediction for a client is a share of the past rounds:

    prediction = (rounds in which it was available, and in the following round, too)
                 / (rounds in which it was available)

It is 0 for a client that was never available before.

Deviations: In the paper clients forecast their own availability in the slot that begins one round
duration from now, from traces of several days. Here the server counts past rounds. The authors'
code (ahmedcs/REFL) has `prohibit_reselect=5`, which excludes a client from the 4 rounds after its
selection. This is `hold_off=4`, and the default is 5. In the code, random available clients take
the places of excluded ones.

The second half of the paper belongs to aggregation and is not part of this selector: stale updates,
and the number of participants that depends on them.
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

    state = (
        "rounds_available",
        "rounds_available_again",
        "latest_available",
        "latest_round",
        "last_selected",
    )

    hold_off: CountOrZero  # rounds after its selection in which a client is not eligible

    def __post_init__(self) -> None:
        num_clients = self.population.num_clients
        # Counts [N] of the rounds before the current one in which each client was available, and of
        # those among them after which it was available in the following round, too.
        self.rounds_available = np.zeros(num_clients, np.int64)
        self.rounds_available_again = np.zeros(num_clients, np.int64)
        # The latest round in which `select` was called, and the ids of the clients available then.
        self.latest_round = 0
        self.latest_available = np.empty(0, np.int64)
        # The round [N] in which each client was last selected. The initial value lies so far back
        # that every client is eligible in round 1.
        self.last_selected = np.full(num_clients, -self.hold_off - 1)

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        available = clients.available
        # 1. Predictions
        self._count_availability(round, available)
        predictions = self.predictions()[available]
        # 2. The lowest predictions. The scores of eligible clients lie in [-1, 0]. A client with
        # w >= 1 rounds left to wait gets -1 - w, and so ranks below all eligible ones.
        first_eligible_round = self.last_selected[available] + self.hold_off + 1
        rounds_to_wait = first_eligible_round - round
        scores = np.where(rounds_to_wait > 0, -1.0 - rounds_to_wait, -predictions)
        chosen = self.select_highest(scores, clients, rng)
        self.last_selected[chosen] = round
        return Selection(chosen)

    def predictions(self) -> Floats:
        """Return the predicted probability [N] that each client, available now, will be so in the
        next round."""
        return self.rounds_available_again / np.maximum(self.rounds_available, 1)

    def _count_availability(self, round: int, available: Ids) -> None:
        """Count the latest round for the clients that were available in it.

        fedsim does not call `select` in a round without available clients (see `Selector`). So if
        `latest_round` is not the round before this one, nobody was available in the round after it.
        """
        self.rounds_available[self.latest_available] += 1
        if round == self.latest_round + 1:
            available_again = np.intersect1d(self.latest_available, available)
            self.rounds_available_again[available_again] += 1
        self.latest_available = available.copy()
        self.latest_round = round
