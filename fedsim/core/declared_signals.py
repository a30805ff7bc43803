"""The signals that a selector declares in `needs`, read in the source of its class.

Lists and reports do not import the module of the class: an import runs code and takes time.
"""

import ast
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

import fedsim

COMPARISONS: dict[type, Callable[[Any, Any], object]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
"""The comparisons that are understood in a class's `needs`."""


def declared_signals(node: Any) -> set[str]:
    """Return the signals in the `needs` of the class that a config's `node` names, and of its
    bases.

    A condition on the values of `node` decides which signals count. Of a condition that cannot be
    read here, both branches count.
    """
    values = node if isinstance(node, Mapping) else {}
    signals: set[str] = set()
    classes = [str(values.get("_target_"))]
    for path in classes:  # the list grows while the loop runs: bases are appended
        declarations, names, bases = _declaration(path)
        for declaration in declarations:
            signals |= _Reader(names, values).signals(declaration)
        classes += [base for base in bases if base not in classes]
    return signals


@cache
def _declaration(path: str) -> tuple[list[ast.expr], dict[str, ast.expr], list[str]]:
    """Return the expressions assigned to `needs` in the class at `path`, the expressions of the
    names in its module and its methods, and the paths of the class's bases."""
    module, _, name = path.rpartition(".")
    of_class: list[ast.expr] = []
    of_object: list[ast.expr] = []
    names: dict[str, ast.expr] = {}
    imports: dict[str, str] = {}
    bases: list[str] = []
    # backwards, because a name of the class goes before that of the module
    for statement in reversed(tree_of(module)):
        if isinstance(statement, ast.ClassDef) and statement.name == name:
            bases += map(ast.unparse, statement.bases)
            for target, value in _assignments(ast.walk(statement)):
                if target == "self.needs":
                    of_object.append(value)
                elif target == "needs":
                    of_class.append(value)
                else:
                    names[target] = value
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            imports |= _imports(statement, module)
        else:
            for target, value in _assignments([statement]):
                names.setdefault(target, value)
    paths = []
    for base in bases:
        first, dot, rest = base.partition(".")
        paths.append(imports.get(first, f"{module}.{first}") + dot + rest)
    # an assignment to an object takes the place of the class's
    return of_object or of_class, names, paths


def _imports(statement: ast.Import | ast.ImportFrom, module: str) -> dict[str, str]:
    """Return what an import in a `module` brings in: paths by their names there."""
    paths = {}
    origin = ""
    if isinstance(statement, ast.ImportFrom):
        source = _file_of(module)
        is_package = source is not None and source.name == "__init__.py"
        package = module if is_package else module.rpartition(".")[0]
        try:
            relative = "." * statement.level + (statement.module or "")
            origin = resolve_name(relative, package) + "."
        except ImportError:  # It leads out of the outermost package.
            return {}
    for alias in statement.names:
        if alias.asname or origin:
            paths[alias.asname or alias.name] = origin + alias.name
        else:
            outermost = alias.name.partition(".")[0]  # `import a.b` brings in a.
            paths[outermost] = outermost
    return paths


def _assignments(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    """Yield the target and the value of each assignment to one target."""
    for node in nodes:
        if isinstance(node, ast.Assign):
            yield ast.unparse(node.targets[0]), node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield ast.unparse(node.target), node.value


class UnknownError(Exception):
    """The value of an expression does not follow from the config."""


class _Reader:
    """Reads signals in expressions, without running code.

    `names` are the expressions of variables and constants, and `values` those of the config's node.
    """

    def __init__(self, names: Mapping[str, ast.expr], values: Mapping[str, Any]) -> None:
        self.names = names
        self.values = values

    def signals(self, node: ast.AST) -> set[str]:
        """Return the signals in an expression."""
        match node:
            case ast.Attribute(value=ast.Name(id="Signal"), attr=member):
                return {member.lower()}
            case ast.Call(func=ast.Name(id="Signal"), args=[ast.Attribute(attr=key)]):
                return {str(self.values.get(key))}
            case ast.Name(id=name) if name in self.names:
                return self._without(name).signals(self.names[name])
        signals = set()
        for part in self._parts(node):
            signals |= self.signals(part)
        return signals

    def _without(self, name: str) -> "_Reader":
        """Return a reader that does not know a name, so that no name leads back to itself."""
        names = {other: node for other, node in self.names.items() if other != name}
        return _Reader(names, self.values)

    def _parts(self, node: ast.AST) -> Iterable[ast.AST]:
        """Return the branch of a condition, or the entry of a dictionary, that the values choose;
        all parts of any other expression, or if the values do not tell."""
        with suppress(UnknownError):
            match node:
                case ast.IfExp(test=test, body=body, orelse=other):
                    return [body if self._is_true(test) else other]
                case (
                    ast.Subscript(value=ast.Name(id=name), slice=key)
                    | ast.Call(
                        func=ast.Attribute(value=ast.Name(id=name), attr="get"), args=[key, *_]
                    )
                ):
                    table = self.names.get(name)
                    if isinstance(table, ast.Dict):
                        return self._entry(table, self._value(key))
        return ast.iter_child_nodes(node)

    def _entry(self, table: ast.Dict, wanted: object) -> list[ast.expr]:
        """Return the expression at a key of a dictionary; [] if it is not there."""
        for key, entry in zip(table.keys, table.values, strict=True):
            if key is not None and self._value(key) == wanted:
                return [entry]
        return []

    def _is_true(self, test: ast.expr) -> bool:
        """Return whether a comparison of two values holds."""
        match test:
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                compare = COMPARISONS.get(type(operator))
                if compare is not None:
                    return bool(compare(self._value(left), self._value(right)))
        raise UnknownError

    def _value(self, node: ast.expr) -> object:
        """Return the value of a constant, of a key of the config, or of a name for one of them."""
        match node:
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
