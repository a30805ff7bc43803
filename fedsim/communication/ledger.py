"""What a round cost: who was contacted, trained and uploaded; bytes, samples, and seconds by phase.

*Contacted* (received a model), *trained* and *uploaded* are three numbers of clients; "participation ratio" means
uploaded / N. *Uploaded* are those whose model the server collected: the selected, and whoever's model a method collects
besides (everybody in GPFL's first round, FedCor's virtual round). Updates that clients send only to be compared
before the selection (PNCS), whole or not, are bytes and training, and no participation. Bytes are what would cross the
network (no protocol overhead); samples are those a client passes through its model. A training sample is one forward
and one backward pass.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch

Phase = Literal["select", "ask", "train", "aggregate", "evaluate"]
PHASES: tuple[Phase, ...] = ("select", "ask", "train", "aggregate", "evaluate")
"""What the server computes to select; what clients compute to answer its questions; local training, whoever asked for
it; aggregation; the test set."""

SCALAR_BYTES = 4


@dataclass
class Ledger:
    """One round's account. Only `Clients`, its `Transfers` and `Server` write to it."""

    contacted: set[int] = field(default_factory=set)
    trained: set[int] = field(default_factory=set)
    uploaded: set[int] = field(default_factory=set)
    bytes_down: int = 0
    bytes_up: int = 0
    forward_samples: int = 0
    train_samples: int = 0
    server_forward_samples: int = 0
    nonfinite_reports: int = 0


class Clock:
    """Seconds by phase. A phase inside another one stops the outer one's time meanwhile.

    Waits for the device at a phase's borders, so that queued work is charged where it belongs.
    """

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        self.device = device
        self.now = now
        self.seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        self._open: list[Phase] = []
        self._since = 0.0

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
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = self.now()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now
