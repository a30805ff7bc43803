"""What a local optimiser and a schedule are."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

from fedsim.errors import Problem, check, positive
from fedsim.types import Stack


class Schedule(ABC):
    """The factor on the learning rate in a round (1-based); a change takes effect at the start of that round."""

    @abstractmethod
    def factor(self, round: int, num_rounds: int) -> float:
        """Multiplier of the base learning rate in `round` of `num_rounds`."""


class LocalOptimizer(ABC):
    """An optimiser whose state is fresh every round."""

    def __init__(self, *problems: Problem | None, lr: float, schedule: Schedule) -> None:
        """`problems`: what a subclass found wrong with its own values, to be told together with those of `lr`."""
        check(positive("lr", lr), *problems)
        self.lr = lr
        self.schedule = schedule

    def lr_at(self, round: int, num_rounds: int) -> float:
        """The learning rate of a round (1-based)."""
        return self.lr * self.schedule.factor(round, num_rounds)

    @abstractmethod
    def init(self, params: Stack) -> Any:
        """Fresh state for `params`, whose tensors carry a leading client axis."""

    @abstractmethod
    def step(self, params: Stack, grads: Stack, state: Any, lr: float) -> None:
        """One step in place over the leading rows that `params` and `grads` hold; every row has made as many steps.

        `grads` may be overwritten.
        """

    def momentum_buffers(self, state: Any) -> Stack | None:
        """The momentum buffers in `state`, or None for an optimiser without."""
        return None

    @abstractmethod
    def torch_optimizer(self, params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        """The same optimiser of torch.optim for one client, which the sequential engine uses."""
