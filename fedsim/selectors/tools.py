"""Operations that several selectors share: which unknown clients to try, label counts, queues,
divergences of predictions, and the search for the least similar clients.

Symbols: N clients, K of them to select in a round, C classes of labels, M samples or items.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedsim.core.exact import exp
from fedsim.selectors.base import (
    MAX_BYTES,
    Bools,
    Clients,
    Floats,
    Generator,
    Ids,
    Ints,
    Population,
    Positions,
    Problem,
    rule,
)
from fedsim.selectors.similarity import inner_products

WardInput = Literal["distances", "rows"]
"""The input of Ward's clustering (ward.py): a matrix of distances, or its rows as points."""

MAX_SUBSETS = 200_000
"""Maximum number of subsets that `search: auto` enumerates."""
SUBSET_BYTES = 80
"""Bytes that an exact search holds for each subset, besides two copies of its K positions."""
TOLERANCE = 1e-12
"""Sums of similarities that differ by less count as equal."""
LOG_SMALLEST_PROBABILITY = -18.420680743952367
"""ln 1e-8, written out so that it is the same on every machine."""


def clients_to_try(ids: Ids, known: Bools, last_tried: Ints, round: int) -> Ids:
    """Return the clients among the available `ids` that a method should try in `round`.

    `known` [N] marks the clients of which an update has arrived. `last_tried` [N] is the round in
    which each client was last selected, 0 for never. The rule:

    1. If some of `ids` were never selected, and are not known, return all of these.
    2. Otherwise take the unknown client that was selected longest ago, the lowest id of several.
       Return it alone if `round` >= 2 `last_tried`.
    3. Otherwise return nobody.

    The waits of rule 2 double, so clients whose updates never arrive take ever fewer places.
    """
    unknown = ids[~known[ids]]
    never_selected: Ids = unknown[last_tried[unknown] == 0]
    if len(never_selected) or not len(unknown):
        return never_selected
    longest_ago = unknown[np.argmin(last_tried[unknown])]
    is_due = round >= 2 * last_tried[longest_ago]
    return np.array([longest_ago]) if is_due else never_selected


def fill_up(chosen: Ids, candidates: Ids, count: int, rng: Generator) -> Ids:
    """Return `chosen`, followed by random other `candidates`, so that there are `count` in all.

    `chosen` must have at most `count` elements, and `candidates` must suffice.
    """
    others = np.setdiff1d(candidates, chosen)
    return np.concatenate([chosen, rng.choice(others, count - len(chosen), replace=False)])


def not_queued(available: Ids, queue: Sequence[int], min_count: int) -> Ids:
    """Return the `available` clients that are not in `queue`, ascending.

    If they are fewer than `min_count`, the available clients at the front of the queue are added
    until there are `min_count`. The front is the client that has been in the queue longest.
    """
    queued = np.array(queue, dtype=np.int64)
    queued = queued[np.isin(queued, available)]
    num_outside = len(available) - len(queued)
    num_released = max(min_count - num_outside, 0)
    return np.setdiff1d(available, queued[num_released:])


def collect_label_counts(counts: Ints, clients: Clients) -> Ints:
    """Return `counts` [N, C] with the label counts of all available clients filled in.

    Only clients that have not reported yet are asked. The row of a client that has not reported is
    -1 in all columns. Before the first report C is unknown, and `counts` is [N, 0]. May change
    `counts` in place.
    """
    is_known = np.any(counts >= 0, axis=1)  # False for all if there are no columns
    new = clients.available[~is_known[clients.available]]
    if not len(new):
        return counts
    reported = clients.label_counts(new)
    if not counts.shape[1]:
        counts = np.full((len(counts), reported.shape[1]), -1)
    counts[new] = reported
    return counts


def kl_divergences(log_p: Tensor, reduction: str) -> Floats:
    """Return the Kullback-Leibler divergences KL(P_i || P_j) [n, n] of n models' predictions.

    `log_p` [n, M, C] holds the log-probabilities of C classes that each model predicts for M
    samples. They are clipped from below at ln 1e-8. Divergences are averaged over the samples.
    `reduction: mean` also divides them by C, `sum` does not.
    """
    log_p = log_p.clamp(min=LOG_SMALLEST_PROBABILITY)
    # The sum of p_i ln p_j over samples and classes, for all pairs of models. KL(P_i || P_j) is the
    # diagonal entry of row i minus entry (i, j).
    cross = inner_products(
        [log_p.flatten(1)], lambda x: torch.from_numpy(exp(x.numpy())).to(x.dtype), lambda x: x
    )
    _, num_samples, num_classes = log_p.shape
    divisor = num_samples * (num_classes if reduction == "mean" else 1)
    negative_entropy = cross.diagonal().clone()
    return cross.neg_().add_(negative_entropy[:, None]).div_(divisor).numpy()


def layer_of(name: str) -> str:
    """Return the layer of the parameter `name`: `conv1` for `conv1.weight`.

    A parameter without a dot in its name is its own layer.
    """
    return name.rpartition(".")[0] or name


def missing_layers(
    key: str, layers: Sequence[str] | None, trained: Sequence[str]
) -> Problem | None:
    """Return a problem of the hyper-parameter `key` if one of its `layers` is not trained.

    `trained` are the names of the model's trained parameters. `layers` None means all layers, which
    is never a problem.
    """
    missing = [
        layer
        for layer in layers or ()
        if not any(f"{name}.".startswith(f"{layer}.") for name in trained)
    ]
    text = f"must name layers that the model trains, not {', '.join(missing)}"
    known = dict.fromkeys(layer_of(name) for name in trained)
    remedy = f"it has {', '.join(known)}; null and each use all of them"
    return rule(not missing, key, layers and list(layers), text, remedy)


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
    # 1. The least similar pair. The diagonal, an item's similarity to itself, must not count.
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
    sums = similarity[:, chosen].sum(1)  # of each item to all chosen ones
    inside = np.array(chosen)
    outside = np.setdiff1d(np.arange(len(similarity)), chosen)
    # The similarity of each chosen item to the rest of the chosen ones leaves the sum with it. That
    # of the entering item to all chosen ones but the leaving one enters the sum.
    removed = sums[inside] - similarity.diagonal()[inside]
    added = sums[outside][None, :] - similarity[np.ix_(inside, outside)]
    changes = added - removed[:, None]  # [chosen items, other items]
    leaving, entering = np.unravel_index(np.argmin(changes), changes.shape)
    if changes[leaving, entering] >= -TOLERANCE:
        return False
    chosen[int(leaving)] = int(outside[int(entering)])
    return True
