"""Label counts of clients, shared by the selectors that request them."""

import numpy as np
from numpy.typing import NDArray

from fedsim.communication.clients import Clients

UNKNOWN = -1
Counts = NDArray[np.int64]


def collect_label_counts(counts: Counts, clients: Clients) -> Counts:
    """`counts` [N, C] completed by the label counts of all available clients; each client is asked at most once.

    Rows of clients that have not reported are `UNKNOWN` (-1); before any report, `counts` has no columns [N, 0].
    """
    num = len(counts)
    is_known = counts[:, 0] != UNKNOWN if counts.shape[1] else np.zeros(num, dtype=bool)
    new = clients.available[~is_known[clients.available]]
    if not len(new):
        return counts
    reported = clients.label_counts(new)
    known = counts if counts.shape[1] else np.full((num, reported.shape[1]), UNKNOWN)
    known[new] = reported
    return known
