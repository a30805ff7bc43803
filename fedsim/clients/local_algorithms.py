"""Local algorithms: what is added to the gradients of clients, what they send for it, and how their
updates combine.

P parameters are trained; vectors [P] are flat over these. A client's state lies with the simulation
and changes only when its update has arrived at the server, in `combine`: not with training for a
comparison or for a virtual round, nor with an update that is late or holds a nan. (A client that
kept a state of which the server does not know would take the sums over clients, c and h, away from
what they are sums of.)
"""

from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.core.arrays import Floats
from fedsim.core.errors import Problem, rule
from fedsim.core.exact import weighted_sum
from fedsim.core.flat import split_flat
from fedsim.core.parameters import NonNegative, Positive, Stateful, parameters
from fedsim.core.types import Cohort, Correction, Ids, Params
from fedsim.engine.optimizers import SGD, Adam, LocalOptimizer

LARGE_BYTES = 2**30  # of clients' states: more is told before the run


@dataclass(frozen=True)
class LocalTraining:
    """The server's view of a cohort's training.

    `lr` is the learning rate, `optimizer` the clients' optimiser, and `num_clients` the number N of
    all clients. Three values are computed on demand. `scales()` [K] are N p_k, the weights of these
    clients in the objective sum_k p_k F_k that the aggregator's `weighting` sets: 1, or n_k N / n.
    `weights()` [K] are those of an average of the updates, whose sum is one. `gradients()` [K, P]
    are of each client's mean training loss at the round's model, in eval mode.
    """

    lr: float
    optimizer: LocalOptimizer
    num_clients: int
    scales: Callable[[], Floats]
    weights: Callable[[], Floats]
    gradients: Callable[[], Tensor]


@parameters
class LocalAlgorithm(Stateful, ABC):
    """How clients train beside their optimiser, and what the server does with their updates before
    it aggregates them. This one adds nothing: `local_algorithm=plain`. Hyper-parameters are fields,
    as of selectors."""

    extra_down = 0
    """Numbers that go down to whoever is to train, besides the model, as a multiple of P;
    charged."""
    extra_up = 0
    """Numbers that come up with each collected update, as a multiple of P; charged."""
    extra_passes = 0
    """Passes over its training samples that a client makes besides its training; charged."""
    kept_vectors = 0
    """Vectors [P] that are kept of each client that has taken part."""
    needs_mean = False
    """Whether the aggregator must be a mean (`Aggregator.is_mean`)."""
    needs_average = False
    """True if the aggregator must step to the mean of the local models itself
    (`Aggregator.is_average`)."""
    needs_same_start = False
    """Whether all clients must begin at the server's model, which they do not with
    `init_seed=per_client`."""

    def unfit_for(self, optimizer: LocalOptimizer) -> Problem | None:
        """What one of its parameters, the problem's key, asks of the clients' optimiser that this
        does not have."""
        return None

    def correction(self, ids: Ids, params: Params) -> Correction | None:
        """What is added to the gradients of clients `ids`, who train from the trained tensors
        `params` of the model (not to be modified). Changes no state: who trains may not be
        collected."""
        return None

    def combine(self, cohort: Cohort, training: LocalTraining) -> Cohort:
        """The updates for the aggregator, made of those that have arrived and are finite, which
        others use, too. The state of clients and server changes here. Selectors observe the updates
        that were sent."""
        return cohort

    def warning(self, num_clients: int, model_bytes: int) -> str | None:
        """One line that is shown before a run whose clients' states are large, or None."""
        size = self.kept_vectors * num_clients * model_bytes
        told = f"local_algorithm keeps {self.kept_vectors} x the model for each client that has taken part: up to "
        return (
            f"{told}{size / 2**30:,.1f} GiB of memory, as much in a checkpoint"
            if size > LARGE_BYTES
            else None
        )


@parameters
class FedProx(LocalAlgorithm):
    """A proximal term (Li et al., "Federated Optimization in Heterogeneous Networks", 2020,
    Algorithm 2): clients minimise F_k(w) + mu/2 |w - w_t|^2.

    Inexactness gamma_k is what `local.epochs` or `local.steps` leave; nobody works less than others
    for being slow.
    """

    mu: NonNegative

    def correction(self, ids: Ids, params: Params) -> Correction | None:
        if not self.mu:
            return None
        return Correction(
            self.mu, {name: (-self.mu * w).expand(len(ids), *w.shape) for name, w in params.items()}
        )


