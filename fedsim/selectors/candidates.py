"""Which available clients are candidates: clients that a method should try, clients that fill up a
cohort, and clients outside a queue.

N is the number of clients.
"""

from collections.abc import Sequence

import numpy as np

from fedsim.selectors.base import Bools, Generator, Ids, Ints


def clients_to_try(ids: Ids, known: Bools, last_tried: Ints, round: int) -> Ids:
    """Return the clients among the available `ids` that a method should try in `round`.

    `known` [N] marks the clients of which an update has arrived. `last_tried` [N] is the round in
    which each client was last selected, 0 for never. The rule:

    1. If some of `ids` were never selected, and are not known, return all of these.
    2. Otherwise take the unknown client that was selected longest ago, the lowest id of several.
       Return it alone if `round` >= 2 `last_tried`.
    3. Otherwise return nobody.

    The waits of rule 2 double, so clients whose updates never arrive take ever fewer places.
    """
    unknown = ids[~known[ids]]
    never_selected: Ids = unknown[last_tried[unknown] == 0]
    if len(never_selected):
        return never_selected
    if len(unknown):
        longest_ago = unknown[np.argmin(last_tried[unknown])]
        if round >= 2 * last_tried[longest_ago]:
            return np.array([longest_ago])
    nobody = unknown[:0]
    return nobody


def fill_up(chosen: Ids, candidates: Ids, count: int, rng: Generator) -> Ids:
    """Return `chosen`, followed by random other `candidates`, so that there are `count` in all.

    `chosen` must have at most `count` elements, and `candidates` must suffice.
    """
    others = np.setdiff1d(candidates, chosen)
    return np.concatenate([chosen, rng.choice(others, count - len(chosen), replace=False)])


def not_queued(available: Ids, queue: Sequence[int], min_count: int) -> Ids:
    """Return the `available` clients that are not in `queue`, and at least `min_count` of them.

    The queue starts with the client that has been in it longest. If fewer than `min_count` clients
    are outside the queue, the available ones at its start are released until there are `min_count`.
    The result is ascending.
    """
    queued = np.array(queue, dtype=np.int64)
    queued = queued[np.isin(queued, available)]
    num_outside = len(available) - len(queued)
    num_released = max(min_count - num_outside, 0)
    return np.setdiff1d(available, queued[num_released:])
