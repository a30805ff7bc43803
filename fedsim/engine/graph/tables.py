"""The schedule of one call of `train` on the device, in static buffers that recorded steps read.

One row a step, all in one buffer of int32, so that a round needs one copy to the device and a step one gather.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.engine.schedule import Schedule

_HEADER_STEP = 8
"""The header's first 32 bytes are for the number of the next step."""


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


class Tables:
    """Room for S steps of R clients with batches of B samples and C numbers of the optimiser.

    `step` [1] int64 is the index of the next step; what is recorded ends each step by `advance`. `all` has the fields
    of all steps; they do not lie behind one another (`all.positions.stride(0)` elements from a step to the next).
    `losses` [S, R, B] takes every sample's loss. The host writes into one of two pinned buffers by turns, and waits
    for none: the next tables can be filled while the card still trains by these.
    """

    def __init__(self, steps: int, rows: int, batch: int, scalars: int, like: Tensor) -> None:
        self.steps, self.rows, self.batch, self.dtype, self.device = steps, rows, batch, like.dtype, like.device
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
            self.width += size + -size % 8
        self._header = _HEADER_STEP + 2 * rows + -2 * rows % 8
        length = self._header + steps * self.width
        self._device = torch.zeros(length, dtype=torch.int32, device=like.device)
        pinned = like.device.type == "cuda"
        self._staging = [torch.zeros(length, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        self.step, self.owner, self._table = self._parts(self._device)
        self.all = self._fields(self._table)
        self.losses = like.new_zeros(steps, rows, batch)

    @property
    def row(self) -> Fields:
        """The fields of the next step, in new memory; recordable."""
        return self._fields(self._table.index_select(0, self.step))

    def write_losses(self, losses: Tensor) -> None:
        """Keep the samples' losses [R, B] of this step; recordable."""
        self.losses.index_copy_(0, self.step, losses.unsqueeze(0))

    def advance(self) -> None:
        """To the next step; recordable."""
        self.step.add_(1)

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
        used = self._staging[self._turn][: self._header + steps * self.width]
        used.zero_()
        _, owners, table = self._parts(used)
        owners.numpy()[:count] = owner
        host = self._fields(table)
        host.positions.numpy()[:, :count] = schedule.positions.transpose(1, 0, 2)
        host.counts.numpy()[:, :count] = schedule.counts.T
        host.weights.numpy()[:, :count] = _weights(schedule)
        host.scalars.numpy()[:] = scalars
        if schedule.keys is not None:
            host.keys.numpy()[:, :count] = schedule.keys.T
        self._device[: len(used)].copy_(used, non_blocking=True)
        if self.device.type == "cuda":
            event = self._copied[self._turn] = torch.cuda.Event()
            event.record()

    def _parts(self, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`step` [1], `owner` [R] and the rows of a buffer."""
        step = buffer[:2].view(torch.int64)
        owner = buffer[_HEADER_STEP : _HEADER_STEP + 2 * self.rows].view(torch.int64)
        return step, owner, buffer[self._header :].view(-1, self.width)

    def _fields(self, table: Tensor) -> Fields:
        found = {}
        for name, (first, size, dtype, shape) in self._places.items():
            found[name] = table[:, first : first + size].view(dtype).view(len(table), *shape)
        return Fields(**found)


def _weights(schedule: Schedule) -> NDArray[np.float64]:
    """1 / count for valid samples and 0 for the others [S', K, B]."""
    counts = schedule.counts.T[:, :, None]
    weights: NDArray[np.float64] = (np.arange(schedule.positions.shape[2]) < counts) / np.maximum(counts, 1)
    return weights
