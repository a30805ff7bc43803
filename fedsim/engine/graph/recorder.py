"""Record what a function makes a device do, and replay it: the host then launches once what it
launched many times."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

WARM_UPS = 2
"""Steps before a capture: libraries choose their kernels and allocate their workspaces in the first
ones."""

Body = Callable[[], None]


class NotRecordedError(Exception):
    """A step that cannot be recorded, such as one that makes the host wait."""


FIRST_WITH_OWN_WORKSPACES = "2.15"
"""The first torch whose graphs hold cuBLAS's workspace themselves. Before, it is the stream's, and
the end of one graph frees it (issue 193402 of pytorch/pytorch), which is harmless if it lies in the
pool that the stream's graphs share."""


class Recorder:
    """What takes steps on static tensors alone, which leave nothing in new memory that a later one
    needs. This one records nothing and takes them each time; `reason` is why.

    Steps of different `track`s (0, 1, ...) share no tensor that either writes; their replays may
    run side by side.
    """

    description: str
    """What it does, in a few words, for the summary."""

    def __init__(self, reason: str) -> None:
        self.description = f"step by step ({reason})"

    def record(self, step: Body, times: int, prepare: Body, track: int) -> Body:
        """What does the same as so many calls of `step` whenever it is called, on what the tensors
        hold then.

        `step` itself may be called for it, after `prepare`, which makes that harmless. Raises
        `NotRecordedError` where that cannot be.
        """

        def body() -> None:
            for _ in range(times):
                step()

        return body

    def side_by_side(self, tracks: int) -> AbstractContextManager[None]:
        """What is replayed inside may run side by side where the tracks differ; all is done behind
        it."""
        return nullcontext()


class CudaGraphs(Recorder):
    """CUDA graphs, those of a track recorded and replayed on a stream of its own (libraries keep a
    workspace for each); with one track, replayed on the current stream. Those of a stream share a
    pool of memory, which is right because they are replayed one after another and none leaves a
    tensor behind in it."""

    MOST_STREAMS = 16
    description = "CUDA graphs"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = [torch.cuda.Stream(device) for _ in range(self.MOST_STREAMS)]
        self._pools: dict[int, Any] = {}
        self._forked: Sequence[torch.cuda.Stream] = ()

    def record(self, step: Body, times: int, prepare: Body, track: int) -> Body:
        number = track % self.MOST_STREAMS
        with torch.cuda.device(self.device):
            self._warm_up(step, prepare, self._streams[number])
            if number not in self._pools:
                self._pools[number] = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            prepare()
            if torch.__version__ < FIRST_WITH_OWN_WORKSPACES:
                # those of the warm-up: the capture takes new ones in the pool
                torch._C._cuda_clearCublasWorkspaces()
            try:
                with torch.cuda.graph(
                    graph, pool=self._pools[number], stream=self._streams[number]
                ):
                    for _ in range(times):
                        step()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise NotRecordedError(str(error).strip().partition("\n")[0][:200]) from error
        return partial(self._replay, graph, number)

    def _warm_up(self, step: Body, prepare: Body, side: torch.cuda.Stream) -> None:
        """On another stream than the current one, as PyTorch's notes on CUDA graphs ask for."""
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                prepare()
                step()
        current.wait_stream(side)

    def _replay(self, graph: torch.cuda.CUDAGraph, number: int) -> None:
        with torch.cuda.stream(
            self._forked[number] if self._forked else None
        ):  # None: the current one
            graph.replay()

    @contextmanager
    def side_by_side(self, tracks: int) -> Iterator[None]:
        current = torch.cuda.current_stream(self.device)
        self._forked = self._streams[:tracks] if tracks > 1 else ()
        for stream in self._forked:
            stream.wait_stream(current)
        try:
            yield
        finally:
            for stream in self._forked:
                current.wait_stream(stream)
            self._forked = ()


def recorder_for(device: torch.device) -> Recorder:
    """CUDA graphs on a CUDA device, else none."""
    return (
        CudaGraphs(device)
        if device.type == "cuda"
        else Recorder(f"no CUDA graphs on device {device.type}")
    )