@parameters
class Scaffold(LocalAlgorithm):
    """Control variates against client drift (Karimireddy et al., "SCAFFOLD", 2020, Algorithm 1):
    local steps along g + c - c_k; then x <- x + server_lr mean_k(y_k - x) and c <- c + sum_k p_k
    (c_k+ - c_k).

    p_k is 1/N, as printed, or n_k / n with an aggregator `by_size`: c is the mean of all c_k by
    these weights. Clients rest where c = 0, so p_k alone decides which objective sum_k p_k F_k is
    minimised. The weights of a selector, or of the clients in a round, do not. (The code of
    FedDyn's authors has n_k / n in its SCAFFOLD, too.)

    `option` I: c_k+ is the gradient of all of the client's data at x, in eval mode, one more pass.
    II: c_k - c + (x - y_k) / (K eta), with K its own number of steps; the mean of the gradients of
    plain SGD, weight decay among them, and of no other optimiser. All variates are zero at first.
    The mean is the aggregator's, and the server's learning rate a factor on the updates that it
    gets. c, of the model's size, goes down to whoever is to train, and c_k+ - c_k comes up with a
    collected update; the server keeps the sum of all c_k alone, each c_k is the client's.
    """

    extra_down = extra_up = kept_vectors = 1
    state = ("variates", "mean")

    option: Literal["I", "II"]
    server_lr: Positive

    def __post_init__(self) -> None:
        self.extra_passes, self.needs_same_start = int(self.option == "I"), self.option == "II"
        self.variates: dict[int, Tensor] = {}  # c_k
        self.mean: Tensor | None = None  # c

    def unfit_for(self, optimizer: LocalOptimizer) -> Problem | None:
        plain = self.option == "I" or (isinstance(optimizer, SGD) and not optimizer.momentum)
        text = "takes (x - y_k) / (K eta) for the mean gradient, and so needs steps of plain SGD"
        return rule(
            plain,
            "option",
            self.option,
            text,
            "optimizer=sgd optimizer.momentum=0, or local_algorithm.option=I",
        )

    def correction(self, ids: Ids, params: Params) -> Correction | None:
        if self.mean is None:
            return None
        return Correction(
            shift=split_flat(self.mean - _rows(self.variates, ids, self.mean), params)
        )

    def combine(self, cohort: Cohort, training: LocalTraining) -> Cohort:
        updates = cohort.updates
        mean = torch.zeros_like(updates[0]) if self.mean is None else self.mean
        old = _rows(self.variates, cohort.ids, mean)
        if self.option == "I":
            new = training.gradients()
        else:
            new = old - mean - updates / _column(cohort.steps * training.lr, updates)
        self.mean = mean + _sum(new - old, training.scales()) / training.num_clients
        _store(self.variates, cohort.ids, new)
        return _scaled(cohort, np.full(len(updates), self.server_lr))


@parameters
class FedNova(FedProx):
    """Normalised averaging (Wang et al., "Tackling the Objective Inconsistency Problem", 2020, Eq.
    6 and 9): updates times tau_eff / |a_k|_1, so that clients that make more steps do not count for
    more.

    a_k weighs the gradients of a client's steps in its update: |a_k|_1 is the number of steps for
    SGD and the paper's for momentum and for the proximal term `mu`. It is computed as the way that
    the optimiser goes, in units of the learning rate, if all gradients are one, which covers both
    together, and Nesterov's. tau_eff is sum_k p_k |a_k|_1 with the aggregator's or selector's
    weights p_k, the effective steps of plain averaging; where all |a_k|_1 are equal, the updates
    stay as they are. (The authors' code has sum_k p_k tau_k with mu > 0.) Weight decay counts as a
    part of the gradients. The server knows the numbers of steps: no byte is added.
    """

    needs_mean = needs_same_start = True

    def unfit_for(self, optimizer: LocalOptimizer) -> Problem | None:
        known = isinstance(optimizer, SGD)
        text = f"normalises updates of SGD, with or without momentum, and not of {type(optimizer).__name__}"
        if problem := rule(known, "", type(self).__name__, text, "optimizer=sgd"):
            return problem
        text = f"must be at most 1 / optimizer.lr={optimizer.lr:g}, beyond which steps overshoot the proximal term's end"
        return rule(
            self.mu * optimizer.lr <= 1,
            "mu",
            self.mu,
            text,
            "lower local_algorithm.mu, or optimizer.lr",
        )

    def combine(self, cohort: Cohort, training: LocalTraining) -> Cohort:
        lengths = self.lengths(int(cohort.steps.max()), training)[cohort.steps]
        if (lengths == lengths[0]).all():
            return cohort
        return _scaled(cohort, (training.weights() * lengths).sum() / lengths)

    def lengths(self, most: int, training: LocalTraining) -> Floats:
        """|a|_1 after 0, 1, ... `most` steps [most + 1]."""
        optimizer = training.optimizer
        assert isinstance(optimizer, SGD)
        way, velocity, found = 0.0, 0.0, [0.0]
        for _ in range(most):
            gradient = 1 - training.lr * self.mu * way
            velocity = optimizer.momentum * velocity + gradient
            way += gradient + optimizer.momentum * velocity if optimizer.nesterov else velocity
            found.append(way)
        return np.array(found)


