"""The label counts of N clients in C classes, which every client reports once."""

import numpy as np

from fedsim.selectors.base import Clients, Ints


def collect_label_counts(counts: Ints, clients: Clients) -> Ints:
    """Return `counts` [N, C] with the label counts of all available clients filled in.

    Only clients that have not reported yet are asked. The row of a client that has not reported is
    -1 in all columns. Before the first report C is unknown, and `counts` is [N, 0]. May change
    `counts` in place.
    """
    is_known = np.any(counts >= 0, axis=1)  # False for all if there are no columns
    new = clients.available[~is_known[clients.available]]
    if not len(new):
        return counts
    reported = clients.label_counts(new)
    if not counts.shape[1]:
        counts = np.full((len(counts), reported.shape[1]), -1)
    counts[new] = reported
    return counts
