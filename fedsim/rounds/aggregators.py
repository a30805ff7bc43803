"""The interface of aggregators, and aggregators that average updates or take a step of a server
optimiser. rounds/robust.py has aggregators that bound what one client can do.

The round loop (`fedsim.rounds.loop`) calls `begin` and `account` once before the first round. Then
it calls `begin_round` and `aggregate` in each round in which an update arrives (for private
aggregators: in which clients are available).

A cohort has K >= 1 clients whose updates arrived (for private aggregators K >= 0). w is the
server's model (`cohort.start`), w_k the model that client k sends, and w_k - w its update
(`cohort.delta` has those of all K clients, [K, ...] for each tensor). n_k is the number of training
samples of client k. Buffers are the entries of a model that are not trained (running statistics of
BatchNorm).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import field
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Interval
from torch import Tensor

from fedsim.clients.context import RoundContext
from fedsim.clients.local_algorithms import LocalAlgorithm
from fedsim.clients.system import SimulatedClock
from fedsim.core.arrays import Floats
from fedsim.core.flat import add_models, to_device, weighted_sums
from fedsim.core.parameters import Positive, Problems, parameters
from fedsim.core.state import Stateful
from fedsim.core.types import Cohort, Ids, Params, Stack, Weights
from fedsim.rounds.availability import Availability
from fedsim.selectors.base import Selector

Weighting = Literal["uniform", "by_size"]
"""Equal weights, or weights in proportion to n_k."""
Decay = Annotated[float, Interval(ge=0, lt=1)]
"""The factor by which a moving average or a momentum shrinks in each round."""


def weighting_warning(selector: Selector, aggregator: "Aggregator") -> str | None:
    """Return a line for the user, before the run, if data sizes count both in the selection and in
    the average; otherwise None.

    In MIFA each client counts once, however often it is selected.
    """
    sizes = selector.population.sizes
    counts_in_both = selector.draws_by_size and aggregator.weighting == "by_size"
    if isinstance(aggregator, MIFA) or not counts_in_both or sizes.min() == sizes.max():
        return None
    return (
        f"{type(selector).__name__} draws clients by data size, so aggregator=by_size counts sizes "
        "twice; aggregator=uniform counts them once"
    )


@parameters
class Aggregator(Stateful, ABC):
    """The interface of aggregators, with which the server computes the next model from a cohort's
    updates.

    Hyper-parameters are fields, as in selectors. The attribute `state` names the attributes that a
    checkpoint holds (see `Stateful`).
    """

    buffers: frozenset[str] = field(kw_only=False)
    """Names of the buffers of the model, which fedsim passes. They are averaged by weights that sum
    to one."""
    weighting: Weighting
    """The weights that `weights` returns."""

    ignores_weights: ClassVar[bool] = False
    """True if `aggregate` ignores the selector's weights."""
    is_mean: ClassVar[bool] = False
    """Whether the server's step depends only on the mean update (`mean_delta`)."""
    is_average: ClassVar[bool] = False
    """Whether the next model is the weighted mean of the local models."""
    is_private: ClassVar[bool] = False
    """Whether the aggregator hides each client's update, so that the server must not learn it in
    another way. Such an aggregator is called even if no update arrives, so that it adds noise to
    every round."""

    def unfit_for(self, selector: Selector, num_updates: int) -> Problems:
        """Return the problems of other components with this aggregator, none if they fit; called
        before the run.

        `num_updates` is the number of updates in a round if all selected clients answer.
        """
        return ()

    def begin(self, selector: Selector, params: Params) -> None:
        """Prepare for the run with the initial model `params`; called once before the first
        round."""

    def account(
        self,
        selector: Selector,
        algorithm: LocalAlgorithm,
        clock: SimulatedClock | None,
        availability: Availability,
    ) -> None:
        """Prepare a private aggregator to compute its epsilon, which depends on these components;
        called once, after `begin`."""

    def begin_round(self, context: RoundContext, selected: Ids) -> None:
        """Prepare for `aggregate`; called before each call of it.

        `selected` are the clients that were requested to train, whether their updates arrived or
        not.
        """

    @abstractmethod
    def aggregate(self, params: Params, cohort: Cohort, weights: Weights) -> Params:
        """Return the next global model from `params`, the present model, which may be modified.

        `weights` [K] are the selector's; None: it gives none, and the aggregator uses its own.
        """

    @property
    def warning(self) -> str | None:
        """One line that is shown to the user before the run, or None."""
        return None

    @property
    def epsilon_spent(self) -> float | None:
        """The epsilon of differential privacy of the rounds so far; None: the run has none."""
        return None

    def weights(self, cohort: Cohort) -> Floats:
        """Return the aggregator's own weights [K], which sum to one: 1 / K each, or n_k divided by
        the sum of n_k over the cohort."""
        if self.weighting == "uniform":
            return np.full(len(cohort.ids), 1 / len(cohort.ids))
        return cohort.sizes / cohort.sizes.sum()

    def mean_delta(self, cohort: Cohort, weights: Weights) -> Params:
        """Return sum_k weights_k (w_k - w) for each tensor: FedOpt's pseudo-gradient times -1.

        Weights of a selector may sum to 0.8 in one round and to 1.3 in another. For parameters this
        only scales the step. But statistics in buffers would leave the range of the clients'
        statistics, and a running variance could fall below zero. So buffers are averaged by weights
        that sum to one (`averaging_weights`).
        """
        if weights is None:
            weights = self.weights(cohort)
        averaging = self.averaging_weights(cohort, weights)
        trained, buffers = self.parts(cohort)
        shapes = cohort.start
        if averaging is weights or not buffers:  # one sum for all tensors, which is faster
            return weighted_sums(cohort.delta, weights, shapes)
        means = weighted_sums(buffers, averaging, shapes)
        return means | weighted_sums(trained, weights, shapes)

    def parts(self, cohort: Cohort) -> tuple[Stack, Stack]:
        """Return the updates of trained tensors, and the updates of buffers."""
        trained: Stack = {}
        buffers: Stack = {}
        for name, delta in cohort.delta.items():
            if name in self.buffers:
                buffers[name] = delta
            else:
                trained[name] = delta
        return trained, buffers

    def averaging_weights(self, cohort: Cohort, weights: Floats) -> Floats:
        """Return `weights` [K] divided by their sum.

        If one is negative or all are zero, the aggregator's own weights take their place. Returns
        `weights` itself if it sums to one up to rounding.
        """
        if (weights < 0).any() or not weights.any():
            weights = self.weights(cohort)
        total = weights.sum()
        return weights if np.isclose(total, 1.0, rtol=1e-9, atol=0.0) else weights / total


