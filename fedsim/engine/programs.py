"""What takes the local steps of stacked clients: any model by automatic differentiation, linear chains by hand."""

from typing import Protocol

import torch
from torch import Tensor

from fedsim.cohort import Params, Stack
from fedsim.engine.chain import Chain
from fedsim.engine.fused import FusedChain
from fedsim.engine.gradients import StackedBatch, StackedGradients
from fedsim.optimizers.base import LocalOptimizer
from fedsim.optimizers.sgd import SGD


class Program(Protocol):
    """Local steps of R clients from one model. Rows that finish early are at the end and drop off."""

    def step(self, batch: StackedBatch) -> Tensor:
        """One step of the batch's leading rows; its samples' losses before it [rows, width]."""
        ...

    def delta(self) -> Stack:
        """w_k - w of all rows."""
        ...

    def momentum(self) -> Stack | None:
        """The optimiser's momentum buffers, None where it has none."""
        ...


class Differentiated:
    """Any model and optimiser, through `StackedGradients`."""

    def __init__(
        self, gradients: StackedGradients, optimizer: LocalOptimizer, params: Params, rows: int, lr: float
    ) -> None:
        self.gradients, self.optimizer, self.params, self.lr = gradients, optimizer, params, lr
        self.stack = {name: value.expand(rows, *value.shape).clone() for name, value in params.items()}
        self.state = optimizer.init({name: self.stack[name] for name in gradients.trained})

    def step(self, batch: StackedBatch) -> Tensor:
        live = {name: value[: len(batch.x)] for name, value in self.stack.items()}
        grads, losses = self.gradients(live, batch)
        trained = {name: live[name] for name in self.gradients.trained}
        self.optimizer.step(trained, grads, self.state, self.lr)
        return losses

    def delta(self) -> Stack:
        for name, value in self.stack.items():
            value.sub_(self.params[name])
        return self.stack

    def momentum(self) -> Stack | None:
        return self.optimizer.momentum_buffers(self.state)


class WrittenOut:
    """A linear chain under SGD without momentum, through `FusedChain`."""

    def __init__(self, chain: Chain, decay: float, params: Params, rows: int, lr: float) -> None:
        self.params, self.lr, self.decay = params, lr, decay
        self.models = FusedChain(chain, {name: value.expand(rows, *value.shape) for name, value in params.items()})

    @torch.no_grad()
    def step(self, batch: StackedBatch) -> Tensor:
        return self.models.step(batch.x, batch.y, batch.weights, self.lr, self.decay)

    def delta(self) -> Stack:
        stack = self.models.stack()
        return {name: (stack[name] - value).contiguous() for name, value in self.params.items()}

    def momentum(self) -> Stack | None:
        return None


def plain_sgd(optimizer: LocalOptimizer) -> SGD | None:
    """`optimizer`, if it is SGD without momentum."""
    return optimizer if type(optimizer) is SGD and not optimizer.momentum else None
