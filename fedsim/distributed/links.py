"""Which of the processes of `torchrun` this one is. Needs the standard library alone.

Models, and stacks of them, as one flat tensor; names and shapes are those of a model that both sides have.

What ranks send each other: a kind, plain values and small arrays, and at most one flat tensor of numbers.

Nothing is pickled: values are JSON, arrays are in the format of safetensors, and the tensor goes as it is.

Messages between ranks by torch.distributed: gloo between CPUs, NCCL between GPUs.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import numpy as np
import safetensors
import safetensors.numpy
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from fedsim.core.errors import FedsimError
from fedsim.core.flat import flat_rows, split_flat
from fedsim.core.types import Params, Stack


def require_one_dtype(model: Params) -> None:
    """Raise `FedsimError` unless all tensors are of one type, as one flat tensor needs."""
    kinds = {str(value.dtype) for value in model.values()}
    if len(kinds) > 1:
        raise FedsimError(f"a model with tensors of types {sorted(kinds)} cannot be sent to other ranks; run it alone")


def pack_models(models: Sequence[Params], like: Params) -> Tensor:
    """M models [M * D], tensors in the order of `like`."""
    return torch.cat([model[name].detach().reshape(-1) for model in models for name in like])


def unpack_models(flat: Tensor, like: Params) -> list[Params]:
    """The models of `pack_models`, each tensor in memory of its own, aligned as torch does it."""
    size = sum(value.numel() for value in like.values())
    return [{name: part.clone() for name, part in split_flat(row, like).items()} for row in flat.view(-1, size)]


def pack_stack(stack: Stack, like: Params) -> Tensor:
    """K models [K, D], tensors in the order of `like`, those that the stack has."""
    return flat_rows({name: stack[name] for name in like if name in stack})


def unpack_stack(rows: Tensor, like: Params) -> Stack:
    """The models in `rows` [K, D], named and shaped as `like`; they share memory."""
    parts = rows.split([value.numel() for value in like.values()], dim=1)
    return {name: part.reshape(-1, *value.shape) for (name, value), part in zip(like.items(), parts, strict=True)}


Arrays = Mapping[str, NDArray[Any]]
DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)}
"""Of models, updates and logits."""


@dataclass(frozen=True)
class Message:
    """`flat` [n] lies on the device of the rank."""

    kind: str
    values: Mapping[str, Any] = field(default_factory=dict)
    arrays: Arrays = field(default_factory=dict)
    flat: Tensor | None = None


def head_of(message: Message) -> bytes:
    """All of a message but for its tensor, of which it says size and type."""
    tensor = None if message.flat is None else [message.flat.numel(), str(message.flat.dtype)]
    text = json.dumps({"kind": message.kind, "values": message.values, "tensor": tensor})
    arrays = {name: np.ascontiguousarray(array) for name, array in message.arrays.items()}
    return safetensors.numpy.save(arrays, {"message": text})


def read_head(head: bytes, device: torch.device) -> Message:
    """The message of `head_of`, with memory for its tensor."""
    length = int.from_bytes(head[:8], "little")
    content = json.loads(json.loads(head[8 : 8 + length])["__metadata__"]["message"])
    flat = None
    if content["tensor"] is not None:
        size, dtype = content["tensor"]
        flat = torch.empty(size, dtype=DTYPES[dtype], device=device)
    return Message(content["kind"], content["values"], safetensors.numpy.load(head), flat)


T = TypeVar("T")

JOINING = timedelta(minutes=10)
"""How long ranks wait for each other at the start."""
WORKING = timedelta(days=1)
"""How long a rank may work between two messages. One that dies is noticed at once, because its connection breaks."""


class LostRankError(FedsimError):
    """Another rank has ended, or cannot be reached any more."""

    def __init__(self, rank: int, size: int, reason: str) -> None:
        super().__init__(f"rank {rank} of {size} has ended or cannot be reached any more ({reason})")
        self.rank = rank


class Link(ABC):
    """The connections of this rank to the others."""

    def __init__(self, size: int) -> None:
        """`size`: number of ranks."""
        self.size = size
        self.device = torch.device("cpu")
        """Where the tensors of messages are."""

    @abstractmethod
    def send(self, rank: int, message: Message) -> None:
        """Raises `LostRankError` if the rank has ended."""

    @abstractmethod
    def receive(self, rank: int) -> Message:
        """The next message of the rank. Raises `LostRankError` if it has ended."""


class TorchLink(Link):
    """By the process group of torch.distributed that this process has joined."""

    def send(self, rank: int, message: Message) -> None:
        head = torch.frombuffer(bytearray(head_of(message)), dtype=torch.uint8)
        parts = [torch.tensor([len(head)]), head]
        for part in parts if message.flat is None else [*parts, message.flat.contiguous()]:
            self._wait(rank, partial(dist.isend, part, rank))

    def receive(self, rank: int) -> Message:
        length = self._received(rank, torch.empty(1, dtype=torch.int64))
        head = self._received(rank, torch.empty(int(length), dtype=torch.uint8))
        message = read_head(np.asarray(head).tobytes(), self.device)
        if message.flat is not None:
            self._received(rank, message.flat)
        return message

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
    """The other ranks as rank 0 sees them: they answer questions, side by side.

    `in_step`: no answer is outstanding, so that they wait for the next message; `lost`: the error by which it was
    found that one has ended.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self.in_step = True
        self.lost: LostRankError | None = None

    @property
    def size(self) -> int:
        """Number of ranks, with this one."""
        return self.link.size

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
            raise_if_error(rank, answer)
        return result, answers


def error_message(error: BaseException, traceback: str) -> Message:
    """The answer of a rank that has raised `error`."""
    return Message("error", {"text": str(error), "known": isinstance(error, FedsimError), "traceback": traceback})


def raise_if_error(rank: int, answer: Message) -> None:
    """Raise what a rank has raised: `FedsimError` with its text, or RuntimeError with its traceback."""
    if answer.kind != "error":
        return
    if answer.values["known"]:
        raise FedsimError(f"rank {rank}: {answer.values['text']}")
    raise RuntimeError(f"rank {rank} has raised\n{answer.values['traceback']}")
