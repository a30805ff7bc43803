import numpy as np

from fedsim.selectors.base import Clients, Sampling, Selection, Selector


class Full(Selector):
    """Selects all available clients in every round (FedABC's "FedAvg"); `cohort_size` has no
    effect."""

    adaptive = True
    sampling = Sampling.ALL

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        return Selection(clients.available)
