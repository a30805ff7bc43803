"""A recording of dispatched operations, for tests without a GPU: it keeps what a CUDA graph keeps,
addresses of tensors and the values of Python's numbers. What a capture may not hold, because the
host would wait for it, raises RuntimeError.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fedsim.engine.graph.recorder import Body, Recorder
from tests.pretended_cuda import WAITS, PretendedCard, held


class Tape(TorchDispatchMode):
    """While it is entered, operations are computed and kept; `replay` computes them again on the
    same tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Callable[..., Any], Any, Any, list[Tensor | None]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        masks = name == "index" and any(
            t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]
        )
        if name in WAITS or masks:  # whose result has a size that depends on a mask's content
            raise RuntimeError(f"{name}: operation not permitted when stream is capturing")
        out = func(*args, **kwargs)
        if any(
            r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
        ):
            return out  # a view is an address, which is known when the recording ends
        given = {id(value) for value in _tensors((args, kwargs))}
        self._calls.append(
            (func, args, kwargs, [None if id(t) in given else t for t in _tensors(out)])
        )
        return out

    def forget(self) -> None:
        """Overwrite what was computed between the inputs and the outputs: replays may not rely on
        it."""
        for _, _, _, outs in self._calls:
            for out in outs:
                if out is not None and out.is_floating_point() and out.numel():
                    held(out).fill_(torch.nan)

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, outs in self._calls:
            for old, new in zip(outs, _tensors(func(*args, **kwargs)), strict=True):
                if old is not None and old is not new and old.numel():
                    held(old).copy_(held(new))  # no kernel of the recording


class TapeGraph:
    """What takes the place of torch.cuda.CUDAGraph on a pretended device."""

    def __init__(self) -> None:
        self.tape = Tape()

    def replay(self) -> None:
        with _present("replay"):
            self.tape.replay()


@contextmanager
def captured(graph: TapeGraph, pool: Any = None, stream: Any = None) -> Iterator[None]:
    """What takes the place of the context torch.cuda.graph."""
    with _present("recording"), graph.tape:
        yield
    graph.tape.forget()


class TapeRecorder(Recorder):
    """Records on a tape; on a pretended CUDA device, a replay is one launch there."""

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


def _present(context: str) -> AbstractContextManager[None]:
    """A context of the pretended device, if there is one."""
    card = PretendedCard._entered
    return nullcontext() if card is None else getattr(card, context)()


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
