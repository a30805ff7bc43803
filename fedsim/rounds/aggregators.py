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
from fedsim.core.types import Cohort, Ids, Params, Stack
from fedsim.selectors.base import Selector

Weighting = Literal["uniform", "by_size"]
Decay = Annotated[float, Interval(ge=0, lt=1)]


def weighting_warning(selector: Selector, aggregator: "Aggregator") -> str | None:
    """Return a line for the user if data sizes count twice, in the selection and in the average;
    None otherwise."""
    sizes = selector.population.sizes
    if (
        not selector.draws_by_size
        or aggregator.weighting == "uniform"
        or sizes.min() == sizes.max()
    ):
        return None
    name = type(selector).__name__
    return f"{name} draws clients by data size, so aggregator=by_size counts sizes twice; aggregator=uniform does once"


@parameters
class Aggregator(Stateful, ABC):
    """How the server computes the next model from a cohort's updates. Hyper-parameters are fields,
    as of selectors.

    `buffers` names the entries of a model that are not trained (running statistics of BatchNorm):
    they are averaged by weights that sum to one. `weighting`: equal weights (`uniform`) or in
    proportion to n_k (`by_size`).
    """

    buffers: frozenset[str] = field(kw_only=False)
    weighting: Weighting

    is_mean: ClassVar[bool] = False
    """Whether the server's step is a function of the mean update (`mean_delta`) alone."""
    is_average: ClassVar[bool] = False
    """Whether the next model is the weighted mean of the local models."""
    is_private: ClassVar[bool] = False
    """Whether it hides each client's update, of which nothing may then reach the server otherwise.
    It aggregates in every round in which clients can be reached, be it a cohort of nobody."""

    def unfit_for(self, selector: Selector, updates: int) -> Problems:
        """Rules over other groups, checked before the run. `updates`: how many a round has if all
        selected answer."""
        return ()

    def begin(self, selector: Selector, params: Params) -> None:
        """Called once, before the first round, with the initial model."""

    def account(
        self, selector: Selector, algorithm: LocalAlgorithm, clock: SimulatedClock | None
    ) -> None:
        """Called after `begin` with what a private aggregator's epsilon depends on besides
        itself."""

    def begin_round(self, context: RoundContext, selected: Ids) -> None:
        """Called before each `aggregate`. `selected`: who was asked to train, whether the update
        arrived or not."""

    @abstractmethod
    def aggregate(self, params: Params, cohort: Cohort, weights: Floats | None) -> Params:
        """The next global model from `params`, the present one. `weights` [K]: the selector's;
        None: its own."""

    @property
    def warning(self) -> str | None:
        """One line that is shown to the user before the run, or None."""
        return None

    @property
    def epsilon_spent(self) -> float | None:
        """The epsilon of differential privacy of the rounds so far; None where none holds."""
        return None

    def weights(self, cohort: Cohort) -> Floats:
        """The aggregator's own weights [K]: 1 / K, or n_k divided by the sum over the cohort."""
        if self.weighting == "uniform":
            return np.full(len(cohort.ids), 1 / len(cohort.ids))
        return cohort.sizes / cohort.sizes.sum()

    def mean_delta(self, cohort: Cohort, weights: Floats | None) -> Params:
        """sum_k weights_k (w_k - w) per tensor: the negative of FedOpt's pseudo-gradient.

        Of buffers, the mean under `averaging_weights`: importance weights, whose sum is one on
        average alone, would extrapolate beyond the clients' statistics, and a running variance
        below zero.
        """
        used = self.weights(cohort) if weights is None else weights
        averaging = self.averaging_weights(cohort, used)
        trained, buffers = self.parts(cohort)
        if averaging is used or not buffers:
            return weighted_sums(cohort.delta, used, cohort.start)
        return weighted_sums(buffers, averaging, cohort.start) | weighted_sums(
            trained, used, cohort.start
        )

    def parts(self, cohort: Cohort) -> tuple[Stack, Stack]:
        """The updates of trained tensors, and of buffers."""
        buffers = {name: delta for name, delta in cohort.delta.items() if name in self.buffers}
        return {name: delta for name, delta in cohort.delta.items() if name not in buffers}, buffers

    def averaging_weights(self, cohort: Cohort, weights: Floats) -> Floats:
        """`weights` [K] divided by their sum; the aggregator's own where one is negative or all are
        zero. `weights` itself where it sums to one up to rounding."""
        if (weights < 0).any() or not weights.any():
            weights = self.weights(cohort)
        total = weights.sum()
        return weights if np.isclose(total, 1.0, rtol=1e-9, atol=0.0) else weights / total


class FedAvg(Aggregator):
    """The weighted average of the local models (McMahan et al., 2017)."""

    is_mean = is_average = True

    def aggregate(self, params: Params, cohort: Cohort, weights: Floats | None) -> Params:
        return add_models(params, self.mean_delta(cohort, weights))


class ServerOptimizer(Aggregator):
    """A step of a server optimiser, with the mean update as the negative gradient; buffers are
    averaged."""

    is_mean = True

    def aggregate(self, params: Params, cohort: Cohort, weights: Floats | None) -> Params:
        mean = self.mean_delta(cohort, weights)
        names = [name for name in params if name not in self.buffers]
        changes = self.changes(names, [mean[name] for name in names]) if names else []
        return add_models(params, {**mean, **dict(zip(names, changes, strict=True))})

    @abstractmethod
    def changes(self, names: Sequence[str], means: list[Tensor]) -> Sequence[Tensor]:
        """The tensors to add to the parameters `names`, given their mean updates `means`; by
        operations on lists (`torch._foreach_mul`), each of which is one launch on a GPU."""


