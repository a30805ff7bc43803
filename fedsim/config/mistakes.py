"""All mistakes in the words of a command line, where composing it has shown that there are some.

Hydra stops at the first. Here each word is judged: whether it can be read, whether a choice exists, whether the config
that the choices make has such a key. A word about a group of which no existing choice is made waits for the next try;
so do types and rules of values, which are told once all words can be composed (`fedsim.config.plan`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from fedsim.config.build import Gathered
from fedsim.config.choice_files import ChoiceFiles
from fedsim.config.diagnosis import choices_of, compose_one, groups_above, words_of_scale
from fedsim.config.hydra_node import check_words
from fedsim.config.sources import on_search_path
from fedsim.config.suggestions import OPTIONAL, UNKNOWN_KEY, mistaken_choice, unknown_key
from fedsim.config.words import MAX_JOBS, key_of, options, parse, parse_one, typed_in, values_of, words_of
from fedsim.core.configs import has_key
from fedsim.core.errors import Problem

MOST_JOBS = 36
"""In which it is seen whether keys exist: composing one takes 0.1 s."""


def find(words: Sequence[str], config_name: str, *, multirun: bool) -> list[Problem]:
    """All problems of `words`, but for types and rules of the values."""
    found = Gathered()
    read: list[Override] = []
    axes: dict[str, list[str]] = {}
    unclear: set[str] = set()
    for word in words:
        override = found.run(_readable, word)
        values = [] if override is None else _sound_values(override, found)
        if override is not None and values:
            read.append(override)
            axes[key_of(override)] = values
        else:
            unclear.add(word.lstrip("+~").partition("=")[0])
    unclear = {group for group in unclear if options(group)}
    choices = {key: values for key, values in axes.items() if options(parse_one(values[0]).key_or_group)}
    scale = {"scale": axes["scale"][:1]} if "scale" in axes else {}
    config = found.run(compose_one, _jobs({**choices, **scale})[0], config_name)
    if config is None:
        return found.problems
    implied: list[str] = []
    sweeps = multirun or str(config.hydra.mode).endswith("MULTIRUN")
    if unclear.isdisjoint(OPTIONAL):
        swept = [override for override in read if override.is_sweep_override() and not sweeps]
        rule, remedy = "is a sweep over several values, and needs -m", "put -m behind fedsim"
        found.add(*(Problem(o.key_or_group, typed_in(o), rule, remedy) for o in swept))
        implied = _implied(config, read, sweeps, found)
    typed = [o.key_or_group for o in read if key_of(o) not in choices and not (o.is_add() or o.is_force_add())]
    made = {word.partition("=")[0]: [word] for word in implied if options(word.partition("=")[0])}
    brought = [key for word in implied if (key := word.partition("=")[0]) not in made and key[0] not in "+~"]
    files = on_search_path()
    for job in _jobs({**made, **choices}):
        config = found.run(compose_one, job, config_name)
        if config is None:
            continue
        known: Any = OmegaConf.to_container(config, resolve=False)
        for key in [*typed, *brought]:
            if not (has_key(known, key) or _is_open(key, unclear)):
                problem = unknown_key(known, key, files)
                source = f"; preset={choices_of(config).get('preset')} sweeps over it" if key in brought else ""
                found.add(replace(problem, remedy=problem.remedy + source))
    return found.problems


def _readable(word: str) -> Override:
    override = parse_one(word)
    check_words([override])
    return override


def _sound_values(override: Override, found: Gathered) -> list[str]:
    """A word for each value; in a group, those of choices that there are. The problems of others are added."""
    if not override.is_sweep_override():
        values = [override.input_line or ""]
    else:
        values = found.run(lambda: list(islice(values_of(override), MAX_JOBS + 1))) or []
    if not options(override.key_or_group):
        return values
    mistakes = {value: mistaken_choice(parse_one(value)) for value in values[:MOST_JOBS]}
    found.add(*mistakes.values())
    return [value for value, mistake in mistakes.items() if mistake is None]


def _implied(config: DictConfig, read: Sequence[Override], sweeps: bool, found: Gathered) -> list[str]:
    """Words that a preset and `scale` add, of keys that are not typed; of a sweep the first value."""
    params = words_of(config.hydra.sweeper.get("params") or {}) if sweeps else []
    sized = found.run(words_of_scale, config, read) or []
    typed = set(map(key_of, read))
    return [next(values_of(o)) for o in parse([*params, *sized]) if key_of(o) not in typed]


def _jobs(axes: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """At least one job, and as many as it takes for each value to occur."""
    count = min(max(map(len, axes.values()), default=1), MOST_JOBS)
    return [[values[min(number, len(values) - 1)] for values in axes.values()] for number in range(count)]


def _is_open(key: str, unclear: Collection[str]) -> bool:
    """Whether what was meant by the choice of a group decides if there is such a key."""
    groups = {*groups_above(key), key.replace(".", "/")}
    return not groups.isdisjoint(unclear) or ("." in key and not set(unclear).isdisjoint(OPTIONAL))


def explained(
    problems: Sequence[Problem], config: Mapping[str, Any], typed: Collection[str], files: ChoiceFiles
) -> list[Problem]:
    """`problems` of a composed config, with those of unknown keys explained: where such a key is, if it was `typed`, or
    how to leave out what a file sets."""

    def explain(key: str) -> Problem:
        word = next((one for one in typed if f"{key}.".startswith(f"{one}.") or one.startswith(f"{key}.")), None)
        problem = unknown_key(config, max(key, word or "", key=len), files)
        own = "" if word else f"; a file sets it, and '~{key}' leaves it out"
        return replace(problem, remedy=problem.remedy + own)

    return [explain(problem.key) if problem.rule == UNKNOWN_KEY else problem for problem in problems]
