"""Classes of the user in place of choices of config groups, for experiments from Python.

`fedsim.run_sweep(..., selector=MySelector)` uses a class that has no YAML file in conf/. Here the
class becomes what such a file would give: a config node `{"_target_": "module.MySelector"}` from
which Hydra builds the object. `functools.partial(MySelector, key=value)` adds values to the node.

Other processes, for example workers of a sweep, import a class by its name. They cannot do so for a
class that was defined in a notebook. Such a class is stored in the module `fedsim.api.session`, so
that its `_target_` has a value in this process. Its runs stay in this process and cannot be resumed
by another one (`is_lasting`).
"""

import functools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
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


def check_overrides(words: Sequence[str], parts: Mapping[str, Part]) -> None:
    """Raise `ConfigError` for overrides of a config group whose choice one of `parts` replaces:
    `selector=gpfl`, `selector.alpha=1`."""
    remedy = "give its values with it: functools.partial(..., key=value)"
    problems = []
    for word in words:
        key = word.lstrip("+~").partition("=")[0]
        group = re.split(r"[./@]", key)[0]  # of selector.alpha and selector/sketch: selector
        if group in parts:
            text = f"has no effect: a class takes the place of {group}"
            problems.append(Problem(key, ..., text, remedy))
    check(*problems)


def with_parts(job: ComposedJob, parts: Mapping[str, Part]) -> ComposedJob:
    """Return a copy of `job` in which each class of `parts` takes the place of its group's choice.

    The keys of `parts` are config groups. Raises `ConfigError` for a group that takes no class, for
    a part that is neither a class nor a function, and for values that a config cannot hold.
    """
    config, choices = dict(job.config), dict(job.choices)
    for group, part in parts.items():
        if group not in BASES:
            text = f"takes no class; those that do: {', '.join(BASES)}"
            raise ConfigError([Problem(group, part, text)])
        config[group], name = _node_of(group, part)
        # The choices that the replaced one included, such as selector/sketch, go with it.
        included = [key for key in choices if key.startswith(f"{group}/")]
        for key in included:
            del choices[key]
        choices[group] = name
    return replace(job, config=config, choices=choices)


def _node_of(group: str, part: Part) -> tuple[dict[str, Any], str]:
    """Return the config node of `part`, and the name of its class or function.

    A class that other processes cannot import is stored in `session`, for as long as this process
    lives. If another class has its name there, it gets a number: `Model_2`.
    """
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
    stored_name = name
    number = 1
    while hasattr(session, stored_name) and getattr(session, stored_name) is not target:
        number += 1
        stored_name = f"{name}_{number}"
    setattr(session, stored_name, target)
    return {"_target_": f"{session.__name__}.{stored_name}", **values}, name


def _plain(key: str, value: Any) -> Any:
    """Return `value` with NumPy's scalars replaced by Python's, also in lists, tuples and dicts.

    Raises `ConfigError`, which names the `key`, for arrays and other objects. A hash of all values
    as text names a run's folder. Two different arrays may have the same text, and the text of an
    object may contain its address, which differs between processes.
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
    """Return whether another process can import a class or function by its module and name.

    It must be at the top level of its module (not within a function or a class), and the module
    must be one that other processes find: not `__main__` or a notebook.
    """
    module = sys.modules.get(target.__module__)
    return (
        target.__qualname__ == target.__name__
        and getattr(module, target.__name__, None) is target
        and not_imported(target.__module__) is None
    )


def is_lasting(plan: Plan) -> bool:
    """Return whether another process can run `plan`: none of its classes is stored in `session`."""
    nodes = [plan.config.get(group) for group in BASES]
    targets = [str(node.get("_target_")) for node in nodes if isinstance(node, Mapping)]
    return not any(target.startswith(f"{session.__name__}.") for target in targets)
