"""What a round cost: who was contacted, trained and uploaded; bytes, samples, and seconds by phase.

*Contacted* (received a model), *trained* and *uploaded* are three numbers of clients; "participation ratio" means
uploaded / N. *Uploaded* are those whose model the server collected: the selected, and whoever's model a method collects
besides (everybody in GPFL's first round, FedCor's virtual round). Updates that clients send only to be compared
before the selection (PNCS), whole or not, are bytes and training, and no participation. Bytes are what would cross the
network (no protocol overhead); samples are those a client passes through its model. A training sample is one forward
and one backward pass.
"""

import functools
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedsim.clients.system import RoundClock
from fedsim.core.errors import FedsimError
from fedsim.core.record import PHASES, QUANTITIES, Phase, Quantity
from fedsim.core.types import Ids, Params, Work

SCALAR_BYTES = 4
NO_CLOCK = "this selector needs a simulated clock: set system=lognormal, say"


@dataclass
class Ledger:
    """One round's account. Only `Clients`, its `Transfers` and `Server` write to it."""

    contacted: set[int] = field(default_factory=set)
    trained: set[int] = field(default_factory=set)
    uploaded: set[int] = field(default_factory=set)
    bytes_down: int = 0
    forward_samples: int = 0
    train_samples: int = 0
    bytes_up: int = 0
    server_forward_samples: int = 0
    nonfinite_reports: int = 0

    @property
    def counts(self) -> dict[str, Any]:
        """As they stand in a `Record`."""
        return {name: len(value) if isinstance(value, set) else value for name, value in vars(self).items()}


