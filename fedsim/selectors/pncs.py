"""PNCS: clients whose gradients are least alike under a power-norm cosine similarity, with an age-of-update queue."""

from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.clients import Clients, Signal
from fedsim.cohort import Population, Selection
from fedsim.errors import at_least, check, positive, rule
from fedsim.selectors.base import Selector, ascending
from fedsim.selectors.subset import least_alike

Floats = NDArray[np.float64]


class PNCS(Selector):
    """All clients report a gradient; the K with the lowest mean pairwise similarity train (Eq. 9-11).

    s_p(x, y) = sum_l sgn(x_l y_l) |x_l y_l|^(p/2) / sqrt(sum_l |x_l|^p sum_l |y_l|^p): the cosine of the vectors
    sgn(x) |x|^(p/2), hence a cosine at p = 2. (Eq. 9 and 10 are missing from the text at hand; this reading is one of
    several, bounded, symmetric and signed.) A zero gradient has similarity 0 with everything.

    `grad`: full gradient, that of one mini-batch, or the local_update w - w_k after training (then nobody trains
    twice). `layers` picks parameters by the beginning of their names (None: all); `layer_agg: mean` averages the
    similarities of the layers, `concat` takes them as one vector. The last `queue_length` selected clients sit out
    (`queue_unit: clients`), or those of the last `queue_length` rounds (`rounds`); where fewer than K are left, those
    that have waited longest are let back in. `search`: exact up to 200,000 subsets, else greedy with `swap_passes`
    rounds of best swaps; `auto` decides by that number. `age_weight` subtracts so much per round since a client's
    last selection from its similarities (COSAGE).
    """

    state = ("queue", "last_round")

    def __init__(
        self,
        population: Population,
        *,
        p: float,
        grad: Literal["full", "batch", "local_update"],
        layers: list[str] | None,
        layer_agg: Literal["mean", "concat"],
        queue_length: int,
        queue_unit: Literal["clients", "rounds"],
        search: Literal["auto", "exact", "greedy"],
        swap_passes: int,
        age_weight: float,
    ) -> None:
        super().__init__(population)
        check(
            positive("p", p),
            rule(layers is None or len(layers) > 0, "layers", layers, "must be null or name at least one layer"),
            at_least("queue_length", queue_length, 0),
            at_least("swap_passes", swap_passes, 0),
            at_least("age_weight", age_weight, 0),
        )
        self.p, self.grad, self.layers, self.layer_agg = p, grad, layers, layer_agg
        self.queue_length, self.queue_unit = queue_length, queue_unit
        self.search, self.swap_passes, self.age_weight = search, swap_passes, age_weight
        self.needs = frozenset({Signal.TRAINING if grad == "local_update" else Signal.GRADIENTS})
        self.queue: list[list[int]] = []
        self.last_round = np.zeros(population.num_clients, np.int64)

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        count = self.cohort_size(clients)
        similarity = self._similarities(clients)
        eligible = self.eligible(clients.available, count)
        rows = np.searchsorted(clients.available, eligible)
        table = similarity[np.ix_(rows, rows)]
        if self.age_weight:
            age = round - self.last_round[eligible]
            table = table - self.age_weight * (age[:, None] + age[None, :]) / 2
        chosen = ascending(eligible[least_alike(table, count, self.search, self.swap_passes, rng)])
        self._enqueue(chosen, rng)
        self.last_round[chosen] = round
        return Selection(chosen)

    def eligible(self, available: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """Who of the available is not in the queue; the longest-waiting are released until `count` are."""
        waiting = [i for batch in self.queue for i in batch]
        barred = waiting[-self.queue_length :] if self.queue_unit == "clients" and self.queue_length else waiting
        barred = [] if self.queue_length == 0 else [i for i in barred if i in set(available.tolist())]
        surplus = max(count - (len(available) - len(barred)), 0)
        return np.setdiff1d(available, np.array(barred[surplus:], dtype=np.int64))

    def _enqueue(self, chosen: NDArray[np.int64], rng: np.random.Generator) -> None:
        batch = [int(i) for i in rng.permutation(chosen)]
        kept = [[i for i in b if i not in batch] for b in self.queue]
        limit = self.queue_length
        self.queue = [*kept, batch][-limit:] if limit else []

    def _similarities(self, clients: Clients) -> Floats:
        if self.layers is None or self.layer_agg == "concat":
            return similarities(self._vectors(clients, self.layers), self.p)
        tables = [similarities(self._vectors(clients, [layer]), self.p) for layer in self.layers]
        mean: Floats = np.mean(tables, axis=0)
        return mean

    def _vectors(self, clients: Clients, layers: list[str] | None) -> Iterator[Tensor]:
        if self.grad == "local_update":
            return clients.updates(clients.available, layers)
        return clients.gradients(clients.available, batch=self.grad == "batch", layers=layers)


def similarities(vectors: Iterator[Tensor], p: float) -> Floats:
    """s_p of every pair, [N, N], float64; the diagonal is 1 (0 for zero vectors).

    Each vector is divided by its largest entry first, as powers underflow otherwise.
    """
    rows = torch.stack([power(v, p) for v in vectors])
    return (rows @ rows.T).clamp(-1, 1).cpu().numpy()


def power(vector: Tensor, p: float) -> Tensor:
    """sgn(x) |x|^(p/2), of unit length; zero for a zero vector."""
    x = torch.nan_to_num(vector.double(), nan=0.0, posinf=0.0, neginf=0.0)
    x = x / x.abs().max().clamp(min=torch.finfo(torch.float64).tiny)
    y = x.sign() * x.abs() ** (p / 2)
    length = y.norm()
    return y / length if length > 0 else y
