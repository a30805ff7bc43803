"""Stochastic gradient descent with momentum and weight decay."""

import torch
from torch import Tensor, nn

from fedsim.errors import at_least, between, rule
from fedsim.optimizers.base import LocalOptimizer, Schedule
from fedsim.types import Stack


class SGD(LocalOptimizer):
    """The update rule of torch.optim.SGD: g <- grad + weight_decay w; v <- momentum v + g; w <- w - lr v.

    With `nesterov` the step is along g + momentum v in place of v. v is 0 initially, so that the first step has v = g.
    """

    def __init__(self, *, lr: float, momentum: float, nesterov: bool, weight_decay: float, schedule: Schedule) -> None:
        super().__init__(
            between("momentum", momentum, 0, 1, open_high=True),
            rule(not nesterov or momentum > 0, "nesterov", nesterov, "needs momentum > 0", "optimizer.momentum=0.9"),
            at_least("weight_decay", weight_decay, 0),
            lr=lr,
            schedule=schedule,
        )
        self.momentum = momentum
        self.nesterov = nesterov
        self.weight_decay = weight_decay

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
            steps = self._with_momentum(params, steps, state)
        torch._foreach_add_(values, steps, alpha=-lr)

    def _with_momentum(self, params: Stack, steps: list[Tensor], state: Stack) -> list[Tensor]:
        velocity = [state[name][: len(p)] for name, p in params.items()]
        torch._foreach_mul_(velocity, self.momentum)
        torch._foreach_add_(velocity, steps)
        if not self.nesterov:
            return velocity
        torch._foreach_add_(steps, velocity, alpha=self.momentum)
        return steps

    def torch_optimizer(self, params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            params,
            lr=lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
            fused=True,
        )
