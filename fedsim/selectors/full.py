"""Full participation: a reference for what selection costs or gains."""

from fedsim.selectors.base import Clients, Generator, Sampling, Selection, Selector


class Full(Selector):
    """Selects all available clients in every round (the "FedAvg" of FedABC's comparison).

    `cohort_size` has no effect.
    """

    adaptive = True
    sampling = Sampling.ALL

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        return Selection(clients.available)
