import numpy as np

from fedsim.selectors.base import Clients, Positions, Selection, Selector, ascending


class RoundRobin(Selector):
    """Selects consecutive blocks of K clients in a random order drawn at first: all within ceil(N /
    K) rounds.

    A control for methods whose exploration visits all clients in turn. A client that is unavailable
    when it is due stays at the head of the queue.
    """

    state = ("queue",)

    def __post_init__(self) -> None:
        self.queue: Positions = np.empty(0, np.int64)

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        if not len(self.queue):
            self.queue = rng.permutation(self.population.num_clients)
        turn = self.queue[np.isin(self.queue, clients.available)][: self.cohort_size(clients)]
        self.queue = np.concatenate([self.queue[~np.isin(self.queue, turn)], turn])
        return Selection(ascending(turn))
