"""Messages between ranks by torch.distributed: gloo between CPUs, NCCL between GPUs.

Nothing is pickled. A message is JSON (`fedsim.core.encoding`), followed by the bytes of its
tensors.
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
"""Dataclasses that messages may hold."""
MAX_WAIT = timedelta(days=1)
"""Maximum time that a rank waits for another rank, which may be working. If a rank dies, the others
notice it at once, because its connection breaks."""

T = TypeVar("T")


@dataclass(frozen=True)
class Message:
    """A message whose `content` are values that `encode` knows.

    Its tensors are on the CPU, or on the device of the rank.
    """

    kind: str
    content: Mapping[str, Any] = field(default_factory=dict)


def packed(message: Message) -> tuple[bytes, list[Tensor]]:
    """Return a message's JSON, and the bytes of its tensors as flat tensors.

    The first flat tensor has the bytes of all tensors on the CPU, and may be empty. If there are
    tensors on a GPU, a second one has theirs.
    """
    tensors: dict[str, Tensor] = {}
    content = encode(dict(message.content), tensors, message.kind, DATACLASSES)
    descriptions = []
    cpu_parts = [torch.empty(0, dtype=torch.uint8)]
    gpu_parts: list[Tensor] = []
    for value in tensors.values():
        dtype = str(value.dtype).removeprefix("torch.")
        descriptions.append([dtype, list(value.shape), value.is_cuda])
        parts = gpu_parts if value.is_cuda else cpu_parts
        parts.append(value.view(-1).view(torch.uint8))
    head = {"kind": message.kind, "content": content, "tensors": descriptions}
    flat = [torch.cat(parts) for parts in (cpu_parts, gpu_parts) if parts]
    return json.dumps(head).encode(), flat


def empty_tensors_for(head: bytes, device: torch.device) -> list[Tensor]:
    """Return tensors that can receive the flat tensors of a message with the JSON `head`."""
    cpu_size, gpu_size = 0, 0
    for dtype, shape, on_gpu in json.loads(head)["tensors"]:
        size = math.prod(shape) * getattr(torch, dtype).itemsize
        if on_gpu:
            gpu_size += size
        else:
            cpu_size += size
    flat = [torch.empty(cpu_size, dtype=torch.uint8)]
    if gpu_size:
        flat.append(torch.empty(gpu_size, dtype=torch.uint8, device=device))
    return flat


def unpacked(head: bytes, flat: list[Tensor], device: torch.device) -> Message:
    """Return the message that `packed` has packed, with tensors in memory of their own."""
    values = json.loads(head)
    tensors = {}
    num_read = [0, 0]  # bytes of flat[0] and flat[1]
    for number, (dtype_name, shape, on_gpu) in enumerate(values["tensors"]):
        dtype = getattr(torch, dtype_name)
        which = int(on_gpu)
        begin = num_read[which]
        num_read[which] += math.prod(shape) * dtype.itemsize
        part = flat[which][begin : num_read[which]].clone()
        tensors[str(number)] = part.view(dtype).view(shape)
    return Message(values["kind"], decode(values["content"], tensors, device, DATACLASSES))


class LostRankError(FedsimError):
    """An error that says that another rank has ended, or cannot be reached any more."""

    def __init__(self, rank: int, size: int, reason: str) -> None:
        super().__init__(
            f"rank {rank} of {size} has ended or cannot be reached any more ({reason}); the same "
            "command resumes from the last checkpoint, if there is one"
        )


class Link:
    """The connections of this rank to the others.

    They use the process group of torch.distributed that this process has joined. There are `size`
    ranks, and tensors on GPUs arrive on `device`. Methods raise `LostRankError` if the other rank
    has ended.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.device = torch.device("cpu")

    def send(self, rank: int, message: Message) -> None:
        """Send a message: the length of its JSON, the JSON, and the tensors' bytes."""
        head, flat = packed(message)
        text = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        for part in (torch.tensor([len(head)]), text, *flat):
            if part.numel():
                self._transfer(rank, partial(dist.isend, part, rank))

    def receive(self, rank: int) -> Message:
        """Return the next message of a rank."""
        length = self._receive_into(torch.empty(1, dtype=torch.int64), rank)
        text = self._receive_into(torch.empty(int(length), dtype=torch.uint8), rank)
        head = text.numpy().tobytes()
        flat = empty_tensors_for(head, self.device)
        for part in flat:
            if part.numel():
                self._receive_into(part, rank)
        return unpacked(head, flat, self.device)

    def _receive_into(self, tensor: Tensor, rank: int) -> Tensor:
        self._transfer(rank, partial(dist.irecv, tensor, rank))
        return tensor

    def _transfer(self, rank: int, begin: Callable[[], "dist.Work | None"]) -> None:
        """Call `begin`, which begins a transfer to or from a rank, and wait for the transfer."""
        try:
            work = begin()
            assert work is not None
            work.wait(MAX_WAIT)
        except RuntimeError as error:
            # gloo's text is "[<file>:<line>] <reason>. <advice>".
            reason = str(error).partition("] ")[2] or str(error)
            raise LostRankError(rank, self.size, reason.partition(". ")[0].strip()) from error


class Others:
    """The other ranks, as rank 0 sees them: they answer requests, side by side.

    - `size`: number of all ranks, including rank 0.
    - `in_step`: no answer is outstanding, so the others wait for the next message.
    - `lost`: the error of a rank that has ended, or None.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self.size = link.size
        self.in_step = True
        self.lost: LostRankError | None = None

    def ask(
        self, requests: Mapping[int, Message], compute_here: Callable[[], T]
    ) -> tuple[T, dict[int, Message]]:
        """Return the result of `compute_here`, and the answers of the ranks, which work meanwhile.

        `requests` and answers are by rank. If several things fail, the error of `compute_here` is
        raised first of all, then `LostRankError`, then an error that names the first rank whose
        answer is an error.
        """
        if self.lost is not None:
            raise self.lost
        self.in_step = False
        failure: Exception | SystemExit | None = None
        try:
            for rank, request in requests.items():
                self.link.send(rank, request)
            try:
                result = compute_here()
            except (Exception, SystemExit) as error:  # A user's class may raise anything.
                failure = error
            # The answers are received also after a failure. Then the ranks are in step again.
            answers = {rank: self.link.receive(rank) for rank in requests}
        except LostRankError as error:
            self.lost = error
            if failure is not None:
                raise failure from error
            raise
        self.in_step = True
        if failure is not None:
            raise failure
        for rank, answer in answers.items():
            if answer.kind != "error":
                continue
            if answer.content["known"]:
                raise FedsimError(f"rank {rank}: {answer.content['text']}")
            raise RuntimeError(f"rank {rank} has raised\n{answer.content['traceback']}")
        return result, answers
