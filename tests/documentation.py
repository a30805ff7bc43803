"""The Markdown pages as blocks of code, and their commands as lists of words.

Fenced blocks are read by their language:

- ``bash``: commands, one a line (a backslash goes on in the next). They are composed, not run.
- ``console``: lines that begin with "$ " are commands, which are run; the lines below are what they print. A line "..."
  stands for lines that are left out.
- any language with ``title="path"``: a file. A later block with the same title is appended to it.
- ``python`` without a title: an example that runs.

In indented blocks, which may be prose of a list or a note, lines that begin with a program of
`PROGRAMS` are commands; so they are in a script, which is a block ``bash`` with a title.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
PROGRAMS = (
    "uv",
    "uvx",
    "pip",
    "fedsim",
    "python",
    "make",
    "git",
    "export",
    "source",
    "pytest",
    "srun",
    "torchrun",
)
FENCE = re.compile(r"^```(\w*)(?:\s+title=\"([^\"]+)\")?\s*$")
LEFT_OUT = "..."


class Block(NamedTuple):
    """A block of code: the number of its first line, its language ("" if it is indented), and the
    file that it is."""

    line: int
    language: str
    title: str | None
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


class Command(NamedTuple):
    """The words of a command, the line where its block begins, and for a block ``console`` the
    lines that it prints."""

    line: int
    words: tuple[str, ...]
    printed: tuple[str, ...] | None = None


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page in their order. Raises `ValueError` for a fence that is not closed."""
    lines = page.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        fence = FENCE.match(lines[number])
        end = number
        if fence:
            end = lines.index("```", number + 1)
            yield Block(number + 2, fence[1], fence[2], tuple(lines[number + 1 : end]))
        elif lines[number].startswith("    "):
            while end < len(lines) and lines[end].startswith("    "):
                end += 1
            yield Block(number + 1, "", None, tuple(line[4:] for line in lines[number:end]))
            end -= 1
        number = end + 1


def commands(block: Block) -> list[Command]:
    """The commands in a block; none in one that is a file or in another language."""
    if block.language == "console":
        return list(_console(block))
    if block.language not in ("", "bash"):
        return []
    found = []
    all_lines = block.language == "bash" and block.title is None
    variables: dict[str, str] = {}
    for text in map(str.strip, block.text.replace("\\\n", " ").splitlines()):
        if assignment := re.fullmatch(r"(\w+)=\"(.*)\"", text):
            variables[assignment[1]] = assignment[2]
        elif text and not text.startswith("#") and (all_lines or text.split()[0] in PROGRAMS):
            for name, value in variables.items():
                text = text.replace(f"${name}", value)
            found += [
                Command(block.line, words)
                for words in _parts(text.replace("<folder>", "path/to/folder"))
            ]
    return found


def _parts(text: str) -> list[tuple[str, ...]]:
    """The commands of a line, which && separates, without comments and a final &."""
    parts = [shlex.split(part, comments=True) for part in text.removesuffix(" &").split(" && ")]
    return [tuple(words) for words in parts if words]


def _console(block: Block) -> Iterator[Command]:
    starts = [i for i, line in enumerate(block.lines) if line.startswith("$ ")]
    for start, end in zip(starts, [*starts[1:], len(block.lines)], strict=True):
        (words,) = _parts(block.lines[start][2:])
        yield Command(block.line + start, words, block.lines[start + 1 : end])


def program(words: tuple[str, ...]) -> tuple[str, ...]:
    """A command without what stands before its program: variables, `srun`, `uv run`, `torchrun`,
    with their options."""
    names = [word.removeprefix(".venv/bin/") for word in words]
    if "torchrun" in names:
        return ("python", *names[names.index("-m") :])
    start = next(
        (i for i, name in enumerate(names) if name in ("fedsim", "python", "pytest", "make")), 0
    )
    return tuple(names[start:])


NUMBER = r"(?:[<>] ?)?[+-]?\.?\d[\d.,]*"
SHAPES = (
    (re.compile(r"-[0-9a-f]{8}\b"), "-HASH"),
    (re.compile(rf"{NUMBER} (ms|s|min|h)\b"), "TIME"),
    (re.compile(rf"{NUMBER} ([kMGT]?B)\b"), "BYTES"),
    (re.compile(NUMBER), "N"),
    (re.compile(r"[─\s]+"), " "),
)


def shape(text: str) -> str:
    """A text without its numbers, hashes, units of measured values, and the widths of its
    columns."""
    for pattern, replacement in SHAPES:
        text = pattern.sub(replacement, text)
    return text.strip()


def missing_line(shown: tuple[str, ...], printed: str) -> str | None:
    """The first line of `shown` whose shape `printed` does not have, in this order; None if it has
    all."""
    rest = shape(printed)
    for line in shown:
        if line.strip() == LEFT_OUT or not shape(line):
            continue
        _, found, rest = rest.partition(shape(line))
        if not found:
            return line
    return None
