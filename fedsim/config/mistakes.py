"""All mistakes in the words of a command line, where composing it has shown that there are some.

Hydra stops at the first. Here each word is judged: whether it can be read, whether a choice exists, whether the config
that the choices make has such a key. A word about a group of which no existing choice is made waits for the next try;
so do types and rules of values, which are told once all words can be composed (`fedsim.config.plan`).

To be called inside `fedsim.config.compose.search_path`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from itertools import islice
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from fedsim.config.diagnosis import OPTIONAL, choices_of, compose_one, group_of, lacks, refused_choice, words_of_scale
from fedsim.config.hydra_node import check_words
from fedsim.config.suggestions import unknown_choice, unknown_path
from fedsim.config.words import (
    MAX_JOBS,
    check_count,
    key_of,
    options,
    parse,
    parse_one,
    typed_in,
    values_of,
    without_choice,
    words_of,
)
from fedsim.core.configs import has_key
from fedsim.core.errors import ConfigError, Problem, command

MOST_CHOICES = 200
"""Of one group, of which it is seen whether they exist."""
MOST_JOBS = 36
"""In which it is seen whether keys exist: composing one takes 0.1 s."""


class _Found:
    """Problems, each once."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def add(self, problems: Iterable[Problem]) -> None:
        self.problems += [p for p in problems if p not in self.problems]

    def of(self, act: Callable[[], Any]) -> Any:
        """What `act` returns; None where it raises a `ConfigError`, whose problems are kept."""
        try:
            return act()
        except ConfigError as error:
            self.add(error.problems)
            return None


def find(words: Sequence[str], config_name: str, flags: Sequence[str], *, multirun: bool) -> list[Problem]:
    """All problems of `words` behind `flags`, but for types and rules of the values."""
    found = _Found()
    parsed = [o for word in words if (o := found.of(partial(_readable, word)))]
    choices: dict[str, list[str]] = {}
    keys: dict[str, list[str]] = {}
    for override in parsed:
        values = found.of(partial(_values, override)) or []
        if options(override.key_or_group):
            mistakes = {value: _mistaken_choice(parse_one(value)) for value in values[:MOST_CHOICES]}
            found.add(problem for problem in mistakes.values() if problem)
            choices[key_of(override)] = [value for value in values if not mistakes.get(value)]
        elif values:
            keys[key_of(override)] = values
    found.of(lambda: check_count(map(len, filter(None, (*choices.values(), *keys.values())))))
    typed = [word.lstrip("+~").partition("=")[0] for word in words]
    unclear = {group for group in typed if not choices.get(group) and options(group)}
    config = found.of(partial(compose_one, [*_first(choices), *keys.get("scale", [])[:1]], config_name))
    if config is None:
        return found.problems
    sweeps, implied = multirun or str(config.hydra.mode).endswith("MULTIRUN"), {}
    if unclear.isdisjoint(OPTIONAL):
        swept = [o for o in parsed if o.is_sweep_override() and (choices | keys).get(key_of(o))]
        found.add(_without_flag(override, [*flags, *words]) for override in swept if not sweeps)
        params = words_of(config.hydra.sweeper.get("params") or {}) if sweeps else []
        sized = found.of(partial(words_of_scale, config, parsed)) or []
        implied = {key_of(o): next(values_of(o)) for o in parse([*params, *sized]) if key_of(o) not in typed}
    chosen = {key: [word] for key, word in implied.items() if options(key)} | choices
    for number, job in enumerate(_one_at_a_time(chosen)[:MOST_JOBS]):
        config = found.of(partial(compose_one, job, config_name))
        if config is not None:
            sound = _known(config, {key: values[0] for key, values in keys.items()}, unclear, found)
            added = _that_fit(config, {k: word for k, word in implied.items() if k not in chosen}, unclear, found)
            if number == 0:
                _compose(job, [*added, *sound], config_name, found)
    return found.problems


def _readable(word: str) -> Override:
    override = parse_one(word)
    check_words([override])
    return override


def _values(override: Override) -> list[str]:
    swept = override.is_sweep_override()
    return list(islice(values_of(override), MAX_JOBS + 1)) if swept else [override.input_line or ""]


def _first(axes: Mapping[str, Sequence[str]]) -> list[str]:
    return [values[0] for values in axes.values() if values]


def _one_at_a_time(axes: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Jobs in which each value occurs, with the first ones of all other keys."""
    others = [_first({**axes, key: [value]}) for key, values in axes.items() for value in values[1:]]
    return [_first(axes), *others]


def _without_flag(override: Override, words: Sequence[str]) -> Problem:
    remedy = command("fedsim", "-m", *words)
    return Problem(override.key_or_group, typed_in(override), "is a sweep over several values, and needs -m", remedy)


def _known(config: DictConfig, words: Mapping[str, str], unclear: Set[str], found: _Found) -> list[str]:
    """Those of `words` whose keys `config` has, or to which they are added."""
    known: Any = OmegaConf.to_container(config, resolve=False)
    sound = []
    for key, word in words.items():
        override = parse_one(word)
        if not _is_open(key, unclear):
            added = override.is_add() or override.is_force_add()
            mistake = None if added else unknown_path(known, override.key_or_group)
            found.add([mistake] if mistake else [])
            sound += [] if mistake else [word]
    return sound


def _is_open(key: str, unclear: Set[str]) -> bool:
    """Whether what was meant by the choice of a group decides if there is such a key."""
    parts = key.lstrip("+~").split(".")
    groups = {"/".join(parts[:end]) for end in range(1, len(parts) + 1)}
    return not groups.isdisjoint(unclear) or (len(parts) > 1 and not unclear.isdisjoint(OPTIONAL))


def _that_fit(config: DictConfig, words: Mapping[str, str], unclear: Set[str], found: _Found) -> list[str]:
    """Those of the `words` of a preset whose keys the choices have that are made in place of its own."""
    known: Any = OmegaConf.to_container(config, resolve=False)
    choices = choices_of(config)
    lacking: dict[str, list[str]] = {}
    for key in words:
        path = key.lstrip("+~")
        if key == path and not has_key(known, path) and not _is_open(path, unclear):
            lacking.setdefault(group_of(path, choices) or "config", []).append(path)
    source = f"preset={choices.get('preset')}"
    found.add(lacks(group, choices.get(group), source, keys, swept=True) for group, keys in lacking.items())
    missing = [key for keys in lacking.values() for key in keys]
    return [word for key, word in words.items() if key not in missing and not _is_open(key, unclear)]


def _compose(choices: Sequence[str], words: Sequence[str], config_name: str, found: _Found) -> None:
    """Tell of the `words` that Hydra does not take after the choices."""
    try:
        compose_one([*choices, *words], config_name)
    except ConfigError:
        for word in words:
            try:
                compose_one([*choices, word], config_name)
            except ConfigError as error:
                override = parse_one(word)
                key, typed = override.key_or_group, typed_in(override) or ...
                found.add(Problem(key, typed, p.rule) if p.key == "config" else p for p in error.problems)


def _mistaken_choice(override: Override) -> Problem | None:
    group, choice = override.key_or_group, override.value()
    if override.is_delete():
        return None
    if group == "hydra/sweeper" and choice != "basic":
        return unknown_choice(group, choice)
    if (refused := refused_choice(override)) or without_choice(override):
        return refused
    known, chosen = options(group), choice if isinstance(choice, list) else [choice]
    return next((unknown_choice(group, one) for one in chosen if one not in known), None)
