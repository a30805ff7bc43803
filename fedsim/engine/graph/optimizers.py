"""The updates of `fedsim.optimizers` on flat buffers of R clients, with all that changes from call to call in tensors.

Numbers that depend on learning rate and step are computed on the host in double precision and come in the tables.
"""

from abc import ABC, abstractmethod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.errors import ConfigError, Problem
from fedsim.optimizers.adam import Adam
from fedsim.optimizers.base import LocalOptimizer
from fedsim.optimizers.sgd import SGD


class FlatOptimizer(ABC):
    """An update of parameters [R, P]. Keeps its state, in static buffers."""

    num_scalars: int
    """C, the numbers that it needs in a step."""

    @abstractmethod
    def scalars(self, lr: float, steps: int) -> NDArray[np.float64]:
        """These numbers for each of so many steps [steps, C]."""

    @abstractmethod
    def update(self, values: Tensor, grads: Tensor, live: Tensor, scalars: Tensor) -> None:
        """One step of the rows that are `live` [R, 1] bool; others stay as they are. `scalars` [C]; recordable.

        Overwrites `grads`.
        """

    def reset(self) -> None:
        """The state before a first step."""
        for buffer in self.buffers:
            buffer.zero_()

    @property
    @abstractmethod
    def buffers(self) -> list[Tensor]:
        """The state, each [R, P]."""

    @property
    def momentum(self) -> Tensor | None:
        """SGD's momentum buffers [R, P], None for what has none."""
        return None


class FlatSGD(FlatOptimizer):
    """`fedsim.optimizers.sgd.SGD`. Numbers of a step: lr, 1 - lr * weight_decay."""

    num_scalars = 2

    def __init__(self, rule: SGD, like: Tensor) -> None:
        self.rule = rule
        self.velocity = torch.zeros_like(like) if rule.momentum else None

    @property
    def buffers(self) -> list[Tensor]:
        return [] if self.velocity is None else [self.velocity]

    @property
    def momentum(self) -> Tensor | None:
        return self.velocity

    def scalars(self, lr: float, steps: int) -> NDArray[np.float64]:
        return np.tile([lr, 1 - lr * self.rule.weight_decay], (steps, 1))

    @torch.no_grad()
    def update(self, values: Tensor, grads: Tensor, live: Tensor, scalars: Tensor) -> None:
        lr, keep = scalars[0], scalars[1]
        if self.velocity is None:
            kept = values * keep if self.rule.weight_decay else values
            _keep_where(live, kept - grads.mul_(lr), values)
            return
        if self.rule.weight_decay:
            grads.add_(values, alpha=self.rule.weight_decay)
        velocity = (self.velocity * self.rule.momentum).add_(grads)
        along = grads.add_(velocity, alpha=self.rule.momentum) if self.rule.nesterov else velocity
        _keep_where(live, values - along * lr, values)
        _keep_where(live, velocity, self.velocity)


class FlatAdam(FlatOptimizer):
    """`fedsim.optimizers.adam.Adam`. Numbers of step t = 1, 2, ...: lr / (1 - beta1^t), 1 - beta2^t,
    1 - lr * weight_decay. All clients start at t = 1; for one that has finished the state no longer matters."""

    num_scalars = 3

    def __init__(self, rule: Adam, like: Tensor) -> None:
        self.rule = rule
        self.first, self.second = torch.zeros_like(like), torch.zeros_like(like)

    @property
    def buffers(self) -> list[Tensor]:
        return [self.first, self.second]

    def scalars(self, lr: float, steps: int) -> NDArray[np.float64]:
        t = np.arange(1, steps + 1)
        keep = np.full(steps, 1 - lr * self.rule.weight_decay)
        return np.stack([lr / (1 - self.rule.beta1**t), 1 - self.rule.beta2**t, keep], axis=1)

    @torch.no_grad()
    def update(self, values: Tensor, grads: Tensor, live: Tensor, scalars: Tensor) -> None:
        rate, correction, keep = scalars[0], scalars[1], scalars[2]
        kept = values * keep if self.rule.decoupled else values
        if self.rule.weight_decay and not self.rule.decoupled:
            grads.add_(values, alpha=self.rule.weight_decay)
        self.first.lerp_(grads, 1 - self.rule.beta1)
        self.second.mul_(self.rule.beta2).addcmul_(grads, grads, value=1 - self.rule.beta2)
        scale = (self.second / correction).sqrt_().add_(self.rule.eps)
        _keep_where(live, kept - (self.first / scale).mul_(rate), values)


def _keep_where(live: Tensor, new: Tensor, old: Tensor) -> None:
    """`old` becomes `new` in the rows that are `live`: by choice and not by arithmetic, so that no nan spreads."""
    torch.where(live, new, old, out=old)


def flat_optimizer(rule: LocalOptimizer, like: Tensor) -> FlatOptimizer:
    """The update of `rule` on buffers as `like` [R, P]. Raises `ConfigError` where there is none."""
    if type(rule) is SGD:
        return FlatSGD(rule, like)
    if type(rule) is Adam:
        return FlatAdam(rule, like)
    text = f"cannot record the steps of {type(rule).__name__}, only those of SGD and Adam"
    raise ConfigError([Problem("", ..., text, "engine=batched runs it")])
