"""The simulated clock: how long rounds take on the clients' devices, and whose updates arrive in
time.

The time of a client in an exchange is

    latency + (bytes down / bandwidth down + samples passed forward x f + samples trained on x training_factor x f
               + bytes up / bandwidth up) x factor of this round

with f its seconds per sample passed forward. Exchanges follow one another, as the answers to one
decide what the next one asks; the server waits for the slowest client of each. What the server
computes itself takes no simulated time.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Ge, Interval

from fedsim.clients.devices import DeviceModel, Devices, Sigma
from fedsim.core.arrays import Bools, Floats, Ints
from fedsim.core.exact import exp
from fedsim.core.parameters import NonNegative, Positive, parameters
from fedsim.core.rng import Purpose, Streams
from fedsim.core.rounding import ceil
from fedsim.core.types import Exchange, Ids


@parameters
class System:
    """Devices, network and deadline of a run whose rounds get a simulated duration.

    `training_factor`: how many times as long training on a sample takes as passing it forward.
    `latency`: seconds that every exchange takes besides transfers and computations. `variation`:
    sigma of a log-normal factor (median 1) on the time of these, drawn for each round and client.
    `deadline`: seconds after which the server no longer waits for the updates of the selected
    (None: it waits). `over_selection`: f, so that K' = ceil(f K) clients are selected, of whom the
    first K to arrive count. `idle_seconds`: how long a round takes in which no client can be
    reached.
    """

    devices: DeviceModel
    training_factor: Annotated[float, Ge(1)]
    latency: NonNegative
    variation: Sigma
    deadline: Positive | None
    over_selection: Annotated[float, Interval(ge=1, le=1000)]
    idle_seconds: Positive

    def num_selected(self, cohort_size: int, num_clients: int) -> int:
        """K' = ceil(over_selection K), the clients to select where `cohort_size` K are to arrive;
        at most N."""
        return min(ceil(self.over_selection * cohort_size), num_clients)


@dataclass(frozen=True)
class Resources:
    """Seconds of n clients [n], without the variation of the round: to be reached and download the
    model, to train, to upload the update."""

    download: Floats
    training: Floats
    upload: Floats


class RoundClock:
    """The simulated time of one round, which begins at `start` seconds of the run; its exchanges
    have taken `asked`."""

    def __init__(
        self, system: System, devices: Devices, streams: Streams, round: int, start: float
    ) -> None:
        self._system, self._devices, self._streams, self._round = system, devices, streams, round
        self._start = start
        self._waiting: dict[int, float] = {}
        self.asked = 0.0

    def spend(self, work: Exchange, *, answered: bool) -> Floats:
        """Seconds [n] that each client of an exchange takes for its `work`. The server waits for
        the slowest, unless the work is not `answered`: this delays the next answer of the
        client."""
        seconds = self.nominal(work, self._factors(work.ids))
        if not answered:
            for client, more in zip(work.ids.tolist(), seconds.tolist(), strict=True):
                self._waiting[client] = self._waiting.get(client, 0.0) + more
            return seconds
        seconds = (
            seconds + self._system.latency + [self._waiting.pop(int(i), 0.0) for i in work.ids]
        )
        self.asked += float(seconds.max(initial=0.0))
        return seconds

    def nominal(self, work: Exchange, factors: Floats | float = 1.0) -> Floats:
        """Seconds [n] for `work` without latency, times the clients' `factors` of this round."""
        devices, ids = self._devices, work.ids
        samples = work.forward_samples + self._system.training_factor * work.train_samples
        transfers = work.bytes_down / devices.down[ids] + work.bytes_up / devices.up[ids]
        return (transfers + samples * devices.forward[ids]) * factors

    def resources(self, ids: Ids, samples: Ints, down: int, up: int) -> Resources:
        """Those of clients `ids` who train on `samples` [n] in a round, all passes counted, and get
        and send so many bytes."""
        nothing, received, sent = (np.full(len(ids), each) for each in (0, down, up))
        return Resources(
            download=self._system.latency
            + self.nominal(Exchange(ids, received, nothing, nothing, nothing)),
            training=self.nominal(Exchange(ids, nothing, nothing, samples, nothing)),
            upload=self.nominal(Exchange(ids, nothing, nothing, nothing, sent)),
        )

    def race(self, ids: Ids, seconds: Floats, begun: float, wanted: int) -> tuple[Bools, float]:
        """Whose updates arrive in time [n], of clients `ids` that take `seconds` [n] from `begun`
        seconds of the round on, and the seconds until the server goes on.

        A client that leaves before it has finished is lost. With over-selection the `wanted` first
        count; who is first of several that take equally long is drawn by round and client. The
        server goes on with the last of these, or when nothing more can arrive, or at the deadline.
        """
        leaving = np.full(len(ids), np.inf)
        if self._devices.presence is not None:
            leaving = self._devices.presence.of(ids).remaining(self._start + begun)
        deadline = self._system.deadline or np.inf
        arrived = (seconds <= leaving) & (seconds <= deadline)
        until = float(np.minimum(seconds, leaving).max(initial=0.0))
        if self._system.over_selection > 1 and np.count_nonzero(arrived) >= wanted:
            streams = [
                self._streams.generator(Purpose.ARRIVAL_ORDER, self._round, int(i)) for i in ids
            ]
            draws = np.array(
                [stream.random() for stream in streams]
            )  # the same whoever else is selected
            first = np.lexsort((draws, np.where(arrived, seconds, np.inf)))[:wanted]
            arrived = np.isin(np.arange(len(ids)), first)
            until = float(seconds[first].max(initial=0.0))
        return arrived, min(until, deadline)

    def _factors(self, ids: Ids) -> Floats | float:
        if not self._system.variation:
            return 1.0
        draws = [
            self._streams.generator(Purpose.DEVICE_VARIATION, self._round, int(i)).standard_normal()
            for i in ids
        ]
        return exp(self._system.variation * np.array(draws))


class SimulatedClock:
    """The simulated time of a run: its devices, which are drawn once, and the clocks of its
    rounds."""

    def __init__(self, system: System, num_clients: int, wanted: int, streams: Streams) -> None:
        """`wanted`: K, the updates that a round waits for where more clients are selected."""
        self.system, self.wanted, self._streams = system, wanted, streams
        self.devices = system.devices.draw(num_clients, streams.generator(Purpose.DEVICES))

    def present(self, now: float) -> Bools | None:
        """Which clients can be reached at `now` seconds of the run [N]; None: all of them,
        always."""
        return None if self.devices.presence is None else self.devices.presence.remaining(now) > 0

    def round(self, round: int, start: float) -> RoundClock:
        """The clock of `round` (1-based), which begins at `start` seconds of the run."""
        return RoundClock(self.system, self.devices, self._streams, round, start)
