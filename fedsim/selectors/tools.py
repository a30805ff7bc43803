"""Operations that several selectors share: whom to try next, label counts, queues, divergences of
predictions, and the search for the least similar clients.

Symbols: N clients, K of them selected, C classes.
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
"""The input of Ward's tree (ward.py): distances, or the rows of their matrix as points."""

MAX_SUBSETS = 200_000
"""Maximum number of subsets that `search: auto` enumerates."""
SUBSET_BYTES = 80
"""Memory of an exact search for each subset, besides twice the positions of its items."""
TOLERANCE = 1e-12
"""Sums of similarities that differ by less count as equal."""
LOG_SMALLEST_PROBABILITY = -18.420680743952367  # ln 1e-8


def clients_to_try(ids: Ids, known: Bools, last_tried: Ints, round: int) -> Ids:
    """Return the available clients `ids` that `round` should select because nothing is known of
    them.

    `known` [N] marks the clients of whom an update arrived. `last_tried` [N] is the round in which
    a client was last selected, 0 for never. First come all clients that were never selected.
    Without any, it is the unknown client selected longest ago (the lowest id of several), if the
    number of rounds has doubled since. Clients whose updates never arrive, or are never finite,
    thus take ever fewer places.
    """
    unknown = ids[~known[ids]]
    never_selected: Ids = unknown[last_tried[unknown] == 0]
    if len(never_selected) or not len(unknown):
        return never_selected
    longest_ago = unknown[np.argmin(last_tried[unknown])]
    is_due = round >= 2 * last_tried[longest_ago]
    return np.array([longest_ago]) if is_due else never_selected


def fill_up(chosen: Ids, candidates: Ids, count: int, rng: Generator) -> Ids:
    """Return `chosen` followed by random ones of the other `candidates`, `count` in all."""
    others = np.setdiff1d(candidates, chosen)
    return np.concatenate([chosen, rng.choice(others, count - len(chosen), replace=False)])


def not_queued(available: Ids, queue: Sequence[int], min_count: int) -> Ids:
    """Return the `available` clients that are not in `queue`, but at least `min_count`.

    If there are fewer, clients are released from the front of the queue.
    """
    waiting = np.array(queue, dtype=np.int64)
    waiting = waiting[np.isin(waiting, available)]
    num_released = max(min_count + len(waiting) - len(available), 0)
    return np.setdiff1d(available, waiting[num_released:])


def collect_label_counts(counts: Ints, clients: Clients) -> Ints:
    """Return `counts` [N, C] completed by the label counts of all available clients.

    Each client is asked once. Rows of clients that have not reported are -1. Before any report,
    `counts` has no columns [N, 0].
    """
    is_known = np.any(counts >= 0, axis=1)
    new = clients.available[~is_known[clients.available]]
    if not len(new):
        return counts
    reported = clients.label_counts(new)
    if not counts.shape[1]:
        counts = np.full((len(counts), reported.shape[1]), -1)
    counts[new] = reported
    return counts


def kl_divergences(log_p: Tensor, reduction: str) -> Floats:
    """Return KL(P_k || P_j) [K, K], averaged over samples.

    `log_p` [K models, M samples, C classes] are log-probabilities, which are clipped at ln 1e-8.
    `reduction: mean` divides by the number of classes as well, `sum` does not.
    """
    log_p = log_p.clamp(min=LOG_SMALLEST_PROBABILITY)
    # sum p ln q over samples and classes, for all pairs of models
    cross = inner_products(
        [log_p.flatten(1)], lambda x: torch.from_numpy(exp(x.numpy())).to(x.dtype), lambda x: x
    )
    _, num_samples, num_classes = log_p.shape
    divisor = num_samples * (num_classes if reduction == "mean" else 1)
    negative_entropy = cross.diagonal().clone()
    return cross.neg_().add_(negative_entropy[:, None]).div_(divisor).numpy()


def layer_of(name: str) -> str:
    """Return the layer of the parameter `name`; a parameter without one is its own layer."""
    return name.rpartition(".")[0] or name


def missing_layers(
    key: str, layers: Sequence[str] | None, trained: Sequence[str]
) -> Problem | None:
    """Return the problem of the hyper-parameter `key` if one of its `layers` is not trained.

    `trained` are the names of the model's trained parameters; None stands for all layers.
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
    """Return a problem if an `exact` search has more subsets of K of N clients than fit into
    memory."""
    num_clients, cohort_size = population.num_clients, population.cohort_size
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
    """Return `count` positions in the symmetric matrix `similarity` [M, M] with the lowest mean
    similarity over their pairs.

    `search: exact` enumerates all subsets. `greedy` starts with the least similar pair, adds the
    item that is least similar to the chosen ones, one by one, and then makes up to `swap_passes`
    improving swaps. `auto` is exact up to 200,000 subsets. Ties are broken at random. For `count` 1
    it is the item with the lowest mean similarity to the others.
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
    """Return the flat position of the lowest value; ties (within `TOLERANCE`) are broken at
    random."""
    flat = values.ravel()
    lowest = np.flatnonzero(flat <= flat.min() + TOLERANCE)
    return int(rng.choice(lowest))


def _exact_search(similarity: Floats, count: int, rng: Generator) -> Positions:
    """Return the best of all subsets."""
    subsets = np.array(list(itertools.combinations(range(len(similarity)), count)), dtype=np.int64)
    sums = np.zeros(len(subsets))
    for first, second in itertools.combinations(subsets.T, 2):
        sums += similarity[first, second]
    return subsets[_random_argmin(sums, rng)]


def _greedy_search(similarity: Floats, count: int, swap_passes: int, rng: Generator) -> Positions:
    """Return a subset that was grown item by item and improved by swaps."""
    # 1. The least similar pair. The diagonal must not count: similarity of items with themselves.
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
    """Swap, in place, a chosen item for another one such that the sum of similarities falls most.

    Returns False, without a swap, if no swap lowers the sum.
    """
    sums = similarity[:, chosen].sum(1)
    inside = np.array(chosen)
    outside = np.setdiff1d(np.arange(len(similarity)), chosen)
    lost = sums[inside] - similarity.diagonal()[inside]
    gained = sums[outside][None, :] - similarity[np.ix_(inside, outside)]
    change = gained - lost[:, None]
    leaving, entering = np.unravel_index(np.argmin(change), change.shape)
    if change[leaving, entering] >= -TOLERANCE:
        return False
    chosen[int(leaving)] = int(outside[int(entering)])
    return True
