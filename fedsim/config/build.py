"""Objects from config nodes: the one place where YAML meets constructors.

A node is a mapping with `_target_` (a class) and values. Whatever is not a subclass of the expected
base is refused before it is called, and a module that no part of an experiment can come from before
it is imported (`fedsim.config.typecheck`). The names and types of a node are checked first, all of
them, and then the rules of its constructor.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, TypeVar, get_type_hints

from fedsim.config.typecheck import (
    PASSED,
    REMEDY,
    conform,
    describe,
    find_in_working_folder,
    is_long,
    not_imported,
)
from fedsim.config.user_code import user_code
from fedsim.core.disk import conf_dir
from fedsim.core.errors import ConfigError, Problem
from fedsim.core.text import nearest

T = TypeVar("T")
Node = Mapping[str, Any]


class Gathered:
    """What several checks find: one problem of each key and value."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def run(self, act: Callable[..., T], *args: Any) -> T | None:
        """What `act` returns; None where it raises a `ConfigError`, whose problems are kept."""
        try:
            return act(*args)
        except ConfigError as error:
            self.add(*error.problems)
            return None

    def run_users(self, act: Callable[..., T], *args: Any) -> T | None:
        """As `run`, where a user's class is called: whatever else it raises ends its own job, when
        that is built."""
        try:
            return self.run(act, *args)
        except (Exception, SystemExit):
            return None

    def add(self, *problems: Problem | None) -> None:
        for problem in problems:
            if problem is not None and (problem.key, problem.value) not in [
                (p.key, p.value) for p in self.problems
            ]:
                self.problems.append(problem)


def instantiate(node: Any, base: type[T], key: str, *runtime: Any) -> T:
    """The object that `node` describes, with `runtime` as its positional parameters. Raises
    `ConfigError` with every problem, prefixed by `key`."""
    return construct(resolve(node, base, key), _values(node), key, *runtime)


def construct(cls: Callable[..., T], values: Node, key: str, *runtime: Any) -> T:
    """`cls` called with `runtime` and `values`. Raises `ConfigError` with all problems of names and
    types, or, if there are none, with what the constructor says."""
    arguments = _arguments(values, cls, key, len(runtime))
    try:
        return cls(*runtime, **arguments)
    except ConfigError as error:
        raise ConfigError(p.within(key) if key else p for p in error.problems) from error
    except ValueError as error:
        raise ConfigError([Problem(key, ..., str(error))]) from error


def inspect_node(node: Any, base: type[T], key: str) -> Callable[..., T]:
    """The class (or function) of a node whose target, names and types are sound."""
    cls = resolve(node, base, key)
    _arguments(_values(node), cls, key, len(PASSED.get(key, ())))
    return cls


def _values(node: Node) -> dict[str, Any]:
    return {k: v for k, v in node.items() if k != "_target_"}


def resolve(node: Any, base: type[T], key: str) -> Callable[..., T]:
    """The class that `node["_target_"]` names, a subclass of `base`, or the function annotated to
    return one. Nothing is called."""
    target = node.get("_target_") if isinstance(node, Mapping) else None
    expected = f"must be the dotted path of a subclass of {base.__module__}.{base.__qualname__}"

    def refused(reason: str, remedy: str = "") -> ConfigError:
        return ConfigError([Problem(f"{key}._target_", target, expected + reason, remedy)])

    if not isinstance(target, str):
        line = "a file of your own needs the line `_target_: <module>.<Class>`"
        raise refused("", f"{line}; fedsim's are in conf/{key}/")
    module_name, _, name = target.rpartition(".")
    if stranger := not_imported(module_name):
        raise refused(f"; {stranger}", REMEDY)
    if module_name.partition(".")[0] != "fedsim":
        find_in_working_folder()
    try:
        found: Any = _imported(target)
        user_code({"_target_": target})  # which knows it from here on as it was imported
        made = get_type_hints(found).get("return") if inspect.isfunction(found) else found
    except (Exception, SystemExit) as error:  # an import of a user's module may fail in any way
        reason = f"; importing it failed: {type(error).__name__}: {error}"
        raise refused(reason, _remedy(module_name, name)) from error
    if not (isinstance(made, type) and issubclass(made, base)):
        raise refused("")
    if inspect.isabstract(found):
        raise refused(" that implements its abstract methods")
    constructor: Callable[..., T] = found
    return constructor


