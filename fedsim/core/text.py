"""Text for terminals, pages and messages."""

import os
import shlex
from collections.abc import Iterable

SIMILARITY = 0.6
"""Smallest share of characters in common (by difflib) at which a word is suggested."""


def printable(text: str) -> str:
    """Return `text` in one line, with escape sequences for characters that cannot be printed.

    No control character of a config or a file can then reach a terminal, a page or a table.
    """
    if text.isprintable():
        return text
    characters = []
    for character in text:
        if character.isprintable():
            characters.append(character)
        else:
            characters.append(" " if character.isspace() else repr(character)[1:-1])
    return "".join(characters)


def printable_lines(text: str) -> str:
    """Apply `printable` to each line."""
    return "\n".join(map(printable, text.split("\n")))


def spanned(low: float, high: float) -> str:
    """Return the range of some counts in words: `10 to 12`, or `10` if both ends are equal."""
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def command(*words: str) -> str:
    """Return a command that the user can type; it begins with `uv run` if this process did."""
    prefix = ("uv", "run") if "UV" in os.environ else ()
    return shlex.join([*prefix, *words])


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that is most similar to `word`; None if none is similar enough."""
    import difflib

    matches = difflib.get_close_matches(word, sorted(known), n=1, cutoff=SIMILARITY)
    return matches[0] if matches else None


def first_line(error: BaseException) -> str:
    """Return the message of a library's error in one line: the first one, or the first two if the
    first ends in a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
