"""The search for the K of M items whose pairs are least similar."""

import itertools
import math

import numpy as np

from fedsim.selectors.base import (
    MAX_BYTES,
    Floats,
    Generator,
    Population,
    Positions,
    Problem,
    rule,
)

MAX_SUBSETS = 200_000
"""Maximum number of subsets that `search: auto` enumerates."""
SUBSET_BYTES = 80
"""Bytes that an exact search holds for each subset, besides two copies of its K positions."""
TOLERANCE = 1e-12
"""Sums of similarities that differ by less count as equal."""


def subsets_problem(population: Population, search: str) -> Problem | None:
    """Return a problem if the subsets of K of N clients in an `exact` search do not fit into
    memory."""
    num_clients, cohort_size = population.num_clients, population.cohort_size
    # `least_similar_subset` enumerates nothing for one client or for all clients.
    if search != "exact" or not 1 < cohort_size < num_clients:
        return None
    size = math.comb(num_clients, cohort_size) * (SUBSET_BYTES + 16 * cohort_size)
    text = (
        f"holds all subsets of cohort_size={cohort_size} of num_clients={num_clients} clients at "
        f"once; these must take at most {MAX_BYTES // 2**30} GiB"
    )
    remedy = "selector.search=auto is greedy beyond 200,000 subsets"
    return rule(size <= MAX_BYTES, "search", search, text, remedy)


def least_similar_subset(
    similarity: Floats, count: int, search: str, swap_passes: int, rng: Generator
) -> Positions:
    """Return the `count` of M items whose pairs have the lowest mean similarity.

    `similarity` [M, M] is symmetric, and its diagonal is ignored. The result holds positions in it.
    All M are returned if `count` >= M. For `count` 1 it is the item with the lowest mean similarity
    to the others. Ties are broken at random. The ways to search:

    - `exact` enumerates all subsets of `count` items.
    - `greedy` starts with the least similar pair. It then adds, one by one, the item that is least
      similar to the chosen ones. Finally it makes up to `swap_passes` improving swaps.
    - `auto` is `exact` up to 200,000 subsets, and `greedy` beyond.
    """
    size = len(similarity)
    if count >= size:
        return np.arange(size)
    if count == 1:
        sums = similarity.sum(1) - similarity.diagonal()
        return np.array([_random_argmin(sums, rng)])
    if search == "exact" or (search == "auto" and math.comb(size, count) <= MAX_SUBSETS):
        return _exact_search(similarity, count, rng)
    return _greedy_search(similarity, count, swap_passes, rng)


def _random_argmin(values: Floats, rng: Generator) -> int:
    """Return the position of the lowest value in the flattened `values`.

    Ties, that is, values within `TOLERANCE` of the lowest, are broken at random.
    """
    flat = values.ravel()
    lowest = np.flatnonzero(flat <= flat.min() + TOLERANCE)
    return int(rng.choice(lowest))


def _exact_search(similarity: Floats, count: int, rng: Generator) -> Positions:
    """Return the subset of `count` items with the lowest sum over its pairs."""
    subsets = np.array(list(itertools.combinations(range(len(similarity)), count)), dtype=np.int64)
    sums = np.zeros(len(subsets))
    for first, second in itertools.combinations(subsets.T, 2):
        sums += similarity[first, second]
    return subsets[_random_argmin(sums, rng)]


def _greedy_search(similarity: Floats, count: int, swap_passes: int, rng: Generator) -> Positions:
    """Return a subset that was grown item by item and improved by swaps."""
    # 1. The least similar pair. The diagonal, an item's similarity to itself, must not count. It is
    # overwritten and then restored, which takes no copy of the matrix.
    diagonal = similarity.diagonal().copy()
    np.fill_diagonal(similarity, np.inf)
    chosen = list(divmod(_random_argmin(similarity, rng), len(similarity)))
    np.fill_diagonal(similarity, diagonal)
    # 2. The item of lowest summed similarity to the chosen ones, until there are `count`.
    first, second = chosen
    sums = similarity[:, first] + similarity[:, second]
    while len(chosen) < count:
        candidates = sums.copy()
        candidates[chosen] = np.inf
        chosen.append(_random_argmin(candidates, rng))
        sums += similarity[:, chosen[-1]]
    # 3. Swaps, while they help.
    for _ in range(swap_passes):
        if not _best_swap(similarity, chosen):
            break
    return np.array(chosen, dtype=np.int64)


def _best_swap(similarity: Floats, chosen: list[int]) -> bool:
    """Replace one of the `chosen` items in place such that the sum of similarities falls most.

    Returns False, without a swap, if no swap lowers the sum over the pairs of chosen items.
    """
    sums = similarity[:, chosen].sum(1)  # of each item's similarities to all chosen ones
    inside = np.array(chosen)
    outside = np.setdiff1d(np.arange(len(similarity)), chosen)
    # The leaving item takes its similarities to the other chosen items out of the sum. The entering
    # item brings its similarities to all chosen items but the leaving one.
    removed = sums[inside] - similarity.diagonal()[inside]
    added = sums[outside][None, :] - similarity[np.ix_(inside, outside)]
    changes = added - removed[:, None]  # [chosen items, other items]
    leaving, entering = np.unravel_index(np.argmin(changes), changes.shape)
    if changes[leaving, entering] >= -TOLERANCE:
        return False
    chosen[int(leaving)] = int(outside[int(entering)])
    return True
