"""Messages between ranks by torch.distributed: gloo between CPUs, NCCL between GPUs.

Nothing is pickled: a message's content is JSON (`fedsim.core.encoding`), followed by the bytes of
its tensors.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fedsim.core.encoding import decode, encode
from fedsim.core.errors import FedsimError
from fedsim.core.types import Correction
from fedsim.engine.backend import TrainingResult
from fedsim.engine.schedule import Schedule

DATACLASSES = {
    f"{cls.__module__}.{cls.__qualname__}": cls for cls in (Schedule, Correction, TrainingResult)
}
"""Those that messages may hold."""


@dataclass(frozen=True)
class Message:
    """`content`: values that `encode` knows; tensors lie on the CPU or on the device of the
    rank."""

    kind: str
    content: Mapping[str, Any] = field(default_factory=dict)


def packed(message: Message) -> tuple[bytes, list[Tensor]]:
    """The JSON of a message, and the bytes of its tensors: of those on the CPU, and of those on a
    GPU."""
    tensors: dict[str, Tensor] = {}
    content = encode(dict(message.content), tensors, message.kind, DATACLASSES)
    kinds = [
        [str(value.dtype).removeprefix("torch."), [*value.shape], value.is_cuda]
        for value in tensors.values()
    ]
    head = json.dumps({"kind": message.kind, "content": content, "tensors": kinds}).encode()
    flat: dict[bool, list[Tensor]] = {False: [torch.empty(0, dtype=torch.uint8)], True: []}
    for value in tensors.values():
        flat[value.is_cuda].append(value.view(-1).view(torch.uint8))
    return head, [torch.cat(parts) for parts in flat.values() if parts]


def room_for(head: bytes, device: torch.device) -> list[Tensor]:
    """Where the bytes of the tensors of a message are to be received."""
    sizes = {False: 0}
    for name, shape, on_gpu in json.loads(head)["tensors"]:
        sizes[on_gpu] = sizes.get(on_gpu, 0) + math.prod(shape) * getattr(torch, name).itemsize
    return [
        torch.empty(size, dtype=torch.uint8, device=device if gpu else "cpu")
        for gpu, size in sizes.items()
    ]


def unpacked(head: bytes, flat: list[Tensor], device: torch.device) -> Message:
    """The message of `packed`, with tensors in memory of their own."""
    told, tensors, starts = json.loads(head), {}, [0, 0]
    for number, (name, shape, on_gpu) in enumerate(told["tensors"]):
        dtype = getattr(torch, name)
        start, starts[on_gpu] = starts[on_gpu], starts[on_gpu] + math.prod(shape) * dtype.itemsize
        tensors[str(number)] = flat[on_gpu][start : starts[on_gpu]].clone().view(dtype).view(shape)
    return Message(told["kind"], decode(told["content"], tensors, device, DATACLASSES))


T = TypeVar("T")

WORKING = timedelta(days=1)
"""How long a rank may work between two messages. One that dies is noticed at once, because its
connection breaks."""


class LostRankError(FedsimError):
    """Another rank has ended, or cannot be reached any more."""

    def __init__(self, rank: int, size: int, reason: str) -> None:
        text = f"rank {rank} of {size} has ended or cannot be reached any more ({reason})"
        super().__init__(
            f"{text}; the same command goes on from the last checkpoint, if there is one"
        )


class Link:
    """The connections of this rank to the others, by the process group of torch.distributed that
    this process has joined: `size` ranks, whose tensors on GPUs arrive on `device`. Raises
    `LostRankError` where one has ended."""

    def __init__(self, size: int) -> None:
        self.size, self.device = size, torch.device("cpu")

    def send(self, rank: int, message: Message) -> None:
        head, flat = packed(message)
        text = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        for part in (torch.tensor([len(head)]), text, *flat):
            if part.numel():
                self._wait(rank, partial(dist.isend, part, rank))

    def receive(self, rank: int) -> Message:
        """The next message of the rank."""
        length = self._received(rank, torch.empty(1, dtype=torch.int64))
        head = self._received(rank, torch.empty(int(length), dtype=torch.uint8)).numpy().tobytes()
        flat = [
            self._received(rank, part) if part.numel() else part
            for part in room_for(head, self.device)
        ]
        return unpacked(head, flat, self.device)

    def _received(self, rank: int, into: Tensor) -> Tensor:
        self._wait(rank, partial(dist.irecv, into, rank))
        return into

    def _wait(self, rank: int, begin: Callable[[], "dist.Work | None"]) -> None:
        try:
            work = begin()
            assert work is not None
            work.wait(WORKING)
        except RuntimeError as error:
            reason = str(error).partition("] ")[2] or str(error)
            raise LostRankError(rank, self.size, reason.partition(". ")[0].strip()) from error


class Others:
    """The other ranks as rank 0 sees them: they answer questions, side by side. `size`: of all,
    with this one.

    `in_step`: no answer is outstanding, so that they wait for the next message; `lost`: one has
    ended.
    """

    def __init__(self, link: Link) -> None:
        self.link, self.size, self.in_step = link, link.size, True
        self.lost: LostRankError | None = None

    def ask(
        self, requests: Mapping[int, Message], own: Callable[[], T]
    ) -> tuple[T, dict[int, Message]]:
        """What `own` returns, and the answers of the ranks of `requests`, which work meanwhile.

        Raises what `own` raises, or an error that names the first rank that has raised anything.
        """
        if self.lost is not None:
            raise self.lost
        self.in_step = False
        try:
            for rank, request in requests.items():
                self.link.send(rank, request)
            failure: Exception | SystemExit | None = None
            try:
                result = own()
            except (Exception, SystemExit) as error:  # of a user's class
                failure = error
            answers = {rank: self.link.receive(rank) for rank in requests}
        except LostRankError as error:
            self.lost = error
            raise
        self.in_step = True
        if failure is not None:
            raise failure
        for rank, answer in answers.items():
            if answer.kind == "error" and answer.content["known"]:
                raise FedsimError(f"rank {rank}: {answer.content['text']}")
            if answer.kind == "error":
                raise RuntimeError(f"rank {rank} has raised\n{answer.content['traceback']}")
        return result, answers
