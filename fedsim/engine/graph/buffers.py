"""The static buffers that recorded steps read and write.

`ModelBuffers` holds the models of R clients, each as a row of one flat tensor. `ScheduleTable`
holds the schedule of one training, with a row for each step. The table is one tensor of int32, so
that a round needs one copy to the device, and a step one gather.
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
"""Every tensor of a model starts at a multiple of so many numbers: 128 bytes in float32, as
vectorised loads require."""


class ModelBuffers:
    """The models of R clients, their gradients, and the optimiser's state. All are zero at first.

    - `params` [R, P] are trained, and `statistics` [R, Q] are the other tensors that travel.
    - `grads` [R, P] and the optimiser's `state` (`num_buffers` tensors [R, P]) are zero in the gaps
      between tensors.
    - `shift` [R, P] is the correction of the gradients; None unless training is `corrected`.

    Type and device are those of `like`.
    """

    def __init__(
        self, model: nn.Module, rows: int, like: Tensor, num_buffers: int, corrected: bool
    ) -> None:
        self._tensors = traveling(model)  # Trained tensors come first.
        self._num_trained = len(trained_names(model))
        self._starts: dict[str, int] = {}
        used = []
        width = num_params = 0
        for number, (name, value) in enumerate(self._tensors.items(), 1):
            self._starts[name] = width
            used.append(torch.arange(width, width + value.numel()))
            width += -(-value.numel() // ALIGNMENT) * ALIGNMENT
            if number == self._num_trained:
                num_params = width
        self._used = torch.cat(used).to(like.device)
        """The columns of a row that hold the model, without the gaps."""
        self._models = like.new_zeros(rows, width)
        self.params, self.statistics = self._models.split([num_params, width - num_params], dim=1)
        self.grads = like.new_zeros(rows, num_params)
        self.state = [torch.zeros_like(self.grads) for _ in range(num_buffers)]
        self.shift = torch.zeros_like(self.grads) if corrected else None

    def views(self, flat: Tensor, first_column: int = 0) -> Stack:
        """Return the tensors in `flat` [R, W], whose columns are a model's from `first_column` on."""
        views = {}
        for name, start in self._starts.items():
            shape = self._tensors[name].shape
            begin = start - first_column
            if 0 <= begin < flat.shape[1]:
                views[name] = flat[:, begin : begin + shape.numel()].view(len(flat), *shape)
        return views

    @torch.no_grad()
    def load(self, start: Sequence[Params], shift: Stack | None) -> None:
        """Load the models `start`, of which several may be one object, and reset the optimiser.

        `shift` None means zero.
        """
        models = {id(model): model for model in start}
        tensors = [m[name].reshape(-1) for m in models.values() for name in self._tensors]
        self._start = torch.cat(tensors).view(len(models), -1)
        rows = len(self._models)
        if len(models) > 1:
            numbers = {key: number for number, key in enumerate(models)}
            model_numbers = torch.zeros(rows, dtype=torch.int64)
            model_numbers[: len(start)] = torch.as_tensor([numbers[id(m)] for m in start])
            self._start = self._start[to_device(model_numbers, self._start.device)]
        self._models.index_copy_(1, self._used, self._start.expand(rows, -1))
        for buffer in self.state:
            buffer.zero_()
        if self.shift is not None:
            self.shift.zero_()
            if shift is not None:
                flat = flat_rows({name: shift[name] for name in self._trained()})
                self.shift[: len(flat)].index_copy_(1, self._used[: flat.shape[1]], flat)

    @torch.no_grad()
    def changes(self, count: int) -> Stack:
        """Return how the first `count` models have changed since `load`, in new memory."""
        models = self._models[:count].index_select(1, self._used)
        return split_flat(models - self._start[:count], self._tensors)

    def momentum(self, count: int) -> Stack:
        """Return the first `count` momentum buffers, in new memory."""
        trained = self._trained()
        num_used = sum(value.numel() for value in trained.values())
        return split_flat(self.state[0][:count].index_select(1, self._used[:num_used]), trained)

    def _trained(self) -> Params:
        return dict(list(self._tensors.items())[: self._num_trained])


