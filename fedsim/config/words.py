"""Overrides: the words `key=value` of a command line, and of presets.

A *word* is an override as text. Hydra's parser makes an `Override` of it:

    override = parse_one("selector=gpfl")
    override.key_or_group == "selector"  # a config group, or a dotted key such as optimizer.lr
    override.value() == "gpfl"           # a choice of the group, or a value such as 0.1
    override.input_line == "selector=gpfl"

fedsim also accepts names from papers: other spellings of a choice (`selector=GPFL`) and symbols in
place of keys (`selector.alpha`). Which config groups and choices there are is known only inside the
context manager `fedsim.config.sources.search_path`. Outside of it, no key is a group here.
"""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, Sweep
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from fedsim.config.choice_files import ChoiceFiles
from fedsim.config.sources import known_choices, loader, options
from fedsim.core.configs import SHORTHANDS
from fedsim.core.errors import ConfigError, Problem, ProblemCollector, check, rule

BAD_INPUT: tuple[type[Exception], ...] = (
    HydraException,
    OmegaConfBaseException,
    YAMLError,
    RecursionError,
    ValueError,
    TypeError,
    KeyError,
)
"""The exceptions that Hydra raises for bad input. The last three say little: a mistake in the code
of fedsim or Hydra may raise them, too, and then passes for bad input."""


def parse(words: Sequence[str]) -> list[Override]:
    """Return the overrides of `words`, in order. Raises `ConfigError` with all malformed words."""
    collector = ProblemCollector()
    overrides = []
    for word in words:
        override = collector.run(parse_one, word)
        if override is not None:
            overrides.append(override)
    check(*collector.problems)
    return overrides


def parse_one(word: str) -> Override:
    """Return the override of one word. Raises `ConfigError` if it is malformed.

    Names of choices get fedsim's spelling, so that the override's `input_line` may differ from
    `word`. Inside of `search_path`, `glob(...)` stands for the choices of the group.
    """
    try:
        (override,) = OverridesParser.create(loader()).parse_overrides([as_fedsim_spells(word)])
        is_mixture = _contains_sweep(override.value())
    except BAD_INPUT as error:
        raise ConfigError([_unreadable(word)]) from error
    check(rule(bool(override.key_or_group), word[:200], ..., "is not key=value"))
    text = "mixes single values with range(), choice(), interval() or glob()"
    remedy = "write the values out, as in seed=0,1,2,7"
    check(rule(not is_mixture, override.get_key_element(), typed_in(override), text, remedy))
    return override


def _contains_sweep(value: Any) -> bool:
    """Return whether a sweep is among the values of a sweep, a list or a mapping, at any depth:
    `range(3)` in `seed=7,range(3)`."""
    if isinstance(value, ChoiceSweep):
        members = value.list
    elif isinstance(value, Mapping):
        members = list(value.values())
    elif isinstance(value, list):
        members = value
    else:
        return False
    return any(isinstance(member, Sweep | Glob) or _contains_sweep(member) for member in members)


def _unreadable(word: str) -> Problem:
    """Return the problem of a word that Hydra's parser rejects. The remedy has the word without
    blanks around `=`, or with quotes."""
    key, equals_sign, value = word.partition("=")
    if not equals_sign:
        remedy = "a command is the first word; `fedsim --help` has the commands and the groups"
        return Problem(key[:200], ..., "is neither a command nor key=value", remedy)
    without_blanks = f"{key.strip()}={value.strip()}"
    if without_blanks != word:
        remedy = f"leave out the blanks: {shlex.quote(without_blanks)}"
    else:
        syntax = "a list is [a,b], a mapping {a:1}; a text is quoted for the shell, too"
        remedy = f"{syntax}: {quoted(key, value)}"
    return Problem(key.strip()[:200], value[:200], "cannot be read as key=value", remedy)


def quoted(key: str, value: str) -> str:
    """Return the word that sets `key` to the text `value`, in quotes for fedsim and for the shell:
    `'name="a,b"'`."""
    # Hydra's grammar: in quotes, only backslashes directly before a quote are doubled.
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', value)
    last_backslashes = value[len(value.rstrip("\\")) :]
    return shlex.quote(f'{key}="{escaped}{last_backslashes}"')


