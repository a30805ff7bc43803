"""Overrides (`key=value`, by Hydra's grammar) and the jobs of a sweep over them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from fedsim.errors import ConfigError, Problem, check, rule

MAX_JOBS = 10_000
"""Of one command."""
MAX_WORD = 4_000
"""Characters of one override; the time that Hydra's parser takes grows with their square."""
COMPOSITION_ERRORS = (
    HydraException,
    OmegaConfBaseException,
    YAMLError,
    RecursionError,
    ValueError,
    TypeError,
    KeyError,
)
"""What Hydra raises for bad input."""


def parse(words: Sequence[str]) -> list[Override]:
    """The overrides that `words` are. Raises `ConfigError` with all malformed ones."""
    parser, parsed, problems = OverridesParser.create(), [], []
    for word in words:
        if len(word) > MAX_WORD:
            text = f"must have at most {MAX_WORD} characters"
            problems.append(Problem(f"{word[:60]}...", ..., text, "put it into a file of --config-dir"))
            continue
        try:
            parsed += parser.parse_overrides([word])
        except COMPOSITION_ERRORS as error:
            problems.append(Problem(word[:200], ..., f"is not key=value: {first_line(error)}"))
    if problems:
        raise ConfigError(problems)
    return parsed


def words_of(values: Mapping[str, Any]) -> list[str]:
    """The entries of a YAML mapping as overrides: `{seed: range(3)}` is `seed=range(3)`."""
    return [f"{key}={'null' if value is None else value}" for key, value in values.items()]


def without_sweeps(words: Sequence[str]) -> list[str]:
    """Those of one value."""
    return [word for word, override in zip(words, parse(words), strict=True) if not override.is_sweep_override()]


def expand(overrides: Sequence[Override]) -> list[list[str]]:
    """The jobs of a sweep: every combination of the values, the last key's changing fastest.

    A later override replaces an earlier one of the same key. Raises `ConfigError` for more than `MAX_JOBS`.
    """
    axes = {o.get_key_element(): list(islice(_words(o), MAX_JOBS + 1)) for o in overrides}
    count = math.prod(map(len, axes.values()))
    check(rule(count > 0, "sweep", ..., "has a key without values"))
    remedy = "split it into several commands"
    check(rule(count <= MAX_JOBS, "sweep", count, f"must have at most {MAX_JOBS} jobs", remedy))
    return [list(words) for words in product(*axes.values())]


def _words(override: Override) -> Iterator[str]:
    """One word for each value that it sweeps over."""
    key = override.get_key_element()
    if not override.is_sweep_override():
        yield f"{key}={override.get_value_element_as_str()}"
        return
    if not override.is_discrete_sweep():
        raise ConfigError([Problem(key, ..., "must sweep single values: a,b or range()")])
    for value in override.sweep_string_iterator():
        yield f"{key}={value}"


def first_line(error: BaseException) -> str:
    """What a library's error says, in one line."""
    if isinstance(error, RecursionError):
        return "is nested too deeply"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
