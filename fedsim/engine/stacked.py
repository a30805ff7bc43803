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
    """

    x: Tensor
    y: Tensor
    weights: Tensor | None
    keys: Tensor | None


def stacked_batches(data: ClientData, schedule: Schedule) -> Iterator[StackedBatch]:
    """Yield the batch of each of the S steps of a `schedule` of R clients.

    The schedule must have its clients ordered by falling number of steps. Then those that still
    train are the first rows, and a batch has a row for each of them. If a single one of several
    clients is left, it has two equal rows (`run_steps`).
    """
    device = data.x.device
    all_positions, all_keys, all_crops = schedule.tensors(device)
    all_labels = data.y[all_positions]
    for step, width in enumerate(schedule.widths):
        num_training = int(np.count_nonzero(schedule.counts[:, step]))
        counts = schedule.counts[:num_training, step]
        positions = all_positions[:num_training, step, :width]
        y = all_labels[:num_training, step, :width]
        # Not all models have dropout, and not all samples are cropped.
        keys = None if all_keys is None else all_keys[:num_training, step]
        crops = None if all_crops is None else all_crops[:num_training, step, :width]
        if num_training == 1 and len(schedule) > 1:
            counts = counts.repeat(2)
            positions = positions.expand(2, -1)
            y = y.expand(2, -1)
            keys = None if keys is None else keys.expand(2)
            crops = None if crops is None else crops.expand(2, -1)
        weights: Tensor | None = None  # no row is padded
        if counts.min() < width:
            means = torch.as_tensor(mean_weights(counts, width), dtype=real_dtype(data.x))
            weights = to_device(means, device)
        x = data.batch(positions, crops)
        yield StackedBatch(x, y, weights, keys)


class StepProgram(ABC):
    """The computation of one local step for the models of R clients.

    The models start from `start` [R, ...], which does not change, and train in `stack`, a copy of
    it. The optimiser changes the tensors whose names are in `trained`. Learning rate and correction
    are those of the `schedule`.
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
        """Make one step of the first R' models, with R' the number of rows of the batch.

        Returns the samples' losses before the step [R', B].
        """

    def apply_gradients(self, grads: Stack, num_rows: int) -> None:
        """Correct and clip the gradients of the first `num_rows` models, and make a step."""
        params = {name: self.stack[name][:num_rows] for name in self.trained}
        self.correction.add_to(grads, params)
        clip(grads, self.optimizer.max_grad_norm)
        # The optimiser cuts its state to the rows of `params`.
        self.optimizer.step(params, grads, self.state, self.lr)

    def state_of(self, row: int) -> list[Tensor]:
        """Return the model and the momentum buffers of one client, as views."""
        return [value[row] for value in (*self.stack.values(), *self._momentum_buffers().values())]

    def subtract_start(self) -> Stack:
        """Turn the models into their differences to the start, and return them.

        The differences take the models' memory, so this is possible only once, after the last step.
        """
        delta = {}
        for name, value in self.stack.items():
            delta[name] = value.sub_(self.start[name]).contiguous()
        return delta

    def momentum(self) -> Stack | None:
        """Return the momentum buffers of all clients, or None if the optimiser has none."""
        buffers = self._momentum_buffers()
        return {name: value.contiguous() for name, value in buffers.items()} or None

    def _momentum_buffers(self) -> Stack:
        return self.optimizer.momentum_buffers(self.state) or {}


def run_steps(program: StepProgram, data: ClientData, schedule: Schedule) -> Tensor:
    """Make all S steps of a `schedule` of R clients, ordered by falling number of steps.

    Returns the losses [R, S, B] of its samples. Those of positions that are not valid in the
    schedule (`Schedule.mask`) have no meaning.

    torch multiplies a single pair of matrices in another order of additions than several pairs. A
    client's result must not depend on when the others finish. So when the second client has
    finished, and only the first still trains, the second row of each batch repeats its samples. The
    second client's model then makes steps that do not count. Its result is saved before, and put
    back at the end.
    """
    losses = data.x.new_zeros(schedule.positions.shape, dtype=real_dtype(data.x))
    steps_of_second = np.count_nonzero(schedule.counts[1]) if len(schedule) > 1 else None
    second_result: list[Tensor] = []
    for step, batch in enumerate(stacked_batches(data, schedule)):
        if step == steps_of_second:
            second_result = [value.clone() for value in program.state_of(1)]
        step_losses = program.step(batch)
        num_rows, width = step_losses.shape
        losses[:num_rows, step, :width] = step_losses
    if second_result:
        for value, result in zip(program.state_of(1), second_result, strict=True):
            value.copy_(result)
    return losses
