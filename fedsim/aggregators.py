"""Aggregators: how the server computes the next global model from the updates of a cohort."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.errors import between, check, positive
from fedsim.flat import flat_rows, split_flat, to_device
from fedsim.types import Cohort, Params

Weighting = Literal["uniform", "by_size"]


class Aggregator(ABC):
    """The interface of aggregators.

    Subclasses take their hyper-parameters keyword-only, with type annotations and without defaults. `buffers` names the
    entries of a model that are not trained (running statistics of BatchNorm): they are always averaged, and not changed
    by a server optimiser. `weighting`: equal weights (`uniform`) or in proportion to n_k (`by_size`).
    """

    state: ClassVar[tuple[str, ...]] = ()
    """Names of the attributes that persist between rounds."""

    def __init__(self, buffers: frozenset[str], *, weighting: Weighting) -> None:
        self.buffers = buffers
        self.weighting = weighting

    @abstractmethod
    def aggregate(self, params: Params, cohort: Cohort, weights: NDArray[np.float64] | None) -> Params:
        """The next global model from `params`, the present one.

        `weights` [K] come from the selector; None: the aggregator's own.
        """

    def weights(self, cohort: Cohort) -> NDArray[np.float64]:
        """The aggregator's own weights [K]: 1 / K, or n_k divided by the sum over the cohort."""
        if self.weighting == "uniform":
            return np.full(len(cohort.ids), 1 / len(cohort.ids))
        shares: NDArray[np.float64] = cohort.sizes / cohort.sizes.sum()
        return shares

    def mean_delta(self, cohort: Cohort, weights: NDArray[np.float64] | None) -> Params:
        """sum_k weights_k (w_k - w) per tensor: the negative of FedOpt's pseudo-gradient."""
        used = self.weights(cohort) if weights is None else weights
        if any(delta.is_cuda for delta in cohort.delta.values()):
            like = {name: cohort.start[name] for name in cohort.delta}
            return split_flat(_weighted_sum(flat_rows(cohort.delta), used), like)
        return {name: _weighted_sum(delta, used) for name, delta in cohort.delta.items()}

    def state_dict(self) -> dict[str, Any]:
        return {name: copy.deepcopy(getattr(self, name)) for name in self.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self.state:
            setattr(self, name, copy.deepcopy(state[name]))


def _weighted_sum(stack: Tensor, weights: NDArray[np.float64]) -> Tensor:
    row = to_device(torch.as_tensor(weights, dtype=stack.dtype), stack.device)
    return (row @ stack.reshape(len(stack), -1)).view(stack.shape[1:])


class FedAvg(Aggregator):
    """The weighted average of the local models (McMahan et al., 2017)."""

    def aggregate(self, params: Params, cohort: Cohort, weights: NDArray[np.float64] | None) -> Params:
        mean = self.mean_delta(cohort, weights)
        new = torch._foreach_add(list(params.values()), [mean[name] for name in params])
        return dict(zip(params, new, strict=True))


class ServerOptimizer(Aggregator):
    """A step of a server optimiser, with the mean update as the negative gradient; buffers are averaged."""

    def aggregate(self, params: Params, cohort: Cohort, weights: NDArray[np.float64] | None) -> Params:
        mean = self.mean_delta(cohort, weights)
        return {n: w + (mean[n] if n in self.buffers else self.change(n, mean[n])) for n, w in params.items()}

    @abstractmethod
    def change(self, name: str, mean: Tensor) -> Tensor:
        """The tensor to add to the parameter `name`, given its mean update `mean`."""


class FedAvgM(ServerOptimizer):
    """Server momentum: v <- momentum v + d, w <- w + lr v, d the mean update (Hsu, Qi and Brown, 2019, section 4.3)."""

    state = ("velocity",)

    def __init__(self, buffers: frozenset[str], *, weighting: Weighting, lr: float, momentum: float) -> None:
        super().__init__(buffers, weighting=weighting)
        check(positive("lr", lr), between("momentum", momentum, 0, 1, open_high=True))
        self.lr = lr
        self.momentum = momentum
        self.velocity: Params = {}

    def change(self, name: str, mean: Tensor) -> Tensor:
        previous = self.velocity.get(name, torch.zeros_like(mean))
        self.velocity[name] = self.momentum * previous + mean
        return self.lr * self.velocity[name]


class FedAdam(ServerOptimizer):
    """FedAdam (Reddi et al., "Adaptive Federated Optimization", 2021, Algorithm 2); no bias correction, as printed.

    With d the mean update: m <- beta1 m + (1 - beta1) d, v <- beta2 v + (1 - beta2) d^2 with v_0 = tau^2, w <- w + lr m
    / (sqrt(v) + tau).
    """

    state = ("first", "second")

    def __init__(
        self, buffers: frozenset[str], *, weighting: Weighting, lr: float, beta1: float, beta2: float, tau: float
    ) -> None:
        super().__init__(buffers, weighting=weighting)
        check(
            positive("lr", lr),
            between("beta1", beta1, 0, 1, open_high=True),
            between("beta2", beta2, 0, 1, open_high=True),
            positive("tau", tau),
        )
        self.lr, self.beta1, self.beta2, self.tau = lr, beta1, beta2, tau
        self.first: Params = {}
        self.second: Params = {}

    def change(self, name: str, mean: Tensor) -> Tensor:
        first = self.first.get(name, torch.zeros_like(mean))
        second = self.second.get(name, torch.full_like(mean, self.tau**2))
        self.first[name] = self.beta1 * first + (1 - self.beta1) * mean
        self.second[name] = self.beta2 * second + (1 - self.beta2) * mean**2
        return self.lr * self.first[name] / (self.second[name].sqrt() + self.tau)