class FedAvg(Aggregator):
    """The weighted average of the local models (McMahan et al., 2017)."""

    is_mean = is_average = True

    def aggregate(self, params: Params, cohort: Cohort, weights: Weights) -> Params:
        """Return w + sum_k weights_k (w_k - w)."""
        return add_models(params, self.mean_delta(cohort, weights))


class ServerOptimizer(Aggregator):
    """The interface of server optimisers. Their gradient is the mean update times -1; buffers are
    averaged."""

    is_mean = True

    def aggregate(self, params: Params, cohort: Cohort, weights: Weights) -> Params:
        """Return the model after the optimiser's step."""
        changes = self.mean_delta(cohort, weights)
        names = [name for name in params if name not in self.buffers]
        if names:
            steps = self.steps(names, [changes[name] for name in names])
            changes.update(zip(names, steps, strict=True))
        return add_models(params, changes)

    @abstractmethod
    def steps(self, names: Sequence[str], means: list[Tensor]) -> Sequence[Tensor]:
        """Return the tensors to add to the parameters `names`, whose mean updates are `means`.

        `aggregate` calls this once a round. Operations on lists (`torch._foreach_mul`) are one
        launch each on a GPU.
        """


@parameters
class FedAvgM(ServerOptimizer):
    """Server momentum: v <- momentum v + d, w <- w + lr v, with d the mean update (Hsu, Qi and
    Brown, 2019, section 4.3). The paper has no `lr`: it is 1 there."""

    lr: Positive
    momentum: Decay

    state = ("velocity",)

    def __post_init__(self) -> None:
        self.velocity: Params = {}
        """v by parameter; empty before the first round."""

    def steps(self, names: Sequence[str], means: list[Tensor]) -> Sequence[Tensor]:
        """Return lr v for each parameter, with the new v."""
        previous = _stored(self.velocity, names, means, 0.0)
        velocity = torch._foreach_add(torch._foreach_mul(previous, self.momentum), means)
        self.velocity = dict(zip(names, velocity, strict=True))
        return torch._foreach_mul(velocity, self.lr)


