"""Classes in place of files of conf/: the config node that a class, or a `functools.partial` of
one, stands for."""

import functools
import itertools
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.api import session
from fedsim.config.job import ComposedJob
from fedsim.config.parts import BASES
from fedsim.config.plan import Plan
from fedsim.config.user_modules import not_imported
from fedsim.core.errors import ConfigError, Problem, check, rule

Part = Callable[..., Any]
"""A class, a function that is annotated to return one, or a `functools.partial` of either with
values by keyword."""


def with_parts(job: ComposedJob, parts: Mapping[str, Part]) -> ComposedJob:
    """`job` with `parts` in place of the choices of their groups.

    Raises `ConfigError` for a group that takes no class, for what is no class, and for words of the
    command line that choose or change what a class takes the place of.
    """
    remedy = "give its values with it: functools.partial(..., key=value)"
    typed = [(of, key) for key in sorted(job.typed) if (of := re.split(r"[./@]", key)[0]) in parts]
    check(
        *(
            Problem(key, ..., f"has no effect: a class takes the place of {of}", remedy)
            for of, key in typed
        )
    )
    new, chosen = dict(job.config), dict(job.choices)
    for group, part in parts.items():
        if group not in BASES:
            raise ConfigError(
                [Problem(group, part, f"takes no class; those that do: {', '.join(BASES)}")]
            )
        new[group], name = _node_of(group, part)
        chosen = {
            key: choice for key, choice in chosen.items() if not key.startswith(f"{group}/")
        } | {group: name}
    return replace(job, config=new, choices=chosen)


def _node_of(group: str, part: Part) -> tuple[dict[str, Any], str]:
    """The config node of `part`, and the name of its class."""
    values: dict[str, Any] = {}
    made: Any = part
    if isinstance(part, functools.partial):
        check(rule(not part.args, group, part, "has values without names", "give them by keyword"))
        made, values = (
            part.func,
            {key: _plain(f"{group}.{key}", value) for key, value in part.keywords.items()},
        )
    name = getattr(made, "__name__", None)
    if name is None or not callable(made):
        remedy = f"pass the class, or functools.partial({type(part).__name__}, key=value): it is built for each run"
        raise ConfigError([Problem(group, part, "must be a class", remedy)])
    if is_importable(made):
        return {"_target_": f"{made.__module__}.{name}", **values}, name
    names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
    free = next(
        one for one in names if getattr(session, one, made) is made
    )  # another class of its name keeps its own
    setattr(session, free, made)
    return {"_target_": f"{session.__name__}.{free}", **values}, name


def _plain(key: str, value: Any) -> Any:
    """`value` with Python's numbers, truth values and strings in place of NumPy's scalars, in lists
    and dicts, too.

    Raises `ConfigError` for what a config cannot hold. A run's folder is named after its values as
    text: that of two arrays may be the same, and that of an object is another one in every process.
    """
    if isinstance(value, np.integer | np.floating | np.bool_ | np.str_):
        return value.item()
    if type(value) in (list, tuple):
        return type(value)(_plain(f"{key}.{number}", one) for number, one in enumerate(value))
    if type(value) is dict:
        return {_plain(key, name): _plain(f"{key}.{name}", one) for name, one in value.items()}
    told = f"is a {type(value).__name__}; must be made of numbers, strings, truth values, None, paths, lists and dicts"
    remedy = (
        "an array as array.tolist(), an object as {'_target_': 'module.Class', ...} with its values"
    )
    plain = type(value) in (int, float, str, bool, type(None)) or isinstance(value, Path)
    check(rule(plain, key, value, told, remedy))
    return value


def is_importable(made: Any) -> bool:
    """Whether another process finds the class or function by its name, so that runs with it can go
    on there."""
    module = sys.modules.get(made.__module__)
    return (
        made.__qualname__ == made.__name__
        and getattr(module, made.__name__, None) is made
        and not_imported(made.__module__) is None
    )


def is_lasting(plan: Plan) -> bool:
    """Whether all classes of a run can be imported by another process."""
    nodes = [plan.config.get(group) for group in BASES]
    targets = [str(node.get("_target_")) for node in nodes if isinstance(node, Mapping)]
    return not any(target.startswith(f"{session.__name__}.") for target in targets)
