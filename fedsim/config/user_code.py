"""Hash the user's code that a run needs, so that a changed class is noticed.

Each module of the user's gets a hash of its statements that the classes of a config need. These
are the definitions, imports and assignments of the names that they use, of the names that those
use, and so on. All other statements of a module count in any case, such as calls, loops and `if`,
because they may change anything. Comments, docstrings and layout do not count. Code that is
imported from other modules of the user's counts in the same way, and so do the packages around a
module. Code of fedsim and of installed packages does not count.
"""

import ast
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any, NamedTuple

from fedsim.config.user_modules import find_in_working_folder, is_installed, is_user_module
from fedsim.core.configs import IRRELEVANT_KEYS

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
ALL = "*"
"""Stands for all names of a module."""
QualifiedName = tuple[str, str]
"""A module, and a name in it."""


class Statement(NamedTuple):
    """A statement at the top level of a module.

    `binds` has the names that it defines, imports or assigns; None: it counts in any case. `uses`
    has the names in it, and `source` is its code without comments and docstrings.
    """

    binds: set[str] | None
    uses: set[QualifiedName]
    source: str


_cache: dict[str, tuple[ModuleSpec, list[Statement]]] = {}
"""The statements of modules by name. Later edits of a file do not change the code that this process
has imported, so fedsim calls `user_code` right after it has imported a class."""


def user_code(config: Mapping[str, Any]) -> str | None:
    """Return the hash of each module of the user's that the classes of a config need.

    The text is like "helpers 8c01..., my_lab 3f2a...". Returns None if there is no such module.
    """
    # 1. Follow names from the classes of the config to everything that they use. A module that is
    # not imported is parsed at every call of `_statements`, but only once in this call.
    statements_of = cache(_statements)
    relevant = {key: value for key, value in config.items() if key not in IRRELEVANT_KEYS}
    to_visit = list(_target_classes(relevant))
    visited: set[QualifiedName] = set()
    needed: dict[str, dict[int, str]] = {}  # sources of statements by module and position
    while to_visit:
        module, name = to_visit.pop()
        if (module, name) in visited:
            continue
        visited.add((module, name))
        for number, statement in enumerate(statements_of(module)):
            if name == ALL or statement.binds is None or name in statement.binds:
                needed.setdefault(module, {})[number] = statement.source
                to_visit += statement.uses
        package, _, name_in_package = module.rpartition(".")
        if package:  # Python imports it first
            to_visit.append((package, name_in_package))

    # 2. Hash the needed statements of each module in their order.
    hashes = []
    for module, sources in sorted(needed.items()):
        text = "\n".join(sources[number] for number in sorted(sources))
        hashes.append(f"{module} {hashlib.sha256(text.encode()).hexdigest()[:12]}")
    return ", ".join(hashes) or None


def user_files(config: Mapping[str, Any]) -> dict[str, Path]:
    """Return the files of the user's modules that the classes of a config import.

    The keys are their paths from a folder in which Python looks for modules, such as
    `pack/inner.py`. Installed packages are not among them.
    """
    files = {}
    to_visit = [module for module, _ in _target_classes(config)]
    visited = set()
    while to_visit:
        module = to_visit.pop()
        if module in visited or is_installed(module.partition(".")[0]):
            continue
        visited.add(module)
        for statement in _statements(module):
            to_visit += [used_module for used_module, _ in statement.uses]
        to_visit.append(module.rpartition(".")[0])
        if module not in _cache:  # it is not the user's
            continue
        path = Path(str(_cache[module][0].origin))
        if path.suffix == ".py":
            ending = "/__init__.py" if path.name == "__init__.py" else ".py"
            files[module.replace(".", "/") + ending] = path
    return files


def changed_since(summary: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return the user's modules that have changed since the run of `config` with this summary,
    separated by commas.

    A module that the classes need no longer, or did not need then, has changed, too. Returns "" if
    none has changed, or if the summary or the present code does not tell.
    """
    before = summary.get("code")
    now = user_code(config)
    if not isinstance(before, str) or now is None:
        return ""
    differing = set(before.split(", ")) ^ set(now.split(", "))
    return ", ".join(sorted({entry.partition(" ")[0] for entry in differing}))


def _target_classes(node: object) -> Iterator[QualifiedName]:
    """Yield the classes that a config or a part of it names with `_target_`."""
    if isinstance(node, Mapping):
        target = node.get("_target_")
        if isinstance(target, str):
            module, _, name = target.rpartition(".")
            yield module, name
        for value in node.values():
            yield from _target_classes(value)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _target_classes(value)


def _statements(module: str) -> Sequence[Statement]:
    """Return the statements of a module; none if it is not the user's or cannot be read."""
    if not is_user_module(module):
        return ()
    find_in_working_folder()
    spec = None
    # This imports the packages around the module, which may raise anything.
    with suppress(Exception, SystemExit):
        spec = find_spec(module)
    if spec is None:
        return ()
    # The spec of an imported module is another one after a reload.
    if module not in _cache or _cache[module][0] is not spec:
        _cache[module] = (spec, _parse(spec))
    return _cache[module][1]


def _parse(spec: ModuleSpec) -> list[Statement]:
    """Return the statements of a module, except those that run only if it is the program."""
    try:
        tree = ast.parse(Path(str(spec.origin)).read_bytes())
    except (OSError, SyntaxError, ValueError):  # ValueError: compiled code
        return []
    statements = []
    for node in _RemoveConstants().visit(tree).body:
        if not _runs_only_as_program(node):
            statements.append(Statement(_bound_names(node), _used(node, spec), ast.unparse(node)))
    return statements


def _runs_only_as_program(node: ast.stmt) -> bool:
    """Return whether a statement is `if __name__ == "__main__":` without an `else`."""
    if not isinstance(node, ast.If) or node.orelse:
        return False
    return ast.unparse(node.test) == "__name__ == '__main__'"


def _bound_names(node: ast.stmt) -> set[str] | None:
    """Return the names that a definition, an import or an assignment to plain names binds; None for
    other statements, and for `from module import *`."""
    if isinstance(node, Definition):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        return None if ALL in names else names
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    else:
        return None
    names = set()
    for target in targets:
        parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
        for part in parts:
            if not isinstance(part, ast.Name):
                return None
            names.add(part.id)
    return names


def _used(node: ast.stmt, spec: ModuleSpec) -> set[QualifiedName]:
    """Return the names that occur in a statement of the module of `spec`, wherever they are bound,
    and what its imports import."""
    names = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            names.add((spec.name, part.id))
        elif isinstance(part, ast.Import):
            for alias in part.names:
                names.add((alias.name, ALL))
                if alias.asname is None:  # `import pack.inner` binds `pack`
                    names.add((alias.name.partition(".")[0], ALL))
        elif isinstance(part, ast.ImportFrom):
            relative = "." * part.level + (part.module or "")
            try:
                base = resolve_name(relative, spec.parent)
            except ImportError:  # `from .tools import f` in a module that is in no package
                continue
            for alias in part.names:
                # It may be a name in the module `base`, or a module itself.
                names |= {(base, alias.name), (f"{base}.{alias.name}", ALL)}
    return names


class _RemoveConstants(ast.NodeTransformer):
    """Removes statements that are only a constant, such as docstrings."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        """Return the statement, or None to remove it."""
        return None if isinstance(node.value, ast.Constant) else node