def as_fedsim_spells(word: str) -> str:
    """Return `word` with names of choices in fedsim's spelling: `selector=gpfl,random` for
    `selector=GPFL,FedAvg` (`ChoiceFiles.meant`)."""
    key, _, value = word.partition("=")
    group = key.lstrip("+")
    if not re.fullmatch(r"[\w., -]+", value) or not options(group):
        return word
    files = known_choices()
    names = [files.meant(group, name.strip()) for name in value.split(",")]
    return f"{key}={','.join(names)}"


def long_form(words: Sequence[str], files: ChoiceFiles) -> list[str]:
    """Return `words` with the shorthands of papers (`SHORTHANDS`) written out.

    `selector=gpfl selector.alpha=0,1` becomes `selector=gpfl selector/exploration=fixed
    selector.exploration.value=0,1`. A shorthand counts only if a chosen selector has its group:
    another selector may have a key of that name.
    """
    words = [as_fedsim_spells(word) for word in words]
    values: dict[str, str] = {}
    for word in words:
        key, _, value = word.partition("=")
        values[key] = value
    if SHORTHANDS.keys().isdisjoint(values):
        return words

    groups = _groups_of_selectors(values, files)
    long_words: list[str] = []
    for word in words:
        key, _, value = word.partition("=")
        shorthand = SHORTHANDS.get(key)
        if shorthand is None or shorthand[0] not in groups:
            long_words.append(word)
            continue
        group, choice, long_key = shorthand
        if choice and group not in values:
            long_words.append(f"{group}={choice}")
        long_words.append(f"{long_key}={value}")
    return long_words


def _groups_of_selectors(values: Mapping[str, str], files: ChoiceFiles) -> set[str]:
    """Return the groups that the chosen selectors include: `selector/exploration` for gpfl.

    `values` has the values of the overrides by key. They choose selectors directly or by a preset.
    """
    selectors: list[str] = []
    preset = values.get("preset", "")
    if "selector" in values:
        selectors = values["selector"].split(",")
    elif files.has("preset", preset):
        selectors = [files.all_included("preset", preset).get("selector", "")]
    groups: set[str] = set()
    for selector in selectors:
        if files.has("selector", selector):
            groups.update(files.all_included("selector", selector))
    return groups


def words_of(values: Mapping[str, Any]) -> list[str]:
    """Return the entries of a YAML mapping as overrides: `{seed: range(3)}` is `seed=range(3)`."""
    return [f"{key}={'null' if value is None else value}" for key, value in values.items()]


def is_plain_assignment(override: Override) -> bool:
    """Return whether an override is `key=value` with one value: not `~key`, `+key=value` or a
    sweep."""
    is_added = override.is_add() or override.is_force_add()
    return not (is_added or override.is_delete() or override.is_sweep_override())


def chooses_nothing(override: Override) -> bool:
    """Return whether an override is `group=null`, which fedsim accepts for Hydra's `~group`."""
    is_null = is_plain_assignment(override) and override.value() is None
    return is_null and bool(options(override.key_or_group))


def as_hydra_reads(override: Override) -> str:
    """Return the word that Hydra understands for an override: `~group` for `group=null`."""
    if chooses_nothing(override):
        return f"~{override.key_or_group}"
    return override.input_line or ""


def dotted_key(word: str) -> str:
    """Return the key of a word with dots: `selector.sketch` for `+selector/sketch=topk`."""
    return word.strip("+~ ").partition("=")[0].strip().replace("/", ".")


def is_below(word: str, keys: Iterable[str]) -> bool:
    """Return whether a word, or its key, is about one of the dotted `keys` or a key below one.

    `selector.rho=1` is below `selector`; `selectors=1` is not.
    """
    beginnings = tuple(f"{key}." for key in keys)
    return f"{dotted_key(word)}.".startswith(beginnings)


def are_related(key: str, other_key: str) -> bool:
    """Return whether two keys, or words, are about the same key, or one is below the other."""
    return is_below(key, [dotted_key(other_key)]) or is_below(other_key, [dotted_key(key)])


def key_of(override: Override) -> str:
    """Return the key or group that an override sets, without `+` and `~`.

    A package is kept: `selector/sketch@other` for `+selector/sketch@other=topk`.
    """
    return override.get_key_element().lstrip("+~")


def typed_in(override: Override) -> str:
    """Return the value of an override as it was typed."""
    return (override.input_line or "").partition("=")[2]
