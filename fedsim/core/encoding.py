"""State as JSON and tensors, and back: values of known types alone, so that reading a file runs no
code of its choice.

Plain JSON types stand for themselves, floats to the last bit. Every other value is a mapping with
one key, its kind: `{"tuple": [...]}`, `{"dict": [[key, value], ...]}`, `{"array": [name, axes]}`
and so on.
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
CONTAINERS = {cls.__name__: cls for cls in (tuple, set, frozenset, dict)}


class EncodingError(FedsimError):
    """A value of a type that cannot be written, or not be read again; the message says where it
    is."""


def encode(
    value: Any,
    tensors: dict[str, Tensor],
    where: str = "state",
    dataclasses: Mapping[str, type] | None = None,
) -> Any:
    """`value` as JSON types; its arrays and tensors are added to `tensors` (contiguous, where they
    are) by new names.

    `dataclasses`: those that `decode` will be able to build, by path. Raises `EncodingError` for a
    type that is not known; `where` is how the message calls the value.
    """

    def inner(item: Any, place: str) -> Any:
        return encode(item, tensors, place, dataclasses)

    kind = type(value)
    if kind in PLAIN:
        return value
    if kind in (list, tuple, set, frozenset):
        items = [inner(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return items if kind is list else {kind.__name__: items}
    if kind is deque:
        return {"deque": [inner(list(value), where), value.maxlen]}
    if kind is dict:
        return {
            "dict": [
                [inner(k, f"{where} key"), inner(v, f"{where}[{k!r}]")] for k, v in value.items()
            ]
        }
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized:
        return {"tensor": [*_keep(value.detach(), tensors), value.device.type == "cpu"]}
    plain = isinstance(value, np.generic) or kind in (np.ndarray, np.memmap)  # no mask, no matrix
    if (
        plain and value.dtype.kind in "biuf" and value.dtype.isnative and value.dtype.itemsize <= 8
    ):  # as torch has them
        name = "scalar" if isinstance(value, np.generic) else "array"
        return {name: _keep(torch.from_numpy(np.array(value)), tensors)}
    path = f"{kind.__module__}.{kind.__qualname__}"
    if is_dataclass(kind) and not hasattr(
        kind, "__parameters__"
    ):  # whose objects may have more than their fields
        if (dataclasses or {}).get(path) is not kind:
            told = f"{where} is of the dataclass {path}, which a checkpoint would not find again"
            remedy = f"write `from {kind.__module__} import {kind.__qualname__}` where the selector (or aggregator) is"
            raise EncodingError(f"{told}: {remedy}")
        values = {f.name: getattr(value, f.name) for f in fields(value)} | getattr(
            value, "__dict__", {}
        )
        return {
            "dataclass": [
                path,
                {name: inner(item, f"{where}.{name}") for name, item in values.items()},
            ]
        }
    known = "None, numbers, strings, lists, tuples, dicts, sets, deques, plain NumPy arrays, dense torch tensors"
    raise EncodingError(
        f"{where} is of type {path}, which a checkpoint cannot hold ({known}, dataclasses of these)"
    )


def decode(
    node: Any,
    tensors: Mapping[str, Tensor],
    device: torch.device,
    dataclasses: Mapping[str, type] | None = None,
) -> Any:
    """The value that `encode` was given. Tensors that were not on the CPU go to `device`.

    `dataclasses`: those that may be built, by path; their constructors are not called. Raises
    `ValueError`, `TypeError` or `KeyError` on what `encode` did not write.
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
    if kind == "tensor":
        *kept, on_cpu = content
        return _kept(tensors, *kept).to("cpu" if on_cpu else device)
    if kind == "array":
        return _kept(tensors, *content).numpy()
    if kind == "scalar":
        return _kept(tensors, *content).numpy()[()]
    if kind == "dataclass":
        built: Any = object.__new__((dataclasses or {})[content[0]])
        for name, value in content[1].items():
            object.__setattr__(built, name, inner(value))  # a frozen one, too
        return built
    raise ValueError(f"unknown kind {kind!r}")


def dataclasses_known_to(*objects: object) -> dict[str, type]:
    """All dataclasses that the modules of the classes of `objects` define or import, by path."""
    modules = {cls.__module__ for value in objects for cls in type(value).__mro__}
    found = [value for name in modules for value in vars(sys.modules.get(name, object)).values()]
    classes = [value for value in found if isinstance(value, type) and is_dataclass(value)]
    return {f"{cls.__module__}.{cls.__qualname__}": cls for cls in classes}


def _keep(value: Tensor, tensors: dict[str, Tensor]) -> list[Any]:
    """Put `value` into `tensors`. The order of its axes in memory is kept: sums may depend on it in
    the last bit."""
    strides = value.stride()
    axes = sorted(range(value.dim()), key=lambda axis: -strides[axis])
    name = str(len(tensors))
    tensors[name] = value.permute(axes).contiguous()
    return [name, axes]


def _kept(tensors: Mapping[str, Tensor], name: str, axes: list[int]) -> Tensor:
    stored = tensors[name].clone()  # into memory of its own, aligned as torch does it
    return stored.permute([axes.index(i) for i in range(len(axes))])
