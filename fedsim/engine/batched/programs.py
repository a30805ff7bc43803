"""What takes the local steps of stacked clients: any model by automatic differentiation, linear chains written out."""

from typing import Protocol

import torch
from torch import Tensor

from fedsim.engine.batched.gradients import StackedGradients
from fedsim.engine.batched.linear import StackedChain, StackedLayer, gradients_into, sgd_update
from fedsim.engine.batched.steps import StackedBatch
from fedsim.engine.model.chain import Chain
from fedsim.optimizers.base import LocalOptimizer
from fedsim.optimizers.sgd import SGD
from fedsim.types import Stack


class Program(Protocol):
    """Local steps of R clients from models `start` [R, ...], which are not modified."""

    def step(self, batch: StackedBatch) -> Tensor:
        """One step of the leading rows, as many as the batch has; its samples' losses before the step [rows, B]."""
        ...

    def row(self, row: int) -> list[Tensor]:
        """The parameters and momentum buffers of one client; share memory with the program's."""
        ...

    def delta(self) -> Stack:
        """w_k - w of all rows."""
        ...

    def momentum(self) -> Stack | None:
        """The optimiser's momentum buffers, None where it has none."""
        ...


class Differentiated:
    """Any model and optimiser, through `StackedGradients`."""

    def __init__(self, gradients: StackedGradients, optimizer: LocalOptimizer, start: Stack, lr: float) -> None:
        self.gradients, self.optimizer, self.start, self.lr = gradients, optimizer, start, lr
        self.stack = {name: value.clone(memory_format=torch.contiguous_format) for name, value in start.items()}
        self.state = optimizer.init({name: self.stack[name] for name in gradients.trained})

    def step(self, batch: StackedBatch) -> Tensor:
        live = {name: value[: len(batch.x)] for name, value in self.stack.items()}
        grads, losses = self.gradients(live, batch)
        trained = {name: live[name] for name in self.gradients.trained}
        self.optimizer.step(trained, grads, self.state, self.lr)
        return losses

    def row(self, row: int) -> list[Tensor]:
        return [value[row] for value in (*self.stack.values(), *(self.momentum() or {}).values())]

    def delta(self) -> Stack:
        for name, value in self.stack.items():
            value.sub_(self.start[name])
        return self.stack

    def momentum(self) -> Stack | None:
        return self.optimizer.momentum_buffers(self.state)


class LinearChain:
    """A chain of linear layers under any optimiser, through `StackedChain`; the step of plain SGD is part of the
    matrix products."""

    def __init__(self, chain: Chain, optimizer: LocalOptimizer, start: Stack, lr: float) -> None:
        self.start, self.optimizer, self.lr = start, optimizer, lr
        self.models = StackedChain(chain, start)
        self.tensors = _by_number(self.models.layers)
        self.decay = optimizer.weight_decay if type(optimizer) is SGD and not optimizer.momentum else None
        self.state = None if self.decay is not None else optimizer.init(self.tensors)

    @torch.no_grad()
    def step(self, batch: StackedBatch) -> Tensor:
        if self.decay is not None:
            return self.models.step(batch, sgd_update(self.lr, self.decay))
        gradients: Stack = {}
        losses = self.models.step(batch, gradients_into(gradients))
        rows = len(batch.x)
        live = {name: self.tensors[name][:rows] for name in gradients}
        self.optimizer.step(live, gradients, self.state, self.lr)
        return losses

    def row(self, row: int) -> list[Tensor]:
        return [value[row] for value in (*self.tensors.values(), *(self._buffers() or {}).values())]

    def delta(self) -> Stack:
        stack = self.models.named(self.models.layers)
        return {name: (stack[name] - value).contiguous() for name, value in self.start.items()}

    def momentum(self) -> Stack | None:
        buffers = self._buffers()
        if buffers is None:
            return None
        numbers = range(len(self.models.layers))
        layers = [StackedLayer(buffers[f"{n}.weight"], buffers.get(f"{n}.bias")) for n in numbers]
        return {name: value.contiguous() for name, value in self.models.named(layers).items()}

    def _buffers(self) -> Stack | None:
        return None if self.state is None else self.optimizer.momentum_buffers(self.state)


def _by_number(layers: list[StackedLayer]) -> Stack:
    weights = {f"{number}.weight": layer.weight for number, layer in enumerate(layers)}
    return weights | {f"{number}.bias": layer.bias for number, layer in enumerate(layers) if layer.bias is not None}
