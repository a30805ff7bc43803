"""All mistakes in the words of a command line, where composing it has shown that there are some.

Hydra stops at the first. Here each word is judged: whether it can be read, whether a choice exists,
whether the config that the choices make has such a key. A word about a group of which no existing
choice is made waits for the next try; so do types and rules of values, which are told once all
words can be composed (`fedsim.config.plan`).
"""

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

import yaml
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from fedsim.config.build import Gathered
from fedsim.config.choice_files import no_package
from fedsim.config.diagnosis import choices_of, compose_one, groups_above, words_of_scale
from fedsim.config.hydra_node import check_words
from fedsim.config.overlay import Composed
from fedsim.config.sources import on_search_path
from fedsim.config.suggestions import OPTIONAL, UNKNOWN_KEY, mistaken_choice, unknown_key
from fedsim.config.words import (
    MAX_JOBS,
    key_of,
    options,
    parse,
    parse_one,
    quoted,
    typed_in,
    values_of,
    words_of,
)
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
    choices = {
        key: values for key, values in axes.items() if options(parse_one(values[0]).key_or_group)
    }
    scale = {"scale": axes["scale"][:1]} if "scale" in axes else {}
    config = found.run(compose_one, _jobs({**choices, **scale})[0], config_name)
    if config is None:
        return found.problems
    implied: list[str] = []
    sweeps = multirun or str(config.hydra.mode).endswith("MULTIRUN")
    if unclear.isdisjoint(OPTIONAL):
        swept = [override for override in read if override.is_sweep_override() and not sweeps]
        found.add(*map(_swept, swept))
        implied = _implied(config, read, sweeps, found)
    typed = [
        o.key_or_group
        for o in read
        if key_of(o) not in choices and not (o.is_add() or o.is_force_add())
    ]
    made = {word.partition("=")[0]: [word] for word in implied if options(word.partition("=")[0])}
    brought = [
        key
        for word in implied
        if (key := word.partition("=")[0]) not in made and key[0] not in "+~"
    ]
    files = on_search_path()
    for job in _jobs({**made, **choices}):
        config = found.run(compose_one, job, config_name)
        if config is None:
            continue
        known: Any = OmegaConf.to_container(config, resolve=False)
        for key in [*typed, *brought]:
            if not (has_key(known, key) or _is_open(key, unclear)):
                problem = unknown_key(known, key, files)
                source = (
                    f"; preset={choices_of(config).get('preset')} sweeps over it"
                    if key in brought
                    else ""
                )
                found.add(replace(problem, remedy=problem.remedy + source))
    return found.problems


def _swept(override: Override) -> Problem:
    """The problem of several values without -m, or of a comma in a path."""
    key, value = override.key_or_group, typed_in(override)
    if "/" in value or re.search(r"(name|dir|path|root|file)$", key):
        remedy = f"quote a text that has one: {quoted(key, value)}"
        return Problem(key, value, "has a comma, which separates values", remedy)
    return Problem(
        key, value, "is a sweep over several values, and needs -m", "put -m behind fedsim"
    )


def _readable(word: str) -> Override:
    override = parse_one(word)
    check_words([override])
    return override


def _sound_values(override: Override, found: Gathered) -> list[str]:
    """A word for each value; in a group, those of choices that there are. The problems of others
    are added."""
    if not override.is_sweep_override():
        values = [override.input_line or ""]
    else:
        values = found.run(lambda: list(islice(values_of(override), MAX_JOBS + 1))) or []
    if not options(override.key_or_group):
        return values
    mistakes = {value: mistaken_choice(parse_one(value)) for value in values[:MOST_JOBS]}
    found.add(*mistakes.values())
    return [value for value, mistake in mistakes.items() if mistake is None]


def _implied(
    config: DictConfig, read: Sequence[Override], sweeps: bool, found: Gathered
) -> list[str]:
    """Words that a preset and `scale` add, of keys that are not typed; of a sweep the first
    value."""
    params = words_of(config.hydra.sweeper.get("params") or {}) if sweeps else []
    sized = found.run(words_of_scale, config, read) or []
    typed = set(map(key_of, read))
    return [next(values_of(o)) for o in parse([*params, *sized]) if key_of(o) not in typed]


def _jobs(axes: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """At least one job, and as many as it takes for each value to occur."""
    count = min(max(map(len, axes.values()), default=1), MOST_JOBS)
    return [
        [values[min(number, len(values) - 1)] for values in axes.values()]
        for number in range(count)
    ]


def _is_open(key: str, unclear: Collection[str]) -> bool:
    """Whether what was meant by the choice of a group decides if there is such a key."""
    groups = {*groups_above(key), key.replace(".", "/")}
    return not groups.isdisjoint(unclear) or ("." in key and not set(unclear).isdisjoint(OPTIONAL))


def explained(problems: Sequence[Problem], job: Composed) -> list[Problem]:
    """`problems` of a composed config: with how to write a value of the wrong type, and for an
    unknown key where such a key is, if it was typed, or how to leave out what a file sets."""
    typed = [key for key in job.typed if key.replace(".", "/") not in job.files.groups]

    def explain(problem: Problem) -> Problem:
        key = problem.key
        if problem.rule != UNKNOWN_KEY:
            return problem if problem.remedy else replace(problem, remedy=_spelling(problem, job))
        if key in job.choices and key in job.files.groups:
            return no_package(job.files.read(key, job.choices[key]))
        word = next(
            (one for one in typed if f"{key}.".startswith(f"{one}.") or one.startswith(f"{key}.")),
            None,
        )
        unknown = unknown_key(job.config, max(key, word or "", key=len), job.files)
        own = "" if word else f"; a file sets it, and '~{key}' leaves it out"
        return replace(unknown, remedy=unknown.remedy + own)

    return list(map(explain, problems))


def _spelling(problem: Problem, job: Composed) -> str:
    """Return how to write a value of the wrong type as one of the right type; empty where that is
    not clear."""
    key, value, rule = problem.key, problem.value, problem.rule
    if isinstance(value, str) and key in job.files.groups:
        return f"choose it in the file's defaults list: `- override /{key}: {value}`"
    if re.search("a string|a path", rule) and isinstance(value, bool | int | float):
        texts = [word.partition("=")[2] for word in job.overrides if word.startswith(f"{key}=")]
        return (
            f"quote a text: {quoted(key, texts[-1])}"
            if texts
            else f'quote a text in its file: "{value}"'
        )
    if isinstance(value, str | float):
        with suppress(yaml.YAMLError, ValueError):
            meaning: Any = int(value) if str(value).isdecimal() else yaml.safe_load(str(value))
            if isinstance(meaning, bool):
                return f"write {str(meaning).lower()}" if "true or false" in rule else ""
            if isinstance(meaning, int | float) and (
                "a number" in rule or ("an integer" in rule and not meaning % 1)
            ):
                return f"write {meaning:.15g}"
    return ""