@parameters
class FedAvgM(ServerOptimizer):
    """Server momentum: v <- momentum v + d, w <- w + lr v, d the mean update (Hsu, Qi and Brown,
    2019, section 4.3)."""

    lr: Positive
    momentum: Decay

    state = ("velocity",)

    def __post_init__(self) -> None:
        self.velocity: Params = {}

    def changes(self, names: Sequence[str], means: list[Tensor]) -> Sequence[Tensor]:
        previous = _stored(self.velocity, names, means, 0.0)
        velocity = torch._foreach_add(torch._foreach_mul(previous, self.momentum), means)
        self.velocity = dict(zip(names, velocity, strict=True))
        return torch._foreach_mul(velocity, self.lr)


@parameters
class FedAdam(ServerOptimizer):
    """FedAdam (Reddi et al., "Adaptive Federated Optimization", 2021, Algorithm 2); no bias
    correction, as printed.

    With d the mean update: m <- beta1 m + (1 - beta1) d, v <- beta2 v + (1 - beta2) d^2 with v_0 =
    tau^2, w <- w + lr m / (sqrt(v) + tau).
    """

    lr: Positive
    beta1: Decay
    beta2: Decay
    tau: Positive

    state = ("first", "second")

    def __post_init__(self) -> None:
        self.first: Params = {}
        self.second: Params = {}

    def changes(self, names: Sequence[str], means: list[Tensor]) -> Sequence[Tensor]:
        first = _moved(_stored(self.first, names, means, 0.0), means, self.beta1)
        squares = torch._foreach_pow(means, 2)
        second = _moved(_stored(self.second, names, means, self.tau**2), squares, self.beta2)
        self.first, self.second = (
            dict(zip(names, first, strict=True)),
            dict(zip(names, second, strict=True)),
        )
        roots = [
            v.double().sqrt().to(v.dtype) for v in second
        ]  # MKL's of float32 are rounded one way or the other
        scale = torch._foreach_add(roots, self.tau)
        return torch._foreach_div(torch._foreach_mul(first, self.lr), scale)


@parameters
class MIFA(Aggregator):
    """The mean over clients of the latest update of each, however old (Gu et al., "Fast Federated
    Learning in the Presence of Arbitrary Device Unavailability", 2021, Algorithm 1): w <- w + sum_i
    p_i (lr / lr_i) d_i, where d_i was made at the local learning rate lr_i, lr is the present one,
    and p_i = 1 / N or n_i / n; of those that have answered so far, where the paper has all answer
    in round 1. A selector's weights are of this round's clients alone, and ignored. Buffers are
    averaged over this round's updates.
    """

    state = ("latest", "rates")

    def __post_init__(self) -> None:
        self.latest: Stack = {}
        self.rates: Floats = np.empty(0)

    def begin(self, selector: Selector, params: Params) -> None:
        self._sizes = selector.population.sizes
        self._bytes = len(self._sizes) * sum(
            t.nbytes for name, t in params.items() if name not in self.buffers
        )

    @property
    def warning(self) -> str:
        held = f"the latest update of each of {len(self._sizes):,} clients, {self._bytes / 1e6:,.1f} MB"
        return f"MIFA keeps {held}, in memory and in every checkpoint"

    def begin_round(self, context: RoundContext, selected: Ids) -> None:
        self._lr = context.lr

    def aggregate(self, params: Params, cohort: Cohort, weights: Floats | None) -> Params:
        if not len(self.rates):
            self.rates = np.full(len(self._sizes), np.nan)  # of clients that have not answered
        steps, buffers = self.parts(cohort)
        for name, delta in steps.items():
            if name not in self.latest:
                self.latest[name] = delta.new_zeros(len(self._sizes), *delta.shape[1:])
            self.latest[name][to_device(torch.as_tensor(cohort.ids), delta.device)] = delta
        self.rates[cohort.ids] = self._lr
        shares = np.where(
            np.isnan(self.rates), 0.0, 1.0 if self.weighting == "uniform" else self._sizes
        )
        ratios = np.divide(self._lr, self.rates, out=np.zeros(len(shares)), where=self.rates > 0)
        means = weighted_sums(self.latest, shares / shares.sum() * ratios, cohort.start)
        return add_models(
            params, means | weighted_sums(buffers, self.weights(cohort), cohort.start)
        )


def _stored(
    state: Params, names: Sequence[str], like: list[Tensor], initial: float
) -> list[Tensor]:
    """The tensors of `state`; before the first round, tensors like those of `like` that hold
    `initial`."""
    return [
        state[name] if name in state else torch.full_like(t, initial)
        for name, t in zip(names, like, strict=True)
    ]


def _moved(average: list[Tensor], values: Sequence[Tensor], keep: float) -> tuple[Tensor, ...]:
    return torch._foreach_add(
        torch._foreach_mul(average, keep), torch._foreach_mul(list(values), 1 - keep)
    )