@parameters
class FedDyn(LocalAlgorithm):
    """Dynamic regularisation (Acar et al., "Federated Learning Based on Dynamic Regularization",
    2021, Algorithm 1): clients minimise L_k(w) - <g_k, w> + alpha/2 |w - w_t|^2; then g_k <- g_k -
    alpha (w_k - w_t), h <- h - alpha sum_k p_k (w_k - w_t) and w <- mean_k(w_k) - h / alpha.

    p_k is 1/N, as printed, or n_k / n with an aggregator `by_size`: h is the mean of all g_k by
    these weights, and the model rests where it is zero. So p_k alone decides which objective sum_k
    p_k L_k is minimised, whatever weights the mean of a round has. (The authors' code minimises
    that of n_k / n by plain means and alpha n / (n_k N) in place of alpha.) The minimum is as near
    as local training comes. g_k and h are zero at first, and known on both sides: no byte is added.

    h sums all updates that arrive. A server optimiser would sum h again, which diverges. An
    aggregator that ignores or shortens some updates would be undone by h, which holds them whole.
    So the aggregator must be a plain mean.
    """

    needs_average = True
    kept_vectors = 1
    state = ("gradients", "sum")

    alpha: Positive

    def __post_init__(self) -> None:
        self.gradients: dict[int, Tensor] = {}  # g_k
        self.sum: Tensor | None = None  # h

    def unfit_for(self, optimizer: LocalOptimizer) -> Problem | None:
        decoupled = (
            isinstance(optimizer, Adam) and optimizer.decoupled and optimizer.weight_decay > 0
        )
        text = "makes alpha (w_k - w_t) a gradient of the local loss, which decoupled weight decay is no part of"
        return rule(not decoupled, "", type(self).__name__, text, "optimizer.decoupled=false")

    def correction(self, ids: Ids, params: Params) -> Correction | None:
        model = torch.cat([w.flatten() for w in params.values()])
        shift = _rows(self.gradients, ids, model).neg_() - self.alpha * model
        return Correction(self.alpha, split_flat(shift, params))

    def combine(self, cohort: Cohort, training: LocalTraining) -> Cohort:
        updates = cohort.updates
        old = _rows(self.gradients, cohort.ids, updates[0])
        step = self.alpha / training.num_clients * _sum(updates, training.scales())
        self.sum = -step if self.sum is None else self.sum - step
        _store(self.gradients, cohort.ids, old - self.alpha * updates)
        moved = split_flat(
            self.sum / self.alpha, {name: cohort.start[name] for name in cohort.trained}
        )
        return replace(
            cohort,
            delta={
                n: value - moved[n] if n in moved else value for n, value in cohort.delta.items()
            },
        )


def _rows(vectors: dict[int, Tensor], ids: Ids, like: Tensor) -> Tensor:
    """Those of the clients `ids` [n, P], zeros where there is none."""
    return torch.stack([vectors.get(i, torch.zeros_like(like)) for i in ids.tolist()])


def _store(vectors: dict[int, Tensor], ids: Ids, rows: Tensor) -> None:
    vectors.update(
        zip(ids.tolist(), (row.clone() for row in rows), strict=True)
    )  # a view would keep the whole cohort's


def _sum(rows: Tensor, scales: Floats) -> Tensor:
    """Return sum_k scales_k rows_k, added in the order of clients on every processor."""
    return weighted_sum(rows, torch.as_tensor(scales, dtype=rows.dtype, device=rows.device))


def _column(values: NDArray[np.floating], like: Tensor) -> Tensor:
    return torch.as_tensor(values, dtype=like.dtype, device=like.device).view(
        -1, *[1] * (like.dim() - 1)
    )


def _scaled(cohort: Cohort, factors: Floats) -> Cohort:
    """The updates of the trained tensors times `factors` [K]; running statistics are averaged as
    they are."""
    if (factors == 1).all():
        return cohort
    trained = {
        name: cohort.delta[name] * _column(factors, cohort.delta[name]) for name in cohort.trained
    }
    return replace(cohort, delta={**cohort.delta, **trained})
