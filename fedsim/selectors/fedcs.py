"""FedCS (Nishio and Yonetani, "Client Selection for Federated Learning with Heterogeneous Resources
in Mobile Edge", ICC 2019)."""

from typing import Literal

import numpy as np

from fedsim.core.parameters import Positive, Problems, parameters
from fedsim.selectors.base import (
    Clients,
    Positions,
    Resources,
    Selection,
    Selector,
    Signal,
    ascending,
    ceil,
    rule,
)


@parameters
class FedCS(Selector):
    """Selects as many clients as can download, train and upload within the `deadline`, by what they
    report of their resources.

    The resource request goes to ceil(`candidate_fraction` N) random clients (None: to K, as in the
    paper). `deadline` is the paper's T_round - T_cs - T_agg: the seconds left of a round for
    distribution, training and upload.

    `uploads: sequential` is the paper's Algorithm 3, for clients that upload one after another:
    starting from S = {} and Theta = 0, the candidate x of the smallest T^d(S + x) - T^d(S) + t^UL_x
    + max(0, t^UD_x - Theta) is taken next, where T^d(S) is the slowest download in S; it stays out
    unless T^d(S + x) + Theta' is below the deadline, with Theta' = Theta + t^UL_x + max(0, t^UD_x -
    Theta). `parallel` is for bandwidths of their own, which the simulated clock assumes: all
    candidates are taken whose download, training and upload together are below the deadline.

    Deviations: updates that miss the deadline are dropped by `system.deadline`, and weights are the
    `aggregator`'s. How many clients take part depends on their answers, and may be none.
    """

    needs = frozenset({Signal.RESOURCES})
    adaptive = True

    deadline: Positive
    candidate_fraction: float | None
    uploads: Literal["parallel", "sequential"]

    def problems(self) -> Problems:
        fraction = self.candidate_fraction
        if fraction is not None:
            yield rule(
                0 < fraction <= 1,
                "candidate_fraction",
                fraction,
                "must lie in (0, 1]",
                "null asks K clients",
            )

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        fraction, population = self.candidate_fraction, self.population
        wanted = (
            population.cohort_size if fraction is None else ceil(fraction * population.num_clients)
        )
        count = min(max(wanted, 1), len(clients.available))
        candidates = ascending(rng.choice(clients.available, count, replace=False))
        found = clients.resources(candidates)
        if self.uploads == "sequential":
            return Selection(ascending(candidates[one_after_another(found, self.deadline)]))
        return Selection(candidates[found.download + found.training + found.upload < self.deadline])


def one_after_another(found: Resources, deadline: float) -> Positions:
    """Algorithm 3: positions of the clients selected, in the order in which they are; ties go to
    the lower position."""
    left, chosen = list(range(len(found.upload))), list[int]()
    distribution, elapsed = 0.0, 0.0  # T^d(S) and Theta
    while left:
        idle = np.maximum(found.training[left] - elapsed, 0.0)
        increases = np.maximum(found.download[left] - distribution, 0.0) + found.upload[left] + idle
        best = int(np.argmin(increases))
        x = left.pop(best)
        after = elapsed + float(found.upload[x] + idle[best])
        slowest = max(distribution, float(found.download[x]))
        if slowest + after < deadline:
            distribution, elapsed = slowest, after
            chosen.append(x)
    return np.array(chosen, dtype=np.int64)
