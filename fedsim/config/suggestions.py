"""The nearest valid spelling of what a command line got wrong.

To be called inside `fedsim.config.compose.search_path`.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from fedsim.config.build import unknown
from fedsim.config.overrides import options
from fedsim.config.spelling import nearest
from fedsim.errors import Problem

UNKNOWN_KEY = "is not a known key"
LAUNCHERS = {"joblib": "joblib", "submitit_local": "slurm", "submitit_slurm": "slurm"}
"""Launchers of Hydra that are installed with an extra of this package, and its name."""


def nearest_choices(choice: Any, known: Sequence[str], count: int) -> list[str]:
    """The `count` choices that are most like what was typed."""
    return difflib.get_close_matches(str(choice), known, n=count, cutoff=0.0)


def unknown_choice(group: str, choice: Any) -> Problem:
    """The problem of a choice that its group does not have."""
    known, rule = options(group), f"is not a choice of conf/{group}/"
    if group == "hydra/sweeper":
        return Problem(group, choice, "is not supported", _remedy_of_sweeper(choice))
    if group == "hydra/launcher" and choice in LAUNCHERS:
        return Problem(group, choice, "is not installed", f"pip install 'fedsim-selection[{LAUNCHERS[choice]}]'")
    if not isinstance(choice, str):
        return Problem(group, choice, rule, f"known here: {', '.join(known)}")
    return Problem(group, choice, rule, unknown(choice, known).remedy)


def _remedy_of_sweeper(choice: Any) -> str:
    if str(choice) in ("optuna", "ax", "nevergrad"):
        return "fedsim search 'optimizer.lr=interval(0.01,0.3)' trials=20 searches with Optuna"
    return "sweep over values: seed=0,1,2"


def unknown_path(config: Mapping[str, Any], path: str) -> tuple[Problem, list[str]] | None:
    """The problem of a key that `config` does not have, and what may have been meant; None where it has it."""
    node: Any = config
    known: list[str] = []
    for part in path.split("."):
        if not known and part != path and options(part) and part not in config:
            others = ", ".join(f"{part}={choice}" for choice in options(part))
            return Problem(path, ..., f"{UNKNOWN_KEY}: the choice made in conf/{part}/ has no values", others), []
        if not isinstance(node, Mapping) or part not in node:
            names = [str(n) for n in node if n not in ("_target_", "hydra")] if isinstance(node, Mapping) else []
            problem = unknown(part, names, ".".join(known))
            return _with_places(problem, config, known, part, names)
        known.append(part)
        node = node[part]
    return None


def _with_places(
    problem: Problem, config: Mapping[str, Any], known: Sequence[str], part: str, names: Sequence[str]
) -> tuple[Problem, list[str]]:
    """The problem with places elsewhere in its remedy, where a key of that name is."""
    prefix = ".".join(known)
    near = nearest(part, names)
    here = [] if near is None else [f"{prefix}.{near}" if prefix else near]
    if known:
        having = [c for c in options("/".join(known)) if _has(f"{'/'.join(known)}/{c}", part)]
        return (
            problem if here or not having else _with(problem, f"it is a key of {'/'.join(known)}={'|'.join(having)}")
        ), here
    elsewhere = [path for path in _paths(config) if path.rpartition(".")[2] == part]
    if elsewhere:
        return _with(problem, f"did you mean {' or '.join(map(_settable, elsewhere))}?"), elsewhere
    if not here and (groups := [f"{g}={c}" for g in names for c in options(g) if _has(f"{g}/{c}", part)]):
        places = sorted({f"{group.partition('=')[0]}.{part}" for group in groups})
        return _with(problem, f"did you mean {' or '.join(places)}, of {', '.join(groups[:6])}?"), []
    return problem, here


def _with(problem: Problem, remedy: str) -> Problem:
    return Problem(problem.key, problem.value, problem.rule, remedy)


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


def choices_with(group: str, keys: Sequence[str]) -> list[str]:
    """The choices of `group` whose files have all `keys`."""
    return [choice for choice in options(group) if all(_has(f"{group}/{choice}", key) for key in keys)]


def _has(file: str, key: str) -> bool:
    instance = GlobalHydra.instance().hydra
    found = None if instance is None else instance.config_loader.repository.load_config(file)  # type: ignore[attr-defined]
    return found is not None and OmegaConf.is_dict(found.config) and key in found.config
