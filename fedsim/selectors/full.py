"""Full participation: all available clients train, to compare selection with.

The comparison shows what selection costs in accuracy, and what it saves.
"""

from fedsim.selectors.base import Clients, Generator, Sampling, Selection, Selector


class Full(Selector):
    """Selects all available clients in every round (the "FedAvg" of FedABC's comparison).

    `cohort_size` has no effect without over-selection. With it, only the first `cohort_size`
    updates count.
    """

    adaptive = True
    sampling = Sampling.ALL

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        return Selection(clients.available)
