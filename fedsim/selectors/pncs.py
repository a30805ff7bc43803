"""PNCS: clients whose gradients are least alike under a power-norm cosine similarity, with an age-of-update queue."""

from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.communication.clients import Clients
from fedsim.communication.compression import Identity, Sketch
from fedsim.communication.signals import Signal
from fedsim.errors import at_least, check, positive, rule
from fedsim.selectors.base import Selector, ascending
from fedsim.selectors.tools.power_norm import Reading, similarities
from fedsim.selectors.tools.queues import not_waiting
from fedsim.selectors.tools.subset import least_alike
from fedsim.types import Population, Selection

Floats = NDArray[np.float64]


class PNCS(Selector):
    """All clients report a gradient; the K with the lowest mean pairwise similarity train (Eq. 9-11).

    `similarity` is one of five readings of "cosine similarity under the p-norm" (see `power_norm.similarities`). A
    zero gradient has similarity 0 with everything.

    `grad`: full gradient, that of one mini-batch, or the local_update w - w_k after training (then nobody trains
    twice); what is sent of it is its `sketch`. `layers` picks parameters by the beginning of their names (None: all,
    as one vector; `each`: all, every trained layer by itself); `layer_agg: mean` averages the similarities of the
    layers, `params` weighs them by their numbers of parameters, `concat` takes them as one vector. The last
    `queue_length` selected clients sit out (`queue_unit: clients`), or those selected in round t until
    t' - t > queue_length (`queue_unit: rounds`; `queue_bound: ge` for >=). Where fewer than K are left, `on_shortage`
    lets those back in that have waited longest (`release_oldest`), any (`random`), or selects fewer, but one
    (`shrink`). `search`: exact up to 200,000 subsets, else greedy with `swap_passes` rounds of best swaps; `auto`
    decides by that number. `age_weight` subtracts so much per round since a client's last selection from its
    similarities (COSAGE).
    """

    state = ("queue", "last_round")

    def __init__(
        self,
        population: Population,
        *,
        p: float,
        similarity: Reading,
        grad: Literal["full", "batch", "local_update"],
        sketch: Sketch,
        layers: list[str] | Literal["each"] | None,
        layer_agg: Literal["mean", "params", "concat"],
        queue_length: int,
        queue_unit: Literal["clients", "rounds"],
        queue_bound: Literal["gt", "ge"],
        on_shortage: Literal["release_oldest", "random", "shrink"],
        search: Literal["auto", "exact", "greedy"],
        swap_passes: int,
        age_weight: float,
    ) -> None:
        super().__init__(population)
        several = layers is not None and (layers == "each" or len(layers) > 1) and layer_agg != "concat"
        check(
            positive("p", p),
            rule(similarity != "even_power" or p % 2 == 0, "p", p, "must be even for similarity=even_power"),
            rule(layers is None or len(layers) > 0, "layers", layers, "must be null or name at least one layer"),
            rule(
                isinstance(sketch, Identity) or not several,
                "layer_agg",
                layer_agg,
                "must be concat where a sketch is taken of several layers",
                "selector.layer_agg=concat, or selector/sketch=identity",
            ),
            at_least("queue_length", queue_length, 0),
            at_least("swap_passes", swap_passes, 0),
            at_least("age_weight", age_weight, 0),
        )
        self.p, self.similarity, self.grad, self.sketch = p, similarity, grad, sketch
        self.layers = None if layers == "each" else layers
        self.layer_agg, self.separate = layer_agg, several
        self.queue_length, self.queue_unit, self.queue_bound = queue_length, queue_unit, queue_bound
        self.on_shortage, self.adaptive = on_shortage, on_shortage == "shrink"
        self.search, self.swap_passes, self.age_weight = search, swap_passes, age_weight
        self.needs = frozenset({Signal.TRAINING if grad == "local_update" else Signal.GRADIENTS})
        self.queue: list[list[int]] = []
        self.last_round = np.zeros(population.num_clients, np.int64)

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        table = self._similarities(clients)
        eligible = self.eligible(clients.available, self.cohort_size(clients), rng)
        if len(eligible) < len(clients.available):
            rows = np.searchsorted(clients.available, eligible)
            table = table[np.ix_(rows, rows)]
        if self.age_weight:
            age = round - self.last_round[eligible]
            table = table - self.age_weight * (age[:, None] + age[None, :]) / 2
        count = min(self.cohort_size(clients), len(eligible))
        chosen = ascending(eligible[least_alike(table, count, self.search, self.swap_passes, rng)])
        self._enqueue(chosen, rng)
        self.last_round[chosen] = round
        return Selection(chosen)

    def eligible(self, available: NDArray[np.int64], count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Who of the available may be selected, after what `on_shortage` says where fewer than `count` are left."""
        waiting = [i for batch in self.queue for i in batch]
        if self.queue_unit == "clients":
            waiting = waiting[-self.queue_length :] if self.queue_length else []
        if self.on_shortage == "random":
            waiting = [int(i) for i in rng.permutation(waiting)]
        return not_waiting(available, waiting, 1 if self.on_shortage == "shrink" else count)

    def _enqueue(self, chosen: NDArray[np.int64], rng: np.random.Generator) -> None:
        batch = [int(i) for i in rng.permutation(chosen)]
        kept = [[i for i in b if i not in batch] for b in self.queue]
        shorter = self.queue_unit == "rounds" and self.queue_bound == "ge"
        limit = max(self.queue_length - shorter, 0)
        self.queue = [*kept, batch][-limit:] if limit else []

    def _similarities(self, clients: Clients) -> Floats:
        pieces = self._pieces(clients)
        if not self.separate:
            return similarities(list(pieces.values()), self.p, self.similarity)
        groups = [[pieces[n] for n in clients.layer_names([layer])] for layer in self._layers(clients)]
        tables = [similarities(group, self.p, self.similarity) for group in groups]
        numels = [sum(p.shape[1] for p in group) for group in groups]
        mean: Floats = np.average(tables, axis=0, weights=numels if self.layer_agg == "params" else None)
        return mean

    def _layers(self, clients: Clients) -> list[str]:
        """The beginnings of names whose parameters are compared together."""
        if self.layers is not None:
            return self.layers
        return list(dict.fromkeys(name.rpartition(".")[0] or name for name in clients.layer_names(None)))

    def _pieces(self, clients: Clients) -> dict[str, Tensor]:
        """What everybody reports, as matrices [N, d] by tensor (or one of sketches)."""
        ids = clients.available
        if self.grad == "local_update":
            return clients.updates(ids, layers=self.layers, sketch=self.sketch)
        reports = clients.gradients(ids, batch=self.grad == "batch", layers=self.layers, sketch=self.sketch)
        stack = stacked(reports, len(ids))
        if not self.separate:
            return {"": stack}
        names = clients.layer_names(self.layers)
        return dict(zip(names, stack.split([clients.params[n].numel() for n in names], dim=1), strict=True))


def stacked(vectors: Iterator[Tensor], count: int) -> Tensor:
    """`count` vectors as a matrix, filled as they come."""
    matrix = torch.empty(0)
    for row, vector in enumerate(vectors):
        if row == 0:
            matrix = vector.new_empty(count, len(vector))
        matrix[row] = vector
    return matrix
