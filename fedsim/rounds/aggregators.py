"""The interface of aggregators, and those that average updates or take a step of a server
optimiser. rounds/robust.py has aggregators that bound what one client can do."""

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
from fedsim.core.parameters import Positive, Problems, Stateful, parameters
from fedsim.core.types import Cohort, Ids, Params, Stack, Weights
from fedsim.selectors.base import Selector

Weighting = Literal["uniform", "by_size"]
Decay = Annotated[float, Interval(ge=0, lt=1)]


def weighting_warning(selector: Selector, aggregator: "Aggregator") -> str | None:
    """Return a line for the user if data sizes count twice, in the selection and in the average;
    otherwise None."""
    sizes = selector.population.sizes
    counts_once = not selector.draws_by_size or aggregator.weighting == "uniform"
    if counts_once or sizes.min() == sizes.max():
        return None
    return (
        f"{type(selector).__name__} draws clients by data size, so aggregator=by_size counts sizes "
        "twice; aggregator=uniform counts them once"
    )


@parameters
class Aggregator(Stateful, ABC):
    """The interface of aggregators, with which the server computes the next model from a cohort's
    updates. Hyper-parameters are fields, as in selectors."""

    buffers: frozenset[str] = field(kw_only=False)
    """Names of the entries of a model that are not trained (running statistics of BatchNorm). They
    are averaged by weights that sum to one."""
    weighting: Weighting
    """Equal weights (`uniform`), or weights in proportion to n_k (`by_size`)."""

    is_mean: ClassVar[bool] = False
    """Whether the server's step depends only on the mean update (`mean_delta`)."""
    is_average: ClassVar[bool] = False
    """Whether the next model is the weighted mean of the local models."""
    is_private: ClassVar[bool] = False
    """Whether it hides each client's update, so that the server must not learn it in another way.
    It aggregates in every round in which clients can be reached, even if no update arrives."""

    def unfit_for(self, selector: Selector, num_updates: int) -> Problems:
        """Return violated rules over other groups, before the run. `num_updates` is the number of
        updates in a round if all selected clients answer."""
        return ()

    def begin(self, selector: Selector, params: Params) -> None:
        """Prepare for the run with the initial model; called once, before the first round."""

    def account(
        self, selector: Selector, algorithm: LocalAlgorithm, clock: SimulatedClock | None
    ) -> None:
        """Receive what else a private aggregator's epsilon depends on; called after `begin`."""

    def begin_round(self, context: RoundContext, selected: Ids) -> None:
        """Prepare for `aggregate`; called before each. `selected` are the clients that were
        requested to train, whether their updates arrived or not."""

    @abstractmethod
    def aggregate(self, params: Params, cohort: Cohort, weights: Weights) -> Params:
        """Return the next global model from `params`, the present one.

        `weights` [K] are the selector's; None: the aggregator uses its own.
        """

    @property
    def warning(self) -> str | None:
        """One line that is shown to the user before the run, or None."""
        return None

    @property
    def epsilon_spent(self) -> float | None:
        """The epsilon of differential privacy of the rounds so far; None if there is none."""
        return None

    def weights(self, cohort: Cohort) -> Floats:
        """Return the aggregator's own weights [K]: 1 / K, or n_k divided by their sum over the
        cohort."""
        if self.weighting == "uniform":
            return np.full(len(cohort.ids), 1 / len(cohort.ids))
        return cohort.sizes / cohort.sizes.sum()

    def mean_delta(self, cohort: Cohort, weights: Weights) -> Params:
        """Return sum_k weights_k (w_k - w) for each tensor: FedOpt's pseudo-gradient times -1.

        Buffers are averaged with `averaging_weights`. Importance weights sum to one only on
        average. They would extrapolate beyond the clients' statistics, and a running variance below
        zero.
        """
        if weights is None:
            weights = self.weights(cohort)
        averaging = self.averaging_weights(cohort, weights)
        trained, buffers = self.parts(cohort)
        if averaging is weights or not buffers:
            return weighted_sums(cohort.delta, weights, cohort.start)
        means = weighted_sums(buffers, averaging, cohort.start)
        return means | weighted_sums(trained, weights, cohort.start)

    def parts(self, cohort: Cohort) -> tuple[Stack, Stack]:
        """Return the updates of trained tensors, and those of buffers."""
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
        return add_models(params, self.mean_delta(cohort, weights))