def _imported(target: str) -> Any:
    """What a dotted path names. A class of fedsim is known by its name, wherever it was when a
    config was written."""
    module_name, _, name = target.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), name) if module_name else None
    except (ModuleNotFoundError, AttributeError):
        now = _shipped_targets().get(name) if module_name.partition(".")[0] == "fedsim" else None
        if now is None or now == target:
            raise
        return _imported(now)


@cache
def _shipped_targets() -> dict[str, str]:
    """The dotted path of every class that a file of conf/ names, by the class's name."""
    texts = [path.read_text(encoding="utf-8") for path in conf_dir().rglob("*.yaml")]
    targets = [
        target for text in texts for target in re.findall(r"_target_: (fedsim\.[\w.]+)", text)
    ]
    return {target.rpartition(".")[2]: target for target in targets}


def _remedy(module_name: str, name: str) -> str:
    """For a target that cannot be had: of a module that is there, the class that was meant."""
    module = sys.modules.get(module_name)
    if module is None:
        return "is its module on PYTHONPATH?"
    near = nearest(name, [n for n, value in vars(module).items() if inspect.isclass(value)])
    return (
        f"did you mean {module_name}.{near}?" if near else "correct the class's name, or the module"
    )


def _arguments(
    values: Node, constructor: Callable[..., Any], key: str, count: int
) -> dict[str, Any]:
    """`values` as keyword arguments for `constructor`, which is given `count` objects by
    position."""
    hints = get_type_hints(constructor.__init__ if isinstance(constructor, type) else constructor)  # type: ignore[misc]
    signature = inspect.signature(constructor)
    by_position = [
        p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD
    ][:count]
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = {
        n: p for n, p in signature.parameters.items() if p.kind in kinds and n not in by_position
    }
    missing = [name for name, p in known.items() if name not in values and p.default is p.empty]
    problems = [unknown(name, known, key) for name in values if name not in known]
    problems += [
        Problem(_join(key, name), ..., f"is missing; {constructor.__qualname__} needs it")
        for name in missing
    ]
    arguments: dict[str, Any] = {}
    for name in (n for n in known if n in values):
        try:
            arguments[name] = _argument(values[name], hints.get(name, Any), _join(key, name))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    try:
        signature.bind(*[None] * count, **arguments)
    except TypeError as error:
        passed = ", ".join(PASSED.get(key, ())) or "nothing"
        text = f"{constructor.__qualname__} must take what fedsim passes by position: {passed} ({error})"
        raise ConfigError(
            [Problem(key, ..., text, "change its parameters: the others are given by name")]
        ) from error
    return arguments


def _argument(value: Any, hint: Any, key: str) -> Any:
    if (
        isinstance(value, Mapping)
        and "_target_" in value
        and isinstance(hint, type)
        and hint is not object
    ):
        return instantiate(value, hint, key)
    try:
        return conform(value, hint)
    except TypeError:
        size = " of at most 64 bits" if is_long(value) else ""
        raise ConfigError([Problem(key, value, f"must be {describe(hint)}{size}")]) from None


def unknown(name: str, known: Iterable[str], key: str = "") -> Problem:
    """The problem of an unknown name, with the nearest known one."""
    known = sorted(known)
    near = nearest(name, known)
    hint = (
        f"did you mean {_join(key, near)}?"
        if near
        else f"known here: {', '.join(known) or 'no key'}"
    )
    return Problem(_join(key, name), ..., "is not a known key", hint)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
