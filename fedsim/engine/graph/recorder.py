"""Where the tensors of a model lie in one flat buffer, a row a client.

The models of R clients while they train: static buffers, so that recorded steps find them where they were.

Record what a function makes a device do, and replay it: the host then launches once what it launched many times.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.core.types import Params, Stack
from fedsim.engine.model import trained_names, traveling

ALIGNMENT = 32
"""Every tensor starts at a multiple of so many elements: 128 bytes in float32, what vectorised loads ask for."""


@dataclass(frozen=True)
class Slot:
    """A tensor's place: `size` elements from `first` on. `channels_last`: its second axis varies fastest."""

    name: str
    shape: tuple[int, ...]
    first: int
    channels_last: bool

    @property
    def size(self) -> int:
        return int(torch.Size(self.shape).numel())

    @property
    def padding(self) -> int:
        """Unused elements behind it."""
        return -self.size % ALIGNMENT

    def of(self, flat: Tensor) -> Tensor:
        """Its part of `flat` [R, P], as [R, *shape]; shares memory."""
        part = flat[:, self.first : self.first + self.size]
        if not self.channels_last:
            return part.view(len(flat), *self.shape)
        outputs, inputs, height, width = self.shape
        return part.view(len(flat), outputs, height, width, inputs).permute(0, 1, 4, 2, 3)

    @property
    def columns(self) -> Tensor:
        """Where its elements lie, in the order that they have in a contiguous tensor [size]."""
        return self.of(torch.arange(self.first + self.size).unsqueeze(0)).reshape(-1)

    def flattened(self, value: Tensor) -> Tensor:
        """The elements of `value` [*shape] in the order in which they lie here, [size]."""
        return (value.permute(0, 2, 3, 1) if self.channels_last else value).reshape(-1)


class Layout:
    """The order of tensors shaped as those of `model` in a row of `width` elements of the kind of `like`."""

    def __init__(self, model: Params, like: Tensor, *, channels_last: bool) -> None:
        self.slots: list[Slot] = []
        self.width = 0
        for name, value in model.items():
            self.slots.append(Slot(name, tuple(value.shape), self.width, channels_last and value.dim() == 4))
            self.width += self.slots[-1].size + self.slots[-1].padding
        self._zeros = like.new_zeros(ALIGNMENT)

    def views(self, flat: Tensor) -> Stack:
        """The tensors in `flat` [R, width], each [R, ...], by name; share memory."""
        return {slot.name: slot.of(flat) for slot in self.slots}

    def parts(self, model: Params) -> list[Tensor]:
        """What makes up a row that holds `model`, in order."""
        parts: list[Tensor] = []
        for slot in self.slots:
            parts.append(slot.flattened(model[slot.name]))
            if slot.padding:
                parts.append(self._zeros[: slot.padding])
        return parts

    def rows(self, models: Sequence[Params]) -> Tensor:
        """A new buffer [len(models), width] that holds the models, zeros in between."""
        if not self.slots:
            return self._zeros.new_empty(len(models), 0)
        return torch.cat([part for model in models for part in self.parts(model)]).view(len(models), self.width)


