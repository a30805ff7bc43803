"""The user's code in a run: the source that the classes of a config need, as a hash of each module.

Of a module counts what a class needs there: the statements that bind the names that it uses, what
these use in turn, and statements that bind no name, such as calls. Comments, docstrings and layout
do not count. What is imported from other modules of the user's counts in the same way, and nothing
of fedsim or of installed packages.
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
from typing import Any

from fedsim.config.typecheck import find_in_working_folder, not_imported
from fedsim.core.configs import IRRELEVANT_KEYS

ALL = "*"
"""Stands for all names of a module."""
Uses = set[tuple[str, str]]
"""Modules, and names in them."""
Statement = tuple[set[str], Uses, str]
"""A statement at the top of a module: the names that it binds, what it uses, and its text."""
_parsed: dict[str, tuple[ModuleSpec, list[Statement]]] = {}
"""Modules as they were when they were imported: what is edited later does not reach this
process."""


def user_code(config: Mapping[str, Any]) -> str | None:
    """Each module of the user's that the classes of a config need, with a hash of what they need
    there, such as `helpers 8c01..., my_lab 3f2a...`; None if there is none."""
    relevant = {key: value for key, value in config.items() if key not in IRRELEVANT_KEYS}
    uses = re.findall(r'"_target_": "([^"]+)\.(\w+)"', json.dumps(relevant, default=str))
    needed: dict[str, dict[int, str]] = {}
    seen: Uses = set()
    while uses:
        use = module, name = uses.pop()
        for number, (names, more, text) in enumerate(() if use in seen else _statements(module)):
            if name == ALL or name in names or not names:
                needed.setdefault(module, {})[number] = text
                uses += more
        seen.add(use)
    hashes = []
    for module, texts in sorted(needed.items()):
        source = "\n".join(texts[number] for number in sorted(texts))
        hashes.append(f"{module} {hashlib.sha256(source.encode()).hexdigest()[:12]}")
    return ", ".join(hashes) or None


def changed_since(summary: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The modules of the user's that have changed since a run of `config` with this summary; empty
    if none has, or if that is not known."""
    before = summary.get("code")
    if not isinstance(before, str) or not (now := user_code(config)):
        return ""
    differing = {*before.split(", ")} ^ {*now.split(", ")}
    return ", ".join(sorted({entry.partition(" ")[0] for entry in differing}))


def is_users(module: str) -> bool:
    """Return whether a module is the user's, or of an installed package that is made for fedsim."""
    return module.partition(".")[0] != "fedsim" and not_imported(module) is None


def _statements(module: str) -> list[Statement]:
    """The statements of a module of the user's; none of another one, or of one that cannot be
    read."""
    if not is_users(module):
        return []
    find_in_working_folder()
    with suppress(
        Exception, SystemExit
    ):  # the packages around it are imported, which may raise anything
        spec = find_spec(module)
        if spec is not None and (
            module not in _parsed or _parsed[module][0] is not spec
        ):  # as after a reload
            _parsed[module] = spec, _parse(spec)
        return [] if spec is None else _parsed[module][1]
    return []


def _parse(spec: ModuleSpec) -> list[Statement]:
    """The statements of a module, without those that run only where it is the program."""
    statements = []
    for statement in (
        _WithoutTexts().visit(ast.parse(Path(str(spec.origin)).read_text(encoding="utf-8"))).body
    ):
        names: set[str] = set()
        uses: Uses = set()
        for node in ast.walk(statement):
            if isinstance(node, ast.Name):
                uses.add((spec.name, node.id))
                names |= {node.id} if isinstance(node.ctx, ast.Store) else set()
            elif isinstance(node, ast.Import | ast.ImportFrom):
                base = "." * getattr(node, "level", 0) + (getattr(node, "module", "") or "")
                base = resolve_name(base, spec.parent)
                for alias in node.names:
                    names.add((alias.asname or alias.name).partition(".")[0])
                    uses |= {(base, alias.name), (f"{base}.{alias.name}".lstrip("."), ALL)}
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            names = {statement.name}  # the others are of its inside
        if not (isinstance(statement, ast.If) and (spec.name, "__name__") in uses):
            statements.append((names - {ALL}, uses, ast.unparse(statement)))
    return statements


class _WithoutTexts(ast.NodeTransformer):
    """Removes docstrings, and other constants that stand alone."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) else node
