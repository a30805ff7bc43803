"""Largest gradients: select the clients whose gradients, or updates, have the largest norms.

Marnissi, El Hammouti and Bergou, "Client Selection in Federated Learning based on Gradients
Importance", 2021 (arXiv 2111.11204).

In each round all available clients report the norm of their gradient, one number each. A long
gradient promises a large step, so the K clients with the largest norms are selected.
"""

from typing import Literal

from fedsim.selectors.base import (
    Clients,
    Generator,
    Selection,
    Selector,
    Signal,
    parameters,
    without_infinity,
)


@parameters
class GradNorm(Selector):
    """Selects the K clients with the largest norms. Norms that are not finite rank last."""

    of: Literal["gradient", "update"]  # norm of the full gradient, or of the update after training

    def __post_init__(self) -> None:
        of_update = frozenset({Signal.TRAINING, Signal.UPDATES})
        self.needs = frozenset({Signal.GRADIENTS}) if self.of == "gradient" else of_update

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        request = clients.gradient_norms if self.of == "gradient" else clients.update_norms
        norms = without_infinity(request(clients.available))
        return Selection(self.select_highest(norms, clients, rng))
