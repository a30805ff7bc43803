"""Work cut into consecutive parts, one for each rank.

What a rank computes of a question that is divided among all of them: requests, and their answers.

Rank 0 computes its own parts by the same functions.

A backend whose work is divided among the ranks: rank 0 puts the parts together in the order of the clients.

Clients do not depend on each other, and nothing is added up across ranks: what comes back are the updates, gradients
and logits themselves. All sums are those of the program at rank 0, as it would do them alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.core.flat import as_columns
from fedsim.core.types import Params
from fedsim.distributed.links import (
    LostRankError,
    Message,
    Others,
    pack_models,
    pack_stack,
    unpack_models,
    unpack_stack,
)
from fedsim.engine.backend import Backend, TrainingResult
from fedsim.engine.engine import concatenate_results
from fedsim.engine.schedule import Schedule


def shares(work: Sequence[int] | NDArray[np.int64], count: int) -> list[slice]:
    """`count` consecutive slices of a list of items, some perhaps empty, cut where their `work` is the most even."""
    ends = np.cumsum([0, *work])
    cuts = [int(np.abs(ends * count - ends[-1] * part).argmin()) for part in range(1, count)]
    return [slice(first, last) for first, last in zip([0, *cuts], [*cuts, len(ends) - 1], strict=True)]


def aligned_shares(length: int, unit: int, count: int) -> list[slice]:
    """`count` consecutive slices of `length` samples, cut at multiples of `unit`, some perhaps empty."""
    units = -(-length // unit)
    cuts = shares(np.ones(units, np.int64), count)
    return [slice(cut.start * unit, min(cut.stop * unit, length)) for cut in cuts]


Positions = NDArray[np.int64]


@dataclass(frozen=True)
class Holdings:
    """What a rank has of a run: its backend, a model `like` those that are sent, and the sets of samples by name."""

    backend: Backend
    like: Params
    samples: Mapping[str, Tensor]

    def answer(self, request: Message) -> Message:
        """Compute what rank 0 asks for."""
        return ANSWERS[request.kind](self, request)


# --- local training ------------------------------------------------------------------------------------------------


def train_part(backend: Backend, start: Sequence[Params], part: Schedule) -> TrainingResult:
    """Train the clients of a part of a schedule. Where they are fewer than give the same bits as among all of them, one
    comes several times, and its further results are dropped."""
    count, fewest = len(part), backend.fewest_clients
    if count >= fewest:
        return backend.train(start, part)
    rows = np.arange(fewest) % count
    found = backend.train([start[row] for row in rows.tolist()], part.rows(rows))
    momentum = None if found.momentum is None else {name: value[:count] for name, value in found.momentum.items()}
    return TrainingResult(
        {name: value[:count] for name, value in found.delta.items()},
        found.losses[:count],
        momentum,
        None if found.finite is None else found.finite[:count],
    )


def train_request(start: Sequence[Params], part: Schedule, like: Params) -> Message:
    """To train the clients of `part`; models that several of them start from are sent once."""
    models = list({id(model): model for model in start}.values())
    number = {id(model): row for row, model in enumerate(models)}
    arrays = {
        "positions": part.positions,
        "counts": part.counts,
        "models": np.array([number[id(model)] for model in start]),
        **({} if part.keys is None else {"keys": part.keys}),
    }
    return Message("train", {"lr": part.lr}, arrays, pack_models(models, like))


def _trained(held: Holdings, request: Message) -> Message:
    arrays, models = request.arrays, unpack_models(_flat(request), held.like)
    part = Schedule(arrays["positions"], arrays["counts"], arrays.get("keys"), request.values["lr"])
    found = train_part(held.backend, [models[row] for row in arrays["models"]], part)
    stacks = [found.delta] if found.momentum is None else [found.delta, found.momentum]
    flat = [pack_stack(stack, held.like) for stack in stacks]
    values = {"momentum": None if found.momentum is None else [name for name in held.like if name in found.momentum]}
    kept = {"losses": found.losses, **({} if found.finite is None else {"finite": found.finite})}
    return Message("trained", values, kept, torch.cat(flat, dim=1).reshape(-1))


def read_trained(answer: Message, like: Params) -> TrainingResult:
    """What another rank has trained."""
    names = answer.values["momentum"]
    having = {} if names is None else {name: like[name] for name in names}
    losses = answer.arrays["losses"]
    rows, width = _flat(answer).view(len(losses), -1), sum(value.numel() for value in like.values())
    momentum = None if names is None else unpack_stack(rows[:, width:], having)
    return TrainingResult(unpack_stack(rows[:, :width], like), losses, momentum, answer.arrays.get("finite"))


# --- forward passes ------------------------------------------------------------------------------------------------


def forward_part(backend: Backend, params: Params, x: Tensor, part: slice, positions: Positions | None) -> Tensor:
    """Logits of a part of `x`, or of a part of its rows `positions`."""
    return backend.forward(params, x[part]) if positions is None else backend.forward(params, x, positions[part])


def forward_request(params: Params, name: str, part: slice, positions: Positions | None, like: Params) -> Message:
    """To pass a part of the samples called `name` through a model."""
    arrays = {} if positions is None else {"positions": positions[part]}
    values = {"samples": name, "part": [part.start, part.stop]}
    return Message("forward", values, arrays, pack_models([params], like))


def _passed(held: Holdings, request: Message) -> Message:
    (params,) = unpack_models(_flat(request), held.like)
    x, positions = held.samples[request.values["samples"]], request.arrays.get("positions")
    part = slice(*request.values["part"]) if positions is None else slice(None)
    logits = forward_part(held.backend, params, x, part, positions)
    return Message("passed", {"classes": logits.shape[1]}, {}, logits.reshape(-1))


def read_passed(answer: Message) -> Tensor:
    """The logits that another rank has computed [n, C]."""
    return _flat(answer).view(-1, answer.values["classes"])


# --- gradients -----------------------------------------------------------------------------------------------------


def gradients_request(params: Params, positions: Sequence[Positions], names: Sequence[str], like: Params) -> Message:
    """To compute the gradient for each list of positions."""
    arrays = {"positions": np.concatenate(positions), "lengths": np.array([len(own) for own in positions])}
    return Message("gradients", {"names": list(names)}, arrays, pack_models([params], like))


def _differentiated(held: Holdings, request: Message) -> Message:
    (params,) = unpack_models(_flat(request), held.like)
    ends = np.cumsum(request.arrays["lengths"])
    positions = np.split(request.arrays["positions"], ends[:-1])
    found = list(held.backend.gradients(params, positions, request.values["names"]))
    return Message("gradients", {"count": len(found)}, {}, torch.cat(found))


def read_gradients(answer: Message) -> list[Tensor]:
    """The gradients that another rank has computed, [D] each."""
    return list(_flat(answer).view(answer.values["count"], -1).unbind())


def _flat(message: Message) -> Tensor:
    assert message.flat is not None
    return message.flat


ANSWERS: Mapping[str, Callable[[Holdings, Message], Message]] = {
    "train": _trained,
    "forward": _passed,
    "gradients": _differentiated,
}
"""What is done with a request, by its kind."""


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
