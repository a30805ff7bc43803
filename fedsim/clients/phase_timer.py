"""The wall time of a round, split by phase: selection, questions to clients, training, aggregation
and evaluation."""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from fedsim.core.record import PHASES, Phase


class PhaseTimer:
    """A stopwatch with one total for each phase. An inner phase pauses the outer one.

    `PHASES` defines the phases. The round loop makes one a round and enters its phases; `Clients`
    adds the inner phases `ask` and `train`.

    On a GPU the host does not wait at the borders of phases. The GPU notes the time when it reaches
    a border (CUDA events), so queued work counts for the phase that queued it. The totals add up to
    the host's time. With another clock than `time.perf_counter`, as for runs in lanes (several runs
    in one process), the host waits at every border.
    """

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        self.device = device
        self.now = now
        self._seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        self._phase: Phase | None = None
        self._phase_start = 0.0
        self._events: DeviceTimes | None = None
        if device.type == "cuda" and now is time.perf_counter:
            self._events = DeviceTimes(device)

    @property
    def seconds(self) -> dict[Phase, float]:
        """The seconds of each phase so far. Reading them ends the present phase."""
        if self._phase is not None:
            self.enter(None)
        if self._events is not None:
            for phase, seconds in self._events.intervals():
                self._seconds[phase] += seconds
        return self._seconds

    @contextmanager
    def __call__(self, phase: Phase) -> Iterator[None]:
        """Time a block of code as `phase`; afterwards the outer phase continues."""
        outer_phase = self._phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(outer_phase)

    def enter(self, phase: Phase | None) -> None:
        """End the present phase and begin `phase`; None: no phase."""
        ended_phase = self._phase
        self._phase = phase
        if self._events is not None:
            self._events.add_border(ended_phase)
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = self.now()
        if ended_phase is not None:
            self._seconds[ended_phase] += now - self._phase_start
        self._phase_start = now


class DeviceTimes:
    """The time between borders of phases, measured by events in the GPU's queue.

    The last interval is the host's time less all other intervals. The host therefore never waits
    for work that was queued after the results of the last phase, which it already has.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._borders: list[tuple[Phase | None, torch.cuda.Event, float]] = []
        """The phase that ended at each border, the GPU's event, and the host's time."""

    def add_border(self, ended_phase: Phase | None) -> None:
        """Mark the end of a phase; None: no phase was open."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        self._borders.append((ended_phase, event, time.perf_counter()))

    def intervals(self) -> list[tuple[Phase, float]]:
        """Return the phases since the last call, with their seconds.

        The host waits until the GPU has passed the last border but one.
        """
        borders = self._borders
        self._borders = []
        if len(borders) < 2:
            return []
        events = [event for _, event, _ in borders[:-1]]
        if not events[-1].query():
            events[-1].synchronize()
        # `elapsed_time` is in milliseconds
        spans = [start.elapsed_time(end) / 1000 for start, end in itertools.pairwise(events)]
        host_seconds = borders[-1][2] - borders[0][2]
        spans.append(max(host_seconds - sum(spans), 0.0))
        intervals = []
        for (ended_phase, _, _), span in zip(borders[1:], spans, strict=True):
            if ended_phase is not None:
                intervals.append((ended_phase, span))
        return intervals
