"""FedEntOpt (Lutz, Steidl, Müller and Samek, "Optimizing Federated Learning by Entropy-Based Client Selection",
2024)."""

import numpy as np
from numpy.typing import NDArray

from fedsim.core.exact import log
from fedsim.selectors.base import Clients, Population, Selection, Selector, Signal, ascending, check, highest, rule
from fedsim.selectors.tools import collect_label_counts, not_queued

Floats = NDArray[np.float64]


class EntropyGreedy(Selector):
    """Adds clients one by one, each time the one that maximises the entropy of the pooled labels; ties at random.

    The last `queue_length` selected clients are not eligible (None: N // 2, which is our choice). If fewer than K
    clients are eligible, those that have been in the queue longest are released. Clients report their label counts
    once.
    """

    needs = frozenset({Signal.LABEL_COUNTS})
    state = ("counts", "queue")

    def __init__(self, population: Population, *, queue_length: int | None) -> None:
        super().__init__(population)
        check(rule(queue_length is None or queue_length >= 0, "queue_length", queue_length, "must be null or >= 0"))
        self.queue_length = population.num_clients // 2 if queue_length is None else queue_length
        self.counts = np.empty((population.num_clients, 0), np.int64)
        self.queue: list[int] = []

    @property
    def start_up_rounds(self) -> int:
        return 1

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        self.counts = collect_label_counts(self.counts, clients)
        count = self.cohort_size(clients)
        ids = not_queued(clients.available, self.queue, count)
        counts, remaining = self.counts[ids].astype(np.float64), np.ones(len(ids), dtype=bool)
        picks: list[int] = []
        for _ in range(count):
            values = np.where(remaining, np.round(entropies(counts + counts[picks].sum(0)), 12), -np.inf)
            picks.append(int(highest(values, 1, rng)[0]))
            remaining[picks[-1]] = False
        chosen = [int(i) for i in ids[picks]]
        again = set(chosen)
        kept = [i for i in self.queue if i not in again]
        self.queue = [*kept, *chosen][-self.queue_length :] if self.queue_length else []
        return Selection(ascending(ids[picks]))


def entropies(counts: Floats) -> Floats:
    """Entropies [n] in nats of the label distributions given by the rows of `counts` [n, C]."""
    shares = counts / counts.sum(1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(shares > 0, shares * log(shares), 0.0)
    result: Floats = -terms.sum(1)
    return result
