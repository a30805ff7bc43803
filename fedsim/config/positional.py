"""Positional parameters of a part's constructor: they are fedsim's, and values of the YAML are keyword-only ones."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter
from typing import Any

from fedsim.errors import Problem

PASSED: Mapping[str, tuple[str, ...]] = {
    "dataset": ("data_dir", "cache_dir"),
    "model": ("input_shape", "num_classes"),
    "engine": ("workload",),
    "selector": ("population",),
    "aggregator": ("buffers",),
}
"""What fedsim passes to the classes of a group, by position; to all others nothing."""


def mistaken_parameters(
    constructor: Callable[..., Any], values: Mapping[str, Any], key: str, count: int
) -> dict[str, Problem]:
    """By the names of parameters, what is wrong with a signature that is to take `count` objects by position.

    A parameter that has a value in `values`, or that has to be given one, must be keyword-only. "" stands for there
    being too few positional ones.
    """
    parameters = inspect.signature(constructor).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    passed = PASSED.get(key) or tuple(p.name for p in positional[:count])
    misplaced = {p.name: p for p in positional if p.name in values and p.name not in passed}
    misplaced |= {p.name: p for p in positional[count:] if p.default is p.empty}
    few = len(positional) < count and not any(p.kind is p.VAR_POSITIONAL for p in parameters)
    names = [name for p in positional[:count] if (name := p.name) not in misplaced]
    first = names if len(names) == count else passed
    others = any(p.kind is p.KEYWORD_ONLY for p in parameters)
    remedy = f"write `{_signature(constructor, first, list(misplaced), others)}`"
    if few and not misplaced:
        rule = f"{constructor.__qualname__} must take what fedsim passes by position: {', '.join(passed)}"
        return {"": Problem(key, ..., rule, remedy)}
    return {name: _misplaced(p, values, constructor, key, remedy) for name, p in misplaced.items()}


def _misplaced(
    parameter: Parameter, values: Mapping[str, Any], constructor: Callable[..., Any], key: str, remedy: str
) -> Problem:
    name, given = parameter.name, parameter.name in values
    rule = f"must be keyword-only in the constructor of {constructor.__qualname__}"
    where = f"{key}.{name}" if key else name
    return Problem(where, values.get(name, ...), rule, remedy if given else f"{remedy}, and give {where} a value")


def _signature(constructor: Callable[..., Any], first: Sequence[str], keywords: Sequence[str], others: bool) -> str:
    is_class = isinstance(constructor, type)
    names = [*(["self"] if is_class else []), *first, "*", *keywords, *(["..."] if others or not keywords else [])]
    return f"def {'__init__' if is_class else constructor.__name__}({', '.join(names)})"
