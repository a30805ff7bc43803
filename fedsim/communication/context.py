"""What holds for one round, whichever version of the model is asked about."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsim.communication.signals import Signal, require
from fedsim.rng import Purpose, Streams
from fedsim.types import Ids


@dataclass(frozen=True)
class RoundContext:
    """The round's number (1-based), its local learning rate, the clients that can be reached, the signals that the
    selector declares, the run's random streams, and whether in no earlier round clients could be reached."""

    round: int
    lr: float
    available: Ids
    needs: frozenset[Signal]
    streams: Streams
    first: bool

    def require(self, signal: Signal) -> None:
        """Raise `UndeclaredSignalError` unless the selector declares `signal`."""
        require(signal, self.needs)

    def shuffled(self, positions: NDArray[np.int64], client: int) -> NDArray[np.int64]:
        """A client's `positions` in a random order of this round, from which mini-batches are cut."""
        return self.streams.generator(Purpose.LOSS_BATCH, self.round, int(client)).permutation(positions)

    @property
    def compression_seed(self) -> int:
        """The seed that all clients use to compress what they send in this round."""
        return self.streams.key(Purpose.SKETCH, self.round)
