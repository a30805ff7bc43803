"""Explain the errors of a composition in terms of the words and files that caused them.

Hydra stops at its first error. fedsim looks for more: it leaves out the words that an error is
about, composes the other words, and so on until they compose. The words are the overrides of the
command line, such as `selector=gpfl`; a choice is the file of conf/ that such a word names.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hydra.core.override_parser.types import Override

from fedsim.config.build import unknown
from fedsim.config.choice_files import ChoiceFile, ChoiceFiles, missing_package_line
from fedsim.config.job import ComposedJob
from fedsim.config.sources import known_choices, options
from fedsim.config.suggestions import PRESET_GROUPS, UNKNOWN_KEY, mistaken_choice, unknown_key
from fedsim.config.words import first_line, parse_one, quoted, typed_in
from fedsim.core.configs import has_key
from fedsim.core.errors import ConfigError, Problem, ProblemCollector


def all_mistakes(
    error: ConfigError, words: Sequence[str], compose: Callable[[Sequence[str]], Any]
) -> list[Problem]:
    """Return all problems of `words`. `error` has the first ones, which `compose(words)` raised.

    A word below a mistaken choice is not judged: `selector.alpha=1` may be right for the selector
    that the user meant. After a mistaken preset, which may choose anything, no other word is
    judged.
    """
    collector = ProblemCollector()
    problems = error.problems
    while problems:
        collector.add(*problems)
        keys = [_bare(problem.key) for problem in problems]
        if not set(PRESET_GROUPS).isdisjoint(keys):
            break
        # with a dot at the end, so that `selector` does not match `selectors=...`
        mistaken = tuple(f"{key}." for key in keys)
        other_words = [word for word in words if not f"{_bare(word)}.".startswith(mistaken)]
        if len(other_words) == len(words):  # the problems are about files
            break
        words = other_words
        try:
            compose(words)
            break
        except ConfigError as next_error:
            problems = next_error.problems
    return collector.problems


def _bare(word: str) -> str:
    """Return the dotted key of a word: `selector.sketch` for `+selector/sketch=topk`."""
    return word.strip("+~ ").partition("=")[0].strip().replace("/", ".")


def composition_problems(
    error: Exception, overrides: Sequence[Override], known: Mapping[str, Any] | None
) -> list[Problem]:
    """Return the problems of the files and words that caused an error of Hydra, at least one.

    `known` is the config that the choices among the overrides make; None if they do not compose.
    """
    # 1. Defaults lists of chosen files, and unknown keys: fedsim can tell these by itself.
    files = known_choices()
    collector = ProblemCollector()
    for override in overrides:
        group = override.key_or_group
        choice = str(override.value())
        if files.has(group, choice):
            collector.add(*_mistaken_defaults(files.read(group, choice), files))
        is_key = not options(group) and not _adds(override)
        if is_key and known is not None and not has_key(known, group):
            collector.add(unknown_key(known, group, files))
    if collector.problems:
        return collector.problems

    # 2. Otherwise the word whose key is in Hydra's message, or no word at all.
    message = str(error)
    for override in overrides:
        key = re.escape(override.key_or_group)
        if re.search(rf"(?<![\w./]){key}(?![\w/])", message):
            return [_problem_of_word(override, error)]
    return [Problem("config", ..., first_line(error))]


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


def _mistaken_defaults(file: ChoiceFile, files: ChoiceFiles) -> Iterator[Problem]:
    """Yield the problems of the entries of a file's defaults list that choose in top-level
    groups."""
    for entry in file.entries:
        for key, choice in entry.items() if isinstance(entry, dict) else []:
            group = str(key).split(" ")[-1].lstrip("/")
            place = f"{file.path}: `- {key}: {choice}`"
            if group not in files.groups:
                if str(key).startswith("override /"):
                    text = "is about no group that there is"
                    yield replace(unknown(group, files.groups), key=place, rule=text)
            elif "/" not in group and key != f"override /{group}":
                remedy = f"write `- override /{group}: {choice}`"
                yield Problem(place, ..., "does not replace the choice made", remedy)
            elif mistake := mistaken_choice(parse_one(f"{group}={choice}")):
                yield replace(mistake, key=place, value=...)
            elif file.package == file.group:
                yield missing_package_line(file)


def several_values(override: Override) -> Problem:
    """Return the problem of an override with several values in a command without -m. It may be a
    text with a comma."""
    key = override.key_or_group
    value = typed_in(override)
    remedy = f"put -m after fedsim; a text that has a comma is quoted: {quoted(key, value)}"
    return Problem(key, value, "has several values, and needs -m", remedy)


def explained(problems: Sequence[Problem], job: ComposedJob) -> list[Problem]:
    """Return `problems` of a composed job with more remedies.

    They say how to quote a text, where an unknown key is known, and how to leave out an unknown key
    that a file sets.
    """
    explanations = []
    for problem in problems:
        key, value = problem.key, problem.value
        if problem.rule == UNKNOWN_KEY and not _is_of_class(key, job):
            problem = _explained_key(key, job)
        elif isinstance(value, str) and key in job.files.groups and job.config.get(key) == value:
            remedy = f"choose it in the file's defaults list: `- override /{key}: {value}`"
            problem = replace(problem, remedy=remedy)
        elif isinstance(value, int | float) and re.search("a string|a path", problem.rule):
            texts = [word.partition("=")[2] for word in job.overrides if _bare(word) == key]
            example = quoted(key, texts[-1]) if texts else f'{key}: "{value}"'
            problem = replace(problem, remedy=f"quote a text: {example}")
        explanations.append(problem)
    return explanations


def _is_of_class(key: str, job: ComposedJob) -> bool:
    """Return whether a class from Python has taken the place of the choice in the key's group."""
    group = key.partition(".")[0]
    return group in job.choices and not job.files.has(group, job.choices[group])


def _explained_key(key: str, job: ComposedJob) -> Problem:
    """Return the problem of an unknown key: in a file without its package line, in a word that the
    user typed, or in a file."""
    files = job.files
    if key in job.choices and key in files.groups:
        return missing_package_line(files.read(key, job.choices[key]))
    for typed in job.typed:
        is_group = typed.replace(".", "/") in files.groups
        if not is_group and (f"{key}.".startswith(f"{typed}.") or typed.startswith(f"{key}.")):
            return unknown_key(job.config, max(key, typed, key=len), files)
    problem = unknown_key(job.config, key, files)
    return replace(problem, remedy=f"{problem.remedy}; a file sets it, and '~{key}' leaves it out")
