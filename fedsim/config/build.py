"""Build objects from nodes of a config: the one place where YAML meets constructors.

A *node* is a mapping with `_target_` (the dotted path of a class, or of a function that returns an
object) and the values of its parameters. For example, `instantiate` makes a selector of the node at
the key `selector`:

    node = {"_target_": "fedsim.selectors.random.Random", "mode": "size"}
    instantiate(node, Selector, "selector", population)  # Random(population, mode="size")

1. It imports the class if `fedsim.config.user_modules` allows the module. The class must be a
   subclass of the expected base class, here `Selector`. A function must return one.
2. It checks the names and types of all values.
3. It calls the class, which checks its own rules, for example ranges.

A `key` is the dotted path of a node in the config, for example `optimizer.schedule`. In messages it
stands before the names of parameters. A *constructor* is the class or function that a node names.
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
Values = Mapping[str, Any]
"""The values of a node's parameters by name, such as `{"mode": "size"}`."""

PASSED: Mapping[str, tuple[str, ...]] = {
    "dataset": ("data_dir", "cache_dir"),
    "model": ("input_shape", "num_classes"),
    "engine": ("workload",),
    "selector": ("population",),
    "aggregator": ("buffers",),
    "clients": ("num_clients", "num_classes", "streams"),
}
"""Names of the arguments that fedsim passes by position to the class of a config group, by the key
of the group's node. Other classes get none. `inspect_node` and messages use the names, so they must
agree with the calls of `instantiate`."""
UNKNOWN_KEY = "is not a known key"
"""The rule that an unknown key violates."""
ORDER_REMEDY = "put these parameters first; those from the config are given by name"
"""What to do about a constructor that does not take the arguments of `PASSED` by position."""


def instantiate(node: Any, base: type[T], key: str, *passed: Any) -> T:
    """Return the object that `node` describes, an instance of `base`.

    `passed` are the arguments that fedsim passes by position (see `PASSED`). Raises `ConfigError`
    with the problem of the target. If there is none, the error has all problems of names and types.
    If there are none of these, it has those of the constructor's own rules.
    """
    return construct(resolve(node, base, key), values_in(node), key, *passed)


def construct(constructor: Callable[..., T], values: Values, key: str, *passed: Any) -> T:
    """Call a class or function with the positional arguments `passed` and the keywords `values`.

    Raises `ConfigError` with all problems of names and types, or, if there are none, with those
    that the constructor raises. Keys in its `ConfigError` are its parameters, so they are put below
    `key`. Its `ValueError` becomes a problem of `key`.
    """
    arguments = _arguments(values, constructor, key, len(passed))  # its keys are complete
    try:
        return constructor(*passed, **arguments)
    except ConfigError as error:
        if not key:  # the values are the config itself
            raise
        raise ConfigError(problem.within(key) for problem in error.problems) from error
    except ValueError as error:
        raise ConfigError([Problem(key, ..., str(error))]) from error


def inspect_node(node: Any, base: type[T], key: str) -> Callable[..., T]:
    """Return the constructor of a node after checking its target, names and types.

    The constructor is not called. Nodes inside this node are built, because this checks them.
    Raises `ConfigError`.
    """
    constructor = resolve(node, base, key)
    _arguments(values_in(node), constructor, key, len(PASSED.get(key, ())))
    return constructor


