"""Keyed random streams: every draw depends only on the seed, a purpose and a key, and never on
earlier draws.

A key is a tuple of whole numbers >= 0, such as (round, client). Runs with equal seeds have the same
draws whatever their selectors draw, so that selectors can be compared in pairs of runs. A run needs
no saved generator to resume. A job has the same draws alone, in a sweep, and in lanes (several runs
in one process). fedsim uses no global generator.

`seed_words` computes `numpy.random.SeedSequence` for many keys at once
(numpy/random/bit_generator.pyx, after O'Neill's seed_seq_fe; stable by NEP 19). A seed sequence
turns entropy, which is a list of 32-bit words, into the state of a generator. It mixes the words of
entropy into a pool of four words. Then it makes the words of the state from the pool.
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
    """The random streams of a run.

    The partition and the initial model may have seeds of their own. If these are None, they have
    the seed of the run.
    """

    seed: int
    partition_seed: int | None = None
    init_seed: int | None = None

    def _entropy(self, purpose: Purpose, key: tuple[int, ...]) -> tuple[int, ...]:
        """Return the numbers that define a stream: the purpose's seed, the purpose, and the key."""
        seed = None
        if purpose in (Purpose.PARTITION, Purpose.SERVER_SPLIT, Purpose.HOLDOUT):
            seed = self.partition_seed
        elif purpose == Purpose.INIT:
            seed = self.init_seed
        return (self.seed if seed is None else seed, int(purpose), *key)

    def generator(self, purpose: Purpose, *key: int) -> np.random.Generator:
        """Return a new generator for `purpose` and `key`."""
        sequence = np.random.SeedSequence(self._entropy(purpose, key))
        return np.random.Generator(np.random.PCG64(sequence))

    def key(self, purpose: Purpose, *key: int) -> int:
        """Return a random whole number in [0, 2^63) for `purpose` and `key`.

        It seeds generators of other libraries, such as torch, and masks made from a counter.
        """
        sequence = np.random.SeedSequence(self._entropy(purpose, key))
        return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))

    def generators(self, purpose: Purpose, *key: int, last: Ints) -> Iterator[np.random.Generator]:
        """Yield `generator(purpose, *key, i)` for each i of `last` [n].

        For 100 keys, this takes a quarter of the time of 100 calls of `generator`. All generators
        are one object whose state changes, so draw from each before you take the next one.
        """
        bits = np.random.PCG64(0)
        generator = np.random.Generator(bits)
        state = bits.state
        words = seed_words(self._entropy(purpose, key), last, 4)
        for high, low, increment_high, increment_low in words.tolist():
            # Seed PCG64: the increment of its linear congruential generator is odd, and the state
            # is one step after the sum of the increment and the start.
            start = (high << 64) | low
            increment = ((increment_high << 65) | (increment_low << 1) | 1) & MASK_128
            position = ((increment + start) * PCG_MULTIPLIER + increment) & MASK_128
            state["state"] = {"state": position, "inc": increment}
            bits.state = state
            yield generator

    def keys(self, purpose: Purpose, *key: int, last: Ints) -> Ints:
        """Return `key(purpose, *key, i)` for each i of `last` [n]."""
        words = seed_words(self._entropy(purpose, key), last, 1)[:, 0]
        return (words >> np.uint64(1)).astype(np.int64)


# The constants of numpy/random/bit_generator.pyx under their names there, and those of PCG64.
WORD_BITS = 32
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
    # 1. The words of entropy [words, n]: those of `first`, the same for all, then i, then zeros.
    first_words = []
    for number in first:
        num_bits = max(number.bit_length(), 1)
        for shift in range(0, num_bits, WORD_BITS):
            first_words.append((number >> shift) % 2**WORD_BITS)
    num_first = len(first_words)
    entropy = np.zeros((max(num_first + 1, POOL_SIZE), len(last)), np.uint32)
    entropy[:num_first] = np.array(first_words, np.uint32)[:, None]
    entropy[num_first] = last

    # 2. The pool [4, n]: hashed words of entropy. Each hash takes the next constant of a sequence.
    constants = _powers(INIT_A, MULT_A, POOL_SIZE * len(entropy))
    pool = _hashed(entropy[:POOL_SIZE], constants[: POOL_SIZE + 1])
    num_hashes = POOL_SIZE
    # Mix each word of the pool into the three others, and all other entropy into all four words.
    for source in range(len(entropy)):
        is_target = np.arange(POOL_SIZE) != source
        num_targets = is_target.sum()
        word = pool[source] if source < POOL_SIZE else entropy[source]
        hashed = _hashed(word[None], constants[num_hashes : num_hashes + num_targets + 1])
        num_hashes += num_targets
        mixed = MIX_LEFT * pool[is_target] - MIX_RIGHT * hashed
        pool[is_target] = mixed ^ (mixed >> SHIFT)

    # 3. The words of the state: two of 32 bits for each of 64.
    cycled = pool[np.arange(2 * count) % POOL_SIZE]
    state = _hashed(cycled, _powers(INIT_B, MULT_B, 2 * count))
    return np.ascontiguousarray(state.T, "<u4").view("<u8")


def _powers(start: int, factor: int, count: int) -> Words:
    """Return start * factor^i modulo 2^32 for i = 0..count."""
    return np.cumprod([start, *[factor] * count], dtype=np.uint32)


def _hashed(words: Words, constants: Words) -> Words:
    """Hash each row i of `words` [m, n] with the constants i and i + 1 of `constants` [m + 1].

    A single row [1, n] is hashed m times. The result is [m, n].
    """
    hashed = (words ^ constants[:-1, None]) * constants[1:, None]
    hashed ^= hashed >> SHIFT
    return hashed


class UniformDraws(TorchDispatchMode):
    """A context in which `Tensor.uniform_(a, b)` gives the same numbers on every CPU.

    It computes a + (b - a) u in float64, with torch's own random u in [0, 1). torch draws the
    weights of new models by `uniform_`. Without this context, they would depend on whether the
    processor has fused multiply-adds.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the default, True, makes torch import its compiler, which takes seconds

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
    """Fill `values` as `UniformDraws` says. The bounds are first rounded to their type."""
    a = torch.tensor(low, dtype=values.dtype)
    b = torch.tensor(high, dtype=values.dtype)
    values.uniform_(0.0, 1.0, **kwargs)
    return values.copy_(values.double().mul_(b - a).add_(a))
