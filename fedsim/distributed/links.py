"""Messages between ranks by torch.distributed: gloo between CPUs, NCCL between GPUs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fedsim.distributed.messages import Message, head_of, read_head
from fedsim.errors import FedsimError

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
