"""The interfaces of local optimisers and learning-rate schedules."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

from fedsim.errors import Problem, check, positive
from fedsim.types import Stack


class Schedule(ABC):
    """A factor on the learning rate as a function of the round (1-based); constant within a round."""

    @abstractmethod
    def factor(self, round: int, num_rounds: int) -> float:
        """Multiplier of the base learning rate in `round` of `num_rounds`."""


class LocalOptimizer(ABC):
    """An optimiser of the clients' local training, whose state is initialised anew in every round.

    It works on stacked parameters: all tensors have a leading axis of clients.
    """

    def __init__(self, *problems: Problem | None, lr: float, schedule: Schedule) -> None:
        """`problems`: invalid values that a subclass found, reported in one error together with those of `lr`."""
        check(positive("lr", lr), *problems)
        self.lr = lr
        self.schedule = schedule

    def lr_at(self, round: int, num_rounds: int) -> float:
        """The learning rate in `round` (1-based) of `num_rounds`."""
        return self.lr * self.schedule.factor(round, num_rounds)

    @abstractmethod
    def init(self, params: Stack) -> Any:
        """The initial state for `params`, whose tensors have a leading client axis."""

    @abstractmethod
    def step(self, params: Stack, grads: Stack, state: Any, lr: float) -> None:
        """One optimiser step, in place, of the clients in `params` and `grads`.

        These may be the first rows only of the clients that `state` was made for; all of them have made the same number
        of steps. `grads` may be overwritten.
        """

    def momentum_buffers(self, state: Any) -> Stack | None:
        """The momentum buffers in `state`, or None if the optimiser has none."""
        return None

    @abstractmethod
    def torch_optimizer(self, params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        """The equivalent optimiser of torch.optim for one client; the sequential engine uses it."""
