"""A backend that divides its work among ranks.

The work is cut into consecutive parts, one for each rank, and rank 0 puts the results together in
order. Clients do not depend on each other, and ranks send updates, gradients and logits, never sums
of them. Rank 0 adds up, as it would alone. So results do not depend on the number of ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.core.arrays import Ints
from fedsim.core.flat import as_columns
from fedsim.core.types import Params, Positions
from fedsim.distributed.links import Message, Others
from fedsim.engine.backend import Backend, TrainingResult, concatenate_results
from fedsim.engine.schedule import Schedule

WINDOW = 2**24
"""Maximum number of numbers in the gradients that a rank computes for one request. Rank 0 holds
64 MiB in float32 for each rank."""


@dataclass(frozen=True)
class Holdings:
    """The part of a run that a rank holds: its backend, and the sets of samples by name."""

    backend: Backend
    samples: Mapping[str, Tensor]

    def compute(self, kind: str, content: Mapping[str, Any]) -> Any:
        """Compute a part of the work: `train`, `forward` or `gradients`."""
        if kind == "train":
            start = [content["models"][number] for number in content["model_numbers"]]
            return train_part(self.backend, start, content["part"])
        params, positions = content["params"], content["positions"]
        if kind == "forward":
            x = self.samples[content["name"]]
            if content["part"] is not None:
                x = x[slice(*content["part"])]
            return self.backend.forward(params, x, positions)
        return list(self.backend.gradients(params, positions, content["names"]))


class DividedBackend(Backend):
    """The backend of rank 0, which gives parts of its work to the other ranks.

    All ranks hold the same as `holdings`, what rank 0 holds.
    """

    def __init__(self, holdings: Holdings, others: Others) -> None:
        self._holdings = holdings
        self._backend = holdings.backend
        self._others = others
        self.reason = self._backend.reason
        self.exact = self._backend.exact
        self.pass_size = self._backend.pass_size
        self.fewest_clients = self._backend.fewest_clients

    @property
    def description(self) -> str:
        return f"{self._backend.description}, over {self._others.size} processes"

    def train(self, start: Sequence[Params], schedule: Schedule) -> TrainingResult:
        parts = split_evenly(schedule.samples, self._others.size)
        if len(parts) < 2:
            return self._backend.train(start, schedule)
        contents = {}
        for rank, rows in parts.items():
            # A model from which several clients start is sent once.
            models = {id(model): dict(model) for model in start[rows]}
            numbers = {key: number for number, key in enumerate(models)}
            contents[rank] = {
                "models": list(models.values()),
                "model_numbers": [numbers[id(model)] for model in start[rows]],
                "part": schedule.rows(rows),
            }
        whole = concatenate_results(self._compute_on_ranks("train", contents), schedule)
        momentum = None if whole.momentum is None else as_columns(whole.momentum)
        return TrainingResult(as_columns(whole.delta), whole.losses, momentum, whole.finite)

    def forward(self, params: Params, x: Tensor, positions: Positions | None = None) -> Tensor:
        if positions is None:
            return self._forward(params, x, None)
        num_in_order = self._backend.num_passed_in_order(len(positions), x)
        if num_in_order == 0:
            return self._forward(params, x, positions)
        in_order = None
        if self._backend.buffer_size is not None:
            in_order = np.arange(num_in_order)  # `x` is a buffer for some of the samples.
        logits = self._forward(params, x, in_order)
        return logits[torch.as_tensor(positions, device=x.device)]

    def _forward(self, params: Params, x: Tensor, positions: Positions | None) -> Tensor:
        count = len(x) if positions is None else len(positions)
        pass_size = self._backend.pass_size
        passes = np.ones(-(-count // pass_size), np.int64)
        parts = split_evenly(passes, self._others.size, pass_size)
        known = [name for name, samples in self._holdings.samples.items() if samples is x]
        if len(parts) < 2 or not known:
            return self._backend.forward(params, x, positions)
        contents = {}
        for rank, part in parts.items():
            contents[rank] = {
                "params": dict(params),
                "name": known[0],
                "part": [part.start, part.stop] if positions is None else None,
                "positions": None if positions is None else positions[part],
            }
        return torch.cat(self._compute_on_ranks("forward", contents))

    def cross_entropies(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self._backend.cross_entropies(logits, labels)

    def hits(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self._backend.hits(logits, labels)

    def gradients(
        self, params: Params, positions: Sequence[Positions], names: Sequence[str]
    ) -> Iterator[Tensor]:
        size = sum(params[name].numel() for name in names)
        lists_at_once = self._others.size * max(WINDOW // max(size, 1), 1)
        for first in range(0, len(positions), lists_at_once):
            lists = positions[first : first + lists_at_once]
            parts = split_evenly([len(chosen) for chosen in lists], self._others.size)
            if len(parts) < 2:
                yield from self._backend.gradients(params, lists, names)
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
        """Return the results of all ranks in order, which is the order of clients and samples."""
        requests = {rank: Message(kind, content) for rank, content in contents.items() if rank}

        def compute_here() -> list[Any]:
            return [self._holdings.compute(kind, contents[0])] if 0 in contents else []

        results, answers = self._others.ask(requests, compute_here)
        return results + [answers[rank].content["result"] for rank in sorted(answers)]


def train_part(backend: Backend, start: Sequence[Params], part: Schedule) -> TrainingResult:
    """Train the clients of a part of a schedule, with the bits that they have in the whole.

    If they are fewer than `fewest_clients`, some are trained several times, and the additional
    results are dropped.
    """
    count, fewest = len(part), backend.fewest_clients
    if count >= fewest:
        return backend.train(start, part)
    rows = np.arange(fewest) % count
    repeated_start = [start[row] for row in rows.tolist()]
    return backend.train(repeated_start, part.rows(rows)).rows(slice(count))


def split_evenly(work: Sequence[int] | Ints, num_parts: int, unit: int = 1) -> dict[int, slice]:
    """Cut items with some `work` each into consecutive parts, so that work is most even.

    Returns the samples of the parts that are not empty, by the number of the part. An item has
    `unit` samples; the last one may have fewer.
    """
    ends = np.cumsum([0, *work])
    cuts = [0]
    for part in range(1, num_parts):
        distances = np.abs(ends * num_parts - ends[-1] * part)
        cuts.append(int(distances.argmin()))
    cuts.append(len(ends) - 1)
    parts = {}
    for part in range(num_parts):
        first, last = cuts[part], cuts[part + 1]
        if last > first:
            parts[part] = slice(first * unit, last * unit)
    return parts
