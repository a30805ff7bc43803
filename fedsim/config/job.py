"""A composed job: one job of a sweep (or the only one of a command), before its config is checked.

`fedsim.config.compose` makes the jobs of a command line; `fedsim.config.plan` checks their configs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedsim.config.choice_files import ChoiceFiles


@dataclass(frozen=True)
class ComposedJob:
    """The config of one job as plain containers, and the words and choices that made it.

    For example, `fedsim selector=gpfl seed=1` has one job:

    - `config`: `{"selector": {"_target_": ...}, "seed": 1, "num_rounds": 50, ...}`.
    - `choices`: the choice made in each group, `{"selector": "gpfl", "selector/exploration":
      "linear", "dataset": "digits", ...}`.
    - `overrides`: all words that the config was composed of, `("selector=gpfl", "seed=1")`. Those
      that a preset or a scale adds are among them.
    - `typed`: the keys and groups on the command line, `{"selector", "seed"}`.
    - `launcher`: the node `hydra.launcher`, which says how jobs are started.
    - `files`: the choices that could be made.
    """

    config: dict[str, Any]
    choices: dict[str, str]
    overrides: tuple[str, ...]
    typed: frozenset[str]
    launcher: dict[str, Any]
    files: ChoiceFiles

    @property
    def names(self) -> dict[str, str]:
        """The choices as runs and reports name them.

        A class that is not that of the choice's file (`selector._target_=my_lab.Mine`) has the
        place of the choice. Otherwise reports would take the run for one of the choice.
        """
        names = dict(self.choices)
        for group, choice in self.choices.items():
            node: Any = self.config
            for key in group.split("/"):
                node = node.get(key) if isinstance(node, Mapping) else None
            target = node.get("_target_") if isinstance(node, Mapping) else None
            if not isinstance(target, str) or not self.files.has(group, choice):
                continue  # a class from Python names itself
            file = self.files.read(group, choice)
            if file.values.get("_target_") != target:
                names[group] = target.rpartition(".")[2]
        return names