FIELD_ALIGNMENT = 8
"""Every field of the table starts at a multiple of so many int32, 32 bytes."""
Fields = dict[str, Tensor]
"""Views of n rows of the table, for R clients and batches of B samples:

- `positions` [n, R, B] int32: rows of the data. Positions that stand for padding are valid, too.
- `counts` [n, R] int32: how many positions are samples of the step, 0 for a client without a step.
- `weights` [n, R, B]: 1 / count for these samples, and 0 for the others.
- `keys` [n, R] int64: keys of the dropout masks.
- `scalars` [n, C]: the optimiser's numbers of the step, and `pull` [n, 1] the correction's.
"""


class ScheduleTable:
    """The schedule of S steps of R clients with batches of B samples and C numbers of the
    optimiser.

    `step_numbers` [R] int64 hold the next step of the program whose first client is that row.
    `losses` [S, R, B] receive every sample's loss.
    """

    def __init__(self, steps: int, rows: int, batch: int, num_scalars: int, like: Tensor) -> None:
        self._fields: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "keys": (torch.int64, (rows,)),
            "scalars": (like.dtype, (num_scalars,)),
            "pull": (like.dtype, (1,)),
            "weights": (like.dtype, (rows, batch)),
            "positions": (torch.int32, (rows, batch)),
            "counts": (torch.int32, (rows,)),
        }
        self._split: list[int] = []  # widths of a field, its padding, the next field, ...
        for dtype, shape in self._fields.values():
            width = math.prod(shape) * dtype.itemsize // 4
            self._split += [width, -width % FIELD_ALIGNMENT]
        self._table = torch.zeros((steps, sum(self._split)), dtype=torch.int32, device=like.device)
        self.step_numbers = torch.zeros(rows, dtype=torch.int64, device=like.device)
        self.losses = like.new_zeros(steps, rows, batch)
        self.num_steps = steps
        self.batch = batch

    def _views(self, table: Tensor, rows: slice) -> Fields:
        """Return the fields of clients `rows` in `table` [n, width], which share its memory."""
        views = {}
        columns = table.split(self._split, dim=1)[::2]
        for (name, (dtype, shape)), part in zip(self._fields.items(), columns, strict=True):
            view = part.view(dtype).view(len(table), *shape)
            views[name] = view if name in ("scalars", "pull") else view[:, rows]
        return views

    def next_step(self, rows: slice) -> Fields:
        """Return the fields of the next step (n = 1) of clients `rows`, in new memory.

        It can be recorded.
        """
        return self._views(self._table.index_select(0, self._step_number(rows)), rows)

    def end_step(self, rows: slice, losses: Tensor) -> None:
        """Store the samples' losses [R, B] of this step, and advance to the next.

        It can be recorded.
        """
        step = self._step_number(rows)
        self.losses[:, rows].index_copy_(0, step, losses.unsqueeze(0))
        step.add_(1)

    def _step_number(self, rows: slice) -> Tensor:
        return self.step_numbers[rows.start : rows.start + 1]

    def clear(self) -> None:
        """Set all counts to 0, and the next step to the first. A trial step then changes no
        model."""
        self._table.zero_()
        self.step_numbers.zero_()

    def fill(self, schedule: Schedule, scalars: Floats) -> None:
        """Copy a schedule of at most R clients, S steps and batches of B, and `scalars` [S, C].

        The host does not wait for the copy; torch keeps the pinned memory until it is done.
        """
        count, steps = schedule.counts.shape
        width, on_gpu = self._table.shape[1], self._table.is_cuda
        host_table = torch.zeros((steps, width), dtype=torch.int32, pin_memory=on_gpu)
        fields = self._views(host_table, slice(count))
        fields["positions"].numpy()[:] = schedule.positions.transpose(1, 0, 2)
        fields["counts"].numpy()[:] = schedule.counts.T
        fields["weights"].numpy()[:] = mean_weights(schedule.counts.T, self.batch)
        fields["scalars"].numpy()[:] = scalars
        fields["pull"].numpy()[:] = schedule.correction.pull
        if schedule.keys is not None:
            fields["keys"].numpy()[:] = schedule.keys.T
        self._table[:steps].copy_(host_table, non_blocking=True)
        self.step_numbers.zero_()
