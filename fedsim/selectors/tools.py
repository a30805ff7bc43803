"""What several selectors share: divergences, label counts, queues, the search for dissimilar
clients."""

import itertools
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedsim.clients.clients import Clients
from fedsim.core.arrays import Bools, Floats, Ints
from fedsim.core.errors import Problem, rule
from fedsim.core.exact import exp
from fedsim.core.types import Ids, Population, Positions
from fedsim.selectors.base import MAX_BYTES
from fedsim.selectors.similarity import inner_products


def clients_to_try(ids: Ids, known: Bools, last_tried: Ints, round: int) -> Ids:
    """Those of the available `ids` that `round` is to select because nothing is `known` [N] of
    them, ascending.

    `last_tried` [N] is the round in which each client was last selected, 0 for never. All that
    never were; if there are none, the one selected longest ago (of several the lowest id) if the
    number of rounds has doubled since, so that clients whose updates never arrive, or are never
    finite, take ever fewer places.
    """
    unknown = ids[~known[ids]]
    new: Ids = unknown[last_tried[unknown] == 0]
    if len(new) or not len(unknown):
        return new
    longest_ago = unknown[np.argmin(last_tried[unknown])]
    due = round >= 2 * last_tried[longest_ago]
    return np.array([longest_ago] if due else [], dtype=np.int64)


WardInput = Literal["distances", "rows"]
"""What Ward's tree (ward.py) is built on."""

LOWEST = -18.420680743952367  # the logarithm of 1e-8


def kl_divergences(log_p: Tensor, reduction: str) -> Floats:
    """KL(P_k || P_j) [K, K] averaged over samples, from log-probabilities [K models, M samples, C
    classes].

    `reduction: mean` divides by the number of classes as well, `sum` does not. Probabilities are
    clipped at 1e-8.
    """
    log_p = log_p.clamp(min=LOWEST)
    flat = log_p.flatten(1)
    cross = inner_products(
        [flat], lambda x: torch.from_numpy(exp(x.numpy())).to(x.dtype), lambda x: x
    )
    scale = log_p.shape[1] * (log_p.shape[2] if reduction == "mean" else 1)
    own = cross.diagonal().clone()
    return cross.neg_().add_(own[:, None]).div_(scale).numpy()


def collect_label_counts(counts: Ints, clients: Clients) -> Ints:
    """`counts` [N, C] completed by the label counts of all available clients; each client is asked
    once.

    Rows of clients that have not reported are -1; before any report, `counts` has no columns [N,
    0].
    """
    is_known = np.any(counts >= 0, axis=1)
    new = clients.available[~is_known[clients.available]]
    if not len(new):
        return counts
    reported = clients.label_counts(new)
    known = counts if counts.shape[1] else np.full((len(counts), reported.shape[1]), -1)
    known[new] = reported
    return known


def missing_layers(
    key: str, layers: Sequence[str] | None, trained: Sequence[str]
) -> Problem | None:
    """The problem of the hyper-parameter `key` if one of `layers` (None: all) names no `trained`
    parameter, or None."""
    missing = [
        layer
        for layer in layers or ()
        if not any(n == layer or n.startswith(f"{layer}.") for n in trained)
    ]
    known = dict.fromkeys(name.rpartition(".")[0] or name for name in trained)
    told = f"must name layers that the model trains, not {', '.join(missing)}"
    remedy = f"it has {', '.join(known)}; null and each take all of them"
    return rule(not missing, key, layers and list(layers), told, remedy)


def not_queued(available: Ids, queue: Sequence[int], min_count: int) -> Ids:
    """The `available` clients that are not in `queue`, from whose front as many are released as
    `min_count` takes."""
    present = set(available.tolist())
    queued = [i for i in queue if i in present]
    surplus = max(min_count - (len(available) - len(queued)), 0)
    return np.setdiff1d(available, np.array(queued[surplus:], dtype=np.int64))


MAX_SUBSETS = 200_000
SUBSET_BYTES = (
    80  # of a subset in an exact search, which holds the positions of its items twice besides
)
TOLERANCE = 1e-12  # sums that differ by less count as equal


def subsets_problem(population: Population, search: str) -> Problem | None:
    """The problem of an `exact` search over more subsets of K of N clients than can be held at
    once, or None."""
    n, k = population.num_clients, population.cohort_size
    count = math.comb(n, k) if search == "exact" and 1 < k < n else 0
    told = f"holds all subsets of cohort_size={k} of num_clients={n} clients at once; must take at most "
    told += f"{MAX_BYTES // 2**30} GiB"
    remedy = "selector.search=auto, which is greedy beyond 200,000 subsets"
    return rule(count * (SUBSET_BYTES + 16 * k) <= MAX_BYTES, "search", search, told, remedy)


def least_similar_subset(
    similarity: Floats, count: int, search: str, swap_passes: int, rng: np.random.Generator
) -> Positions:
    """`count` positions in the symmetric matrix `similarity` [M, M] with the lowest mean similarity
    over their pairs.

    `search`: `exact` enumerates all subsets; `greedy` starts with the least similar pair, adds the
    item least similar to those chosen one by one, and then makes up to `swap_passes` improving
    swaps; `auto` is exact up to 200,000 subsets. Ties are broken at random. For `count` 1 it is the
    item with the lowest mean similarity to the others.
    """
    size = len(similarity)
    if count >= size:
        return np.arange(size)
    if count == 1:
        return np.array([_argmin(similarity.sum(1) - similarity.diagonal(), rng)])
    if search == "exact" or (search == "auto" and math.comb(size, count) <= MAX_SUBSETS):
        return _enumerate(similarity, count, rng)
    return _greedy(similarity, count, swap_passes, rng)


def _argmin(values: Floats, rng: np.random.Generator) -> int:
    """Flat position of the lowest value; ties (within `TOLERANCE`) are broken at random."""
    flat = values.ravel()
    return int(rng.choice(np.flatnonzero(flat <= flat.min() + TOLERANCE)))


def _enumerate(similarity: Floats, count: int, rng: np.random.Generator) -> Positions:
    subsets = np.array(list(itertools.combinations(range(len(similarity)), count)), dtype=np.int64)
    sums = np.zeros(len(subsets))
    for a, b in itertools.combinations(range(count), 2):
        sums += similarity[subsets[:, a], subsets[:, b]]
    return subsets[_argmin(sums, rng)]


def _greedy(
    similarity: Floats, count: int, swap_passes: int, rng: np.random.Generator
) -> Positions:
    diagonal = similarity.diagonal().copy()
    np.fill_diagonal(similarity, np.inf)
    chosen = list(divmod(_argmin(similarity, rng), len(similarity)))
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
    """Make the swap of one chosen item that lowers the sum the most, in place; False if no swap
    lowers it."""
    sums = similarity[:, chosen].sum(1)
    inside, outside = np.array(chosen), np.setdiff1d(np.arange(len(similarity)), chosen)
    leave = sums[inside] - similarity.diagonal()[inside]
    change = sums[outside][None, :] - similarity[np.ix_(inside, outside)] - leave[:, None]
    i, j = np.unravel_index(np.argmin(change), change.shape)
    if change[i, j] >= -TOLERANCE:
        return False
    chosen[int(i)] = int(outside[int(j)])
    return True
