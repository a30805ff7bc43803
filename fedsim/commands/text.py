"""Text for a terminal, no wider than it; words are never broken."""

import shutil
import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 80
"""Characters a line where the output is no terminal, and at most 20 more than that on one."""


def width() -> int:
    """Characters a line."""
    return min(shutil.get_terminal_size((WIDTH, 24)).columns, WIDTH + 20)


def wrap(text: str, indent: int = 0, hanging: int | None = None) -> str:
    """`text` in lines that begin with `indent` spaces, those from the second on with `hanging`."""
    return textwrap.fill(
        text,
        width(),
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent if hanging is None else hanging),
        break_long_words=False,
        break_on_hyphens=False,
    )


def entry(name: str, text: str, indent: int, column: int) -> str:
    """`name`, and beginning at `column` the `text`; on a line of its own where the name is too long."""
    head = " " * indent + name
    if not text:
        return head
    body = wrap(text, column)
    return head.ljust(column) + body[column:] if len(head) + 2 <= column else f"{head}\n{body}"


def entries(rows: Iterable[tuple[str, str]], indent: int = 2, widest: int = 26) -> str:
    """One `entry` a row, all texts at one column, which is at most `widest`."""
    rows = list(rows)
    column = min(max((len(name) for name, _ in rows), default=0) + indent + 2, widest)
    return "\n".join(entry(name, text, indent, column) for name, text in rows)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Columns as wide as their widest cell, two spaces apart; those numbered in `right` are aligned to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        parts = (c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True)))
        return "  ".join(parts).rstrip()

    return "\n".join([line(header), line(["-" * w for w in widths]), *map(line, rows)])
