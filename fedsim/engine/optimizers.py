"""Local optimisers and learning-rate schedules over rounds (1-based)."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Interval
from torch import Tensor, nn

from fedsim.core.arrays import Floats
from fedsim.core.errors import check, positive, rule
from fedsim.core.parameters import NonNegative, Positive, Problems, parameters
from fedsim.core.types import Stack


class LearningRateSchedule(ABC):
    """A factor on the learning rate as a function of the round (1-based); constant within a
    round."""

    @abstractmethod
    def factor(self, round: int, num_rounds: int) -> float:
        """Multiplier of the base learning rate in `round` of `num_rounds`."""


@parameters
class LocalOptimizer(ABC):
    """An optimiser of the clients' local training, on stacked parameters: all tensors have a
    leading axis of clients. Its state is initialised anew in every round."""

    lr: Positive
    schedule: LearningRateSchedule

    def lr_at(self, round: int, num_rounds: int) -> float:
        """The learning rate in `round` (1-based) of `num_rounds`."""
        return self.lr * self.schedule.factor(round, num_rounds)

    @abstractmethod
    def init(self, params: Stack) -> Any:
        """The initial state for `params`, whose tensors have a leading client axis."""

    @abstractmethod
    def step(self, params: Stack, grads: Stack, state: Any, lr: float) -> None:
        """One optimiser step, in place, of the clients in `params` and `grads`: maybe only the
        first rows of those that `state` was made for, which have all made the same number of steps.
        `grads` may be overwritten."""

    def momentum_buffers(self, state: Any) -> Stack | None:
        """The momentum buffers in `state`, or None if the optimiser has none."""
        return None

    @abstractmethod
    def torch_optimizer(self, params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        """The equivalent optimiser of torch.optim for one client; the sequential engine uses it."""


@parameters
class SGD(LocalOptimizer):
    """The update rule of torch.optim.SGD: g <- grad + weight_decay w; v <- momentum v + g; w <- w -
    lr v.

    With `nesterov` the step is along g + momentum v in place of v. v is 0 initially, so that the
    first step has v = g.
    """

    momentum: Annotated[float, Interval(ge=0, lt=1)]
    nesterov: bool
    weight_decay: NonNegative

    def problems(self) -> Problems:
        sound = not self.nesterov or self.momentum > 0
        yield rule(sound, "nesterov", self.nesterov, "needs momentum > 0", "optimizer.momentum=0.9")

    def init(self, params: Stack) -> Stack:
        return {name: torch.zeros_like(p) for name, p in params.items()} if self.momentum else {}

    def momentum_buffers(self, state: Stack) -> Stack | None:
        return state if self.momentum else None

    def step(self, params: Stack, grads: Stack, state: Stack, lr: float) -> None:
        values, steps = list(params.values()), list(grads.values())
        if self.weight_decay and not self.momentum:  # one pass: w <- (1 - lr decay) w - lr grad
            torch._foreach_mul_(values, 1 - lr * self.weight_decay)
        elif self.weight_decay:
            torch._foreach_add_(steps, values, alpha=self.weight_decay)
        if self.momentum:
            velocity = [state[name][: len(p)] for name, p in params.items()]
            torch._foreach_mul_(velocity, self.momentum)
            torch._foreach_add_(velocity, steps)
            if self.nesterov:
                torch._foreach_add_(steps, velocity, alpha=self.momentum)
            else:
                steps = velocity
        torch._foreach_add_(values, steps, alpha=-lr)

    @property
    def num_buffers(self) -> int:
        """Of the state of `recorded_step`, each as the parameters; the first is the momentum."""
        return 1 if self.momentum else 0

    def scalars(self, lr: float, steps: int) -> Floats:
        """The numbers of each of so many steps [steps, 2] for `recorded_step`: lr, 1 - lr *
        weight_decay."""
        return np.tile([lr, 1 - lr * self.weight_decay], (steps, 1))

    def recorded_step(
        self, values: Tensor, grads: Tensor, buffers: list[Tensor], live: Tensor, scalars: Tensor
    ) -> None:
        """As `step`, of parameters `values` [R, P], with all that changes from call to call in
        tensors: `scalars` [C], and `buffers`, zero before a first step. Rows that are not `live`
        [R, 1] stay as they are."""
        lr, keep = scalars[0], scalars[1]
        if not buffers:
            kept = values * keep if self.weight_decay else values
            _keep_where(live, kept - grads.mul_(lr), values)
            return
        if self.weight_decay:
            grads.add_(values, alpha=self.weight_decay)
        velocity = (buffers[0] * self.momentum).add_(grads)
        along = grads.add_(velocity, alpha=self.momentum) if self.nesterov else velocity
        _keep_where(live, values - along * lr, values)
        _keep_where(live, velocity, buffers[0])

    def torch_optimizer(self, params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            params,
            lr=lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
            fused=True,
        )


@dataclass
class AdamState:
    """First and second moments, and the number of steps so far."""

    first: Stack
    second: Stack
    steps: int = 0


@parameters
class Adam(LocalOptimizer):
    """Adam with bias correction (Kingma and Ba, 2015). `decoupled` applies weight decay to the
    parameters directly in place of the gradient (AdamW; Loshchilov and Hutter, 2019)."""

    beta1: Annotated[float, Interval(ge=0, lt=1)]
    beta2: Annotated[float, Interval(ge=0, lt=1)]
    eps: Positive
    weight_decay: NonNegative
    decoupled: bool

    def init(self, params: Stack) -> AdamState:
        first, second = (
            {name: torch.zeros_like(p) for name, p in params.items()} for _ in range(2)
        )
        return AdamState(first, second)

    def step(self, params: Stack, grads: Stack, state: AdamState, lr: float) -> None:
        state.steps += 1
        values, slopes = list(params.values()), list(grads.values())
        if self.decoupled:
            torch._foreach_mul_(values, 1 - lr * self.weight_decay)
        elif self.weight_decay:
            torch._foreach_add_(slopes, values, alpha=self.weight_decay)
        first = [state.first[name][: len(p)] for name, p in params.items()]
        second = [state.second[name][: len(p)] for name, p in params.items()]
        torch._foreach_lerp_(first, slopes, 1 - self.beta1)
        torch._foreach_mul_(second, self.beta2)
        torch._foreach_addcmul_(second, slopes, slopes, 1 - self.beta2)
        scale = torch._foreach_div(second, 1 - self.beta2**state.steps)
        torch._foreach_sqrt_(scale)
        torch._foreach_add_(scale, self.eps)
        torch._foreach_addcdiv_(values, first, scale, -lr / (1 - self.beta1**state.steps))

    num_buffers = 2

    def scalars(self, lr: float, steps: int) -> Floats:
        """The numbers of steps t = 1, 2, ... [steps, 3] for `recorded_step`: lr / (1 - beta1^t), 1
        - beta2^t, 1 - lr * weight_decay. All clients start at t = 1; for one that has finished the
        state no longer matters."""
        t = np.arange(1, steps + 1)
        keep = np.full(steps, 1 - lr * self.weight_decay)
        return np.stack([lr / (1 - self.beta1**t), 1 - self.beta2**t, keep], axis=1)

    def recorded_step(
        self, values: Tensor, grads: Tensor, buffers: list[Tensor], live: Tensor, scalars: Tensor
    ) -> None:
        rate, correction, keep = scalars[0], scalars[1], scalars[2]
        kept = values * keep if self.decoupled else values
        if self.weight_decay and not self.decoupled:
            grads.add_(values, alpha=self.weight_decay)
        first, second = buffers
        first.lerp_(grads, 1 - self.beta1)
        second.mul_(self.beta2).addcmul_(grads, grads, value=1 - self.beta2)
        scale = (second / correction).sqrt_().add_(self.eps)
        _keep_where(live, kept - (first / scale).mul_(rate), values)

    def torch_optimizer(self, params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        kind = torch.optim.AdamW if self.decoupled else torch.optim.Adam
        return kind(
            params,
            lr=lr,
            betas=(self.beta1, self.beta2),
            eps=self.eps,
            weight_decay=self.weight_decay,
        )


def _keep_where(live: Tensor, new: Tensor, old: Tensor) -> None:
    """`old` becomes `new` in the rows that are `live`: by choice and not by arithmetic, so that no
    nan spreads."""
    torch.where(live, new, old, out=old)


class Constant(LearningRateSchedule):
    """A constant learning rate."""

    def factor(self, round: int, num_rounds: int) -> float:
        return 1.0


class Step(LearningRateSchedule):
    """Multiplies the learning rate by `factor` after each round in `milestones`; round m still has
    the old rate.

    The published codes count rounds from 0 and multiply before their round m, which is also after m
    rounds: FedCor's at 150 and 300, GPFL's at 162 and 244.
    """

    def __init__(self, *, milestones: list[int], factor: float) -> None:
        ascending = all(m >= 1 for m in milestones) and sorted(set(milestones)) == milestones
        check(
            rule(ascending, "milestones", milestones, "must be ascending rounds >= 1"),
            positive("factor", factor),
        )
        self.milestones = milestones
        self.multiplier = factor

    def factor(self, round: int, num_rounds: int) -> float:
        return self.multiplier ** sum(round > m for m in self.milestones)


@parameters
class Exponential(LearningRateSchedule):
    """Multiplies the learning rate by `gamma` in every round from the second on."""

    gamma: Positive

    def factor(self, round: int, num_rounds: int) -> float:
        return self.gamma ** (round - 1)


@parameters
class Cosine(LearningRateSchedule):
    """A factor that falls along half a cosine from 1 in the first round to `final` in the last."""

    final: Positive

    def factor(self, round: int, num_rounds: int) -> float:
        progress = (round - 1) / max(num_rounds - 1, 1)
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * progress)) / 2
