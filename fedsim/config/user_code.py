"""Hash the user's code that a run needs, so that a changed class is noticed.

Each module of the user's gets a hash of what the classes of a config need there: the statements
that bind the names they use, what these statements use in turn, and statements that bind no name,
such as calls. Comments, docstrings and layout do not count. Code that is imported from other
modules of the user's counts in the same way. Code of fedsim and of installed packages does not
count.
"""

import ast
import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any, NamedTuple

from fedsim.config.user_modules import find_in_working_folder, is_installed, is_user_module
from fedsim.core.configs import IRRELEVANT_KEYS

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
ALL = "*"
"""Stands for all names of a module."""
Name = tuple[str, str]
"""A module, and a name in it."""


class Statement(NamedTuple):
    """A statement at the top level of a module: the names that it binds (assigns, defines or
    imports), the names that it uses, and its source without comments and docstrings."""

    binds: set[str]
    uses: set[Name]
    text: str


_parsed: dict[str, tuple[ModuleSpec, list[Statement]]] = {}
"""The statements of modules as they were when first read, which is when Python imports them. Later
edits do not change the code that this process runs."""


def user_code(config: Mapping[str, Any]) -> str | None:
    """Return the hash of each module of the user's that the classes of a config need.

    The text is like "helpers 8c01..., my_lab 3f2a...". Returns None if there is no such module.
    """
    # 1. Follow names from the classes of the config to everything that they use.
    to_visit = _targets({key: value for key, value in config.items() if key not in IRRELEVANT_KEYS})
    visited: set[Name] = set()
    needed: dict[str, dict[int, str]] = {}  # texts of statements by module and position
    while to_visit:
        module, name = to_visit.pop()
        if (module, name) in visited:
            continue
        visited.add((module, name))
        for number, statement in enumerate(_statements(module)):
            if name == ALL or name in statement.binds or not statement.binds:
                needed.setdefault(module, {})[number] = statement.text
                to_visit += statement.uses

    # 2. Hash the needed statements of each module in their order.
    hashes = []
    for module, texts in sorted(needed.items()):
        source = "\n".join(texts[number] for number in sorted(texts))
        hashes.append(f"{module} {hashlib.sha256(source.encode()).hexdigest()[:12]}")
    return ", ".join(hashes) or None


def user_files(config: Mapping[str, Any]) -> dict[str, Path]:
    """Return the files of the user's modules that the classes of a config import.

    The keys are their paths from a folder in which Python looks for modules, such as
    `pack/inner.py`. Installed packages are not among them.
    """
    files = {}
    to_visit = [module for module, _ in _targets(config)]
    visited = set()
    while to_visit:
        module = to_visit.pop()
        if module in visited or is_installed(module.partition(".")[0]):
            continue
        visited.add(module)
        for statement in _statements(module):
            to_visit += [used_module for used_module, _ in statement.uses]
        to_visit.append(module.rpartition(".")[0])
        if module in _parsed:
            path = Path(str(_parsed[module][0].origin))
            ending = "/__init__.py" if path.name == "__init__.py" else ".py"
            files[module.replace(".", "/") + ending] = path
    return files


def _targets(config: Mapping[str, Any]) -> list[Name]:
    """Return the classes of a config."""
    return re.findall(r'"_target_": "([^"]+)\.(\w+)"', json.dumps(config, default=str))


def changed_since(summary: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return the user's modules that have changed since the run of `config` with this summary.

    Returns "" if none has changed, or if that is not known.
    """
    before = summary.get("code")
    now = user_code(config)
    if not isinstance(before, str) or now is None:
        return ""
    differing = set(before.split(", ")) ^ set(now.split(", "))
    return ", ".join(sorted({entry.partition(" ")[0] for entry in differing}))


def _statements(module: str) -> list[Statement]:
    """Return the statements of a module of the user's; none of another or an unreadable module."""
    if not is_user_module(module):
        return []
    find_in_working_folder()
    with suppress(Exception, SystemExit):  # importing the packages around it may raise anything
        spec = find_spec(module)
        if spec is None:
            return []
        if module not in _parsed or _parsed[module][0] is not spec:  # the spec changes on a reload
            _parsed[module] = (spec, _parse(spec))
        return _parsed[module][1]
    return []


def _parse(spec: ModuleSpec) -> list[Statement]:
    """Return the statements of a module, except those that run only if it is the program."""
    source = Path(str(spec.origin)).read_text(encoding="utf-8")
    statements = []
    for node in _WithoutTexts().visit(ast.parse(source)).body:
        statement = Statement(set(), set(), ast.unparse(node))
        for inner in ast.walk(node):
            _note_names(inner, spec, statement)
        is_definition = isinstance(node, DEFINITIONS)
        binds = {node.name} if is_definition else statement.binds - {ALL}
        is_program = isinstance(node, ast.If) and (spec.name, "__name__") in statement.uses
        if not is_program:
            statements.append(statement._replace(binds=binds))
    return statements


def _note_names(node: ast.AST, spec: ModuleSpec, statement: Statement) -> None:
    """Add the names that `node`, a part of `statement`, binds and uses."""
    if isinstance(node, ast.Name):
        statement.uses.add((spec.name, node.id))
        if isinstance(node.ctx, ast.Store):
            statement.binds.add(node.id)
    elif isinstance(node, DEFINITIONS):  # it may stand in an `if` or a `try`
        statement.binds.add(node.name)
    elif isinstance(node, ast.Import | ast.ImportFrom):
        level = getattr(node, "level", 0)
        module = getattr(node, "module", "") or ""
        base = resolve_name("." * level + module, spec.parent)
        for alias in node.names:
            statement.binds.add((alias.asname or alias.name).partition(".")[0])
            # `alias.name` may be a name in the module `base`, or a module itself: note both
            statement.uses.add((base, alias.name))
            statement.uses.add((f"{base}.{alias.name}".lstrip("."), ALL))


class _WithoutTexts(ast.NodeTransformer):
    """Removes docstrings and other constants that are statements of their own."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        """Return the statement, or None to remove it."""
        return None if isinstance(node.value, ast.Constant) else node
