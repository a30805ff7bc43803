"""All clients as one tensor program: their models stacked on a client axis, one forward and
backward pass for all."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from fedsim.core.arrays import Ints
from fedsim.core.flat import as_columns
from fedsim.core.types import Params, Stack
from fedsim.engine.backend import TrainingResult, Workload, fetched
from fedsim.engine.device import Compile, Precision, worth_compiling
from fedsim.engine.model import refuse_hidden_randomness
from fedsim.engine.schedule import Schedule
from fedsim.engine.stacked import Differentiated, LinearChain, Program, StackedGradients, run_steps
from fedsim.engine.torch_backend import TorchBackend


class BatchedBackend(TorchBackend):
    """torch.func's vmap over clients. Clients with fewer samples are padded and masked; those with
    fewer steps are the last rows of the stack and leave it early. The passes of chains of linear
    layers are written out, and not compiled.
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
        self.gradients_of_stack = StackedGradients(model, x.device, precision)
        self.chain = workload.linear_chain(precision)
        if self.chain is None:  # whose passes are written out, and its layers known
            if len(x):
                refuse_hidden_randomness(model, x)
                self.gradients_of_stack.try_out(x, workload.data.y)
            if worth_compiling(compile, workload.total_steps):
                self.gradients_of_stack.compile()

    @property
    def description(self) -> str:
        failures = {c.failure for c in self.gradients_of_stack.compiled} - {None}
        compiled = "batched, compiled" if self.gradients_of_stack.compiled else "batched"
        return f"batched, not compiled: {failures.pop()}" if failures else compiled

    @property
    def max_joint_clients(self) -> int:
        if self.gradients_of_stack.compiled:  # which may add in another order for other shapes
            return 1
        return super().max_joint_clients

    def _train_chunk(self, start: Sequence[Params], schedule: Schedule) -> TrainingResult:
        """Rows of the stack are clients by falling number of steps."""
        order = np.argsort(-schedule.steps, kind="stable")
        ordered = schedule.rows(order) if (order[:-1] > order[1:]).any() else schedule
        stack = _stacked([start[row] for row in order])
        if self.chain is not None:
            program: Program = LinearChain(self.chain, self.optimizer, stack, ordered)
        else:
            program = Differentiated(self.gradients_of_stack, self.optimizer, stack, ordered)
        losses = run_steps(program, self.data, ordered)
        back = np.argsort(order, kind="stable")
        delta, momentum = as_columns(_in_order(program.delta(), back)), program.momentum()
        values, finite = fetched(losses, delta)
        return TrainingResult(
            delta, values[back], None if momentum is None else _in_order(momentum, back), finite
        )


def _stacked(models: Sequence[Params]) -> Stack:
    """The models [K, ...], which may share memory where they are one object."""
    distinct = list({id(model): model for model in models}.values())
    if len(distinct) == 1:
        return {
            name: value.expand(len(models), *value.shape) for name, value in distinct[0].items()
        }
    number = {id(model): row for row, model in enumerate(distinct)}
    rows = torch.as_tensor([number[id(model)] for model in models])
    stacked = {name: torch.stack([model[name] for model in distinct]) for name in distinct[0]}
    return {name: value[rows.to(value.device)] for name, value in stacked.items()}


def _in_order(stack: Stack, rows: Ints) -> Stack:
    """`stack` with its rows in the order `rows`, without a copy where they are so already."""
    if (rows[:-1] < rows[1:]).all():
        return stack
    return {
        name: value[torch.as_tensor(rows, device=value.device)] for name, value in stack.items()
    }
