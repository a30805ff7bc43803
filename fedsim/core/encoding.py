"""Encode state (nested Python values with arrays and tensors) as JSON and named tensors, and decode
it, for checkpoints and messages between processes.

Only values of known types are written, so reading a file runs no code that the file chooses. None,
booleans, numbers, texts and lists are themselves in JSON; a float keeps its last bit. Every other
value is a mapping with one key, its kind:

    {"tuple": [...]}, {"set": [...]}, {"frozenset": [...]}   the items
    {"dict": [[key, value], ...]}                            the pairs
    {"deque": [items, maxlen]}
    {"array": [name, axes]}, {"scalar": [name, axes]}        a NumPy array or number
    {"tensor": [name, axes, is_on_cpu]}                      a tensor that requires no gradient
    {"trained": [name, axes, is_on_cpu]}                     a tensor that requires a gradient
    {"parameter": [name, axes, is_on_cpu, requires_grad]}    a `torch.nn.Parameter`
    {"dataclass": [path, {attribute: value, ...}]}           path: its module and name, dotted

`name` is the key of the stored tensor, and `axes` is the order of its axes in memory.
"""

import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.core.errors import FedsimError

PLAIN = (type(None), bool, int, float, str)
"""Types of values that are the same in JSON."""
COLLECTIONS = {"tuple": tuple, "set": set, "frozenset": frozenset}
"""Types that are encoded as the list of their items, by their kind."""


class EncodingError(FedsimError):
    """A value has a type that cannot be written or read again. The message says where it is."""


def encode(
    value: Any,
    tensors: dict[str, Tensor],
    where: str = "state",
    dataclasses: Mapping[str, type] | None = None,
) -> Any:
    """Return `value` as JSON types, and add its arrays and tensors to `tensors` under new names.

    `where` names the value in messages. `dataclasses` has the dataclasses that `decode` will be
    able to build, by dotted path; without it, there are none. Raises `EncodingError` for a value of
    an unknown type.
    """

    def encode_part(part: Any, suffix: str) -> Any:
        return encode(part, tensors, where + suffix, dataclasses)

    kind = type(value)  # exact types only: a subclass would come back as its base class
    if kind in PLAIN:
        return value
    if kind is list or kind in COLLECTIONS.values():
        items = [encode_part(item, f"[{i}]") for i, item in enumerate(value)]
        return items if kind is list else {kind.__name__: items}
    if kind is deque:
        return {"deque": [encode_part(list(value), ""), value.maxlen]}
    if kind is dict:
        pairs = []
        for key, item in value.items():
            pairs.append([encode_part(key, " key"), encode_part(item, f"[{key!r}]")])
        return {"dict": pairs}
    if kind in (Tensor, torch.nn.Parameter) and _is_dense(value):
        content = [*_store(value.detach(), tensors), value.device.type == "cpu"]
        if kind is torch.nn.Parameter:
            return {"parameter": [*content, value.requires_grad]}
        return {"trained" if value.requires_grad else "tensor": content}
    if isinstance(value, np.generic) and _fits_torch(value.dtype):
        return {"scalar": _store(torch.from_numpy(np.array(value)), tensors)}
    if kind in (np.ndarray, np.memmap) and _fits_torch(value.dtype):  # not masked, no matrix
        return {"array": _store(torch.from_numpy(np.array(value)), tensors)}
    path = f"{kind.__module__}.{kind.__qualname__}"
    # Classes decorated by `parameters`, such as selectors, are dataclasses, too, but no values.
    if is_dataclass(kind) and not hasattr(kind, "__parameters__"):
        if dataclasses is None or dataclasses.get(path) is not kind:
            raise EncodingError(
                f"{where} is of the dataclass {path}, which a checkpoint would not find again: "
                f"write `from {kind.__module__} import {kind.__qualname__}` where the selector "
                "(or aggregator) is"
            )
        attributes = {field.name: getattr(value, field.name) for field in fields(value)}
        attributes |= getattr(value, "__dict__", {})  # attributes that are no fields
        encoded = {name: encode_part(item, f".{name}") for name, item in attributes.items()}
        return {"dataclass": [path, encoded]}
    dtype = f" of dtype {value.dtype}" if isinstance(value, np.ndarray) else ""
    raise EncodingError(
        f"{where} is of type {path}{dtype}, which a checkpoint cannot hold; store None, numbers, "
        "strings, lists, tuples, dicts, sets, deques, plain NumPy arrays of numbers, dense torch "
        "tensors or dataclasses of these, and make other objects from them"
    )


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized


