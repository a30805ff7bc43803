"""Explain mistaken choices and keys with the nearest valid spelling.

All functions must be called inside `fedsim.config.sources.search_path`. A choice is a file
conf/<group>/<choice>.yaml, which the override `group=choice` names.
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
"""Config groups in which the user need not choose: `preset=null`."""
COMMAND_PARTS = ("hydra.", "small.", "debug.")
"""Beginnings of keys that are about the command line."""
UNKNOWN_KEY = "is not a known key"
"""The rule of problems of unknown keys, as in `fedsim.config.build.unknown`."""
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
"""The keys to type for the symbols of papers, with the choices that have them."""


def mistaken_choice(override: Override) -> Problem | None:
    """Return the problem of a choice that its group does not have; None if there is none."""
    group = override.key_or_group
    choice: Any = override.value()
    is_optional = group in OPTIONAL and is_no_choice(override)
    if is_optional or override.is_delete() or not options(group):
        return None
    remedy = ""
    # neither an absolute path nor one that leads out of the group's folder
    if isinstance(choice, str) and re.fullmatch(r"[\w.-][\w./-]*", choice) and ".." not in choice:
        if any(source.is_config(f"{group}/{choice}") for source in sources()):
            return None
        remedy = _choices_called(group, choice) or _choice_elsewhere(group, choice)
    if not remedy:
        remedy = unknown(str(choice), options(group)).remedy
    return Problem(group, choice, f"is not a choice of conf/{group}/", remedy)


def _choices_called(group: str, name: str) -> str:
    """List the choices of the group that the literature calls `name`; "" if there are none.

    A name of a single choice is no mistake: it stands for that choice.
    """
    choices = known_choices().also_called(group, name)
    lines = [f"{choice}: {idea}" for choice, idea in choices.items()]
    head = f"{len(lines)} of its choices are called {name}; write which one"
    return "\n      ".join([head, *lines]) if lines else ""


def _choice_elsewhere(group: str, choice: str) -> str:
    """Return the remedy if another group, or a folder of the user's, has `choice`; "" otherwise."""
    files = known_choices()
    for folder in (Path(), Path("conf")):
        path = folder / group / f"{choice}.yaml"
        if len(files.folders) == 1 and path.is_file():
            return f"{path} is there: add --config-dir {folder}"
    groups = [name for name in files.groups if files.has(name, choice) and choice != "none"]
    words = [f"{name}={choice}" for name in groups]
    return f"did you mean {' or '.join(words)}?" if words else ""


def unknown_key(config: Mapping[str, Any], path: str, files: ChoiceFiles) -> Problem:
    """Return the problem of a dotted key that `config` does not have, or that no component takes.

    The key may belong to a choice that the user did not make, be misspelt, or be elsewhere in the
    config. The remedy says where.
    """
    # 1. The known keys next to it, at the innermost mapping that the config has
    parent, _, name = path.rpartition(".")
    while parent and not has_key(config, parent):
        parent, _, name = parent.rpartition(".")
    node: Any = config
    for part in parent.split(".") if parent else []:
        node = node[part]
    siblings: list[str] = []
    if isinstance(node, Mapping):
        siblings = [str(key) for key in node if key not in ("_target_", "hydra", name)]
    misspelt = unknown(name, siblings, parent)

    # 2. A key of other choices
    takers = _takers(config, path, files)
    if takers:
        remedies = [f"it is a key of {takers}"]
        if path in SHORTHANDS:
            remedies.append(f"did you mean {SYMBOLS[name]}?")
        if nearest(name, siblings):
            remedies.append(misspelt.remedy)
        return Problem(path, ..., UNKNOWN_KEY, "; or ".join(remedies))

    # 3. The same name elsewhere, or a symbol of a paper; otherwise the nearest spelling
    places = [] if parent else _places(config, path, files)
    symbol = SYMBOLS.get(path.rpartition(".")[2])
    if symbol and symbol.split()[0] not in [place.split()[0] for place in places]:
        places.append(symbol)
    if places:
        return Problem(path, ..., UNKNOWN_KEY, f"did you mean {' or '.join(places)}?")
    return misspelt


def _takers(config: Mapping[str, Any], key: str, files: ChoiceFiles) -> str:
    """Return the choices that have `key`, as `selector=gpfl|pncs`; "" if none has.

    They are those of the innermost group that `config` has a place for.
    """
    names_by_group = files.choices_by_key.get(key)
    if not names_by_group:
        return ""
    groups = sorted(names_by_group)  # outer groups come first
    in_config = [group for group in groups if has_key(config, group.replace("/", "."))]
    group = in_config[-1] if in_config else groups[0]
    return f"{group}={'|'.join(names_by_group[group])}"


def _places(config: Mapping[str, Any], name: str, files: ChoiceFiles) -> list[str]:
    """Return the groups, and the other keys of `config`, that end with `name`."""
    groups = [group for group in files.groups if group.endswith(f"/{name}")]
    keys = [key for key in all_keys(config) if key.endswith(f".{name}")]
    hidden = (*COMMAND_PARTS, *(group.replace("/", ".") for group in groups))
    return [*groups, *(key for key in keys if not key.startswith(hidden))]
