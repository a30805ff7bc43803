"""LinUCB: a contextual bandit that predicts the reward of a client from what the server knows.

Li, Chu, Langford and Schapire, "A Contextual-Bandit Approach to Personalized News Article
Recommendation", WWW 2010 (arXiv 1003.0146), as a bandit over clients.

The server fits a linear model of rewards to the contexts x of the clients. It selects the clients
whose predicted reward plus its uncertainty is highest:

    u_k = x_k theta + alpha sqrt(x_k A^-1 x_k)
    theta = A^-1 b,  A = ridge I + sum x x^T,  b = sum reward x

The sums are over all rewards so far: x is the context of the client in the round of the reward.

What the paper leaves open for clients, and what is chosen here:

- One theta serves all clients, because a client is seen a few times only. Li et al.'s disjoint
  models have one for each arm. Selecting the K highest bounds at once is C2UCB (Qin, Chen and Zhu,
  2014) for a reward that is a sum over the cohort.
- The reward is the client's mean training loss, which it sends with its update. Loss-based
  selection seeks high losses (Cho et al., 2022). It is Oort's utility without the size.
- The context x_k has five entries, which the server has anyway: 1, n_k / max n with n_k the number
  of samples, the client's selections per past round, the rounds since its last selection divided by
  the round t (1 if it was never selected), and its latest training loss. Clients that never sent a
  loss get the mean loss of the clients that did, or 0 if no client did.
"""

import numpy as np

from fedsim.selectors.base import (
    Clients,
    Cohort,
    Floats,
    Generator,
    NonNegative,
    Positive,
    Selection,
    Selector,
    Server,
    Signal,
    parameters,
)


@parameters
class LinUCB(Selector):
    """Selects the K clients with the highest upper confidence bounds of a linear model."""

    needs = frozenset({Signal.TRAINING_LOSS})
    state = ("inverse", "b", "counts", "last_selected", "losses")

    alpha: NonNegative  # weight of the uncertainty
    ridge: Positive  # weight of the ridge penalty on theta

    def __post_init__(self) -> None:
        num_clients = self.population.num_clients
        self.inverse = np.eye(5) / self.ridge  # A^-1
        self.b = np.zeros(5)
        self.counts = np.zeros(num_clients, np.int64)  # selections of each client [N]
        self.last_selected = np.zeros(num_clients, np.int64)  # round [N], 0: never
        self.losses = np.full(num_clients, np.nan)  # latest training losses [N]
        # `select` sets the contexts of the round, and `observe` reads them in the same round.
        self._contexts = np.empty((num_clients, 5))

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        self._contexts = self.contexts(round)
        x = self._contexts[clients.available]
        rewards = (x * self.theta).sum(1)
        variances = (times(x, self.inverse) * x).sum(1)
        widths = np.sqrt(np.maximum(variances, 0))
        bounds = rewards + self.alpha * widths
        chosen = self.select_highest(bounds, clients, rng)
        self.counts[chosen] += 1
        self.last_selected[chosen] = round
        return Selection(chosen)

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        assert cohort.loss is not None
        for client, loss in zip(cohort.ids, cohort.loss, strict=True):
            if np.isfinite(loss):
                x = self._contexts[client]
                solved = times(x[None], self.inverse)[0]  # A^-1 x
                # the inverse of A + x x^T, by Sherman and Morrison's formula
                self.inverse -= solved[:, None] * solved / (1 + (solved * x).sum())
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
        """Return the contexts x_k of all clients in `round`, [N, 5]."""
        sizes = self.population.sizes / self.population.sizes.max()
        selections = self.counts / max(round - 1, 1)
        rounds_since = (round - self.last_selected) / round
        has_sent = np.isfinite(self.losses)
        mean_loss = self.losses[has_sent].mean() if has_sent.any() else 0.0
        losses = np.where(has_sent, self.losses, mean_loss)
        return np.stack([np.ones(len(sizes)), sizes, selections, rounds_since, losses], axis=1)


def times(rows: Floats, matrix: Floats) -> Floats:
    """Return the matrix product of `rows` [n, d] and `matrix` [d, d], the same on every processor.

    The d terms of each sum are added in a fixed order, while BLAS has an order of its own.
    """
    return (rows[:, :, None] * matrix).sum(1)
