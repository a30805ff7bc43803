"""FedEntOpt: select clients whose pooled labels have the highest entropy.

Lutz, Steidl, Müller and Samek, "Optimizing Federated Learning by Entropy-Based Client Selection",
2024 (arXiv 2411.01240).

Of this paper only the abstract and the opening pages could be read, and no code of the authors was
found. So this docstring cites no equation. The abstract confirms the idea: the server selects
clients whose pooled labels have the highest entropy. The algorithm follows two re-implementations
by others.

The label counts of a client are its numbers of training samples in each class. The pool of some
clients is the sum of their label counts. The more evenly the pool covers all classes, the higher
its entropy:

    H(p) = -sum_c p_c ln p_c,  p_c the share of class c in the pool

A queue excludes recently selected clients, so that all clients take part over time. N is the number
of all clients and K the number of clients to select. In each round, the candidates are the
available clients that are not in the queue:

1. Draw the first client uniformly from the candidates.
2. Until K clients are selected, add the candidate that maximises the entropy of the pool of all
   selected clients.
3. Append the selected clients to the queue. While the queue is too long, remove the client at its
   front, which was selected longest ago.

The server requests the label counts of each client in the first round in which the client is
available.

Not confirmed by the authors: the steps above, and the maximum length of the queue (Q). It is N // 2
by default. By the re-implementations' notes, the best Q is about 0.5 N for Dirichlet skew, and
0.7 N for few classes per client. One re-implementation has 0.7 N by default, the other 0.5 N.

fedsim's decisions: The queue changes after the round, as in one of the two. Ties are broken at
random. If there are fewer than K candidates, the available clients that have been in the queue
longest also become candidates. If fewer than K clients are available, all of them are selected.
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
from fedsim.selectors.candidates import not_queued
from fedsim.selectors.label_counts import collect_label_counts


@parameters
class EntropyGreedy(Selector):
    """Selects a random first client, then greedily by the entropy of the pooled labels."""

    start_up_rounds = 1
    needs = frozenset({Signal.LABEL_COUNTS})
    state = ("label_counts", "queue")

    queue_length: int | None
    """Q, the maximum number of clients in the queue; None: N // 2."""

    def problems(self) -> Problems:
        """Yield a problem if the length of the queue is negative."""
        length = self.queue_length
        is_valid = length is None or length >= 0
        yield rule(is_valid, "queue_length", length, "must be null or >= 0")

    def __post_init__(self) -> None:
        num_clients = self.population.num_clients
        self.max_queued = num_clients // 2 if self.queue_length is None else self.queue_length
        """Q as a number, also if `queue_length` is None."""
        self.label_counts = np.empty((num_clients, 0), np.int64)
        """Label counts [N, C] of C classes, [N, 0] before the first report. The row of a client
        that has not reported yet is -1."""
        self.queue: list[int] = []
        """Ids of the clients in the queue. The client at the front was selected longest ago."""

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        """Return the clients of the round, and append them to the queue."""
        self.label_counts = collect_label_counts(self.label_counts, clients)
        cohort_size = self.cohort_size(clients)
        candidates = not_queued(clients.available, self.queue, cohort_size)
        counts_of_candidates = self.label_counts[candidates].astype(np.float64)
        # 1. A random first client. `picks` holds positions in `candidates`, not ids.
        picks = [int(rng.integers(len(candidates)))]
        # 2. The candidate that maximises the entropy of the pool, until the cohort is complete
        while len(picks) < cohort_size:
            # Row i is the pool if candidate i joins the picked ones. The rows of candidates that
            # are already picked mean nothing, so their scores become -inf.
            pools = counts_of_candidates + counts_of_candidates[picks].sum(0)
            # 12 digits: entropies that differ by rounding errors only are then equal, and tie.
            scores = np.round(entropies(pools), 12)
            scores[picks] = -np.inf
            picks.append(int(highest(scores, 1, rng)[0]))
        # 3. The queue. Selected clients that were still in it move to its end.
        selected_ids = candidates[picks].tolist()
        queue = [client for client in self.queue if client not in selected_ids]
        queue += selected_ids
        # Not queue[-max_queued:], which is the whole queue if max_queued is 0.
        num_removed = max(len(queue) - self.max_queued, 0)
        self.queue = queue[num_removed:]
        return Selection(ascending(candidates[picks]))


def entropies(pools: Floats) -> Floats:
    """Return the entropies [n] in nats of the label distributions in the rows of `pools` [n, C].

    No row may be 0 in all columns. `select` passes none: available clients have training samples,
    and therefore labels.
    """
    shares = pools / pools.sum(1, keepdims=True)
    # The term of a class without samples is 0. numpy computes it as 0 * -inf, warns, and gets nan.
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(shares > 0, shares * log(shares), 0.0)
    return -terms.sum(1)
