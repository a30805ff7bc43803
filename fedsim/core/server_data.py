"""Samples that a selector needs at the server, by the signals that it declares in `needs`.

Lists and reports read the declaration in the source of the class: an import runs a module, and
takes time.
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
    return (
        ", ".join(words for signal, words in SERVER_DATA.items() if signal in signals) or "nothing"
    )


def declared_signals(node: Any) -> set[str]:
    """Return the signals in the `needs` of the class that a config's `node` names, and of its
    bases.

    `Signal(self.key)` is the signal that `node` has at this key. Of a condition, both branches
    count.
    """
    values = node if isinstance(node, Mapping) else {}
    signals, targets = set[str](), [str(values.get("_target_"))]
    for path in targets:
        module, _, name = path.rpartition(".")
        origins, declared = dict[str, str](), ""
        for statement in reversed(tree_of(module)):  # constants and imports stand above the class
            if isinstance(statement, ast.ClassDef) and statement.name == name:
                bases = map(ast.unparse, statement.bases)
                origins = {base: f"{module}.{base}" for base in bases}
                text = ast.unparse(statement)
                of_objects = re.findall(
                    r"\bself\.needs\b.*? = (.*)", text
                )  # in place of the class's
                declared = " ".join(of_objects or re.findall(r"\bneeds\b.*? = (.*)", text))
            elif isinstance(statement, ast.Assign):
                constant = re.escape(ast.unparse(statement.targets[0]))
                if re.search(rf"\b{constant}\b", declared):
                    declared += ast.unparse(statement.value)
            elif isinstance(statement, ast.ImportFrom):
                for alias in statement.names:
                    if (alias.asname or alias.name) in origins:
                        origins[alias.asname or alias.name] = f"{statement.module}.{alias.name}"
        signals |= {member.lower() for member in re.findall(r"\bSignal\.(\w+)", declared)}
        signals |= {
            str(values.get(key)) for key in re.findall(r"\bSignal\(self\.(\w+)\)", declared)
        }
        targets += [origin for origin in origins.values() if origin not in targets]
    return signals


@cache
def tree_of(module: str) -> list[ast.stmt]:
    """Return the statements of a module, which is not imported; none where it cannot be read."""
    folders, origin = [str(Path(fedsim.__file__).parents[1]), str(Path.cwd()), *sys.path], ""
    for part in module.split("."):
        spec = PathFinder.find_spec(part, folders)
        if spec is None:
            return []
        folders, origin = list(spec.submodule_search_locations or ()), spec.origin or ""
    try:
        return ast.parse(Path(origin).read_text(encoding="utf-8")).body
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return []
