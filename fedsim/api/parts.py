"""Classes in place of files of conf/: the config node that a class, or a `functools.partial` of one, stands for."""

import functools
import itertools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fedsim.api import session
from fedsim.config.compose import Composed
from fedsim.config.plan import Plan
from fedsim.config.typecheck import not_imported
from fedsim.config.words import key_of, parse_one, typed_in
from fedsim.core.errors import ConfigError, Problem, check, rule
from fedsim.data.base import Dataset
from fedsim.engine.optimizers import LocalOptimizer
from fedsim.partitions.base import Partition
from fedsim.rounds.aggregators import Aggregator
from fedsim.rounds.availability import Availability
from fedsim.selectors.base import Selector

Part = Callable[..., Any]
"""A class, a function that is annotated to return one, or a `functools.partial` of either with values by keyword."""

BASES: Mapping[str, type] = {
    "dataset": Dataset,
    "partition": Partition,
    "availability": Availability,
    "model": nn.Module,
    "optimizer": LocalOptimizer,
    "selector": Selector,
    "aggregator": Aggregator,
}
"""Config groups whose choice may be given as a class."""

PLAIN = (int, float, str, bool, type(None))
"""Types of the single values of a config, besides paths."""


def with_parts(job: Composed, parts: Mapping[str, Part]) -> Composed:
    """`job` with `parts` in place of the choices of their groups.

    Raises `ConfigError` for a group that takes no class, and for what is no class.
    """
    new, chosen = dict(job.config), dict(job.choices)
    for group, part in parts.items():
        if group not in BASES:
            raise ConfigError([Problem(group, part, f"takes no class; those that do: {', '.join(BASES)}")])
        new[group], name = _node_of(group, part)
        chosen = {key: choice for key, choice in chosen.items() if not key.startswith(f"{group}/")} | {group: name}
    return replace(job, config=new, choices=chosen)


def words_without_effect(words: Sequence[str], parts: Mapping[str, Part]) -> dict[str, Problem]:
    """Those of `words` that are of a group in `parts`: the choice of a file, or a value of one; each with its problem.

    To be called inside `fedsim.config.compose.search_path`. A word that is no override is left out.
    """
    found: dict[str, Problem] = {}
    for word in words:
        with suppress(ConfigError):
            override = parse_one(word)
            key = key_of(override)
            if (group := re.split(r"[./@]", key)[0]) in parts:
                rule = f"has no effect: the class {_name(parts[group])} takes the place of all of {group}"
                remedy = f"give its values with it: {group}=functools.partial({_name(parts[group])}, ...)"
                found[word] = Problem(key, typed_in(override) or ..., rule, remedy)
    return found


def _name(part: Part) -> str:
    made = part.func if isinstance(part, functools.partial) else part
    return getattr(made, "__name__", type(made).__name__)


def _node_of(group: str, part: Part) -> tuple[dict[str, Any], str]:
    """The config node of `part`, and the name of its class."""
    values: dict[str, Any] = {}
    made: Any = part
    if isinstance(part, functools.partial):
        if part.args:
            raise ConfigError([Problem(group, part, "has values without names", "give them by keyword")])
        made, values = part.func, {key: _plain(value) for key, value in part.keywords.items()}
        check(*(_strange(f"{group}.{key}", value) for key, value in values.items()))
    name = getattr(made, "__name__", None)
    if name is None or not callable(made):
        remedy = f"pass the class, or functools.partial({type(part).__name__}, key=value): it is built for each run"
        raise ConfigError([Problem(group, part, "must be a class", remedy)])
    if is_importable(made):
        return {"_target_": f"{made.__module__}.{name}", **values}, name
    names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
    free = next(one for one in names if getattr(session, one, made) is made)  # another class of its name keeps its own
    setattr(session, free, made)
    return {"_target_": f"{session.__name__}.{free}", **values}, name


def _plain(value: Any) -> Any:
    """`value` with Python's numbers, truth values and strings in place of NumPy's scalars, in lists and dicts, too."""
    if isinstance(value, np.integer | np.floating | np.bool_ | np.str_):
        return value.item()
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return {_plain(k): _plain(v) for k, v in value.items()} if type(value) is dict else value


def _strange(key: str, value: Any) -> Problem | None:
    """None if a config can hold `value`, else the problem.

    A run's folder is named after its values as text: that of two arrays may be the same, and that of an object is
    another one in every process.
    """
    if type(value) in (list, tuple, dict):
        inner = value.items() if type(value) is dict else enumerate(value)
        return next(filter(None, (_strange(f"{key}.{name}", own) for name, own in inner)), None)
    told = f"is a {type(value).__name__}; must be made of numbers, strings, truth values, None, paths, lists and dicts"
    remedy = "an array as array.tolist(), an object as {'_target_': 'module.Class', ...} with its values"
    return rule(type(value) in PLAIN or isinstance(value, Path), key, value, told, remedy)


def is_importable(made: Any) -> bool:
    """Whether another process finds the class or function by its name, so that runs with it can go on there."""
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
