"""Objects from config nodes: the one place where YAML meets constructors.

A node is a mapping with `_target_` (a class) and values. Values live in YAML once; names and types live in the
constructor's keyword-only parameters once. Whatever is not a subclass of the expected base is refused before it is
called, and a module that no part of an experiment can come from before it is imported (`fedsim.config.origin`): that is
the answer to hostile targets.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

from fedsim.config.moved import path_now
from fedsim.config.origin import REMEDY, find_in_working_folder, not_imported
from fedsim.config.positional import PASSED, mistaken_parameters
from fedsim.config.spelling import nearest
from fedsim.config.stand_ins import UNKNOWN, mistakes_beside, told_whatever
from fedsim.config.typecheck import conform, describe, is_long
from fedsim.errors import ConfigError, Problem

T = TypeVar("T")
Node = Mapping[str, Any]


def instantiate(node: Any, base: type[T], key: str, *runtime: Any) -> T:
    """Build the object that `node` describes.

    `runtime` objects go to the constructor's positional parameters. Raises `ConfigError` with every problem of the
    node, keys prefixed by `key`.
    """
    return construct(resolve(node, base, key), {k: v for k, v in node.items() if k != "_target_"}, key, (runtime,))


def construct(cls: Callable[..., T], values: Node, key: str, runtime: Sequence[Sequence[Any]] = ((),)) -> T:
    """`cls` called with `values` and one of `runtime`, of which more than one is given where they are made up.

    Raises `ConfigError` with all problems: of names and types, and what the constructor says of the other values
    whatever the mistaken ones and `runtime` are (`fedsim.config.stand_ins`).
    """
    bound = _bind(values, cls, key, len(runtime[0]))
    if bound.problems or bound.unknown:
        beside = mistakes_beside(cls, bound.arguments, bound.unknown, runtime)
        raise ConfigError([*bound.problems, *_within(key, beside)])
    found: list[Sequence[Problem]] = []
    for objects in runtime:
        try:
            return cls(*objects, **bound.arguments)
        except ConfigError as error:
            found.append(error.problems)
        except ValueError as error:
            found.append([Problem("", ..., str(error))])
    raise ConfigError(_within(key, told_whatever(found)))


def _within(key: str, problems: Iterable[Problem]) -> list[Problem]:
    return [p.within(key) if key else p for p in problems]


def inspect_node(node: Any, base: type[T], key: str) -> Callable[..., T]:
    """All checks of `instantiate` that need no runtime objects: target, names and types. Returns the class (or
    function)."""
    cls = resolve(node, base, key)
    bound = _bind({k: v for k, v in node.items() if k != "_target_"}, cls, key, len(PASSED.get(key, ())))
    if bound.problems or bound.unknown:
        raise ConfigError(bound.problems)
    return cls


def resolve(node: Any, base: type[T], key: str) -> Callable[..., T]:
    """The class that `node["_target_"]` names, a subclass of `base`, or the function that is annotated to return one.

    Nothing is called.
    """
    target = node.get("_target_") if isinstance(node, Mapping) else None
    expected = f"must be the dotted path of a subclass of {base.__module__}.{base.__qualname__}"
    if not isinstance(target, str):
        raise ConfigError([Problem(f"{key}._target_", target, expected, _remedy_of_none(key))])
    module_name, _, name = path_now(target).rpartition(".")
    if stranger := not_imported(module_name):
        raise ConfigError([Problem(f"{key}._target_", target, f"{expected}; {stranger}", REMEDY)])
    if module_name.partition(".")[0] != "fedsim":
        find_in_working_folder()
    try:
        found: Any = getattr(importlib.import_module(module_name), name) if module_name else None
        made = get_type_hints(found).get("return") if inspect.isfunction(found) else found
    except (Exception, SystemExit) as error:  # an import of a user's module may fail in any way
        reason = f"{expected}; importing it failed: {type(error).__name__}: {error}"
        remedy = _remedy(module_name, name)
        raise ConfigError([Problem(f"{key}._target_", target, reason, remedy)]) from error
    if not (isinstance(made, type) and issubclass(made, base)):
        raise ConfigError([Problem(f"{key}._target_", target, expected)])
    if inspect.isabstract(found):
        raise ConfigError([Problem(f"{key}._target_", target, expected + " that implements its abstract methods")])
    constructor: Callable[..., T] = found
    return constructor


def _remedy_of_none(key: str) -> str:
    group = key.split(".")[0]
    return f"a file of your own needs the line `_target_: <module>.<Class>`; fedsim's are in conf/{group}/"


def _remedy(module_name: str, name: str) -> str:
    """For a target that cannot be had: of a module that is there, the class that was meant."""
    module = sys.modules.get(module_name)
    if module is None:
        return "is its module on PYTHONPATH?"
    near = nearest(name, [n for n, value in vars(module).items() if inspect.isclass(value)])
    return f"did you mean {module_name}.{near}?" if near else "correct the class's name, or the module"


@dataclass(frozen=True)
class _Bound:
    """Keyword arguments that are of their types; the other parameters with their annotations, and why."""

    arguments: dict[str, Any]
    unknown: dict[str, Any]
    problems: list[Problem]


def _bind(values: Node, constructor: Callable[..., Any], key: str, count: int) -> _Bound:
    """`values` as keyword arguments for `constructor`, which is given `count` objects by position."""
    hints = get_type_hints(constructor.__init__ if isinstance(constructor, type) else constructor)  # type: ignore[misc]
    keywords = [p for p in inspect.signature(constructor).parameters.values() if p.kind is p.KEYWORD_ONLY]
    names = [p.name for p in keywords]
    missing = [p.name for p in keywords if p.name not in values and p.default is p.empty]
    mistaken = mistaken_parameters(constructor, values, key, count)
    problems = [unknown(name, names, key) for name in values if name not in names and name not in mistaken]
    problems += mistaken.values()
    problems += [Problem(_join(key, name), ..., f"is missing; {constructor.__qualname__} needs it") for name in missing]
    unsound = set(missing)
    arguments: dict[str, Any] = {}
    for name in (n for n in names if n in values):
        try:
            arguments[name] = _argument(values[name], hints.get(name, Any), _join(key, name))
        except ConfigError as error:
            unsound.add(name)
            problems += error.problems
    return _Bound(arguments, {name: hints.get(name, Any) for name in names if name in unsound}, problems)


def _argument(value: Any, hint: Any, key: str) -> Any:
    if value is UNKNOWN:
        raise ConfigError([])
    if isinstance(value, Mapping) and "_target_" in value and isinstance(hint, type) and hint is not object:
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
    hint = f"did you mean {_join(key, near)}?" if near else f"known here: {', '.join(known) or 'no key'}"
    return Problem(_join(key, name), ..., "is not a known key", hint)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
