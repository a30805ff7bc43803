"""What a round cost: who was contacted, trained and uploaded; bytes, samples, and seconds by phase.

*Contacted* (received a model), *trained* and *uploaded* are three numbers of clients; "participation ratio" means
uploaded / N. *Uploaded* are those whose model the server collected: the selected, and whoever's model a method collects
besides (everybody in GPFL's first round, FedCor's virtual round). Updates that clients send only to be compared
before the selection (PNCS), whole or not, are bytes and training, and no participation. Bytes are what would cross the
network (no protocol overhead); samples are those a client passes through its model. A training sample is one forward
and one backward pass.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from fedsim.core.record import PHASES, Phase


@dataclass
class Ledger:
    """One round's account. Only `Clients` and `Server` write to it."""

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
        return {
            name: len(value) if isinstance(value, set) else value
            for name, value in vars(self).items()
        }


class PhaseTimer:
    """Seconds by phase. A phase inside another one stops the outer one's time meanwhile.

    On a GPU, queued work is charged to the phase that asked for it, without waiting for it at the
    phases' borders: the GPU notes the time when it gets there (CUDA events), and the sum of all is
    the host's time. With another clock than `time.perf_counter` (runs side by side) the host waits
    at every border.
    """

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        self.device = device
        self.now = now
        self._seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        self._phase: Phase | None = None
        self._since = 0.0
        self._events = (
            DeviceTimes(device) if device.type == "cuda" and now is time.perf_counter else None
        )

    @property
    def seconds(self) -> dict[Phase, float]:
        """By phase, up to now; asking ends the present phase."""
        if self._phase is not None:
            self.enter(None)
        if self._events is not None:
            for phase, seconds in self._events.intervals():
                self._seconds[phase] += seconds
        return self._seconds

    @contextmanager
    def __call__(self, phase: Phase) -> Iterator[None]:
        outer = self._phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(outer)

    def enter(self, phase: Phase | None) -> None:
        """Charge the time since the last border to the present phase, and go on with `phase`."""
        ends, self._phase = self._phase, phase
        if self._events is not None:
            self._events.border(ends)
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = self.now()
        if ends is not None:
            self._seconds[ends] += now - self._since
        self._since = now


class DeviceTimes:
    """The time between borders of phases, by events in the GPU's queue of work.

    The last interval is what the others leave of the host's time, so that nothing is waited for
    behind the results of the last phase, which the host has.
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
        """Phases and seconds since the last call; waits for the last border but one, unless that is
        past."""
        borders, self._borders = self._borders, []
        if len(borders) < 2:
            return []
        events = [event for _, event, _ in borders[:-1]]
        if not events[-1].query():
            events[-1].synchronize()
        spans = [start.elapsed_time(end) / 1000 for start, end in itertools.pairwise(events)]
        whole = borders[-1][2] - borders[0][2]
        spans.append(max(whole - sum(spans), 0.0))
        return [
            (phase, span)
            for (phase, _, _), span in zip(borders[1:], spans, strict=True)
            if phase is not None
        ]
