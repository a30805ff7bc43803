"""FedCS: select as many clients as can finish before a deadline.

Nishio and Yonetani, "Client Selection for Federated Learning with Heterogeneous Resources in Mobile
Edge", ICC 2019 (arXiv 1804.08333).

A round waits for its slowest client. FedCS asks random candidates how long they take to download
the model, to train and to upload, and selects as many of them as finish in time.

In each round:

1. Ask ceil(`candidate_fraction` N) random clients for their resources. N is the number of clients,
   which the paper calls K.
2. Select candidates that finish before the deadline.

`uploads: sequential` is the paper's Algorithm 3, for clients that share a channel and upload one
after another. It starts from S = {} and Theta = 0. It takes next the candidate x with the smallest

    T^d(S + x) - T^d(S) + t^UL_x + max(0, t^UD_x - Theta)

T^d(S) is the time of the slowest download in S. t^UL_x is the upload time of x, and t^UD_x its
training time. Theta is the time from the end of the downloads until the last upload of S ends. With
x it becomes Theta' = Theta + t^UL_x + max(0, t^UD_x - Theta). x is selected if T^d(S + x) + Theta'
is below the deadline. Otherwise x is dropped.

`uploads: parallel` is for clients with a bandwidth of their own, which the simulated clock assumes:
all candidates are selected whose download, training and upload together are below the deadline.

Deviations: `system.deadline` decides what happens to updates that miss the deadline, and the
`aggregator` decides the weights. The number of selected clients depends on their answers and may be
0. Of candidates with equal increases the one with the lower id comes first.
"""

from typing import Literal

import numpy as np

from fedsim.selectors.base import (
    Clients,
    Generator,
    Positions,
    Positive,
    Problems,
    Resources,
    Selection,
    Selector,
    Signal,
    ascending,
    ceil,
    parameters,
    rule,
)


@parameters
class FedCS(Selector):
    """Selects candidates that can download, train and upload within the `deadline`."""

    needs = frozenset({Signal.RESOURCES})
    adaptive = True

    deadline: Positive  # seconds for download, training and upload (T_round - T_cs - T_agg)
    candidate_fraction: float | None  # share of all clients that are asked, in (0, 1]; None: K
    uploads: Literal["parallel", "sequential"]  # bandwidths of their own, or one shared channel

    def problems(self) -> Problems:
        fraction = self.candidate_fraction
        if fraction is not None:
            remedy = "null asks K clients"
            in_range = 0 < fraction <= 1
            yield rule(in_range, "candidate_fraction", fraction, "must lie in (0, 1]", remedy)

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        # 1. Resource request
        available = clients.available
        count = self.population.cohort_size
        if self.candidate_fraction is not None:
            count = max(ceil(self.candidate_fraction * self.population.num_clients), 1)
        num_asked = min(count, len(available))
        candidates = ascending(rng.choice(available, num_asked, replace=False))
        seconds = clients.resources(candidates)
        # 2. Client selection
        if self.uploads == "sequential":
            return Selection(ascending(candidates[one_after_another(seconds, self.deadline)]))
        total = seconds.download + seconds.training + seconds.upload
        return Selection(candidates[total < self.deadline])


def one_after_another(seconds: Resources, deadline: float) -> Positions:
    """Return the positions in `seconds` of the clients that Algorithm 3 selects, in its order."""
    remaining = list(range(len(seconds.upload)))
    chosen: list[int] = []
    slowest_download = 0.0  # T^d(S)
    elapsed = 0.0  # Theta
    while remaining:
        # how long the channel waits for the training of each remaining client
        idle = np.maximum(seconds.training[remaining] - elapsed, 0.0)
        longer_download = np.maximum(seconds.download[remaining] - slowest_download, 0.0)
        increases = longer_download + seconds.upload[remaining] + idle
        best = int(np.argmin(increases))
        client = remaining.pop(best)
        elapsed_after = elapsed + float(seconds.upload[client] + idle[best])
        download_after = max(slowest_download, float(seconds.download[client]))
        if download_after + elapsed_after < deadline:
            slowest_download = download_after
            elapsed = elapsed_after
            chosen.append(client)
    return np.array(chosen, dtype=np.int64)
