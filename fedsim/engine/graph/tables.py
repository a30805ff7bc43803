"""The schedule of one call of `train` on the device, in static buffers that recorded steps read.

One row a step, all in one buffer of int32, so that a round needs one copy to the device and a step one gather.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.engine.schedule import Schedule, mean_weights

_UNIT = 8
"""Everything starts at a multiple of so many int32, 32 bytes."""


@dataclass(frozen=True)
class Fields:
    """Views of n rows of the table, for R clients and batches of B samples.

    `positions` [n, R, B] int32 are rows of the data, valid ones everywhere. `counts` [n, R] int32: how many of them
    are samples of the step, 0 for a client that takes no step. `weights` [n, R, B]: 1 / count for these and 0 for the
    others. `keys` [n, R] int64 are those of the dropout masks. `scalars` [n, C]: the optimiser's numbers of the step.
    """

    positions: Tensor
    counts: Tensor
    weights: Tensor
    keys: Tensor
    scalars: Tensor


class _Format:
    """Where the fields lie in a row of `width` int32."""

    def __init__(self, rows: int, batch: int, scalars: int, like: Tensor) -> None:
        each = like.element_size() // 4
        sizes = {
            "keys": (2 * rows, torch.int64, (rows,)),
            "scalars": (each * scalars, like.dtype, (scalars,)),
            "weights": (each * rows * batch, like.dtype, (rows, batch)),
            "positions": (rows * batch, torch.int32, (rows, batch)),
            "counts": (rows, torch.int32, (rows,)),
        }
        self._places: dict[str, tuple[int, int, torch.dtype, tuple[int, ...]]] = {}
        self.width = 0
        for name, (size, dtype, shape) in sizes.items():
            self._places[name] = (self.width, size, dtype, shape)
            self.width += size + -size % _UNIT

    def fields(self, table: Tensor, rows: slice) -> Fields:
        """Those of clients `rows` in `table` [n, width]; share memory."""
        found = {}
        for name, (first, size, dtype, shape) in self._places.items():
            whole = table[:, first : first + size].view(dtype).view(len(table), *shape)
            found[name] = whole if name == "scalars" else whole[:, rows]
        return Fields(**found)


class StepTables:
    """What recorded steps of R clients read and write.

    `step` [1] int64 is the index of the next step; what is recorded ends each step by `advance`. `all` has the fields
    of all steps, which do not lie behind one another (see `all.positions.stride()`). `losses` [S, R, B] takes every
    sample's loss.
    """

    def __init__(self, table: Tensor, form: _Format, rows: slice, step: Tensor, losses: Tensor) -> None:
        self._table, self._form, self._columns = table, form, rows
        self.step, self.losses = step, losses
        self.steps, self.rows, self.batch = losses.shape
        self.all = form.fields(table, rows)

    @property
    def row(self) -> Fields:
        """The fields of the next step (n = 1), in new memory; recordable."""
        return self._form.fields(self._table.index_select(0, self.step), self._columns)

    def write_losses(self, losses: Tensor) -> None:
        """Keep the samples' losses [R, B] of this step; recordable."""
        self.losses.index_copy_(0, self.step, losses.unsqueeze(0))

    def advance(self) -> None:
        """To the next step; recordable."""
        self.step.add_(1)


class Tables(StepTables):
    """Room for S steps of R clients with batches of B samples and C numbers of the optimiser.

    The host writes into one of two pinned buffers by turns, and waits for none: the next tables can be filled while the
    card still trains by these.
    """

    def __init__(self, steps: int, rows: int, batch: int, scalars: int, like: Tensor) -> None:
        self._form = _Format(rows, batch, scalars, like)
        self._header = 2 * (1 + 2 * rows) + -2 * (1 + 2 * rows) % _UNIT
        length = self._header + steps * self._form.width
        self._device = torch.zeros(length, dtype=torch.int32, device=like.device)
        self._on_card = like.device.type == "cuda"
        self._staging = [torch.zeros(length, dtype=torch.int32, pin_memory=self._on_card) for _ in range(2)]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        self.rows = rows
        self._steps, self.owner, table = self._parts(self._device)
        super().__init__(table, self._form, slice(rows), self._steps[:1], like.new_zeros(steps, rows, batch))

    def part(self, row: int) -> StepTables:
        """Those of one client, with a step number of its own; shares memory."""
        rows, step = slice(row, row + 1), self._steps[row + 1 : row + 2]
        return StepTables(self._table, self._form, rows, step, self.losses[:, rows])

    def clear(self) -> None:
        """No client takes a step, and the next step is the first: what is tried out then changes no model."""
        self._device.zero_()

    def fill(self, schedule: Schedule, scalars: NDArray[np.float64], owner: Sequence[int]) -> None:
        """Put the schedule of K <= R clients with S' <= S steps and batches of B onto the device, without waiting.

        `scalars` [S', C]; `owner` [K]: the number of the model that each client starts from.
        """
        count, steps = schedule.counts.shape
        self._turn = 1 - self._turn
        if (copied := self._copied[self._turn]) is not None:
            copied.synchronize()  # of the call before the last: long done
        used = self._staging[self._turn][: self._header + steps * self._form.width]
        used.zero_()
        _, owners, table = self._parts(used)
        owners.numpy()[:count] = owner
        host = self._form.fields(table, slice(count))
        host.positions.numpy()[:] = schedule.positions.transpose(1, 0, 2)
        host.counts.numpy()[:] = schedule.counts.T
        host.weights.numpy()[:] = mean_weights(schedule.counts.T, schedule.positions.shape[2])
        host.scalars.numpy()[:] = scalars
        if schedule.keys is not None:
            host.keys.numpy()[:] = schedule.keys.T
        self._device[: len(used)].copy_(used, non_blocking=True)
        if self._on_card:
            event = self._copied[self._turn] = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device.device))

    def _parts(self, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The numbers of the next step, for all clients and for each [1 + R], `owner` [R], and the rows of a buffer."""
        first = 1 + self.rows
        numbers = buffer[: 2 * (first + self.rows)].view(torch.int64)
        return numbers[:first], numbers[first:], buffer[self._header :].view(-1, self._form.width)