@parameters
class FedAdam(ServerOptimizer):
    """FedAdam (Reddi et al., "Adaptive Federated Optimization", 2021, Algorithm 2), without bias
    correction, as printed.

    With d the mean update: m <- beta1 m + (1 - beta1) d, v <- beta2 v + (1 - beta2) d^2 with
    v_0 = tau^2, w <- w + lr m / (sqrt(v) + tau).
    """

    lr: Positive
    beta1: Decay
    beta2: Decay
    tau: Positive

    state = ("first", "second")

    def __post_init__(self) -> None:
        self.first: Params = {}
        """m by parameter; empty before the first round."""
        self.second: Params = {}
        """v by parameter; empty before the first round."""

    def steps(self, names: Sequence[str], means: list[Tensor]) -> Sequence[Tensor]:
        """Return lr m / (sqrt(v) + tau) for each parameter, with the new m and v."""
        squares = torch._foreach_pow(means, 2)
        first = _moving_average(_stored(self.first, names, means, 0.0), means, self.beta1)
        initial = self.tau**2
        second = _moving_average(_stored(self.second, names, means, initial), squares, self.beta2)
        self.first = dict(zip(names, first, strict=True))
        self.second = dict(zip(names, second, strict=True))
        # roots in float64: MKL's float32 roots are not rounded in the same way everywhere
        roots = [v.double().sqrt().to(v.dtype) for v in second]
        scale = torch._foreach_add(roots, self.tau)
        return torch._foreach_div(torch._foreach_mul(first, self.lr), scale)


@parameters
class MIFA(Aggregator):
    """The mean of each client's latest update, however old it is (Gu et al., "Fast Federated
    Learning in the Presence of Arbitrary Device Unavailability", 2021, Algorithm 1).

    w <- w + sum_i p_i (lr / lr_i) d_i, over the clients i that have answered so far. d_i is the
    latest update of client i, lr_i the local learning rate with which it was trained, and lr the
    present one. p_i is 1 divided by the number of these clients (`weighting: uniform`), or n_i
    divided by the number of their samples (`by_size`).

    Deviations: In the paper all clients answer in round 1, and all count equally. There, the server
    also takes a step in a round without an update. lr / lr_i scales an update exactly only for
    local SGD. The selector's weights are ignored, because they belong to this round's clients only.
    Buffers are averaged over this round's updates.
    """

    ignores_weights = True
    state = ("latest", "rates")

    def __post_init__(self) -> None:
        self.latest: Stack = {}
        """d_i for each trained tensor [N, ...], 0 for a client that has not answered."""
        self.rates: Floats = np.empty(0)
        """lr_i [N]; nan for a client that has not answered. Empty before the first round."""

    def begin(self, selector: Selector, params: Params) -> None:
        """Keep the clients' sizes, and compute the bytes of all latest updates for `warning`."""
        self._sizes = selector.population.sizes
        trained_bytes = sum(t.nbytes for name, t in params.items() if name not in self.buffers)
        self._bytes = len(self._sizes) * trained_bytes

    @property
    def warning(self) -> str:
        """A line about the memory that all latest updates take."""
        return (
            f"MIFA keeps the latest update of each of {len(self._sizes):,} clients, "
            f"{self._bytes / 1e6:,.1f} MB, in memory and in every checkpoint"
        )

    def begin_round(self, context: RoundContext, selected: Ids) -> None:
        """Keep the round's local learning rate."""
        self._lr = context.lr

    def aggregate(self, params: Params, cohort: Cohort, weights: Weights) -> Params:
        """Store the cohort's updates, and return w plus the mean of all stored ones."""
        num_clients = len(self._sizes)
        if not len(self.rates):
            self.rates = np.full(num_clients, np.nan)
        trained, buffers = self.parts(cohort)
        for name, delta in trained.items():
            if name not in self.latest:
                self.latest[name] = delta.new_zeros(num_clients, *delta.shape[1:])
            self.latest[name][to_device(torch.as_tensor(cohort.ids), delta.device)] = delta
        self.rates[cohort.ids] = self._lr
        client_weights = 1.0 if self.weighting == "uniform" else self._sizes
        shares = np.where(np.isnan(self.rates), 0.0, client_weights)
        # a learning rate of 0 has an update of 0, and would divide by 0
        ratios = np.divide(self._lr, self.rates, out=np.zeros(num_clients), where=self.rates > 0)
        means = weighted_sums(self.latest, shares / shares.sum() * ratios, cohort.start)
        means |= weighted_sums(buffers, self.weights(cohort), cohort.start)
        return add_models(params, means)


def _stored(
    state: Params, names: Sequence[str], like: list[Tensor], initial: float
) -> list[Tensor]:
    """Return the tensors `names` of `state`. Before the first round, when it is empty, return
    tensors in the shapes of `like` that hold `initial`."""
    if not state:
        return [torch.full_like(tensor, initial) for tensor in like]
    return [state[name] for name in names]


def _moving_average(
    average: list[Tensor], values: Sequence[Tensor], decay: float
) -> tuple[Tensor, ...]:
    """Return decay x average + (1 - decay) x values."""
    old = torch._foreach_mul(average, decay)
    return torch._foreach_add(old, torch._foreach_mul(list(values), 1 - decay))
