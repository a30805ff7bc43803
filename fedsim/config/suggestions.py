"""Explain mistaken choices and keys of overrides such as `group=choice` and `key=value`.

A choice is a file conf/<group>/<choice>.yaml. The remedy for a mistake may be the nearest spelling,
the key for a symbol of a paper, another group or choice that has the name, or a missing
--config-dir. `mistaken_choice` must be called inside the context manager
`fedsim.config.sources.search_path`, which says in which folders the choices are. `unknown_key` gets
the choice files as an argument: those from which the config was composed.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override

from fedsim.config.build import UNKNOWN_KEY, unknown
from fedsim.config.choice_files import ChoiceFiles
from fedsim.config.sources import known_choices, options, sources
from fedsim.config.words import chooses_nothing
from fedsim.core.configs import SHORTHANDS, all_keys, has_key
from fedsim.core.errors import Problem
from fedsim.core.text import nearest

PRESET_GROUPS = ("preset", "cell")
"""Config groups whose choices set keys and choices of all other groups. The user may choose nothing
in them, as by `preset=null`."""
COMMAND_PREFIXES = ("hydra.", "small.", "debug.")
"""Beginnings of keys that no run's config has. They are not suggested for a mistaken key."""
KEYS_OF_SYMBOLS = {
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

    Returns None if the group has it, or if the override is no choice: if its key is no group.
    """
    group = override.key_or_group
    choice: Any = override.value()
    if override.is_delete() or not options(group):
        return None
    if group in PRESET_GROUPS and chooses_nothing(override):
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

    There are several: if there is only one, `fedsim.config.words.as_fedsim_spells` has replaced the
    name.
    """
    choices = known_choices().also_called(group, name)
    if not choices:
        return ""
    lines = [f"{len(choices)} of its choices are called {name}; write which one"]
    for choice, idea in choices.items():
        lines.append(f"{choice}: {idea}")
    return "\n      ".join(lines)


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
    """Return the problem of a dotted key that cannot be set.

    Either `config` does not have the key, or it has the key below a `_target_` whose class has no
    such parameter. The remedy is the first of these that applies:

    1. The key belongs to choices that the user did not make: "it is a key of selector=pncs".
    2. Keys elsewhere end like it, or it is a symbol of a paper: "did you mean optimizer.lr?"
    3. A key in the same place is similar. If none is, the remedy lists all keys in that place.
    """
    place, missing_name = _first_missing(config, key)
    neighbours = _names_in(config, place, missing_name)
    in_same_place = unknown(missing_name, neighbours, place)
    last_name = key.rpartition(".")[2]
    key_of_symbol = KEYS_OF_SYMBOLS.get(last_name)

    # 1. A key of other choices. It may also be meant otherwise.
    choices = _choices_with(config, key, files)
    if choices:
        remedies = [f"it is a key of {choices}"]
        if key in SHORTHANDS:
            remedies.append(f"did you mean {key_of_symbol}?")
        if nearest(missing_name, neighbours):
            remedies.append(in_same_place.remedy)
        return Problem(key, ..., UNKNOWN_KEY, "; or ".join(remedies))

    # 2. A key elsewhere, unless the user typed a place that there is, as in optimizer.x
    suggested_keys = [] if place else _keys_ending_with(config, key, files)
    if key_of_symbol and key_of_symbol.split()[0] not in suggested_keys:
        suggested_keys.append(key_of_symbol)
    if suggested_keys:
        return Problem(key, ..., UNKNOWN_KEY, f"did you mean {' or '.join(suggested_keys)}?")

    # 3. A key in the same place
    return in_same_place


def _first_missing(config: Mapping[str, Any], key: str) -> tuple[str, str]:
    """Return the longest beginning of a dotted key that `config` has, and the name after it.

    If `config` has `optimizer` but no `optimizer.schedule`, `optimizer.schedule.factor` gives
    `optimizer` and `schedule`. The beginning is "" if `config` has none of the key.
    """
    parent, _, name = key.rpartition(".")
    while parent and not has_key(config, parent):
        parent, _, name = parent.rpartition(".")
    return parent, name


def _names_in(config: Mapping[str, Any], parent: str, rejected_name: str) -> list[str]:
    """Return the names that may be suggested in the place `parent` of `config`.

    `rejected_name` is not among them: it may be there although its class does not take it.
    """
    mapping: Any = config
    for part in parent.split(".") if parent else ():
        mapping = mapping[part]
    if not isinstance(mapping, Mapping):  # a value such as optimizer.lr has no names
        return []
    hidden = ("_target_", "hydra", rejected_name)
    return [str(name) for name in mapping if name not in hidden]


def _choices_with(config: Mapping[str, Any], key: str, files: ChoiceFiles) -> str:
    """Return the choices that have `key`, as `selector=gpfl|pncs`; "" if none has.

    If choices of several groups have it (`selector/exploration` and `selector`), the result is
    about the innermost group that `config` has, or otherwise about the outermost.
    """
    names_by_group = files.choices_by_key.get(key)
    if not names_by_group:
        return ""
    # Each group contains the next one, because the key is below all of them.
    groups = sorted(names_by_group, key=len)
    in_config = [group for group in groups if has_key(config, group.replace("/", "."))]
    group = in_config[-1] if in_config else groups[0]
    return f"{group}={'|'.join(names_by_group[group])}"


def _keys_ending_with(config: Mapping[str, Any], name: str, files: ChoiceFiles) -> list[str]:
    """Return the groups whose last part is `name`, and the keys of `config` whose last part it is.

    Groups are written with slashes. The key of such a group, and keys below it, are left out.
    """
    groups = [group for group in files.groups if group.endswith(f"/{name}")]
    hidden = list(COMMAND_PREFIXES)
    for group in groups:
        hidden.append(f"{group.replace('/', '.')}.")
    keys = []
    for key in all_keys(config):
        if key.endswith(f".{name}") and not f"{key}.".startswith(tuple(hidden)):
            keys.append(key)
    return [*groups, *keys]
