"""The structures and status codes of `task.h`, declared for ctypes: change both together."""

import ctypes
import enum
import math
from collections.abc import Sequence

from fedsim.engine.model.chain import Chain, Link
from fedsim.types import Params

_Int, _Double, _Pointer = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


class Status(enum.IntEnum):
    """What a function of the library returns: `enum status`."""

    OK = 0
    NO_MEMORY = 1
    BAD_LAYER = 2
    BAD_SIZE = 3
    BAD_COUNT = 4
    BAD_POSITION = 5
    BAD_LABEL = 6


class LayerSpec(ctypes.Structure):
    """`struct layer_spec`."""

    _fields_ = [
        *((name, _Int) for name in ("inputs", "outputs", "dropout_index", "kernel", "padding", "pool")),
        *((name, _Int) for name in ("height", "width")),
        ("dropout_rate", _Double),
    ]


class Task(ctypes.Structure):
    """`struct task`. It holds addresses only; what they point to must outlive it."""

    _fields_ = [
        *((name, _Int) for name in ("num_layers", "num_steps", "batch_size", "num_samples", "num_threads")),
        *((name, _Pointer) for name in ("layers", "initial", "samples", "labels")),
        *((name, _Pointer) for name in ("positions", "counts", "dropout_keys")),
        *((name, _Double) for name in ("learning_rate", "weight_decay", "momentum")),
        ("nesterov", _Int),
        *((name, _Pointer) for name in ("result", "velocity", "losses")),
    ]


def layer_specs(chain: Chain, params: Params, shape: Sequence[int]) -> ctypes.Array[LayerSpec]:
    """The layers of a chain with the sizes of their images, for samples of `shape`.

    A linear layer behind convolutions takes their flattened output. Raises `ValueError` where a weight, a bias or the
    samples do not have the size that the layer needs: C would read past their end.
    """
    specs: list[LayerSpec] = []
    image = chain.links[0].kernel > 0
    channels, height, width = shape if image and len(shape) == 3 else (math.prod(shape), 1, 1)
    for link in chain.links:
        inputs = channels if link.kernel else channels * height * width
        outputs = _outputs(link, params, inputs, (height, width))
        specs.append(
            LayerSpec(inputs, outputs, link.dropout, link.kernel, link.padding, link.pool, height, width, link.rate)
        )
        channels, height, width = outputs, _output_side(link, height), _output_side(link, width)
    return (LayerSpec * len(specs))(*specs)


def _outputs(link: Link, params: Params, inputs: int, sides: tuple[int, int]) -> int:
    """The number of a layer's outputs. Raises `ValueError` unless its parameters fit `inputs` and each other."""
    weight, bias = params[link.weight], None if link.bias is None else params[link.bias]
    outputs, expected = weight.shape[:2]
    if inputs != expected or min(sides) < 1:
        raise ValueError(f"{link.weight} is for {expected} inputs, not for {inputs} of {sides[0]} x {sides[1]} pixels")
    if weight.shape[2:] != ((link.kernel,) * 2 if link.kernel else ()):
        raise ValueError(f"{link.weight} is {tuple(weight.shape)}, which is not for a kernel of {link.kernel}")
    if bias is not None and bias.shape != (outputs,):
        raise ValueError(f"{link.bias} is {tuple(bias.shape)}, not for {outputs} outputs")
    return outputs


def _output_side(link: Link, side: int) -> int:
    """Pixels along a side of an image behind a layer; 1 behind a linear layer."""
    return (side + 2 * link.padding - link.kernel + 1) // (1 + link.pool) if link.kernel else 1
