"""Encode state (nested Python values with arrays and tensors) as JSON and named tensors, and decode
it, for checkpoints and messages between processes.

Only values of known types are written, so reading a file runs no code that the file chooses. Plain
JSON types stand for themselves, floats to the last bit. Every other value is a mapping with one
key, its kind: `{"tuple": [...]}`, `{"dict": [[key, value], ...]}`, `{"array": [name, axes]}` and so
on.
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
SEQUENCES = (list, tuple, set, frozenset)
CONTAINERS = {"tuple": tuple, "set": set, "frozenset": frozenset, "dict": dict}
"""Kinds that `decode` makes by calling the type with the decoded list."""


class EncodingError(FedsimError):
    """A value is of a type that cannot be written or read again; the message says where it is."""


def encode(
    value: Any,
    tensors: dict[str, Tensor],
    where: str = "state",
    dataclasses: Mapping[str, type] | None = None,
) -> Any:
    """Return `value` as JSON types, and add its arrays and tensors to `tensors` under new names.

    `dataclasses` are the dataclasses that `decode` will be able to build, by dotted path; None:
    there are none. Raises `EncodingError` for an unknown type; its message calls the value `where`.
    """

    def inner(item: Any, place: str) -> Any:
        return encode(item, tensors, place, dataclasses)

    kind = type(value)  # exact types only: a subclass would come back as its base class
    if kind in PLAIN:
        return value
    if kind in SEQUENCES:
        items = [inner(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return items if kind is list else {kind.__name__: items}
    if kind is deque:
        return {"deque": [inner(list(value), where), value.maxlen]}
    if kind is dict:
        pairs = []
        for key, item in value.items():
            pairs.append([inner(key, f"{where} key"), inner(item, f"{where}[{key!r}]")])
        return {"dict": pairs}
    if kind in (Tensor, torch.nn.Parameter) and _is_dense(value):
        name, axes = _store(value.detach(), tensors)
        place = [name, axes, value.device.type == "cpu"]
        if kind is torch.nn.Parameter:
            return {"parameter": [*place, value.requires_grad]}
        return {"trained" if value.requires_grad else "tensor": place}
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
        values = {field.name: getattr(value, field.name) for field in fields(value)}
        values |= getattr(value, "__dict__", {})  # attributes that are no fields
        encoded = {name: inner(item, f"{where}.{name}") for name, item in values.items()}
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
    """Return the value that `encode` has made `node` and `tensors` of.

    Tensors that were not on the CPU go to `device`. `dataclasses` are the dataclasses that may be
    built, by dotted path; their constructors are not called. Raises `ValueError`, `TypeError` or
    `KeyError` for anything that `encode` did not write.
    """

    def inner(item: Any) -> Any:
        return decode(item, tensors, device, dataclasses)

    if isinstance(node, list):
        return [inner(item) for item in node]
    if not isinstance(node, dict):
        return node
    ((kind, content),) = node.items()
    if kind in CONTAINERS:
        return CONTAINERS[kind](inner(content))
    if kind == "deque":
        return deque(*inner(content))
    if kind in ("tensor", "trained", "parameter"):
        name, axes, is_on_cpu, *requires_grad = content
        tensor = _load(tensors, name, axes).to("cpu" if is_on_cpu else device)
        if kind == "parameter":
            return torch.nn.Parameter(tensor, *requires_grad)
        return tensor.requires_grad_(kind == "trained")
    if kind == "array":
        return _load(tensors, *content).numpy()
    if kind == "scalar":
        return _load(tensors, *content).numpy()[()]
    if kind == "dataclass":
        path, values = content
        instance: Any = object.__new__((dataclasses or {})[path])
        for name, value in values.items():
            object.__setattr__(instance, name, inner(value))  # works for frozen ones, too
        return instance
    raise ValueError(f"unknown kind {kind!r}")


def dataclasses_known_to(*objects: object) -> dict[str, type]:
    """Return all dataclasses that the modules of the classes of `objects` define or import, by
    path."""
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

    Stored tensors are contiguous, so `_load` needs the order to restore the layout: sums may depend
    on it in the last bit.
    """
    strides = value.stride()
    axes = sorted(range(value.dim()), key=lambda axis: -strides[axis])
    name = str(len(tensors))
    tensors[name] = value.permute(axes).contiguous()
    return [name, axes]


def _load(tensors: Mapping[str, Tensor], name: str, axes: list[int]) -> Tensor:
    """Return the stored tensor `name` with its axes in their original order."""
    stored = tensors[name].clone()  # into memory of its own, aligned as torch does it
    return stored.permute([axes.index(i) for i in range(len(axes))])
