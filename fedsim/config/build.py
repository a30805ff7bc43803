"""Build objects from nodes of a config: the one place where YAML meets constructors.

A node is a mapping with `_target_` (the dotted path of a class, or of a function that returns an
object) and the values of its parameters. `instantiate` builds the object of a node. It imports a
module only if `fedsim.config.user_modules` allows it, and calls a class only if it is a subclass of
the expected base class. It checks the names and types of all values first. Then it calls the
constructor, which checks its own rules. A `key` is the dotted place of a node in the config, and
begins the keys in messages.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, TypeVar, get_type_hints

from fedsim.config.typecheck import conform, describe, is_long
from fedsim.config.user_code import user_code
from fedsim.config.user_modules import REMEDY, find_in_working_folder, not_imported
from fedsim.core.disk import conf_dir
from fedsim.core.errors import ConfigError, Problem
from fedsim.core.text import nearest

T = TypeVar("T")
Node = Mapping[str, Any]
"""A node, or the values of its parameters."""

PASSED: Mapping[str, tuple[str, ...]] = {
    "dataset": ("data_dir", "cache_dir"),
    "model": ("input_shape", "num_classes"),
    "engine": ("workload",),
    "selector": ("population",),
    "aggregator": ("buffers",),
    "clients": ("num_clients", "num_classes", "streams"),
}
"""The arguments that fedsim passes by position to the classes of a group; other groups get none."""


class ProblemCollector:
    """Collects the problems of several checks. Of several problems of one key and value it keeps
    the first."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def run(self, function: Callable[..., T], *arguments: Any) -> T | None:
        """Return what `function` returns; None if it raises a `ConfigError`, which is collected."""
        try:
            return function(*arguments)
        except ConfigError as error:
            self.add(*error.problems)
            return None

    def run_user_code(self, function: Callable[..., T], *arguments: Any) -> T | None:
        """Do the same as `run` for a function that may call a class of the user's.

        Other exceptions of this class are ignored here: None is returned. The job that uses the
        class will meet them again, and it alone ends.
        """
        try:
            return self.run(function, *arguments)
        except (Exception, SystemExit):
            return None

    def add(self, *problems: Problem | None) -> None:
        """Add all problems that are not None and whose key and value are not known yet."""
        for problem in problems:
            if problem is None:
                continue
            # a list, because values may be lists, which no set can hold
            known_keys = [(known.key, known.value) for known in self.problems]
            if (problem.key, problem.value) not in known_keys:
                self.problems.append(problem)


def instantiate(node: Any, base: type[T], key: str, *passed: Any) -> T:
    """Return the object that `node` describes, an instance of `base`.

    `passed` are the arguments that fedsim passes by position (see `PASSED`). Raises `ConfigError`
    with all problems of the node.
    """
    return construct(resolve(node, base, key), _values(node), key, *passed)


def construct(constructor: Callable[..., T], values: Node, key: str, *passed: Any) -> T:
    """Call a class or function with the positional arguments `passed` and the keywords `values`.

    Raises `ConfigError` with all problems of names and types. If there are none, the constructor is
    called, and the error has the problems that it raises.
    """
    arguments = _arguments(values, constructor, key, len(passed))
    try:
        return constructor(*passed, **arguments)
    except ConfigError as error:
        if not key:  # the values are at the top level of the config
            raise
        raise ConfigError(problem.within(key) for problem in error.problems) from error
    except ValueError as error:
        raise ConfigError([Problem(key, ..., str(error))]) from error


def inspect_node(node: Any, base: type[T], key: str) -> Callable[..., T]:
    """Return the class or function of a node after checking its target, names and types.

    It is not called. Raises `ConfigError`.
    """
    constructor = resolve(node, base, key)
    _arguments(_values(node), constructor, key, len(PASSED.get(key, ())))
    return constructor


def _values(node: Node) -> dict[str, Any]:
    """Return the values of a node's parameters."""
    return {name: value for name, value in node.items() if name != "_target_"}


def resolve(node: Any, base: type[T], key: str) -> Callable[..., T]:
    """Return the class or function that `node["_target_"]` names, without calling it.

    It is a concrete subclass of `base`, or a function whose annotation says that it returns an
    instance of one. Raises `ConfigError` for anything else.
    """
    target = node.get("_target_") if isinstance(node, Mapping) else None
    expected = f"must be the dotted path of a subclass of {base.__module__}.{base.__qualname__}"

    def rejection(reason: str, remedy: str = "") -> ConfigError:
        return ConfigError([Problem(f"{key}._target_", target, expected + reason, remedy)])

    if not isinstance(target, str):
        line = "a file of your own needs the line `_target_: <module>.<Class>`"
        raise rejection("", f"{line}; fedsim's are in conf/{key}/")
    module_name, _, name = target.rpartition(".")
    if reason := not_imported(module_name):
        raise rejection(f"; {reason}", REMEDY)
    if module_name.partition(".")[0] != "fedsim":
        find_in_working_folder()
    try:
        constructor = _import(target)
        # Notes the source of a user's module now that it has been imported; it may change later.
        user_code({"_target_": target})
        is_function = inspect.isfunction(constructor)
        cls = get_type_hints(constructor).get("return") if is_function else constructor
    except (Exception, SystemExit) as error:  # a module of the user's may raise anything
        reason = f"; importing it failed: {type(error).__name__}: {error}"
        raise rejection(reason, _import_remedy(module_name, name)) from error
    if not isinstance(cls, type) or not issubclass(cls, base):
        raise rejection("")
    if inspect.isabstract(constructor):
        raise rejection(" that implements its abstract methods")
    return constructor


