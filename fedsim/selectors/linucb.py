"""LinUCB (Li, Chu, Langford and Schapire, "A Contextual-Bandit Approach to Personalized News
Article Recommendation", WWW 2010), as a bandit over clients."""

import numpy as np

from fedsim.core.arrays import Floats
from fedsim.core.parameters import NonNegative, Positive, parameters
from fedsim.core.types import Cohort
from fedsim.selectors.base import Clients, Selection, Selector, Server, Signal, ascending, highest


@parameters
class LinUCB(Selector):
    """Selects the K clients with the highest upper confidence bounds x_k theta + `alpha` sqrt(x_k
    A^-1 x_k).

    theta = A^-1 b is a ridge regression of rewards on contexts, A = `ridge` I + sum x x^T and b =
    sum reward x over all that was observed. Left open, and chosen here:

    - One theta for all clients, not one each (Li et al.'s disjoint models), since a client is seen a few times only;
      the K highest bounds at once are C2UCB's (Qin, Chen and Zhu, 2014) for a reward that is a sum over the cohort.
    - The reward is the client's mean training loss, which it sends with its update: a high one is what loss-based
      selection seeks (Cho et al., 2022), and Oort's utility but for the size.
    - The context x_k is what the server has anyway: 1, n_k / max n, selections per round so far, rounds since the last
      one divided by t (1 for never), and the latest training loss (of those who never sent one: the others' mean).
    """

    needs = frozenset({Signal.TRAINING_LOSS})
    state = ("inverse", "b", "counts", "last_round", "losses")

    alpha: NonNegative
    ridge: Positive

    def __post_init__(self) -> None:
        num = self.population.num_clients
        self.inverse = np.eye(5) / self.ridge  # A^-1
        self.b = np.zeros(5)
        self.counts = np.zeros(num, np.int64)
        self.last_round = np.zeros(num, np.int64)
        self.losses = np.full(num, np.nan)
        self._contexts = np.empty((num, 5))

    def select(self, round: int, clients: Clients, rng: np.random.Generator) -> Selection:
        ids = clients.available
        self._contexts = self.contexts(round)
        x = self._contexts[ids]
        widths = np.sqrt(np.maximum((times(x, self.inverse) * x).sum(1), 0))
        bounds = (x * self.theta).sum(1) + self.alpha * widths
        chosen = ascending(ids[highest(bounds, self.cohort_size(clients), rng)])
        self.counts[chosen] += 1
        self.last_round[chosen] = round
        return Selection(chosen)

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        assert cohort.loss is not None
        for client, loss in zip(cohort.ids, cohort.loss, strict=True):
            if np.isfinite(loss):
                x = self._contexts[client]
                image = times(x[None], self.inverse)[0]
                self.inverse -= (
                    image[:, None] * image / (1 + (image * x).sum())
                )  # Sherman and Morrison
                self.b += loss * x
                self.losses[client] = loss

    @property
    def theta(self) -> Floats:
        """The coefficients A^-1 b [5]."""
        return times(self.b[None], self.inverse)[0]

    @property
    def trace(self) -> dict[str, list[float]]:
        return {"theta": self.theta.round(6).tolist()}

    def contexts(self, round: int) -> Floats:
        """The contexts x_k of all clients in `round`, [N, 5]."""
        sent = np.isfinite(self.losses)
        mean = self.losses[sent].mean() if sent.any() else 0.0
        sizes = self.population.sizes / self.population.sizes.max()
        counts, waits = self.counts / max(round - 1, 1), (round - self.last_round) / round
        return np.stack(
            [np.ones(len(sizes)), sizes, counts, waits, np.where(sent, self.losses, mean)], axis=1
        )


def times(rows: Floats, matrix: Floats) -> Floats:
    """`rows` [n, d] times `matrix` [d, d], each sum in the order of d: the same on every
    processor."""
    return (rows[:, :, None] * matrix).sum(1)
