"""Queues of clients that sit out."""

from collections.abc import Sequence

import numpy as np

from fedsim.types import Ids


def not_waiting(available: Ids, queue: Sequence[int], wanted: int) -> Ids:
    """Who of the `available` is not in the `queue`; its first are let go until `wanted` are there."""
    present = set(available.tolist())
    barred = [i for i in queue if i in present]
    surplus = max(wanted - (len(available) - len(barred)), 0)
    return np.setdiff1d(available, np.array(barred[surplus:], dtype=np.int64))
