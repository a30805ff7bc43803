"""Record the work that a function gives to a device, and replay it.

On a GPU the recordings are CUDA graphs. Each kernel that Python starts costs a launch by the host;
a replayed graph costs one launch for all its kernels. The function's Python does not run again, and
the kernels use the same addresses.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

Body = Callable[[], None]
"""A step, a preparation or a replay: it takes and returns nothing, and works on static tensors."""
WARM_UPS = 2
"""Number of steps before a capture. In these, libraries choose kernels and allocate workspaces."""
FIRST_WITH_OWN_WORKSPACES = "2.15"
"""The first torch whose graphs hold cuBLAS's workspace themselves. Before, the workspace is the
stream's, and the end of one graph frees it (issue 193402 of pytorch/pytorch). That is harmless if
it lies in the pool that the stream's graphs share."""


class NotRecordedError(Exception):
    """A step that cannot be recorded, such as a step in which the host waits."""


class Recorder:
    """A recorder that records nothing: its replays run the steps' Python each time.

    It is the base of `CudaGraphs`. By itself it serves where nothing can be recorded, for the
    `reason`. What a caller records must obey three rules:

    - A step works on static tensors only, whose memory is neither freed nor moved.
    - A later step needs none of the tensors that a step creates.
    - A track (0, 1, ...) is a sequence of replays. Steps of different tracks share no tensor that
      either writes, so replays of different tracks may run side by side.
    """

    description: str
    """A few words for the summary on what it does."""

    def __init__(self, reason: str) -> None:
        self.description = f"step by step ({reason})"

    def record(self, step: Body, times: int, prepare: Body, track: int) -> Body:
        """Return a function that does the same as `times` calls of `step`.

        It works on what the tensors hold when it is called. While `record` runs, it may call `step`
        for a trial, each time after `prepare`, which makes the trial harmless. Raises
        `NotRecordedError` if `step` cannot be recorded.
        """

        def body() -> None:
            for _ in range(times):
                step()

        return body

    def side_by_side(self, tracks: int) -> AbstractContextManager[None]:
        """Return a context in which replays of different tracks may run side by side.

        All of them are done when it ends.
        """
        return nullcontext()


class SideStream:
    """A second stream for a part of a step, which then runs next to the rest of the step.

    Tensors that a part uses must not be freed before `join`: their memory could be given to the
    rest. On a CPU everything runs in order.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def part(self) -> Iterator[None]:
        """Run what is in the context next to what comes after it, until `join`."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let the current stream wait for all parts."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


class CudaGraphs(Recorder):
    """A recorder that makes CUDA graphs.

    Each track is recorded and replayed on a stream of its own, because libraries keep a workspace
    for each stream. A single track is replayed on the current stream. The graphs of a stream share
    a pool of memory: they are replayed one after another, and none leaves a tensor in it.
    """

    MAX_STREAMS = 16
    description = "CUDA graphs"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = [torch.cuda.Stream(device) for _ in range(self.MAX_STREAMS)]
        self._pools: dict[int, Any] = {}
        self._forked: Sequence[torch.cuda.Stream] = ()

    def record(self, step: Body, times: int, prepare: Body, track: int) -> Body:
        # More tracks than streams share them. Replays of one stream run one after another.
        number = track % self.MAX_STREAMS
        stream = self._streams[number]
        with torch.cuda.device(self.device):
            self._warm_up(step, prepare, stream)
            if number not in self._pools:
                self._pools[number] = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            prepare()
            if torch.__version__ < FIRST_WITH_OWN_WORKSPACES:
                # Free the warm-up's workspaces, so that the capture takes new ones from the pool.
                torch._C._cuda_clearCublasWorkspaces()
            try:
                with torch.cuda.graph(graph, pool=self._pools[number], stream=stream):
                    for _ in range(times):
                        step()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise NotRecordedError(str(error).strip().partition("\n")[0][:200]) from error
        return partial(self._replay, graph, number)

    def _warm_up(self, step: Body, prepare: Body, side: torch.cuda.Stream) -> None:
        """Make steps on a side stream, as PyTorch's notes on CUDA graphs ask for."""
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                prepare()
                step()
        current.wait_stream(side)

    def _replay(self, graph: torch.cuda.CUDAGraph, number: int) -> None:
        stream = self._forked[number] if self._forked else None  # None: the current stream
        with torch.cuda.stream(stream):
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
    """Return a recorder of CUDA graphs on a CUDA device, otherwise one that records nothing."""
    if device.type == "cuda":
        return CudaGraphs(device)
    return Recorder(f"no CUDA graphs on device {device.type}")
