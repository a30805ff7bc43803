"""The rules of the simulated clock that a config sets, beside the devices that it runs on."""

from fedsim.errors import at_least, between, check, positive, rule
from fedsim.rounding import ceil
from fedsim.system.devices import DeviceModel

LARGEST_OVER_SELECTION = 1000.0


class System:
    """Devices, network and deadline of a run whose rounds get a simulated duration.

    `training_factor`: how many times as long training on a sample takes as passing it forward. `latency`: seconds that
    every exchange with a client takes besides its transfers and computations. `variation`: sigma of a log-normal factor
    (median 1) on the time of transfers and computations, drawn for each round and client. `deadline`: seconds after
    which the server no longer waits for the updates of the selected (None: it waits). `over_selection`: f, so that
    K' = ceil(f K) clients are selected, of whom the first K to arrive count. `idle_seconds`: how long a round takes in
    which no client can be reached.
    """

    def __init__(
        self,
        *,
        devices: DeviceModel,
        training_factor: float,
        latency: float,
        variation: float,
        deadline: float | None,
        over_selection: float,
        idle_seconds: float,
    ) -> None:
        check(
            at_least("training_factor", training_factor, 1),
            at_least("latency", latency, 0),
            between("variation", variation, 0, 10),
            None if deadline is None else positive("deadline", deadline, "null waits for everybody"),
            rule(
                1 <= over_selection <= LARGEST_OVER_SELECTION,
                "over_selection",
                over_selection,
                f"must lie in [1, {LARGEST_OVER_SELECTION:g}]",
                "1.3 selects 30 % more clients than cohort_size",
            ),
            positive("idle_seconds", idle_seconds),
        )
        self.devices = devices
        self.training_factor, self.latency, self.variation = training_factor, latency, variation
        self.deadline, self.over_selection, self.idle_seconds = deadline, over_selection, idle_seconds

    def num_selected(self, cohort_size: int, num_clients: int) -> int:
        """K' = ceil(over_selection K), the clients to select where `cohort_size` K are to arrive; at most N."""
        return min(ceil(self.over_selection * cohort_size), num_clients)
