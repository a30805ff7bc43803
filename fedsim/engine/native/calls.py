"""Calls of `native.c`: its structures, and tensors as pointers."""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedsim.engine.model.chain import Chain, Link
from fedsim.engine.native.library import library
from fedsim.types import Params

_Int, _Pointer = ctypes.c_int64, ctypes.c_void_p


class _Link(ctypes.Structure):
    _fields_ = [
        *((name, _Int) for name in ("inputs", "outputs", "dropout", "kernel", "padding", "pool", "height", "width")),
        ("rate", ctypes.c_double),
    ]


class _Task(ctypes.Structure):
    _fields_ = [
        *((name, _Int) for name in ("links", "steps", "width", "threads")),
        *((name, _Pointer) for name in ("link", "start", "x", "y", "positions", "counts", "keys")),
        *((name, ctypes.c_double) for name in ("lr", "decay", "momentum")),
        ("nesterov", _Int),
        *((name, _Pointer) for name in ("result", "velocity", "losses")),
    ]


@dataclass(frozen=True)
class Rule:
    """SGD's, with the learning rate of a round."""

    lr: float
    decay: float = 0.0
    momentum: float = 0.0
    nesterov: bool = False


@dataclass(frozen=True)
class Work:
    """One call's samples: rows of `x` [n, ...] and `y` [n] (None where labels do not matter) at `positions`
    [steps, width], of which `counts` [steps] are valid; room for their `losses` [steps, width]; `keys` [steps] of
    dropout, if the model has any. All contiguous and on the CPU. So many `threads` share it, which changes nothing."""

    x: Tensor
    y: Tensor | None
    positions: NDArray[np.int64]
    counts: NDArray[np.int64]
    losses: NDArray[Any]
    keys: NDArray[np.int64] | None = None
    threads: int = 1


class ChainCalls:
    """The functions of `native.c` for a chain with the parameters `params`, and samples of `shape`. Threads may share
    it."""

    def __init__(self, chain: Chain, params: Params, shape: Sequence[int]) -> None:
        """Raises `NotCompiledError`, and `ValueError` where samples of this shape do not fit the chain."""
        self.params = params
        self.names = [name for link in chain.links for name in (link.weight, link.bias)]
        self.start = [None if name is None else params[name].contiguous() for name in self.names]
        self.dtype, self.shape = params[chain.links[0].weight].dtype, tuple(shape)
        self._library = library(self.dtype)
        links = _links(chain, params, shape)
        self._links = (_Link * len(links))(*links)
        self._start = _pointers(self.start)

    def train(self, work: Work, rule: Rule, delta: Params, velocity: Params | None) -> None:
        """Local training; fills `delta`, `velocity` (may be None) and `work.losses` [steps, width]."""
        self._call("train", work, rule, self._of(delta), None if velocity is None else self._of(velocity))

    def gradient(self, work: Work, result: Params) -> None:
        """Of the sum of the samples' cross-entropies in eval mode, into `result`; fills `work.losses`."""
        self._call("gradient", work, Rule(0.0), self._of(result), None)

    def outputs(self, work: Work, result: Tensor) -> None:
        """The logits of all samples in eval mode, into `result` [samples, C]."""
        self._call("outputs", work, Rule(0.0), _pointers([result]), None)

    def _of(self, params: Params) -> ctypes.Array[ctypes.c_void_p]:
        return _pointers([None if name is None else params[name] for name in self.names])

    def _call(
        self,
        name: str,
        work: Work,
        rule: Rule,
        result: ctypes.Array[ctypes.c_void_p],
        velocity: ctypes.Array[ctypes.c_void_p] | None,
    ) -> None:
        if work.x.dtype != self.dtype or tuple(work.x.shape[1:]) != self.shape:
            raise ValueError(f"samples are {work.x.dtype} {tuple(work.x.shape[1:])}, not {self.dtype} {self.shape}")
        task = _Task(
            links=len(self._links),
            steps=len(work.counts),
            width=work.positions.shape[1],
            threads=work.threads,
            link=ctypes.addressof(self._links),
            start=ctypes.addressof(self._start),
            x=work.x.data_ptr(),
            y=None if work.y is None else work.y.data_ptr(),
            positions=_address(work.positions),
            counts=_address(work.counts),
            keys=_address(work.keys),
            lr=rule.lr,
            decay=rule.decay,
            momentum=rule.momentum,
            nesterov=rule.nesterov,
            result=ctypes.addressof(result),
            velocity=None if velocity is None else ctypes.addressof(velocity),
            losses=_address(work.losses),
        )
        if getattr(self._library, name)(ctypes.byref(task)):
            raise MemoryError(f"no room for a model and its batch of {work.positions.shape[1]} samples")


def _links(chain: Chain, params: Params, shape: Sequence[int]) -> list[_Link]:
    """With the sizes of their images; those of a linear layer's inputs are what the convolutions have left.

    Raises `ValueError` where a layer does not take what it is given: C would read past it.
    """
    found: list[_Link] = []
    image = chain.links[0].kernel > 0
    channels, height, width = shape if image and len(shape) == 3 else (math.prod(shape), 1, 1)
    for link in chain.links:
        outputs, inputs = params[link.weight].shape[:2]
        given = channels if link.kernel else channels * height * width
        if given != inputs or min(height, width) < 1:
            raise ValueError(f"{link.weight} is for {inputs} inputs, not for {given} of {height} x {width} pixels")
        found.append(
            _Link(inputs, outputs, link.dropout, link.kernel, link.padding, link.pool, height, width, link.rate)
        )
        channels = outputs
        height, width = (_side_behind(link, side) for side in (height, width))
    return found


def _side_behind(link: Link, side: int) -> int:
    """Pixels of an image's side behind a layer, which leaves one if it is linear."""
    return (side + 2 * link.padding - link.kernel + 1) // (1 + link.pool) if link.kernel else 1


def _pointers(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    """An array of their addresses, 0 for None. They must outlive it, and be contiguous."""
    return (_Pointer * len(tensors))(*(None if t is None else t.data_ptr() for t in tensors))


def _address(array: NDArray[Any] | None) -> int | None:
    assert array is None or array.flags.c_contiguous
    return None if array is None else array.ctypes.data
