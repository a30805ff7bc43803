"""Made-up values in the place of unknown ones: what is wrong whatever they are."""

from typing import Any

import pytest

from fedsim.config.build import UNKNOWN, construct, mistakes_beside, told_whatever
from fedsim.core.errors import ConfigError, Problem, at_least, between, check, rule


class Part:
    def __init__(self, *, low: int, high: int | None, share: float) -> None:
        check(
            at_least("low", low, 0),
            at_least("high", high, low) if high is not None else Problem("low", low, "needs high"),
            between("share", share, 0, 1),
        )


class Fussy(Part):
    def __init__(self, *, low: int, high: int | None, share: float) -> None:
        if low not in (-5, 5):
            raise KeyError(low)
        super().__init__(low=low, high=high, share=share)


def told(cls: Any = Part, **values: Any) -> list[tuple[str, str]]:
    with pytest.raises(ConfigError) as caught:
        construct(cls, values, "part")
    return [(p.key, p.rule) for p in caught.value.problems]


def test_a_range_is_told_beside_a_type_and_a_missing_value_and_an_unknown_name() -> None:
    assert told(low="x", high=5, share=2.0) == [
        ("part.low", "must be an integer"),
        ("part.share", "must lie in [0, 1]"),
    ]
    assert [key for key, _ in told(low=-1, high=None, share=0.5)] == ["part.low", "part.low"]
    assert [key for key, _ in told(low=-1, high="x", share=0.5)] == ["part.high", "part.low"]
    assert [key for key, _ in told(low=-1, high=3, more=3)] == ["part.more", "part.share", "part.low"]


def test_a_rule_between_a_sound_value_and_an_unknown_one_is_not_told() -> None:
    assert told(low=50, high="x", share=0.5) == [("part.high", "must be an integer or null")]
    assert told(low="x", high=0, share=0.5) == [("part.low", "must be an integer")]


def test_an_unknown_value_is_not_told_of_and_nothing_is_made() -> None:
    assert told(low=UNKNOWN, high=5, share=2.0) == [("part.share", "must lie in [0, 1]")]
    assert told(low=UNKNOWN, high=5, share=0.5) == []


def test_what_a_made_up_value_makes_a_constructor_raise_is_not_told() -> None:
    assert told(Fussy, low="x", high=5, share=2.0) == [("part.low", "must be an integer")]
    assert mistakes_beside(Fussy, {"low": 5, "share": 2.0}, {"high": int}) == [
        rule(False, "share", 2.0, "must lie in [0, 1]")
    ]


class Named:
    def __init__(self, *, name: str, share: float) -> None:
        check(Problem("name", ..., "must be known"), between("share", share, 0, 1))


def test_what_is_wrong_with_made_up_values_themselves_is_not_told() -> None:
    assert told(Named, name=5, share=2.0) == [("part.name", "must be a string"), ("part.share", "must lie in [0, 1]")]


def test_remedies_that_differ_are_left_out() -> None:
    one, other = Problem("a", 1, "wrong", "do this"), Problem("a", 1, "wrong", "do that")
    assert told_whatever([[one], [one]]) == [one]
    assert told_whatever([[one], [other]]) == [Problem("a", 1, "wrong")]
    assert told_whatever([[one], []]) == told_whatever([[], [one]]) == []
