"""The static buffers that recorded steps read and write: the models of R clients, and the schedule
of one training.

A model is a row of one flat buffer. The schedule has one row a step, all in one buffer of int32, so
that a round needs one copy to the device and a step one gather.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedsim.core.arrays import Floats
from fedsim.core.flat import flat_rows, split_flat, to_device
from fedsim.core.types import Params, Stack
from fedsim.engine.model import trained_names, traveling
from fedsim.engine.schedule import Schedule, mean_weights

ALIGNMENT = 32
"""Every tensor starts at a multiple of so many elements: 128 bytes in float32, what vectorised
loads ask for."""


class State:
    """The models of R clients, all zero at first, of the kind of `like`: `params` [R, P] that are
    trained, `statistics` [R, Q], the other tensors that travel, `grads` [R, P], zero between the
    tensors, and `buffers` of the optimiser's, as `grads`; `shift` is as `grads`, too, None unless
    gradients are `corrected`."""

    def __init__(
        self, model: nn.Module, rows: int, like: Tensor, num_buffers: int, corrected: bool
    ) -> None:
        self._trained, self._tensors = trained_names(model), traveling(model)
        self._slots: list[tuple[str, torch.Size, int]] = []
        width = num_trained = 0
        for name, value in self._tensors.items():  # those that are trained come first
            self._slots.append((name, value.shape, width))
            width += value.numel() + -value.numel() % ALIGNMENT
            num_trained = width if name in self._trained else num_trained
        self._models = like.new_zeros(rows, width)
        self.params, self.statistics = self._models.split([num_trained, width - num_trained], dim=1)
        self.grads = like.new_zeros(rows, num_trained)
        self.buffers = [torch.zeros_like(self.grads) for _ in range(num_buffers)]
        self.shift = torch.zeros_like(self.grads) if corrected else None
        used = [torch.arange(first, first + shape.numel()) for _, shape, first in self._slots]
        self._used = torch.cat(used).to(like.device)

    def views(self, flat: Tensor, begin: int = 0) -> Stack:
        """The tensors in `flat` [R, W], each [R, ...], by name, if its columns are those of a model
        from `begin` on."""
        held = [slot for slot in self._slots if begin <= slot[2] < begin + flat.shape[1]]
        return {
            name: flat[:, first - begin : first - begin + shape.numel()].view(len(flat), *shape)
            for name, shape, first in held
        }

    @torch.no_grad()
    def load(self, start: Sequence[Params], shift: Stack | None) -> None:
        """Row k starts from `start[k]` (entries may be one object) with that row of `shift` (None:
        zero), and the optimiser before its first step."""
        models = {id(model): model for model in start}
        parts = [model[name].reshape(-1) for model in models.values() for name in self._tensors]
        self._start = torch.cat(parts).view(len(models), -1)
        if len(models) > 1:
            number = {key: row for row, key in enumerate(models)}
            owner = torch.zeros(len(self._models), dtype=torch.int64)
            owner[: len(start)] = torch.as_tensor([number[id(model)] for model in start])
            self._start = self._start.index_select(0, to_device(owner, self._start.device))
        self._models.index_copy_(1, self._used, self._start.expand(len(self._models), -1))
        for buffer in self.buffers:
            buffer.zero_()
        if self.shift is not None and shift is None:
            self.shift.zero_()
        elif self.shift is not None and shift is not None:
            flat = flat_rows({name: shift[name] for name in self._trained})
            self.shift[: len(flat)].index_copy_(1, self._used[: flat.shape[1]], flat)

    @torch.no_grad()
    def changes(self, count: int) -> Stack:
        """What the first `count` models have changed by since `load`, in new memory."""
        return split_flat(
            self._models[:count].index_select(1, self._used) - self._start[:count], self._tensors
        )

    def trained(self, rows: Tensor) -> Stack:
        """The parameters in `rows` [K, P], in new memory."""
        trained = {name: self._tensors[name] for name in self._trained}
        return split_flat(
            rows.index_select(1, self._used[: sum(value.numel() for value in trained.values())]),
            trained,
        )


_UNIT = 8
"""Every field starts at a multiple of so many int32, 32 bytes."""
Fields = dict[str, Tensor]
"""Views of n rows of the table, for R clients and batches of B samples.

