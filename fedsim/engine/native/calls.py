"""Calls of the compiled library.

Tensors and arrays are checked and passed as addresses, and status codes become exceptions. The
structures and status codes are those of `task.h`: change both files together.
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
"""Errors of the library's functions, in the order of `enum status` from 1 on."""


class LayerStruct(ctypes.Structure):
    """`struct layer_spec`."""

    _fields_ = [
        ("inputs", _Int),
        ("outputs", _Int),
        ("dropout_index", _Int),
        ("kernel", _Int),
        ("padding", _Int),
        ("pool", _Int),
        ("height", _Int),
        ("width", _Int),
        ("dropout_rate", _Double),
    ]


class TaskStruct(ctypes.Structure):
    """`struct task`. It holds only addresses; what they point to must outlive it."""

    _fields_ = [
        ("num_layers", _Int),
        ("num_steps", _Int),
        ("batch_size", _Int),
        ("num_samples", _Int),
        ("num_threads", _Int),
        ("layers", _Pointer),
        ("initial", _Pointer),
        ("shift", _Pointer),
        ("samples", _Pointer),
        ("labels", _Pointer),
        ("positions", _Pointer),
        ("counts", _Pointer),
        ("dropout_keys", _Pointer),
        ("learning_rate", _Double),
        ("weight_decay", _Double),
        ("momentum", _Double),
        ("nesterov", _Int),
        ("result", _Pointer),
        ("velocity", _Pointer),
        ("losses", _Pointer),
        ("finite", _Pointer),
    ]


def layer_structs(
    chain: LayerChain, params: Params, shape: Sequence[int]
) -> ctypes.Array[LayerStruct]:
    """Return the layers of a chain with the sizes of their images, for samples of `shape`.

    Raises `ValueError` if a weight, a bias or the samples do not have the size that a layer needs.
    C would read past their end.
    """
    structs: list[LayerStruct] = []
    channels, height, width = math.prod(shape), 1, 1
    if chain.layers[0].kernel and len(shape) == 3:
        channels, height, width = shape
    for layer in chain.layers:
        inputs = channels if layer.kernel else channels * height * width
        outputs = _num_outputs(layer, params, inputs, (height, width))
        struct = LayerStruct(
            inputs=inputs,
            outputs=outputs,
            dropout_index=layer.dropout,
            kernel=layer.kernel,
            padding=layer.padding,
            pool=layer.pool,
            height=height,
            width=width,
            dropout_rate=layer.rate,
        )
        structs.append(struct)
        channels = outputs
        height, width = _output_side(layer, height), _output_side(layer, width)
    return (LayerStruct * len(structs))(*structs)


def _num_outputs(layer: ChainLayer, params: Params, inputs: int, sides: tuple[int, int]) -> int:
    """Return the number of a layer's outputs.

    Raises `ValueError` unless its parameters fit `inputs` and each other.
    """
    weight = params[layer.weight]
    outputs, expected = weight.shape[:2]
    if inputs != expected or min(sides) < 1:
        pixels = f"{sides[0]} x {sides[1]} pixels"
        raise ValueError(f"{layer.weight} is for {expected} inputs, not for {inputs} of {pixels}")
    kernel_shape = (layer.kernel, layer.kernel) if layer.kernel else ()
    if weight.shape[2:] != kernel_shape:
        shape = tuple(weight.shape)
        raise ValueError(f"{layer.weight} is {shape}, which is not for a kernel of {layer.kernel}")
    if layer.bias is not None and params[layer.bias].shape != (outputs,):
        shape = tuple(params[layer.bias].shape)
        raise ValueError(f"{layer.bias} is {shape}, not for {outputs} outputs")
    return outputs


def _output_side(layer: ChainLayer, side: int) -> int:
    if not layer.kernel:
        return 1
    padded_side = side + 2 * layer.padding
    convolved_side = padded_side - layer.kernel + 1
    return convolved_side // (1 + layer.pool)