def decode(
    node: Any,
    tensors: Mapping[str, Tensor],
    device: torch.device,
    dataclasses: Mapping[str, type] | None = None,
) -> Any:
    """Return the value that `encode` turned into `node` and `tensors`.

    Tensors that were not on the CPU go to `device`. `dataclasses` has the dataclasses that may be
    built, by dotted path. Their constructors are not called. Raises `ValueError`, `TypeError` or
    `KeyError` for anything that `encode` did not write.
    """

    def decode_part(part: Any) -> Any:
        return decode(part, tensors, device, dataclasses)

    def load_tensor(name: str, axes: list[int], is_on_cpu: bool) -> Tensor:
        return _load(tensors, name, axes).to("cpu" if is_on_cpu else device)

    if isinstance(node, list):
        return [decode_part(item) for item in node]
    if not isinstance(node, dict):
        return node
    ((kind, content),) = node.items()
    if kind in COLLECTIONS:
        return COLLECTIONS[kind](decode_part(content))
    if kind == "dict":
        return dict(decode_part(content))
    if kind == "deque":
        items, max_length = content
        return deque(decode_part(items), max_length)
    if kind == "parameter":
        *place, requires_grad = content
        return torch.nn.Parameter(load_tensor(*place), requires_grad)
    if kind in ("tensor", "trained"):
        return load_tensor(*content).requires_grad_(kind == "trained")
    if kind == "array":
        return _load(tensors, *content).numpy()
    if kind == "scalar":
        return _load(tensors, *content).numpy()[()]
    if kind == "dataclass":
        path, values = content
        instance: Any = object.__new__((dataclasses or {})[path])
        for name, value in values.items():
            object.__setattr__(instance, name, decode_part(value))  # the class may be frozen
        return instance
    raise ValueError(f"unknown kind {kind!r}")


def dataclasses_known_to(*objects: object) -> dict[str, type]:
    """Return the dataclasses that `decode` can build for the state of `objects`, by dotted path.

    These are all that the modules of the objects' classes and base classes define or import.
    """
    classes: dict[str, type] = {}
    for item in objects:
        for base in type(item).__mro__:
            module = sys.modules.get(base.__module__, object)
            for value in vars(module).values():
                if isinstance(value, type) and is_dataclass(value):
                    classes[f"{value.__module__}.{value.__qualname__}"] = value
    return classes


def _fits_torch(dtype: np.dtype[Any]) -> bool:
    """Return whether torch has a type for `dtype`: booleans and real numbers of up to 64 bits."""
    return dtype.kind in "biuf" and dtype.isnative and dtype.itemsize <= 8


def _store(value: Tensor, tensors: dict[str, Tensor]) -> list[Any]:
    """Put `value` into `tensors`, and return its new name and the order of its axes in memory.

    The order begins with the axis of the largest stride. Stored tensors are contiguous, so `_load`
    needs the order to restore the layout in memory. Sums may depend on the layout in the last bit.
    """
    strides = value.stride()
    axes = sorted(range(value.dim()), key=lambda axis: -strides[axis])
    name = str(len(tensors))
    tensors[name] = value.permute(axes).contiguous()
    return [name, axes]


def _load(tensors: Mapping[str, Tensor], name: str, axes: list[int]) -> Tensor:
    """Return the stored tensor `name` with its axes in their original order."""
    stored = tensors[name].clone()  # into memory of its own, aligned as torch does it
    inverse = [axes.index(axis) for axis in range(len(axes))]  # where `_store` moved each axis
    return stored.permute(inverse)
