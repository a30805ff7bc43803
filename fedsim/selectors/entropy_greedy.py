"""FedEntOpt (Lutz, Steidl, Müller and Samek, "Optimizing Federated Learning by Entropy-Based Client Selection",
2024)."""

import numpy as np

from fedsim.core.parameters import Problems, parameters
from fedsim.selectors.base import Clients, Floats, Selection, Selector, Signal, ascending, highest, log, rule
from fedsim.selectors.tools import collect_label_counts, not_queued


@parameters
class EntropyGreedy(Selector):
    """Adds clients one by one, each time the one that maximises the entropy of the pooled labels; ties at random.

    The last `queue_length` selected clients are not eligible (None: N // 2, which is our choice); if fewer than K are,
    those that have been in the queue longest are released. Clients report their label counts once.
    """

    start_up_rounds = 1
    needs = frozenset({Signal.LABEL_COUNTS})
    state = ("counts", "queue")

    queue_length: int | None

    def problems(self) -> Problems:
        length = self.queue_length
        yield rule(length is None or length >= 0, "queue_length", length, "must be null or >= 0")

    def __post_init__(self) -> None:
        self.longest = self.population.num_clients // 2 if self.queue_length is None else self.queue_length
        self.counts = np.empty((self.population.num_clients, 0), np.int64)
        self.queue: list[int] = []

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
        chosen = ids[picks].tolist()
        kept = [i for i in self.queue if i not in chosen]
        self.queue = [*kept, *chosen][-self.longest :] if self.longest else []
        return Selection(ascending(ids[picks]))


def entropies(counts: Floats) -> Floats:
    """Entropies [n] in nats of the label distributions given by the rows of `counts` [n, C]."""
    shares = counts / counts.sum(1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(shares > 0, shares * log(shares), 0.0)
    return -terms.sum(1)
