"""Local steps of many clients at once, whose models are stacked on a client axis.

`StepProgram` computes one local step of a stack, and `run_steps` all steps of a schedule. The graph
engine has step programs of its own, which can be recorded (fedsim/engine/graph).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedsim.core.flat import real_dtype, to_device
from fedsim.core.types import Stack
from fedsim.engine.data import ClientData
from fedsim.engine.optimizers import LocalOptimizer, clip
from fedsim.engine.schedule import Schedule, mean_weights


@dataclass(frozen=True)
class StackedBatch:
    """The samples of one step of R clients: `x` [R, B, ...] and labels `y` [R, B].

    - `weights` [R, B] is 1 / count for valid samples and 0 for padding; None if nothing is padded.
    - `keys` [R] determine the dropout masks; None if the model has no dropout.
    - `repeats_last`: only the first row still trains, and the second row repeats its samples.
    """

    x: Tensor
    y: Tensor
    weights: Tensor | None
    keys: Tensor | None
    repeats_last: bool = False


def stacked_batches(data: ClientData, schedule: Schedule) -> Iterator[StackedBatch]:
    """Yield the batch of each step. Clients are ordered by falling number of steps.

    Clients that have finished are left out. torch multiplies a single pair of matrices in another
    order of additions than several pairs. So if one client of several is left, its batch comes
    twice.
    """
    device = data.x.device
    positions, keys, crops = schedule.tensors(device)
    labels = data.y[positions]
    for step, width in enumerate(schedule.widths):
        counts = schedule.counts[:, step]
        rows = int(np.count_nonzero(counts))
        counts = counts[:rows]
        batch_positions = positions[:rows, step, :width]
        y = labels[:rows, step, :width]
        batch_keys = None if keys is None else keys[:rows, step]
        batch_crops = None if crops is None else crops[:rows, step, :width]
        repeats_last = rows == 1 and len(schedule) > 1
        if repeats_last:
            counts = counts.repeat(2)
            batch_positions = batch_positions.expand(2, -1)
            y = y.expand(2, -1)
            batch_keys = None if batch_keys is None else batch_keys.expand(2)
            batch_crops = None if batch_crops is None else batch_crops.expand(2, -1)
        weights: Tensor | None = None
        if counts.min() < width:
            means = torch.as_tensor(mean_weights(counts, width), dtype=real_dtype(data.x))
            weights = to_device(means, device)
        x = data.batch(batch_positions, batch_crops)
        yield StackedBatch(x, y, weights, batch_keys, repeats_last)


class StepProgram(ABC):
    """The computation of one local step for the models of R clients.

    The models start from `start` [R, ...], which does not change, and train in `stack`, a copy of
    it. Learning rate and correction are those of the `schedule`.
    """

    def __init__(
        self,
        optimizer: LocalOptimizer,
        start: Stack,
        stack: Stack,
        trained: Sequence[str],
        schedule: Schedule,
    ) -> None:
        self.optimizer = optimizer
        self.start = start
        self.stack = stack
        self.trained = trained
        self.lr = schedule.lr
        self.correction = schedule.correction
        self.state = optimizer.init({name: stack[name] for name in trained})

    @abstractmethod
    def step(self, batch: StackedBatch) -> Tensor:
        """Make one step of the leading rows, as many as the batch has.

        Returns the samples' losses before the step [rows, B].
        """

    def apply_gradients(self, grads: Stack, rows: int) -> None:
        """Correct and clip the gradients of the first `rows` models, and make a step."""
        params = {name: self.stack[name][:rows] for name in self.trained}
        self.correction.add_to(grads, params)
        clip(grads, self.optimizer.max_grad_norm)
        self.optimizer.step(params, grads, self.state, self.lr)

    def row(self, row: int) -> list[Tensor]:
        """Return the parameters and momentum buffers of one client, as views."""
        return [value[row] for value in (*self.stack.values(), *self._momentum_buffers().values())]

    def delta(self) -> Stack:
        """Return each model's difference to its start, in the memory of the models."""
        for name, value in self.stack.items():
            value.sub_(self.start[name])
        return {name: value.contiguous() for name, value in self.stack.items()}

    def momentum(self) -> Stack | None:
        """Return the momentum buffers of all clients, or None if the optimiser has none."""
        buffers = self._momentum_buffers()
        return {name: value.contiguous() for name, value in buffers.items()} or None

    def _momentum_buffers(self) -> Stack:
        return self.optimizer.momentum_buffers(self.state) or {}


def run_steps(program: StepProgram, data: ClientData, schedule: Schedule) -> Tensor:
    """Make all steps of clients that are ordered by falling number of steps.

    Returns their samples' losses [R, S, B].
    """
    losses = data.x.new_zeros(schedule.positions.shape, dtype=real_dtype(data.x))
    saved: list[Tensor] | None = None
    for step, batch in enumerate(stacked_batches(data, schedule)):
        if batch.repeats_last and saved is None:
            # The second row is a copy's from here on. Save the result of the client in it.
            saved = [value.clone() for value in program.row(1)]
        step_losses = program.step(batch)
        rows, width = step_losses.shape
        losses[:rows, step, :width] = step_losses
    if saved is not None:
        for value, result in zip(program.row(1), saved, strict=True):
            value.copy_(result)
    return losses
