"""Local optimisers, and schedules of the learning rate over rounds (1-based)."""

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
    """A factor on the learning rate for each round (1-based); it is constant within a round."""

    @abstractmethod
    def factor(self, round: int, num_rounds: int) -> float:
        """Return the multiplier of the base learning rate in `round` of `num_rounds`."""


@parameters
class LocalOptimizer(ABC):
    """An optimiser of the clients' local training.

    It works on stacks: all tensors have a leading client axis. Its state starts anew in every
    round.
    """

    lr: Positive
    schedule: LearningRateSchedule
    max_grad_norm: Positive | None = None
    """Maximum norm of a client's gradient in a step, over all parameters (`clip`); None: any."""

    def lr_at(self, round: int, num_rounds: int) -> float:
        """Return the learning rate in `round` (1-based) of `num_rounds`."""
        return self.lr * self.schedule.factor(round, num_rounds)

    @abstractmethod
    def init(self, params: Stack) -> Any:
        """Return the initial state for `params`."""

    @abstractmethod
    def step(self, params: Stack, grads: Stack, state: Any, lr: float) -> None:
        """Make one step in place, and overwrite `grads` if that helps.

        `params` and `grads` may hold only the first clients for which `state` was made. These
        clients have all made the same number of steps.
        """

    def momentum_buffers(self, state: Any) -> Stack | None:
        """Return the momentum buffers in `state`, or None if the optimiser has none."""
        return None

    @abstractmethod
    def torch_optimizer(self, params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        """Return torch's own optimiser for one client, with which the sequential engine trains."""


@torch.no_grad()
def clip(grads: Stack, max_norm: float | None) -> None:
    """Scale the gradients `grads` [R, ...] in place, as torch.nn.utils.clip_grad_norm_ does.

    The factor of a row is max_norm / (norm + 1e-6), at most 1, with the norm over all tensors. The
    engines clip what the optimiser receives: the gradient of the mean loss plus the correction of
    a local algorithm, before weight decay and momentum. None changes nothing.
    """
    if max_norm is None:
        return
    norms = [torch.linalg.vector_norm(value.flatten(1), dim=1) for value in grads.values()]
    total = torch.linalg.vector_norm(torch.stack(norms, dim=1), dim=1)
    factors = (max_norm / (total + 1e-6)).clamp(max=1)
    for value in grads.values():
        value.mul_(factors.view(-1, *[1] * (value.dim() - 1)))


class RecordableOptimizer(LocalOptimizer):
    """An optimiser whose steps the graph engine can record.

    A recorded step works on one flat tensor for all parameters: on a GPU that takes few kernels,
    each of which fills the device. (On a CPU, `step` takes less than half of the time: it writes in
    place and masks nothing.)
    """

    @property
    @abstractmethod
    def num_buffers(self) -> int:
        """Number of state tensors of `recorded_step`, each as large as the parameters.

        The first one is the momentum buffer.
        """

    @abstractmethod
    def scalars(self, lr: float, steps: int) -> Floats:
        """Return the C numbers that `recorded_step` needs in each step [steps, C]."""

    @abstractmethod
    def recorded_step(
        self, values: Tensor, grads: Tensor, buffers: list[Tensor], live: Tensor, scalars: Tensor
    ) -> None:
        """Make one step of the parameters `values` [R, P] in place, as `step` does.

        Whatever changes between two calls is in tensors, because a replay reads nothing else. Rows
        that are not `live` [R, 1] stay as they are. `buffers` are zero before the first step. The
        step needs `scalars` [C], and may overwrite `grads` [R, P].
        """


@parameters
class SGD(RecordableOptimizer):
    """The update rule of torch.optim.SGD.

    g <- grad + weight_decay w; v <- momentum v + g; w <- w - lr v. With `nesterov`, w moves along
    g + momentum v instead of v. v is 0 initially, so the first step has v = g.
    """

    momentum: Annotated[float, Interval(ge=0, lt=1)]
    nesterov: bool
    weight_decay: NonNegative

    def problems(self) -> Problems:
        valid = not self.nesterov or self.momentum > 0
        yield rule(valid, "nesterov", self.nesterov, "needs momentum > 0", "optimizer.momentum=0.9")

    def init(self, params: Stack) -> Stack:
        return _zeros_like(params) if self.momentum else {}

    def momentum_buffers(self, state: Stack) -> Stack | None:
        return state if self.momentum else None

    def step(self, params: Stack, grads: Stack, state: Stack, lr: float) -> None:
        values = list(params.values())
        slopes = list(grads.values())
        if self.weight_decay and not self.momentum:
            # In one pass: w <- (1 - lr weight_decay) w - lr grad
            torch._foreach_mul_(values, 1 - lr * self.weight_decay)
        elif self.weight_decay:
            torch._foreach_add_(slopes, values, alpha=self.weight_decay)
        if self.momentum:
            velocity = [state[name][: len(value)] for name, value in params.items()]
            torch._foreach_mul_(velocity, self.momentum)
            torch._foreach_add_(velocity, slopes)
            if self.nesterov:
                torch._foreach_add_(slopes, velocity, alpha=self.momentum)
            else:
                slopes = velocity
        torch._foreach_add_(values, slopes, alpha=-lr)

    @property
    def num_buffers(self) -> int:
        return 1 if self.momentum else 0

    def scalars(self, lr: float, steps: int) -> Floats:
        """Return lr and 1 - lr weight_decay."""
        return np.tile([lr, 1 - lr * self.weight_decay], (steps, 1))

    def recorded_step(
        self, values: Tensor, grads: Tensor, buffers: list[Tensor], live: Tensor, scalars: Tensor
    ) -> None:
        lr, keep = scalars.unbind()
        if not self.momentum:
            decayed = values * keep if self.weight_decay else values
            _assign_where(live, decayed - grads.mul_(lr), values)
            return
        if self.weight_decay:
            grads.add_(values, alpha=self.weight_decay)
        velocity = (buffers[0] * self.momentum).add_(grads)
        direction = grads.add_(velocity, alpha=self.momentum) if self.nesterov else velocity
        _assign_where(live, values - direction * lr, values)
        _assign_where(live, velocity, buffers[0])

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
class Adam(RecordableOptimizer):
    """Adam with bias correction (Kingma and Ba, 2015).

    If it is `decoupled`, weight decay applies to the parameters and not to the gradient (AdamW;
    Loshchilov and Hutter, 2019).
    """

    beta1: Annotated[float, Interval(ge=0, lt=1)]
    beta2: Annotated[float, Interval(ge=0, lt=1)]
    eps: Positive
    weight_decay: NonNegative
    decoupled: bool

    def init(self, params: Stack) -> AdamState:
        return AdamState(_zeros_like(params), _zeros_like(params))

    def step(self, params: Stack, grads: Stack, state: AdamState, lr: float) -> None:
        state.steps += 1
        values = list(params.values())
        slopes = list(grads.values())
        if self.decoupled:
            torch._foreach_mul_(values, 1 - lr * self.weight_decay)
        elif self.weight_decay:
            torch._foreach_add_(slopes, values, alpha=self.weight_decay)
        first = [state.first[name][: len(value)] for name, value in params.items()]
        second = [state.second[name][: len(value)] for name, value in params.items()]
        torch._foreach_lerp_(first, slopes, 1 - self.beta1)
        torch._foreach_mul_(second, self.beta2)
        torch._foreach_addcmul_(second, slopes, slopes, 1 - self.beta2)
        scale = torch._foreach_div(second, 1 - self.beta2**state.steps)
        torch._foreach_sqrt_(scale)
        torch._foreach_add_(scale, self.eps)
        torch._foreach_addcdiv_(values, first, scale, -lr / (1 - self.beta1**state.steps))

    num_buffers = 2

    def scalars(self, lr: float, steps: int) -> Floats:
        """Return lr / (1 - beta1^t), 1 - beta2^t and 1 - lr weight_decay for steps t = 1, 2, ...

        All clients start at t = 1. The state of a client that has finished no longer matters.
        """
        t = np.arange(1, steps + 1)
        keep = np.full(steps, 1 - lr * self.weight_decay)
        return np.stack([lr / (1 - self.beta1**t), 1 - self.beta2**t, keep], axis=1)

    def recorded_step(
        self, values: Tensor, grads: Tensor, buffers: list[Tensor], live: Tensor, scalars: Tensor
    ) -> None:
        rate, correction, keep = scalars.unbind()
        decayed = values * keep if self.decoupled else values
        if self.weight_decay and not self.decoupled:
            grads.add_(values, alpha=self.weight_decay)
        first, second = buffers
        first.lerp_(grads, 1 - self.beta1)
        second.mul_(self.beta2).addcmul_(grads, grads, value=1 - self.beta2)
        scale = (second / correction).sqrt_().add_(self.eps)
        _assign_where(live, decayed - (first / scale).mul_(rate), values)

    def torch_optimizer(self, params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        kind = torch.optim.AdamW if self.decoupled else torch.optim.Adam
        betas = (self.beta1, self.beta2)
        return kind(params, lr=lr, betas=betas, eps=self.eps, weight_decay=self.weight_decay)


def _zeros_like(params: Stack) -> Stack:
    return {name: torch.zeros_like(value) for name, value in params.items()}


def _assign_where(live: Tensor, new: Tensor, target: Tensor) -> None:
    """Set `target` to `new` in the rows that are `live`.

    It chooses and does not multiply by 0 or 1, so that a nan stays in its row.
    """
    torch.where(live, new, target, out=target)


class Constant(LearningRateSchedule):
    """A constant learning rate."""

    def factor(self, round: int, num_rounds: int) -> float:
        return 1.0


class Step(LearningRateSchedule):
    """Multiplies the learning rate by `factor` after each round in `milestones`.

    Round m still has the old rate. The published codes count rounds from 0 and multiply before
    their round m, which is also after m rounds: FedCor's at 150 and 300, GPFL's at 162 and 244.
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
        num_passed = sum(round > milestone for milestone in self.milestones)
        return self.multiplier**num_passed


@parameters
class Exponential(LearningRateSchedule):
    """Multiplies the learning rate by `gamma` in every round from the second on."""

    gamma: Positive

    def factor(self, round: int, num_rounds: int) -> float:
        return self.gamma ** (round - 1)


@parameters
class Cosine(LearningRateSchedule):
    """A factor that falls along half a cosine, from 1 in the first round to `final` in the last."""

    final: Positive

    def factor(self, round: int, num_rounds: int) -> float:
        progress = (round - 1) / max(num_rounds - 1, 1)
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * progress)) / 2
