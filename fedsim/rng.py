"""Keyed random streams: every draw is a function of (seed, purpose, key), never of what was drawn before.

Selectors are therefore compared in pairs at equal seeds, a run needs no saved generator to resume, and a job is the
same alone, as one of a sweep, or trained in one batch with others. Nothing in fedsim touches a global generator.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from fedsim.seeds import pcg64_states, seed_words


class Purpose(IntEnum):
    """What a stream is for. The numbers are part of every result: never reuse or change one."""

    PARTITION = 1
    INIT = 2
    SELECT = 3
    TRAIN = 4
    SKETCH = 5
    AVAILABILITY = 6
    DROPOUT = 7
    LOSS_BATCH = 8
    SERVER_SPLIT = 9
    HOLDOUT = 10
    DEVICES = 21
    DEVICE_VARIATION = 22
    ARRIVAL_ORDER = 23


@dataclass(frozen=True)
class Streams:
    """The run's root seed; partition and initial model may have seeds of their own (None: the root seed)."""

    seed: int
    partition_seed: int | None = None
    init_seed: int | None = None

    def _root(self, purpose: Purpose) -> int:
        own = {
            Purpose.PARTITION: self.partition_seed,
            Purpose.SERVER_SPLIT: self.partition_seed,
            Purpose.HOLDOUT: self.partition_seed,
            Purpose.INIT: self.init_seed,
        }.get(purpose)
        return self.seed if own is None else own

    def generator(self, purpose: Purpose, *key: int) -> np.random.Generator:
        """A fresh generator for `purpose` and `key` (for TRAIN: round, client)."""
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence((self._root(purpose), int(purpose), *key))))

    def key(self, purpose: Purpose, *key: int) -> int:
        """A 63-bit integer for `purpose` and `key`, for other generators (torch, counter-based masks)."""
        words = np.random.SeedSequence((self._root(purpose), int(purpose), *key)).generate_state(1, np.uint64)
        return int(words[0] >> np.uint64(1))

    def generators(self, purpose: Purpose, *key: int, last: NDArray[np.int64]) -> Iterator[np.random.Generator]:
        """`generator(purpose, *key, i)` for each i of `last` [n], a tenth of the time of that. It is one object, whose
        state is set anew: to be used before the next."""
        bits = np.random.PCG64(0)
        generator = np.random.Generator(bits)
        state = bits.state
        for own, increment in pcg64_states(seed_words((self._root(purpose), int(purpose), *key), last, 4)):
            state["state"] = {"state": own, "inc": increment}
            bits.state = state
            yield generator

    def keys(self, purpose: Purpose, *key: int, last: NDArray[np.int64]) -> NDArray[np.int64]:
        """`key(purpose, *key, i)` for each i of `last` [n]."""
        words = seed_words((self._root(purpose), int(purpose), *key), last, 1)[:, 0]
        return (words >> np.uint64(1)).astype(np.int64)
