"""Explain errors of a config by the words and files that caused them.

A *word* is an override of the command line, such as `selector=gpfl`. A *choice* is the file of
conf/ that such a word names.

- If the words of a command do not compose, `composition_problems` says why. Hydra stops at its
  first error, so `all_mistakes` looks for more: it leaves out the words that an error is about,
  composes the other words, and so on until they compose.
- If a composed config has a mistake, such as an unknown key, `explained` says where it comes from.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hydra.core.override_parser.types import Override

from fedsim.config.build import UNKNOWN_KEY, unknown
from fedsim.config.choice_files import ChoiceFile, ChoiceFiles
from fedsim.config.job import ComposedJob
from fedsim.config.sources import known_choices, options
from fedsim.config.suggestions import PRESET_GROUPS, mistaken_choice, unknown_key
from fedsim.config.words import dotted_key, is_below, parse_one, quoted, typed_in
from fedsim.core.configs import has_key
from fedsim.core.errors import ConfigError, Problem, ProblemCollector
from fedsim.core.text import first_line


def all_mistakes(
    error: ConfigError, words: Sequence[str], compose: Callable[[Sequence[str]], Any]
) -> list[Problem]:
    """Return all problems of `words`. `error` has the first ones, which `compose(words)` raised.

    A word below a mistaken choice is not judged: with `selector=gpfk`, `selector.metric=dot` may be
    right for the selector that the user meant. After a mistaken preset, which may choose anything,
    no other word is judged.
    """
    collector = ProblemCollector()
    problems = error.problems
    while True:
        collector.add(*problems)
        mistaken_keys = [dotted_key(problem.key) for problem in problems]
        other_words = [word for word in words if not is_below(word, mistaken_keys)]
        is_preset_mistaken = not set(PRESET_GROUPS).isdisjoint(mistaken_keys)
        if is_preset_mistaken or len(other_words) == len(words):  # equal: they are about files
            return collector.problems
        words = other_words
        try:
            compose(words)
        except ConfigError as next_error:
            problems = next_error.problems
        else:
            return collector.problems


def composition_problems(
    error: Exception, overrides: Sequence[Override], known: Mapping[str, Any] | None
) -> list[Problem]:
    """Return the problems of the files and words that caused an error of Hydra, at least one.

    These are the problems that fedsim finds by itself. If it finds none, it blames the word whose
    key is in Hydra's message, or no word at all. `known` is the nested config of the overrides that
    are choices, without the values that the others set; None if the choices do not compose.
    """
    problems = _problems_without_hydra(overrides, known)
    if problems:
        return problems
    message = str(error)
    for override in overrides:
        key = re.escape(override.key_or_group)
        if re.search(rf"(?<![\w./]){key}(?![\w/])", message):
            return [_problem_of_word(override, error)]
    return [Problem("config", ..., first_line(error))]


def _problems_without_hydra(
    overrides: Sequence[Override], known: Mapping[str, Any] | None
) -> list[Problem]:
    """Return the problems that fedsim finds by itself: in the defaults lists of chosen files, and
    keys that `known` does not have."""
    files = known_choices()
    collector = ProblemCollector()
    for override in overrides:
        key = override.key_or_group
        choice = str(override.value())
        if options(key):
            if files.has(key, choice):
                collector.add(*_mistaken_defaults(files.read(key, choice), files))
        elif known is not None and not _adds(override) and not has_key(known, key):
            collector.add(unknown_key(known, key, files))
    return collector.problems


def _adds(override: Override) -> bool:
    """Return whether an override begins with + or ++."""
    return override.is_add() or override.is_force_add()


def _problem_of_word(override: Override, error: Exception) -> Problem:
    """Return the problem of the word that caused an error of Hydra."""
    key = override.key_or_group
    value = typed_in(override) or ...
    parent_group = key.rpartition("/")[0]
    if parent_group and "No match in the defaults list" in str(error):
        text = f"has no effect: the choice of {parent_group} has no such group"
        return Problem(key, value, text, f"choose a {parent_group} that has one")
    if _adds(override):
        remedy = f"leave out the +: {shlex.quote(str(override.input_line).lstrip('+'))}"
        return Problem(key, value, "is a key already, and + adds one", remedy)
    return Problem(key, value, first_line(error))


def _mistaken_defaults(file: ChoiceFile, files: ChoiceFiles) -> Iterator[Problem | None]:
    """Yield the problem of each entry `key: choice` in a file's defaults list; None for an entry
    without one."""
    for entry in file.entries:
        if isinstance(entry, dict):
            for key, choice in entry.items():
                yield _mistaken_entry(str(key), choice, file, files)


def _mistaken_entry(key: str, choice: Any, file: ChoiceFile, files: ChoiceFiles) -> Problem | None:
    """Return the problem of the entry `key: choice` in the defaults list of a file; None if there
    is none.

    A top-level group, such as `selector`, already has a choice in conf/config.yaml. Only the key
    `override /selector` replaces it. Other entries are about groups below that of the file.
    """
    group = key.split(" ")[-1].lstrip("/")  # `selector` for `override /selector`
    place = f"{file.path}: `- {key}: {choice}`"
    if group not in files.groups:
        if not key.startswith("override /"):  # the group may lie below that of the file
            return None
        text = "is about no group that there is"
        return replace(unknown(group, files.groups), key=place, rule=text)
    if "/" not in group and key != f"override /{group}":
        remedy = f"write `- override /{group}: {choice}`"
        return Problem(place, ..., "does not replace the choice made", remedy)
    mistake = mistaken_choice(parse_one(f"{group}={choice}"))
    if mistake is not None:
        return replace(mistake, key=place, value=...)
    return missing_package_line(file) if file.package == file.group else None


def missing_package_line(file: ChoiceFile) -> Problem:
    """Return the problem of a file that lacks the line `# @package _global_`, which puts its keys
    at the top level."""
    text = f"has its keys below `{file.group}`, where none is known"
    return Problem(str(file.path), ..., text, "make `# @package _global_` its first line")


def several_values(override: Override) -> Problem:
    """Return the problem of an override with several values in a command without -m.

    The user may have meant a text with a comma.
    """
    key = override.key_or_group
    value = typed_in(override)
    remedy = f"put -m after fedsim; a text that has a comma is quoted: {quoted(key, value)}"
    return Problem(key, value, "has several values, and needs -m", remedy)


def explained(problems: Sequence[Problem], job: ComposedJob) -> list[Problem]:
    """Return the `problems` of a composed job's config, with better remedies where its words and
    files tell more."""
    return [_explained(problem, job) for problem in problems]


def _explained(problem: Problem, job: ComposedJob) -> Problem:
    """Return `problem`, or one with a better remedy."""
    key = problem.key
    value = problem.value
    # 1. An unknown key: say where it is known.
    if problem.rule == UNKNOWN_KEY and not _is_of_class(key, job):
        return _explained_key(key, job)
    # 2. A group's key has a text in place of a node: a file has `selector: gpfl` among its keys.
    if isinstance(value, str) and key in job.files.groups and job.config.get(key) == value:
        remedy = f"choose it in the file's defaults list: `- override /{key}: {value}`"
        return replace(problem, remedy=remedy)
    # 3. A text is required that looks like a number, such as name=2024: say how to quote it.
    if isinstance(value, int | float) and re.search("a string|a path", problem.rule):
        texts = [word.partition("=")[2] for word in job.overrides if dotted_key(word) == key]
        example = quoted(key, texts[-1]) if texts else f'{key}: "{value}"'
        return replace(problem, remedy=f"quote a text: {example}")
    return problem


def _is_of_class(key: str, job: ComposedJob) -> bool:
    """Return whether the key is below a group for which a program passed its own class in place of
    a choice."""
    group = key.partition(".")[0]
    return group in job.choices and not job.files.has(group, job.choices[group])


def _explained_key(key: str, job: ComposedJob) -> Problem:
    """Return the problem of a key in the job's config that is not known.

    A word of the user sets it, or a file, for example a preset.
    """
    files = job.files
    if key in job.choices and key in files.groups:  # the keys of a preset are below `preset`
        return missing_package_line(files.read(key, job.choices[key]))
    for typed in job.typed:
        if typed.replace(".", "/") in files.groups:  # a choice, not a value
            continue
        if f"{key}.".startswith(f"{typed}."):  # the user typed the key, or a mapping with it
            return unknown_key(job.config, key, files)
        if typed.startswith(f"{key}."):  # the user typed a key below it
            return unknown_key(job.config, typed, files)
    problem = unknown_key(job.config, key, files)
    return replace(problem, remedy=f"{problem.remedy}; a file sets it, and '~{key}' leaves it out")
