"""The K of M items with the lowest mean pairwise similarity."""

import itertools
import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MOST_SUBSETS = 200_000
SLACK = 1e-12
"""Differences of sums that are rounding."""


def least_alike(
    table: Floats, count: int, search: str, swap_passes: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """`count` positions of the symmetric `table` [M, M] with the lowest mean over their pairs; ties at random.

    `exact` enumerates, `greedy` starts from the lowest pair, adds the item least like those chosen, and then swaps;
    `auto` enumerates up to 200,000 subsets. For `count` 1 the item least like the others on average.
    """
    size = len(table)
    if count >= size:
        return np.arange(size)
    if count == 1:
        return np.array([_lowest(table.sum(1) - table.diagonal(), rng)])
    if search == "exact" or (search == "auto" and math.comb(size, count) <= MOST_SUBSETS):
        return _enumerate(table, count, rng)
    return _greedy(table, count, swap_passes, rng)


def pair_sum(table: Floats, chosen: NDArray[np.int64]) -> float:
    """Sum over the pairs of `chosen`."""
    block = table[np.ix_(chosen, chosen)]
    return float((block.sum() - block.trace()) / 2)


def _lowest(values: Floats, rng: np.random.Generator) -> int:
    """Position of the lowest value; ties, but for rounding, at random."""
    flat = values.ravel()
    return int(rng.choice(np.flatnonzero(flat <= flat.min() + SLACK)))


def _enumerate(table: Floats, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    subsets = np.array(list(itertools.combinations(range(len(table)), count)), dtype=np.int64)
    sums = np.zeros(len(subsets))
    for a, b in itertools.combinations(range(count), 2):
        sums += table[subsets[:, a], subsets[:, b]]
    best: NDArray[np.int64] = subsets[_lowest(sums, rng)]
    return best


def _greedy(table: Floats, count: int, swap_passes: int, rng: np.random.Generator) -> NDArray[np.int64]:
    diagonal = table.diagonal().copy()
    np.fill_diagonal(table, np.inf)
    chosen = [int(i) for i in np.unravel_index(_lowest(table, rng), table.shape)]
    np.fill_diagonal(table, diagonal)
    while len(chosen) < count:
        sums = table[:, chosen].sum(1)
        sums[chosen] = np.inf
        chosen.append(int(_lowest(sums, rng)))
    for _ in range(swap_passes):
        if not _best_swap(table, chosen):
            break
    return np.array(chosen, dtype=np.int64)


def _best_swap(table: Floats, chosen: list[int]) -> bool:
    """Replace the one item whose exchange lowers the sum the most; False if none does."""
    sums = table[:, chosen].sum(1)
    inside, outside = np.array(chosen), np.setdiff1d(np.arange(len(table)), chosen)
    leave = sums[inside] - table.diagonal()[inside]
    change = sums[outside][None, :] - table[np.ix_(inside, outside)] - leave[:, None]
    i, j = np.unravel_index(np.argmin(change), change.shape)
    if change[i, j] >= -SLACK:
        return False
    chosen[int(i)] = int(outside[int(j)])
    return True
