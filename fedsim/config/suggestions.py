"""Explain mistaken choices and keys of overrides such as `group=choice` and `key=value`.

A choice is a file conf/<group>/<choice>.yaml. The remedy for a mistake may be the nearest spelling,
the key for a symbol of a paper, another group or choice that has the name, or a missing
--config-dir:

    selector='gpfk': is not a choice of conf/selector/
        did you mean gpfl?
    lr: is not a known key
        did you mean optimizer.lr?

`mistaken_choice` must be called inside the context manager `fedsim.config.sources.search_path`,
which says in which folders the choices are. `unknown_key` gets the choice files as an argument:
those from which the config was composed.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override

from fedsim.config.build import UNKNOWN_KEY, unknown
from fedsim.config.choice_files import ChoiceFiles
from fedsim.config.sources import known_choices, options, sources
from fedsim.config.words import chooses_nothing, dotted_key, is_below
from fedsim.core.configs import COMMAND_KEYS, SHORTHANDS, all_keys, has_key
from fedsim.core.errors import Problem
from fedsim.core.text import nearest

PRESET_GROUPS = ("preset", "cell")
"""Config groups whose choices set keys and choices of all other groups. In these groups the user
may choose nothing, as by `preset=null`."""
PATH_BELOW = re.compile(r"[\w.-][\w./-]*")
"""A choice's name: the path of its file below the folder of its group."""
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
    """Return the problem of an override `group=choice` whose group does not have the choice.

    Returns None for all other overrides.
    """
    group = override.key_or_group
    choice: Any = override.value()
    if override.is_delete() or not options(group):
        return None
    if group in PRESET_GROUPS and chooses_nothing(override):
        return None
    remedy = ""
    if isinstance(choice, str) and PATH_BELOW.fullmatch(choice) and ".." not in choice:
        if any(source.is_config(f"{group}/{choice}") for source in sources()):
            return None
        remedy = _choices_called(group, choice) or _choice_elsewhere(group, choice)
    if not remedy:
        remedy = unknown(str(choice), options(group)).remedy
    return Problem(group, choice, f"is not a choice of conf/{group}/", remedy)


def _choices_called(group: str, name: str) -> str:
    """Return a remedy with the choices of the group that the literature calls `name`; "" if there
    are none.

    If there is only one, the user's word means it (`fedsim.config.words.as_fedsim_spells`), and is
    no mistake.
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

    `config` is a nested config, such as `{"optimizer": {"lr": 0.1}, "seed": 0}`. It does not have
    the key, or the class of the node around the key has no such parameter. The remedy is the first
    of these that applies:

    1. The key belongs to choices that the user did not make: "it is a key of selector=pncs".
    2. Keys elsewhere end like it, or it is a symbol of a paper: "did you mean optimizer.lr?"
    3. A key in the same place is similar. If none is, the remedy lists all keys in that place.
    """
    place, missing_name = _first_missing(config, key)
    neighbours = _names_in(config, place, missing_name)
    in_same_place = unknown(missing_name, neighbours, place)
    last_name = key.rpartition(".")[2]
    key_of_symbol = KEYS_OF_SYMBOLS.get(last_name)

    # 1. A key of other choices. The user may also have meant another key.
    choices = _choices_with(config, key, files)
    if choices:
        remedies = [f"it is a key of {choices}"]
        if key in SHORTHANDS:
            remedies.append(f"did you mean {key_of_symbol}?")
        if nearest(missing_name, neighbours):
            remedies.append(in_same_place.remedy)
        return Problem(key, ..., UNKNOWN_KEY, "; or ".join(remedies))

    # 2. A key elsewhere, unless the user typed a place that there is, as in `optimizer.x`
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
    `optimizer` and `schedule`. The beginning is "" if `config` does not even have the first name.
    """
    parent, _, name = key.rpartition(".")
    while parent and not has_key(config, parent):
        parent, _, name = parent.rpartition(".")
    return parent, name


def _names_in(config: Mapping[str, Any], parent: str, rejected_name: str) -> list[str]:
    """Return the names that may be suggested in the place `parent` of `config`.

    `rejected_name` is not among them: the config may have it although the class does not take it.
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

    `selector.exploration.rho` is a key of choices of `selector/exploration`, and of choices of
    `selector` that include these. The result is about the inner group if `config` has it, and about
    the outer group otherwise.
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

    For `schedule` this is `optimizer/schedule`. The key of such a group (`optimizer.schedule`) and
    keys below it are left out, because the user chooses in the group. So are keys that no run has.
    """
    groups = [group for group in files.groups if group.endswith(f"/{name}")]
    hidden_keys = ["hydra", *COMMAND_KEYS, *map(dotted_key, groups)]
    keys = []
    for key in all_keys(config):
        if key.endswith(f".{name}") and not is_below(key, hidden_keys):
            keys.append(key)
    return [*groups, *keys]
