"""The updates of a round that reach the server: all but those of clients that are lost or late."""

from dataclasses import dataclass

import numpy as np

from fedsim.core.arrays import Floats
from fedsim.core.rng import Purpose, Streams
from fedsim.core.types import Cohort, Ids, Weights


@dataclass(frozen=True)
class Arrivals:
    """The part of a cohort's updates that reaches the server.

    `cohort` has the updates that arrive in time and are finite; None: there are none. `weights` are
    the selector's weights of these clients, scaled so that their sum is that of the whole cohort.
    `late` are the clients whose updates do not arrive: they are lost, too late, or not among the
    first that count.
    `seconds` is the simulated time from the request until the server continues. `num_dropped` is
    the number of updates in time that hold a nan or infinity. `train_loss` is the mean training
    loss over all updates in time; None: no loss is finite.
    """

    late: Ids
    cohort: Cohort | None = None
    weights: Weights = None
    seconds: float = 0.0
    num_dropped: int = 0
    train_loss: float | None = None


def parts_before_loss(streams: Streams, drop_out: float, round: int, ids: Ids) -> Floats:
    """Return the part of its work, in [0, 1), after which each client of `ids` is lost [K];
    infinity for clients that are not lost.

    Each client is lost with the probability `drop_out`. The draws depend on (seed, LOST_CLIENTS,
    round, client) only, and not on the probability.
    """
    parts = np.full(len(ids), np.inf)
    if drop_out:
        rngs = streams.generators(Purpose.LOST_CLIENTS, round, last=ids)
        for row, rng in enumerate(rngs):
            chance, part = rng.random(2)
            if chance < drop_out:
                parts[row] = part
    return parts


def mean_loss(cohort: Cohort) -> float | None:
    """Return the mean of the cohort's finite training losses; None if there are none."""
    if cohort.loss is None:
        return None
    finite = cohort.loss[np.isfinite(cohort.loss)]
    return float(finite.mean()) if len(finite) else None
