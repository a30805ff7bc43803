"""Local algorithms: what clients add to their gradients, what they send for it, and how the server
combines their updates.

`Clients` calls `correction` before it trains clients. The round loop calls `combine` with the
updates that have arrived, before the aggregator. In symbols: w is a model, w_t the server's model
in round t, and w_k the model that client k has trained from it. N is the number of all clients, K
that of the cohort, n_k that of the training samples of client k, and n their sum over all clients.
p_k is the weight of client k in the objective sum_k p_k F_k, with F_k its training loss. P
parameters are trained; vectors [P] are flat over these.

The simulation holds the state of all clients. A client's state changes only in `combine`, when its
update has arrived at the server. It does not change if the client trains for a comparison or a
virtual round, or if its update is late or holds a nan. Otherwise the sums over clients (c in
SCAFFOLD, h in FedDyn) would no longer be sums over the clients' states.
"""

from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import ROUND_FLOOR, Context
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.core.arrays import Floats
from fedsim.core.errors import Problem, rule
from fedsim.core.exact import weighted_sum
from fedsim.core.flat import split_flat
from fedsim.core.parameters import NonNegative, Positive, parameters
from fedsim.core.state import Stateful
from fedsim.core.types import Cohort, Correction, Ids, Params
from fedsim.engine.optimizers import SGD, Adam, LocalOptimizer

LARGE_BYTES = 2**30
"""Size of the clients' states above which the user is warned before the run."""


@dataclass(frozen=True)
class LocalTraining:
    """The facts about a cohort's training that `LocalAlgorithm.combine` may use.

    - `lr`: the learning rate of the round.
    - `optimizer`: the clients' optimiser.
    - `num_clients`: the number N of all clients that have samples.

    The other fields are functions, because few algorithms need their values:

    - `scales()` [K] returns N p_k, which is 1 or n_k N / n by the aggregator's `weighting`.
    - `weights()` [K] returns the weights by which the updates are averaged. Their sum is one.
    - `total_weight()` returns the sum of these weights before they were divided by it. It is not
      one with selectors whose weights are unbiased (`ocs`).
    - `gradients()` [K, P] returns what each client sends as the gradient of its mean training loss
      at the round's model, in eval mode.
    """

    lr: float
    optimizer: LocalOptimizer
    num_clients: int
    scales: Callable[[], Floats]
    weights: Callable[[], Floats]
    total_weight: Callable[[], float]
    gradients: Callable[[], Tensor]


@parameters
class LocalAlgorithm(Stateful, ABC):
    """The interface of local algorithms. This class itself adds nothing: `local_algorithm=plain`.

    Hyper-parameters are fields, as in selectors.
    """

    extra_down = 0
    """Numbers that a client downloads with the model before it trains, as a multiple of P;
    charged."""
    extra_up = 0
    """Numbers that a client uploads with each collected update, as a multiple of P; charged."""
    extra_passes = 0
    """Passes over its training samples that a client makes in addition to its training; charged."""
    kept_vectors = 0
    """Vectors [P] that are kept for each client that has taken part."""
    needs_mean = False
    """Whether the aggregator must be a mean (`Aggregator.is_mean`)."""
    needs_average = False
    """True if the next model must be the mean of the local models (`Aggregator.is_average`)."""
    needs_same_start = False
    """True if all clients must begin at the server's model; with `init_seed=per_client` they do
    not."""

    def unfit_for(self, optimizer: LocalOptimizer) -> Problem | None:
        """Return the problem of this algorithm with the clients' optimiser, or None.

        The problem's key is the parameter of this algorithm whose value does not go with the
        optimiser. It is empty if no value does. fedsim calls this before the run.
        """
        return None

    def correction(self, ids: Ids, params: Params) -> Correction | None:
        """Return what the clients `ids` add to their gradients; None: nothing.

        They train from `params`, the trained tensors of the model, which must not be modified. No
        state may change here, because not every client that trains is collected.
        """
        return None

    def combine(self, cohort: Cohort, training: LocalTraining) -> Cohort:
        """Return the updates for the aggregator, computed from the finite updates that arrived.

        The round loop calls this once in each round in which a finite update arrives. The state of
        clients and server changes here. The cohort's tensors must not be modified, because the
        selector observes the updates as they were sent.
        """
        return cohort

    def warning(self, num_clients: int, model_bytes: int) -> str | None:
        """Return a line that is shown before a run whose clients' states are large, or None."""
        size = self.kept_vectors * num_clients * model_bytes
        if size <= LARGE_BYTES:
            return None
        return (
            f"local_algorithm keeps {self.kept_vectors} x the model for each client that has taken "
            f"part: up to {size / 2**30:,.1f} GiB of memory, as much in a checkpoint"
        )


