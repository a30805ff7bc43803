"""The simulated clock: how long rounds take on the clients' devices, and whose updates arrive in time.

The time of a client in an exchange is

    latency + (bytes down / bandwidth down + samples passed forward x f + samples trained on x training_factor x f
               + bytes up / bandwidth up) x factor of this round

with f its seconds per sample passed forward. Exchanges follow one another, as the answers to one decide what the next
one asks; the server waits for the slowest client of each. What the server computes itself takes no simulated time.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsim.clients.devices import DeviceModel, Devices
from fedsim.core.errors import at_least, between, ceil, check, positive, rule
from fedsim.core.exact import exp
from fedsim.core.rng import Purpose, Streams
from fedsim.core.types import Ids, Work

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


Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Race:
    """What becomes of the updates of the selected: whose `arrived` in time [n], and the `seconds` until the server
    went on."""

    arrived: NDArray[np.bool_]
    seconds: float


class RoundClock:
    """The simulated time of one round, which begins at `start` seconds of the run.

    `asked`: the seconds that exchanges have taken so far.
    """

    def __init__(self, system: System, devices: Devices, streams: Streams, round: int, start: float) -> None:
        self._system, self._devices, self._streams, self._round = system, devices, streams, round
        self._start = start
        self._waiting: dict[int, float] = {}
        self.asked = 0.0

    def spend(self, work: Work, *, answered: bool) -> Floats:
        """Seconds [n] that each client of an exchange takes for its `work`; the server waits for the slowest.

        It does not wait for work that is not `answered`: this delays the next answer of the client.
        """
        seconds = self.nominal(work, self._factors(work.ids))
        if not answered:
            self._waiting |= {
                int(i): self._waiting.get(int(i), 0.0) + float(s) for i, s in zip(work.ids, seconds, strict=True)
            }
            return seconds
        seconds = seconds + self._system.latency + [self._waiting.pop(int(i), 0.0) for i in work.ids]
        self.asked += float(seconds.max(initial=0.0))
        return seconds

    def nominal(self, work: Work, factors: Floats | float = 1.0) -> Floats:
        """Seconds [n] for `work` without latency, times the clients' `factors` of this round."""
        devices, ids = self._devices, work.ids
        samples = work.forward_samples + self._system.training_factor * work.train_samples
        transfers = work.bytes_down / devices.down[ids] + work.bytes_up / devices.up[ids]
        return (transfers + samples * devices.forward[ids]) * factors

    @property
    def latency(self) -> float:
        """Seconds of an exchange besides transfers and computations."""
        return self._system.latency

    def race(self, ids: Ids, seconds: Floats, begun: float, wanted: int) -> Race:
        """Whose updates arrive in time, of clients `ids` that take `seconds` [n] from `begun` seconds of the round on.

        A client that leaves before it has finished is lost. With over-selection the `wanted` first count; who is first
        of several that take equally long is drawn by round and client. The server goes on with the last of these, or
        when nothing more can arrive, or at the deadline.
        """
        leaving = np.full(len(ids), np.inf)
        if self._devices.presence is not None:
            leaving = self._devices.presence.of(ids).remaining(self._start + begun)
        deadline = np.inf if self._system.deadline is None else self._system.deadline
        arrived = (seconds <= leaving) & (seconds <= deadline)
        until = float(np.minimum(seconds, leaving).max(initial=0.0))
        if self._system.over_selection > 1 and np.count_nonzero(arrived) >= wanted:
            first = np.lexsort((self._draws(ids), np.where(arrived, seconds, np.inf)))[:wanted]
            arrived = np.isin(np.arange(len(ids)), first)
            until = float(seconds[first].max(initial=0.0))
        return Race(arrived, min(until, float(deadline)))

    def _draws(self, ids: Ids) -> Floats:
        """A uniform draw [n] for each client of this round, the same whoever else is selected."""
        return np.array([self._streams.generator(Purpose.ARRIVAL_ORDER, self._round, int(i)).random() for i in ids])

    def _factors(self, ids: Ids) -> Floats | float:
        if not self._system.variation:
            return 1.0
        draws = [self._streams.generator(Purpose.DEVICE_VARIATION, self._round, int(i)).standard_normal() for i in ids]
        return exp(self._system.variation * np.array(draws))


class SimulatedClock:
    """The simulated time of a run: its devices, which are drawn once, and the clocks of its rounds."""

    def __init__(self, system: System, num_clients: int, wanted: int, streams: Streams) -> None:
        """`wanted`: K, the updates that a round waits for where more clients are selected."""
        self.system = system
        self.wanted = wanted
        self.devices = system.devices.draw(num_clients, streams.generator(Purpose.DEVICES))
        self._streams = streams

    def present(self, now: float) -> NDArray[np.bool_] | None:
        """Which clients can be reached at `now` seconds of the run [N]; None: all of them, always."""
        return None if self.devices.presence is None else self.devices.presence.remaining(now) > 0

    def round(self, round: int, start: float) -> RoundClock:
        """The clock of `round` (1-based), which begins at `start` seconds of the run."""
        return RoundClock(self.system, self.devices, self._streams, round, start)
