"""FedABC: select clients with high losses, smoothed over clients with similar models.

Ye, An, Wang, Yan and Carle, "FedABC: Attention-Based Client Selection for Federated Learning with
Long-Term View", 2025. Section and equation numbers are the paper's.

A client matters if the global model is bad on its data, and on the data of clients like it. The
server knows which clients are alike from the predictions of their models on public samples. More
clients are selected in later rounds, because the paper's long-term view gives these more weight.

In the first round of the run that has available clients, all of these take part. In each later
round, i, j and k are available clients, and P_k are the class probabilities that client k's model
predicted for the public samples after its latest participation:

1. v_j, the loss of the global model on client j's data: all clients report it.       (Eq. 12)
2. d_kj = KL(P_k || P_j), averaged over the public samples.                           (Eq. 9, 10)
3. c_kj = exp(-d_kj) / sum_i exp(-d_ki), the attention of client k to client j.       (Eq. 11)
4. S_k = sum_j c_kj v_j, the score of client k.                                       (Eq. 13)
5. Select the clients of highest score. `threshold` says how many.        (Eq. 14, section V-A)
6. Average their models in proportion to S_k (or to other `weights`).                 (Eq. 15)

As printed, a client also attends to itself (`self_term`). The threshold tau_t counts rounds from
t = 0, as in the paper. fedsim's argument `round` counts them from 1. All clients take part at
t = 0, so tau_0 has no effect, unless no client is available then.

Deviation: In the first round, all clients train from one initial model. In section III each client
initializes a model of its own and sends it. `init_seed=per_client` lets each client start from a
random model of its own. It trains this model before the upload. The paper does not say whether its
clients do.

The paper leaves some things open. Here:

- Scores are divided by their sum, which the paper's thresholds require.
- In the first round, the aggregator decides the weights.
- A client that has never taken part has no predictions. Its divergence from all others is 0, in
  both directions, so it counts as like everyone.
- Predictions with nan are dropped, and the client's earlier ones stay.
- A loss that is not finite counts as the largest finite one. Losses must not be negative.
- If all scores are 0, they count as equal. Equal scores are ordered at random.
"""

from abc import ABC, abstractmethod
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedsim.selectors.base import (
    Clients,
    Cohort,
    Count,
    Floats,
    Generator,
    Ids,
    NonNegative,
    Positive,
    Problems,
    Selection,
    Selector,
    Server,
    Signal,
    exp,
    log,
    parameters,
    rule,
)
from fedsim.selectors.predictions import kl_divergences

BLOCK_ENTRIES = 2**18
"""Number of entries of the matrix c [n, n] that are computed at once. They fit into the processor's
cache."""
TOLERANCE = 1e-9
"""Rounding tolerance when shares and their sums are compared with a threshold: 0.1 * 3 > 0.3 in
floating point."""


class Threshold(ABC):
    """The rule for how many clients are selected in round t (from 0) of T rounds.

    conf/selector/threshold/ has a file for each choice.
    """

    @abstractmethod
    def count(self, shares: Floats, t: int, num_rounds: int) -> int:
        """Return the number of clients to select, >= 1.

        `shares` [n] are the scores of the n available clients divided by their sum, descending.
        """


