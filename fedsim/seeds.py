"""The words of many of numpy's seed sequences at once, and the states of the PCG64 generators that are made of them.

`numpy.random.SeedSequence` (numpy/random/bit_generator.pyx, after O'Neill's seed_seq_fe) mixes 32-bit words of entropy
into a pool of four, and makes words of state from it. Both are stable by numpy's policy (NEP 19); tests/test_streams.py
compares them with numpy.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

POOL, SHIFT, MASK = 4, np.uint32(16), 2**32 - 1
INIT_A, MULT_A, INIT_B, MULT_B = 0x43B0D7E5, 0x931E8875, 0x8B51F9DD, 0x58F38DED
MIX_LEFT, MIX_RIGHT = np.uint32(0xCA01F9DD), np.uint32(0x4973F715)
PCG_MULTIPLIER, MASK_128 = 0x2360ED051FC65DA44385DF649FCCF645, 2**128 - 1

Words = NDArray[np.uint32]


class _Hash:
    """The hash of a word, whose constants are others at each call."""

    def __init__(self, constant: int, multiplier: int) -> None:
        self._constant, self._multiplier = constant, multiplier

    def __call__(self, words: Words) -> Words:
        hashed = words ^ np.uint32(self._constant)
        self._constant = self._constant * self._multiplier & MASK
        hashed *= np.uint32(self._constant)
        hashed ^= hashed >> SHIFT
        return hashed


def _mixed(a: Words, b: Words) -> Words:
    result: Words = MIX_LEFT * a - MIX_RIGHT * b
    result ^= result >> SHIFT
    return result


def _words_of(number: int) -> list[Words]:
    """A whole number >= 0 as words of 32 bits, the lowest first, each an array of one."""
    shifts = range(0, max(number.bit_length(), 1), 32)
    return [np.array([number >> shift & MASK], np.uint32) for shift in shifts]


def seed_words(first: Sequence[int], last: NDArray[np.int64], count: int) -> NDArray[np.uint64]:
    """`SeedSequence((*first, i)).generate_state(count, np.uint64)` for each i of `last` [n] in [0, 2^32) [n, count]."""
    entropy = [word for number in first for word in _words_of(number)] + [last.astype(np.uint32)]
    mix = _Hash(INIT_A, MULT_A)
    padding = [np.zeros(1, np.uint32)] * (POOL - len(entropy))
    pool = [mix(word) for word in [*entropy, *padding][:POOL]]
    for source in range(POOL):
        for target in range(POOL):
            if source != target:
                pool[target] = _mixed(pool[target], mix(pool[source]))
    for word in entropy[POOL:]:
        pool = [_mixed(old, mix(word)) for old in pool]
    made = _Hash(INIT_B, MULT_B)
    words = np.empty((len(last), 2 * count), "<u4")
    for column in range(2 * count):
        words[:, column] = made(pool[column % POOL])
    return words.view("<u8")


def pcg64_states(words: NDArray[np.uint64]) -> Iterator[tuple[int, int]]:
    """`state` and `inc` of `PCG64(seed_sequence).state["state"]` for sequences that make these words [n, 4]."""
    for high, low, increment_high, increment_low in words.tolist():
        increment = (increment_high << 65 | increment_low << 1 | 1) & MASK_128
        yield (increment + (high << 64 | low)) * PCG_MULTIPLIER + increment & MASK_128, increment
