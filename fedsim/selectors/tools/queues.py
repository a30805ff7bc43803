"""Queues of recently selected clients, which are not eligible for selection."""

from collections.abc import Sequence

import numpy as np

from fedsim.types import Ids


def not_queued(available: Ids, queue: Sequence[int], min_count: int) -> Ids:
    """Ids of the `available` clients that are not in `queue`.

    If these are fewer than `min_count`, clients are released from the front of the queue until there are as many.
    """
    present = set(available.tolist())
    queued = [i for i in queue if i in present]
    surplus = max(min_count - (len(available) - len(queued)), 0)
    return np.setdiff1d(available, np.array(queued[surplus:], dtype=np.int64))