`positions` [n, R, B] int32 are rows of the data, valid ones everywhere. `counts` [n, R] int32: how
many of them are samples of the step, 0 for a client that takes no step. `weights` [n, R, B]: 1 /
count for these and 0 for the others. `keys` [n, R] int64 are those of the dropout masks. `scalars`
[n, C]: the optimiser's numbers of the step, and `pull` [n, 1] the correction's.
"""


class Tables:
    """Room for S steps of R clients with batches of B samples and C numbers of the optimiser.

    `numbers` [R] int64: the next step of the program that begins at that row; what is recorded ends
    each step by `end_step`. `losses` [S, R, B] takes every sample's loss.
    """

    def __init__(self, steps: int, rows: int, batch: int, scalars: int, like: Tensor) -> None:
        self._fields: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "keys": (torch.int64, (rows,)),
            "scalars": (like.dtype, (scalars,)),
            "pull": (like.dtype, (1,)),
            "weights": (like.dtype, (rows, batch)),
            "positions": (torch.int32, (rows, batch)),
            "counts": (torch.int32, (rows,)),
        }
        sizes = [math.prod(shape) * dtype.itemsize // 4 for dtype, shape in self._fields.values()]
        self._split = [part for size in sizes for part in (size, -size % _UNIT)]
        self._table = torch.zeros((steps, sum(self._split)), dtype=torch.int32, device=like.device)
        self.numbers = torch.zeros(rows, dtype=torch.int64, device=like.device)
        self.losses = like.new_zeros(steps, rows, batch)
        self.steps, self.batch = steps, batch

    def _views(self, table: Tensor, rows: slice) -> Fields:
        """Those of clients `rows` in `table` [n, width]; share memory."""
        parts = table.split(self._split, dim=1)[::2]
        whole = {
            name: part.view(dtype).view(len(table), *shape)
            for part, (name, (dtype, shape)) in zip(parts, self._fields.items(), strict=True)
        }
        return {
            name: view if name in ("scalars", "pull") else view[:, rows]
            for name, view in whole.items()
        }

    def next_step(self, rows: slice) -> Fields:
        """The fields of the next step (n = 1) of clients `rows`, in new memory; recordable."""
        return self._views(self._table.index_select(0, self._number(rows)), rows)

    def end_step(self, rows: slice, losses: Tensor) -> None:
        """Keep the samples' losses [R, B] of this step, and go on to the next; recordable."""
        self.losses[:, rows].index_copy_(0, self._number(rows), losses.unsqueeze(0))
        self._number(rows).add_(1)

    def _number(self, rows: slice) -> Tensor:
        return self.numbers[rows.start : rows.start + 1]

    def clear(self) -> None:
        """No client takes a step, and the next step is the first: what is tried out then changes no
        model."""
        self._table.zero_()
        self.numbers.zero_()

    def fill(self, schedule: Schedule, scalars: Floats) -> None:
        """Put the schedule of K <= R clients with S' <= S steps and batches of B, and `scalars`
        [S', C], onto the device, without waiting: torch keeps the pinned memory until it is
        copied."""
        count, steps = schedule.counts.shape
        width, on_gpu = self._table.shape[1], self._table.is_cuda
        table = torch.zeros((steps, width), dtype=torch.int32, pin_memory=on_gpu)
        host = {name: view.numpy() for name, view in self._views(table, slice(count)).items()}
        host["positions"][:] = schedule.positions.transpose(1, 0, 2)
        host["counts"][:] = schedule.counts.T
        host["weights"][:] = mean_weights(schedule.counts.T, self.batch)
        host["scalars"][:] = scalars
        host["pull"][:] = schedule.correction.pull
        if schedule.keys is not None:
            host["keys"][:] = schedule.keys.T
        self._table[:steps].copy_(table, non_blocking=True)
        self.numbers.zero_()