def _import(target: str) -> Any:
    """Return the object that a dotted path names.

    A class of fedsim may have moved after a config was written. fedsim then finds it by its name
    among the classes that conf/ names.
    """
    module_name, _, name = target.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), name) if module_name else None
    except (ModuleNotFoundError, AttributeError):
        is_shipped = module_name.partition(".")[0] == "fedsim"
        current_target = _shipped_targets().get(name) if is_shipped else None
        if current_target is None or current_target == target:  # equal: it would fail again
            raise
        return _import(current_target)


@cache
def _shipped_targets() -> dict[str, str]:
    """Return the dotted path of every class that a file of conf/ names, by the class's name."""
    targets: dict[str, str] = {}
    for path in conf_dir().rglob("*.yaml"):
        text = path.read_text(encoding="utf-8")
        for target in re.findall(r"_target_: (fedsim\.[\w.]+)", text):
            targets[target.rpartition(".")[2]] = target
    return targets


def _import_remedy(module_name: str, name: str) -> str:
    """Return the remedy for a class `name` that cannot be imported from its module."""
    module = sys.modules.get(module_name)
    if module is None:
        return "is its module on PYTHONPATH?"
    classes = [known for known, value in vars(module).items() if inspect.isclass(value)]
    similar = nearest(name, classes)
    if similar is None:
        return "correct the class's name, or the module"
    return f"did you mean {module_name}.{similar}?"


def _arguments(
    values: Node, constructor: Callable[..., Any], key: str, num_passed: int
) -> dict[str, Any]:
    """Return `values`, converted to the annotated types, as keyword arguments of a constructor.

    It gets `num_passed` arguments by position in addition. Raises `ConfigError` with all unknown
    and missing names and all values of a wrong type.
    """
    annotated: Any = constructor
    if isinstance(constructor, type):
        annotated = constructor.__init__  # type: ignore[misc]
    hints = get_type_hints(annotated)
    signature = inspect.signature(constructor)
    parameters = list(signature.parameters.values())
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    keyword_only = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    known = {p.name: p for p in [*positional[num_passed:], *keyword_only]}

    problems = [unknown(name, known, key) for name in values if name not in known]
    arguments: dict[str, Any] = {}
    for name, parameter in known.items():
        place = _join(key, name)
        if name in values:
            try:
                arguments[name] = _argument(values[name], hints.get(name, Any), place)
            except ConfigError as error:
                problems += error.problems
        elif parameter.default is parameter.empty:
            text = f"is missing; {constructor.__qualname__} needs it"
            problems.append(Problem(place, ..., text))
    if problems:
        raise ConfigError(problems)

    # Only the constructor of a user's class can fail here: it may not take what fedsim passes.
    try:
        signature.bind(*[None] * num_passed, **arguments)
    except TypeError as error:
        passed = ", ".join(PASSED.get(key, ())) or "nothing"
        text = f"must take what fedsim passes by position: {passed} ({error})"
        remedy = "change its parameters: the others are given by name"
        problem = Problem(key, ..., f"{constructor.__qualname__} {text}", remedy)
        raise ConfigError([problem]) from error
    return arguments


def _argument(value: Any, hint: Any, key: str) -> Any:
    """Return a value converted to its annotation `hint`. A node inside a node becomes an object.

    Raises `ConfigError`.
    """
    is_node = isinstance(value, Mapping) and "_target_" in value
    if is_node and isinstance(hint, type) and hint is not object:
        return instantiate(value, hint, key)
    try:
        return conform(value, hint)
    except TypeError:
        size = " of at most 64 bits" if is_long(value) else ""
        raise ConfigError([Problem(key, value, f"must be {describe(hint)}{size}")]) from None


def unknown(name: str, known: Iterable[str], key: str = "") -> Problem:
    """Return the problem of an unknown name below `key`, with the most similar known one."""
    names = sorted(known)
    similar = nearest(name, names)
    if similar is None:
        remedy = f"known here: {', '.join(names) or 'no key'}"
    else:
        remedy = f"did you mean {_join(key, similar)}?"
    return Problem(_join(key, name), ..., "is not a known key", remedy)


def _join(prefix: str, name: str) -> str:
    """Return the dotted key of `name` below `prefix`, which may be empty."""
    return f"{prefix}.{name}" if prefix else name
