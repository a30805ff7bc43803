"""Classes instead of files of conf/: the config node for a class, or for a `functools.partial` of
one."""

import functools
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
    """Return `job` with `parts` instead of the choices of their groups.

    Raises `ConfigError` for a group that takes no class, for a part that is no class, and for
    overrides that choose or change what a class replaces.
    """
    remedy = "give its values with it: functools.partial(..., key=value)"
    problems = []
    for key in sorted(job.typed):
        group = re.split(r"[./@]", key)[0]
        if group in parts:
            text = f"has no effect: a class takes the place of {group}"
            problems.append(Problem(key, ..., text, remedy))
    check(*problems)
    config, choices = dict(job.config), dict(job.choices)
    for group, part in parts.items():
        if group not in BASES:
            text = f"takes no class; those that do: {', '.join(BASES)}"
            raise ConfigError([Problem(group, part, text)])
        config[group], name = _node_of(group, part)
        below = [key for key in choices if key.startswith(f"{group}/")]
        for key in below:
            del choices[key]
        choices[group] = name
    return replace(job, config=config, choices=choices)


def _node_of(group: str, part: Part) -> tuple[dict[str, Any], str]:
    """Return the config node of `part`, and the name of its class."""
    values: dict[str, Any] = {}
    target: Any = part
    if isinstance(part, functools.partial):
        check(rule(not part.args, group, part, "has values without names", "give them by keyword"))
        target = part.func
        values = {key: _plain(f"{group}.{key}", value) for key, value in part.keywords.items()}
    name = getattr(target, "__name__", None)
    if name is None or not callable(target):
        example = f"functools.partial({type(part).__name__}, key=value)"
        remedy = f"pass the class, or {example}: it is built for each run"
        raise ConfigError([Problem(group, part, "must be a class", remedy)])
    if is_importable(target):
        return {"_target_": f"{target.__module__}.{name}", **values}, name
    free = name
    number = 1
    while getattr(session, free, target) is not target:  # another class has this name
        number += 1
        free = f"{name}_{number}"
    setattr(session, free, target)
    return {"_target_": f"{session.__name__}.{free}", **values}, name


def _plain(key: str, value: Any) -> Any:
    """Return `value` with Python's numbers, truth values and strings instead of NumPy's scalars,
    also in lists and dicts.

    Raises `ConfigError` for what a config cannot hold. A run's folder is named after its values as
    text: two arrays may have the same text, and an object has another one in every process.
    """
    if isinstance(value, np.integer | np.floating | np.bool_ | np.str_):
        return value.item()
    if type(value) in (list, tuple):
        return type(value)(_plain(f"{key}.{number}", item) for number, item in enumerate(value))
    if type(value) is dict:
        return {_plain(key, name): _plain(f"{key}.{name}", item) for name, item in value.items()}
    text = (
        f"is a {type(value).__name__}; must be made of numbers, strings, truth values, None, "
        "paths, lists and dicts"
    )
    remedy = (
        "an array as array.tolist(), an object as {'_target_': 'module.Class', ...} with its values"
    )
    is_plain = type(value) in (int, float, str, bool, type(None)) or isinstance(value, Path)
    check(rule(is_plain, key, value, text, remedy))
    return value


def is_importable(target: Any) -> bool:
    """Return whether another process finds the class or function by its name, so that it can resume
    runs with it."""
    module = sys.modules.get(target.__module__)
    return (
        target.__qualname__ == target.__name__
        and getattr(module, target.__name__, None) is target
        and not_imported(target.__module__) is None
    )


def is_lasting(plan: Plan) -> bool:
    """Return whether all classes of a run can be imported by another process."""
    nodes = [plan.config.get(group) for group in BASES]
    targets = [str(node.get("_target_")) for node in nodes if isinstance(node, Mapping)]
    return not any(target.startswith(f"{session.__name__}.") for target in targets)
