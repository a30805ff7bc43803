"""Count what the structure of the code is made of, to compare before and after a change.

    uv run python scripts/structure.py            # this checkout
    uv run python scripts/structure.py ../other   # another checkout

A room is a module or a package directly inside fedsim/. An arrow is an import of one room by
another, also inside functions. A cycle is a set of rooms, or of modules, that import each other.
"""

import ast
import io
import sys
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

Arrows = set[tuple[str, str]]
COUNTED_TOKENS = (tokenize.NAME, tokenize.OP, tokenize.NUMBER)


@dataclass(frozen=True)
class Module:
    """A Python file: its path below fedsim/, its text and its syntax tree."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def room(self) -> str:
        return self.path.parts[0].removesuffix(".py")

    @property
    def name(self) -> str:
        return ".".join(("fedsim", *self.path.with_suffix("").parts))

    @property
    def imports(self) -> Iterator[str]:
        """Yield the dotted names that the module imports."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield node.module
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules(root: Path) -> list[Module]:
    """Return the modules of fedsim/ that are not empty."""
    package = root / "fedsim"
    found = []
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if text:
            found.append(Module(path.relative_to(package), text, ast.parse(text)))
    return found


def arrows(code: list[Module]) -> Arrows:
    """Return which room imports which."""
    rooms = {module.room for module in code}
    pairs = set()
    for module in code:
        for name in module.imports:
            package, _, rest = name.partition(".")
            room = rest.partition(".")[0]
            if package == "fedsim" and room in rooms and room != module.room:
                pairs.add((module.room, room))
    return pairs


def file_arrows(code: list[Module]) -> Arrows:
    """Return which module imports which, by their dotted names."""
    names = {module.name for module in code}
    return {(module.name, name) for module in code for name in module.imports if name in names}


def cycles(edges: Arrows) -> list[set[str]]:
    """Return the sets of nodes of which each reaches every other."""
    targets: dict[str, set[str]] = {}
    for source, target in edges:
        targets.setdefault(source, set()).add(target)
    reached = {node: _reachable(node, targets) for node in targets}
    found: list[set[str]] = []
    for node, others in reached.items():
        cycle = {other for other in others if node in reached.get(other, ())}
        if cycle and cycle not in found:
            found.append(cycle)
    return found


def _reachable(start: str, targets: Mapping[str, set[str]]) -> set[str]:
    """Return the nodes to which a path leads; `targets` are the next nodes after each node."""
    seen: set[str] = set()
    to_visit = [start]
    while to_visit:
        new = targets.get(to_visit.pop(), set()) - seen
        seen |= new
        to_visit.extend(new)
    return seen


def num_tokens(text: str) -> int:
    """Count names, operators and numbers. Strings and comments do not count."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type in COUNTED_TOKENS for token in tokens)


def main() -> None:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]
    code = modules(root)
    room_arrows = arrows(code)
    native = root / "fedsim" / "engine" / "native"
    counts = {
        "rooms": len({module.room for module in code}),
        "modules": len(code),
        "arrows between rooms": len(room_arrows),
        "cycles of rooms": len(cycles(room_arrows)),
        "cycles of modules": len(cycles(file_arrows(code))),
        "tokens of Python": sum(num_tokens(module.text) for module in code),
        "lines of C": sum(path.read_text().count("\n") for path in native.glob("*.[ch]")),
        "YAML files in conf/": len(list((root / "conf").rglob("*.yaml"))),
    }
    for name, count in counts.items():
        print(f"{name:22} {count:7,}")


if __name__ == "__main__":
    main()
