"""The samples that a selector needs at the server, by the signals that it declares in `needs`.

Lists and reports read the declaration in the source of the class. They do not import its module: an
import runs code and takes time.
"""

import ast
import re
import sys
from collections.abc import Collection, Mapping
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import fedsim

SERVER_DATA = {
    "validation": "labelled samples",
    "public": "unlabelled samples",
    "test": "the test set",
}
"""Samples of the server by the signal (`fedsim.clients.context.Signal`) that a selector declares
for them."""


def server_data(signals: Collection[str]) -> str:
    """Return what `signals` need at the server, in words: "labelled samples", or "nothing"."""
    words = [samples for signal, samples in SERVER_DATA.items() if signal in signals]
    return ", ".join(words) or "nothing"


def declared_signals(node: Any) -> set[str]:
    """Return the signals in the `needs` of the class that a config's `node` names, and of its
    bases.

    `Signal(self.key)` is the signal that `node` has at this key. Both branches of a condition
    count.
    """
    values = node if isinstance(node, Mapping) else {}
    signals: set[str] = set()
    classes = [str(values.get("_target_"))]
    for path in classes:  # the list grows while the loop runs: bases are appended
        declaration, bases = _declaration(path)
        for member in re.findall(r"\bSignal\.(\w+)", declaration):
            signals.add(member.lower())
        for key in re.findall(r"\bSignal\(self\.(\w+)\)", declaration):
            signals.add(str(values.get(key)))
        classes += [base for base in bases if base not in classes]
    return signals


def _declaration(path: str) -> tuple[str, list[str]]:
    """Return the source of the `needs` of the class at `path`, with the constants that it uses, and
    the paths of the class's bases."""
    module, _, name = path.rpartition(".")
    declaration = ""
    bases: dict[str, str] = {}
    # backwards, because constants and imports stand above the class
    for statement in reversed(tree_of(module)):
        if isinstance(statement, ast.ClassDef) and statement.name == name:
            for base in map(ast.unparse, statement.bases):
                bases[base] = f"{module}.{base}"
            source = ast.unparse(statement)
            # an assignment to an object takes the place of the class's
            found = re.findall(r"\bself\.needs\b.*? = (.*)", source)
            declaration = " ".join(found or re.findall(r"\bneeds\b.*? = (.*)", source))
        elif isinstance(statement, ast.Assign):
            constant = re.escape(ast.unparse(statement.targets[0]))
            if re.search(rf"\b{constant}\b", declaration):
                declaration += ast.unparse(statement.value)
        elif isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                local_name = alias.asname or alias.name
                if local_name in bases:
                    bases[local_name] = f"{statement.module}.{alias.name}"
    return declaration, list(bases.values())


@cache
def tree_of(module: str) -> list[ast.stmt]:
    """Return the statements of a module without importing it; none if it cannot be read."""
    folders = [str(Path(fedsim.__file__).parents[1]), str(Path.cwd()), *sys.path]
    origin = ""
    for part in module.split("."):
        spec = PathFinder.find_spec(part, folders)
        if spec is None:
            return []
        folders = list(spec.submodule_search_locations or ())
        origin = spec.origin or ""
    try:
        return ast.parse(Path(origin).read_text(encoding="utf-8")).body
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return []
