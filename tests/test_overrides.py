"""Sweeps as lists of jobs."""

import pytest

from fedsim.config.words import expand, parse, without_sweeps, words_of
from fedsim.core.errors import ConfigError


def jobs(*words: str) -> list[list[str]]:
    return expand(parse(words))


def test_a_sweep_is_every_combination_with_the_last_key_fastest() -> None:
    found = jobs("a=1,x", "b=7", "c=range(2)", "~d", "+e=[1,2]")
    assert found == [[a, "b=7", c, "~d=null", "+e=[1,2]"] for a in ("a=1", "a=x") for c in ("c=0", "c=1")]


def test_a_later_word_replaces_an_earlier_one_in_its_place() -> None:
    assert jobs("a=1,2", "b=3", "a=4") == [["a=4", "b=3"]]


def test_texts_keep_their_quotes() -> None:
    assert jobs("a='1,2',\"x y\"") == [["a='1,2'"], ['a="x y"']]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("a=range(0)", r"a='range\(0\)': has no values: it ends before it begins"),
        ("a=range(10,0)", r"range\(10,0,-1\) counts the other way"),
        ("a=range(0,10,-2)", r"range\(0,10,2\) counts the other way"),
        ("a=range(0,5,0)", r"a='range\(0,5,0\)': must have a step other than 0"),
        ("a=0,1,0", r"a='0,1,0': has 0 twice"),
        ("a=range(10001)", "must have at most 10000 jobs"),
        ("a=interval(0,1)", r"a='interval\(0,1\)': must sweep single values"),
    ],
)
def test_what_is_no_list_of_jobs_is_refused(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        jobs(word, "b=1")


def test_a_mapping_as_words() -> None:
    words = words_of({"seed": "range(3)", "a.b": [1, 2], "selector/sketch": "topk", "c": None, "d": True, "e": 0.5})
    assert words == ["seed=range(3)", "a.b=[1, 2]", "selector/sketch=topk", "c=null", "d=True", "e=0.5"]
    assert [o.value() for o in parse(words[1:])] == [[1, 2], "topk", None, True, 0.5]
    assert without_sweeps(words) == words[1:]
