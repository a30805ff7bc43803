"""The signals that a selector declares in `needs`, read in the source of its class.

Lists and reports do not import the module of the class: an import runs code and takes time. Only
assignments to `needs` are read. So a class must assign the whole set at once, and not add to it in
an `if`.
"""

import ast
import operator
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import resolve_name
from pathlib import Path
from typing import Any, NamedTuple

import fedsim

COMPARISONS: dict[type, Callable[[Any, Any], object]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
"""Comparisons that the reader of expressions understands."""


def declared_signals(node: Any) -> set[str]:
    """Return the signals in the `needs` of the class that a config's `node` names, and of its
    bases.

    The values of `node` decide which branch of a condition counts. If they do not, both branches
    count.
    """
    values = node if isinstance(node, Mapping) else {}
    signals: set[str] = set()
    read: set[str] = set()
    waiting = [str(values.get("_target_"))]
    while waiting:
        path = waiting.pop()
        if path in read:
            continue
        read.add(path)
        source = _class_source(path)
        reader = _SignalReader(source.names, values)
        for declaration in source.declarations:
            signals |= reader.signals(declaration)
        waiting += source.bases
    return signals


class ClassSource(NamedTuple):
    """What the source of a class says about its signals.

    - `declarations`: the expressions that are assigned to `needs`.
    - `names`: the expressions of other names, which declarations may use: variables and constants
      of the module, of the class and of its methods.
    - `bases`: the paths of the base classes.
    """

    declarations: list[ast.expr]
    names: dict[str, ast.expr]
    bases: list[str]


@cache
def _class_source(path: str) -> ClassSource:
    """Return what the source of the class at `path` says; nothing if there is no such class."""
    module, _, class_name = path.rpartition(".")
    definition = None
    names: dict[str, ast.expr] = {}
    imports: dict[str, str] = {}
    for statement in tree_of(module):
        if isinstance(statement, ast.ClassDef) and statement.name == class_name:
            definition = statement
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            imports |= _imports(statement, module)
        else:
            names |= _assignments([statement])
    if definition is None:
        return ClassSource([], {}, [])

    of_class: list[ast.expr] = []
    of_object: list[ast.expr] = []
    for target, value in _assignments(ast.walk(definition)):
        if target == "self.needs":
            of_object.append(value)
        elif target == "needs":
            of_class.append(value)
        else:
            names[target] = value

    bases = []
    for base in definition.bases:
        first, dot, rest = ast.unparse(base).partition(".")
        bases.append(imports.get(first, f"{module}.{first}") + dot + rest)
    # An assignment to an object takes the place of the class's.
    return ClassSource(of_object or of_class, names, bases)


def _assignments(nodes: Iterable[ast.AST]) -> list[tuple[str, ast.expr]]:
    """Return the target and the value of each assignment to one target, in order."""
    assignments = []
    for node in nodes:
        if isinstance(node, ast.Assign):
            assignments.append((ast.unparse(node.targets[0]), node.value))
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            assignments.append((ast.unparse(node.target), node.value))
    return assignments


def _imports(statement: ast.Import | ast.ImportFrom, module: str) -> dict[str, str]:
    """Return the paths of what an import in a `module` brings in, by the names there."""
    paths = {}
    if isinstance(statement, ast.Import):
        for alias in statement.names:
            if alias.asname is not None:
                paths[alias.asname] = alias.name
            else:
                outermost = alias.name.partition(".")[0]  # `import a.b` brings in a.
                paths[outermost] = outermost
        return paths
    file = _file_of(module)
    is_package = file is not None and file.name == "__init__.py"
    package = module if is_package else module.rpartition(".")[0]
    try:
        origin = resolve_name("." * statement.level + (statement.module or ""), package)
    except ImportError:  # The relative import leads out of the outermost package.
        return {}
    for alias in statement.names:
        paths[alias.asname or alias.name] = f"{origin}.{alias.name}"
    return paths


class UnknownError(Exception):
    """The value of an expression does not follow from the config."""


class _SignalReader:
    """Reads the signals in expressions, without running code.

    `names` has the expressions that names stand for, and `values` the values of the config's node.
    """

    def __init__(self, names: Mapping[str, ast.expr], values: Mapping[str, Any]) -> None:
        self.names = names
        self.values = values

    def signals(self, expression: ast.AST) -> set[str]:
        """Return the signals in an expression."""
        match expression:
            case ast.Attribute(value=ast.Name(id="Signal"), attr=member):
                return {member.lower()}
            case ast.Call(func=ast.Name(id="Signal"), args=[ast.Attribute(attr=key)]):
                return {str(self.values.get(key))}
            case ast.Name(id=name) if name in self.names:
                return self._without(name).signals(self.names[name])
        try:
            parts: Iterable[ast.AST] = self._chosen_parts(expression)
        except UnknownError:
            parts = ast.iter_child_nodes(expression)
        signals = set()
        for part in parts:
            signals |= self.signals(part)
        return signals

    def _without(self, name: str) -> "_SignalReader":
        """Return a reader that does not know a name, so that no name leads back to itself."""
        names = {other: node for other, node in self.names.items() if other != name}
        return _SignalReader(names, self.values)

    def _chosen_parts(self, expression: ast.AST) -> list[ast.expr]:
        """Return the part of an expression that the config's values choose.

        It is a branch of a condition, or the entry of a dictionary at a key: none if the dictionary
        lacks the key. Raises `UnknownError` if the values do not tell, and for other expressions.
        """
        match expression:
            case ast.IfExp(test=test, body=body, orelse=otherwise):
                return [body if self._is_true(test) else otherwise]
            case ast.Subscript(value=ast.Name(id=table_name), slice=key):
                return self._entry(table_name, key)
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=table_name), attr="get"), args=[key, *_]
            ):
                return self._entry(table_name, key)
        raise UnknownError

    def _entry(self, table_name: str, key: ast.expr) -> list[ast.expr]:
        """Return the expression at a key of a dictionary, or none if it lacks the key."""
        table = self.names.get(table_name)
        if not isinstance(table, ast.Dict):
            raise UnknownError
        chosen_key = self._value(key)
        for table_key, entry in zip(table.keys, table.values, strict=True):
            if table_key is not None and self._value(table_key) == chosen_key:
                return [entry]
        return []

    def _is_true(self, test: ast.expr) -> bool:
        """Return whether a comparison of two values holds."""
        match test:
            case ast.Compare(left=left, ops=[comparison], comparators=[right]):
                compare = COMPARISONS.get(type(comparison))
                if compare is not None:
                    return bool(compare(self._value(left), self._value(right)))
        raise UnknownError

    def _value(self, expression: ast.expr) -> object:
        """Return the value of a constant, of a key of the config, or of a name for one of them."""
        match expression:
            case ast.Constant(value=value):
                return value
            case ast.Attribute(value=ast.Name(id="self"), attr=key) if key in self.values:
                return self.values[key]
            case ast.Name(id=name) if name in self.names:
                return self._without(name)._value(self.names[name])
        raise UnknownError


@cache
def tree_of(module: str) -> list[ast.stmt]:
    """Return the statements of a module without importing it; none if it cannot be read."""
    file = _file_of(module)
    if file is None:
        return []
    try:
        return ast.parse(file.read_text(encoding="utf-8")).body
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return []


def _file_of(module: str) -> Path | None:
    """Return the file of a module without importing it; None if it has none."""
    folders = [str(Path(fedsim.__file__).parents[1]), str(Path.cwd()), *sys.path]
    origin = None
    for part in module.split("."):
        spec = PathFinder.find_spec(part, folders)
        if spec is None:
            return None
        folders = list(spec.submodule_search_locations or ())
        origin = spec.origin
    return None if origin is None else Path(origin)
