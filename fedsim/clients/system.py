"""The simulated clock: how long rounds take on the clients' devices, and whose updates arrive in
time.

The time of a client in an exchange is

    latency + factor of this round x (bytes down / bandwidth down + bytes up / bandwidth up
              + forward samples x f + training samples x training_factor x f)

with f the client's seconds to pass one sample forward. An exchange is one request of the server to
some clients, and their answers. Exchanges follow one another, because the answers to one decide
what the next one requests. The server waits for the slowest client of each. Its own computations
take no simulated time.

The round loop makes one `SimulatedClock` a run and takes a `RoundClock` from it in each round.
`Clients` charges its exchanges to the latter. N is the number of all clients, n the number of
clients in one exchange, and K the cohort size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from annotated_types import Ge, Interval

from fedsim.clients.devices import DeviceModel, Devices, Sigma
from fedsim.core.arrays import Bools, Floats, Ints
from fedsim.core.errors import ConfigError
from fedsim.core.exact import exp
from fedsim.core.parameters import NonNegative, Positive, parameters
from fedsim.core.rng import Purpose, Streams
from fedsim.core.rounding import ceil
from fedsim.core.types import Exchange, Ids


@parameters
class System:
    """Devices, network and deadline of a run whose rounds get a simulated duration."""

    devices: DeviceModel
    training_factor: Annotated[float, Ge(1)]
    """Time of training on a sample, as a multiple of the time of passing it forward."""
    latency: NonNegative
    """Seconds that every exchange takes in addition to transfers and computations."""
    variation: Sigma
    """Sigma of a log-normal factor (median 1) on the time of transfers and computations, which is
    drawn by round and client."""
    deadline: Positive | None
    """Seconds after which the server stops waiting for updates of the cohort; None: never."""
    over_selection: Annotated[float, Interval(ge=1, le=1000)]
    """The factor of over-selection: ceil(factor x K) clients are selected, and the first K updates
    to arrive count."""
    idle_seconds: Positive
    """Duration of a round in which no client can be reached."""

    def num_selected(self, cohort_size: int, num_clients: int) -> int:
        """Return the number of clients to select so that K = `cohort_size` updates count:
        ceil(`over_selection` x K), at most N."""
        return min(ceil(self.over_selection * cohort_size), num_clients)


@contextmanager
def over_selection_explained(cohort_size: int, num_selected: int) -> Iterator[None]:
    """Add the origin of `num_selected` to the rules that name it, in a `ConfigError` of the body.

    With over-selection, selectors get the number of clients to select as their cohort size. It is
    not the `cohort_size` of the config.
    """
    try:
        yield
    except ConfigError as error:
        if num_selected == cohort_size:
            raise
        origin = f"(system.over_selection makes cohort_size={cohort_size} into {num_selected})"
        problems = []
        for problem in error.problems:
            if f"cohort_size={num_selected}" in problem.rule:
                problem = replace(problem, rule=f"{problem.rule} {origin}")
            problems.append(problem)
        raise ConfigError(problems) from error


@dataclass(frozen=True)
class Resources:
    """The seconds that n clients would take, each [n], without the round's random variation.

    `download` includes the latency.
    """

    download: Floats
    training: Floats
    upload: Floats


class RoundClock:
    """The simulated time of one round, which begins at `start` seconds of the run."""

    def __init__(
        self, system: System, devices: Devices, streams: Streams, round: int, start: float
    ) -> None:
        self._system = system
        self._devices = devices
        self._streams = streams
        self._round = round
        self._start = start
        self._unfinished: dict[int, float] = {}
        """Seconds by which earlier unanswered work delays a client's next answer, by client."""
        self.elapsed = 0.0
        """Seconds that the answered exchanges of this round have taken."""

    def spend(self, work: Exchange, *, answered: bool) -> Floats:
        """Return the seconds [n] that each client of an exchange takes for its `work`.

        The server waits for the slowest client. If the clients do not answer (`answered` is False),
        it does not wait, and the work delays the client's next answer.
        """
        seconds = self._seconds(work) * self._factors(work.ids)
        clients = work.ids.tolist()
        if not answered:
            for client, added in zip(clients, seconds.tolist(), strict=True):
                self._unfinished[client] = self._unfinished.get(client, 0.0) + added
            return seconds
        delays = [self._unfinished.pop(client, 0.0) for client in clients]
        seconds = seconds + self._system.latency + delays
        self.elapsed += float(seconds.max(initial=0.0))
        return seconds

    def _seconds(self, work: Exchange) -> Floats:
        """Return the seconds [n] of `work`, without latency and variation."""
        devices, ids = self._devices, work.ids
        transfers = work.bytes_down / devices.down[ids] + work.bytes_up / devices.up[ids]
        samples = work.forward_samples + self._system.training_factor * work.train_samples
        return transfers + samples * devices.forward[ids]

    def _factors(self, ids: Ids) -> Floats | float:
        """Return the random factor of each client in this round [n]; 1 without variation.

        A client has the same factor in all exchanges of the round.
        """
        if not self._system.variation:
            return 1.0
        rngs = [self._streams.generator(Purpose.DEVICE_VARIATION, self._round, int(i)) for i in ids]
        return exp(self._system.variation * np.array([rng.standard_normal() for rng in rngs]))

    def resources(self, ids: Ids, samples: Ints, *, bytes_down: int, bytes_up: int) -> Resources:
        """Return the resources of clients that receive `bytes_down` and send `bytes_up`.

        `samples` [n] are the training samples that each passes forward and backward, in all passes.
        """
        zeros = np.zeros(len(ids), np.int64)
        down = self._seconds(Exchange(ids, zeros + bytes_down, zeros, zeros, zeros))
        return Resources(
            download=self._system.latency + down,
            training=self._seconds(Exchange(ids, zeros, zeros, samples, zeros)),
            upload=self._seconds(Exchange(ids, zeros, zeros, zeros, zeros + bytes_up)),
        )

    def wait_for_updates(
        self,
        ids: Ids,
        seconds: Floats,
        start: float,
        num_counted: int,
        lost_after: Floats | float = np.inf,
    ) -> tuple[Bools, float]:
        """Return whose updates arrive in time [n], and the seconds until the server continues.

        The server requests the updates `start` seconds after the round has begun, and the clients
        `ids` take `seconds` [n] from then. The update of a client that leaves before it has
        finished is lost. A client leaves after `lost_after` [n] seconds, or when its device does.
        With over-selection only the first `num_counted` updates count, and ties are broken at
        random. The server continues after the last update that counts, when nothing
        more can arrive, or at the deadline, whichever is first.
        """
        leaving = np.full(len(ids), np.inf)
        if self._devices.presence is not None:
            leaving = self._devices.presence.of(ids).remaining(self._start + start)
        leaving = np.minimum(leaving, lost_after)
        deadline = np.inf if self._system.deadline is None else self._system.deadline
        arrived = (seconds <= leaving) & (seconds <= deadline)
        end = float(np.minimum(seconds, leaving).max(initial=0.0))
        if self._system.over_selection > 1 and np.count_nonzero(arrived) >= num_counted:
            # drawn client by client, so that a draw does not depend on who else is selected
            rngs = [
                self._streams.generator(Purpose.ARRIVAL_ORDER, self._round, int(i)) for i in ids
            ]
            draws = np.array([rng.random() for rng in rngs])
            # `lexsort` sorts by its last key: by arrival, and by the draws among ties
            first = np.lexsort((draws, np.where(arrived, seconds, np.inf)))[:num_counted]
            arrived = np.isin(np.arange(len(ids)), first)
            end = float(seconds[first].max(initial=0.0))
        return arrived, min(end, deadline)


class SimulatedClock:
    """The simulated time of a run. It draws the devices once, and makes the clocks of rounds."""

    def __init__(
        self, system: System, num_clients: int, num_counted: int, streams: Streams
    ) -> None:
        """`num_counted` is K, the number of updates that count if more clients are selected."""
        self.system = system
        self.num_counted = num_counted
        self._streams = streams
        self.devices = system.devices.draw(num_clients, streams.generator(Purpose.DEVICES))

    def present(self, now: float) -> Bools | None:
        """Return which clients can be reached `now` seconds after the start of the run [N]; None:
        all clients can always be reached."""
        presence = self.devices.presence
        return None if presence is None else presence.remaining(now) > 0

    def round(self, round: int, start: float) -> RoundClock:
        """Return the clock of `round` (from 1), which begins `start` seconds after the run's
        start."""
        return RoundClock(self.system, self.devices, self._streams, round, start)
