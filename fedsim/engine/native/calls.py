"""Calls of the compiled library: tensors and arrays are checked and passed as addresses, status
codes are raised.

The structures and status codes are those of `task.h`: change both together.
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from fedsim.core.arrays import Ints
from fedsim.core.types import Params
from fedsim.engine.chain import ChainLayer, LayerChain
from fedsim.engine.native.library import library

_Int, _Double, _Pointer = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


ERRORS = (
    "no memory for a model and its batch",
    "the layers of the chain do not fit each other",
    "the number of steps, samples or threads is out of range",
    "a count is out of range",
    "a position is out of range",
    "a label is out of range",
)
"""Of a function of the library: those of `enum status` behind 0, in their order."""


class LayerStruct(ctypes.Structure):
    """`struct layer_spec`."""

    _fields_ = [
        *(
            (name, _Int)
            for name in ("inputs", "outputs", "dropout_index", "kernel", "padding", "pool")
        ),
        *((name, _Int) for name in ("height", "width")),
        ("dropout_rate", _Double),
    ]


class TaskStruct(ctypes.Structure):
    """`struct task`. It holds addresses only; what they point to must outlive it."""

    _fields_ = [
        *(
            (name, _Int)
            for name in ("num_layers", "num_steps", "batch_size", "num_samples", "num_threads")
        ),
        *((name, _Pointer) for name in ("layers", "initial", "shift", "samples", "labels")),
        *((name, _Pointer) for name in ("positions", "counts", "dropout_keys")),
        *((name, _Double) for name in ("learning_rate", "weight_decay", "momentum")),
        ("nesterov", _Int),
        *((name, _Pointer) for name in ("result", "velocity", "losses", "finite")),
    ]


def layer_specs(
    chain: LayerChain, params: Params, shape: Sequence[int]
) -> ctypes.Array[LayerStruct]:
    """The layers of a chain with the sizes of their images, for samples of `shape`. Raises
    `ValueError` where a weight, a bias or the samples do not have the size that the layer needs: C
    would read past their end."""
    specs: list[LayerStruct] = []
    image = chain.links[0].kernel > 0
    channels, height, width = shape if image and len(shape) == 3 else (math.prod(shape), 1, 1)
    for link in chain.links:
        inputs = channels if link.kernel else channels * height * width
        outputs = _outputs(link, params, inputs, (height, width))
        specs.append(
            LayerStruct(
                inputs,
                outputs,
                link.dropout,
                link.kernel,
                link.padding,
                link.pool,
                height,
                width,
                link.rate,
            )
        )
        channels, height, width = outputs, _output_side(link, height), _output_side(link, width)
    return (LayerStruct * len(specs))(*specs)


def _outputs(link: ChainLayer, params: Params, inputs: int, sides: tuple[int, int]) -> int:
    """The number of a layer's outputs. Raises `ValueError` unless its parameters fit `inputs` and
    each other."""
    weight, bias = params[link.weight], None if link.bias is None else params[link.bias]
    outputs, expected = weight.shape[:2]
    if inputs != expected or min(sides) < 1:
        raise ValueError(
            f"{link.weight} is for {expected} inputs, not for {inputs} of {sides[0]} x {sides[1]} pixels"
        )
    if weight.shape[2:] != ((link.kernel,) * 2 if link.kernel else ()):
        raise ValueError(
            f"{link.weight} is {tuple(weight.shape)}, which is not for a kernel of {link.kernel}"
        )
    if bias is not None and bias.shape != (outputs,):
        raise ValueError(f"{link.bias} is {tuple(bias.shape)}, not for {outputs} outputs")
    return outputs


def _output_side(link: ChainLayer, side: int) -> int:
    return (side + 2 * link.padding - link.kernel + 1) // (1 + link.pool) if link.kernel else 1


@dataclass(frozen=True)
class SgdRule:
    """The update rule of SGD, with the learning rate of a round. `shift` is added to every gradient
    (None: nothing)."""

    lr: float
    decay: float = 0.0
    momentum: float = 0.0
    nesterov: bool = False
    shift: Params | None = None


@dataclass(frozen=True)
class SampleBatches:
    """The samples of one call: rows of `x` [n, ...] and of the labels `y` [n] (int64; None where
    they are not needed).

    `positions` [steps, width] int64 are those rows, of which the first `counts` [steps] of each
    step are valid; `losses` [steps, width] receives the cross-entropies of the valid ones; `keys`
    [steps] int64 are the steps' dropout keys, needed to train a model that has dropout. All
    contiguous and on the CPU. The number of `threads` that share the work does not change a bit of
    the results.
    """

    x: Tensor
    y: Tensor | None
    positions: Ints
    counts: Ints
    losses: NDArray[Any]
    keys: Ints | None = None
    threads: int = 1


class ChainCalls:
    """The library's functions for a chain with the parameters `params` and samples of `shape`, for
    several threads.

    A call raises `ValueError` where an array has the wrong shape or type, or a count, position or
    label is out of its range, before it has written anything, and `MemoryError`.
    """

    def __init__(self, chain: LayerChain, params: Params, shape: Sequence[int]) -> None:
        """Raises `NotCompiledError`, and `ValueError` where samples of this shape do not fit the
        chain."""
        self.params = params
        self.names = [name for link in chain.links for name in (link.weight, link.bias)]
        self.dtype, self.shape = params[chain.links[0].weight].dtype, tuple(shape)
        self.dropout = any(link.rate for link in chain.links)
        self.outputs_per_sample = len(params[chain.links[-1].weight])
        self._library = library(self.dtype)
        self._real = torch.empty(0, dtype=self.dtype).numpy().dtype
        self._layers = layer_specs(chain, params, shape)
        self._tensors = {name: params[name].contiguous() for name in self.names if name is not None}
        self._initial = self._addresses(self._tensors)

    def train(
        self, work: SampleBatches, rule: SgdRule, delta: Params, velocity: Params | None
    ) -> bool:
        """Local training from `params`: writes the change to `delta`, the final momentum buffers to
        `velocity` (None: not wanted; else there must be a momentum) and `work.losses`, each
        sample's before its step. Returns whether all of the change is finite."""
        if self.dropout and work.keys is None:
            raise ValueError("training needs keys where the model has dropout")
        return self._call("train", work, rule, delta, velocity)

    def gradient(self, work: SampleBatches, result: Params) -> None:
        """The gradient of the sum of the samples' cross-entropies in eval mode, to `result`; also
        `work.losses`."""
        self._call("gradient", work, SgdRule(0.0), result)

    def outputs(self, work: SampleBatches, result: Tensor) -> None:
        """The logits of all valid samples in eval mode, one step after another, to `result`
        [samples, C]."""
        self._call("outputs", work, SgdRule(0.0), result)

    def _addresses(self, tensors: Params) -> ctypes.Array[ctypes.c_void_p]:
        """Of weight and bias of layer after layer, 0 for no bias. The tensors must outlive it."""
        return (_Pointer * len(self.names))(
            *(
                None
                if name is None
                else _address(name, tensors[name], self.params[name].shape, self.dtype)
                for name in self.names
            )
        )

    def _call(
        self,
        name: str,
        work: SampleBatches,
        rule: SgdRule,
        result: Params | Tensor,
        velocity: Params | None = None,
    ) -> bool:
        """Call the function `name` of the library; whether training's result is finite. Raises what
        `ChainCalls` says."""
        x, y, keys = work.x, work.y, work.keys
        if y is None and name != "outputs":
            raise ValueError(f"a call of {name} needs labels")
        if x.dtype != self.dtype or tuple(x.shape[1:]) != self.shape:
            raise ValueError(
                f"samples are {x.dtype} {tuple(x.shape[1:])}, not {self.dtype} {self.shape}"
            )
        if work.positions.ndim != 2:
            raise ValueError(f"positions must be [steps, width], not {work.positions.shape}")
        steps, width = work.positions.shape
        if isinstance(result, Tensor):
            shape = (int(work.counts.sum()), self.outputs_per_sample)
            into = (_Pointer * 1)(_address("result", result, shape, self.dtype))
        else:
            into = self._addresses(result)
        finite = _Int(0)
        velocities, shift = (
            None if one is None else self._addresses(one) for one in (velocity, rule.shift)
        )
        task = TaskStruct(
            num_layers=len(self._layers),
            num_steps=steps,
            batch_size=width,
            num_samples=len(x),
            num_threads=work.threads,
            layers=ctypes.addressof(self._layers),
            initial=ctypes.addressof(self._initial),
            shift=None if shift is None else ctypes.addressof(shift),
            samples=_address("x", x, x.shape, self.dtype),
            labels=None if y is None else _address("y", y, x.shape[:1], torch.int64),
            positions=_address("positions", work.positions, (steps, width), np.int64),
            counts=_address("counts", work.counts, (steps,), np.int64),
            dropout_keys=None if keys is None else _address("keys", keys, (steps,), np.int64),
            learning_rate=rule.lr,
            weight_decay=rule.decay,
            momentum=rule.momentum,
            nesterov=rule.nesterov,
            result=ctypes.addressof(into),
            velocity=None if velocities is None else ctypes.addressof(velocities),
            losses=_address("losses", work.losses, (steps, width), self._real),
            finite=ctypes.addressof(finite),
        )
        _raise(getattr(self._library, name)(ctypes.byref(task)))
        return bool(finite.value)


