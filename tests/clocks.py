"""Simulated clocks on devices whose times can be worked out by hand."""

from typing import Any

import numpy as np

from fedsim.clients.devices import DeviceModel, Devices, Presence
from fedsim.clients.system import SimulatedClock, System
from fedsim.core.rng import Streams

THREE: dict[str, Any] = {"forward": [0.5, 1, 2], "down": [8, 4, 2], "up": [4, 2, 1]}
"""Three devices: seconds to pass a sample forward, bytes down and up per second."""

NEED_A_CLOCK = ("fedcs", "fedcs_sequential", "haccs", "oort_by_speed", "tifl", "tifl_uniform")
"""Selectors of conf/selector/ that need a simulated clock."""


class Fixed(DeviceModel):
    """The given devices; if there are more clients, the values are repeated."""

    def __init__(
        self, forward: list[float], down: list[float], up: list[float], presence: Any = None
    ) -> None:
        self.forward = forward
        self.down = down
        self.up = up
        self.presence = presence

    def draw(self, num_clients: int, rng: np.random.Generator) -> Devices:
        presence = None
        if self.presence is not None:
            period, intervals = self.presence
            arrays = [np.array(interval, np.float64) for interval in intervals]
            presence = Presence(arrays, np.full(num_clients, float(period)))
        return Devices(
            np.resize(np.float64(self.forward), num_clients),
            np.resize(np.float64(self.down), num_clients),
            np.resize(np.float64(self.up), num_clients),
            presence,
        )


def fixed_clock(
    num_clients: int = 3,
    num_counted: int = 3,
    presence: Any = None,
    devices: dict[str, Any] = THREE,
    **rules: Any,
) -> SimulatedClock:
    """Return a clock with a latency of 1 s, training three times as long as a forward pass, and no
    deadline.

    `presence` is a period, and for each client its intervals. `rules` are parameters of `System`.
    """
    defaults: dict[str, Any] = {
        "training_factor": 3.0,
        "latency": 1.0,
        "variation": 0.0,
        "deadline": None,
        "over_selection": 1.0,
        "idle_seconds": 60.0,
    }
    system = System(devices=Fixed(**devices, presence=presence), **(defaults | rules))
    return SimulatedClock(system, num_clients, num_counted, Streams(0))
