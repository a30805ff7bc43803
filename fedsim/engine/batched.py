"""The batched backend: all clients as one tensor program.

The clients' models are stacked on a client axis, so that one forward and one backward pass serve
all of them.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedsim.core.arrays import Ints
from fedsim.core.flat import as_columns
from fedsim.core.types import Correction, Params, Stack
from fedsim.engine.backend import TrainingResult, Workload, fetched
from fedsim.engine.chain import LayerChain
from fedsim.engine.device import Compile, Precision, worth_compiling
from fedsim.engine.linear_passes import Layer, forward_and_backward, layers_of, write_gradients
from fedsim.engine.optimizers import SGD, LocalOptimizer
from fedsim.engine.schedule import Schedule
from fedsim.engine.stacked import StackedBatch, StepProgram, run_steps
from fedsim.engine.torch_backend import ChunkedBackend
from fedsim.engine.training_copies import (
    for_batched,
    reject_hidden_randomness,
    reject_hidden_state,
)
from fedsim.engine.vmapped import StackedGradients


class BatchedBackend(ChunkedBackend):
    """Trains all clients of a call together, by vmap or by passes that fedsim computes itself.

    Batches with fewer samples are padded and masked. Clients are ordered by falling number of
    steps, so that those who still train are always the first rows of the stack. fedsim computes the
    passes of chains of linear layers itself and does not compile them.
    """

    fewest_clients = 2

    def __init__(
        self,
        workload: Workload,
        *,
        precision: Precision,
        chunk_size: int | Literal["auto"],
        compile: Compile,
        deterministic: bool | None = None,
    ) -> None:
        super().__init__(workload, precision, deterministic, chunk_size)
        model, x = workload.model, workload.data.x
        self.stacked_gradients = StackedGradients(for_batched(model), x.device, precision)
        self.chain = workload.linear_chain(precision)
        if self.chain is None:
            if len(x):
                reject_hidden_randomness(model, x)
                self.stacked_gradients.try_out(x, workload.data.y)
                reject_hidden_state(model, x)
            if worth_compiling(compile, workload.total_steps):
                self.stacked_gradients.compile()

    @property
    def description(self) -> str:
        compiled = self.stacked_gradients.compiled
        for function in compiled:
            if function.failure is not None:
                return f"batched, not compiled: {function.failure}"
        return "batched, compiled" if compiled else "batched"

    @property
    def max_joint_clients(self) -> int:
        if self.stacked_gradients.compiled:
            return 1  # The compiler may order additions differently for another shape.
        return super().max_joint_clients

    def _train_chunk(self, start: Sequence[Params], schedule: Schedule) -> TrainingResult:
        # 1. Order the clients by falling number of steps.
        order = np.argsort(-schedule.steps, kind="stable")
        place_in_order = np.argsort(order, kind="stable")
        is_reordered = bool((order[:-1] > order[1:]).any())
        if is_reordered:
            schedule = schedule.rows(order)
            start = [start[row] for row in order]
        # 2. Train the stack.
        program = self._program(_stacked(start), schedule)
        losses = run_steps(program, self.data, schedule)
        delta, momentum = program.subtract_start(), program.momentum()
        # 3. Return the results in the order of the call.
        if is_reordered:
            delta = _rows(delta, place_in_order)
            momentum = None if momentum is None else _rows(momentum, place_in_order)
        delta = as_columns(delta)
        loss_values, finite = fetched(losses, delta)
        return TrainingResult(delta, loss_values[place_in_order], momentum, finite)

    def _program(self, start: Stack, schedule: Schedule) -> StepProgram:
        """Return the program that trains the models `start`."""
        optimizer = self.optimizer
        if self.chain is None:
            return VmappedSteps(self.stacked_gradients, optimizer, start, schedule)
        is_clipped = optimizer.max_grad_norm is not None
        if type(optimizer) is SGD and not optimizer.momentum and not is_clipped:
            return PlainSGDLinearSteps(self.chain, optimizer, start, schedule)
        return LinearSteps(self.chain, optimizer, start, schedule)


class VmappedSteps(StepProgram):
    """Local steps of any model with any optimiser, by `StackedGradients`."""

    def __init__(
        self,
        gradients: StackedGradients,
        optimizer: LocalOptimizer,
        start: Stack,
        schedule: Schedule,
    ) -> None:
        contiguous = torch.contiguous_format
        stack = {name: value.clone(memory_format=contiguous) for name, value in start.items()}
        super().__init__(optimizer, start, stack, gradients.trained, schedule)
        self.gradients = gradients

    def step(self, batch: StackedBatch) -> Tensor:
        rows = len(batch.x)
        models = {name: value[:rows] for name, value in self.stack.items()}
        grads, losses = self.gradients(models, batch)
        self.apply_gradients(grads, rows)
        return losses


class LinearSteps(StepProgram):
    """Local steps of a chain of linear layers with any optimiser.

    Weights lie in memory as [R, in, out], so that no product needs a transposed matrix.
    """

    def __init__(
        self, chain: LayerChain, optimizer: LocalOptimizer, start: Stack, schedule: Schedule
    ) -> None:
        stack = _transposed_copies(start)
        super().__init__(optimizer, start, stack, list(stack), schedule)
        self.chain = chain
        self.layers = layers_of(chain, stack)
        self.grads = {name: torch.empty_like(value) for name, value in stack.items()}
        pull, shift = self.correction.pull, self.correction.shift
        if shift is not None:
            self.correction = Correction(pull, _transposed_copies(shift))

    @torch.no_grad()
    def step(self, batch: StackedBatch) -> Tensor:
        rows = len(batch.x)
        layers = _first_rows(self.layers, rows)
        losses, inputs, slopes = forward_and_backward(self.chain, layers, batch)
        grads = {name: value[:rows] for name, value in self.grads.items()}
        write_gradients(layers_of(self.chain, grads), inputs, slopes)
        self.apply_gradients(grads, rows)
        return losses


class PlainSGDLinearSteps(StepProgram):
    """Local steps of a chain of linear layers by SGD without momentum and clipping.

    A step is w <- keep w - lr gradient - lr shift with keep = 1 - lr (weight_decay + pull). A
    gradient of weights is a product of matrices. It is added to the weights as it is computed, and
    never stored. Weights lie in memory as [R, in, out].
    """

    def __init__(self, chain: LayerChain, optimizer: SGD, start: Stack, schedule: Schedule) -> None:
        stack = _transposed_copies(start)
        super().__init__(optimizer, start, stack, list(stack), schedule)
        self.chain = chain
        self.layers = layers_of(chain, stack)
        self.keep = 1 - self.lr * (optimizer.weight_decay + self.correction.pull)
        self.drift = _transposed_copies(self.correction.shift or {})
        for value in self.drift.values():
            value.mul_(-self.lr)  # so that it can be added to the weights

    @torch.no_grad()
    def step(self, batch: StackedBatch) -> Tensor:
        rows = len(batch.x)
        layers = _first_rows(self.layers, rows)
        losses, inputs, slopes = forward_and_backward(self.chain, layers, batch)
        for (weight, bias), x, slope in zip(layers, inputs, slopes, strict=True):
            weight.baddbmm_(x.mT, slope, beta=self.keep, alpha=-self.lr)
            if bias is not None:
                bias.mul_(self.keep).sub_(slope.sum(1, keepdim=True), alpha=self.lr)
        for name, value in self.drift.items():
            self.stack[name][:rows].add_(value[:rows])
        return losses


def _first_rows(layers: Sequence[Layer], rows: int) -> list[Layer]:
    """Return the weights and biases of the first clients, as views."""
    return [(weight[:rows], None if bias is None else bias[:rows]) for weight, bias in layers]


def _transposed_copies(stack: Stack) -> Stack:
    """Copy weights [R, out, in] and biases [R, out]; weights lie as [R, in, out] in memory."""
    contiguous = torch.contiguous_format
    copies = {}
    for name, value in stack.items():
        if value.dim() == 3:
            copies[name] = value.mT.clone(memory_format=contiguous).mT
        else:
            copies[name] = value.clone(memory_format=contiguous)
    return copies


def _stacked(models: Sequence[Params]) -> Stack:
    """Stack the models [K, ...]. Rows share memory if all models are one object."""
    distinct = {id(model): model for model in models}
    if len(distinct) == 1:
        return {name: value.expand(len(models), *value.shape) for name, value in models[0].items()}
    numbers = {key: number for number, key in enumerate(distinct)}
    rows = torch.as_tensor([numbers[id(model)] for model in models])
    stack = {}
    for name in models[0]:
        values = torch.stack([model[name] for model in distinct.values()])
        stack[name] = values[rows.to(values.device)]
    return stack


def _rows(stack: Stack, rows: Ints) -> Stack:
    """Return copies of some clients' rows."""
    copies = {}
    for name, value in stack.items():
        copies[name] = value[torch.as_tensor(rows, device=value.device)]
    return copies
