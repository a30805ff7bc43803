"""A recording of operations that behaves as a CUDA graph, for tests without a GPU.

It keeps what a CUDA graph keeps: addresses of tensors, and the values of Python's numbers. An
operation for which the host would wait raises RuntimeError.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fedsim.engine.graph.recorder import Body, Recorder
from tests.pretended_cuda import WAITS, PretendedCard, held, is_view


class Tape(TorchDispatchMode):
    """A tape: while it is entered, operations are computed and recorded."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Callable[..., Any], Any, Any, list[Tensor | None]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        indexes = [index for index in args[1] if index is not None] if name == "index" else []
        # The size of a result that a mask selects depends on the mask's content.
        if name in WAITS or any(index.dtype in (torch.bool, torch.uint8) for index in indexes):
            raise RuntimeError(f"{name}: operation not permitted when stream is capturing")
        out = func(*args, **kwargs)
        if not is_view(func):  # A view is an address, which is known when the recording ends.
            inputs = {id(value) for value in _tensors((args, kwargs))}
            outputs = [None if id(value) in inputs else value for value in _tensors(out)]
            self._calls.append((func, args, kwargs, outputs))
        return out

    def forget(self) -> None:
        """Overwrite all new tensors, because replays may not rely on their content."""
        for _, _, _, outputs in self._calls:
            for output in outputs:
                if output is not None and output.is_floating_point() and output.numel():
                    held(output).fill_(torch.nan)

    @torch.no_grad()
    def replay(self) -> None:
        """Compute the operations again, on the same tensors."""
        for func, args, kwargs, outputs in self._calls:
            for old, new in zip(outputs, _tensors(func(*args, **kwargs)), strict=True):
                if old is not None and old is not new and old.numel():
                    held(old).copy_(held(new))  # This is no kernel of the recording.


class TapeGraph:
    """Takes the place of torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.tape = Tape()

    def replay(self) -> None:
        card = PretendedCard.entered
        with nullcontext() if card is None else card.replay():
            self.tape.replay()


@contextmanager
def captured(graph: TapeGraph, pool: Any = None, stream: Any = None) -> Iterator[None]:
    """Take the place of the context torch.cuda.graph."""
    card = PretendedCard.entered
    with nullcontext() if card is None else card.capture(), graph.tape:
        yield
    graph.tape.forget()


class TapeRecorder(Recorder):
    """A recorder on tapes."""

    description = "a tape"

    def __init__(self) -> None:
        self.tapes: list[TapeGraph] = []

    def record(self, step: Body, times: int, prepare: Body, track: int) -> Body:
        prepare()
        graph = TapeGraph()
        with captured(graph):
            for _ in range(times):
                step()
        self.tapes.append(graph)
        return graph.replay


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
