"""The buffers at fixed addresses that recorded local steps read and write.

On a GPU, the graph backend records local steps as CUDA graphs. A graph holds the kernels that a
step launches, and the addresses of the memory that they use. A replay runs the same kernels on the
same addresses, and nothing of the step's Python. Two things follow:

- Whatever differs between steps or rounds must be in tensors that keep their place: models and the
  optimiser's state in `ModelBuffers`, batches and learning rates in a `ScheduleTable`.
- The host cannot tell a replayed step its number. The table has a counter on the device, which
  every step reads and advances.

`RecordedTrainer` (backend.py) keeps one `ModelBuffers` and one `ScheduleTable` for many rounds:

    table.clear()                   # so that trial steps before a recording change no model
    step(), ...                     # trial steps; then the recording, which computes nothing
    # and in each round:
    table.fill(schedule, scalars)
    models.load(start, shift)
    replay(), ...
    models.changes(K), table.losses

Both have R rows for clients, of which a round uses the first K. A *step program* (steps.py) makes
the local steps of consecutive clients: of all R, or of a single one. Its methods here that are
called within a step work on tensors only, so that they can be recorded.
"""

import math
from collections.abc import Mapping, Sequence

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


def round_up_to(unit: int, count: int) -> int:
    """Return the smallest multiple of `unit` that is not below `count`."""
    return -(-count // unit) * unit


class ModelBuffers:
    """The models of R clients, their gradients, and the optimiser's state. All are zero at first.

    A model is a row. Its tensors follow each other, with gaps for `ALIGNMENT`: first those that
    training changes by gradients, P columns with gaps, and then Q columns of running statistics.

    - `params` [R, P] and `statistics` [R, Q] share the memory of one tensor [R, P + Q].
    - `grads` [R, P] and the optimiser's `state` (tensors [R, P]) have the columns of `params`, and
      are zero in the gaps.
    - `shift` [R, P] is what a `Correction` adds to the gradients; None unless training is
      `corrected`.

    Type and device are those of `like`. A tensor in `storage` is stored in another order, and with
    more gaps: its entry there has, for each place, the number of the model's tensor that it holds
    (counted in the flat tensor), or -1 for a gap.
    """

    def __init__(
        self,
        model: nn.Module,
        num_rows: int,
        like: Tensor,
        num_state_tensors: int,
        corrected: bool,
        storage: Mapping[str, Tensor] | None = None,
    ) -> None:
        # What clients and server send each other, the trained tensors first.
        self._tensors = traveling(model)
        self._num_trained = len(trained_names(model))
        self._first_columns: dict[str, int] = {}
        self._stored_shapes: dict[str, torch.Size] = {}
        used_columns = []
        width = 0
        params_width = 0
        for number, (name, value) in enumerate(self._tensors.items(), 1):
            numbers = torch.arange(value.numel()).view(value.shape)
            if storage is not None and name in storage:
                numbers = storage[name]
            self._first_columns[name] = width
            self._stored_shapes[name] = numbers.shape
            places = (numbers.flatten() >= 0).nonzero().squeeze(1)
            order = numbers.flatten()[places].argsort()
            used_columns.append(width + places[order])
            width += round_up_to(ALIGNMENT, numbers.numel())
            if number == self._num_trained:
                params_width = width
        self._used_columns = torch.cat(used_columns).to(like.device)
        """The columns of a row that hold the model, without the gaps."""
        self._models = like.new_zeros(num_rows, width)
        self.params, self.statistics = self._models.split(
            [params_width, width - params_width], dim=1
        )
        self.grads = like.new_zeros(num_rows, params_width)
        self.state = [torch.zeros_like(self.grads) for _ in range(num_state_tensors)]
        self.shift = torch.zeros_like(self.grads) if corrected else None

    def views(self, flat: Tensor, first_column: int = 0) -> Stack:
        """Return the model's tensors that lie in `flat` [n, W], as views, in their stored order.

        The columns of `flat` are those of a row from `first_column` on, such as `grads` from 0 on,
        or `statistics` from P on.
        """
        views = {}
        for name, column in self._first_columns.items():
            shape = self._stored_shapes[name]
            begin = column - first_column
            if 0 <= begin < flat.shape[1]:
                views[name] = flat[:, begin : begin + shape.numel()].view(len(flat), *shape)
        return views

    @torch.no_grad()
    def load(self, start: Sequence[Params], shift: Stack | None) -> None:
        """Load the models `start` of K clients into the first rows, and reset the optimiser.

        Often all clients start from one object, the server's model. Each object is copied once.
        `shift` None means zero.
        """
        num_rows = len(self._models)
        distinct = list({id(model): model for model in start}.values())
        tensors = [model[name].reshape(-1) for model in distinct for name in self._tensors]
        self._loaded = torch.cat(tensors).view(len(distinct), -1)
        """The models without gaps: [1, D] if all are one object, otherwise [R, D]."""
        if len(distinct) > 1:
            number_of = {id(model): number for number, model in enumerate(distinct)}
            numbers = torch.zeros(num_rows, dtype=torch.int64)  # 0 for rows without a client
            numbers[: len(start)] = torch.as_tensor([number_of[id(model)] for model in start])
            self._loaded = self._loaded[to_device(numbers, self._loaded.device)]
        self._models.index_copy_(1, self._used_columns, self._loaded.expand(num_rows, -1))
        for state_tensor in self.state:
            state_tensor.zero_()
        if self.shift is not None:
            self.shift.zero_()
            if shift is not None:
                flat = flat_rows({name: shift[name] for name in self._trained()})
                columns = self._used_columns[: flat.shape[1]]
                self.shift[: len(flat)].index_copy_(1, columns, flat)

    @torch.no_grad()
    def changes(self, num_clients: int) -> Stack:
        """Return how the models of the first clients have changed since `load`, in new memory."""
        models = self._models[:num_clients].index_select(1, self._used_columns)
        return split_flat(models - self._loaded[:num_clients], self._tensors)

    def momentum(self, num_clients: int) -> Stack:
        """Return the momentum buffers of the first clients, in new memory.

        They are the first tensor of the optimiser's state.
        """
        trained = self._trained()
        num_columns = sum(value.numel() for value in trained.values())
        columns = self._used_columns[:num_columns]
        return split_flat(self.state[0][:num_clients].index_select(1, columns), trained)

    def _trained(self) -> Params:
        return dict(list(self._tensors.items())[: self._num_trained])


FIELD_ALIGNMENT = 8
"""Every field of the table starts at a multiple of so many int32, 32 bytes."""
Fields = dict[str, Tensor]
"""Views of n steps of a `ScheduleTable`, for R clients and batches of B samples:

- `positions` [n, R, B] int32: rows of the data. Positions that stand for padding are valid, too.
- `counts` [n, R] int32: how many positions are samples of the step, 0 for a client without a step.
- `weights` [n, R, B]: 1 / count for these samples, and 0 for the others.
- `keys` [n, R] int64: keys of the dropout masks.
- `scalars` [n, C]: numbers that the optimiser needs in the step, such as the learning rate.
- `pull` [n, 1]: the factor of the model that a `Correction` adds to the gradients.
- `crops` [n, R, B] int32: numbers of the samples' crops, if these are augmented.
"""
FIELDS_OF_ALL_CLIENTS = ("scalars", "pull")
"""Fields that have no axis for clients."""


class ScheduleTable:
    """The schedule of S steps of R clients, with batches of B samples and C scalars.

    All fields of a step lie next to each other in one tensor of int32. So a round needs one copy to
    the device, and a step one gather. Fields of other types are views of the same bits.

    - `step_numbers` [R] int64 are counters on the device, one for each step program: entry r has
      the next step of the program whose first client is r. Other entries are not used.
    - `losses` [S, R, B] receive every sample's loss.
    """

    def __init__(
        self,
        num_steps: int,
        num_rows: int,
        batch: int,
        num_scalars: int,
        like: Tensor,
        *,
        augmented: bool = False,
    ) -> None:
        self._fields: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "keys": (torch.int64, (num_rows,)),
            "scalars": (like.dtype, (num_scalars,)),
            "pull": (like.dtype, (1,)),
            "weights": (like.dtype, (num_rows, batch)),
            "positions": (torch.int32, (num_rows, batch)),
            "counts": (torch.int32, (num_rows,)),
        }
        if augmented:
            self._fields["crops"] = (torch.int32, (num_rows, batch))
        self._widths: list[int] = []  # of a field, its padding, the next field, ...
        for dtype, shape in self._fields.values():
            width = math.prod(shape) * dtype.itemsize // torch.int32.itemsize
            self._widths += [width, round_up_to(FIELD_ALIGNMENT, width) - width]
        self._table = torch.zeros(
            (num_steps, sum(self._widths)), dtype=torch.int32, device=like.device
        )
        self.step_numbers = torch.zeros(num_rows, dtype=torch.int64, device=like.device)
        self.losses = like.new_zeros(num_steps, num_rows, batch)
        self.num_steps = num_steps
        self.batch = batch

    def _views(self, table: Tensor, clients: slice) -> Fields:
        """Return the fields of `clients` in `table` [n, width], which share its memory."""
        views = {}
        columns = table.split(self._widths, dim=1)[::2]  # without padding
        for (name, (dtype, shape)), part in zip(self._fields.items(), columns, strict=True):
            view = part.view(dtype).view(len(table), *shape)
            views[name] = view if name in FIELDS_OF_ALL_CLIENTS else view[:, clients]
        return views

    def next_step(self, clients: slice) -> Fields:
        """Return the fields of the next step (n = 1) of a program's `clients`, in new memory.

        Called within a step, so it is recorded.
        """
        step = self._step_number(clients)
        return self._views(self._table.index_select(0, step), clients)

    def end_step(self, clients: slice, losses: Tensor) -> None:
        """Store the samples' losses [n, B] of a program's n `clients`, and advance its counter.

        Called within a step, so it is recorded.
        """
        step = self._step_number(clients)
        self.losses[:, clients].index_copy_(0, step, losses.unsqueeze(0))
        step.add_(1)  # a view of `step_numbers`

    def _step_number(self, clients: slice) -> Tensor:
        """Return the counter [1] of the program of `clients`, as a view."""
        return self.step_numbers[clients.start : clients.start + 1]

    def clear(self) -> None:
        """Prepare a trial step, which then changes no model: set all counts to 0, and the next
        steps to the first."""
        self._table.zero_()
        self.step_numbers.zero_()

    def fill(self, schedule: Schedule, scalars: Floats) -> None:
        """Copy a schedule of K <= R clients with batches of B, and `scalars` [steps, C].

        It has at most S steps. The counts of the other clients become 0. The host does not wait for
        the copy; torch keeps the pinned memory until it is done.
        """
        num_clients, num_steps = schedule.counts.shape
        width, on_gpu = self._table.shape[1], self._table.is_cuda
        host_table = torch.zeros((num_steps, width), dtype=torch.int32, pin_memory=on_gpu)
        fields = self._views(host_table, slice(num_clients))
        # The schedule has the client as its first axis, and the table the step.
        fields["positions"].numpy()[:] = schedule.positions.transpose(1, 0, 2)
        fields["counts"].numpy()[:] = schedule.counts.T
        fields["weights"].numpy()[:] = mean_weights(schedule.counts.T, self.batch)
        fields["scalars"].numpy()[:] = scalars
        fields["pull"].numpy()[:] = schedule.correction.pull
        if schedule.crops is not None and "crops" in fields:
            fields["crops"].numpy()[:] = schedule.crops.transpose(1, 0, 2)
        if schedule.keys is not None:
            fields["keys"].numpy()[:] = schedule.keys.T
        self._table[:num_steps].copy_(host_table, non_blocking=True)
        self.step_numbers.zero_()