def values_in(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a node's parameters."""
    return {name: value for name, value in node.items() if name != "_target_"}


def resolve(node: Any, base: type[T], key: str) -> Callable[..., T]:
    """Return the constructor that `node["_target_"]` names, without calling it.

    It must be a subclass of `base` without abstract methods, or a function whose annotation says
    that it returns `base` or a subclass. Raises `ConfigError` otherwise.
    """
    target = node.get("_target_") if isinstance(node, Mapping) else None
    expected = f"must be the dotted path of a subclass of {base.__module__}.{base.__qualname__}"

    def rejection(more: str, remedy: str = "") -> ConfigError:
        """Return the error that the target is not what is `expected`, followed by `more`."""
        return ConfigError([Problem(_join(key, "_target_"), target, expected + more, remedy)])

    # 1. The target is a dotted path.
    if not isinstance(target, str) or "." not in target:
        line = "a file of your own needs the line `_target_: <module>.<Class>`"
        remedy = f"{line}; fedsim's are in conf/{_group_of(key)}/"
        if node is None and "." in key:
            remedy = f"~{key} leaves it out"
        raise rejection("", remedy)

    # 2. Its module may be imported, and this succeeds.
    module_name, _, name = target.rpartition(".")
    reason = not_imported(module_name)
    if reason is not None:
        raise rejection(f"; {reason}", REMEDY)
    if module_name.partition(".")[0] != "fedsim":
        find_in_working_folder()
    try:
        constructor = _import(target)
        # called for its cache: it keeps the source that was imported, for the file may change later
        user_code({"_target_": target})
        built_class = constructor
        if inspect.isfunction(constructor):
            built_class = get_type_hints(constructor).get("return")
    except (Exception, SystemExit) as error:  # a module of the user's may raise anything
        reason = f"importing it failed: {type(error).__name__}: {error}"
        raise rejection(f"; {reason}", _import_remedy(module_name, name, error)) from error

    # 3. It builds objects of the expected class.
    if not isinstance(built_class, type) or not issubclass(built_class, base):
        raise rejection("")
    if inspect.isabstract(constructor):
        raise rejection(" that implements its abstract methods")
    return constructor


def _group_of(key: str) -> str:
    """Return the config group to which a key belongs: `tracker` for `tracker.wandb`, which is one
    of several choices in it, and `optimizer/schedule` for `optimizer.schedule`."""
    parts = key.split(".")
    while len(parts) > 1 and not conf_dir().joinpath(*parts).is_dir():
        parts.pop()
    return "/".join(parts)


def _import(target: str) -> Any:
    """Return the object that a dotted path names.

    A class of fedsim may have moved after a config was written. Then it is looked up by its name
    among the targets in conf/.
    """
    module_name, _, name = target.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ModuleNotFoundError, AttributeError):
        is_shipped = module_name.partition(".")[0] == "fedsim"
        current_target = _shipped_targets().get(name) if is_shipped else None
        if current_target is None or current_target == target:  # equal: the path is current
            raise
        return _import(current_target)


@cache
def _shipped_targets() -> dict[str, str]:
    """Return the dotted paths of all targets in conf/, by the name of the class or function."""
    targets: dict[str, str] = {}
    for path in conf_dir().rglob("*.yaml"):
        text = path.read_text(encoding="utf-8")
        for target in re.findall(r"_target_: (fedsim\.[\w.]+)", text):
            targets[target.rpartition(".")[2]] = target
    return targets


def _import_remedy(module_name: str, name: str, error: BaseException) -> str:
    """Return the remedy if importing `name` from a module raised `error`."""
    module = sys.modules.get(module_name)
    if module is not None:
        own_classes = []
        for other, value in vars(module).items():
            if inspect.isclass(value) and value.__module__ == module_name:
                own_classes.append(other)
        same_letters = [other for other in own_classes if other.lower() == name.lower()]
        similar = same_letters[0] if same_letters else nearest(name, own_classes)
        if similar is None:
            return "correct the class's name, or the module"
        return f"did you mean {module_name}.{similar}?"
    if not isinstance(error, ModuleNotFoundError):
        return f"correct the module {module_name}: it was found, and raised this error"
    if f"{module_name}.".startswith(f"{error.name}."):
        return "is its module on PYTHONPATH?"
    return f"install {error.name}, or correct the import in {module_name}"


