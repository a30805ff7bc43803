"""The updates of `fedsim.engine.optimizers` on flat buffers of R clients, with all that changes from call to call in
tensors. Numbers that depend on learning rate and step are computed on the host in double precision."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.core.errors import ConfigError, Problem
from fedsim.engine.optimizers import SGD, Adam, LocalOptimizer


class FlatOptimizer(ABC):
    """An update of parameters [R, P]. Keeps its state, zero before a first step, in the static `buffers` [R, P]."""

    num_scalars: int
    """C, the numbers that it needs in a step."""

    def __init__(self, rule: Any, buffers: Sequence[Tensor]) -> None:
        self.rule, self.buffers = rule, buffers

    def part(self, rows: slice) -> Self:
        """For those rows of the parameters; shares memory."""
        return type(self)(self.rule, [buffer[rows] for buffer in self.buffers])

    @staticmethod
    @abstractmethod
    def buffers_of(rule: Any) -> int:
        """How many buffers its state is."""

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
    def momentum(self) -> Tensor | None:
        """SGD's momentum buffers [R, P], None for what has none."""
        return None


class FlatSGD(FlatOptimizer):
    """`fedsim.engine.optimizers.SGD`. Numbers of a step: lr, 1 - lr * weight_decay."""

    rule: SGD
    num_scalars = 2

    @staticmethod
    def buffers_of(rule: SGD) -> int:
        return 1 if rule.momentum else 0

    @property
    def momentum(self) -> Tensor | None:
        return self.buffers[0] if self.buffers else None

    def scalars(self, lr: float, steps: int) -> NDArray[np.float64]:
        return np.tile([lr, 1 - lr * self.rule.weight_decay], (steps, 1))

    @torch.no_grad()
    def update(self, values: Tensor, grads: Tensor, live: Tensor, scalars: Tensor) -> None:
        lr, keep = scalars[0], scalars[1]
        if not self.buffers:
            kept = values * keep if self.rule.weight_decay else values
            _keep_where(live, kept - grads.mul_(lr), values)
            return
        if self.rule.weight_decay:
            grads.add_(values, alpha=self.rule.weight_decay)
        (before,) = self.buffers
        velocity = (before * self.rule.momentum).add_(grads)
        along = grads.add_(velocity, alpha=self.rule.momentum) if self.rule.nesterov else velocity
        _keep_where(live, values - along * lr, values)
        _keep_where(live, velocity, before)


class FlatAdam(FlatOptimizer):
    """`fedsim.engine.optimizers.Adam`. Numbers of step t = 1, 2, ...: lr / (1 - beta1^t), 1 - beta2^t,
    1 - lr * weight_decay. All clients start at t = 1; for one that has finished the state no longer matters."""

    rule: Adam
    num_scalars = 3

    @staticmethod
    def buffers_of(rule: Adam) -> int:
        return 2

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
        first, second = self.buffers
        first.lerp_(grads, 1 - self.rule.beta1)
        second.mul_(self.rule.beta2).addcmul_(grads, grads, value=1 - self.rule.beta2)
        scale = (second / correction).sqrt_().add_(self.rule.eps)
        _keep_where(live, kept - (first / scale).mul_(rate), values)


def _keep_where(live: Tensor, new: Tensor, old: Tensor) -> None:
    """`old` becomes `new` in the rows that are `live`: by choice and not by arithmetic, so that no nan spreads."""
    torch.where(live, new, old, out=old)


def flat_optimizer(rule: LocalOptimizer, like: Tensor) -> FlatOptimizer:
    """The update of `rule` on buffers as `like` [R, P]. Raises `ConfigError` where there is none."""
    kinds: dict[type, type[FlatOptimizer]] = {SGD: FlatSGD, Adam: FlatAdam}
    if type(rule) not in kinds:
        text = f"cannot record the steps of {type(rule).__name__}, only those of SGD and Adam"
        raise ConfigError([Problem("", ..., text, "engine=batched runs it")])
    kind = kinds[type(rule)]
    return kind(rule, [torch.zeros_like(like) for _ in range(kind.buffers_of(rule))])
