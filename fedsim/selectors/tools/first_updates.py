"""Trying clients of which a method that ranks by past updates has none."""

import numpy as np
from numpy.typing import NDArray

from fedsim.types import Ids


def clients_to_try(ids: Ids, known: NDArray[np.bool_], last_tried: NDArray[np.int64], round: int) -> Ids:
    """Those of the available `ids` that `round` is to select because nothing is `known` [N] of them, ascending.

    `last_tried` [N] is the round in which each client was last selected, 0 for never. All that never were; if there are
    none, the one selected longest ago (of several the lowest id) if the number of rounds has doubled since. So a client
    whose update came too late or was not finite gets further chances, and those whose updates never arrive take ever
    fewer places.
    """
    unknown = ids[~known[ids]]
    new: Ids = unknown[last_tried[unknown] == 0]
    if len(new) or not len(unknown):
        return new
    longest_ago = unknown[np.argmin(last_tried[unknown])]
    due = round >= 2 * last_tried[longest_ago]
    return np.array([longest_ago] if due else [], dtype=np.int64)
