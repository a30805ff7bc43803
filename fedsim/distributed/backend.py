"""A backend that divides its work among ranks.

The work is cut into consecutive parts, one for each rank, and rank 0 puts the results together in
order. Clients do not depend on each other, and ranks send updates, gradients and logits, never sums
of them. Rank 0 adds up, as it would alone. So results do not depend on the number of ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.core.arrays import Ints
from fedsim.core.flat import as_columns
from fedsim.core.types import Params, Positions
from fedsim.distributed.links import Message, Others
from fedsim.engine.backend import Backend, ForwardingBackend, TrainingResult, concatenate_results
from fedsim.engine.schedule import Schedule

MAX_NUMBERS = 2**24
"""Maximum number of numbers in the gradients that a rank computes for one request. Rank 0 holds
64 MiB in float32 for each rank."""


@dataclass(frozen=True)
class Holdings:
    """The backend of a rank, and the sets of samples by name, which all ranks hold alike."""

    backend: Backend
    samples: Mapping[str, Tensor]

    def compute(self, kind: str, content: Mapping[str, Any]) -> Any:
        """Compute a part of a call of the backend's method `kind`.

        The method is `train`, `forward` or `gradients`. In `DividedBackend`, the method of that
        name makes the `content` of the request.
        """
        if kind == "train":
            start = [content["models"][number] for number in content["model_numbers"]]
            return train_part(self.backend, start, content["schedule"])
        params, positions = content["params"], content["positions"]
        if kind == "forward":
            x = self.samples[content["samples"]]
            if content["rows"] is not None:
                x = x[slice(*content["rows"])]
            return self.backend.forward(params, x, positions)
        return list(self.backend.gradients(params, positions, content["names"]))


class DividedBackend(ForwardingBackend):
    """The backend of rank 0, which gives parts of its work to the `others`.

    Rank 0 computes its own parts with `holdings`. The other ranks have equal ones.
    """

    def __init__(self, holdings: Holdings, others: Others) -> None:
        super().__init__(holdings.backend)
        self._holdings = holdings
        self._others = others
        self._names = {id(samples): name for name, samples in holdings.samples.items()}
        self.pass_size = self.backend.pass_size

    @property
    def description(self) -> str:
        return f"{self.backend.description}, over {self._others.size} processes"

    def train(self, start: Sequence[Params], schedule: Schedule) -> TrainingResult:
        parts = split_evenly(schedule.samples, self._others.size)
        if len(parts) < 2:
            return self.backend.train(start, schedule)
        contents = {}
        for rank, rows in parts.items():
            # A model from which several clients start is sent once.
            models = {id(model): dict(model) for model in start[rows]}
            numbers = {key: number for number, key in enumerate(models)}
            contents[rank] = {
                "models": list(models.values()),
                "model_numbers": [numbers[id(model)] for model in start[rows]],
                "schedule": schedule.rows(rows),
            }
        whole = concatenate_results(self._compute_on_ranks("train", contents), schedule)
        momentum = None if whole.momentum is None else as_columns(whole.momentum)
        return TrainingResult(as_columns(whole.delta), whole.losses, momentum, whole.finite)

    def forward(self, params: Params, x: Tensor, positions: Positions | None = None) -> Tensor:
        if positions is None:
            return self._forward(params, x, None)
        num_in_order = self.backend.num_passed_in_order(len(positions), x)
        if num_in_order == 0:
            return self._forward(params, x, positions)
        # The ranks share the passes of all samples, of which those at `positions` are then taken.
        all_positions = None
        if self.backend.buffer_size is not None:
            all_positions = np.arange(num_in_order)  # `x` only stands for the samples.
        logits = self._forward(params, x, all_positions)
        return logits[torch.as_tensor(positions, device=x.device)]

    def _forward(self, params: Params, x: Tensor, positions: Positions | None) -> Tensor:
        """Return the logits of `x` or its rows `positions`, cut between forward passes.

        Samples that only rank 0 holds have no name, and pass on rank 0.
        """
        name = self._names.get(id(x))
        count = len(x) if positions is None else len(positions)
        passes = np.ones(-(-count // self.pass_size), np.int64)
        parts = split_evenly(passes, self._others.size, self.pass_size)
        if len(parts) < 2 or name is None:
            return self.backend.forward(params, x, positions)
        contents = {}
        for rank, part in parts.items():
            contents[rank] = {
                "params": dict(params),
                "samples": name,
                "rows": [part.start, part.stop] if positions is None else None,
                "positions": None if positions is None else positions[part],
            }
        return torch.cat(self._compute_on_ranks("forward", contents))

    def gradients(
        self, params: Params, positions: Sequence[Positions], names: Sequence[str]
    ) -> Iterator[Tensor]:
        size = sum(params[name].numel() for name in names)
        lists_at_once = self._others.size * max(MAX_NUMBERS // max(size, 1), 1)
        for first in range(0, len(positions), lists_at_once):
            lists = positions[first : first + lists_at_once]
            parts = split_evenly([len(samples) for samples in lists], self._others.size)
            if len(parts) < 2:
                yield from self.backend.gradients(params, lists, names)
                continue
            contents = {}
            for rank, part in parts.items():
                contents[rank] = {
                    "params": dict(params),
                    "names": list(names),
                    "positions": list(lists[part]),
                }
            for gradients in self._compute_on_ranks("gradients", contents):
                yield from gradients

    def _compute_on_ranks(self, kind: str, contents: Mapping[int, Mapping[str, Any]]) -> list[Any]:
        """Return the results of all ranks in order, which is the order of clients and samples.

        `contents` holds the requests' contents by rank, for ranks that have a part of the work.
        """
        requests = {rank: Message(kind, content) for rank, content in contents.items() if rank != 0}

        def compute_here() -> list[Any]:
            return [self._holdings.compute(kind, contents[0])] if 0 in contents else []

        results, answers = self._others.ask(requests, compute_here)
        return results + [answers[rank].content["result"] for rank in sorted(answers)]


def train_part(backend: Backend, start: Sequence[Params], part: Schedule) -> TrainingResult:
    """Train the clients of a part of a schedule, with the bits that they have in the whole.

    If they are fewer than `fewest_clients`, some are trained several times, and the additional
    results are dropped.
    """
    count = len(part)
    if count >= backend.fewest_clients:
        return backend.train(start, part)
    rows = np.arange(backend.fewest_clients) % count
    repeated_start = [start[row] for row in rows.tolist()]
    return backend.train(repeated_start, part.rows(rows)).rows(slice(count))


def split_evenly(work: Sequence[int] | Ints, num_parts: int, unit: int = 1) -> dict[int, slice]:
    """Cut a sequence of items into consecutive parts, so that their work is most even.

    `work` holds the work of each item. An item consists of `unit` samples; the last one may have
    fewer. Returns the samples of each part that is not empty, by the number of the part.
    """
    work_before = np.cumsum([0, *work])  # before each item, and in the end of all
    cuts = [0]
    for part in range(1, num_parts):
        # Ideally the work before the cut is total * part / num_parts. Both sides are integers here.
        distances = np.abs(work_before * num_parts - work_before[-1] * part)
        cuts.append(int(distances.argmin()))
    cuts.append(len(work))
    parts = {}
    for part, (first, last) in enumerate(pairwise(cuts)):
        if last > first:
            parts[part] = slice(first * unit, last * unit)
    return parts
