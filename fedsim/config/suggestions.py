"""The nearest valid spelling of what a command line got wrong.

To be called inside `fedsim.config.compose.search_path`.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsim.config.build import unknown
from fedsim.config.choice_files import on_search_path
from fedsim.config.words import options
from fedsim.core.configs import all_keys, has_key
from fedsim.core.disk import conf_dir
from fedsim.core.errors import Problem, nearest

NAME = re.compile(r"[\w.-]{1,60}")
"""Choices whose files may be looked for: no folders or patterns, and no longer than file systems take."""
UNKNOWN_KEY = "is not a known key"
USUAL = (Path(), Path("conf"))
"""Where users put their folders of choices, from the working folder."""


def unknown_choice(group: str, choice: Any) -> Problem:
    """The problem of a choice that its group does not have."""
    known, rule = options(group), f"is not a choice of conf/{group}/"
    if group == "hydra/sweeper":
        search = "fedsim search 'optimizer.lr=interval(0.01,0.3)' trials=20 searches with Optuna"
        searches = str(choice) in ("optuna", "ax", "nevergrad")
        return Problem(group, choice, "is not supported", search if searches else "sweep over values: seed=0,1,2")
    if not isinstance(choice, str):
        return Problem(group, choice, rule, f"known here: {', '.join(known)}")
    remedy = _elsewhere(group, choice) if NAME.fullmatch(choice) else None
    return Problem(group, choice, rule, remedy or unknown(choice, known).remedy)


def _elsewhere(group: str, choice: str) -> str | None:
    """What to do where another group has `choice`, or a folder of the user's for which --config-dir was forgotten."""
    files = on_search_path()
    forgotten = [folder for folder in USUAL if (folder / group / f"{choice}.yaml").is_file()]
    if forgotten and len(files.folders) == 1:
        return f"{forgotten[0] / group / choice}.yaml is there: add --config-dir {forgotten[0]}"
    groups = [one for one in files.groups if (conf_dir() / one).is_dir() and not one.startswith("hydra/")]
    found = [one for one in groups if files.has(one, choice)]
    if not found or choice == "none":  # is typed to leave a part out, and not for another group's
        return None
    return f"did you mean {' or '.join(f'{one}={choice}' for one in found)}?"


def unknown_path(config: Mapping[str, Any], path: str) -> Problem | None:
    """The problem of a key that `config` does not have; None where it has it.

    It may be of a choice that was not made, misspelt, or elsewhere in the config.
    """
    node: Any = config
    prefix = ""
    for part in path.split("."):
        if not isinstance(node, Mapping) or part not in node:
            break
        node, prefix = node[part], f"{prefix}.{part}".lstrip(".")
    else:
        return None
    names = [str(n) for n in node if n not in ("_target_", "hydra")] if isinstance(node, Mapping) else []
    near = nearest(part, names)
    if takers := _takers(config, path):
        other = f"; or did you mean {prefix}{'.' if prefix else ''}{near}?" if near else ""
        return Problem(path, ..., UNKNOWN_KEY, f"it is a key of {takers}{other}")
    if not prefix and (meant := _places(config, path)):
        return Problem(path, ..., UNKNOWN_KEY, f"did you mean {' or '.join(meant)}?")
    return unknown(part, names, prefix)


def choices_with(group: str, keys: Sequence[str]) -> list[str]:
    """The choices of `group` whose configs have all `keys`."""
    having = [set(on_search_path().keys.get(key, {}).get(group, [])) for key in keys]
    return sorted(set.intersection(*having))


def _takers(config: Mapping[str, Any], key: str) -> str:
    """The choices that have `key`, as `selector=gpfl|pncs`; "" if none has. They are of the innermost group that
    `config` has a place for."""
    groups = sorted(on_search_path().keys.get(key, {}).items())  # the outer ones first
    there = [one for one in groups if has_key(config, one[0].replace("/", "."))]
    if not groups:
        return ""
    group, names = there[-1] if there else groups[0]
    return f"{group}={'|'.join(names)}"


def _places(config: Mapping[str, Any], path: str) -> list[str]:
    """The groups and keys that end with `path`, those of choices that are not made only if there are no others."""
    files = on_search_path()
    own = {key: value for key, value in config.items() if key not in ("hydra", "small", "debug")}
    groups = [group for group in files.groups if group.endswith(f"/{path}") and not group.startswith("hydra/")]
    there = [key for key in all_keys(own) if key.endswith(f".{path}") and key.replace(".", "/") not in groups]
    if groups or there or path.startswith("_"):
        return [*groups, *there]
    elsewhere = [key for key in sorted(files.keys) if key.endswith(f".{path}") and not key.startswith("hydra.")]
    return [f"{key} ({_takers(config, key)})" for key in elsewhere]
