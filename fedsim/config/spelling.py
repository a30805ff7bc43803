"""The known word that was meant by one that is not."""

from collections.abc import Iterable

LIKE = 0.5
"""The least share of characters in common, by difflib."""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is most like `word`, if one is."""
    import difflib

    return next(iter(difflib.get_close_matches(word, sorted(known), n=1, cutoff=LIKE)), None)
