"""Ranks within one process: rank 0 is the test, the others answer as soon as they are asked."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fedsim.config.command_line import read_command_line
from fedsim.config.compose import check_jobs
from fedsim.distributed.links import Link, Message, Others, packed, unpacked
from fedsim.jobs.cli import run
from fedsim.jobs.prepare import compose_words
from fedsim.results.files import MODEL
from fedsim.running.ranks import RANKS, Worker
from tests import checkpoint_toys

WORDS = ("num_rounds=3", "tracker=files_only", "num_clients=12", "cohort_size=5")
RAGGED = ("partition=dirichlet_class",)


class LocalLink(Link):
    """Messages take the way through bytes that they take between processes."""

    def __init__(self, size: int, compose: Callable[[], Any]) -> None:
        super().__init__(size)
        self.workers = {rank: Worker(Link(0), compose) for rank in range(1, size)}
        self.waiting: dict[int, deque[Message]] = defaultdict(deque)
        self.kinds: list[str] = []

    def send(self, rank: int, message: Message) -> None:
        self.kinds.append(message.kind)
        self.waiting[rank].append(self.workers[rank].answered(copied(message)))

    def receive(self, rank: int) -> Message:
        return copied(self.waiting[rank].popleft())


def copied(message: Message) -> Message:
    """The message as it arrives."""
    return unpacked(*packed(message), torch.device("cpu"))


@contextmanager
def ranks(count: int, words: Sequence[str]) -> Iterator[LocalLink]:
    """`count` ranks for a command."""
    link = LocalLink(count, lambda: check_jobs(compose_words(read_command_line(words))))
    RANKS.others = Others(link)
    try:
        yield link
    finally:
        RANKS.others = None


def run_over(count: int, words: Sequence[str]) -> tuple[int, list[str]]:
    """The exit code of a command over `count` ranks, and the kinds of messages."""
    with ranks(count, words) as link:
        return run(words), link.kinds


def result(place: Path) -> list[Any]:
    """All of the runs in a folder that must not depend on the number of ranks."""
    return [_result_of(path.parent) for path in sorted(place.glob("*/*/config.yaml"))]


def _result_of(folder: Path) -> Any:
    records, summary, totals, _, names = checkpoint_toys.result(folder)
    kept = {k: v for k, v in summary.items() if k not in ("environment", "engine")}
    files = {
        name: (folder / name).read_bytes()
        for name in names & {MODEL, "clients.npz", "partition.npz"}
    }
    return folder.name, records, kept, totals, files, names


def equal_over(count: int, words: Sequence[str], more: Sequence[str] = ()) -> list[str]:
    """The kinds of messages of a run over `count` ranks, which is that of one process."""
    assert run([*words, *more, "output_dir=alone"]) == 0
    code, kinds = run_over(count, [*words, *more, f"output_dir=over{count}"])
    assert code == 0
    assert result(Path("alone")) == result(Path(f"over{count}"))
    return kinds
