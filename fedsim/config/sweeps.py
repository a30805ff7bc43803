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
from fedsim.config.words import are_related, parse, typed_in
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

    The values of the last key change fastest (a key has the position of its first override):

        expand(parse(["selector=gpfl", "num_rounds=9", "seed=0,1"])) == [
            ["selector=gpfl", "num_rounds=9", "seed=0"],
            ["selector=gpfl", "num_rounds=9", "seed=1"],
        ]

    A later override takes the place of an earlier one of the same key, except for mappings, which
    Hydra merges. Raises `ConfigError` for more than MAX_JOBS jobs.
    """
    # Overrides with the same key and slot replace each other. Plain values share slot 0, and each
    # mapping has a slot of its own.
    words_by_key: dict[tuple[str, int], list[str]] = {}
    for number, override in enumerate(overrides):
        key = override.get_key_element()
        slot = number + 1 if _sets_mapping(override) else 0
        if options(override.key_or_group):
            key = key.lstrip("~")  # `selector=gpfl` takes the place of an earlier `~selector`
        elif slot == 0 and _has_related_key(key, words_by_key):
            # A plain value replaces mappings, too, and in `lr=1 ++lr=2 lr=3` it must stay the last
            # word. If earlier words were not deleted, it would have their place in the dict.
            for other_key, other_slot in list(words_by_key):
                if other_key == key:
                    del words_by_key[other_key, other_slot]
        # one more than allowed is enough to notice that there are too many
        words_by_key[key, slot] = list(islice(values_of(override), MAX_JOBS + 1))
    num_jobs = math.prod(map(len, words_by_key.values()))
    swept_keys = [key for (key, _), words in words_by_key.items() if len(words) > 1]
    check(too_many_jobs(num_jobs, swept_keys))
    return [list(words) for words in product(*words_by_key.values())]


def too_many_jobs(num_jobs: int, swept_keys: Iterable[str]) -> Problem | None:
    """Return the problem of a command with more than MAX_JOBS jobs; None if there are fewer."""
    text = f"must make at most {MAX_JOBS} jobs"
    remedy = "split the sweep into several commands"
    return rule(num_jobs <= MAX_JOBS, ", ".join(swept_keys), ..., text, remedy)


def _has_related_key(key: str, earlier: Iterable[tuple[str, int]]) -> bool:
    """Return whether `earlier` has another override of `key`, written with `+` or `~` or as a
    mapping, or an override of a key above or below it.

    `earlier` has the keys and slots in `expand`.
    """
    for other_key, slot in earlier:
        if (other_key, slot) != (key, 0) and are_related(key, other_key):
            return True
    return False


def _sets_mapping(override: Override) -> bool:
    """Return whether a value of an override is a mapping: `local={steps:1},{steps:2}`."""
    value = override.value()
    values = value.list if isinstance(value, ChoiceSweep) else [value]
    return any(isinstance(value, Mapping) for value in values or [])


def expand_some(overrides: Sequence[Override], keys: Collection[str]) -> list[list[str]]:
    """Return the words of `overrides` for every combination of the values of these `keys`.

    All other words stay as they are, sweeps included: for the key `preset`, `preset=a,b seed=0,1`
    becomes `preset=a seed=0,1` and `preset=b seed=0,1`. Of several overrides of such a key, the
    last one counts. Raises `ConfigError` for more than MAX_JOBS combinations.
    """
    last = {override.key_or_group: override for override in overrides}
    words_by_override: list[list[str]] = []
    for override in overrides:
        if override.key_or_group not in keys:
            words_by_override.append([override.input_line or ""])
        elif override is last[override.key_or_group]:
            words_by_override.append(list(islice(values_of(override), MAX_JOBS + 1)))
    check(too_many_jobs(math.prod(map(len, words_by_override)), keys))
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
    """Return the problem of a sweep whose values cannot be listed: an interval, or a range with
    step 0 or with a bound that is not finite. Return None if they can."""
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
    is_finite = all(map(math.isfinite, _float_bounds(sweep)))
    return rule(is_finite, key, value, "must have finite numbers", "for example range(0,5)")


def _number_or_text(value: str) -> float | str:
    """Return a typed value as a number if it is one: 1 and 1.0 are the same value."""
    for number_type in (int, float):  # int first, because large integers are not exact as floats
        try:
            return number_type(value)
        except ValueError:
            continue
    return value


def _float_bounds(sweep: RangeSweep) -> list[float]:
    """Return the start, stop and step of a range, without those that are integers."""
    bounds = (sweep.start, sweep.stop, sweep.step)
    return [number for number in bounds if isinstance(number, float)]


def _with_decimal_range(override: Override) -> Override:
    """Return `override`; a range in it counts in decimal numbers.

    Hydra adds the step in binary numbers, so that `range(0.1,0.5,0.1)` has 0.30000000000000004.
    """
    sweep = override.value()
    if not isinstance(sweep, RangeSweep) or not _float_bounds(sweep):
        return override
    decimals: dict[str, Any] = {
        "start": Decimal(str(sweep.start)),
        "stop": Decimal(str(sweep.stop)),
        "step": Decimal(str(sweep.step)),
    }
    return replace(override, _value=replace(sweep, **decimals))
