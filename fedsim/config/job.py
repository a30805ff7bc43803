"""The value that composing a command line makes: one job of a sweep, before its config is
checked."""

from dataclasses import dataclass
from typing import Any

from fedsim.config.choice_files import ChoiceFiles


@dataclass(frozen=True)
class ComposedJob:
    """The config of one job as plain containers, and what it was composed of.

    `choices`: the choice made in each group. `overrides`: the words that the config was composed
    of; a preset adds some to those of the command line. `typed`: the keys and groups on the command
    line. `launcher`: the node `hydra.launcher`. `files`: the choices that could be made.
    """

    config: dict[str, Any]
    choices: dict[str, str]
    overrides: tuple[str, ...]
    typed: frozenset[str]
    launcher: dict[str, Any]
    files: ChoiceFiles
