"""Check a value of a config against the type annotation of its parameter.

`fedsim.config.build` calls `conform` for each value. The supported annotations are those that
hyper-parameters use: plain types, `Literal`, unions, lists, tuples and mappings. pydantic cannot
take this over: even its strict mode accepts true and 1.0 for `Literal[1]`.
"""

import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from fedsim.core.disk import user_path

LARGEST_INTEGER = 2**63 - 1
"""The largest integer that NumPy and torch can hold, which count in 64 bits."""
UNIONS = (Union, types.UnionType)
LISTS = (list, tuple, Sequence)
MAPPINGS = (dict, Mapping)
TYPE_NAMES: Mapping[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    type(None): "null",
    dict: "a mapping",
    Path: "a path (~ and $HOME are known, other names are not)",
}


def conform(value: Any, hint: Any) -> Any:
    """Return `value` in the type that the annotation `hint` requires.

    An integer becomes a float for `float`, and a string becomes a path for `Path`.

    Raises TypeError, without a message, if the value does not fit (see `describe`).
    """
    origin = get_origin(hint)
    arguments = get_args(hint)
    if hint is Any:
        return value
    if origin in UNIONS:
        for alternative in arguments:
            with suppress(TypeError):
                return conform(value, alternative)
    elif origin is Literal:
        if any(value == choice and type(value) is type(choice) for choice in arguments):
            return value
    elif origin in LISTS:
        return _conform_items(value, hint)
    elif origin in MAPPINGS and isinstance(value, Mapping):
        key_hint, item_hint = arguments
        return {conform(key, key_hint): conform(item, item_hint) for key, item in value.items()}
    elif isinstance(hint, type) and _is_instance(value, hint):
        return _convert(value, hint)
    raise TypeError


def _conform_items(value: Any, hint: Any) -> Any:
    """Return a list or tuple with items in the types that `hint` requires. Raises TypeError."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError
    item_hints = _fixed_items(hint)
    if item_hints is None:
        item_hints = get_args(hint)[:1] * len(value)
    if len(item_hints) != len(value):
        raise TypeError
    items = map(conform, value, item_hints)
    return tuple(items) if get_origin(hint) is tuple else list(items)


def _fixed_items(hint: Any) -> tuple[Any, ...] | None:
    """Return the annotations of a tuple of fixed length; None for a list of any length."""
    arguments = get_args(hint)
    return arguments if get_origin(hint) is tuple and arguments[-1] is not ... else None


def _is_instance(value: Any, expected: type) -> bool:
    """Return whether `value` fits a plain type. true is no integer, and an integer fits `float`."""
    if expected in (int, float) and isinstance(value, int):
        return not isinstance(value, bool) and not is_long(value)
    if expected is Path and isinstance(value, str):
        return True
    return isinstance(value, expected)


def _convert(value: Any, expected: type) -> Any:
    """Return `value`, an instance by `_is_instance`, in the type `expected`.

    Raises TypeError for a path with an unknown user or variable, which would name a wrong folder.
    """
    if expected is float:
        return float(value)
    if expected is Path:
        path = user_path(value)
        if str(path).startswith(("~", "$")):
            raise TypeError
        return path
    return value


def is_long(value: Any) -> bool:
    """Return whether `value` is an integer of more than 64 bits."""
    return isinstance(value, int) and abs(value) > LARGEST_INTEGER


def describe(hint: Any) -> str:
    """Return the annotation `hint` in words: "an integer or null"."""
    origin = get_origin(hint)
    arguments = get_args(hint)
    if origin in UNIONS:
        return " or ".join(map(describe, arguments))
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin in LISTS:
        if _fixed_items(hint) is None:
            return f"a list, each item {describe(arguments[0])}"
        return f"a list of {len(arguments)} items: {', '.join(map(describe, arguments))}"
    if origin in MAPPINGS:
        return "a mapping"
    return TYPE_NAMES.get(hint, getattr(hint, "__name__", str(hint)))