@parameters
class FedProx(LocalAlgorithm):
    """A proximal term (Li et al., "Federated Optimization in Heterogeneous Networks", 2020,
    Algorithm 2): clients minimise F_k(w) + mu/2 |w - w_t|^2.

    The inexactness gamma_k follows from `local.epochs` or `local.steps`. No client works less
    because it is slow.
    """

    mu: NonNegative

    def correction(self, ids: Ids, params: Params) -> Correction | None:
        """Return the proximal term's gradient, mu w - mu w_t; None if mu is 0."""
        if not self.mu:
            return None
        shift = {name: (-self.mu * w).expand(len(ids), *w.shape) for name, w in params.items()}
        return Correction(self.mu, shift)


@parameters
class Scaffold(LocalAlgorithm):
    """Control variates against client drift (Karimireddy et al., "SCAFFOLD", 2020, Algorithm 1).

    Clients step along g + c - c_k. Then x <- x + server_lr mean_k(y_k - x) and
    c <- c + sum_k p_k (c_k+ - c_k). All variates are zero at first.

    p_k is 1/N, as printed, or n_k / n with an aggregator `by_size`. c is the mean of all c_k by
    these weights. If the variates are the clients' gradients, c is the gradient of the objective,
    and training converges only where it is zero. So p_k alone decides which objective is minimised,
    and not the weights of a selector or of the clients in a round. (The code of FedDyn's authors
    has n_k / n in its SCAFFOLD, too.)

    `option` I: c_k+ is the gradient of all of the client's data at x in eval mode, in one
    additional pass. `option` II: c_k+ = c_k - c + (x - y_k) / (tau_k eta), with eta the learning
    rate and tau_k the client's number of steps (K in the paper). This is the mean of the gradients
    of plain SGD, including weight decay, and of no other optimiser.

    The aggregator takes mean_k, and `server_lr` is a factor on the updates that it receives. A
    client downloads c, of the model's size, before it trains, and uploads c_k+ - c_k with a
    collected update. The server only keeps c, and each client its own c_k.
    """

    extra_down = extra_up = kept_vectors = 1
    state = ("variates", "mean")

    option: Literal["I", "II"]
    server_lr: Positive

    def __post_init__(self) -> None:
        self.extra_passes = int(self.option == "I")
        self.needs_same_start = self.option == "II"
        self.variates: dict[int, Tensor] = {}
        """c_k by client."""
        self.mean: Tensor | None = None
        """c."""

    def unfit_for(self, optimizer: LocalOptimizer) -> Problem | None:
        """Return a problem if option II is combined with anything else than plain SGD."""
        is_plain_sgd = isinstance(optimizer, SGD) and not optimizer.momentum
        text = "takes (x - y_k) / (K eta) for the mean gradient, and so needs steps of plain SGD"
        remedy = "optimizer=sgd optimizer.momentum=0, or local_algorithm.option=I"
        return rule(self.option == "I" or is_plain_sgd, "option", self.option, text, remedy)

    def correction(self, ids: Ids, params: Params) -> Correction | None:
        """Return the shift c - c_k; None before the first update has arrived, when it is zero."""
        if self.mean is None:
            return None
        shift = self.mean - _rows(self.variates, ids, self.mean)
        return Correction(shift=split_flat(shift, params))

    def combine(self, cohort: Cohort, training: LocalTraining) -> Cohort:
        """Update c and each c_k of the cohort, and return the updates times `server_lr`."""
        updates = cohort.updates
        mean = torch.zeros_like(updates[0]) if self.mean is None else self.mean
        old = _rows(self.variates, cohort.ids, mean)
        if self.option == "I":
            new = training.gradients()
        else:  # the update is y_k - x, hence the minus sign
            new = old - mean - updates / _column(cohort.steps * training.lr, updates)
        self.mean = mean + _sum(new - old, training.scales()) / training.num_clients
        _store(self.variates, cohort.ids, new)
        return _scaled(cohort, np.full(len(updates), self.server_lr))


