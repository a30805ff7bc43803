"""The nearest valid spelling of what a command line got wrong.

To be called inside `fedsim.config.compose.search_path`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from fedsim.config.build import unknown
from fedsim.config.choice_files import ChoiceFiles, on_search_path, stray_file
from fedsim.config.typecheck import DISTRIBUTION
from fedsim.config.words import options
from fedsim.core.configs import has_key
from fedsim.core.errors import Problem, nearest

NAME = re.compile(r"[\w.-]{1,60}")
"""Choices whose files may be looked for: no folders or patterns, and no longer than file systems take."""
UNKNOWN_KEY = "is not a known key"
LAUNCHERS = {"ray": "ray", "submitit_local": "slurm", "submitit_slurm": "slurm"}
"""Launchers that are installed with an extra of this package, and its name."""


def install(extra: str) -> str:
    """The command that installs an extra of this package."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def unknown_choice(group: str, choice: Any) -> Problem:
    """The problem of a choice that its group does not have."""
    known, rule = options(group), f"is not a choice of conf/{group}/"
    if group == "hydra/sweeper":
        search = "fedsim search 'optimizer.lr=interval(0.01,0.3)' trials=20 searches with Optuna"
        searches = str(choice) in ("optuna", "ax", "nevergrad")
        return Problem(group, choice, "is not supported", search if searches else "sweep over values: seed=0,1,2")
    if group == "hydra/launcher" and choice in LAUNCHERS:
        return Problem(group, choice, "is not installed", install(LAUNCHERS[choice]))
    if not isinstance(choice, str):
        return Problem(group, choice, rule, f"known here: {', '.join(known)}")
    files = on_search_path()
    is_name = NAME.fullmatch(choice) is not None
    remedy = (stray_file(group, choice, files.folders) or _choice_elsewhere(files, choice)) if is_name else None
    return Problem(group, choice, rule, remedy or unknown(choice, known).remedy)


def _choice_elsewhere(files: ChoiceFiles, choice: str) -> str | None:
    """The groups of fedsim and the user that have `choice`, as one types them; None where none has."""
    if choice == "none":  # is typed to leave a part out, and not for another group's
        return None
    found = [group for group in files.groups if files.has(group, choice) and not group.startswith("hydra/")]
    return f"did you mean {' or '.join(f'{group}={choice}' for group in found)}?" if found else None


def unknown_path(config: Mapping[str, Any], path: str) -> Problem | None:
    """The problem of a key that `config` does not have; None where it has it."""
    node: Any = config
    parts = path.split(".")
    for depth, part in enumerate(parts):
        if not isinstance(node, Mapping) or part not in node:
            names = [str(n) for n in node if n not in ("_target_", "hydra")] if isinstance(node, Mapping) else []
            return _unknown(config, parts, depth, names)
        node = node[part]
    return None


def _unknown(config: Mapping[str, Any], parts: Sequence[str], depth: int, names: Sequence[str]) -> Problem:
    """The problem of the key `parts`, of which `config` has the first `depth`, and there the keys `names`."""
    path, part, prefix = ".".join(parts), parts[depth], ".".join(parts[:depth])
    near = nearest(part, names)
    here = [] if near is None else [f"{prefix}.{near}" if prefix else near]
    empty = f"{UNKNOWN_KEY}: the choice made in conf/{part}/ has no values"
    rule = UNKNOWN_KEY if depth or len(parts) == 1 or not options(part) else empty
    if takers := choices_taking(path, depth):
        return Problem(path, ..., rule, key_of_choices(takers, here))
    if rule == empty:
        files = on_search_path()
        with_values = [f"{part}={name}" for name in files.names(part) if files.config(part, name).get(part)]
        if with_values:
            return Problem(path, ..., rule, ", ".join(with_values))
    return (None if depth else _elsewhere(config, parts)) or unknown(part, names, prefix)


