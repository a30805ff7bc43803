"""Unknown keys of a composed config, told in terms of what was typed.

A key may come from a preset for which another model or optimiser was chosen than its own. To be called inside
`fedsim.config.compose.search_path`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from fedsim.config.diagnosis import OPTIONAL, compose_one
from fedsim.config.overrides import key_of, options, parse
from fedsim.config.suggestions import UNKNOWN_KEY, choices_taking, choices_with, key_of_choices, unknown_path
from fedsim.errors import ConfigError, Problem


def explained(
    problems: Sequence[Problem],
    config: Mapping[str, Any],
    choices: Mapping[str, str],
    words: Sequence[str],
    config_name: str,
) -> list[Problem]:
    """`problems` with those of unknown keys explained: by what has set them, or by where such a key is."""
    given = [key_of(override) for override in parse(words) if not options(override.key_or_group)]
    told: list[Problem] = []
    lacking: dict[tuple[str, str], list[str]] = {}
    for problem in problems:
        if problem.rule != UNKNOWN_KEY:
            told.append(problem)
        elif typed := next((key for key in given if _is_below(problem.key, key) or _is_below(key, problem.key)), None):
            told.append(_with_places(problem, config, typed))
        elif (group := group_of(problem.key, choices)) and (
            source := _source(problem.key, choices, words, config_name)
        ):
            lacking.setdefault((group, source), []).append(problem.key)
        else:
            told.append(problem)
    return told + [lacks(group, choices[group], source, keys) for (group, source), keys in lacking.items()]


def lacks(group: str, choice: Any, source: str, keys: Sequence[str], *, swept: bool = False) -> Problem:
    """The problem of a choice without the `keys` that `source` (`preset=...`) sets, or is `swept` over."""
    names = [key.removeprefix(f"{group.replace('/', '.')}.") for key in keys]
    having = [one for one in choices_with(group, keys) if one != choice]
    leave_out = [] if swept else ["leave out what it sets: " + " ".join(f"'~{key}'" for key in keys)]
    choose = [f"choose one that has it: {group}={'|'.join(having)}"] if having else []
    text = f"has no {', '.join(names)}, which {source} {'sweeps over' if swept else 'sets'}"
    return Problem(group, choice, text, "; or ".join([*leave_out, *choose]))


def group_of(key: str, choices: Mapping[str, str]) -> str | None:
    """The innermost config group that a dotted key belongs to, of those in which one of `choices` is made."""
    parts = key.split(".")[:-1]
    groups = ["/".join(parts[:end]) for end in range(len(parts), 0, -1)]
    return next((group for group in groups if group in choices and options(group)), None)


def _is_below(key: str, other: str) -> bool:
    return key == other or key.startswith(f"{other}.")


def _with_places(problem: Problem, config: Mapping[str, Any], typed: str) -> Problem:
    """The problem of the key `typed`, with the choices that take it, or the places where such a key is."""
    key = typed if _is_below(typed, problem.key) else problem.key
    if depth := problem.key.count("."):
        takers = choices_taking(key, depth)
        near = [problem.remedy.removeprefix("did you mean ").rstrip("?")] if "did you mean" in problem.remedy else []
        return Problem(key, ..., UNKNOWN_KEY, key_of_choices(takers, near)) if takers else problem
    found = unknown_path({key: value for key, value in config.items() if key != problem.key}, key)
    return problem if found is None else found[0]


def _source(key: str, choices: Mapping[str, str], words: Sequence[str], config_name: str) -> str | None:
    """The preset or cell without which the config has no such key."""
    for group in (name for name in reversed(OPTIONAL) if choices.get(name)):
        others = [o.input_line or "" for o in parse(words) if o.key_or_group != group]
        try:
            without = compose_one(others, config_name)
        except ConfigError:  # a word is about what it sets
            return f"{group}={choices[group]}"
        if OmegaConf.select(without, key) is None:
            return f"{group}={choices[group]}"
    return None
