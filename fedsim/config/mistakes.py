"""All mistakes in the words of a command line, where composing it has shown that there are some.

Hydra stops at the first. Here each word is judged: whether it can be read, whether a choice exists, whether the config
that the choices make has such a key. A word about a group of which no existing choice is made waits for the next try;
so do types and rules of values, which are told once all words can be composed (`fedsim.config.plan`).

To be called inside `fedsim.config.compose.search_path`.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from fedsim.config.choice_files import on_search_path
from fedsim.config.diagnosis import OPTIONAL, choices_of, compose_one, refused_choice, words_of_scale
from fedsim.config.hydra_node import check_words
from fedsim.config.suggestions import UNKNOWN_KEY, choices_with, unknown_choice, unknown_path
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
from fedsim.core.configs import has_key, placed
from fedsim.core.errors import ConfigError, Problem, command

MOST_JOBS = 36
"""In which it is seen whether keys exist: composing one takes 0.1 s."""


class Found:
    """Problems, each once."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def add(self, problems: Iterable[Problem | None]) -> None:
        self.problems += dict.fromkeys(p for p in problems if p is not None and p not in self.problems)

    def of(self, act: Callable[[], Any]) -> Any:
        """What `act` returns; None where it raises a `ConfigError`, whose problems are kept."""
        try:
            return act()
        except ConfigError as error:
            self.add(error.problems)
            return None


def find(words: Sequence[str], config_name: str, flags: Sequence[str], *, multirun: bool) -> list[Problem]:
    """All problems of `words` behind `flags`, but for types and rules of the values."""
    found = Found()
    parsed = [override for word in words if (override := found.of(partial(_readable, word)))]
    choices: dict[str, list[str]] = {}
    keys: dict[str, str] = {}
    lengths = []
    for override in parsed:
        values = found.of(partial(_values, override)) or []
        lengths.append(len(values) or 1)
        if options(override.key_or_group):
            mistakes = [_mistaken_choice(parse_one(value)) for value in values[:MOST_JOBS]]
            found.add(mistakes)
            sound = [value for value, mistake in zip(values, mistakes, strict=False) if not mistake]
            choices[key_of(override)] = sound
        elif values:
            keys[key_of(override)] = values[0]
    found.of(lambda: check_count(lengths))
    unclear = {word.lstrip("+~").partition("=")[0] for word in words} - {key for key, made in choices.items() if made}
    unclear = {group for group in unclear if options(group)}
    scale = [keys["scale"]] if "scale" in keys else []
    config = found.of(partial(compose_one, [*_first(choices), *scale], config_name))
    if config is None:
        return found.problems
    sweeps, implied = multirun or str(config.hydra.mode).endswith("MULTIRUN"), {}
    if unclear.isdisjoint(OPTIONAL):
        swept = [o for o in parsed if o.is_sweep_override() and (choices.get(key_of(o)) or key_of(o) in keys)]
        found.add(_without_flag(override, [*flags, *words]) for override in swept if not sweeps)
        params = words_of(config.hydra.sweeper.get("params") or {}) if sweeps else []
        sized = found.of(partial(words_of_scale, config, parsed)) or []
        typed = {*choices, *keys}
        implied = {key_of(o): next(values_of(o)) for o in parse([*params, *sized]) if key_of(o) not in typed}
    made = {key: [word] for key, word in implied.items() if options(key)} | choices
    wanted = [(o.key_or_group, False) for o in map(parse_one, keys.values()) if not (o.is_add() or o.is_force_add())]
    wanted += [(key, True) for key in implied if not options(key) and not key.startswith(("+", "~"))]
    wanted = [one for one in wanted if not _is_open(one[0], unclear)]
    for job in _one_at_a_time(made)[:MOST_JOBS]:
        config = found.of(partial(compose_one, job, config_name))
        if config is not None:
            found.add(_unknown_keys(config, wanted))
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


