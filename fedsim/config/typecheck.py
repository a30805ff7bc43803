"""Does a value from YAML fit a constructor's annotation? Just the annotations that hyper-parameters use.

pydantic does not do instead: even its strict mode takes true and 1.0 for `Literal[1]`.
"""

import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

LARGEST_INTEGER = 2**63 - 1
"""NumPy and torch count in 64 bits."""
_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    type(None): "null",
    dict: "a mapping",
    Path: "a path",
}


def conform(value: Any, hint: Any) -> Any:
    """`value` as `hint` wants it (an int where a float is asked for becomes one); TypeError if it does not fit."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _conform_any(value, args)
    if origin is Literal:
        if any(value == a and type(value) is type(a) for a in args):
            return value
        raise TypeError
    if origin in (list, tuple, Sequence):
        return _conform_items(value, origin, args)
    if origin in (dict, Mapping):
        if isinstance(value, Mapping):
            return {conform(k, args[0]): conform(v, args[1]) for k, v in value.items()}
        raise TypeError
    return _conform_plain(value, hint)


def _conform_any(value: Any, hints: Sequence[Any]) -> Any:
    for hint in hints:
        try:
            return conform(value, hint)
        except TypeError:
            continue
    raise TypeError


def _conform_items(value: Any, origin: Any, args: Sequence[Any]) -> Any:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise TypeError
    if origin is tuple and args[-1] is not ...:
        if len(value) != len(args):
            raise TypeError
        return tuple(conform(v, a) for v, a in zip(value, args, strict=True))
    items = [conform(v, args[0]) for v in value]
    return tuple(items) if origin is tuple else items


def _conform_plain(value: Any, hint: Any) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return _float(value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is int and (isinstance(value, bool) or is_long(value)):
        raise TypeError
    if isinstance(hint, type) and isinstance(value, hint):
        return value
    raise TypeError


def is_long(value: Any) -> bool:
    """Whether it is an integer of more than 64 bits, or a list with one."""
    if isinstance(value, list):
        return any(map(is_long, value))
    return isinstance(value, int) and abs(value) > LARGEST_INTEGER


def _float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        raise TypeError from None


def describe(hint: Any) -> str:
    """The annotation in words."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(a) for a in args)
    if origin is Literal:
        return f"one of {', '.join(map(str, args))}"
    if origin is tuple and args[-1] is not ...:
        items = [describe(a) for a in args]
        each = f", each {items[0]}" if len(set(items)) == 1 else f": {', '.join(items)}"
        return f"a list of {len(items)} items{each}"
    if origin in (list, tuple, Sequence):
        return f"a list, each item {describe(args[0])}"
    if origin in (dict, Mapping):
        return "a mapping"
    return _NAMES.get(hint, getattr(hint, "__name__", str(hint)))
