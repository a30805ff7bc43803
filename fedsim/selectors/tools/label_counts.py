"""What selectors by label counts share."""

import numpy as np
from numpy.typing import NDArray

from fedsim.communication.clients import Clients

UNTOLD = -1
Counts = NDArray[np.int64]


def asked(counts: Counts, clients: Clients) -> Counts:
    """`counts` [N, C] (-1, or no columns, where untold) with those of all available clients; each is asked once."""
    num = len(counts)
    told = counts[:, 0] != UNTOLD if counts.shape[1] else np.zeros(num, dtype=bool)
    new = clients.available[~told[clients.available]]
    if not len(new):
        return counts
    answers = clients.label_counts(new)
    known = counts if counts.shape[1] else np.full((num, answers.shape[1]), UNTOLD)
    known[new] = answers
    return known
