"""Which values fit which annotations, and as what: a table of both."""

from pathlib import Path
from typing import Any, Literal

import pytest

from fedsim.config.typecheck import conform, describe

VALUES = [*(None, True, 0, 1, -3, 1.0, 1.5, float("nan"), "", "a", "1"), *([], [1, 2], [1, "a"], {"a": 1}, {1: "a"})]

# An annotation, and what each of the values becomes for it; - where it does not fit.
TABLE: list[tuple[Any, str]] = [
    (int, "- | - | 0 | 1 | -3 | - | - | - | - | - | - | - | - | - | - | -"),
    (float, "- | - | 0.0 | 1.0 | -3.0 | 1.0 | 1.5 | nan | - | - | - | - | - | - | - | -"),
    (bool, "- | True | - | - | - | - | - | - | - | - | - | - | - | - | - | -"),
    (str, "- | - | - | - | - | - | - | - | '' | 'a' | '1' | - | - | - | - | -"),
    (Path, "- | - | - | - | - | - | - | - | Path . | Path a | Path 1 | - | - | - | - | -"),
    (Any, "None | True | 0 | 1 | -3 | 1.0 | 1.5 | nan | '' | 'a' | '1' | [] | [1, 2] | [1, 'a'] | {'a': 1} | {1: 'a'}"),
    (Literal["a", "b"], "- | - | - | - | - | - | - | - | - | 'a' | - | - | - | - | - | -"),
    (Literal[1], "- | - | - | 1 | - | - | - | - | - | - | - | - | - | - | - | -"),
    (Literal[True, "a"], "- | True | - | - | - | - | - | - | - | 'a' | - | - | - | - | - | -"),
    (int | None, "None | - | 0 | 1 | -3 | - | - | - | - | - | - | - | - | - | - | -"),
    (int | float, "- | - | 0 | 1 | -3 | 1.0 | 1.5 | nan | - | - | - | - | - | - | - | -"),
    (Literal["a"] | bool, "- | True | - | - | - | - | - | - | - | 'a' | - | - | - | - | - | -"),
    (list[float], "- | - | - | - | - | - | - | - | - | - | - | [] | [1.0, 2.0] | - | - | -"),
    (list[str] | Literal["a"] | None, "None | - | - | - | - | - | - | - | - | 'a' | - | [] | - | - | - | -"),
    (tuple[int, ...], "- | - | - | - | - | - | - | - | - | - | - | () | (1, 2) | - | - | -"),
    (dict[str, int], "- | - | - | - | - | - | - | - | - | - | - | - | - | - | {'a': 1} | -"),
]


def outcome(value: Any, hint: Any) -> str:
    try:
        fitted = conform(value, hint)
    except TypeError:
        return "-"
    return f"Path {fitted}" if isinstance(fitted, Path) else repr(fitted)


@pytest.mark.parametrize(("hint", "row"), TABLE, ids=[str(hint) for hint, _ in TABLE])
def test_every_value_against_every_annotation(hint: Any, row: str) -> None:
    assert " | ".join(outcome(value, hint) for value in VALUES) == row


def test_annotations_and_values_of_other_kinds() -> None:
    assert conform([1, "a"], tuple[int, str]) == (1, "a")
    with pytest.raises(TypeError):
        conform([1], tuple[int, str])
    with pytest.raises(TypeError):
        conform(10**400, float)  # larger than any float
    assert conform(Path("x"), Path) == Path("x")


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        *((int, "an integer"), (float, "a number"), (bool, "true or false"), (str, "a string"), (Path, "a path")),
        *((Literal["a", "b"], "one of a, b"), (int | None, "an integer or null"), (dict[str, int], "a mapping")),
        (tuple[int, str], "a list of 2 items: an integer, a string"),
        (tuple[int, ...], "a list, each item an integer"),
        *((list[float], "a list, each item a number"), (int | Literal["auto"], "an integer or one of auto")),
    ],
)
def test_annotations_in_words(hint: Any, words: str) -> None:
    assert describe(hint) == words
