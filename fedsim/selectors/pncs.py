from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedsim.clients.compression import Compressor, Identity, Int8
from fedsim.core.arrays import Floats
from fedsim.core.parameters import CountOrZero, NonNegative, Positive, Problems, parameters
from fedsim.core.types import Ids
from fedsim.selectors.base import (
    Clients,
    Problem,
    Selection,
    Selector,
    Signal,
    ascending,
    pairs_problem,
    rule,
)
from fedsim.selectors.similarity import PowerSimilarity, similarities
from fedsim.selectors.tools import least_similar_subset, missing_layers, not_queued, subsets_problem

WITHOUT_NORMS = ("signed_power", "even_power")
NORM_ORDERS = (0.1, 512.0)  # of p-norms of up to 10^9 numbers whose powers float64 holds


@parameters
class PNCS(Selector):
    """All clients report a gradient; the K clients with the lowest mean pairwise similarity are
    selected (Eq. 9-11).

    `similarity` is one of five interpretations of "cosine similarity under the `p`-norm" (see
    `similarity.similarities`). Clients report a `sketch` of a gradient (`grad`); with
    `local_update`, w - w_k after local training, one that is then selected does not train again.
    `layers` selects parameters by prefixes of their names, or compares `each` trained layer;
    `layer_agg` averages the similarities of several layers, or compares them as one vector.

    Queue: the last `queue_length` selected clients are not eligible, or clients selected in round t
    are not until t' - t > queue_length (`queue_unit: rounds`; >= with `queue_bound: ge`). If fewer
    than K clients are eligible, `on_shortage` releases those that have been in the queue longest,
    or random ones, or selects fewer, at least one.

    `search` and `swap_passes` are those of `least_similar_subset`. `age_weight` is subtracted from
    a client's similarities for every round since its last selection (COSAGE).
    """

    state = ("queue", "last_round")

    p: Positive
    similarity: PowerSimilarity
    grad: Literal["full", "batch", "local_update"]
    sketch: Compressor
    layers: list[str] | Literal["each"] | None
    layer_agg: Literal["mean", "params", "concat"]
    queue_length: CountOrZero
    queue_unit: Literal["clients", "rounds"]
    queue_bound: Literal["gt", "ge"]
    on_shortage: Literal["release_oldest", "random", "shrink"]
    search: Literal["auto", "exact", "greedy"]
    swap_passes: CountOrZero
    age_weight: NonNegative

    def problems(self) -> Problems:
        p, kind, sketch = self.p, self.similarity, self.sketch
        low, high = NORM_ORDERS
        yield rule(
            kind != "even_power" or p % 2 == 0, "p", p, "must be even for similarity=even_power"
        )
        told = f"must lie in [{low:g}, {high:g}] for similarity={kind}: norms overflow beyond"
        remedy = "similarity=signed_power takes any p > 0"
        yield rule(kind in WITHOUT_NORMS or low <= p <= high, "p", p, told, remedy)
        yield rule(
            self.layers != [], "layers", self.layers, "must be null or name at least one layer"
        )
        told = "must be concat where a sketch is taken of several layers"
        remedy = "selector.layer_agg=concat, or selector/sketch=identity"
        yield rule(
            isinstance(sketch, Identity) or not self.separate,
            "layer_agg",
            self.layer_agg,
            told,
            remedy,
        )
        told = "depends on the lengths of the vectors, which selector/sketch=int8 does not send"
        remedy = "selector/sketch=identity, or another similarity"
        yield rule(
            kind != "polar" or not isinstance(sketch, Int8), "similarity", kind, told, remedy
        )
        # at the peak: products in float32, as they are for many clients, similarities, and what a
        # search keeps of them
        yield pairs_problem(
            self.population, (16 if kind in WITHOUT_NORMS else 32) + 16 * self.separate
        )
        yield subsets_problem(self.population, self.search)

    def __post_init__(self) -> None:
        self.adaptive = self.on_shortage == "shrink"
        self.needs = frozenset(
            {Signal.TRAINING if self.grad == "local_update" else Signal.GRADIENTS}
        )
        self.queue: list[list[int]] = []
        self.last_round = np.zeros(self.population.num_clients, np.int64)

    @property
    def prefixes(self) -> list[str] | None:
        """Prefixes of the names of the parameters that are compared; None for all of them."""
        return None if isinstance(self.layers, str) else self.layers

    @property
    def separate(self) -> bool:
        """Whether layers are compared one by one."""
        several = self.layers is not None and (self.layers == "each" or len(self.layers) > 1)
        return several and self.layer_agg != "concat"

    def unfit_for(self, trained: Sequence[str]) -> Problem | None:
        return missing_layers("layers", self.prefixes, trained)

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        similarity_matrix, ids = self._similarities(clients), clients.available
        if self.queue_unit == "rounds":  # in which nobody could be reached: the queue counts them
            self._keep_latest(
                [*self.queue, *([] for _ in range(round - 1 - int(self.last_round.max())))]
            )
        eligible = self.eligible(ids, self.cohort_size(clients), rng)
        if len(eligible) < len(ids):
            rows = np.searchsorted(ids, eligible)
            similarity_matrix = similarity_matrix[np.ix_(rows, rows)]
        if self.age_weight:
            age = round - self.last_round[eligible]
            similarity_matrix = (
                similarity_matrix - self.age_weight * (age[:, None] + age[None, :]) / 2
            )
        count = min(self.cohort_size(clients), len(eligible))
        chosen = ascending(
            eligible[
                least_similar_subset(similarity_matrix, count, self.search, self.swap_passes, rng)
            ]
        )
        self._enqueue(chosen, rng)
        self.last_round[chosen] = round
        return Selection(chosen)

    def eligible(self, available: Ids, count: int, rng: np.random.Generator) -> Ids:
        """Ids of the `available` clients that may be selected, after `on_shortage` if they are
        fewer than `count`."""
        queued = [i for batch in self.queue for i in batch]
        if self.queue_unit == "clients":
            queued = queued[-self.queue_length :] if self.queue_length else []
        if self.on_shortage == "random":
            queued = [int(i) for i in rng.permutation(queued)]
        return not_queued(available, queued, 1 if self.on_shortage == "shrink" else count)

    def _enqueue(self, chosen: Ids, rng: np.random.Generator) -> None:
        batch = [int(i) for i in rng.permutation(chosen)]
        kept = [[i for i in b if i not in batch] for b in self.queue]
        if self.queue_unit == "clients":  # an empty batch stands for a round, and for no client
            kept = [b for b in kept if b]
        self._keep_latest([*kept, batch])

    def _keep_latest(self, batches: list[list[int]]) -> None:
        shorter = self.queue_unit == "rounds" and self.queue_bound == "ge"
        limit = max(self.queue_length - shorter, 0)
        self.queue = batches[-limit:] if limit else []

    def _similarities(self, clients: Clients) -> Floats:
        matrices = self._reported_matrices(clients)
        if not self.separate:
            return similarities(list(matrices.values()), self.p, self.similarity)
        total, weights = np.zeros(()), 0
        for names in self._groups(clients):
            group = [matrices[name] for name in names]
            weight = sum(part.shape[1] for part in group) if self.layer_agg == "params" else 1
            total = total + weight * similarities(group, self.p, self.similarity)
            weights += weight
        return total / weights

    def _groups(self, clients: Clients) -> list[list[str]]:
        if self.prefixes is not None:
            return [clients.layer_names([prefix]) for prefix in self.prefixes]
        layers: dict[str, list[str]] = {}
        for name in clients.layer_names(None):
            layers.setdefault(name.rpartition(".")[0] or name, []).append(name)
        return list(layers.values())

    def _reported_matrices(self, clients: Clients) -> dict[str, Tensor]:
        """The reports of all available clients, one matrix [N, d] per tensor (or a single one of
        sketches)."""
        ids = clients.available
        if self.grad == "local_update":
            return clients.updates(ids, layers=self.prefixes, compressor=self.sketch)
        reports = clients.gradients(
            ids, batch=self.grad == "batch", layers=self.prefixes, compressor=self.sketch
        )
        stack = stack_vectors(reports, len(ids))
        if not self.separate:
            return {"": stack}
        names = clients.layer_names(self.prefixes)
        return dict(
            zip(names, stack.split([clients.params[n].numel() for n in names], dim=1), strict=True)
        )


def stack_vectors(vectors: Iterator[Tensor], count: int) -> Tensor:
    """A matrix [count, d] of `count` vectors [d], filled row by row so that the vectors need not
    exist at once."""
    matrix = torch.empty(0)
    for row, vector in enumerate(vectors):
        if row == 0:
            matrix = vector.new_empty(count, len(vector))
        matrix[row] = vector
    return matrix
