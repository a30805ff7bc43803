"""Train and evaluate on a data set that does not fit into memory.

A `SampleSource` then makes each sample when it is needed. `OnDemandBackend` keeps one buffer, a
tensor of fixed size, and wraps an ordinary backend whose whole data set is this buffer. Each call
has three steps:

1. Copy the samples that the call needs into the first rows of the buffer.
2. Replace the call's positions in the data set (rows of the source) by rows of the buffer.
3. Pass the call on to the ordinary backend.

If the samples of a call do not fit, it is split into several such calls.

`ClientData.on_demand` allocates the buffer, with room for the samples of any three clients. It is
`data.x`, and the rest of fedsim does not know that it is a buffer. A call of `forward` with
`data.x` and positions means these samples of the data set. So `OnDemandBackend` takes the tensor
`data.x` for the whole data set. Any other tensor, such as a test set, holds its samples itself.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from fedsim.core.flat import to_device
from fedsim.core.types import ClientPositions, Params, Positions
from fedsim.engine.backend import (
    Backend,
    ForwardingBackend,
    TrainingResult,
    Workload,
    concatenate_results,
)
from fedsim.engine.data import BUFFER_BYTES, ClientData, rows_for_largest_clients
from fedsim.engine.schedule import Schedule
from fedsim.engine.torch_backend import EVALUATION_BATCH, PASS_ALL_SHARE

GRADIENT_BYTES = BUFFER_BYTES
"""Maximum size of the gradients that `OnDemandBackend.gradients` holds at the same time."""


class OnDemandBackend(ForwardingBackend):
    """A backend that makes the samples of each call, and passes the call on to `self.backend`.

    Training gives the same bits as with all samples in memory if the samples of a call fit into the
    buffer (`fedsim.engine.data.BUFFER_BYTES`, 64 MiB). Otherwise the cohort is split into parts,
    and results are the same up to rounding.
    """

    buffer_size: int

    def __init__(self, workload: Workload, build: Callable[[Workload], Backend]) -> None:
        """Build the ordinary backend: `build` receives the `workload` with the buffer as its data.

        `workload.data` must be the return value of `ClientData.on_demand`.
        """
        data = workload.data
        assert data.source is not None
        self.source = data.source
        self.all_labels = data.y
        self.buffer = data.x
        self.buffer_labels = torch.zeros(len(data.x), dtype=torch.int64, device=data.y.device)
        self.buffer_size = len(data.x)
        fewest_rows = min(rows_for_largest_clients(data.train, data.evaluate), len(data.source))
        assert self.buffer_size >= fewest_rows, "the buffer is not that of ClientData.on_demand"
        # A backend tries out its model on the first samples of its data when it is built.
        self._copy_to_buffer(np.arange(min(self.buffer_size, EVALUATION_BATCH)))
        buffered = ClientData(
            self.buffer, self.buffer_labels, (), (), data.num_classes, augment=data.augment
        )
        # The same bits on every processor (`exact`) stay the same: how a call is split depends on
        # its positions and the buffer's size only.
        super().__init__(build(replace(workload, data=buffered)))
        self._set_pass_sizes()

    def _set_pass_sizes(self) -> None:
        """Set how many samples `forward` copies into the buffer at once, and `pass_size`.

        The ordinary backend cuts the samples of a call into passes of its own `pass_size`. If the
        buffer has room for a whole pass, each fill is a number of whole passes. They then hold the
        same samples as without a buffer. A smaller buffer is filled completely, and is one pass.

        This backend's `pass_size` promises that `forward` may be cut at its multiples (`Backend`).
        With a smaller buffer, passes of the data set have the size of a fill, and those of other
        tensors the ordinary backend's. Multiples of both are cuts between passes of either.
        """
        ordinary = self.backend.pass_size
        self.pass_size = ordinary
        if self.buffer_size >= ordinary:
            self._samples_per_fill = self.buffer_size - self.buffer_size % ordinary
            return
        self._samples_per_fill = self.buffer_size
        if self.buffer_size < len(self.source):
            self.pass_size = math.lcm(self._samples_per_fill, ordinary)

    @property
    def description(self) -> str:
        return f"{self.backend.description}, samples made on demand"

    @property
    def max_joint_clients(self) -> int:
        return self.backend.max_joint_clients

    def joint_key(self, schedule: Schedule) -> Hashable:
        return self.backend.joint_key(schedule)

    def train(self, start: Sequence[Params], schedule: Schedule) -> TrainingResult:
        """Train K models. The samples of each client must fit into the buffer."""
        if np.unique(schedule.positions).size <= self.buffer_size:
            return self._train_part(start, schedule)
        results = []
        for rows in self._parts_that_fit(schedule):
            # Padded, so that batches have the shape that they have in the whole cohort.
            part = schedule.rows(rows, padded=True)
            results.append(self._train_part(start[rows], part))
        return concatenate_results(results, schedule)

    def _train_part(self, start: Sequence[Params], schedule: Schedule) -> TrainingResult:
        """Train clients whose samples fit into the buffer. Each sample is copied once."""
        # `buffer_rows` has the index in `needed` of each position of the schedule.
        needed, buffer_rows = np.unique(schedule.positions, return_inverse=True)
        self._copy_to_buffer(needed)
        positions = buffer_rows.reshape(schedule.positions.shape)
        return self.backend.train(start, replace(schedule, positions=positions))

    def _parts_that_fit(self, schedule: Schedule) -> list[slice]:
        """Cut the clients into consecutive parts whose samples fit into the buffer.

        Each part has two clients or more, if there are two: the result of a client that trains
        alone may differ in its last bits (`Backend.fewest_clients`). The samples of any three
        clients fit (`ClientData.on_demand`), so all parts but the last have three clients or more.
        A last part of a single client therefore takes another one from the part before it.
        """
        cuts = [0]
        num_samples = 0
        mask = schedule.mask
        for client, positions in enumerate(schedule.positions):
            count = np.unique(positions[mask[client]]).size
            # One row is for the padding of clients with fewer steps, which is position 0.
            if num_samples + count > self.buffer_size - 1:
                cuts.append(client)
                num_samples = 0
            num_samples += count
        num_clients = len(schedule)
        if len(cuts) > 1 and cuts[-1] == num_clients - 1:
            cuts[-1] -= 1
        return [slice(begin, end) for begin, end in pairwise([*cuts, num_clients])]

    def num_passed_in_order(self, num_positions: int, x: Tensor) -> int:
        """Return the size of the data set if `forward` passes all of it in order, otherwise 0.

        The rule is that of `TorchBackend` without a buffer. So passes hold the same samples, and
        results have the same bits.
        """
        if x is not self.buffer:
            return self.backend.num_passed_in_order(num_positions, x)
        num_samples = len(self.source)
        return num_samples if num_positions >= PASS_ALL_SHARE * num_samples else 0

    def forward(self, params: Params, x: Tensor, positions: Positions | None = None) -> Tensor:
        """Return logits of `x`; if `x` is the buffer, of the data set's samples at `positions`."""
        if x is not self.buffer:
            return self.backend.forward(params, x, positions)
        assert positions is not None, "the whole data set does not fit into memory"
        num_in_order = self.num_passed_in_order(len(positions), x)
        if num_in_order == 0:
            return self._forward_in_fills(params, positions)
        logits = self._forward_in_fills(params, np.arange(num_in_order))
        return logits[to_device(torch.as_tensor(positions), logits.device)]

    def _forward_in_fills(self, params: Params, positions: Positions) -> Tensor:
        """Return logits of the data set's samples at `positions`, one fill of the buffer after
        another."""
        logits = []
        for begin in range(0, len(positions), self._samples_per_fill):
            fill = positions[begin : begin + self._samples_per_fill]
            self._copy_to_buffer(fill)
            logits.append(self.backend.forward(params, self.buffer[: len(fill)]))
        return torch.cat(logits)

    def gradients(
        self, params: Params, positions: Sequence[Positions], names: Sequence[str]
    ) -> Iterator[Tensor]:
        """Yield the gradient of each list of `positions`; the samples of each list must fit.

        A fill of the buffer serves as many lists as fit into the buffer, and whose gradients fit
        into `GRADIENT_BYTES`. The caller may use this backend between two gradients, which
        overwrites the buffer. So the gradients of one fill are all computed before the first is
        yielded.
        """
        gradient_bytes = sum(params[name].nbytes for name in names)
        max_lists = max(GRADIENT_BYTES // max(gradient_bytes, 1), 1)
        num_done = 0
        while num_done < len(positions):
            next_lists = positions[num_done : num_done + max_lists]
            ends = np.cumsum([len(client_positions) for client_positions in next_lists])
            num_lists = int((ends <= self.buffer_size).sum())
            assert num_lists > 0, "a list of positions that is larger than the buffer"
            lists = ClientPositions.of(next_lists[:num_lists])
            self._copy_to_buffer(lists.flat)
            buffer_rows = ClientPositions(np.arange(len(lists.flat)), lists.sizes)
            yield from list(self.backend.gradients(params, buffer_rows, names))
            num_done += num_lists

    def _copy_to_buffer(self, positions: Positions) -> None:
        """Make the samples at `positions` of the data set, and copy them to the first rows."""
        count = len(positions)
        assert count <= self.buffer_size
        self.buffer[:count].copy_(self.source.rows(positions))
        index = to_device(torch.as_tensor(positions), self.all_labels.device)
        self.buffer_labels[:count] = self.all_labels[index]