def key_of_choices(takers: str, near: Sequence[str]) -> str:
    """The remedy of a key that `takers` (`selector=gpfl|pncs`) have, and that is spelt like others that are there."""
    return f"it is a key of {takers}" + (f"; or did you mean {near[0]}?" if near else "")


def choices_taking(path: str, depth: int) -> str:
    """The choices of a config group that take the whole key `path`, as `selector=gpfl|pncs`; "" if none does.

    `depth`: how many of its parts the config has. The innermost of the groups that are in it is the one to choose in.
    """
    files, parts = on_search_path(), path.split(".")
    groups = ["/".join(parts[:end]) for end in range(1, len(parts))]
    for group in reversed(groups[: max(depth, 1)]):
        if takers := choices_with(group, [path]):
            return f"{group}={'|'.join(takers)}"
    for group in reversed(groups[max(depth, 1) :]):
        takers, parents = choices_with(group, [path]), choices_with_group(files, group)
        if takers and parents:
            return f"{group}={'|'.join(takers)}, for {parents}"
    return ""


def choices_with(group: str, keys: Sequence[str]) -> list[str]:
    """The choices of `group` whose configs have all `keys`."""
    files = on_search_path()
    return [choice for choice in options(group) if all(_takes(files, group, choice, key) for key in keys)]


def _takes(files: ChoiceFiles, group: str, choice: str, key: str) -> bool:
    if files.has(group, choice) or not group.startswith("hydra/"):
        return files.has(group, choice) and files.takes(group, choice, key)
    repository = GlobalHydra.instance().hydra.config_loader.repository  # type: ignore[union-attr]
    found = repository.load_config(f"{group}/{choice}")  # of Hydra or a plugin, which have no files
    return found is not None and OmegaConf.is_dict(found.config) and has_key(found.config, key.split(".", 2)[-1])


def choices_with_group(files: ChoiceFiles, group: str) -> str:
    """The choices of the group above in which `group` is chosen."""
    above = group.rpartition("/")[0]
    parents = [name for name in files.names(above) if group in files.made(above, name)] if above else []
    return f"{above}={'|'.join(parents)}" if parents else ""


def _elsewhere(config: Mapping[str, Any], parts: Sequence[str]) -> Problem | None:
    """The problem of a top-level key that is elsewhere in the config, or is with another choice."""
    for wanted in dict.fromkeys((".".join(parts), parts[0])):
        there = [place for place in _paths(config) if place.endswith(f".{wanted}")]
        if meant := [*map(_settable, there)] or _in_choices(config, wanted):
            return Problem(wanted, ..., UNKNOWN_KEY, f"did you mean {' or '.join(meant)}?")
    return None


def _in_choices(config: Mapping[str, Any], path: str) -> list[str]:
    """The keys and groups that end with `path`, each with the choices that have it."""
    files = on_search_path()
    places = {key: choices_taking(key, _depth(config, key)) for key in files.places(path)}
    groups = [group for group in files.groups if group.endswith(f"/{path}") and not group.startswith("hydra/")]
    places |= {group: choices_with_group(files, group) for group in groups}
    return [f"{place} ({choices})" for place, choices in places.items() if choices and not place.startswith("hydra.")]


def _depth(config: Mapping[str, Any], key: str) -> int:
    """How many parts of a dotted key a config has."""
    parts = key.split(".")
    return sum(has_key(config, ".".join(parts[:end])) for end in range(1, len(parts) + 1))


def _paths(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Every path below the top level of a config, but Hydra's own."""
    for key, value in config.items():
        if prefix or key not in ("hydra", "small", "debug"):
            path = f"{prefix}{key}"
            if prefix and not str(key).startswith("_"):
                yield path
            if isinstance(value, Mapping):
                yield from _paths(value, f"{path}.")


def _settable(path: str) -> str:
    """How it is written on the command line: a group with a slash."""
    return path.replace(".", "/") if options(path.replace(".", "/")) else path
