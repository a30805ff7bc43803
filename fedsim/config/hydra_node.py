"""What a config may say to Hydra itself, and what `${...}` in it may stand for.

Hydra instantiates callbacks, sets environment variables, imports packages and opens log files as
its own node, `hydra`, says. A config may come from a stranger, so that only how jobs are swept over
and launched may be set there.

A config is recorded with its interpolations resolved, so that they must name no secret of the
environment.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from typing import Any

import yaml
from hydra._internal.core_plugins.basic_sweeper import BasicSweeperConf
from hydra.conf import HydraConf
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.resolvers import oc

from fedsim.core.configs import leaves
from fedsim.core.disk import VARIABLES, conf_dir, config_may_name
from fedsim.core.errors import ConfigError, Problem, check


class SecretError(ValueError):
    """A config asks for an environment variable that it may not record."""


def environment_variable(name: str, *default: Any) -> Any:
    """The resolver `oc.env`. Raises `SecretError` for a variable that is not in `VARIABLES` nor
    begins with FEDSIM_."""
    if not config_may_name(name):
        allowed = ", ".join(("FEDSIM_*", *VARIABLES))
        raise SecretError(
            f"${{oc.env:{name}}} is refused: a config is recorded, so it may name {allowed} alone"
        )
    if name in os.environ:
        return os.environ[name]
    if not default:
        raise SecretError(
            f"${{oc.env:{name}}}: the variable is not set; give a default: ${{oc.env:{name},null}}"
        )
    return None if default[0] is None else str(default[0])


@contextmanager
def guarded_environment() -> Iterator[None]:
    """OmegaConf with `environment_variable` for its own `oc.env`, which is put back at the end."""
    OmegaConf.register_new_resolver("oc.env", environment_variable, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


OPEN = ("mode", "sweeper.params", "sweeper.max_batch_size", "launcher", "verbose")
"""Keys under `hydra` that a config or an override may set."""
OF_HYDRA = (
    "overrides",
    "help",
    "hydra_help",
    "job.name",
    "job.config_name",
    "job.override_dirname",
)
"""Keys that Hydra sets itself, or prints."""
OURS = (
    *(
        "fedsim.jobs.sweep.Lanes",
        "fedsim.jobs.launchers.JoblibJobs",
        "fedsim.jobs.launchers.RayJobs",
    ),
    "hydra._internal.core_plugins.basic_launcher.BasicLauncher",
)
"""Launchers whose parameters are checked when they are built, and Hydra's own, which has none."""
SLURM = "fedsim.jobs.launchers.SlurmJobs"
SUBMITIT = ("fedsim.jobs.launchers.LocalJobs", SLURM)
"""Those whose parameters go to submitit."""
WORDS = (
    *(
        "account",
        "backend",
        "comment",
        "constraint",
        "exclude",
        "gres",
        "mem_per_cpu",
        "mem_per_gpu",
        "name",
    ),
    *("nodelist", "partition", "prefer", "qos"),
)
"""Launchers' parameters that may be any plain word."""
REMEDY = f"leave it out: of `hydra`, a config sets {', '.join(OPEN)}; a run's folder is set by output_dir and name"


def check_words(overrides: Iterable[Override]) -> None:
    """Raise `ConfigError` for overrides of keys under `hydra` that are not open, before anything is
    composed."""
    keys = [override.key_or_group for override in overrides]
    check(
        *(
            _refused(key)
            for key in keys
            if _is_in(key, ["hydra"]) and not _is_in(key.partition(".")[2], OPEN)
        )
    )


def check_search_path(loader: ConfigLoader, config_name: str) -> None:
    """Refuse a primary config that adds to Hydra's search path: packages named there would be
    imported."""
    for source in loader.get_sources():
        if source.is_config(config_name):
            found = source.load_config(config_name).config
            if OmegaConf.is_dict(found) and OmegaConf.select(found, "hydra.searchpath"):
                raise ConfigError(
                    [Problem("hydra.searchpath", ..., "is not supported", "use --config-dir")]
                )
            return


def check_node(config: DictConfig) -> None:
    """Raise `ConfigError` for what the node `hydra` of the composed `config` must not say: all but
    the keys above are as Hydra has them, or as conf/config.yaml."""
    raw: Any = OmegaConf.to_container(config.hydra, resolve=False)
    raw["runtime"] = {"output_dir": raw["runtime"]["output_dir"]}
    known = _defaults()
    values = [(key, value) for key, value in leaves(raw) if not _is_in(key, (*OPEN, *OF_HYDRA))]
    changed = [_refused(f"hydra.{key}") for key, value in values if value not in known.get(key, ())]
    check(*changed, *launcher_problems(raw["launcher"]))


@cache
def _defaults() -> Mapping[str, list[Any]]:
    """The values that Hydra and conf/config.yaml give to the keys of the node, by dotted key."""

    def shipped(choice: str) -> Any:
        return yaml.safe_load(
            (files("hydra.conf") / "hydra" / f"{choice}.yaml").read_text(encoding="utf-8")
        )

    structured: list[Any] = [
        OmegaConf.to_container(OmegaConf.structured(c)) for c in (HydraConf, BasicSweeperConf)
    ]
    nodes = [structured[0], {"sweeper": structured[1]}, shipped("output/default")]
    nodes += [
        {f"{of}_logging": shipped(f"{of}_logging/{c}")}
        for of in ("hydra", "job")
        for c in ("none", "default")
    ]
    nodes.append(yaml.safe_load((conf_dir() / "config.yaml").read_text(encoding="utf-8"))["hydra"])
    known: dict[str, list[Any]] = {}
    for key, value in (one for node in nodes for one in leaves(node)):
        known.setdefault(key, []).append(value)
    return known


def _is_in(key: str, names: Iterable[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _refused(key: str) -> Problem:
    return Problem(key, ..., "must not be set", REMEDY)


def launcher_problems(node: Mapping[str, Any]) -> list[Problem]:
    """Those of any but a known launcher; for submitit with numbers and plain words as parameters:
    no commands, no objects."""
    target = str(node.get("_target_"))
    if target in OURS:
        return []
    if target not in SUBMITIT:
        text, known = "must be the class of a launcher of fedsim", ", ".join((*OURS, *SUBMITIT))
        return [Problem("hydra.launcher._target_", target, text, f"known: {known}")]
    text = "must be a number, true, false or null: it may hold a command or a path"
    remedy = "put it into the script that starts fedsim: jobs inherit its environment"
    refused = [
        key for key, value in node.items() if key != "_target_" and not _is_plain(str(key), value)
    ]
    return [Problem(f"hydra.launcher.{key}", ..., text, remedy) for key in refused]


def _is_plain(key: str, value: Any) -> bool:
    if isinstance(value, str):
        return key in WORDS and re.fullmatch(r"(?!-)[\w.:,=\[\]-]*", value) is not None
    return not key.startswith("_") and isinstance(value, bool | int | float | None)


def elsewhere(launcher: Mapping[str, Any]) -> bool:
    """Whether the node hydra.launcher has jobs run on other machines, whose GPUs are not known
    here."""
    return launcher.get("_target_") == SLURM or launcher.get("address") == "auto"
