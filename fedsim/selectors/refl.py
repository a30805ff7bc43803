"""REFL (Abdelmoniem, Sahu, Canini and Fahmy, "REFL: Resource-Efficient Federated Learning", EuroSys
2023): its Intelligent Participant Selection."""

import numpy as np

from fedsim.core.parameters import CountOrZero, parameters
from fedsim.selectors.base import Clients, Floats, Ids, Selection, Selector, ascending, highest


@parameters
class REFL(Selector):
    """Selects the K clients that are the least likely to be available in the next round; ties at
    random.

    A participant is not eligible in the `hold_off` rounds after it was selected; where fewer than K
    are, those that have waited longest are released first.

    Deviations: the paper's clients forecast their own availability in the slot that begins a round
    from now, from traces of days. Here the server counts: of the rounds in which a client could be
    reached, the share that was followed by one in which it could be reached again; 0 before the
    first. The paper's second half, stale updates and the number of participants that depends on
    them, belongs to aggregation and is not part of this selector.
    """

    state = ("followed", "returned", "reached", "round", "last_round")

    hold_off: CountOrZero

    def __post_init__(self) -> None:
        num = self.population.num_clients
        self.followed = np.zeros(
            num, np.int64
        )  # rounds in which a client was available, but for the latest,
        self.returned = np.zeros(num, np.int64)  # and those of them after which it was again
        self.reached = np.empty(0, np.int64)
        self.round = 0  # of the latest selection, in which `reached` were available
        self.last_round = np.full(num, -self.hold_off - 1)  # in which each was selected

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        ids = clients.available
        self._learn(round, ids)
        waits = self.last_round[ids] + self.hold_off + 1 - round
        scores = np.where(waits > 0, -1.0 - waits, -self.predictions()[ids])
        chosen = ascending(ids[highest(scores, self.cohort_size(clients), rng)])
        self.last_round[chosen] = round
        return Selection(chosen)

    def predictions(self) -> Floats:
        """Shares [N]: how often an available client was available in the next round, too."""
        return self.returned / np.maximum(self.followed, 1)

    def _learn(self, round: int, available: Ids) -> None:
        self.followed[self.reached] += 1
        if round == self.round + 1:  # else nobody could be reached in between
            self.returned[np.intersect1d(self.reached, available)] += 1
        self.reached, self.round = available.copy(), round
