"""The static buffers that recorded steps read and write: the models of R clients, and the schedule of one training.

A model is a row of one flat buffer. The schedule has one row a step, all in one buffer of int32, so that a round needs
one copy to the device and a step one gather.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.core.types import Params, Stack
from fedsim.engine.model import trained_names, traveling
from fedsim.engine.schedule import Schedule, mean_weights

ALIGNMENT = 32
"""Every tensor starts at a multiple of so many elements: 128 bytes in float32, what vectorised loads ask for."""


@dataclass(frozen=True)
class Slot:
    """A tensor's place: `size` elements from `first` on. `channels_last`: its second axis varies fastest."""

    name: str
    shape: tuple[int, ...]
    first: int
    channels_last: bool

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def padding(self) -> int:
        """Unused elements behind it."""
        return -self.size % ALIGNMENT

    def of(self, flat: Tensor) -> Tensor:
        """Its part of `flat` [R, P], as [R, *shape]; shares memory."""
        part = flat[:, self.first : self.first + self.size]
        if not self.channels_last:
            return part.view(len(flat), *self.shape)
        outputs, inputs, height, width = self.shape
        return part.view(len(flat), outputs, height, width, inputs).permute(0, 1, 4, 2, 3)

    @property
    def columns(self) -> Tensor:
        """Where its elements lie, in the order that they have in a contiguous tensor [size]."""
        return self.of(torch.arange(self.first + self.size).unsqueeze(0)).reshape(-1)

    def flattened(self, value: Tensor) -> Tensor:
        """The elements of `value` [*shape] in the order in which they lie here, [size]."""
        return (value.permute(0, 2, 3, 1) if self.channels_last else value).reshape(-1)


class Layout:
    """The order of tensors shaped as those of `model` in a row of `width` elements of the kind of `like`."""

    def __init__(self, model: Params, like: Tensor, *, channels_last: bool) -> None:
        self.slots: list[Slot] = []
        self.width = 0
        for name, value in model.items():
            self.slots.append(Slot(name, tuple(value.shape), self.width, channels_last and value.dim() == 4))
            self.width += self.slots[-1].size + self.slots[-1].padding
        self._zeros = like.new_zeros(ALIGNMENT)

    def views(self, flat: Tensor) -> Stack:
        """The tensors in `flat` [R, width], each [R, ...], by name; share memory."""
        return {slot.name: slot.of(flat) for slot in self.slots}

    def parts(self, model: Params) -> list[Tensor]:
        """What makes up a row that holds `model`, in order."""
        parts: list[Tensor] = []
        for slot in self.slots:
            parts.append(slot.flattened(model[slot.name]))
            if slot.padding:
                parts.append(self._zeros[: slot.padding])
        return parts

    def rows(self, models: Sequence[Params]) -> Tensor:
        """A new buffer [len(models), width] that holds the models, zeros in between."""
        if not self.slots:
            return self._zeros.new_empty(len(models), 0)
        return torch.cat([part for model in models for part in self.parts(model)]).view(len(models), self.width)


class State:
    """`flat` [R, P] holds the parameters that are trained, `statistics` [R, Q] the other tensors that travel (running
    statistics of BatchNorm); `views` and `statistics_views` are the same by name. `grads` [R, P] is for gradients,
    zero between the tensors.

    `channels_last`: four-dimensional parameters lie with their second axis last.
    """

    def __init__(
        self, layout: Layout, statistics_layout: Layout, flat: Tensor, grads: Tensor, statistics: Tensor
    ) -> None:
        self.layout, self.statistics_layout = layout, statistics_layout
        self.flat, self.grads, self.statistics = flat, grads, statistics
        self.views, self.grad_views = layout.views(flat), layout.views(grads)
        self.statistics_views = statistics_layout.views(statistics)

    @classmethod
    def of(cls, model: nn.Module, rows: int, like: Tensor, *, channels_last: bool = False) -> "State":
        """New buffers for so many models, all zero, of the kind of `like`."""
        tensors, trained = traveling(model), trained_names(model)
        rest = {name: value for name, value in tensors.items() if name not in set(trained)}
        layout = Layout({name: tensors[name] for name in trained}, like, channels_last=channels_last)
        statistics = Layout(rest, like, channels_last=False)
        widths = (layout.width, layout.width, statistics.width)
        return cls(layout, statistics, *(like.new_zeros(rows, width) for width in widths))

    @cached_property
    def _columns(self) -> Tensor:
        """Where the elements of all tensors lie in a row of `flat` and one of `statistics` behind it."""
        statistics = [slot.columns + self.layout.width for slot in self.statistics_layout.slots]
        return torch.cat([slot.columns for slot in self.layout.slots] + statistics).to(self.flat.device)

    @cached_property
    def _trained(self) -> int:
        return sum(slot.size for slot in self.layout.slots)

    def part(self, rows: slice) -> "State":
        """Those rows; shares memory."""
        return State(self.layout, self.statistics_layout, self.flat[rows], self.grads[rows], self.statistics[rows])

    def __len__(self) -> int:
        return len(self.flat)

    @torch.no_grad()
    def load(self, models: Sequence[Params], owner: Tensor) -> None:
        """Start row r from `models[owner[r]]`; `owner` [R] is on the device."""
        rows, statistics = self.layout.rows(models), self.statistics_layout.rows(models)
        if len(models) > 1:
            rows, statistics = rows.index_select(0, owner), statistics.index_select(0, owner)
        self.flat.copy_(rows)
        self.statistics.copy_(statistics)
        self._start, self._statistics_start = rows, statistics

    @torch.no_grad()
    def changes(self, count: int) -> Tensor:
        """What the first `count` models have changed by since `load`, as rows that `named` takes, in new memory."""
        changed = self.flat[:count] - self._start[:count]
        if self.statistics_layout.slots:
            moved = self.statistics[:count] - self._statistics_start[:count]
            changed = torch.cat([changed, moved], dim=1)
        return changed.index_select(1, self._columns)

    @torch.no_grad()
    def packed(self, flat: Tensor) -> Tensor:
        """Rows that lie as those of `flat`, as `named` takes them, in new memory."""
        return flat.index_select(1, self._columns[: self._trained])

    def named(self, rows: Tensor) -> Stack:
        """Tensors by name, parameters first, from rows in which they lie one behind the other; share memory."""
        slots = self.layout.slots
        if rows.shape[1] > self._trained:
            slots = [*slots, *self.statistics_layout.slots]
        parts = rows.split([slot.size for slot in slots], dim=1)
        return {slot.name: part.view(len(rows), *slot.shape) for slot, part in zip(slots, parts, strict=True)}


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