@parameters
class Cumulative(Threshold):
    """Selects the smallest number of clients whose shares sum to tau_t (section V-A).

    The paper's experiments have this rule instead of Eq. 14. `schedule: step` is the paper's
    tau_t = start + increment * floor(t / every). The other schedules are
    tau_t = start + (end - start) * f(u) with u = t / (T - 1), where f(u) is u (`linear`),
    u^2 (`convex`) or ln(1 + 9u) / ln 10 (`concave`). The paper shows their shapes only. All clients
    are selected if tau_t >= 1.

    With `mode: exceed`, as the paper prints it, the sum must be greater than tau_t. With
    `mode: reach` it may be equal. Only the latter agrees with the paper's result of 32 % fewer
    participants than with full participation: ten clients of equal scores, start=0.2, increment=0.1
    and every=2 give 32 % fewer over 20 rounds, and `exceed` gives 24.5 %.
    """

    schedule: Literal["step", "linear", "convex", "concave"]  # shape of tau over the rounds
    start: Positive  # tau_0
    increment: NonNegative  # rise of tau in `step`
    every: Count  # rounds between two rises in `step`
    end: float  # last tau of the other schedules
    mode: Literal["reach", "exceed"]  # the sum must be >= tau, or > tau

    def problems(self) -> Problems:
        rises = self.schedule == "step" or self.end >= self.start
        yield rule(rises, "end", self.end, f"must be >= start={self.start}")

    def tau(self, t: int, num_rounds: int) -> float:
        """Return the threshold tau_t of round `t` (0-based)."""
        if self.schedule == "step":
            return self.start + self.increment * (t // self.every)
        u = t / max(num_rounds - 1, 1)
        shapes = {"linear": u, "convex": u**2, "concave": log(1 + 9 * u) / log(10)}
        return float(self.start + (self.end - self.start) * shapes[self.schedule])

    def count(self, shares: Floats, t: int, num_rounds: int) -> int:
        tau = self.tau(t, num_rounds)
        if tau >= 1 - TOLERANCE:
            return len(shares)
        sums = np.cumsum(shares)
        is_too_small = sums < tau - TOLERANCE if self.mode == "reach" else sums <= tau + TOLERANCE
        num_too_small = int(is_too_small.sum())  # with the next client the sum is large enough
        return min(num_too_small + 1, len(shares))


@parameters
class Lambda(Threshold):
    """Selects clients whose share exceeds lambda / eta_t (the rule below Eq. 14), at least one.

    eta_t = 1 + growth * t is our choice: the paper gives neither its form nor its values. The
    paper's eta_t lies in (0, 1], and ours grows from 1. This makes no difference, because eta_t
    divided by a constant gives the same rule as lambda multiplied by it.
    """

    strength: Positive  # lambda
    growth: NonNegative  # growth of eta_t in every round

    def count(self, shares: Floats, t: int, num_rounds: int) -> int:
        threshold = self.strength / (1 + self.growth * t)
        return max(int((shares > threshold + TOLERANCE).sum()), 1)


@parameters
class FedABC(Selector):
    """Selects by the losses of all clients, smoothed by attention between their models."""

    adaptive = True
    start_up_rounds = 1
    needs = frozenset({Signal.LOSSES, Signal.PUBLIC, Signal.UPDATES})
    pair_bytes = 18  # two float64 matrices; measured at N = 8,000: 17.6
    state = ("predictions",)

    threshold: Threshold  # how many clients are selected
    kl_reduction: Literal["mean", "sum"]  # d_kj is a mean over classes (as printed) or a sum
    self_term: bool  # whether a client attends to itself (Eq. 11)
    weights: Literal["score", "uniform", "by_size"]  # weights: S_k, equal, or numbers of samples

    def __post_init__(self) -> None:
        self.predictions: dict[int, Tensor] = {}  # log-probabilities [M, C] by client

    def select(self, round: int, clients: Clients, rng: Generator) -> Selection:
        available = clients.available
        if clients.in_first_round:
            return Selection(available)
        # 1 to 4. Scores
        losses = finite_losses(clients.losses(available))
        scores = self.scores(losses, self._divergences(available))
        if scores.sum() <= 0:  # for example if all losses are 0
            scores = np.ones(len(available))
        shares = scores / scores.sum()
        # 5. The highest scores. The shuffle makes the stable sort break ties at random.
        shuffled = rng.permutation(len(available))
        order = shuffled[np.argsort(-shares[shuffled], kind="stable")]
        count = self.threshold.count(shares[order], round - 1, self.population.num_rounds)
        positions = np.sort(order[:count])
        ids = available[positions]
        # 6. Weights
        if self.weights == "score":
            weights = shares[positions]
        elif self.weights == "uniform":
            weights = np.ones(count)
        else:
            weights = self.population.sizes[ids].astype(np.float64)
        return Selection(ids, weights / weights.sum())

    def observe(self, round: int, cohort: Cohort, server: Server) -> None:
        predictions = server.predict_public(cohort).cpu()
        for client, prediction in zip(cohort.ids.tolist(), predictions, strict=True):
            if not prediction.isnan().any():
                # a view would keep the predictions of the whole cohort in memory
                self.predictions[client] = prediction.clone()

    def scores(self, losses: Floats, divergences: Floats) -> Floats:
        """Return the scores S [n] of the n available clients (Eq. 11, 13).

        `losses` [n] are v, and `divergences` [n, n] are d.
        """
        num = len(losses)
        scores = np.empty(num)
        block_rows = max(BLOCK_ENTRIES // max(num, 1), 1)
        for start in range(0, num, block_rows):
            rows = slice(start, start + block_rows)
            logits = -divergences[rows]
            if not self.self_term and num > 1:  # no attention of client k to itself
                np.fill_diagonal(logits[:, start:], -np.inf)  # row 0 here is client `start`
            logits -= logits.max(1, keepdims=True)
            attention = exp(logits)
            attention /= attention.sum(1, keepdims=True)
            scores[rows] = (attention * losses).sum(1)
        return scores

    def _divergences(self, ids: Ids) -> Floats:
        """Return the divergences d [n, n] of the clients `ids`. They are 0 without predictions."""
        rows = [row for row, client in enumerate(ids.tolist()) if client in self.predictions]
        if not rows:
            return np.zeros((len(ids), len(ids)))
        log_p = torch.stack([self.predictions[client] for client in ids[rows].tolist()])
        known_divergences = kl_divergences(log_p, self.kl_reduction)
        if len(rows) == len(ids):  # saves a second matrix
            return known_divergences
        divergences = np.zeros((len(ids), len(ids)))
        divergences[np.ix_(rows, rows)] = known_divergences
        return divergences


def finite_losses(losses: Floats) -> Floats:
    """Return `losses` [N]. A loss that is not finite is replaced by the largest finite one, or by 0
    if no loss is finite."""
    is_finite = np.isfinite(losses)
    largest = losses[is_finite].max() if is_finite.any() else 0.0
    return np.where(is_finite, losses, largest)
