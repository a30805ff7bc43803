"""Counts of the code's structure, to be compared before and after a change of it.

    uv run python scripts/structure.py            # as a table
    uv run python scripts/structure.py ../other   # of another checkout

A room is a module or a package directly inside fedsim/; an arrow is an import of one room by
another (under `if TYPE_CHECKING`, too); a cycle is a set of rooms that import each other.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """A Python file: its path below fedsim/, and its syntax tree."""

    path: Path
    tree: ast.Module
    lines: int

    @property
    def room(self) -> str:
        return self.path.parts[0].removesuffix(".py")

    @property
    def functions(self) -> Iterator[Function]:
        return (node for node in ast.walk(self.tree) if isinstance(node, Function))

    @property
    def imports(self) -> Iterator[str]:
        """Dotted names of modules that it imports from."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                yield node.module
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)


def modules(root: Path) -> list[Module]:
    """All of fedsim/ that is not empty."""
    package = root / "fedsim"
    found = []
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        found.append(Module(path.relative_to(package), ast.parse(text), text.count("\n")))
    return [module for module in found if module.lines]


def arrows(code: list[Module]) -> set[tuple[str, str]]:
    rooms = {module.room for module in code}
    pairs = {
        (m.room, name.split(".")[1])
        for m in code
        for name in m.imports
        if name.startswith("fedsim.")
    }
    return {(one, other) for one, other in pairs if one != other and other in rooms}


def file_arrows(code: list[Module]) -> set[tuple[str, str]]:
    """Which module imports which, inside functions, too, by their dotted names."""
    names = {".".join(("fedsim", *module.path.with_suffix("").parts)): module for module in code}
    return {
        (name, other)
        for name, module in names.items()
        for other in module.imports
        if other in names
    }


def cycles(edges: set[tuple[str, str]]) -> list[set[str]]:
    """Sets of rooms, or of modules, of which each reaches every other."""
    nodes = {node for edge in edges for node in edge}
    reach = {node: _reachable(node, edges) for node in nodes}
    sets = {frozenset(b for b in reach[a] if a in reach[b]) for a in nodes if a in reach[a]}
    return [set(one) for one in sets]


def _reachable(start: str, edges: set[tuple[str, str]]) -> set[str]:
    seen: set[str] = set()
    found = {other for one, other in edges if one == start}
    while found - seen:
        seen |= found
        found = {other for one, other in edges if one in seen}
    return seen


def signature(function: Function) -> tuple[str, ...]:
    """Names and annotations of the parameters behind `self`."""
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return tuple(ast.unparse(a) for a in arguments if a.arg not in ("self", "cls"))


def parameters(function: Function) -> set[str]:
    return {
        a.arg for a in [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    }


def repeated_signatures(code: list[Module], least: int = 4) -> int:
    """How often the first `least` parameters of a function have been those of another one
    before."""
    heads = Counter(
        signature(f)[:least] for m in code for f in m.functions if len(signature(f)) >= least
    )
    return sum(count - 1 for count in heads.values())


def counts(root: Path) -> dict[str, object]:
    code = modules(root)
    edges = arrows(code)
    functions = [(m, f) for m in code for f in m.functions]
    longest = max(functions, key=lambda pair: _length(pair[1]))
    native = root / "fedsim" / "engine" / "native"
    with_ids = [(m, f) for m, f in functions if parameters(f) & {"ids", "selected"}]
    with_lr = [(m, f) for m, f in functions if "lr" in parameters(f)]
    return {
        "rooms": len({m.room for m in code}),
        "modules": len(code),
        "largest number of modules in one folder": max(
            Counter(m.path.parent for m in code).values()
        ),
        "arrows between rooms": len(edges),
        "cycles of rooms": " ".join("+".join(sorted(one)) for one in cycles(edges)) or "none",
        "cycles of modules": len(cycles(file_arrows(code))),
        "lines of Python": sum(m.lines for m in code),
        "lines of C": sum(p.read_text().count("\n") for p in native.glob("*.[ch]")),
        "longest module": "{1} ({0})".format(*max((m.lines, str(m.path)) for m in code)),
        "longest function": f"{longest[1].name} in {longest[0].path} ({_length(longest[1])})",
        "functions": len(functions),
        "functions with a parameter of selected ids": f"{len(with_ids)} in {len({m.path for m, _ in with_ids})} files",
        "functions with a parameter lr": f"{len(with_lr)} in {len({m.path for m, _ in with_lr})} files",
        "signatures of four parameters or more, written again": repeated_signatures(code),
        "imports from hydra._internal": sum(
            n.startswith("hydra._internal") for m in code for n in set(_from(m))
        ),
        "YAML files in conf/": len(list((root / "conf").rglob("*.yaml"))),
        "of them in conf/selector/ and below": len(
            list((root / "conf" / "selector").rglob("*.yaml"))
        ),
    }


def _from(module: Module) -> Iterator[str]:
    """Modules of its `from ... import`."""
    return (n.module for n in ast.walk(module.tree) if isinstance(n, ast.ImportFrom) and n.module)


def _length(function: Function) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def main() -> None:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]
    for name, value in counts(root).items():
        print(f"{name:55} {value}")


if __name__ == "__main__":
    main()
