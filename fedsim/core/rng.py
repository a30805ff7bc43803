"""Keyed random streams: every draw depends only on the seed, a purpose and a key (such as the round
and the client), and never on earlier draws.

Runs with equal seeds therefore have the same draws whatever their selectors draw, so that selectors
can be compared in pairs of runs. A run needs no saved generator to resume. A job has the same draws
alone, in a sweep, and in lanes (several runs in one process). fedsim uses no global generator.

`seed_words` computes `numpy.random.SeedSequence` for many keys at once
(numpy/random/bit_generator.pyx, after O'Neill's seed_seq_fe; stable by NEP 19). It mixes 32-bit
words of entropy into a pool of four words, and makes the words of the generator's state from the
pool.
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
    """The purpose of a random stream. The numbers are part of every result: never reuse or change
    one."""

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
    PARTIAL_WORK = 24
    LOST_CLIENTS = 25
    IMPERFECT = 31
    LABEL_NOISE = 32
    RANDOM_UPDATE = 33
    PRIVACY = 34
    AUGMENT = 41
    REPLAY = 51


@dataclass(frozen=True)
class Streams:
    """The random streams of a run. The partition and the initial model may have seeds of their own;
    None: the seed of the run."""

    seed: int
    partition_seed: int | None = None
    init_seed: int | None = None

    def _entropy(self, purpose: Purpose, key: tuple[int, ...]) -> tuple[int, ...]:
        """Return the numbers that define a stream: the seed for this purpose, the purpose and the
        key."""
        seed = None
        if purpose in (Purpose.PARTITION, Purpose.SERVER_SPLIT, Purpose.HOLDOUT):
            seed = self.partition_seed
        elif purpose == Purpose.INIT:
            seed = self.init_seed
        return (self.seed if seed is None else seed, int(purpose), *key)

    def generator(self, purpose: Purpose, *key: int) -> np.random.Generator:
        """Return a new generator for `purpose` and `key`, for example (round, client)."""
        sequence = np.random.SeedSequence(self._entropy(purpose, key))
        return np.random.Generator(np.random.PCG64(sequence))

    def key(self, purpose: Purpose, *key: int) -> int:
        """Return a 63-bit integer for `purpose` and `key`, to seed other generators (torch,
        counter-based masks)."""
        sequence = np.random.SeedSequence(self._entropy(purpose, key))
        return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))

    def generators(self, purpose: Purpose, *key: int, last: Ints) -> Iterator[np.random.Generator]:
        """Yield `generator(purpose, *key, i)` for each i of `last` [n].

        100 of them take about a quarter of the time. All are one object whose state changes: use
        each before the next one.
        """
        bits = np.random.PCG64(0)
        generator = np.random.Generator(bits)
        state = bits.state
        words = seed_words(self._entropy(purpose, key), last, 4)
        for high, low, increment_high, increment_low in words.tolist():
            # PCG64's seeding: two steps of its linear congruential generator
            increment = (increment_high << 65 | increment_low << 1 | 1) & MASK_128
            start = increment + (high << 64 | low)
            position = start * PCG_MULTIPLIER + increment & MASK_128
            state["state"] = {"state": position, "inc": increment}
            bits.state = state
            yield generator

    def keys(self, purpose: Purpose, *key: int, last: Ints) -> Ints:
        """Return `key(purpose, *key, i)` for each i of `last` [n]."""
        words = seed_words(self._entropy(purpose, key), last, 1)[:, 0]
        return (words >> np.uint64(1)).astype(np.int64)


# The constants of numpy/random/bit_generator.pyx, under their names there, and those of PCG64.
POOL_SIZE = 4
SHIFT = np.uint32(16)
INIT_A, MULT_A = 0x43B0D7E5, 0x931E8875
INIT_B, MULT_B = 0x8B51F9DD, 0x58F38DED
MIX_LEFT, MIX_RIGHT = np.uint32(0xCA01F9DD), np.uint32(0x4973F715)
PCG_MULTIPLIER = 0x2360ED051FC65DA44385DF649FCCF645
MASK_128 = 2**128 - 1

Words = NDArray[np.uint32]


def seed_words(first: Sequence[int], last: Ints, count: int) -> NDArray[np.uint64]:
    """Return `SeedSequence((*first, i)).generate_state(count, np.uint64)` for each i of `last` [n],
    as [n, count]. Each i must lie in [0, 2^32)."""
    # 1. Words of entropy [words, n]: those of `first`, the lowest 32 bits of each first, then i
    known = []
    for number in first:
        for shift in range(0, max(number.bit_length(), 1), 32):
            known.append(number >> shift & 0xFFFFFFFF)
    num_known = len(known)
    entropy = np.zeros((max(num_known + 1, POOL_SIZE), len(last)), np.uint32)
    entropy[:num_known] = np.array(known, np.uint32)[:, None]
    entropy[num_known] = last

    # 2. Mix each word of the pool, and then of the remaining entropy, into the (other) pool words
    constants = _powers(INIT_A, MULT_A, POOL_SIZE * len(entropy))
    pool = _hashed(entropy[:POOL_SIZE], constants[: POOL_SIZE + 1])
    used = POOL_SIZE
    for source in range(len(entropy)):
        targets = np.arange(POOL_SIZE) != source
        num_targets = targets.sum()
        word = pool[source] if source < POOL_SIZE else entropy[source]
        hashed = _hashed(word, constants[used : used + num_targets + 1])
        mixed = MIX_LEFT * pool[targets] - MIX_RIGHT * hashed
        pool[targets] = mixed ^ mixed >> SHIFT
        used += num_targets

    # 3. Words of state from the pool, two of 32 bits for each of 64
    cycled = pool[np.arange(2 * count) % POOL_SIZE]
    words = _hashed(cycled, _powers(INIT_B, MULT_B, 2 * count))
    return np.ascontiguousarray(words.T, "<u4").view("<u8")


def _powers(start: int, factor: int, count: int) -> Words:
    """Return start factor^i modulo 2^32 for i = 0..count."""
    return np.cumprod([start, *[factor] * count], dtype=np.uint32)


def _hashed(words: Words, constants: Words) -> Words:
    """Hash `words` [n] with each pair of consecutive constants, or row i of `words` with pair i
    [len(constants) - 1, n]."""
    hashed = (words ^ constants[:-1, None]) * constants[1:, None]
    hashed ^= hashed >> SHIFT
    return hashed


class UniformDraws(TorchDispatchMode):
    """A context in which `Tensor.uniform_(a, b)` on a CPU computes a + (b - a) u in float64, with
    torch's own random u in [0, 1).

    New models, whose weights torch draws by `uniform_`, are then the same on processors with and
    without fused multiply-adds.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports its compiler, which takes seconds

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.uniform_.default:
            values = args[0]
            if not values.is_cuda and values.dtype.itemsize >= 4:
                return _uniform(*args, **kwargs)
        return func(*args, **kwargs)


def _uniform(values: Tensor, low: float = 0.0, high: float = 1.0, **kwargs: Any) -> Tensor:
    """Fill `values` as `UniformDraws` says; bounds are rounded to the type of `values` first."""
    a = torch.tensor(low, dtype=values.dtype)
    b = torch.tensor(high, dtype=values.dtype)
    values.uniform_(0.0, 1.0, **kwargs)
    return values.copy_(values.double().mul_(b - a).add_(a))
