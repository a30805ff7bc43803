"""Check nodes of a config against the parameters of fedsim's classes without importing the classes.

To import a selector is to import PyTorch, which takes seconds, and a typing error should be
reported at once. So this file reads the annotations of a class from its source code and makes a
stand-in of them: a class without methods that has the same parameters, with the same types and
ranges. Constructing the stand-in raises the errors of names, types and ranges that constructing the
class would raise.

Two things only the class itself can tell: rules over several parameters, and everything about
classes of the user. `fedsim.config.parts` checks them when it builds the components.
"""

import ast
import builtins
import importlib
import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from fedsim.config.build import construct, values_in
from fedsim.core.declared_signals import tree_of
from fedsim.core.errors import Problem, ProblemCollector
from fedsim.core.parameters import parameters

LIGHT_MODULES = (
    "typing",
    "pathlib",
    "collections.abc",
    "annotated_types",
    "fedsim.core.parameters",
)
"""Modules that are imported if an annotation uses a name from them, because that takes no time."""


class Parameter(NamedTuple):
    """A keyword parameter of a class: its annotation, and whether it has a default."""

    annotation: Any
    has_default: bool


Parameters = dict[str, Parameter]

_known_problems: dict[tuple[str, str], list[Problem]] = {}
"""Problems by key and node. The jobs of a sweep have most of their nodes in common."""


def parameter_problems(node: Any, key: str = "") -> Iterator[Problem]:
    """Yield the wrong names, types and ranges in `node`, which is at `key`, and in all nodes in it.

    Nodes that name a class of the user's are not checked.
    """
    if not isinstance(node, Mapping):
        return
    target = node.get("_target_")
    if isinstance(target, str) and target.startswith("fedsim."):
        known = (key, repr(node))
        if known not in _known_problems:
            _known_problems[known] = _problems_of_node(target, node, key)
        yield from _known_problems[known]
    for name, value in node.items():
        yield from parameter_problems(value, f"{key}.{name}" if key else str(name))


def _problems_of_node(target: str, node: Mapping[str, Any], key: str) -> list[Problem]:
    """Return the problems of one node; none if the stand-in of `target` is not known."""
    collector = ProblemCollector()
    cls = stand_in(target)
    if cls is not None:
        collector.run(construct, cls, values_in(node), key)
    return collector.problems


@cache
def stand_in(target: str) -> type | None:
    """Return a class that has the parameters of the class (or function) `target`, and nothing else.

    Returns None if the source of `target` does not tell its parameters.
    """
    module, _, name = target.rpartition(".")
    declared = _parameters(module, name)
    if declared is None:
        return None
    body: dict[str, Any] = {"__module__": __name__}
    for parameter_name, parameter in declared.items():
        if parameter.has_default:
            body[parameter_name] = None  # any default: no method ever sees it
    body["__annotations__"] = {key: parameter.annotation for key, parameter in declared.items()}
    return parameters(type(name, (), body))


def ranges(target: str) -> dict[str, str]:
    """Return the range of each numeric parameter of a class of fedsim, in words: ">= 1".

    The words are those of the error that an infinite number raises.
    """
    texts: dict[str, str] = {}
    cls = stand_in(target) if target.startswith("fedsim.") else None
    for name, rules in getattr(cls, "__parameters__", {}).items():
        for rule in rules:
            problem = rule(name, -math.inf) or rule(name, math.inf)
            if problem and name not in texts:
                text = problem.rule.removeprefix("must ")
                texts[name] = text.removeprefix("be ").removeprefix("lie ")
    return texts


def _parameters(module: str, name: str) -> Parameters | None:
    """Return the parameters of a class or function; None if the module's source has neither."""
    source = _source_of(module)
    for statement in source.statements:
        if isinstance(statement, ast.FunctionDef) and statement.name == name:
            return _parameters_of_function(source, statement)
        if isinstance(statement, ast.ClassDef) and statement.name == name:
            return _parameters_of_class(source, statement)
    return None


def _parameters_of_function(source: "ModuleSource", function: ast.FunctionDef) -> Parameters:
    """Return the keyword-only parameters; fedsim passes the others by position."""
    keyword_only: Parameters = {}
    arguments = function.args
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        hint = source.evaluate(argument.annotation) if argument.annotation else Any
        keyword_only[argument.arg] = Parameter(hint, default is not None)
    return keyword_only


def _parameters_of_class(source: "ModuleSource", cls: ast.ClassDef) -> Parameters | None:
    """Return the parameters of `__init__`, or the fields of a class decorated by `@parameters`.

    The fields of its base classes come first. Returns None if a base class is not one of fedsim's,
    so that its parameters are not known.
    """
    for statement in cls.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            return _parameters_of_function(source, statement)
    fields: Parameters = {}
    for base in cls.bases:
        if isinstance(base, ast.Name) and base.id not in ("ABC", "Protocol"):
            module, name = source.imports.get(base.id, (source.module, base.id))
            inherited = _parameters(module, name) if module.startswith("fedsim.") else None
            if inherited is None:
                return None
            fields |= inherited
    if "parameters" in map(ast.unparse, cls.decorator_list):
        for statement in cls.body:
            if isinstance(statement, ast.AnnAssign):
                _add_field(fields, source, statement)
    return fields


def _add_field(fields: Parameters, source: "ModuleSource", field: ast.AnnAssign) -> None:
    """Add an annotated attribute of a class to `fields`, if it is a parameter."""
    name = ast.unparse(field.target)
    if ast.unparse(field.annotation).startswith("ClassVar"):
        fields.pop(name, None)  # the class has fixed a parameter of its base class
    elif not isinstance(field.value, ast.Call):  # field(kw_only=False) is passed by position
        fields[name] = Parameter(source.evaluate(field.annotation), field.value is not None)


class ModuleSource:
    """The source code of one module, and what the names in its annotations stand for."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.statements = tree_of(module)
        self.imports: dict[str, tuple[str, str]] = {}
        self.constants: dict[str, ast.expr] = {}
        for statement in self.statements:
            if isinstance(statement, ast.ImportFrom) and statement.module:
                for alias in statement.names:
                    self.imports[alias.asname or alias.name] = (statement.module, alias.name)
            elif isinstance(statement, ast.Assign):
                self.constants[ast.unparse(statement.targets[0])] = statement.value

    def evaluate(self, annotation: ast.expr) -> Any:
        """Return the value of an expression of this module, such as `Annotated[int, Ge(1)]`."""
        names = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}
        values = {name: self.resolve(name) for name in names - set(dir(builtins))}
        return eval(compile(ast.Expression(annotation), "<annotation>", "eval"), values)

    def resolve(self, name: str) -> Any:
        """Return what a name of this module stands for: a type of a light module, or a constant.

        Returns `object` for everything else, which any value satisfies.
        """
        if name in self.imports:
            module, original_name = self.imports[name]
            if module in LIGHT_MODULES:
                return getattr(importlib.import_module(module), original_name)
            if module.startswith("fedsim."):
                return _source_of(module).resolve(original_name)
        constant = self.constants.get(name)
        if isinstance(constant, ast.Subscript | ast.BinOp | ast.Constant):
            return self.evaluate(constant)
        return object


@cache
def _source_of(module: str) -> ModuleSource:
    """Return the source of a module, which is read once."""
    return ModuleSource(module)
