"""Any backend on samples that are made on demand: those of one call are put where it expects
them."""

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedsim.core.flat import to_device
from fedsim.core.types import Params
from fedsim.engine.backend import Backend, TrainingResult, Workload, concatenate_results
from fedsim.engine.data import ROOM_BYTES, ClientData
from fedsim.engine.schedule import Positions, Schedule
from fedsim.engine.torch_backend import EVALUATION_BATCH, MOST


class OnDemandBackend(Backend):
    """A backend that finds in a tensor of fixed size, `data.x`, the samples that the present call
    needs. Calls whose samples do not fit are taken in parts: training gives the same bits as with
    all samples in memory where those of a call fit (64 MiB, `fedsim.engine.data.ROOM_BYTES`), and
    else the same up to rounding."""

    def __init__(self, workload: Workload, build: Callable[[Workload], Backend]) -> None:
        """`build` makes the backend that computes, from a workload whose data are those in the
        room."""
        data = workload.data
        assert data.source is not None
        self.source, self.x, self.y = data.source, data.x, data.y
        self.labels = torch.zeros(len(data.x), dtype=torch.int64, device=data.y.device)
        self._place(
            np.arange(min(len(data.x), EVALUATION_BATCH))
        )  # on which a backend may try out its model
        held = ClientData(self.x, self.labels, (), (), data.num_classes)
        self.backend = own = build(replace(workload, data=held))
        self.reason, self.exact, self.fewest_clients, self.room = (
            own.reason,
            own.exact,
            own.fewest_clients,
            len(self.x),
        )
        unit = own.pass_size
        self._placed_at_once = len(self.x) // unit * unit or len(self.x)
        cut_within_passes = self._placed_at_once % unit and len(self.x) < len(self.source)
        self.pass_size = math.lcm(self._placed_at_once, unit) if cut_within_passes else unit

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

    def passed_in_order(self, count: int, x: Tensor) -> int:
        if x is not self.x:
            return self.backend.passed_in_order(count, x)
        return len(self.source) if count >= MOST * len(self.source) else 0

    def train(self, start: Sequence[Params], schedule: Schedule) -> TrainingResult:
        cuts = self._parts_that_fit(schedule)
        if len(cuts) == 1:
            return self._train(start, schedule)
        parts = [self._train(start[cut], schedule.rows(cut, padded=True)) for cut in cuts]
        return concatenate_results(parts, schedule)

    def forward(self, params: Params, x: Tensor, positions: Positions | None = None) -> Tensor:
        if x is not self.x or positions is None:
            return self.backend.forward(params, x, positions)
        if passed := self.passed_in_order(len(positions), x):
            logits = self._forward(params, np.arange(passed))
            return logits[to_device(torch.as_tensor(positions), logits.device)]
        return self._forward(params, positions)

    def gradients(
        self, params: Params, positions: Sequence[Positions], names: Sequence[str]
    ) -> Iterator[Tensor]:
        """Some at a time: whoever takes one of them may use the backend before the next."""
        length = sum(params[name].nbytes for name in names)
        most, first = max(ROOM_BYTES // max(length, 1), 1), 0
        while first < len(positions):
            fits = np.cumsum([len(own) for own in positions[first : first + most]]) <= len(self.x)
            some = positions[first : first + max(int(fits.sum()), 1)]
            self._place(np.concatenate(some))
            ends = np.cumsum([len(own) for own in some])
            yield from list(
                self.backend.gradients(params, np.split(np.arange(ends[-1]), ends[:-1]), names)
            )
            first += len(some)

    def _place(self, positions: Positions) -> None:
        self.x[: len(positions)].copy_(self.source.rows(positions))
        self.labels[: len(positions)] = self.y[to_device(torch.as_tensor(positions), self.y.device)]

    def _forward(self, params: Params, positions: Positions) -> Tensor:
        size, passes = self._placed_at_once, []
        for part in np.split(positions, range(size, len(positions), size)):
            self._place(part)
            passes.append(self.backend.forward(params, self.x[: len(part)]))
        return torch.cat(passes)

    def _train(self, start: Sequence[Params], schedule: Schedule) -> TrainingResult:
        needed, rows = np.unique(schedule.positions, return_inverse=True)
        self._place(needed)
        return self.backend.train(
            start, replace(schedule, positions=rows.reshape(schedule.positions.shape))
        )

    def _parts_that_fit(self, schedule: Schedule) -> list[slice]:
        """Consecutive clients whose samples find room; none is alone in a part, if there are
        several."""
        if np.unique(schedule.positions).size <= len(self.x):
            return [slice(0, len(schedule))]
        cuts, held = [0], 0
        for row, own in enumerate(schedule.positions):
            count = np.unique(own).size
            if held + count > len(self.x):
                cuts.append(row)
                held = 0
            held += count
        if cuts[-1] == len(schedule) - 1 and cuts[-1] - cuts[-2] > 2:
            cuts[-1] -= 1
        return [slice(a, b) for a, b in zip(cuts, [*cuts[1:], len(schedule)], strict=True)]
