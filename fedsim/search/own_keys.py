"""Keys of the command line that have a meaning of their own in `fedsim search`, `race` and `tune`.

These are the settings of the command itself, and keys of runs that the command rejects.
"""

from argparse import Namespace
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedsim.config.build import UNKNOWN_KEY
from fedsim.config.plan import Plan
from fedsim.config.words import parse, typed_in
from fedsim.core.errors import Problem


def take_settings(args: Namespace, keys: Collection[str]) -> dict[str, Any]:
    """Return the values of the command's own settings, and change `args`: remove them from it.

    `keys` are the names of these settings. `args.overrides` keeps all other words. A sweep over a
    setting gives a list, which only a setting that is a list accepts.
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
    """Return the problem of a config with `stop_at`, or None if no config has it.

    Such runs all end near the accuracy `stop_at`, so no command can find the best of them.
    """
    for config in configs:
        if config["stop_at"] is not None:
            fault = "ends runs near the same accuracy, so they cannot be ranked by it"
            return Problem("stop_at", config["stop_at"], fault, "leave it out")
    return None


def overwrite_problem(plans: Sequence[Plan]) -> Problem | None:
    """Return the problem of a plan with `overwrite=true`, or None if no plan has it.

    It is for commands that run jobs step by step, and do not know all their jobs at the start. If
    such a command is stopped, the same command cannot tell which runs it has replaced, and would
    run them again.
    """
    for plan in plans:
        if plan.settings.overwrite:
            fault = "is rejected here: if the command is stopped, it could not resume"
            remedy = f"delete {plan.folder.parent}, or choose another name=... or output_dir=..."
            return Problem("overwrite", True, fault, remedy)
    return None


def with_own_keys(problem: Problem, keys: Collection[str], command: str) -> Problem:
    """Return `problem`; if it is about an unknown key, also with the `keys` of `command` itself.

    They are added to its remedy, because the user may have misspelled one of them.
    """
    if problem.rule != UNKNOWN_KEY:
        return problem
    own_keys = f"keys of the {command} itself: {', '.join(keys)}"
    return replace(problem, remedy=f"{problem.remedy}; {own_keys}")
