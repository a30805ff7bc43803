"""FedEntOpt (Lutz, Steidl, Müller and Samek, "Optimizing Federated Learning by Entropy-Based Client
Selection", 2024, arXiv 2411.01240)."""

import numpy as np

from fedsim.core.arrays import Floats
from fedsim.core.parameters import Problems, parameters
from fedsim.selectors.base import (
    Clients,
    Selection,
    Selector,
    Signal,
    ascending,
    highest,
    log,
    rule,
)
from fedsim.selectors.tools import collect_label_counts, not_queued


@parameters
class EntropyGreedy(Selector):
    """Algorithm 1 of the paper: pools labels greedily, from a first client that is drawn.

    1. Draw the first client of the round uniformly from the clients that are not in the queue.
    2. Until K are selected, add the client outside the queue that maximises the entropy of the pooled label counts.
    3. Append the selected clients to the queue; the oldest leave it while it is longer than `queue_length`.

    Clients report their label counts once. The paper does not fix three things. `queue_length` (its
    Q) is N // 2 where it is None: the paper finds about N / 2 best for Dirichlet skew. Ties are
    broken at random. If fewer than K clients are outside the queue, those that have been in it
    longest are released.
    """

    start_up_rounds = 1
    needs = frozenset({Signal.LABEL_COUNTS})
    state = ("counts", "queue")

    queue_length: int | None

    def problems(self) -> Problems:
        length = self.queue_length
        yield rule(length is None or length >= 0, "queue_length", length, "must be null or >= 0")

    def __post_init__(self) -> None:
        self.longest = (
            self.population.num_clients // 2 if self.queue_length is None else self.queue_length
        )
        self.counts = np.empty((self.population.num_clients, 0), np.int64)
        self.queue: list[int] = []

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        self.counts = collect_label_counts(self.counts, clients)
        count = self.cohort_size(clients)
        ids = not_queued(clients.available, self.queue, count)
        counts = self.counts[ids].astype(np.float64)
        picks = [int(rng.integers(len(ids)))]
        while len(picks) < count:
            pooled_entropies = np.round(entropies(counts + counts[picks].sum(0)), 12)
            pooled_entropies[picks] = -np.inf
            picks.append(int(highest(pooled_entropies, 1, rng)[0]))
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
