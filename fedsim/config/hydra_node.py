"""Check the settings of Hydra itself in a config (the node below its key `hydra`), and the
environment variables that a config reads.

A config may come from a stranger. fedsim uses Hydra only to compose configs: it does not let Hydra
run jobs, build callbacks or open log files. The node `hydra` may only set the sweep and the
launcher, which starts the jobs. All other keys would have no effect, and fedsim rejects them.

A config is recorded with its interpolations resolved, so it may not name secrets of the
environment.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from omegaconf.resolvers import oc

from fedsim.core.disk import VARIABLES, config_may_name
from fedsim.core.errors import Problem

SETTABLE = ("mode", "sweeper.params", "sweeper.max_batch_size", "launcher", "verbose")
"""Keys below `hydra` that a config or an override may set."""
REMEDY = (
    f"leave it out: of `hydra`, a config sets {', '.join(SETTABLE)}; "
    "a run's folder is set by output_dir and name"
)
LAUNCHER = "hydra/launcher"
"""The only config group of Hydra in which a config or an override may choose."""
SLURM = "fedsim.jobs.launchers.SlurmJobs"
"""The launcher that submits jobs to Slurm, the scheduler of a cluster."""
SUBMITIT_LAUNCHERS = ("fedsim.jobs.launchers.LocalJobs", SLURM)
"""Launchers whose parameters go to submitit, and so to the shell of a cluster."""
CHECKED_LAUNCHERS = (
    "fedsim.jobs.sweep.Lanes",
    "fedsim.jobs.launchers.JoblibJobs",
    "fedsim.jobs.launchers.RayJobs",
)
"""Launchers whose parameters are checked when they are built."""
PLAIN_WORDS = (
    "account",
    "backend",
    "comment",
    "constraint",
    "exclude",
    "gres",
    "mem_per_cpu",
    "mem_per_gpu",
    "name",
    "nodelist",
    "partition",
    "prefer",
    "qos",
)
"""Parameters for submitit that may be any plain word."""


class SecretError(ValueError):
    """A config names an environment variable that it may not record."""


def environment_variable(name: str, *default: Any) -> Any:
    """Return the value of the interpolation `${oc.env:name}` or `${oc.env:name,default}`.

    Raises `SecretError` if a config may not name the variable, or if it is not set and there is no
    default.
    """
    if not config_may_name(name):
        allowed = ", ".join(["FEDSIM_*", *VARIABLES])
        text = f"is refused: a config is recorded, so it may name {allowed} alone"
        raise SecretError(f"${{oc.env:{name}}} {text}")
    if name in os.environ:
        return os.environ[name]
    if not default:
        text = f"the variable is not set; give a default: ${{oc.env:{name},null}}"
        raise SecretError(f"${{oc.env:{name}}}: {text}")
    return None if default[0] is None else str(default[0])


@contextmanager
def guarded_environment() -> Iterator[None]:
    """Let OmegaConf resolve `oc.env` by `environment_variable`; put its own resolver back at the
    end."""
    OmegaConf.register_new_resolver("oc.env", environment_variable, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def node_problems(keys: Iterable[str]) -> Iterator[Problem]:
    """Yield a problem for each of the dotted `keys` that is below `hydra` and may not be set.

    A key may also be a config group, such as `hydra/output`.
    """
    settable = tuple(f"hydra.{key}." for key in SETTABLE)
    # with a dot at the end, so that `hydra.modes` does not pass for `hydra.mode`
    for key in keys:
        is_other_key = f"{key}.".startswith("hydra.") and not f"{key}.".startswith(settable)
        is_other_group = key.startswith("hydra/") and key != LAUNCHER
        if is_other_key or is_other_group:
            yield Problem(key, ..., "must not be set", REMEDY)


def launcher_problems(node: Mapping[str, Any]) -> list[Problem]:
    """Return the problems of the node `hydra.launcher`, which must be a known launcher.

    The parameters of a launcher of submitit must be numbers or plain words, no commands or objects.
    """
    target = str(node.get("_target_"))
    basic = str(ConfigStore.instance().load("hydra/launcher/basic.yaml").node["_target_"])
    if target in (*CHECKED_LAUNCHERS, basic):
        return []
    if target not in SUBMITIT_LAUNCHERS:
        known = ", ".join([*CHECKED_LAUNCHERS, *SUBMITIT_LAUNCHERS, basic])
        text = "must be the class of a launcher of fedsim"
        return [Problem("hydra.launcher._target_", target, text, f"known: {known}")]
    text = "must be a number, true, false or null: it may hold a command or a path"
    remedy = "put it into the script that starts fedsim: jobs inherit its environment"
    problems = []
    for key, value in node.items():
        if key != "_target_" and not _is_harmless(str(key), value):
            problems.append(Problem(f"hydra.launcher.{key}", ..., text, remedy))
    return problems


def _is_harmless(key: str, value: Any) -> bool:
    """Return whether a parameter for submitit is a number, or a plain word without a dash before
    it (which the scheduler could read as an option)."""
    if isinstance(value, str):
        return key in PLAIN_WORDS and re.fullmatch(r"(?!-)[\w.:,=\[\]-]*", value) is not None
    return not key.startswith("_") and isinstance(value, bool | int | float | None)


def runs_elsewhere(launcher: Mapping[str, Any]) -> bool:
    """Return whether the node `hydra.launcher` runs jobs on other machines, with their own GPUs."""
    return launcher.get("_target_") == SLURM or launcher.get("address") == "auto"
