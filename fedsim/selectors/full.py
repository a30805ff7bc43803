"""Full participation: the upper baseline, and FedABC's "FedAvg"."""

import numpy as np

from fedsim.communication.clients import Clients
from fedsim.selectors.base import Selector
from fedsim.types import Selection


class Full(Selector):
    """Every available client, every round; `cohort_size` has no effect."""

    adaptive = True

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        return Selection(clients.available)