@dataclass(frozen=True)
class SgdRule:
    """The update rule of SGD in one round. `shift` is added to every gradient; None adds
    nothing."""

    lr: float
    decay: float = 0.0
    momentum: float = 0.0
    nesterov: bool = False
    shift: Params | None = None


@dataclass(frozen=True)
class SampleBatches:
    """The samples of one call, in batches. All arrays are contiguous and on the CPU.

    - `x` [n, ...] and labels `y` [n] int64 hold all samples; `y` may be None for `outputs`.
    - `positions` [steps, width] int64 are rows of `x`, of which the first `counts` [steps] of each
      step are valid.
    - `losses` [steps, width] receives the cross-entropies of the valid samples.
    - `keys` [steps] int64 are the steps' dropout keys, to train a model with dropout.
    - `threads` share the work. Their number does not change a bit of the results.
    """

    x: Tensor
    y: Tensor | None
    positions: Ints
    counts: Ints
    losses: NDArray[Any]
    keys: Ints | None = None
    threads: int = 1


class ChainCalls:
    """The library's functions for a chain with the parameters `params` and samples of `shape`.

    Several threads may call them. A call raises `MemoryError`, and `ValueError` if an array has the
    wrong shape or type, or a count, position or label is out of range. It has then written nothing.
    """

    def __init__(self, chain: LayerChain, params: Params, shape: Sequence[int]) -> None:
        """Raises `NotCompiledError`, and `ValueError` if samples of this shape do not fit."""
        self.params = params
        self.names: list[str | None] = []
        for layer in chain.layers:
            self.names += [layer.weight, layer.bias]
        self.dtype = params[chain.layers[0].weight].dtype
        self.shape = tuple(shape)
        self.dropout = any(layer.rate for layer in chain.layers)
        self.num_outputs = len(params[chain.layers[-1].weight])
        self._library = library(self.dtype)
        self._numpy_dtype = torch.empty(0, dtype=self.dtype).numpy().dtype
        self._layers = layer_structs(chain, params, shape)
        self._tensors = {name: params[name].contiguous() for name in self.names if name is not None}
        self._initial = self._addresses(self._tensors)

    def train(
        self, batches: SampleBatches, rule: SgdRule, delta: Params, velocity: Params | None
    ) -> bool:
        """Train from `params`, and return whether all of the change is finite.

        Writes the change to `delta`, the final momentum buffers to `velocity` (None: there is no
        momentum), and each sample's loss before its step to `batches.losses`.
        """
        if self.dropout and batches.keys is None:
            raise ValueError("training needs keys where the model has dropout")
        return self._call("train", batches, rule, delta, velocity)

    def gradient(self, batches: SampleBatches, result: Params) -> None:
        """Write the gradient of the sum of the samples' cross-entropies in eval mode to `result`.

        Writes the cross-entropies to `batches.losses`.
        """
        self._call("gradient", batches, SgdRule(0.0), result)

    def outputs(self, batches: SampleBatches, result: Tensor) -> None:
        """Write the logits of all valid samples in eval mode to `result` [samples, C]."""
        self._call("outputs", batches, SgdRule(0.0), result)

    def _addresses(self, tensors: Params) -> ctypes.Array[ctypes.c_void_p]:
        """Return the addresses of each layer's weight and bias, 0 for no bias."""
        addresses = (_Pointer * len(self.names))()
        for number, name in enumerate(self.names):
            if name is not None:
                shape = self.params[name].shape
                addresses[number] = _address(name, tensors[name], shape, self.dtype)
        return addresses

    def _call(
        self,
        name: str,
        batches: SampleBatches,
        rule: SgdRule,
        result: Params | Tensor,
        velocity: Params | None = None,
    ) -> bool:
        """Call a function of the library, and return whether training's result is finite."""
        # 1. Check what addresses do not tell.
        x, y, positions, keys = batches.x, batches.y, batches.positions, batches.keys
        if y is None and name != "outputs":
            raise ValueError(f"a call of {name} needs labels")
        if x.dtype != self.dtype or tuple(x.shape[1:]) != self.shape:
            actual = f"{x.dtype} {tuple(x.shape[1:])}"
            raise ValueError(f"samples are {actual}, not {self.dtype} {self.shape}")
        if positions.ndim != 2:
            raise ValueError(f"positions must be [steps, width], not {positions.shape}")
        steps, width = positions.shape
        # 2. Collect the addresses. These arrays and `finite` must live until the call ends.
        if isinstance(result, Tensor):
            shape = (int(batches.counts.sum()), self.num_outputs)
            results = (_Pointer * 1)(_address("result", result, shape, self.dtype))
        else:
            results = self._addresses(result)
        velocities = None if velocity is None else self._addresses(velocity)
        shifts = None if rule.shift is None else self._addresses(rule.shift)
        finite = _Int(0)
        # 3. Call.
        task = TaskStruct(
            num_layers=len(self._layers),
            num_steps=steps,
            batch_size=width,
            num_samples=len(x),
            num_threads=batches.threads,
            layers=ctypes.addressof(self._layers),
            initial=ctypes.addressof(self._initial),
            shift=None if shifts is None else ctypes.addressof(shifts),
            samples=_address("x", x, x.shape, self.dtype),
            labels=None if y is None else _address("y", y, x.shape[:1], torch.int64),
            positions=_address("positions", positions, (steps, width), np.int64),
            counts=_address("counts", batches.counts, (steps,), np.int64),
            dropout_keys=None if keys is None else _address("keys", keys, (steps,), np.int64),
            learning_rate=rule.lr,
            weight_decay=rule.decay,
            momentum=rule.momentum,
            nesterov=rule.nesterov,
            result=ctypes.addressof(results),
            velocity=None if velocities is None else ctypes.addressof(velocities),
            losses=_address("losses", batches.losses, (steps, width), self._numpy_dtype),
            finite=ctypes.addressof(finite),
        )
        _raise_status(getattr(self._library, name)(ctypes.byref(task)))
        return bool(finite.value)