@parameters
class FedNova(FedProx):
    """Normalised averaging (Wang et al., "Tackling the Objective Inconsistency Problem", 2020, Eq.
    6 and 9): clients that make more steps do not count more. Local training has FedProx's term.

    Updates are multiplied by tau_eff / |a_k|_1. The vector a_k holds the weight of each local
    step's gradient in the update of client k, and |a_k|_1 is their sum. For plain SGD this is the
    number of steps; for momentum, and for the proximal term `mu`, it is the paper's formula. fedsim
    computes |a_k|_1 as the distance that the optimiser covers, in units of the learning rate, if
    all gradients are one. This also covers momentum with `mu`, and Nesterov's momentum.

    tau_eff, the effective steps of plain averaging, is sum_k q_k |a_k|_1. Here q_k are the weights
    by which the aggregator averages the updates; a selector may set them. (With mu > 0 the authors'
    code has sum_k q_k tau_k instead, with tau_k the number of steps.) If all |a_k|_1 are equal, the
    updates do not change. Weight decay counts as a part of the gradients. The server knows the
    numbers of steps, so no byte is added.

    The paper takes the entries of a_k to be at least 0. With large `mu` some would be below 0, so
    such values are rejected (at the learning rate of the first round).
    """

    needs_mean = needs_same_start = True

    def unfit_for(self, optimizer: LocalOptimizer) -> Problem | None:
        """Return a problem unless the optimiser is SGD and `mu` times its learning rate is at most
        `_largest_pull`: 1 without momentum, less with it."""
        if not isinstance(optimizer, SGD):
            text = (
                "normalises updates of SGD, with or without momentum, "
                f"and not of {type(optimizer).__name__}"
            )
            return Problem("", type(self).__name__, text, "optimizer=sgd")
        largest = _largest_pull(optimizer) / optimizer.lr
        context = f"optimizer.lr={optimizer.lr:g} and optimizer.momentum={optimizer.momentum:g}"
        text = (
            f"must be at most {_rounded_down(largest)} with {context}. Beyond it, steps overshoot "
            "the end of the proximal term, and some gradients count negatively"
        )
        remedy = "lower local_algorithm.mu, optimizer.lr or optimizer.momentum"
        return rule(self.mu <= largest, "mu", self.mu, text, remedy)

    def combine(self, cohort: Cohort, training: LocalTraining) -> Cohort:
        """Return the updates times tau_eff / |a_k|_1."""
        norms = self.norms(int(cohort.steps.max()), training)[cohort.steps]
        if (norms == norms[0]).all():  # all factors are one, but for rounding
            return cohort
        effective_steps = (training.weights() * norms).sum()
        return _scaled(cohort, effective_steps / norms)

    def norms(self, max_steps: int, training: LocalTraining) -> Floats:
        """Return |a|_1 after 0, 1, ... `max_steps` steps [max_steps + 1]."""
        optimizer = training.optimizer
        assert isinstance(optimizer, SGD)
        velocity = 0.0
        distances = [0.0]
        for _ in range(max_steps):
            # the proximal term pulls back by mu times the distance covered so far
            gradient = 1 - training.lr * self.mu * distances[-1]
            velocity = optimizer.momentum * velocity + gradient
            step = velocity
            if optimizer.nesterov:
                step = gradient + optimizer.momentum * velocity
            distances.append(distances[-1] + step)
        return np.array(distances)


def _largest_pull(optimizer: SGD) -> float:
    """Return the largest `mu` times learning rate with which no gradient counts negatively.

    Let b(j) be a gradient's weight in the update j steps later. It obeys the recurrence
    b(j + 1) = t b(j) - d b(j - 1). With momentum r and m = mu lr, t = 1 + r - m and d = r; for
    Nesterov's, t = (1 + r) (1 - m) and d = r (1 - m). Up to the returned value, t >= 2 sqrt(d):
    both roots are real and positive, and b stays above 0.
    """
    momentum = optimizer.momentum
    if optimizer.nesterov:
        return ((1 - momentum) / (1 + momentum)) ** 2
    return (1 - momentum**0.5) ** 2


def _rounded_down(value: float) -> str:
    """Return `value` rounded down to four significant digits, as text."""
    digits = Context(prec=4, rounding=ROUND_FLOOR).create_decimal(value)
    return f"{float(digits):g}"


