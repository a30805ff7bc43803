"""A backend whose work is cut into consecutive parts, one for each rank, which rank 0 puts together
in their order.

Clients do not depend on each other, and nothing is added up across ranks: what comes back are the
updates, gradients and logits themselves. All sums are those of the program at rank 0, as it would
do them alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.core.arrays import Ints
from fedsim.core.flat import as_columns
from fedsim.core.types import Params
from fedsim.distributed.links import Message, Others
from fedsim.engine.backend import Backend, TrainingResult, concatenate_results
from fedsim.engine.schedule import Schedule

Positions = Ints

WINDOW = 2**24
"""Numbers in the gradients that a rank computes for one question: 64 MiB in float32, kept by rank 0
for each rank."""


def shares(work: Sequence[int] | Ints, count: int, unit: int = 1) -> dict[int, slice]:
    """`count` consecutive parts of a list of items, cut where their `work` is the most even: those
    that are not empty, by rank. `unit`: so many samples are an item; the last one may have
    fewer."""
    ends = np.cumsum([0, *work])
    cuts = [int(np.abs(ends * count - ends[-1] * part).argmin()) for part in range(1, count)]
    parts = enumerate(zip([0, *cuts], [*cuts, len(ends) - 1], strict=True))
    return {rank: slice(first * unit, last * unit) for rank, (first, last) in parts if last > first}


@dataclass(frozen=True)
class Holdings:
    """What a rank has of a run: its backend, and the sets of samples by name."""

    backend: Backend
    samples: Mapping[str, Tensor]

    def compute(self, kind: str, content: Mapping[str, Any]) -> Any:
        """A part of the work: `train`, `forward` or `gradients`."""
        if kind == "train":
            return train_part(
                self.backend, [content["models"][row] for row in content["rows"]], content["part"]
            )
        if kind == "forward":
            x, part = self.samples[content["name"]], content["part"]
            return self.backend.forward(
                content["params"], x if part is None else x[slice(*part)], content["positions"]
            )
        return list(
            self.backend.gradients(content["params"], content["positions"], content["names"])
        )


def train_part(backend: Backend, start: Sequence[Params], part: Schedule) -> TrainingResult:
    """Train the clients of a part of a schedule. Where they are fewer than give the same bits as
    among all of them, one comes several times, and its further results are dropped."""
    count, fewest = len(part), backend.fewest_clients
    if count >= fewest:
        return backend.train(start, part)
    rows = np.arange(fewest) % count
    return backend.train([start[row] for row in rows.tolist()], part.rows(rows)).rows(slice(count))


class DividedBackend(Backend):
    """The backend of rank 0 and those of the other ranks, which hold the same as `own`."""

    def __init__(self, own: Holdings, others: Others) -> None:
        self._own, self._backend, self._others = own, own.backend, others
        self.reason, self.exact = own.backend.reason, own.backend.exact
        self.pass_size, self.fewest_clients = own.backend.pass_size, own.backend.fewest_clients

    @property
    def description(self) -> str:
        return f"{self._backend.description}, over {self._others.size} processes"

    def train(self, start: Sequence[Params], schedule: Schedule) -> TrainingResult:
        cuts = shares(schedule.samples, self._others.size)
        if len(cuts) < 2:
            return self._backend.train(start, schedule)
        parts = {}
        for rank, cut in cuts.items():
            models = {
                id(model): dict(model) for model in start[cut]
            }  # those from which several start come once
            rows = [[*models].index(id(model)) for model in start[cut]]
            parts[rank] = {"models": [*models.values()], "rows": rows, "part": schedule.rows(cut)}
        whole = concatenate_results(self._computed("train", parts), schedule)
        momentum = None if whole.momentum is None else as_columns(whole.momentum)
        return TrainingResult(as_columns(whole.delta), whole.losses, momentum, whole.finite)

    def forward(self, params: Params, x: Tensor, positions: Positions | None = None) -> Tensor:
        passed = 0 if positions is None else self._backend.passed_in_order(len(positions), x)
        if not passed:
            return self._forward(params, x, positions)
        in_order = (
            None if self._backend.room is None else np.arange(passed)
        )  # `x` is all of them, or room for some
        return self._forward(params, x, in_order)[torch.as_tensor(positions, device=x.device)]

    def _forward(self, params: Params, x: Tensor, positions: Positions | None) -> Tensor:
        count = len(x) if positions is None else len(positions)
        name = next((name for name, samples in self._own.samples.items() if samples is x), None)
        unit = self._backend.pass_size
        cuts = shares(np.ones(-(-count // unit), np.int64), self._others.size, unit)
        if len(cuts) < 2 or name is None:
            return self._backend.forward(params, x, positions)
        parts = {}
        for rank, cut in cuts.items():
            part, rows = (
                ([cut.start, cut.stop], None) if positions is None else (None, positions[cut])
            )
            parts[rank] = {"params": dict(params), "name": name, "part": part, "positions": rows}
        return torch.cat(self._computed("forward", parts))

    def cross_entropies(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self._backend.cross_entropies(logits, labels)

    def gradients(
        self, params: Params, positions: Sequence[Positions], names: Sequence[str]
    ) -> Iterator[Tensor]:
        size = sum(params[name].numel() for name in names)
        window = self._others.size * max(
            WINDOW // max(size, 1), 1
        )  # so many lists are computed and kept at once
        for some in (
            positions[first : first + window] for first in range(0, len(positions), window)
        ):
            cuts = shares([len(own) for own in some], self._others.size)
            if len(cuts) < 2:
                yield from self._backend.gradients(params, some, names)
                continue
            common = {"params": dict(params), "names": list(names)}
            parts = {rank: {**common, "positions": list(some[cut])} for rank, cut in cuts.items()}
            for part in self._computed("gradients", parts):
                yield from part

    def _computed(self, kind: str, contents: Mapping[int, Mapping[str, Any]]) -> list[Any]:
        """The parts of all ranks in their order, which is that of clients and samples."""
        requests = {rank: Message(kind, content) for rank, content in contents.items() if rank}

        def own() -> list[Any]:
            return [self._own.compute(kind, contents[0])] if 0 in contents else []

        mine, answers = self._others.ask(requests, own)
        return [*mine, *(answers[rank].content["found"] for rank in sorted(answers))]