class ServerOptimizer(Aggregator):
    """A step of a server optimiser, whose gradient is the mean update times -1. Buffers are
    averaged."""

    is_mean = True

    def aggregate(self, params: Params, cohort: Cohort, weights: Weights) -> Params:
        changes = self.mean_delta(cohort, weights)
        names = [name for name in params if name not in self.buffers]
        if names:
            steps = self.steps(names, [changes[name] for name in names])
            changes.update(zip(names, steps, strict=True))
        return add_models(params, changes)

    @abstractmethod
    def steps(self, names: Sequence[str], means: list[Tensor]) -> Sequence[Tensor]:
        """Return the tensors to add to the parameters `names`, given their mean updates `means`.

        Operations on lists (`torch._foreach_mul`) are one launch each on a GPU.
        """


@parameters
class FedAvgM(ServerOptimizer):
    """Server momentum: v <- momentum v + d, w <- w + lr v, with d the mean update (Hsu, Qi and
    Brown, 2019, section 4.3)."""

    lr: Positive
    momentum: Decay

    state = ("velocity",)

    def __post_init__(self) -> None:
        self.velocity: Params = {}

    def steps(self, names: Sequence[str], means: list[Tensor]) -> Sequence[Tensor]:
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
        self.second: Params = {}

    def steps(self, names: Sequence[str], means: list[Tensor]) -> Sequence[Tensor]:
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
    """The mean over clients of the latest update of each, however old (Gu et al., "Fast Federated
    Learning in the Presence of Arbitrary Device Unavailability", 2021, Algorithm 1).

    w <- w + sum_i p_i (lr / lr_i) d_i, with d_i the latest update of client i, lr_i its local
    learning rate then, lr the present one, and p_i = 1 / N or n_i / n. The sum is over clients that
    have answered so far; in the paper all of them answer in round 1. The selector's weights are
    ignored, because they belong to this round's clients only. Buffers are averaged over this
    round's updates.
    """

    state = ("latest", "rates")

    def __post_init__(self) -> None:
        self.latest: Stack = {}
        self.rates: Floats = np.empty(0)
        """lr_i [N]; nan for a client that has not answered."""

    def begin(self, selector: Selector, params: Params) -> None:
        self._sizes = selector.population.sizes
        trained_bytes = sum(t.nbytes for name, t in params.items() if name not in self.buffers)
        self._bytes = len(self._sizes) * trained_bytes

    @property
    def warning(self) -> str:
        return (
            f"MIFA keeps the latest update of each of {len(self._sizes):,} clients, "
            f"{self._bytes / 1e6:,.1f} MB, in memory and in every checkpoint"
        )

    def begin_round(self, context: RoundContext, selected: Ids) -> None:
        self._lr = context.lr

    def aggregate(self, params: Params, cohort: Cohort, weights: Weights) -> Params:
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
        ratios = np.divide(self._lr, self.rates, out=np.zeros(num_clients), where=self.rates > 0)
        means = weighted_sums(self.latest, shares / shares.sum() * ratios, cohort.start)
        means |= weighted_sums(buffers, self.weights(cohort), cohort.start)
        return add_models(params, means)


def _stored(
    state: Params, names: Sequence[str], like: list[Tensor], initial: float
) -> list[Tensor]:
    """Return the tensors of `state`; before the first round, tensors like those of `like` that hold
    `initial`."""
    if not state:
        return [torch.full_like(tensor, initial) for tensor in like]
    return [state[name] for name in names]


def _moving_average(
    average: list[Tensor], values: Sequence[Tensor], decay: float
) -> tuple[Tensor, ...]:
    old = torch._foreach_mul(average, decay)
    return torch._foreach_add(old, torch._foreach_mul(list(values), 1 - decay))
