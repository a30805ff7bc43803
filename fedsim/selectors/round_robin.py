"""Round robin: a control for methods whose exploration visits all clients in turn.

Symbols: N clients, K of them to select in a round.
"""

import numpy as np

from fedsim.selectors.base import Clients, Generator, Ids, Selection, Selector, ascending


class RoundRobin(Selector):
    """Selects consecutive blocks of K clients in a random order, which is drawn once.

    If all clients are available, each is selected once within ceil(N / K) rounds. A client that is
    unavailable when its turn comes stays at the head of the queue.
    """

    state = ("queue",)

    def __post_init__(self) -> None:
        # all N ids, the next client first; empty before the first selection
        self.queue: Ids = np.empty(0, np.int64)

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        if not len(self.queue):
            self.queue = rng.permutation(self.population.num_clients)
        available = self.queue[np.isin(self.queue, clients.available)]
        chosen = available[: self.cohort_size(clients)]
        waiting = self.queue[~np.isin(self.queue, chosen)]
        self.queue = np.concatenate([waiting, chosen])
        return Selection(ascending(chosen))
