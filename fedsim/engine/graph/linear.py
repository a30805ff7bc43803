"""Chains of linear layers: the written-out passes of the batched backend on views of the flat buffers."""

import torch
from torch import Tensor

from fedsim.engine.backend import Workload
from fedsim.engine.batched.linear import StackedChain, StackedLayer
from fedsim.engine.batched.steps import StackedBatch
from fedsim.engine.graph.optimizers import FlatOptimizer
from fedsim.engine.graph.program import StepProgram
from fedsim.engine.graph.state import State
from fedsim.engine.graph.tables import Fields, StepTables
from fedsim.engine.model.chain import Chain
from fedsim.types import Stack


class LinearProgram(StepProgram):
    """A chain of linear layers, with products of all clients' matrices at once."""

    def __init__(self, workload: Workload, tables: StepTables, state: State, optimizer: FlatOptimizer) -> None:
        super().__init__(workload, tables, state, optimizer)
        assert workload.chain is not None
        self.models = _ViewedChain(workload.chain, state.views)
        self._grads = _layers(workload.chain, state.grad_views)

    @property
    def launches(self) -> int:
        dropouts = sum(link.rate > 0 for link in self.models.chain.links)
        return 20 + 8 * len(self.models.layers) + 35 * dropouts

    @torch.no_grad()
    def step(self, *, full: bool) -> None:
        row = self.tables.row
        losses = self.models.step(gathered(self.workload, row), self._keep_gradient)
        self.tables.write_losses(losses)
        live = (row.counts[0] > 0).unsqueeze(1)
        self.optimizer.update(self.state.flat, self.state.grads, live, row.scalars[0])

    def _keep_gradient(self, number: int, layer: StackedLayer, x: Tensor, grad: Tensor) -> None:
        """Of a layer with input `x` [R, B, in] from `grad` [R, B, out] at its output, as torch.nn.Linear lays it."""
        kept = self._grads[number]
        torch.bmm(grad.transpose(1, 2), x, out=kept.weight)
        if kept.bias is not None:
            torch.sum(grad, 1, out=kept.bias)


class _ViewedChain(StackedChain):
    """A chain whose weights are views of `stack`, so that what changes there changes here."""

    def __init__(self, chain: Chain, stack: Stack) -> None:
        self.chain = chain
        self.layers = [
            StackedLayer(layer.weight.transpose(1, 2), None if layer.bias is None else layer.bias.unsqueeze(1))
            for layer in _layers(chain, stack)
        ]
        self.minus_one = -torch.ones_like(self.layers[0].weight[:1, :1, :1])


def _layers(chain: Chain, stack: Stack) -> list[StackedLayer]:
    """The tensors of each layer as they are: weight [R, out, in], bias [R, out]."""
    return [StackedLayer(stack[k.weight], None if k.bias is None else stack[k.bias]) for k in chain.links]


def gathered(workload: Workload, row: Fields) -> StackedBatch:
    """The samples of a step's row of the tables; recordable."""
    data, where = workload.data, row.positions[0]
    flat = where.reshape(-1)
    x = data.x.index_select(0, flat).view(*where.shape, *data.x.shape[1:])
    return StackedBatch(x, data.y.index_select(0, flat).view(where.shape), row.weights[0], row.keys[0])
