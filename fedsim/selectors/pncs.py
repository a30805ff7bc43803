"""PNCS: select the clients whose gradients are least similar to each other.

"PNCS: Power-Norm Cosine Similarity for Diverse Client Selection in Federated Learning", 2025 (arXiv
2506.15923).

Clients with different data have different gradients, and together they stand for the data of all.
Every available client reports a gradient, or a sketch of it (a compressed gradient). The server
selects the set S of K clients with the lowest mean similarity over its pairs (Eq. 11). The
similarity of two gradients x and y is a cosine "under the p-norm" (Eq. 9, 10). With p > 2 it gives
large coordinates more weight than the usual cosine. The sums are over the coordinates:

    s_p(x, y) = sum sgn(x y) |x y|^(p/2) / sqrt(sum |x|^p sum |y|^p)

A queue keeps recently selected clients out, so that all clients take part over time.

In each round:

1. All clients report a gradient at the current model.
2. The server computes the similarities of all pairs.
3. Clients in the queue are not eligible.
4. Of the eligible clients, the server selects the K least similar ones.
5. The selected clients enter the queue.

What the paper leaves open is a parameter:

- The formula of the similarity has five readings (`similarity.similarities`).
- The length of the queue is a number of clients or of rounds.
- If fewer than K clients are eligible, the clients that have been in the queue longest are
  released, or random ones, or fewer than K clients are selected.
- The gradient is taken at the current model w (as in the paper's derivation), or it is w - w_k
  after local training to the model w_k. In the latter case the selected clients do not train again.

Ties are broken at random.

`age_weight` > 0 is COSAGE. The age of a client is the number of rounds since its last selection.
The similarity of two clients is lowered by `age_weight` times their mean age.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedsim.clients.compression import Compressor, Identity, Int8
from fedsim.selectors.base import (
    Clients,
    CountOrZero,
    Floats,
    Generator,
    Ids,
    NonNegative,
    Positive,
    Problem,
    Problems,
    Selection,
    Selector,
    Signal,
    ascending,
    pairs_problem,
    parameters,
    rule,
)
from fedsim.selectors.candidates import not_queued
from fedsim.selectors.layer_names import layer_of, missing_layers
from fedsim.selectors.similarity import PowerSimilarity, similarities
from fedsim.selectors.subset_search import least_similar_subset, subsets_problem

WITHOUT_NORMS = ("signed_power", "even_power")
"""Similarities that take no p-norms."""
NORM_ORDERS = (0.1, 512.0)
"""Smallest and largest p: float64 holds the powers in p-norms of up to 10^9 numbers."""


@parameters
class PNCS(Selector):
    """Selects the K clients with the lowest mean pairwise similarity of their gradients."""

    state = ("queue", "last_selected")

    p: Positive  # power of the norm
    similarity: PowerSimilarity  # reading of Eq. 9 and 10: the kind of `similarities`
    grad: Literal["full", "batch", "local_update"]  # gradient that clients report
    sketch: Compressor  # how clients compress it
    layers: list[str] | Literal["each"] | None  # prefixes of names; each: one by one; None: all
    layer_agg: Literal["mean", "params", "concat"]  # several layers: mean, by size, or one vector
    queue_length: CountOrZero  # Q
    queue_unit: Literal["clients", "rounds"]  # unit of Q
    queue_bound: Literal["gt", "ge"]  # eligible again after more than, or at least Q rounds
    on_shortage: Literal["release_oldest", "random", "shrink"]  # if fewer than K are eligible
    search: Literal["auto", "exact", "greedy"]  # see least_similar_subset
    swap_passes: CountOrZero  # maximum number of swaps after a greedy search
    age_weight: NonNegative  # advantage for each round since the last selection

    def problems(self) -> Problems:
        yield from self._order_problems()
        text = "must be null or name at least one layer"
        yield rule(self.layers != [], "layers", self.layers, text)
        # A sketch is one vector for all layers.
        fits_sketch = isinstance(self.sketch, Identity) or not self.separate
        text = "must be concat if clients send a sketch of several layers"
        remedy = "selector.layer_agg=concat, or selector/sketch=identity"
        yield rule(fits_sketch, "layer_agg", self.layer_agg, text, remedy)
        has_lengths = self.similarity != "polar" or not isinstance(self.sketch, Int8)
        text = "depends on the lengths of vectors, which selector/sketch=int8 does not send"
        remedy = "selector/sketch=identity, or another similarity"
        yield rule(has_lengths, "similarity", self.similarity, text, remedy)
        # products in float32, as for many clients, similarities, and what a search keeps of them
        pair_bytes = 16 if self.similarity in WITHOUT_NORMS else 32
        if self.separate:
            pair_bytes += 16  # similarities summed over layers
        yield pairs_problem(self.population, pair_bytes)
        yield subsets_problem(self.population, self.search)

    def _order_problems(self) -> Problems:
        """Yield the problems of p for this kind of similarity."""
        kind = self.similarity
        is_allowed = kind != "even_power" or self.p % 2 == 0
        yield rule(is_allowed, "p", self.p, "must be even for similarity=even_power")
        low, high = NORM_ORDERS
        is_in_range = kind in WITHOUT_NORMS or low <= self.p <= high
        text = f"must lie in [{low:g}, {high:g}] for similarity={kind}: norms overflow beyond"
        yield rule(is_in_range, "p", self.p, text, "similarity=signed_power takes any p > 0")

    def __post_init__(self) -> None:
        self.adaptive = self.on_shortage == "shrink"
        of_update = frozenset({Signal.TRAINING, Signal.UPDATES})
        self.needs = of_update if self.grad == "local_update" else frozenset({Signal.GRADIENTS})
        # The clients in the queue: a list for each round, the oldest round first. In a queue of
        # rounds a list may be empty, in a queue of clients none is.
        self.queue: list[list[int]] = []
        # the round of each client's last selection [N], 0: never
        self.last_selected = np.zeros(self.population.num_clients, np.int64)

    @property
    def prefixes(self) -> list[str] | None:
        """Prefixes of the names of the parameters that clients report; None: all parameters."""
        return None if isinstance(self.layers, str) else self.layers

    @property
    def separate(self) -> bool:
        """True if there are several layers, and each has similarities of its own."""
        if self.layers is None or self.layer_agg == "concat":
            return False
        return self.layers == "each" or len(self.layers) > 1

    def unfit_for(self, trained: Sequence[str]) -> Problem | None:
        return missing_layers("layers", self.prefixes, trained)

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        available = clients.available
        # 1 and 2. Gradients and their similarities
        similarity = self._similarities(clients)
        # 3. Queue
        if self.queue_unit == "rounds":
            # Rounds without available clients count, too.
            num_missed = round - 1 - int(self.last_selected.max())
            missed: list[list[int]] = [[] for _ in range(num_missed)]
            self._keep_latest(self.queue + missed)
        eligible = self.eligible(available, self.cohort_size(clients), rng)
        if len(eligible) < len(available):
            rows = np.searchsorted(available, eligible)
            similarity = similarity[np.ix_(rows, rows)]
        # 4. Search
        if self.age_weight:
            age = round - self.last_selected[eligible]
            similarity = similarity - self.age_weight * (age[:, None] + age[None, :]) / 2
        count = min(self.cohort_size(clients), len(eligible))
        picks = least_similar_subset(similarity, count, self.search, self.swap_passes, rng)
        chosen = ascending(eligible[picks])
        # 5. Queue
        self._enqueue(rng.permutation(chosen).tolist())
        self.last_selected[chosen] = round
        return Selection(chosen)

    def eligible(self, available: Ids, count: int, rng: Generator) -> Ids:
        """Return the `available` clients that may be selected, ascending.

        If fewer than `count` clients are outside the queue, `on_shortage` decides which queued
        clients are added.
        """
        queued = [client for of_round in self.queue for client in of_round]
        if self.queue_unit == "clients":
            queued = queued[max(len(queued) - self.queue_length, 0) :]
        if self.on_shortage == "random":
            queued = rng.permutation(queued).astype(np.int64).tolist()
        min_count = 1 if self.on_shortage == "shrink" else count
        return not_queued(available, queued, min_count)

    def _enqueue(self, chosen: list[int]) -> None:
        """Move the clients `chosen` to the end of the queue."""
        earlier = []
        for of_round in self.queue:
            staying = [client for client in of_round if client not in chosen]
            if staying or self.queue_unit == "rounds":
                earlier.append(staying)
        self._keep_latest([*earlier, chosen])

    def _keep_latest(self, queue: list[list[int]]) -> None:
        """Set the queue to the latest lists of `queue`, as many as may still matter."""
        num_kept = self.queue_length
        if self.queue_unit == "rounds" and self.queue_bound == "ge":
            num_kept -= 1
        self.queue = queue[-num_kept:] if num_kept > 0 else []

    def _similarities(self, clients: Clients) -> Floats:
        """Return the similarities [n, n] of the available clients."""
        matrices = self._reported_matrices(clients)
        if not self.separate:
            return similarities(list(matrices.values()), self.p, self.similarity)
        total = np.zeros(())
        total_weight = 0
        for names in self._layers(clients):
            tensors = [matrices[name] for name in names]
            num_parameters = sum(matrix.shape[1] for matrix in tensors)
            weight = num_parameters if self.layer_agg == "params" else 1
            total = total + weight * similarities(tensors, self.p, self.similarity)
            total_weight += weight
        return total / total_weight

    def _layers(self, clients: Clients) -> list[list[str]]:
        """Return the names of the tensors of each layer with similarities of its own."""
        if self.prefixes is not None:
            return [clients.layer_names([prefix]) for prefix in self.prefixes]
        layers: dict[str, list[str]] = {}
        for name in clients.layer_names(None):
            layers.setdefault(layer_of(name), []).append(name)
        return list(layers.values())

    def _reported_matrices(self, clients: Clients) -> dict[str, Tensor]:
        """Return the reports of the n available clients: a matrix [n, d] for each tensor, by name.

        Gradients that need not be told apart by tensor (not `separate`) are one matrix, whose name
        is "". So are sketches.
        """
        available = clients.available
        if self.grad == "local_update":
            return clients.updates(available, layers=self.prefixes, compressor=self.sketch)
        gradients = clients.gradients(
            available, batch=self.grad == "batch", layers=self.prefixes, compressor=self.sketch
        )
        matrix = stack_vectors(gradients, len(available))
        if not self.separate:
            return {"": matrix}
        names = clients.layer_names(self.prefixes)
        columns = matrix.split([clients.params[name].numel() for name in names], dim=1)
        return dict(zip(names, columns, strict=True))


def stack_vectors(vectors: Iterator[Tensor], count: int) -> Tensor:
    """Return a matrix [count, d] of `count` vectors [d], which need not exist all at once."""
    matrix = torch.empty(0)
    for row, vector in enumerate(vectors):
        if row == 0:
            matrix = vector.new_empty(count, len(vector))
        matrix[row] = vector
    return matrix