class Exchange:
    """One request of the server to some clients, and their answers: what each receives, computes and sends.

    `seconds`: what it took each client of `work` on the simulated clock; None without one.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.seconds: NDArray[np.float64] | None = None
        self._ledger = ledger
        self._charges: list[tuple[Quantity, Ids, NDArray[np.int64]]] = []

    def charge(self, quantity: Quantity, ids: Iterable[int], amounts: int | Iterable[int]) -> None:
        """Add `amounts`, one for each of `ids` or the same for all, to what these clients do."""
        who = np.fromiter(ids, np.int64)
        many = np.full(len(who), amounts) if isinstance(amounts, int) else np.fromiter(amounts, np.int64, len(who))
        self._charges.append((quantity, who[many > 0], many[many > 0]))
        setattr(self._ledger, quantity, getattr(self._ledger, quantity) + int(many.sum()))

    @property
    def work(self) -> Work:
        """By client: those to whom anything was charged, ascending."""
        ids = np.unique(np.concatenate([np.empty(0, np.int64), *(who for _, who, _ in self._charges)]))
        sums: dict[str, Any] = {name: np.zeros(len(ids), np.int64) for name in QUANTITIES}
        for name, who, amounts in self._charges:
            np.add.at(sums[name], np.searchsorted(ids, who), amounts)
        return Work(ids, **sums)


class Transfers:
    """What crosses the network between the server and its clients about one version of the model, exchange by exchange.

    Nothing is sent twice: a client downloads the model once, and uploads each tensor of its update once.
    """

    def __init__(self, ledger: Ledger, params: Params, simulated: RoundClock | None) -> None:
        self._ledger = ledger
        self._simulated = simulated
        self._tensor_bytes = {name: t.numel() * t.element_size() for name, t in params.items()}
        self.model_bytes = sum(self._tensor_bytes.values())
        self._downloaded: set[int] = set()
        self._uploaded: dict[int, frozenset[str]] = {}
        self._bytes_of = functools.cache(self._total_bytes)  # of many clients that send the same
        self._collected: set[int] = set()

    @property
    def clock(self) -> RoundClock:
        """The simulated clock. Raises `FedsimError` where there is none."""
        if self._simulated is None:
            raise FedsimError(NO_CLOCK)
        return self._simulated

    @contextmanager
    def open(self, *, answered: bool = True) -> Iterator[Exchange]:
        """A new exchange; its time passes when all of it has been charged. `answered`: the server waits for it."""
        exchange = Exchange(self._ledger)
        try:
            yield exchange
        finally:
            if self._simulated is not None:
                exchange.seconds = self._simulated.spend(exchange.work, answered=answered)

    def seconds(self, exchange: Exchange, ids: Ids) -> NDArray[np.float64]:
        """What an exchange that has ended took each of `ids` [len(ids)]; 0 for those whom it asked nothing.

        Raises `FedsimError` without a simulated clock.
        """
        if exchange.seconds is None:
            raise FedsimError(NO_CLOCK)
        found = dict(zip(exchange.work.ids.tolist(), exchange.seconds.tolist(), strict=True))
        return np.array([found.get(int(i), 0.0) for i in ids], dtype=np.float64)

    def download(self, exchange: Exchange, ids: Iterable[int]) -> None:
        """Each of `ids` receives the model, unless it has."""
        new = {int(i) for i in ids} - self._downloaded
        self._downloaded |= new
        self._ledger.contacted |= new
        exchange.charge("bytes_down", new, self.model_bytes)

    def upload_numbers(self, exchange: Exchange, ids: Iterable[int], each: int) -> None:
        """So many numbers of four bytes from each of `ids`."""
        exchange.charge("bytes_up", ids, each * SCALAR_BYTES)

    def upload_tensors(self, exchange: Exchange, ids: Iterable[int], names: Collection[str]) -> None:
        """The tensors `names` of the update of each of `ids`, but for those sent before."""
        wanted, asked = [int(i) for i in ids], frozenset(names)
        exchange.charge("bytes_up", wanted, [self._bytes_to_send(i, asked) for i in wanted])

    def _bytes_to_send(self, client: int, names: frozenset[str]) -> int:
        sent = self._uploaded.get(client)
        missing = names if sent is None else names - sent
        self._uploaded[client] = names if sent is None else sent | names
        return self._bytes_of(missing)

    def _total_bytes(self, names: frozenset[str]) -> int:
        return sum(self._tensor_bytes[name] for name in names)

    def upload_updates(self, exchange: Exchange, ids: Ids, extra_numbers: int) -> None:
        """The whole update of each of `ids`, and so many numbers with it; they count as uploaded."""
        new = {int(i) for i in ids} - self._collected
        self._collected |= new
        self._ledger.uploaded.update(new)
        self.upload_numbers(exchange, new, extra_numbers)
        self.upload_tensors(exchange, ids, self._tensor_bytes)


class Clock:
    """Seconds by phase. A phase inside another one stops the outer one's time meanwhile.

    On a GPU, queued work is charged to the phase that asked for it, without waiting for it at the phases' borders: the
    GPU notes the time when it gets there (CUDA events), and the sum of all is the host's time. With another clock than
    `time.perf_counter` (runs side by side) the host waits at every border.
    """

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        self.device = device
        self.now = now
        self._seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        self._open: list[Phase] = []
        self._since = 0.0
        self._events = DeviceTimes(device) if device.type == "cuda" and now is time.perf_counter else None

    @property
    def seconds(self) -> dict[Phase, float]:
        """By phase, up to the last border of one. On a GPU, to be asked for once, when no phase is open."""
        if self._events is not None:
            for phase, seconds in self._events.intervals():
                self._seconds[phase] += seconds
        return self._seconds

    @contextmanager
    def __call__(self, phase: Phase) -> Iterator[None]:
        self._charge()
        self._open.append(phase)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def _charge(self) -> None:
        """The time since the last border to the phase that was open."""
        if self._events is not None:
            self._events.border(self._open[-1] if self._open else None)
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = self.now()
        if self._open:
            self._seconds[self._open[-1]] += now - self._since
        self._since = now


class DeviceTimes:
    """The time between borders of phases, by events in the GPU's queue of work.

    The last interval is what the others leave of the host's time, so that nothing is waited for behind the results of
    the last phase, which the host has.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._borders: list[tuple[Phase | None, torch.cuda.Event, float]] = []

    def border(self, ends: Phase | None) -> None:
        """A border, at which the phase `ends` if there is one that was open."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        self._borders.append((ends, event, time.perf_counter()))

    def intervals(self) -> list[tuple[Phase, float]]:
        """Phases and seconds since the last call; waits for the last border but one, unless that is past."""
        borders, self._borders = self._borders, []
        if len(borders) < 2:
            return []
        events = [event for _, event, _ in borders[:-1]]
        if not events[-1].query():
            events[-1].synchronize()
        spans = [start.elapsed_time(end) / 1000 for start, end in itertools.pairwise(events)]
        whole = borders[-1][2] - borders[0][2]
        spans.append(max(whole - sum(spans), 0.0))
        return [(phase, span) for (phase, _, _), span in zip(borders[1:], spans, strict=True) if phase is not None]


@dataclass(frozen=True)
class Resources:
    """Seconds of n clients [n]: to be reached and download the model, to train locally, to upload the update.

    Those of a device as it is on most days, without the variation of the round.
    """

    download: NDArray[np.float64]
    training: NDArray[np.float64]
    upload: NDArray[np.float64]


def resources_of(clock: RoundClock, ids: Ids, samples: NDArray[np.int64], model_bytes: int) -> Resources:
    """Those of clients `ids` who train on `samples` [n] in a round, all passes counted."""
    nothing, model = np.zeros(len(ids), np.int64), np.full(len(ids), model_bytes)
    return Resources(
        download=clock.latency + clock.nominal(Work(ids, model, nothing, nothing, nothing)),
        training=clock.nominal(Work(ids, nothing, nothing, samples, nothing)),
        upload=clock.nominal(Work(ids, nothing, nothing, nothing, model)),
    )
