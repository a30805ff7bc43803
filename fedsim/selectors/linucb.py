"""LinUCB: a contextual bandit that predicts the reward of a client from what the server knows.

Li, Chu, Langford and Schapire, "A Contextual-Bandit Approach to Personalized News Article
Recommendation", WWW 2010 (arXiv 1003.0146), as a bandit over clients.

The server fits a linear model of rewards to the contexts x of the clients. It selects the K clients
of the highest upper confidence bound u, which is the predicted reward plus alpha times its
uncertainty:

    u_k = x_k^T theta + alpha sqrt(x_k^T A^-1 x_k)
    theta = A^-1 b,  A = ridge I + sum x x^T,  b = sum reward x

Both sums are over all rewards so far. For each reward, x is the context that the client had when it
was selected.

What the paper leaves open for clients, and what is chosen here:

- All clients share one theta. Li et al.'s disjoint models have one for each arm (here: client), but
  each client is seen only a few times. Taking the K highest bounds at once is C2UCB (Qin, Chen and
  Zhu, 2014) if the reward of a cohort is the sum of its clients' rewards.
- The reward is the client's mean training loss, which it sends with its update. Loss-based
  selection seeks high losses (Cho et al., 2022). Oort's utility is similar: the root mean square of
  the losses of single samples, times the number of samples.
- The context x_k has five entries, which the server has anyway:
  1. the constant 1,
  2. the number of samples n_k, divided by the largest of all clients,
  3. how often the client was selected, divided by the number of past rounds,
  4. the rounds since its last selection, divided by this round's number: 1 if it never was,
  5. its latest training loss. A client that never sent one has the mean of those that did, or 0.
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

NUM_ENTRIES = 5
"""Number of entries of a context."""


@parameters
class LinUCB(Selector):
    """Selects the K clients with the highest upper confidence bounds of a linear model."""

    needs = frozenset({Signal.TRAINING_LOSS})
    state = ("inverse", "b", "counts", "last_selected", "losses")

    alpha: NonNegative  # weight of the uncertainty
    ridge: Positive  # weight of the ridge penalty on theta

    def __post_init__(self) -> None:
        num_clients = self.population.num_clients
        self.inverse = np.eye(NUM_ENTRIES) / self.ridge  # A^-1
        self.b = np.zeros(NUM_ENTRIES)
        self.counts = np.zeros(num_clients, np.int64)  # selections of each client [N]
        self.last_selected = np.zeros(num_clients, np.int64)  # a round, 0 if never [N]
        self.losses = np.full(num_clients, np.nan)  # latest training losses [N]
        # `select` sets the contexts of the round, and `observe` reads them in the same round. No
        # checkpoint lies between, so they are not in `state`.
        self._contexts = np.zeros((num_clients, NUM_ENTRIES))

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        self._contexts = self.contexts(round)
        x = self._contexts[clients.available]
        predicted_rewards = (x * self.theta).sum(1)
        variances = (product(x, self.inverse) * x).sum(1)  # x_k^T A^-1 x_k
        uncertainties = np.sqrt(np.maximum(variances, 0))  # rounding may leave one below 0
        bounds = predicted_rewards + self.alpha * uncertainties
        chosen = self.select_highest(bounds, clients, rng)
        self.counts[chosen] += 1
        self.last_selected[chosen] = round
        return Selection(chosen)

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        assert cohort.loss is not None
        for client, loss in zip(cohort.ids, cohort.loss, strict=True):
            if np.isfinite(loss):
                x = self._contexts[client]
                solved = product(x[None], self.inverse)[0]  # A^-1 x, because A is symmetric
                # The Sherman-Morrison formula: the inverse of A + x x^T is
                # A^-1 - (A^-1 x) (A^-1 x)^T / (1 + x^T A^-1 x).
                self.inverse -= np.outer(solved, solved) / (1 + (solved * x).sum())
                self.b += loss * x
                self.losses[client] = loss

    @property
    def theta(self) -> Floats:
        """The coefficients A^-1 b, an array of shape [5]."""
        return product(self.b[None], self.inverse)[0]

    @property
    def trace(self) -> dict[str, list[float]]:
        return {"theta": self.theta.round(6).tolist()}

    def contexts(self, round: int) -> Floats:
        """Return the contexts x_k of all clients in `round`, [N, 5]."""
        sizes = self.population.sizes / self.population.sizes.max()
        shares_selected = self.counts / max(round - 1, 1)  # in round 1, all counts are 0
        shares_since = (round - self.last_selected) / round
        has_sent = np.isfinite(self.losses)
        mean_loss = self.losses[has_sent].mean() if has_sent.any() else 0.0
        losses = np.where(has_sent, self.losses, mean_loss)
        constants = np.ones(len(sizes))
        return np.stack([constants, sizes, shares_selected, shares_since, losses], axis=1)


def product(rows: Floats, matrix: Floats) -> Floats:
    """Return the matrix product of `rows` [n, d] and `matrix` [d, d], with the same bits on every
    processor.

    The d terms of each sum are added in a fixed order. The order of BLAS, and so of `@`, depends on
    the machine.
    """
    return (rows[:, :, None] * matrix).sum(1)
