"""Simulated clocks on devices whose times can be worked out by hand."""

from typing import Any

import numpy as np

from fedsim.clients.devices import DeviceModel, Devices, Presence
from fedsim.clients.system import SimulatedClock, System
from fedsim.core.rng import Streams

THREE: dict[str, Any] = {"forward": [0.5, 1, 2], "down": [8, 4, 2], "up": [4, 2, 1]}
"""Three devices: seconds to pass a sample forward, bytes down and up a second."""


NEED_A_CLOCK = ("fedcs", "fedcs_sequential", "oort_by_speed", "tifl", "tifl_uniform")
"""Selectors of conf/selector/ that cannot do without a simulated clock."""


class Fixed(DeviceModel):
    """The devices that it is given; the first N of their values repeated."""

    def __init__(
        self, forward: list[float], down: list[float], up: list[float], presence: Any = None
    ) -> None:
        self.values = forward, down, up
        self.presence = presence

    def draw(self, num_clients: int, rng: np.random.Generator) -> Devices:
        forward, down, up = (
            np.resize(np.array(values, np.float64), num_clients) for values in self.values
        )
        presence = None
        if self.presence is not None:
            period, intervals = self.presence
            presence = Presence(
                [np.array(own, np.float64) for own in intervals],
                np.full(num_clients, float(period)),
            )
        return Devices(forward, down, up, presence)


def fixed_clock(
    num_clients: int = 3,
    wanted: int = 3,
    presence: Any = None,
    devices: dict[str, Any] = THREE,
    **more: Any,
) -> SimulatedClock:
    """A latency of 1 s, training three times as long as a forward pass, no deadline. `presence`: a
    period, and for each client its intervals."""
    rules: dict[str, Any] = {
        "training_factor": 3.0,
        "latency": 1.0,
        "variation": 0.0,
        "deadline": None,
    }
    rules |= {"over_selection": 1.0, "idle_seconds": 60.0}
    system = System(devices=Fixed(**devices, presence=presence), **(rules | more))
    return SimulatedClock(system, num_clients, wanted, Streams(0))