def cross_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    """Return -log softmax(logits)[label] of each sample [n], in the type of `logits` [n, C].

    Raises the errors of `ChainCalls`.
    """
    return _measure_logits("losses_of_logits", logits, labels, logits.new_empty(len(logits)))


def hits(logits: Tensor, labels: Tensor) -> Tensor:
    """Return whether the first of the highest logits, or the first nan, is the label's, bool
    [n]."""
    result = torch.empty(len(logits), dtype=torch.bool)
    return _measure_logits("hits_of_logits", logits, labels, result)


def _measure_logits(name: str, logits: Tensor, labels: Tensor, result: Tensor) -> Tensor:
    samples, classes = logits.shape
    status = getattr(library(logits.dtype), name)(
        _Pointer(_address("logits", logits, logits.shape, logits.dtype)),
        _Pointer(_address("labels", labels, (samples,), torch.int64)),
        _Int(samples),
        _Int(classes),
        _Pointer(result.data_ptr()),
    )
    _raise_status(status)
    return result


def _raise_status(status: int) -> None:
    if status == 1:
        raise MemoryError(ERRORS[0])
    if status:
        raise ValueError(ERRORS[status - 1])


def _address(
    name: str, values: Tensor | NDArray[Any], shape: Sequence[int], dtype: torch.dtype | DTypeLike
) -> int:
    """Return the address of a tensor or array.

    Raises `ValueError` unless it has this shape and type, is contiguous and on the CPU.
    """
    if isinstance(values, Tensor):
        device, address = values.device.type, values.data_ptr()
        contiguous = values.is_contiguous()
    else:
        device, address = "cpu", values.ctypes.data
        contiguous = values.flags.c_contiguous
    fits = values.shape == tuple(shape) and values.dtype == dtype
    if not fits or not contiguous or device != "cpu":
        order = "" if contiguous else ", not contiguous"
        raise ValueError(
            f"{name} must be contiguous, of {dtype} {tuple(shape)} on the CPU, not {values.dtype} "
            f"{tuple(values.shape)} on {device}{order}"
        )
    return address
