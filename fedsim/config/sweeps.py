"""Sweeps: overrides with several values, such as `seed=0,1`, and the jobs that they expand into."""

import math
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from itertools import islice, product
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, Override, RangeSweep

from fedsim.config.sources import options
from fedsim.config.words import dotted_key, is_below, parse, typed_in
from fedsim.core.configs import SEED_KEYS
from fedsim.core.errors import ConfigError, Problem, check, rule

MAX_JOBS = 10_000
"""Maximum number of jobs of one command."""


def without_sweeps(words: Sequence[str]) -> list[str]:
    """Return the words with a single value: `seed=7`, but not `seed=0,1`."""
    overrides = zip(words, parse(words), strict=True)
    return [word for word, override in overrides if not override.is_sweep_override()]


def expand(overrides: Sequence[Override]) -> list[list[str]]:
    """Return the words of each job of a sweep: every combination of values.

    The values of the last key change fastest:

        expand(parse(["selector=gpfl", "num_rounds=9", "seed=0,1"])) == [
            ["selector=gpfl", "num_rounds=9", "seed=0"],
            ["selector=gpfl", "num_rounds=9", "seed=1"],
        ]

    A later override takes the place of an earlier one of the same key, except for mappings, which
    Hydra merges. Raises `ConfigError` for more than MAX_JOBS jobs.
    """
    words_by_key: dict[tuple[str, int], list[str]] = {}
    for number, override in enumerate(overrides):
        key = override.get_key_element()
        if options(override.key_or_group):
            key = key.lstrip("~")  # `selector=gpfl` takes the place of an earlier `~selector`
        elif (key, 0) in words_by_key and _has_related_key(key, words_by_key):
            # The order counts: in `lr=1 ++lr=2 lr=3` the last word must stay the last one.
            del words_by_key[key, 0]
        place = number if _sets_mapping(override) else 0
        # one more than allowed is enough to notice that there are too many
        words_by_key[key, place] = list(islice(values_of(override), MAX_JOBS + 1))
    num_jobs = math.prod(map(len, words_by_key.values()))
    swept = ", ".join(key for (key, _), words in words_by_key.items() if len(words) > 1)
    text = f"must make at most {MAX_JOBS} jobs"
    check(rule(num_jobs <= MAX_JOBS, swept, ..., text, "split the sweep into several commands"))
    return [list(words) for words in product(*words_by_key.values())]


def _has_related_key(key: str, known: Iterable[tuple[str, int]]) -> bool:
    """Return whether a `known` key is the same as `key` but for a `+` or a mapping, or is above or
    below it."""
    for other_key, place in known:
        if (other_key, place) != (key, 0):
            own, other = dotted_key(key), dotted_key(other_key)
            if is_below(own, [other]) or is_below(other, [own]):
                return True
    return False


def _sets_mapping(override: Override) -> bool:
    """Return whether a value of an override is a mapping: `local={steps:1},{steps:2}`."""
    value = override.value()
    values = value.list if isinstance(value, ChoiceSweep) else [value]
    return any(isinstance(value, Mapping) for value in values or [])


def expand_some(overrides: Sequence[Override], keys: Collection[str]) -> list[list[str]]:
    """Return the words of `overrides` for every combination of the values of these `keys`.

    Of several overrides of such a key, the last one counts.
    """
    last = {override.key_or_group: override for override in overrides}
    words_by_override: list[list[str]] = []
    for override in overrides:
        if override.key_or_group not in keys:
            words_by_override.append([override.input_line or ""])
        elif override is last[override.key_or_group]:
            words_by_override.append(list(values_of(override)))
    return [list(words) for words in product(*words_by_override)]


def values_of(override: Override) -> Iterator[str]:
    """Yield one word for each value of an override: `seed=0` and `seed=1` for `seed=0,1`.

    Raises `ConfigError` for sweeps that have no values, or one of them twice.
    """
    key = override.get_key_element()
    if not override.is_sweep_override():
        yield f"{key}={override.get_value_element_as_str()}"
        return
    check(_problem_of_unlistable(override))
    values: set[str | float] = set()
    for value in _with_decimal_range(override).sweep_string_iterator():
        number_or_text = _number_or_text(value)
        if number_or_text in values:
            remedy = "leave it out: a run is made once"
            raise ConfigError([Problem(key, typed_in(override), f"has {value} twice", remedy)])
        values.add(number_or_text)
        yield f"{key}={value}"
    if not values:
        known = ", ".join(options(override.key_or_group))
        remedy = f"known here: {known}" if known else "range(start,stop,step) ends before stop"
        raise ConfigError([Problem(key, typed_in(override), "has no values", remedy)])


def _problem_of_unlistable(override: Override) -> Problem | None:
    """Return the problem of a sweep whose values cannot be listed; None if they can."""
    key = override.get_key_element()
    value = typed_in(override)
    if not override.is_discrete_sweep():  # an interval
        command = f"fedsim search {shlex.quote(override.input_line or '')} trials=20"
        remedy = f"{command} searches in it"
        if key in SEED_KEYS:
            remedy = f"{key}=range(0,5) is five of them"
        return Problem(key, value, "must sweep single values: a,b or range()", remedy)
    sweep = override.value()
    if not isinstance(sweep, RangeSweep):
        return None
    if sweep.step == 0:
        return Problem(key, value, "must have a step other than 0", "leave it out for 1")
    is_finite = all(map(math.isfinite, _floats_of(sweep)))
    return rule(is_finite, key, value, "must have finite numbers", "for example range(0,5)")


def _number_or_text(value: str) -> float | str:
    """Return a typed value as a number if it is one: 1 and 1.0 are the same value."""
    try:
        return float(value)
    except ValueError:
        return value


def _floats_of(sweep: RangeSweep) -> list[float]:
    """Return the start, stop and step of a range, without those that are integers."""
    bounds = (sweep.start, sweep.stop, sweep.step)
    return [number for number in bounds if isinstance(number, float)]


def _with_decimal_range(override: Override) -> Override:
    """Return `override`; a range in it counts in decimal numbers.

    Hydra adds the step in binary numbers, so that `range(0.1,0.5,0.1)` has 0.30000000000000004.
    """
    sweep = override.value()
    if not isinstance(sweep, RangeSweep) or not _floats_of(sweep):
        return override
    decimals: dict[str, Any] = {
        "start": Decimal(str(sweep.start)),
        "stop": Decimal(str(sweep.stop)),
        "step": Decimal(str(sweep.step)),
    }
    return replace(override, _value=replace(sweep, **decimals))
