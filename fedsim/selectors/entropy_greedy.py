"""FedEntOpt: select clients whose pooled labels have the highest entropy.

Lutz, Steidl, Müller and Samek, "Optimizing Federated Learning by Entropy-Based Client Selection",
2024 (arXiv 2411.01240), Algorithm 1.

The more evenly the pooled labels of the cohort cover all classes, the higher their entropy. A queue
keeps recently selected clients out, so that all clients take part over time.

    H(p) = -sum_c p_c ln p_c,  p_c the share of class c in the pooled labels

In each round, with K of N clients to select:

1. Draw the first client uniformly from the clients that are not in the queue.
2. Until K clients are selected, add the client outside the queue that maximises the entropy of the
   pooled label counts.
3. Append the selected clients to the queue. While it is longer than `queue_length`, the client at
   its front leaves it.

Clients report their label counts once.

What the paper leaves open: The length of the queue (its Q) is N // 2 by default, because the paper
finds about N / 2 best for Dirichlet skew. Ties are broken at random. If fewer than K clients are
outside the queue, the clients that have been in it longest are released.
"""

import numpy as np

from fedsim.selectors.base import (
    Clients,
    Floats,
    Generator,
    Problems,
    Selection,
    Selector,
    Signal,
    ascending,
    highest,
    log,
    parameters,
    rule,
)
from fedsim.selectors.tools import collect_label_counts, not_queued


@parameters
class EntropyGreedy(Selector):
    """Selects a random first client, then greedily by the entropy of the pooled labels."""

    start_up_rounds = 1
    needs = frozenset({Signal.LABEL_COUNTS})
    state = ("counts", "queue")

    queue_length: int | None  # Q, number of recently selected clients kept out; None: N // 2

    def problems(self) -> Problems:
        length = self.queue_length
        holds = length is None or length >= 0
        yield rule(holds, "queue_length", length, "must be null or >= 0")

    def __post_init__(self) -> None:
        num_clients = self.population.num_clients
        self.max_queued = num_clients // 2 if self.queue_length is None else self.queue_length
        self.counts = np.empty((num_clients, 0), np.int64)  # label counts [N, C]
        self.queue: list[int] = []  # ids, the client selected longest ago first

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        self.counts = collect_label_counts(self.counts, clients)
        count = self.cohort_size(clients)
        candidates = not_queued(clients.available, self.queue, count)
        counts = self.counts[candidates].astype(np.float64)
        # 1. A random first client
        picks = [int(rng.integers(len(candidates)))]
        # 2. The client that raises the entropy most
        while len(picks) < count:
            pooled = counts + counts[picks].sum(0)
            scores = np.round(entropies(pooled), 12)  # so that equal entropies tie
            scores[picks] = -np.inf
            picks.append(int(highest(scores, 1, rng)[0]))
        # 3. The queue
        chosen = candidates[picks].tolist()
        queue = [client for client in self.queue if client not in chosen] + chosen
        self.queue = queue[max(len(queue) - self.max_queued, 0) :]
        return Selection(ascending(candidates[picks]))


def entropies(counts: Floats) -> Floats:
    """Return the entropies [n] in nats of the label distributions in the rows of `counts`
    [n, C]."""
    shares = counts / counts.sum(1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(shares > 0, shares * log(shares), 0.0)
    return -terms.sum(1)