@parameters
class FedDyn(LocalAlgorithm):
    """Dynamic regularisation (Acar et al., "Federated Learning Based on Dynamic Regularization",
    2021, Algorithm 1).

    Clients minimise F_k(w) - <g_k, w> + alpha/2 |w - w_t|^2; local training only comes near the
    minimum. Then g_k <- g_k - alpha (w_k - w_t), h <- h - alpha sum_k p_k (w_k - w_t) and
    w <- mean_k(w_k) - h / alpha. g_k and h are zero at first. Client and server can each compute
    them from the updates, so no byte is added.

    p_k is 1/N, as printed, or n_k / n with an aggregator `by_size`. h is the mean of all g_k by
    these weights, and training converges only where it is zero. So p_k alone decides which
    objective is minimised, whatever weights the mean of a round has. (The authors' code minimises
    the objective of n_k / n by plain means and alpha n / (n_k N) in place of alpha.)

    The aggregator must be a plain mean, because h sums all updates that arrive. A server optimiser
    would sum h again, which diverges. An aggregator that ignores or shortens some updates would not
    keep them out of the model: they are whole in h, which changes the model in every round.
    """

    needs_average = True
    kept_vectors = 1
    state = ("gradients", "sum")

    alpha: Positive

    def __post_init__(self) -> None:
        self.gradients: dict[int, Tensor] = {}
        """g_k by client."""
        self.sum: Tensor | None = None
        """h."""

    def unfit_for(self, optimizer: LocalOptimizer) -> Problem | None:
        """Return a problem if the optimiser decays weights apart from the gradient, as AdamW."""
        decays_apart = (
            isinstance(optimizer, Adam) and optimizer.decoupled and optimizer.weight_decay > 0
        )
        text = (
            "makes alpha (w_k - w_t) a gradient of the local loss, which decoupled weight decay is "
            "no part of"
        )
        return rule(not decays_apart, "", type(self).__name__, text, "optimizer.decoupled=false")

    def correction(self, ids: Ids, params: Params) -> Correction | None:
        """Return the gradient of the two additional terms: alpha w - g_k - alpha w_t."""
        model = torch.cat([w.flatten() for w in params.values()])
        shift = _rows(self.gradients, ids, model).neg_() - self.alpha * model
        return Correction(self.alpha, split_flat(shift, params))

    def combine(self, cohort: Cohort, training: LocalTraining) -> Cohort:
        """Update h and each g_k of the cohort, and return the updates minus h / alpha.

        The aggregator then adds mean_k(w_k - w_t) - h / alpha to w_t. If a selector's weights do
        not add up to one, h / alpha is divided by their sum, so that it is subtracted once.
        """
        updates = cohort.updates
        old = _rows(self.gradients, cohort.ids, updates[0])
        step = self.alpha / training.num_clients * _sum(updates, training.scales())
        self.sum = -step if self.sum is None else self.sum - step
        _store(self.gradients, cohort.ids, old - self.alpha * updates)
        trained = {name: cohort.start[name] for name in cohort.trained}
        delta = dict(cohort.delta)
        total_weight = training.total_weight() or 1.0  # with weights of zero, no step is taken
        for name, part in split_flat(self.sum / self.alpha / total_weight, trained).items():
            delta[name] = delta[name] - part
        return replace(cohort, delta=delta)


def _rows(vectors: dict[int, Tensor], ids: Ids, like: Tensor) -> Tensor:
    """Return the vectors of the clients `ids` [n, P], zeros for clients without one."""
    zeros = torch.zeros_like(like)
    return torch.stack([vectors.get(client, zeros) for client in ids.tolist()])


def _store(vectors: dict[int, Tensor], ids: Ids, rows: Tensor) -> None:
    """Put the `rows` [n, P] into `vectors` as the vectors of the clients `ids`."""
    for client, row in zip(ids.tolist(), rows, strict=True):
        vectors[client] = row.clone()  # a view would keep the rows of the whole cohort


def _sum(rows: Tensor, scales: Floats) -> Tensor:
    """Return sum_k scales_k rows_k, added in the order of clients on every processor."""
    return weighted_sum(rows, torch.as_tensor(scales, dtype=rows.dtype, device=rows.device))


def _column(values: NDArray[np.floating], like: Tensor) -> Tensor:
    """Return `values` [K] in the shape [K, 1, ...], which multiplies or divides `like` [K, ...]
    row by row."""
    column = torch.as_tensor(values, dtype=like.dtype, device=like.device)
    return column.view(-1, *[1] * (like.dim() - 1))


def _scaled(cohort: Cohort, factors: Floats) -> Cohort:
    """Return the cohort with the updates of trained tensors multiplied by `factors` [K]. Running
    statistics do not change."""
    if (factors == 1).all():
        return cohort
    delta = dict(cohort.delta)
    for name in cohort.trained:
        delta[name] = delta[name] * _column(factors, delta[name])
    return replace(cohort, delta=delta)
