"""A staging buffer between a backend and samples that are made on demand.

A data set may be too large for memory. A `SampleSource` then makes each sample when it is needed.
`OnDemandBackend` keeps one buffer, a tensor of fixed size. Before each call it copies the samples
of that call into the buffer, and it passes the call on to an ordinary backend, which takes the
buffer for the whole data set. A call whose samples do not fit is split into several calls.

Positions are numbered in two ways: a position in the data set is a row of the source, and a
position in the buffer is a row of the tensor that the ordinary backend sees.
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
from fedsim.engine.backend import Backend, TrainingResult, Workload, concatenate_results
from fedsim.engine.data import BUFFER_BYTES, ClientData
from fedsim.engine.schedule import Schedule
from fedsim.engine.torch_backend import EVALUATION_BATCH, PASS_ALL_SHARE


class OnDemandBackend(Backend):
    """A backend that makes the samples of each call, and passes the call on to `self.backend`.

    Training gives the same bits as with all samples in memory if the samples of a call fit into the
    buffer (`fedsim.engine.data.BUFFER_BYTES`, 64 MiB). Otherwise the cohort is split into parts,
    and results are the same up to rounding.
    """

    buffer_size: int

    def __init__(self, workload: Workload, build: Callable[[Workload], Backend]) -> None:
        """Build the ordinary backend: `build` receives the `workload` with the buffer as its data.

        `workload.data.x` becomes the buffer, and `workload.data.source` must be there.
        """
        data = workload.data
        assert data.source is not None
        self.source = data.source
        self.all_labels = data.y
        self.buffer = data.x
        self.buffer_labels = torch.zeros(len(data.x), dtype=torch.int64, device=data.y.device)
        self.buffer_size = len(data.x)
        # A backend may try out its model on the first samples when it is built.
        self._copy_to_buffer(np.arange(min(self.buffer_size, EVALUATION_BATCH)))
        buffered = ClientData(self.buffer, self.buffer_labels, (), (), data.num_classes)
        self.backend = build(replace(workload, data=buffered))
        self.reason = self.backend.reason
        self.exact = self.backend.exact
        self.fewest_clients = self.backend.fewest_clients
        self._set_pass_sizes()

    def _set_pass_sizes(self) -> None:
        """Set how many samples are copied at once for a forward pass, and `pass_size`.

        The buffer is filled up to a multiple of the ordinary backend's pass size, so that its
        passes hold the same samples as without a buffer. A buffer that is smaller than one pass is
        filled completely, and cuts passes at its own size, too.
        """
        pass_size = self.backend.pass_size
        if self.buffer_size >= pass_size:
            self._samples_at_once = self.buffer_size - self.buffer_size % pass_size
        else:
            self._samples_at_once = self.buffer_size
        holds_all_samples = self.buffer_size == len(self.source)
        if self._samples_at_once % pass_size == 0 or holds_all_samples:
            self.pass_size = pass_size
        else:
            self.pass_size = math.lcm(self._samples_at_once, pass_size)

    @property
    def description(self) -> str:
        return f"{self.backend.description}, samples made on demand"

    @property
    def max_joint_clients(self) -> int:
        return self.backend.max_joint_clients

    def joint_key(self, schedule: Schedule) -> Hashable:
        return self.backend.joint_key(schedule)

    def cross_entropies(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.backend.cross_entropies(logits, labels)

    def train(self, start: Sequence[Params], schedule: Schedule) -> TrainingResult:
        if np.unique(schedule.positions).size <= self.buffer_size:
            return self._train_part(start, schedule)
        results = []
        for part in self._parts_that_fit(schedule):
            # Padded, so that batches have the shape that they have in the whole cohort.
            part_schedule = schedule.rows(part, padded=True)
            results.append(self._train_part(start[part], part_schedule))
        return concatenate_results(results, schedule)

    def _train_part(self, start: Sequence[Params], schedule: Schedule) -> TrainingResult:
        """Train clients whose samples fit into the buffer."""
        needed, buffer_rows = np.unique(schedule.positions, return_inverse=True)
        self._copy_to_buffer(needed)
        in_buffer = buffer_rows.reshape(schedule.positions.shape)
        return self.backend.train(start, replace(schedule, positions=in_buffer))

    def _parts_that_fit(self, schedule: Schedule) -> list[slice]:
        """Cut the clients into consecutive parts whose samples fit into the buffer.

        No part has a single client if there are several: results of a client that is trained alone
        may differ in their last bits (`Backend.fewest_clients`). If the last client is left alone,
        it takes its neighbour with it. `LARGEST_CLIENTS` is why both fit.
        """
        cuts = [0]
        samples = 0
        for client, positions in enumerate(schedule.positions):
            count = np.unique(positions).size
            if samples + count > self.buffer_size:
                cuts.append(client)
                samples = 0
            samples += count
        num_clients = len(schedule)
        last_is_alone = cuts[-1] == num_clients - 1
        if last_is_alone and cuts[-1] - cuts[-2] > 2:
            cuts[-1] -= 1
        return [slice(first, end) for first, end in pairwise([*cuts, num_clients])]

    def num_passed_in_order(self, count: int, x: Tensor) -> int:
        if x is not self.buffer:
            return self.backend.num_passed_in_order(count, x)
        num_samples = len(self.source)
        return num_samples if count >= PASS_ALL_SHARE * num_samples else 0

    def forward(self, params: Params, x: Tensor, positions: Positions | None = None) -> Tensor:
        """Return logits of `x`; if `x` is the buffer, of the data set's samples at `positions`."""
        if x is not self.buffer or positions is None:
            return self.backend.forward(params, x, positions)
        num_in_order = self.num_passed_in_order(len(positions), x)
        if num_in_order == 0:
            return self._forward_in_parts(params, positions)
        logits = self._forward_in_parts(params, np.arange(num_in_order))
        return logits[to_device(torch.as_tensor(positions), logits.device)]

    def _forward_in_parts(self, params: Params, positions: Positions) -> Tensor:
        logits = []
        for first in range(0, len(positions), self._samples_at_once):
            part = positions[first : first + self._samples_at_once]
            self._copy_to_buffer(part)
            logits.append(self.backend.forward(params, self.buffer[: len(part)]))
        return torch.cat(logits)

    def gradients(
        self, params: Params, positions: Sequence[Positions], names: Sequence[str]
    ) -> Iterator[Tensor]:
        """Compute gradients for as many lists at once as fit into the buffer and `BUFFER_BYTES`.

        The caller may use this backend between two gradients, which overwrites the buffer. So the
        gradients of one fill of the buffer are all computed before the first is yielded.
        """
        gradient_bytes = sum(params[name].nbytes for name in names)
        max_lists = max(BUFFER_BYTES // max(gradient_bytes, 1), 1)
        first = 0
        while first < len(positions):
            ends = np.cumsum([len(chosen) for chosen in positions[first : first + max_lists]])
            num_lists = max(int((ends <= self.buffer_size).sum()), 1)
            lists = ClientPositions.of(positions[first : first + num_lists])
            self._copy_to_buffer(lists.flat)
            in_buffer = ClientPositions(np.arange(len(lists.flat)), lists.sizes)
            yield from list(self.backend.gradients(params, in_buffer, names))
            first += num_lists

    def _copy_to_buffer(self, positions: Positions) -> None:
        """Make the samples at `positions` of the data set, and copy them to the first rows."""
        count = len(positions)
        self.buffer[:count].copy_(self.source.rows(positions))
        index = to_device(torch.as_tensor(positions), self.all_labels.device)
        self.buffer_labels[:count] = self.all_labels[index]
