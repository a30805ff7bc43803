"""Explain mistaken choices and keys of overrides such as `group=choice` and `key=value`.

A choice is a file conf/<group>/<choice>.yaml. The remedy for a mistake may be the nearest spelling,
the key for a symbol of a paper, another group or choice that has the name, or a missing
--config-dir. Functions that look for choices must be called inside
`fedsim.config.sources.search_path`, which says in which folders they are.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override

from fedsim.config.build import unknown
from fedsim.config.choice_files import ChoiceFiles
from fedsim.config.sources import known_choices, options, sources
from fedsim.config.words import is_no_choice
from fedsim.core.configs import SHORTHANDS, all_keys, has_key
from fedsim.core.errors import Problem
from fedsim.core.text import nearest

OPTIONAL = ("preset", "cell")
"""Config groups in which the user may choose nothing, as by `preset=null`."""
COMMAND_PARTS = ("hydra.", "small.", "debug.")
"""Beginnings of keys that are about the command line. They are never suggested."""
UNKNOWN_KEY = "is not a known key"
"""The rule that an unknown key violates, in the same words as in `fedsim.config.build.unknown`."""
SYMBOLS = {
    "K": "cohort_size",
    "N": "num_clients",
    "T": "num_rounds",
    "E": "local.epochs",
    "B": "local.batch_size",
    "eta": "optimizer.lr",
    "d": "selector.num_candidates (selector=power_of_choice)",
    "Q": "selector.queue_length (selector=pncs)",
    "alpha": "selector.exploration.value (selector=gpfl selector/exploration=fixed)",
    "rho": "selector.exploration.rho (selector=gpfl)",
    "tau": "selector.threshold.start (selector=fedabc)",
    "lambda": "selector.threshold.strength (selector=fedabc selector/threshold=lambda)",
    "beta": "optimizer.momentum",
}
"""The key to type for each symbol of the papers. Parentheses hold the choice that has the key, if
not all choices have it."""


def mistaken_choice(override: Override) -> Problem | None:
    """Return the problem of an override whose choice its group does not have.

    None if the group has it, or if the override is no choice: if its key is no group.
    """
    group = override.key_or_group
    choice: Any = override.value()
    is_optional = group in OPTIONAL and is_no_choice(override)
    if is_optional or override.is_delete() or not options(group):
        return None
    remedy = ""
    # Only a path below the group's folder can be a choice.
    is_relative = isinstance(choice, str) and re.fullmatch(r"[\w.-][\w./-]*", choice) is not None
    if is_relative and ".." not in choice:
        if any(source.is_config(f"{group}/{choice}") for source in sources()):
            return None
        remedy = _choices_called(group, choice) or _choice_elsewhere(group, choice)
    if not remedy:
        remedy = unknown(str(choice), options(group)).remedy
    return Problem(group, choice, f"is not a choice of conf/{group}/", remedy)


def _choices_called(group: str, name: str) -> str:
    """Return a remedy with the choices of the group that the literature calls `name`; "" if there
    are none.

    There are several. The caller's override would have been accepted if there were only one.
    """
    choices = known_choices().also_called(group, name)
    lines = [f"{choice}: {idea}" for choice, idea in choices.items()]
    head = f"{len(lines)} of its choices are called {name}; write which one"
    return "\n      ".join([head, *lines]) if lines else ""


def _choice_elsewhere(group: str, choice: str) -> str:
    """Return the remedy if another group, or a folder of the user's, has `choice`; "" otherwise."""
    files = known_choices()
    has_config_dir = len(files.folders) > 1
    if not has_config_dir:
        for folder in (Path(), Path("conf")):  # where users keep choices of their own
            path = folder / group / f"{choice}.yaml"
            if path.is_file():
                return f"{path} is there: add --config-dir {folder}"
    if choice == "none":  # a choice of many groups
        return ""
    groups = [name for name in files.groups if files.has(name, choice)]
    words = [f"{name}={choice}" for name in groups]
    return f"did you mean {' or '.join(words)}?" if words else ""


def unknown_key(config: Mapping[str, Any], key: str, files: ChoiceFiles) -> Problem:
    """Return the problem of a dotted key that `config` does not have, or that the class of its
    component does not take.

    The key may belong to a choice that the user did not make, be misspelt, or be elsewhere in the
    config. The remedy says where.
    """
    # 1. The innermost mapping of the config on the way to the key, and the name it does not have
    parent, _, name = key.rpartition(".")
    while parent and not has_key(config, parent):
        parent, _, name = parent.rpartition(".")
    mapping: Any = config
    if parent:
        for part in parent.split("."):
            mapping = mapping[part]
    siblings: list[str] = []
    if isinstance(mapping, Mapping):
        # The config may have `name`, if the class does not take it.
        siblings = [
            str(sibling) for sibling in mapping if sibling not in ("_target_", "hydra", name)
        ]
    misspelt = unknown(name, siblings, parent)

    # 2. A key of other choices
    choices = _choices_with(config, key, files)
    if choices:
        remedies = [f"it is a key of {choices}"]
        if key in SHORTHANDS:
            remedies.append(f"did you mean {SYMBOLS[name]}?")
        if nearest(name, siblings):
            remedies.append(misspelt.remedy)
        return Problem(key, ..., UNKNOWN_KEY, "; or ".join(remedies))

    # 3. A key of the same name elsewhere, or the key for a symbol; otherwise the nearest spelling
    places = [] if parent else _keys_ending_with(config, key, files)
    symbol = SYMBOLS.get(key.rpartition(".")[2])
    if symbol and symbol.split()[0] not in places:
        places.append(symbol)
    if places:
        return Problem(key, ..., UNKNOWN_KEY, f"did you mean {' or '.join(places)}?")
    return misspelt


def _choices_with(config: Mapping[str, Any], key: str, files: ChoiceFiles) -> str:
    """Return the choices that have `key`, as `selector=gpfl|pncs`; "" if none has.

    If several groups have such choices, they are those of the innermost one that `config` has.
    """
    names_by_group = files.choices_by_key.get(key)
    if not names_by_group:
        return ""
    groups = sorted(names_by_group)  # outer groups come first
    in_config = [group for group in groups if has_key(config, group.replace("/", "."))]
    group = in_config[-1] if in_config else groups[0]
    return f"{group}={'|'.join(names_by_group[group])}"


def _keys_ending_with(config: Mapping[str, Any], name: str, files: ChoiceFiles) -> list[str]:
    """Return the groups whose last part is `name`, and the keys of `config`.

    The key of a group among them, and keys below it, are left out.
    """
    groups = [group for group in files.groups if group.endswith(f"/{name}")]
    left_out = (*COMMAND_PARTS, *(group.replace("/", ".") for group in groups))
    keys = [key for key in all_keys(config) if key.endswith(f".{name}")]
    return [*groups, *(key for key in keys if not key.startswith(left_out))]
