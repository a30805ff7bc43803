"""Read the blocks of code in the Markdown pages, and the commands in them.

The language of a fenced block says what it is:

- ``bash``: commands, one a line (a backslash continues a line). Tests compose them.
- ``console``: lines that begin with "$ " are commands, which tests run. The lines below a command
  are what it prints; a line "..." stands for omitted lines.
- any language with ``title="path"``: a file. A later block with the same title is appended to it.
- ``python`` without a title: an example, which tests run.

In an indented block, and in a ``bash`` block with a title, only lines that begin with a program of
`PROGRAMS` are commands.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
PROGRAMS = "uv uvx pip fedsim python make git export source pytest srun torchrun"
FENCE = re.compile(r"^```(\w*)(?:\s+title=\"([^\"]+)\")?\s*$")
OMITTED = "..."


class Block(NamedTuple):
    """A block of code: the number of its first line, its language ("" if it is indented), the file
    that it is, and its lines."""

    line: int
    language: str
    title: str | None
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


class Command(NamedTuple):
    """The words of a command, its line, and the lines that a ``console`` block shows below it."""

    line: int
    words: tuple[str, ...]
    printed: tuple[str, ...] | None = None


def blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page in order. Raises `ValueError` for a fence that is not closed."""
    lines = page.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        start = number
        number += 1
        if fence := FENCE.match(lines[start]):
            end = lines.index("```", number)
            yield Block(start + 2, fence[1], fence[2], tuple(lines[number:end]))
            number = end + 1
        elif lines[start].startswith("    "):
            while number < len(lines) and lines[number].startswith("    "):
                number += 1
            yield Block(start + 1, "", None, tuple(line[4:] for line in lines[start:number]))


def commands(block: Block) -> list[Command]:
    """Return the commands in a block; none in a file that is not a script, or another language."""
    if block.language == "console":
        return _console_commands(block)
    if block.language not in ("", "bash"):
        return []
    every_line = block.language == "bash" and block.title is None
    variables: dict[str, str] = {"<folder>": "path/to/folder"}
    found = []
    for line in block.text.replace("\\\n", " ").splitlines():
        text = line.strip()
        if assignment := re.fullmatch(r"(\w+)=\"(.*)\"", text):
            variables[f"${assignment[1]}"] = assignment[2]
        elif text and (every_line or text.split()[0] in PROGRAMS.split()):
            for name, value in variables.items():
                text = text.replace(name, value)
            for part in text.removesuffix(" &").split(" && "):
                if words := shlex.split(part, comments=True):
                    found.append(Command(block.line, tuple(words)))
    return found


def _console_commands(block: Block) -> list[Command]:
    found: list[Command] = []
    for number, line in enumerate(block.lines):
        if line.startswith("$ "):
            found.append(Command(block.line + number, tuple(shlex.split(line[2:])), ()))
        elif found:
            command = found.pop()
            found.append(command._replace(printed=(*(command.printed or ()), line)))
    return found


def program(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return a command without what stands before its program: variables, `srun`, `uv run` or
    `torchrun`, with their options."""
    names = [word.removeprefix(".venv/bin/") for word in words]
    if "torchrun" in names:
        return ("python", *names[names.index("-m") :])
    for start, name in enumerate(names):
        if name in ("fedsim", "python", "pytest", "make"):
            return tuple(names[start:])
    return tuple(names)


NUMBER = r"(?:[<>] ?)?[+-]?\.?\d[\d.,]*"
SHAPES = (
    (r"-[0-9a-f]{8}\b", "-HASH"),
    (rf"{NUMBER} (ms|s|min|h)\b", "TIME"),
    (rf"{NUMBER} ([kMGT]?B)\b", "BYTES"),
    (NUMBER, "N"),
    (r"[─\s]+", " "),
)


def shape(text: str) -> str:
    """Return a text without its numbers, hashes, units of measured values and widths of columns."""
    for pattern, replacement in SHAPES:
        text = re.sub(pattern, replacement, text)
    return text.strip()


def missing_line(shown: tuple[str, ...], printed: str) -> str | None:
    """Return the first line of `shown` whose shape `printed` lacks, in this order, or None."""
    rest = shape(printed)
    for line in shown:
        if line.strip() != OMITTED and shape(line):
            _, match, rest = rest.partition(shape(line))
            if not match:
                return line
    return None
