"""What a round was on the simulated clock: how long it took, and whose updates arrived in time."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsim.checks import kept_rows
from fedsim.system.clock import RoundClock
from fedsim.types import Cohort, Ids

Weights = NDArray[np.float64] | None


@dataclass(frozen=True)
class Arrivals:
    """What arrived of a cohort's updates (None: nothing), and their weights, scaled to keep their sum.

    `late`: the clients whose updates did not arrive in time, or not among the first that count; `unsent`: those of
    them whose updates the server did not have before it asked. `seconds`: from the request until the server went on.
    """

    cohort: Cohort | None
    weights: Weights
    late: Ids
    unsent: Ids
    seconds: float


def all_arrive(cohort: Cohort, weights: Weights) -> Arrivals:
    """Without a simulated clock."""
    return Arrivals(cohort, weights, cohort.ids[:0], cohort.ids[:0], 0.0)


def arrivals(cohort: Cohort, weights: Weights, clock: RoundClock, begun: float, wanted: int) -> Arrivals:
    """What arrives of the updates that the server asks for `begun` seconds after the round's start.

    `wanted`: how many it waits for where more are selected.
    """
    assert cohort.durations is not None
    race = clock.race(cohort.ids, cohort.durations, begun, wanted)
    late, unsent = (cohort.ids[~race.arrived & some] for some in (True, cohort.durations > 0))
    if not race.arrived.any():
        return Arrivals(None, None, late, unsent, race.seconds)
    if len(late):
        cohort, weights = kept_rows(cohort, weights, race.arrived)
    return Arrivals(cohort, weights, late, unsent, race.seconds)
