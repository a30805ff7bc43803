"""Adam, with its weight decay as an L2 term or decoupled (AdamW)."""

from dataclasses import dataclass

import torch
from torch import nn

from fedsim.errors import at_least, between, positive
from fedsim.optimizers.base import LocalOptimizer, Schedule
from fedsim.types import Stack


@dataclass
class AdamState:
    """First and second moments, and the number of steps so far."""

    first: Stack
    second: Stack
    steps: int = 0


class Adam(LocalOptimizer):
    """Adam with bias correction (Kingma and Ba, 2015).

    `decoupled` applies weight decay to the parameters directly in place of the gradient (AdamW; Loshchilov and Hutter,
    2019).
    """

    def __init__(
        self,
        *,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        decoupled: bool,
        schedule: Schedule,
    ) -> None:
        super().__init__(
            between("beta1", beta1, 0, 1, open_high=True),
            between("beta2", beta2, 0, 1, open_high=True),
            positive("eps", eps),
            at_least("weight_decay", weight_decay, 0),
            lr=lr,
            schedule=schedule,
        )
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        self.weight_decay = weight_decay
        self.decoupled = decoupled

    def init(self, params: Stack) -> AdamState:
        first, second = ({name: torch.zeros_like(p) for name, p in params.items()} for _ in range(2))
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

    def torch_optimizer(self, params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        kind = torch.optim.AdamW if self.decoupled else torch.optim.Adam
        return kind(params, lr=lr, betas=(self.beta1, self.beta2), eps=self.eps, weight_decay=self.weight_decay)
