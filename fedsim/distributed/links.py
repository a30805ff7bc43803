"""Messages between ranks by torch.distributed: gloo between CPUs, NCCL between GPUs.

Nothing is pickled: a message's content is JSON (`fedsim.core.encoding`), followed by the bytes of each of its tensors.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fedsim.core.encoding import decode, encode
from fedsim.core.errors import FedsimError
from fedsim.engine.backend import TrainingResult
from fedsim.engine.schedule import Schedule

DATACLASSES = {f"{cls.__module__}.{cls.__qualname__}": cls for cls in (Schedule, TrainingResult)}
"""Those that messages may hold."""


@dataclass(frozen=True)
class Message:
    """`content`: values that `encode` knows; tensors lie on the CPU or on the device of the rank."""

    kind: str
    content: Mapping[str, Any] = field(default_factory=dict)


def packed(message: Message) -> tuple[bytes, list[Tensor]]:
    """The JSON of a message, and its tensors, which are contiguous."""
    tensors: dict[str, Tensor] = {}
    content = encode(dict(message.content), tensors, message.kind, DATACLASSES)
    kinds = [[str(value.dtype).removeprefix("torch."), [*value.shape], value.is_cuda] for value in tensors.values()]
    return json.dumps({"kind": message.kind, "content": content, "tensors": kinds}).encode(), [*tensors.values()]


def room_for(head: bytes, device: torch.device) -> list[Tensor]:
    """Where the tensors of a message are to be received."""
    kinds = json.loads(head)["tensors"]
    return [
        torch.empty(shape, dtype=getattr(torch, name), device=device if gpu else "cpu") for name, shape, gpu in kinds
    ]


def unpacked(head: bytes, tensors: list[Tensor], device: torch.device) -> Message:
    """The message of `packed`, with tensors in memory of their own."""
    told, named = json.loads(head), {str(number): value for number, value in enumerate(tensors)}
    return Message(told["kind"], decode(told["content"], named, device, DATACLASSES))


T = TypeVar("T")

WORKING = timedelta(days=1)
"""How long a rank may work between two messages. One that dies is noticed at once, because its connection breaks."""


class LostRankError(FedsimError):
    """Another rank has ended, or cannot be reached any more."""

    def __init__(self, rank: int, size: int, reason: str) -> None:
        text = f"rank {rank} of {size} has ended or cannot be reached any more ({reason})"
        super().__init__(f"{text}; the same command goes on from the last checkpoint, if there is one")


class Link:
    """The connections of this rank to the others, by the process group of torch.distributed that this process has
    joined: `size` ranks, whose tensors on GPUs arrive on `device`. Raises `LostRankError` where one has ended."""

    def __init__(self, size: int) -> None:
        self.size, self.device = size, torch.device("cpu")

    def send(self, rank: int, message: Message) -> None:
        head, tensors = packed(message)
        text = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self._move(rank, dist.isend, [torch.tensor([len(head)]), text, *tensors])

    def receive(self, rank: int) -> Message:
        """The next message of the rank."""
        length = torch.empty(1, dtype=torch.int64)
        self._move(rank, dist.irecv, [length])
        text = torch.empty(int(length), dtype=torch.uint8)
        self._move(rank, dist.irecv, [text])
        head = text.numpy().tobytes()
        room = room_for(head, self.device)
        self._move(rank, dist.irecv, room)
        return unpacked(head, room, self.device)

    def _move(self, rank: int, begin: Callable[[Tensor, int], "dist.Work | None"], parts: Sequence[Tensor]) -> None:
        """Send or receive tensors, as their bytes: a backend does not know all types."""
        try:
            for work in [begin(part.view(-1).view(torch.uint8), rank) for part in parts if part.numel()]:
                assert work is not None
                work.wait(WORKING)
        except RuntimeError as error:
            reason = str(error).partition("] ")[2] or str(error)
            raise LostRankError(rank, self.size, reason.partition(". ")[0].strip()) from error


class Others:
    """The other ranks as rank 0 sees them: they answer questions, side by side. `size`: of all, with this one.

    `in_step`: no answer is outstanding, so that they wait for the next message; `lost`: one has ended.
    """

    def __init__(self, link: Link) -> None:
        self.link, self.size, self.in_step = link, link.size, True
        self.lost: LostRankError | None = None

    def ask(self, requests: Mapping[int, Message], own: Callable[[], T]) -> tuple[T, dict[int, Message]]:
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
