"""Lay out text for the terminal: filled lines, and lists of names with explanations."""

import shutil
import textwrap
from collections.abc import Iterable

WIDTH = 80
"""Characters in a line if the output is no terminal. On a terminal there are at most 20 more."""


def wrap(text: str, indent: int = 0, hanging: int | None = None) -> str:
    """Return `text` in lines that begin with `indent` spaces, from the second on with `hanging`."""
    columns = shutil.get_terminal_size((WIDTH, 24)).columns
    return textwrap.fill(
        text,
        min(columns, WIDTH + 20),
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent if hanging is None else hanging),
        break_long_words=False,
        break_on_hyphens=False,
    )


def entry(name: str, text: str, indent: int, column: int) -> str:
    """Return `name` followed by `text`, which begins at `column`.

    The text begins on a line of its own if the name is too long.
    """
    head = " " * indent + name
    if not text:
        return head
    body = wrap(text, column)
    if len(head) + 2 > column:
        return f"{head}\n{body}"
    return head.ljust(column) + body[column:]


def entries(rows: Iterable[tuple[str, str]], indent: int = 2, widest: int = 26) -> str:
    """Return one `entry` for each row, with all texts at one column, which is at most `widest`."""
    rows = list(rows)
    longest = max((len(name) for name, _ in rows), default=0)
    column = min(longest + indent + 2, widest)
    return "\n".join(entry(name, text, indent, column) for name, text in rows)