def _is_open(key: str, unclear: Collection[str]) -> bool:
    """Whether what was meant by the choice of a group decides if there is such a key."""
    parts = key.split(".")
    groups = {"/".join(parts[:end]) for end in range(1, len(parts) + 1)}
    return not groups.isdisjoint(unclear) or (len(parts) > 1 and not set(unclear).isdisjoint(OPTIONAL))


def _unknown_keys(config: Any, wanted: Iterable[tuple[str, bool]]) -> list[Problem | None]:
    """The problems of those of the `wanted` keys that `config` lacks; with True, the preset brings the key along."""
    known: Any = OmegaConf.to_container(config, resolve=False)
    choices = choices_of(config)
    told: list[Problem | None] = []
    lacking: dict[str, list[str]] = {}
    for key, brought in wanted:
        if not brought:
            told.append(unknown_path(known, key))
        elif not has_key(known, key):
            lacking.setdefault(_group_of(key, choices), []).append(key)
    source = f"preset={choices.get('preset')} sweeps over"
    return told + [_lacks(group, choices.get(group), source, keys) for group, keys in lacking.items()]


def _mistaken_choice(override: Override) -> Problem | None:
    group, choice = override.key_or_group, override.value()
    if override.is_delete():
        return None
    if group == "hydra/sweeper" and choice != "basic":
        return unknown_choice(group, choice)
    if (refused := refused_choice(override)) or without_choice(override):
        return refused
    return None if choice in options(group) else unknown_choice(group, choice)


def explained(
    problems: Sequence[Problem], config: Mapping[str, Any], choices: Mapping[str, str], typed: Collection[str]
) -> list[Problem]:
    """`problems` of a composed config, with those of unknown keys explained: by where such a key is, if it was `typed`,
    or by the preset or cell that has set it, for which another choice was made than its own."""
    told: list[Problem] = []
    lacking: dict[tuple[str, str], list[str]] = {}
    for problem in problems:
        key, group = problem.key, _group_of(problem.key, choices)
        if problem.rule != UNKNOWN_KEY:
            told.append(problem)
        elif word := next((one for one in typed if _is_below(key, one) or _is_below(one, key)), None):
            full = word if _is_below(word, key) else key
            told.append(unknown_path(_without(config, key), full) or problem)
        elif source := next((one for one in reversed(OPTIONAL) if _sets(one, choices.get(one), key)), None):
            lacking.setdefault((group, f"{source}={choices[source]} sets"), []).append(key)
        else:
            told.append(problem)
    return told + [_lacks(group, choices.get(group), source, keys) for (group, source), keys in lacking.items()]


def _sets(group: str, choice: str | None, key: str) -> bool:
    files = on_search_path()
    file = files.read(group, choice) if choice and files.has(group, choice) else None
    return file is not None and has_key(placed(file.values, file.package), key)


def _lacks(group: str, choice: Any, source: str, keys: Sequence[str]) -> Problem:
    """The problem of a choice without the `keys` that `source` (`preset=... sets`) needs."""
    names = [key.removeprefix(f"{group.replace('/', '.')}.") for key in keys]
    having = [one for one in choices_with(group, keys) if one != choice]
    remedies = ["leave out what it sets: " + " ".join(f"'~{key}'" for key in keys)] if source.endswith(" sets") else []
    remedies += [f"choose one that has it: {group}={'|'.join(having)}"] if having else []
    return Problem(group, choice, f"has no {', '.join(names)}, which {source}", "; or ".join(remedies))


def _group_of(key: str, choices: Mapping[str, str]) -> str:
    """The innermost config group that a dotted key belongs to, of those in which one of `choices` is made."""
    parts = key.split(".")[:-1]
    groups = ["/".join(parts[:end]) for end in range(len(parts), 0, -1)]
    return next((group for group in groups if group in choices and options(group)), "config")


def _is_below(key: str, other: str) -> bool:
    return key == other or key.startswith(f"{other}.")


def _without(node: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Nested mappings without a dotted key."""
    first, _, rest = key.partition(".")
    kept = {name: value for name, value in node.items() if name != first}
    return {**kept, first: _without(node[first], rest)} if rest and isinstance(node.get(first), Mapping) else kept
