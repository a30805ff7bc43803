"""State as JSON and tensors, and back: values of known types alone, so that reading a file runs no code of its choice.

Plain JSON types stand for themselves, finite floats to the last bit. Every other value is a mapping with one key, its
kind: `{"tuple": [...]}`, `{"dict": [[key, value], ...]}`, `{"array": {"name": ..., "axes": [...]}}` and so on.
"""

import inspect
import math
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.core.errors import FedsimError
from fedsim.core.parameters import has_parameters

SEQUENCES: Mapping[str, Callable[[Sequence[Any]], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}


class EncodingError(FedsimError):
    """A value of a type that cannot be written, or not be read again; the message says where it is."""


def encode(
    value: Any, tensors: dict[str, Tensor], where: str = "state", dataclasses: Mapping[str, type] | None = None
) -> Any:
    """`value` as JSON types; its arrays and tensors are added to `tensors` (on the CPU, contiguous) under new names.

    `dataclasses`: those that `decode` will be able to build, by path. Raises `EncodingError` for a type that is not
    known; `where` is how the message calls the value.
    """

    def inner(item: Any, place: str) -> Any:
        return encode(item, tensors, place, dataclasses)

    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is list:
        return [inner(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if kind in (tuple, set, frozenset):
        return {kind.__name__: [inner(item, f"{where}[{i}]") for i, item in enumerate(value)]}
    if kind is deque:
        return {"deque": [[inner(item, f"{where}[...]") for item in value], value.maxlen]}
    if kind is dict:
        pairs = [[inner(k, f"{where} key"), inner(v, f"{where}[{k!r}]")] for k, v in value.items()]
        return {"dict": pairs}
    if isinstance(value, Tensor) and _is_plain_tensor(value):
        return {"tensor": {"cpu": value.device.type == "cpu", **_keep(value.detach(), tensors)}}
    if isinstance(value, np.ndarray | np.generic) and _is_plain_array(value):
        kind_name = "array" if isinstance(value, np.ndarray) else "scalar"
        return {kind_name: _keep(torch.from_numpy(np.array(value)), tensors)}
    if is_dataclass(value) and not isinstance(value, type) and not has_parameters(value):
        _require_readable(kind, where, dataclasses or {})
        values = {f.name: inner(getattr(value, f.name), f"{where}.{f.name}") for f in fields(value)}
        return {"dataclass": [_path(kind), values]}
    raise EncodingError(
        f"{where} is of type {kind.__module__}.{kind.__qualname__}{_details(value)}, which a checkpoint cannot hold "
        "(it holds None, numbers, strings, lists, tuples, dicts, sets, deques, plain NumPy arrays, dense torch tensors "
        "and dataclasses of these)"
    )


def _is_plain_tensor(value: Tensor) -> bool:
    return value.layout is torch.strided and not value.is_quantized


def _is_plain_array(value: NDArray[Any] | np.generic) -> bool:
    """Whether torch has its type of numbers, and it is nothing more than its numbers: no mask, no matrix."""
    dtype = value.dtype
    known = dtype.kind in "biuf" and dtype.isnative and dtype.itemsize <= 8
    return known and (isinstance(value, np.generic) or type(value) in (np.ndarray, np.memmap))


def _details(value: object) -> str:
    """The type of an array's numbers, and a tensor's layout."""
    if isinstance(value, Tensor):
        return f" ({value.dtype}, {value.layout})"
    return f" ({value.dtype})" if isinstance(value, np.ndarray | np.generic) else ""


def decode(
    node: Any, tensors: Mapping[str, Tensor], device: torch.device, dataclasses: Mapping[str, type] | None = None
) -> Any:
    """The value that `encode` was given. Tensors that were not on the CPU go to `device`.

    `dataclasses`: those that may be built, by path. Raises `ValueError` or `KeyError` on what `encode` did not write.
    """
    if isinstance(node, list):
        return [decode(item, tensors, device, dataclasses) for item in node]
    if not isinstance(node, dict):
        return node
    ((kind, content),) = node.items()
    if kind == "float":
        return float(content)
    if kind in SEQUENCES:
        return SEQUENCES[kind](decode(content, tensors, device, dataclasses))
    if kind == "deque":
        return deque(decode(content[0], tensors, device, dataclasses), content[1])
    if kind == "dict":
        return dict(decode(content, tensors, device, dataclasses))
    if kind == "tensor":
        return _kept(content, tensors).to("cpu" if content["cpu"] else device)
    if kind == "array":
        return _kept(content, tensors).numpy()
    if kind == "scalar":
        return _kept(content, tensors).numpy()[()]
    if kind == "dataclass":
        values = {k: decode(v, tensors, device, dataclasses) for k, v in content[1].items()}
        return _built((dataclasses or {})[content[0]], values)
    raise ValueError(f"unknown kind {kind!r}")


def dataclasses_known_to(*objects: object) -> dict[str, type]:
    """All dataclasses that the modules of the classes of `objects` define or import, by path."""
    modules = {cls.__module__ for value in objects for cls in type(value).__mro__}
    found = [value for name in modules for value in vars(sys.modules.get(name, object)).values()]
    return {_path(value): value for value in found if isinstance(value, type) and is_dataclass(value)}


def _require_readable(cls: type, where: str, known: Mapping[str, type]) -> None:
    """Raise `EncodingError` for a dataclass that `decode` could not build."""
    path = _path(cls)
    if known.get(path) is not cls:
        raise EncodingError(
            f"{where} is of the dataclass {path}, which would not be found when the checkpoint is read: its name is "
            "not in the module of the selector (or aggregator); write "
            f"`from {cls.__module__} import {cls.__qualname__}` there, or define it there, outside of other classes "
            "and functions"
        )
    if not _takes_its_fields(cls):
        raise EncodingError(
            f"{where} is of the dataclass {path}, which could not be built when the checkpoint is read: its "
            "constructor must take its fields and need nothing else (no InitVar without a default, no __init__ with "
            "other parameters)"
        )


@cache
def _takes_its_fields(cls: type) -> bool:
    try:
        inspect.signature(cls).bind(**{f.name: None for f in fields(cls) if f.init})
    except TypeError:
        return False
    return True


def _built(cls: type, values: Mapping[str, Any]) -> Any:
    """The object whose fields are `values`, also those that its constructor does not take or changes."""
    late = {f.name for f in fields(cls) if not f.init}
    built = cls(**{name: value for name, value in values.items() if name not in late})
    for name, value in values.items():
        object.__setattr__(built, name, value)  # a frozen one, too
    return built


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _keep(value: Tensor, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Put `value` into `tensors`. The order of its axes in memory is kept: sums may depend on it in the last bit."""
    strides = value.stride()
    axes = sorted(range(value.dim()), key=lambda axis: -strides[axis])
    name = str(len(tensors))
    tensors[name] = value.permute(axes).cpu().clone(memory_format=torch.contiguous_format)
    return {"name": name, "axes": axes}


def _kept(content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
    stored = tensors[content["name"]].clone()  # into memory of its own, aligned as torch does it
    axes = content["axes"]
    return stored.permute([axes.index(i) for i in range(len(axes))])
