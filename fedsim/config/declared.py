"""The parameters of fedsim's own classes, read from their source: importing those would import
PyTorch, for seconds.

From a class's annotations another one is made, which has its parameters alone and so finds the
mistakes in names, types and ranges. What source alone does not say (rules over several parameters,
users' classes) is found when the parts of a config are built.
"""

import ast
import builtins
import importlib
import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from fedsim.config.build import Gathered, construct
from fedsim.core.errors import Problem
from fedsim.core.parameters import parameters
from fedsim.core.server_data import tree_of

LIGHT = ("typing", "pathlib", "collections.abc", "annotated_types", "fedsim.core.parameters")
"""Modules of names in annotations that are imported; any other name stands for an object of any
kind."""
Fields = dict[str, tuple[Any, bool]]
"""Annotation, and whether there is a default, by name."""

_found: dict[tuple[str, str], list[Problem]] = {}
"""By key and node: the jobs of a sweep share most of them."""


def mistakes(node: Any, key: str = "") -> Iterator[Problem]:
    """Those of names, types and ranges in all nodes in `node`, at `key`, that name a class of
    fedsim."""
    if not isinstance(node, Mapping):
        return
    target = node.get("_target_")
    if isinstance(target, str) and target.startswith("fedsim."):
        yield from _mistakes_of(target, node, key)
    for name, value in node.items():
        yield from mistakes(value, f"{key}.{name}" if key else str(name))


def _mistakes_of(target: str, node: Mapping[str, Any], key: str) -> list[Problem]:
    known = (key, repr(node))
    if known not in _found:
        cls, found = declared(target), Gathered()
        if cls is not None:
            found.run(
                construct,
                cls,
                {name: value for name, value in node.items() if name != "_target_"},
                key,
            )
        _found[known] = found.problems
    return _found[known]


@cache
def declared(target: str) -> type | None:
    """A class with the parameters of the one at a dotted path; None where its source does not tell
    them."""
    module, _, name = target.rpartition(".")
    fields = _fields(module, name)
    if fields is None:
        return None
    content: dict[str, Any] = {one: None for one, (_, has_default) in fields.items() if has_default}
    hints = {one: hint for one, (hint, _) in fields.items()}
    return parameters(type(name, (), {**content, "__annotations__": hints, "__module__": __name__}))


def ranges(target: str) -> dict[str, str]:
    """The range of each number among the parameters of a class, in the words of its error: `>=
    1`."""
    rules = getattr(declared(target), "__parameters__", {}) if target.startswith("fedsim.") else {}
    ends = -math.inf, math.inf
    broken = {
        name: next(filter(None, (one(name, x) for one in of for x in ends)), None)
        for name, of in rules.items()
    }
    told = {name: problem.rule.removeprefix("must ") for name, problem in broken.items() if problem}
    return {name: text.removeprefix("be ").removeprefix("lie ") for name, text in told.items()}


def _fields(module: str, name: str) -> Fields | None:
    """The parameters of a class, its bases' first, or of a function; None if there is neither."""
    names = _names(module)
    cls = next(
        (node for node in names.tree if isinstance(node, ast.ClassDef) and node.name == name), None
    )
    makers = [
        node for node in (cls.body if cls else names.tree) if isinstance(node, ast.FunctionDef)
    ]
    maker = next((node for node in makers if node.name == ("__init__" if cls else name)), None)
    if maker is not None:
        given = zip(maker.args.kwonlyargs, maker.args.kw_defaults, strict=True)
        noted = [(one.arg, one.annotation, default is not None) for one, default in given]
        return {
            name: (names.value_of(hint) if hint else Any, has_default)
            for name, hint, has_default in noted
        }
    if cls is None:
        return None
    found: Fields = {}
    for base in cls.bases:
        if isinstance(base, ast.Name) and base.id not in ("ABC", "Protocol"):
            where, original = names.origins.get(base.id, (module, base.id))
            above = _fields(where, original) if where.startswith("fedsim.") else None
            if above is None:
                return None
            found |= above
    if any(isinstance(mark, ast.Name) and mark.id == "parameters" for mark in cls.decorator_list):
        for node in cls.body:
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            if ast.unparse(node.annotation).startswith("ClassVar"):
                found.pop(node.target.id, None)
            elif not isinstance(node.value, ast.Call):  # field(kw_only=False): what fedsim passes
                found[node.target.id] = names.value_of(node.annotation), node.value is not None
    return found


class _Names(dict[str, Any]):
    """What names mean in a module's annotations."""

    def __init__(self, module: str) -> None:
        super().__init__()
        self.tree = tree_of(module)
        self.origins: dict[str, tuple[str, str]] = {}
        self.assigned: dict[str, ast.expr] = {}
        for node in self.tree:
            if isinstance(node, ast.ImportFrom) and node.module:
                self.origins |= {
                    alias.asname or alias.name: (node.module, alias.name) for alias in node.names
                }
            elif isinstance(node, ast.Assign):
                pairs = [(target, node.value) for target in node.targets]
                for target, value in pairs[:]:
                    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                        pairs += zip(target.elts, value.elts, strict=True)
                self.assigned |= {
                    name.id: given for name, given in pairs if isinstance(name, ast.Name)
                }

    def value_of(self, annotation: ast.expr) -> Any:
        return eval(compile(ast.Expression(annotation), "<annotation>", "eval"), {}, self)

    def __missing__(self, name: str) -> Any:
        if name in dir(builtins):
            raise KeyError(name)
        if name not in self.origins:
            value = self.assigned.get(name)
            return (
                self.value_of(value)
                if isinstance(value, ast.Subscript | ast.BinOp | ast.Constant)
                else object
            )
        module, original = self.origins[name]
        if module in LIGHT:
            return getattr(importlib.import_module(module), original)
        return _names(module)[original] if module.startswith("fedsim.") else object


@cache
def _names(module: str) -> _Names:
    return _Names(module)