class State:
    """`flat` [R, P] holds the parameters that are trained, `statistics` [R, Q] the other tensors that travel (running
    statistics of BatchNorm); `views` and `statistics_views` are the same by name. `grads` [R, P] is for gradients,
    zero between the tensors.

    `channels_last`: four-dimensional parameters lie with their second axis last.
    """

    def __init__(
        self, layout: Layout, statistics_layout: Layout, flat: Tensor, grads: Tensor, statistics: Tensor
    ) -> None:
        self.layout, self.statistics_layout = layout, statistics_layout
        self.flat, self.grads, self.statistics = flat, grads, statistics
        self.views, self.grad_views = layout.views(flat), layout.views(grads)
        self.statistics_views = statistics_layout.views(statistics)

    @classmethod
    def of(cls, model: nn.Module, rows: int, like: Tensor, *, channels_last: bool = False) -> "State":
        """New buffers for so many models, all zero, of the kind of `like`."""
        tensors, trained = traveling(model), trained_names(model)
        rest = {name: value for name, value in tensors.items() if name not in set(trained)}
        layout = Layout({name: tensors[name] for name in trained}, like, channels_last=channels_last)
        statistics = Layout(rest, like, channels_last=False)
        widths = (layout.width, layout.width, statistics.width)
        return cls(layout, statistics, *(like.new_zeros(rows, width) for width in widths))

    @cached_property
    def _columns(self) -> Tensor:
        """Where the elements of all tensors lie in a row of `flat` and one of `statistics` behind it."""
        statistics = [slot.columns + self.layout.width for slot in self.statistics_layout.slots]
        return torch.cat([slot.columns for slot in self.layout.slots] + statistics).to(self.flat.device)

    @cached_property
    def _trained(self) -> int:
        return sum(slot.size for slot in self.layout.slots)

    def part(self, rows: slice) -> "State":
        """Those rows; shares memory."""
        return State(self.layout, self.statistics_layout, self.flat[rows], self.grads[rows], self.statistics[rows])

    def __len__(self) -> int:
        return len(self.flat)

    @torch.no_grad()
    def load(self, models: Sequence[Params], owner: Tensor) -> None:
        """Start row r from `models[owner[r]]`; `owner` [R] is on the device."""
        self._start = self._spread(self.layout.rows(models), owner)
        self._statistics_start = self._spread(self.statistics_layout.rows(models), owner)
        self.flat.copy_(self._start)
        self.statistics.copy_(self._statistics_start)

    def _spread(self, rows: Tensor, owner: Tensor) -> Tensor:
        return rows if len(rows) == 1 else rows.index_select(0, owner)

    @torch.no_grad()
    def changes(self, count: int) -> Tensor:
        """What the first `count` models have changed by since `load`, as rows that `named` takes, in new memory."""
        changed = self.flat[:count] - self._start[:count]
        if self.statistics_layout.slots:
            moved = self.statistics[:count] - self._statistics_start[:count]
            changed = torch.cat([changed, moved], dim=1)
        return changed.index_select(1, self._columns)

    @torch.no_grad()
    def packed(self, flat: Tensor) -> Tensor:
        """Rows that lie as those of `flat`, as `named` takes them, in new memory."""
        return flat.index_select(1, self._columns[: self._trained])

    def named(self, rows: Tensor) -> Stack:
        """Tensors by name, parameters first, from rows in which they lie one behind the other; share memory."""
        slots = [*self.layout.slots, *self.statistics_layout.slots]
        stack: Stack = {}
        first = 0
        for slot in slots:
            if first < rows.shape[1]:
                stack[slot.name] = rows[:, first : first + slot.size].view(len(rows), *slot.shape)
            first += slot.size
        return stack


WARM_UPS = 2
"""Steps before a capture: libraries choose their kernels and allocate their workspaces in the first ones."""

Body = Callable[[], None]


class NotRecordedError(Exception):
    """A step that cannot be recorded, such as one that makes the host wait."""


class Recorder(ABC):
    """Records steps that work on static tensors alone, and leave nothing in new memory that a later one needs.

    Steps of different `track`s (0, 1, ...) share no tensor that either writes; their replays may run side by side.
    """

    @property
    @abstractmethod
    def description(self) -> str:
        """What it does, in a few words, for the summary."""

    @abstractmethod
    def record(self, step: Body, times: int, prepare: Body, track: int) -> Body:
        """What does the same as so many calls of `step` whenever it is called, on what the tensors hold then.

        `step` itself may be called for it, after `prepare`, which makes that harmless. Raises `NotRecordedError` where
        that cannot be.
        """

    def side_by_side(self, tracks: int) -> AbstractContextManager[None]:
        """What is replayed inside may run side by side where the tracks differ; all is done behind it."""
        return nullcontext()


class CudaGraphs(Recorder):
    """CUDA graphs, those of a track recorded and replayed on a stream of its own.

    Those of a stream share a pool of memory, which is right because they are replayed one after another and none leaves
    a tensor behind in it. With one track, all is replayed on the current stream. (Libraries keep a workspace for each
    stream: steps recorded on one stream would share it while they run side by side.)
    """

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
            try:
                with torch.cuda.graph(graph, pool=self._pools[number], stream=self._streams[number]):
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
        if not self._forked:
            graph.replay()
            return
        with torch.cuda.stream(self._forked[number]):
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


class Eager(Recorder):
    """No recording: the steps are taken each time. `reason` is why."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    @property
    def description(self) -> str:
        return f"step by step ({self.reason})"

    def record(self, step: Body, times: int, prepare: Body, track: int) -> Body:
        def body() -> None:
            for _ in range(times):
                step()

        return body


FIRST_WITH_OWN_WORKSPACES = "2.15"
"""The first torch whose graphs hold cuBLAS's workspace themselves. Before, it is the stream's, and the end of one graph
takes it from the others that were recorded there (issue 193402 of pytorch/pytorch)."""


def recorder_for(device: torch.device, *, of_libraries: bool = True) -> Recorder:
    """CUDA graphs on a CUDA device, else none; `of_libraries`: the steps call cuBLAS or cuDNN."""
    if device.type != "cuda":
        return Eager(f"no CUDA graphs on device {device.type}")
    if of_libraries and torch.__version__ < FIRST_WITH_OWN_WORKSPACES:
        return Eager(f"CUDA graphs of libraries need torch {FIRST_WITH_OWN_WORKSPACES}")
    return CudaGraphs(device)
