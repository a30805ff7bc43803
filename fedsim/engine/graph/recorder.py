"""Record what a function makes a device do, and replay it: the host then launches once what it launched many times."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from rich.console import Console

WARM_UPS = 2
"""Calls before a capture: libraries choose their kernels and allocate their workspaces in the first ones."""

Body = Callable[[], None]


class Recorder(ABC):
    """Records bodies that work on static tensors alone, and leave nothing behind that a later one needs."""

    @property
    @abstractmethod
    def description(self) -> str:
        """What it does, in a few words, for the summary."""

    @abstractmethod
    def record(self, body: Body, prepare: Body) -> Body:
        """What does the same as `body` whenever it is called, on what the tensors hold then.

        `body` itself may be called for it, each time after `prepare`, which makes that harmless.
        """

    def streams(self, count: int) -> Sequence[torch.cuda.Stream]:
        """At most so many streams for parts of a body that may run side by side; none where they cannot."""
        return ()


class CudaGraphs(Recorder):
    """CUDA graphs. All share one pool of memory, which is right because they are replayed one after another and none
    leaves a tensor behind in it."""

    MOST_STREAMS = 16

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: tuple[int, int] | None = None
        self._streams: list[torch.cuda.Stream] = []

    @property
    def description(self) -> str:
        return "CUDA graphs"

    def record(self, body: Body, prepare: Body) -> Body:
        with torch.cuda.device(self.device):
            self._warm_up(body, prepare)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                body()
        return graph.replay

    def _warm_up(self, body: Body, prepare: Body) -> None:
        """On a stream of its own, as PyTorch's notes on CUDA graphs ask for."""
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                prepare()
                body()
        current.wait_stream(side)

    def streams(self, count: int) -> Sequence[torch.cuda.Stream]:
        count = min(count, self.MOST_STREAMS)
        while len(self._streams) < count:
            self._streams.append(torch.cuda.Stream(self.device))
        return self._streams[:count] if count > 1 else ()


class Eager(Recorder):
    """No recording: the body is called each time. `reason` is why."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    @property
    def description(self) -> str:
        return f"step by step ({self.reason})"

    def record(self, body: Body, prepare: Body) -> Body:
        return body


def recorder_for(device: torch.device) -> Recorder:
    """CUDA graphs on a CUDA device, else none."""
    return CudaGraphs(device) if device.type == "cuda" else Eager(f"no CUDA graphs on device {device.type}")


@functools.cache
def warn_not_recorded(failure: str) -> None:
    """Print the reason to stderr, once a process however many recordings fail for it."""
    text = f"engine=graph: not recorded, which is slower and else the same: {failure}"
    Console(stderr=True).print(text, soft_wrap=True, markup=False)


def side_by_side(streams: Sequence[torch.cuda.Stream], jobs: Sequence[Body]) -> None:
    """Do the jobs, which need nothing of each other, in turns on `streams` (none: one after another) and go on when
    all are done. In a capture, streams become branches of the graph."""
    if not streams:
        for job in jobs:
            job()
        return
    current, used = torch.cuda.current_stream(), streams[: len(jobs)]
    for stream in used:
        stream.wait_stream(current)
    for number, job in enumerate(jobs):
        with torch.cuda.stream(used[number % len(used)]):
            job()
    for stream in used:
        current.wait_stream(stream)
