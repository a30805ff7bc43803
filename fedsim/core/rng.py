"""Keyed random streams: every draw is a function of (seed, purpose, key), never of what was drawn
before.

Selectors are therefore compared in pairs at equal seeds, a run needs no saved generator to resume,
and a job is the same alone, as one of a sweep, or trained in one batch with others. Nothing in
fedsim touches a global generator.

`seed_words` is `numpy.random.SeedSequence` (numpy/random/bit_generator.pyx, after O'Neill's seed_seq_fe, stable by NEP
19) for many keys at once: it mixes 32-bit words of entropy into a pool of four, and makes words of state from it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedsim.core.arrays import Ints


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
    IMPERFECT = 31
    LABEL_NOISE = 32
    RANDOM_UPDATE = 33
    PRIVACY = 34
    REPLAY = 51


@dataclass(frozen=True)
class Streams:
    """The run's root seed; partition and initial model may have seeds of their own (None: the root
    seed)."""

    seed: int
    partition_seed: int | None = None
    init_seed: int | None = None

    def _root(self, purpose: Purpose) -> int:
        own = None
        if purpose in (Purpose.PARTITION, Purpose.SERVER_SPLIT, Purpose.HOLDOUT):
            own = self.partition_seed
        elif purpose == Purpose.INIT:
            own = self.init_seed
        return self.seed if own is None else own

    def generator(self, purpose: Purpose, *key: int) -> np.random.Generator:
        """A fresh generator for `purpose` and `key` (for TRAIN: round, client)."""
        return np.random.Generator(
            np.random.PCG64(np.random.SeedSequence((self._root(purpose), int(purpose), *key)))
        )

    def key(self, purpose: Purpose, *key: int) -> int:
        """A 63-bit integer for `purpose` and `key`, for other generators (torch, counter-based
        masks)."""
        words = np.random.SeedSequence((self._root(purpose), int(purpose), *key)).generate_state(
            1, np.uint64
        )
        return int(words[0] >> np.uint64(1))

    def generators(self, purpose: Purpose, *key: int, last: Ints) -> Iterator[np.random.Generator]:
        """`generator(purpose, *key, i)` for each i of `last` [n], a tenth of the time of that. It
        is one object, whose state is set anew: to be used before the next."""
        bits = np.random.PCG64(0)
        generator = np.random.Generator(bits)
        state = bits.state
        words = seed_words((self._root(purpose), int(purpose), *key), last, 4)
        for high, low, increment_high, increment_low in words.tolist():
            increment = (increment_high << 65 | increment_low << 1 | 1) & MASK_128
            own = (increment + (high << 64 | low)) * PCG_MULTIPLIER + increment & MASK_128
            state["state"] = {"state": own, "inc": increment}
            bits.state = state
            yield generator

    def keys(self, purpose: Purpose, *key: int, last: Ints) -> Ints:
        """`key(purpose, *key, i)` for each i of `last` [n]."""
        words = seed_words((self._root(purpose), int(purpose), *key), last, 1)[:, 0]
        return (words >> np.uint64(1)).astype(np.int64)


POOL, SHIFT = 4, np.uint32(16)
INIT_A, MULT_A = 0x43B0D7E5, 0x931E8875
INIT_B, MULT_B = 0x8B51F9DD, 0x58F38DED
MIX_LEFT, MIX_RIGHT = np.uint32(0xCA01F9DD), np.uint32(0x4973F715)
PCG_MULTIPLIER, MASK_128 = 0x2360ED051FC65DA44385DF649FCCF645, 2**128 - 1

Words = NDArray[np.uint32]


def seed_words(first: Sequence[int], last: Ints, count: int) -> NDArray[np.uint64]:
    """`SeedSequence((*first, i)).generate_state(count, np.uint64)` for each i of `last` [n] in [0,
    2^32) [n, count]."""
    known = [
        number >> shift & 0xFFFFFFFF
        for number in first
        for shift in range(0, max(number.bit_length(), 1), 32)
    ]
    entropy = np.zeros((max(len(known) + 1, POOL), len(last)), np.uint32)
    entropy[: len(known)] = np.array(known, np.uint32)[:, None]
    entropy[len(known)] = last
    constants, used = _powers(INIT_A, MULT_A, POOL * len(entropy)), POOL
    pool = _hashed(entropy[:POOL], constants[: POOL + 1])
    for source in range(len(entropy)):
        others = np.arange(POOL) != source
        word = pool[source] if source < POOL else entropy[source]
        hashed = _hashed(word, constants[used : used + others.sum() + 1])
        mixed = MIX_LEFT * pool[others] - MIX_RIGHT * hashed
        pool[others] = mixed ^ mixed >> SHIFT
        used += others.sum()
    words = _hashed(pool[np.arange(2 * count) % POOL], _powers(INIT_B, MULT_B, 2 * count))
    return np.ascontiguousarray(words.T, "<u4").view("<u8")


def _powers(start: int, factor: int, count: int) -> Words:
    return np.cumprod([start, *[factor] * count], dtype=np.uint32)


def _hashed(words: Words, constants: Words) -> Words:
    """One hash of `words`, or of its rows, for each of the constants but the last one
    [len(constants) - 1, n]."""
    hashed = (words ^ constants[:-1, None]) * constants[1:, None]
    hashed ^= hashed >> SHIFT
    return hashed


class UniformDraws(TorchDispatchMode):
    """While it is entered, `Tensor.uniform_(a, b)` on a CPU is a + (b - a) u in float64 with
    torch's own u in [0, 1), so that models are the same on processors with and without fused
    multiply-adds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would import its compiler to keep it out of here: seconds, and nothing is compiled
        # here
        return False

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if (
            func is torch.ops.aten.uniform_.default
            and not args[0].is_cuda
            and args[0].dtype.itemsize >= 4
        ):
            return _uniform(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _uniform(values: Tensor, low: float = 0.0, high: float = 1.0, **kwargs: Any) -> Tensor:
    a, b = (torch.tensor(bound, dtype=values.dtype) for bound in (low, high))
    values.uniform_(0.0, 1.0, **kwargs)
    return values.copy_(values.double().mul_(b - a).add_(a))
