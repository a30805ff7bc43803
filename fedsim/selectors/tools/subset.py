"""Search for the K of M items with the lowest mean pairwise similarity."""

import itertools
import math

import numpy as np
from numpy.typing import NDArray

from fedsim.errors import Problem, rule
from fedsim.selectors.tools.all_pairs import MAX_BYTES
from fedsim.types import Population

Floats = NDArray[np.float64]

MAX_SUBSETS = 200_000
SUBSET_BYTES = 80
"""Of a subset in an exact search, besides the positions of its items."""
TOLERANCE = 1e-12
"""Sums that differ by less count as equal."""


def subsets_problem(population: Population, search: str) -> Problem | None:
    """The problem of an `exact` search over more subsets of K of N clients than can be held at once, or None.

    Each is held twice, as a tuple and as a row of an array.
    """
    n, k = population.num_clients, population.cohort_size
    count = math.comb(n, k) if search == "exact" and 1 < k < n else 0
    return rule(
        count * (SUBSET_BYTES + 16 * k) <= MAX_BYTES,
        "search",
        search,
        f"holds all {_shown(count)} subsets of cohort_size={k} of num_clients={n} clients at once; must take at most "
        f"{MAX_BYTES // 2**30} GiB",
        "selector.search=auto, which is greedy beyond 200,000 subsets",
    )


def _shown(count: int) -> str:
    return f"{count:,}" if count < 10**15 else "(more than 10^15)"


def least_similar_subset(
    similarity: Floats, count: int, search: str, swap_passes: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """`count` positions in the symmetric matrix `similarity` [M, M] with the lowest mean similarity over their pairs.

    `search`: `exact` enumerates all subsets; `greedy` starts with the least similar pair, adds the item with the lowest
    total similarity to those chosen one by one, and then makes up to `swap_passes` improving swaps; `auto` is exact up
    to 200,000 subsets and greedy beyond. Ties are broken at random. For `count` 1 it is the item with the lowest mean
    similarity to the others.
    """
    size = len(similarity)
    if count >= size:
        return np.arange(size)
    if count == 1:
        return np.array([_argmin(similarity.sum(1) - similarity.diagonal(), rng)])
    if search == "exact" or (search == "auto" and math.comb(size, count) <= MAX_SUBSETS):
        return _enumerate(similarity, count, rng)
    return _greedy(similarity, count, swap_passes, rng)


def moved_to_front(table: Floats, rows: NDArray[np.int64]) -> Floats:
    """The rows and columns `rows`, ascending, of a square `table`: a part of it, in which nothing else remains."""
    for place, row in enumerate(rows.tolist()):
        table[place, : len(rows)] = table[row, rows]
    return table[: len(rows), : len(rows)]


def _argmin(values: Floats, rng: np.random.Generator) -> int:
    """Flat position of the lowest value; ties (within `TOLERANCE`) are broken at random."""
    flat = values.ravel()
    return int(rng.choice(np.flatnonzero(flat <= flat.min() + TOLERANCE)))


def _lowest_pair(similarity: Floats, rng: np.random.Generator) -> list[int]:
    """`_argmin` as row and column, by way of the rows' lowest values: without a list of all pairs that are as low."""
    lowest = similarity.min(1)
    limit = lowest.min() + TOLERANCE
    rows = np.flatnonzero(lowest <= limit)
    ends = np.cumsum([np.count_nonzero(similarity[row] <= limit) for row in rows])
    drawn = int(rng.choice(int(ends[-1])))
    place = int(np.searchsorted(ends, drawn, side="right"))
    in_row = np.flatnonzero(similarity[rows[place]] <= limit)
    return [int(rows[place]), int(in_row[drawn - ends[place]])]


def _enumerate(similarity: Floats, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    subsets = np.array(list(itertools.combinations(range(len(similarity)), count)), dtype=np.int64)
    sums = np.zeros(len(subsets))
    for a, b in itertools.combinations(range(count), 2):
        sums += similarity[subsets[:, a], subsets[:, b]]
    best: NDArray[np.int64] = subsets[_argmin(sums, rng)]
    return best


def _greedy(similarity: Floats, count: int, swap_passes: int, rng: np.random.Generator) -> NDArray[np.int64]:
    diagonal = similarity.diagonal().copy()
    np.fill_diagonal(similarity, np.inf)
    chosen = _lowest_pair(similarity, rng)
    np.fill_diagonal(similarity, diagonal)
    sums = similarity[:, chosen[0]] + similarity[:, chosen[1]]
    while len(chosen) < count:
        left = sums.copy()
        left[chosen] = np.inf
        chosen.append(_argmin(left, rng))
        sums += similarity[:, chosen[-1]]
    for _ in range(swap_passes):
        if not _best_swap(similarity, chosen):
            break
    return np.array(chosen, dtype=np.int64)


def _best_swap(similarity: Floats, chosen: list[int]) -> bool:
    """Make the swap of one chosen item that lowers the sum the most, in place; False if no swap lowers it."""
    sums = similarity[:, chosen].sum(1)
    inside, outside = np.array(chosen), np.setdiff1d(np.arange(len(similarity)), chosen)
    leave = sums[inside] - similarity.diagonal()[inside]
    change = sums[outside][None, :] - similarity[np.ix_(inside, outside)] - leave[:, None]
    i, j = np.unravel_index(np.argmin(change), change.shape)
    if change[i, j] >= -TOLERANCE:
        return False
    chosen[int(i)] = int(outside[int(j)])
    return True