def _arguments(
    values: Values, constructor: Callable[..., Any], key: str, num_passed: int
) -> dict[str, Any]:
    """Return `values`, converted to the annotated types, as keyword arguments of a constructor.

    The constructor also gets `num_passed` arguments by position, which are not in `values`. Raises
    `ConfigError` with all unknown and missing names and all values of a wrong type.
    """
    signature = inspect.signature(constructor)
    hints = _hints(constructor, key)
    passed_names = PASSED.get(key, ())
    positional, by_name = _parameters(signature, num_passed)

    # 1. The names of the values
    problems = []
    for name in values:
        if name in positional and name not in passed_names:
            text = f"has it where fedsim passes {', '.join(passed_names)}"
            text = f"{constructor.__qualname__} {text}"
            problems.append(Problem(_join(key, name), ..., text, ORDER_REMEDY))
        elif name not in by_name:
            problems.append(unknown(name, by_name, key))

    # 2. Their types, and missing values
    arguments: dict[str, Any] = {}
    for name, parameter in by_name.items():
        value_key = _join(key, name)
        if name in values:
            try:
                arguments[name] = _argument(values[name], hints.get(name, Any), value_key)
            except ConfigError as error:
                problems += error.problems
        elif parameter.default is parameter.empty:
            text = f"is missing; {constructor.__qualname__} needs it"
            problems.append(Problem(value_key, ..., text))
    if problems:
        raise ConfigError(problems)

    # 3. The call. This fails only for a user's class that does not take what fedsim passes.
    placeholders = [None] * num_passed
    try:
        signature.bind(*placeholders, **arguments)
    except TypeError as error:
        text = f"must take what fedsim passes by position: {', '.join(passed_names) or 'nothing'}"
        text = f"{constructor.__qualname__} {text} ({error})"
        raise ConfigError([Problem(key, ..., text, ORDER_REMEDY)]) from error
    return arguments


def _parameters(
    signature: inspect.Signature, num_passed: int
) -> tuple[list[str], dict[str, inspect.Parameter]]:
    """Return the names of the first `num_passed` parameters, which get fedsim's arguments, and the
    other parameters by name.

    Parameters such as `*args` are in neither.
    """
    positional: list[str] = []
    by_name: dict[str, inspect.Parameter] = {}
    for name, parameter in signature.parameters.items():
        takes_position = parameter.kind in (
            parameter.POSITIONAL_ONLY,
            parameter.POSITIONAL_OR_KEYWORD,
        )
        if takes_position and len(positional) < num_passed:
            positional.append(name)
        elif parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            by_name[name] = parameter
    return positional, by_name


def _hints(constructor: Callable[..., Any], key: str) -> dict[str, Any]:
    """Return the annotations of a constructor's parameters. Raises `ConfigError`."""
    annotated: Any = constructor
    if isinstance(constructor, type):
        annotated = constructor.__init__  # type: ignore[misc]
    try:
        return get_type_hints(annotated)
    except Exception as error:  # an annotation of a user's class may be any expression
        text = f"the annotations of {constructor.__qualname__} cannot be evaluated: {error}"
        remedy = "import their names at the top of the module, not only under TYPE_CHECKING"
        raise ConfigError([Problem(key, ..., text, remedy)]) from error


def _argument(value: Any, hint: Any, key: str) -> Any:
    """Return the value of the parameter at `key`, converted to its annotation `hint`.

    A node becomes an object if `hint` is a class. For `Any` and `object` it stays a mapping,
    because its target might be anything. Raises `ConfigError`.
    """
    is_node = isinstance(value, Mapping) and "_target_" in value
    if is_node and isinstance(hint, type) and hint not in (Any, object):
        return instantiate(value, hint, key)
    try:
        return conform(value, hint)
    except TypeError:
        size = " of at most 64 bits" if is_long(value) else ""
        raise ConfigError([Problem(key, value, f"must be {describe(hint)}{size}")]) from None


def unknown(name: str, known: Iterable[str], key: str = "") -> Problem:
    """Return the problem of a name below `key` that is not among the `known` names.

    Its remedy is the most similar known name, or all known names if none is similar.
    """
    names = sorted(known)
    similar = nearest(name, names)
    if similar is None:
        remedy = f"known here: {', '.join(names) or 'no key'}"
    else:
        remedy = f"did you mean {_join(key, similar)}?"
    return Problem(_join(key, name), ..., UNKNOWN_KEY, remedy)


def _join(prefix: str, name: str) -> str:
    """Return the dotted key of `name` below `prefix`, which may be empty."""
    return f"{prefix}.{name}" if prefix else name
