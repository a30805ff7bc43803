"""Keys of the command line that have a meaning of their own in `fedsim search`, `race` and `tune`.

These are the settings of the command itself, and keys of runs that the command rejects.
"""

from argparse import Namespace
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedsim.config.plan import Plan
from fedsim.config.suggestions import UNKNOWN_KEY
from fedsim.config.words import parse, typed_in
from fedsim.core.errors import Problem, rule


def take_settings(args: Namespace, keys: Collection[str]) -> dict[str, Any]:
    """Remove the settings of the command itself from `args.overrides`, and return their values.

    `keys` are the names of these settings. A sweep over a setting gives a list, which only a
    setting that is a list accepts.
    """
    values: dict[str, Any] = {}
    other_words = []
    for word, override in zip(args.overrides, parse(args.overrides), strict=True):
        key = override.key_or_group
        if key not in keys:
            other_words.append(word)
        elif override.is_sweep_override():
            values[key] = typed_in(override).split(",")
        else:
            values[key] = override.value()
    args.overrides = other_words
    return values


def stop_at_problem(configs: Iterable[Mapping[str, Any]]) -> Problem | None:
    """Return the problem of runs that end near one accuracy: none of them is the best."""
    targets = [config["stop_at"] for config in configs if config["stop_at"] is not None]
    fault = "ends runs near the same accuracy, so they cannot be ranked by it"
    return rule(not targets, "stop_at", targets[:1], fault, "leave it out")


def overwrite_problem(plans: Sequence[Plan]) -> Problem | None:
    """Return the problem of runs with `overwrite=true` in a command that runs jobs step by step.

    Such a command does not know all its jobs at the start. If it is stopped, the same command
    cannot tell which of them it has replaced, and would run them again.
    """
    overwrites = any(plan.settings.overwrite for plan in plans)
    fault = "is rejected here: if the command is stopped, it could not resume"
    remedy = f"delete {plans[0].folder.parent}, or choose another name=... or output_dir=..."
    return rule(not overwrites, "overwrite", True, fault, remedy)


def with_own_keys(problem: Problem, keys: Collection[str], command: str = "search") -> Problem:
    """Return `problem`. If it is about an unknown key, its remedy also names the command's keys."""
    if problem.rule != UNKNOWN_KEY:
        return problem
    own_keys = f"keys of the {command} itself: {', '.join(keys)}"
    return replace(problem, remedy=f"{problem.remedy}; {own_keys}")