def cross_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    """-log softmax(logits)[label] of each sample [n] from `logits` [n, C] and `labels` [n] in 0..C
    - 1, in their type.

    Raises what `ChainCalls` says.
    """
    return _of_logits("losses", logits, labels, logits.new_empty(len(logits)))


def hits(logits: Tensor, labels: Tensor) -> Tensor:
    """Whether the first of the highest logits, or the first that is nan, is that of the label [n]
    bool, as `cross_entropies` takes them."""
    return _of_logits("hits", logits, labels, torch.empty(len(logits), dtype=torch.bool))


def _of_logits(name: str, logits: Tensor, labels: Tensor, result: Tensor) -> Tensor:
    samples, classes = logits.shape
    status = getattr(library(logits.dtype), f"{name}_of_logits")(
        _Pointer(_address("logits", logits, logits.shape, logits.dtype)),
        _Pointer(_address("labels", labels, (samples,), torch.int64)),
        *(ctypes.c_int64(samples), ctypes.c_int64(classes)),
        _Pointer(result.data_ptr()),
    )
    _raise(status)
    return result


def _raise(status: int) -> None:
    if status:
        raise (MemoryError if status == 1 else ValueError)(ERRORS[status - 1])


def _address(
    name: str, values: Tensor | NDArray[Any], shape: Sequence[int], dtype: torch.dtype | DTypeLike
) -> int:
    """Raises `ValueError` unless the tensor or array has this shape and type, is contiguous and on
    the CPU."""
    if isinstance(values, Tensor):
        place, in_order, address = f" on {values.device}", values.is_contiguous(), values.data_ptr()
    else:
        place, in_order, address = "", values.flags.c_contiguous, values.ctypes.data
    if (
        values.shape != tuple(shape)
        or values.dtype != dtype
        or not in_order
        or place not in ("", " on cpu")
    ):
        found = (
            f"{values.dtype} {tuple(values.shape)}{place}{'' if in_order else ', not contiguous'}"
        )
        raise ValueError(
            f"{name} must be contiguous, of {dtype} {tuple(shape)} on the CPU, not {found}"
        )
    return address
