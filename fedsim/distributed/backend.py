"""A backend whose work is divided among the ranks: rank 0 puts the parts together in the order of the clients.

Clients do not depend on each other, and nothing is added up across ranks: what comes back are the updates, gradients
and logits themselves. All sums are those of the program at rank 0, as it would do them alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.distributed.links import LostRankError, Others
from fedsim.distributed.messages import Message
from fedsim.distributed.parts import (
    Holdings,
    forward_part,
    forward_request,
    gradients_request,
    read_gradients,
    read_passed,
    read_trained,
    train_part,
    train_request,
)
from fedsim.distributed.shares import aligned_shares, shares
from fedsim.engine.backend import Backend, TrainingResult
from fedsim.engine.results import concatenate_results
from fedsim.engine.schedule import Schedule
from fedsim.flat import as_columns
from fedsim.types import Params

T = TypeVar("T")

WINDOW = 2**24
"""Numbers in the gradients that a rank computes for one question: 64 MiB in float32, kept by rank 0 for each rank."""


class DividedBackend(Backend):
    """The backend of rank 0 and those of the other ranks, which hold the same as `own`.

    `explained` turns the error of a rank that was lost into the one that the user is to see.
    """

    def __init__(self, own: Holdings, others: Others, explained: Callable[[LostRankError], Exception]) -> None:
        self._own, self._backend, self._others, self._explained = own, own.backend, others, explained
        self.reason, self.exact = own.backend.reason, own.backend.exact
        self.pass_size, self.fewest_clients = own.backend.pass_size, own.backend.fewest_clients

    @property
    def description(self) -> str:
        return f"{self._backend.description}, over {self._others.size} processes"

    def train(self, start: Sequence[Params], schedule: Schedule) -> TrainingResult:
        cuts = self._filled(shares(schedule.samples, self._others.size))
        if len(cuts) < 2:
            return self._backend.train(start, schedule)
        like, parts = self._own.like, {rank: schedule.rows(cut) for rank, cut in cuts.items()}
        results = self._asked(
            {rank: train_request(start[cuts[rank]], part, like) for rank, part in parts.items() if rank},
            lambda: train_part(self._backend, start[cuts[0]], parts[0]) if 0 in parts else None,
            lambda answer: read_trained(answer, like),
        )
        whole = concatenate_results(results, schedule)
        momentum = None if whole.momentum is None else as_columns(whole.momentum)
        return TrainingResult(as_columns(whole.delta), whole.losses, momentum, whole.finite)

    def forward(self, params: Params, x: Tensor, positions: NDArray[np.int64] | None = None) -> Tensor:
        passed = 0 if positions is None else self._backend.passed_in_order(len(positions), x)
        if not passed:
            return self._forward(params, x, positions)
        in_order = None if self._backend.room is None else np.arange(passed)  # `x` is all of them, or room for some
        return self._forward(params, x, in_order)[torch.as_tensor(positions, device=x.device)]

    def _forward(self, params: Params, x: Tensor, positions: NDArray[np.int64] | None) -> Tensor:
        count = len(x) if positions is None else len(positions)
        name = next((name for name, samples in self._own.samples.items() if samples is x), None)
        cuts = self._filled(aligned_shares(count, self._backend.pass_size, self._others.size))
        if len(cuts) < 2 or name is None:
            return self._backend.forward(params, x, positions)
        like = self._own.like
        found = self._asked(
            {rank: forward_request(params, name, cut, positions, like) for rank, cut in cuts.items() if rank},
            lambda: forward_part(self._backend, params, x, cuts[0], positions) if 0 in cuts else None,
            read_passed,
        )
        return torch.cat(found)

    def cross_entropies(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self._backend.cross_entropies(logits, labels)

    def gradients(
        self, params: Params, positions: Sequence[NDArray[np.int64]], names: Sequence[str]
    ) -> Iterator[Tensor]:
        size = sum(params[name].numel() for name in names)
        window = self._others.size * max(WINDOW // max(size, 1), 1)
        for first in range(0, len(positions), window):
            yield from self._some_gradients(params, positions[first : first + window], names)

    def _some_gradients(
        self, params: Params, positions: Sequence[NDArray[np.int64]], names: Sequence[str]
    ) -> Iterator[Tensor]:
        """Of so many lists as are computed and kept at once."""
        cuts = self._filled(shares([len(own) for own in positions], self._others.size))
        if len(cuts) < 2:
            yield from self._backend.gradients(params, positions, names)
            return
        like = self._own.like
        found = self._asked(
            {rank: gradients_request(params, positions[cut], names, like) for rank, cut in cuts.items() if rank},
            lambda: list(self._backend.gradients(params, positions[cuts[0]], names)) if 0 in cuts else None,
            read_gradients,
        )
        for part in found:
            yield from part

    def _filled(self, cuts: Sequence[slice]) -> dict[int, slice]:
        """The parts that are not empty, by rank."""
        return {rank: cut for rank, cut in enumerate(cuts) if cut.stop > cut.start}

    def _asked(
        self, requests: Mapping[int, Message], own: Callable[[], T | None], read: Callable[[Message], T]
    ) -> list[T]:
        """The parts of all ranks in their order, which is that of clients and samples."""
        try:
            mine, answers = self._others.ask(requests, own)
        except LostRankError as error:
            raise self._explained(error) from error
        return [*([] if mine is None else [mine]), *(read(answers[rank]) for rank in sorted(answers))]
