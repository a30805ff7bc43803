"""Dropout keys of local steps, from (seed, DROPOUT, round, client) and the step alone."""

import numpy as np
from numpy.typing import NDArray

from fedsim.rng import Purpose, Streams
from fedsim.types import Ids

_STRIDE = 0x2545F4914F6CDD1D


def step_keys(streams: Streams, round: int, ids: Ids, num_steps: int) -> NDArray[np.int64]:
    """One 63-bit key per step and client [num_steps, len(ids)]."""
    base = np.array([streams.key(Purpose.DROPOUT, round, int(i)) for i in ids], dtype=np.uint64)
    strides = np.arange(num_steps, dtype=np.uint64) * np.uint64(_STRIDE)
    keys = (base[None, :] + strides[:, None]) & np.uint64(2**63 - 1)
    return keys.astype(np.int64)
