"""Values in the place of those that are not known, so that the mistakes beside them are found, too.

A value that is missing, of the wrong type or misspelt hides what a constructor would say of the others. It is called
with several made-up values in its place; what it says whatever they are is a mistake of its own.

Objects from config nodes: the one place where YAML meets constructors.

A node is a mapping with `_target_` (a class) and values. Values live in YAML once; names and types live in the
constructor's keyword-only parameters once. Whatever is not a subclass of the expected base is refused before it is
called, and a module that no part of an experiment can come from before it is imported (`fedsim.config.typecheck`): that
is the answer to hostile targets.
"""

import importlib
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fedsim.config.typecheck import (
    PASSED,
    REMEDY,
    conform,
    describe,
    find_in_working_folder,
    is_long,
    mistaken_parameters,
    not_imported,
)
from fedsim.core.disk import conf_dir
from fedsim.core.errors import ConfigError, Problem, nearest

MADE_UP_ROWS = 3
"""Made-up values for each that is not known."""
_VALUES: dict[Any, Sequence[Any]] = {
    int: (1, 10, 1000),
    float: (0.5, 0.1, 2.0),
    bool: (False, True, False),
    str: ("x", "y", "z"),
    Path: (Path("x"), Path("y"), Path("z")),
}


class Unknown:
    """The value of a key that the user may have meant by something else: not judged, and not taken for its default."""

    def __repr__(self) -> str:
        return "unknown"


UNKNOWN = Unknown()


def told_whatever(lists: Iterable[Sequence[Problem]]) -> list[Problem]:
    """The problems of the first list that are in all others, too; a remedy that differs is left out."""
    first, *others = [list(problems) for problems in lists]
    told = []
    for problem in first:
        found = [next((p for p in problems if _same(p, problem)), None) for problems in others]
        if None not in found:
            same = all(p is not None and p.remedy == problem.remedy for p in found)
            told.append(problem if same else Problem(problem.key, problem.value, problem.rule))
    return told


def _same(one: Problem, other: Problem) -> bool:
    return (one.key, one.value, one.rule) == (other.key, other.value, other.rule)


def mistakes_beside(
    constructor: Callable[..., Any],
    arguments: Mapping[str, Any],
    unknown: Mapping[str, Any],
    runtime: Sequence[Sequence[Any]] = ((),),
) -> list[Problem]:
    """What `constructor` says of `arguments` whatever the `unknown` ones are, which are given with their annotations.

    `runtime`: one or `MADE_UP_ROWS` lists of its positional arguments.
    """
    found = []
    for row in range(MADE_UP_ROWS):
        stand_ins = {name: stand_in(hint, row) for name, hint in unknown.items()}
        problems = _problems_of(constructor, runtime[row % len(runtime)], {**arguments, **stand_ins})
        found.append([p for p in problems if p.key.partition(".")[0] not in unknown])
        if not found[-1]:
            return []
    return told_whatever(found)


def _problems_of(constructor: Callable[..., Any], runtime: Sequence[Any], values: Mapping[str, Any]) -> list[Problem]:
    try:
        constructor(*runtime, **values)
    except ConfigError as error:
        return list(error.problems)
    except (Exception, SystemExit):  # of a made-up value
        return []
    return []


def stand_in(hint: Any, row: int) -> Any:
    """The made-up value number `row` for an annotation; an object of no use where it is a class."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return stand_in(next(a for a in args if a is not type(None)), row)
    if origin is Literal:
        return args[row % len(args)]
    if origin in (list, Sequence):
        return [stand_in(args[0], row)]
    if origin is tuple:
        return tuple(stand_in(a, row) for a in args if a is not ...)
    if origin in (dict, Mapping):
        return {}
    return _VALUES[hint][row] if hint in _VALUES else object()


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
    whatever the mistaken ones and `runtime` are (`fedsim.config.build`).
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
    module_name, _, name = target.rpartition(".")
    if stranger := not_imported(module_name):
        raise ConfigError([Problem(f"{key}._target_", target, f"{expected}; {stranger}", REMEDY)])
    if module_name.partition(".")[0] != "fedsim":
        find_in_working_folder()
    try:
        found: Any = _imported(target)
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


def _imported(target: str) -> Any:
    """What a dotted path names. A class of fedsim is known by its name, wherever it was when a config was written."""
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
    targets = [target for text in texts for target in re.findall(r"_target_: (fedsim\.[\w.]+)", text)]
    return {target.rpartition(".")[2]: target for target in targets}


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
