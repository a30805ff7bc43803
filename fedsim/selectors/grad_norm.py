"""The clients of largest gradient or update norm (as in Marnissi et al., "Client Selection in
Federated Learning based on Gradients Importance", 2021)."""

from typing import Literal

import numpy as np

from fedsim.selectors.base import (
    Clients,
    Selection,
    Selector,
    Signal,
    ascending,
    highest,
    parameters,
    without_infinity,
)


@parameters
class GradNorm(Selector):
    """Selects the K clients with the largest norms, which all clients report.

    `of: gradient` is the norm of the full gradient, `of: update` that of the update after local
    training. Norms that are not finite rank last.
    """

    of: Literal["gradient", "update"]

    def __post_init__(self) -> None:
        self.needs = frozenset({Signal.GRADIENTS if self.of == "gradient" else Signal.TRAINING})

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        ids = clients.available
        norms = clients.gradient_norms(ids) if self.of == "gradient" else clients.update_norms(ids)
        return Selection(
            ascending(ids[highest(without_infinity(norms), self.cohort_size(clients), rng)])
        )
