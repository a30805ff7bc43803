"""A composed job: one job of a sweep (or the only one of a command), before its config is checked.

`fedsim.config.compose` makes the jobs of a command line; `fedsim.config.plan` checks their configs.
"""

from dataclasses import dataclass
from typing import Any

from fedsim.config.choice_files import ChoiceFiles


@dataclass(frozen=True)
class ComposedJob:
    """The config of one job as plain containers, and the words and choices that made it.

    `choices`: the choice made in each group. `overrides`: all words that the config was composed
    of: those of the command line, and those that a preset or a scale adds. `typed`: the keys and
    groups on the command line. `launcher`: the node `hydra.launcher`, which says how jobs are
    started. `files`: the choices that could be made.
    """

    config: dict[str, Any]
    choices: dict[str, str]
    overrides: tuple[str, ...]
    typed: frozenset[str]
    launcher: dict[str, Any]
    files: ChoiceFiles
