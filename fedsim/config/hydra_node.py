"""What a config may say to Hydra itself, and what `${...}` in it may stand for.

Hydra instantiates callbacks, sets environment variables, imports packages of its search path and opens log files as
its own node, `hydra`, says. A config may come from a stranger, so everything else than the keys below must be as Hydra
has it: how jobs are swept over and launched, and nothing that runs code.

A config is written to files and to trackers with its interpolations resolved: a secret of the environment would be,
too. Values that name others that name others can grow without bound (`a: ${b}${b}`, `b: ${c}${c}`, ...).
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
from omegaconf.base import Container
from omegaconf.basecontainer import BaseContainer

from fedsim.core.configs import flat
from fedsim.core.disk import conf_dir
from fedsim.core.errors import ConfigError, Problem, check, rule

VARIABLES = ("HOME", "LOGNAME", "SCRATCH", "TMPDIR", "USER", "WORK")
"""Environment variables that a config may name, besides those that begin with `FEDSIM_`."""
RESOLVERS = ("oc.env", "oc.select", "oc.decode", "now", "hydra", "python_version")
"""Resolvers that a config may call; the others make nodes out of text."""
MAX_EVALUATIONS, MAX_SIZE = 2_000, 100_000
"""Interpolations that are resolved in one composed config, and the characters and values that they stand for."""


class SecretError(ValueError):
    """A config asks for an environment variable that it may not record."""


def environment_variable(name: str, default: Any = "fedsim: no default") -> Any:
    """The resolver `oc.env`. Raises `SecretError` for a variable that is not in `VARIABLES` nor begins with FEDSIM_."""
    if not (name in VARIABLES or name.startswith("FEDSIM_")):
        allowed = ", ".join(("FEDSIM_*", *VARIABLES))
        raise SecretError(f"${{oc.env:{name}}} is refused: a config is recorded, so it may name {allowed} alone")
    if name in os.environ or default == "fedsim: no default":
        return os.environ[name] if name in os.environ else _unset(name)
    return None if default is None else str(default)


def _unset(name: str) -> str:
    raise SecretError(f"${{oc.env:{name}}}: the variable is not set; give a default: ${{oc.env:{name},null}}")


class Spent:
    """What the interpolations of the config that was composed last have come to."""

    evaluations = size = 0

    @classmethod
    def add(cls, value: Any) -> None:
        """Raise `ConfigError` where `value` is one too many, or too large."""
        cls.evaluations += 1
        cls.size += _size_of(value)
        if cls.evaluations > MAX_EVALUATIONS or cls.size > MAX_SIZE:
            text = f"must become at most {MAX_SIZE} characters or values when it is resolved"
            raise ConfigError([Problem("${...}", ..., text, "write the values out")])

    @classmethod
    def reset(cls) -> None:
        """A config is composed anew."""
        cls.evaluations = cls.size = 0


def _size_of(value: Any) -> int:
    """Characters and values, interpolations in it unresolved."""
    if isinstance(value, BaseContainer):
        return _size_of(OmegaConf.to_container(value, resolve=False))
    if isinstance(value, dict | list):
        return 1 + sum(map(_size_of, value.values() if isinstance(value, dict) else value))
    return len(str(value))


@contextmanager
def restricted_resolvers() -> Iterator[None]:
    """OmegaConf with `RESOLVERS` alone, `environment_variable` for its `oc.env`, and a bound on what `${...}` become.

    No public name gives its table of resolvers, nor a place where all interpolations pass.
    """
    resolvers, evaluate = BaseContainer._resolvers, Container.resolve_parse_tree

    def bounded(self: Container, *args: Any, **kwargs: Any) -> Any:
        Spent.add("")
        value = evaluate(self, *args, **kwargs)
        Spent.add(value)
        return value

    BaseContainer._resolvers = {name: call for name, call in resolvers.items() if name in RESOLVERS}
    OmegaConf.register_new_resolver("oc.env", environment_variable, replace=True)
    Container.resolve_parse_tree = bounded  # type: ignore[method-assign]
    try:
        yield
    finally:
        BaseContainer._resolvers, Container.resolve_parse_tree = resolvers, evaluate  # type: ignore[method-assign]


OPEN = (*("mode", "sweeper.params", "sweeper.max_batch_size"), *("job.chdir", "launcher", "verbose"))
"""Keys under `hydra` that an override may set."""
FOLDERS = ("run.dir", "sweep.dir", "sweep.subdir", "output_subdir")
"""Where Hydra would keep its own files."""
BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
OURS = (
    *("fedsim.running.interleaving.Lanes", "fedsim.jobs.launchers.JoblibJobs"),
    *("fedsim.jobs.launchers.RayJobs", BASIC),
)
"""Launchers whose parameters are checked when they are built, and Hydra's own, which has none."""
SLURM = "fedsim.jobs.launchers.SlurmJobs"
SUBMITIT = ("fedsim.jobs.launchers.LocalJobs", SLURM)
"""Those whose parameters go to submitit."""
WORDS = (
    *("account", "backend", "comment", "constraint", "exclude", "gres", "mem_per_cpu", "mem_per_gpu", "name"),
    *("nodelist", "partition", "prefer", "qos"),
)
"""Launchers' parameters that may be any plain word."""
CHECKED = ("launcher", "sweeper.params", "hydra_logging", "job_logging", "job.name")
"""Keys under `hydra` that a config may set, to what `check_node` finds sound."""
OF_HYDRA = ("overrides", "help", "hydra_help", "job.config_name", "job.override_dirname")
"""Keys that Hydra sets itself, or prints."""
REMEDY = "leave it out: of `hydra`, a config sets " + ", ".join(OPEN)
OWN_FOLDERS = "has no effect: a run's folder is <output_dir>/<name>/<choices>-<seed>-<hash of its config>"
REMEDY_OF_FOLDERS = "set output_dir=... or name=...; its config.yaml holds every value of the run"


def check_words(overrides: Iterable[Override]) -> None:
    """Raise `ConfigError` for overrides of keys under `hydra` that are not open, before anything is composed."""
    keys = [
        override.key_or_group.partition(".")[2] for override in overrides if _is_in(override.key_or_group, ["hydra"])
    ]
    check(*(_refused(key, "by an override").within("hydra") for key in keys if not _is_in(key, OPEN)))


def check_search_path(loader: ConfigLoader, config_name: str) -> None:
    """Refuse a primary config that adds to Hydra's search path: packages named there would be imported."""
    for source in loader.get_sources():
        if source.is_config(config_name):
            found = source.load_config(config_name).config
            if OmegaConf.is_dict(found) and OmegaConf.select(found, "hydra.searchpath"):
                raise ConfigError([Problem("hydra.searchpath", ..., "is not supported", "use --config-dir")])
            return


def check_node(config: DictConfig) -> None:
    """Raise `ConfigError` for what the node `hydra` of the composed `config` must not say: all but the keys above are
    as Hydra has them, or as conf/config.yaml."""
    raw: Any = OmegaConf.to_container(config.hydra, resolve=False)
    raw["runtime"] = {"output_dir": raw["runtime"]["output_dir"]}
    known = _defaults()
    changed = [
        key
        for key, value in flat(raw)
        if value not in known.get(key, ()) and not _is_in(key, (*set(OPEN) - {"job.chdir"}, *CHECKED, *OF_HYDRA))
    ]
    is_name = re.fullmatch(r"[\w.-]+", str(raw["job"]["name"])) is not None
    found = [
        *(_refused(key, "by a config") for key in changed),
        rule(is_name, "job.name", ..., "must not be set by a config", REMEDY),
        *(_logging(raw, name) for name in ("hydra_logging", "job_logging")),
        *_swept(raw["sweeper"]),
        *_launcher(raw["launcher"]),
    ]
    check(*(problem.within("hydra") for problem in found if problem is not None))


def _logging(raw: Mapping[str, Any], name: str) -> Problem | None:
    """Logging with Hydra's own handlers, or none."""
    choices = ("none", "disabled", "default")
    known = any(raw[name] == _of_hydra(f"{name}/{choice}") for choice in choices)
    return rule(known, name, ..., "must be as Hydra ships it: a handler may write any file", f"hydra/{name}=none")


@cache
def _of_hydra(choice: str) -> Any:
    """A file of Hydra's own conf/."""
    file = files("hydra.conf") / "hydra" / f"{choice}.yaml"
    return yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else None


@cache
def _defaults() -> Mapping[str, list[Any]]:
    """The values that Hydra and conf/config.yaml give to the keys of the node, by dotted key."""
    sweeper: Any = OmegaConf.to_container(OmegaConf.structured(BasicSweeperConf), resolve=False)
    node: Any = OmegaConf.to_container(OmegaConf.structured(HydraConf), resolve=False)
    own = yaml.safe_load((conf_dir() / "config.yaml").read_text(encoding="utf-8"))
    known: dict[str, list[Any]] = {}
    for values in (node, {"sweeper": sweeper}, _of_hydra("output/default"), own["hydra"]):
        for key, value in flat(values):
            known.setdefault(key, []).append(value)
    return known


def _is_in(key: str, names: Iterable[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _refused(key: str, where: str) -> Problem:
    """The problem of a key under `hydra` that must be as it is."""
    if key in FOLDERS:
        return Problem(key, ..., OWN_FOLDERS, REMEDY_OF_FOLDERS)
    return Problem(key, ..., f"must not be set {where}", REMEDY)


def _swept(sweeper: Mapping[str, Any]) -> list[Problem | None]:
    """What is swept over are the job's own keys."""
    return [
        rule(
            not re.match(r"[+~]*hydra\b", str(key)),
            f"sweeper.params.{key}",
            ...,
            "must be a key of the job, not of Hydra",
            "give it once: on the command line, or under `hydra` itself",
        )
        for key in sweeper.get("params") or {}
    ]


def _launcher(node: Mapping[str, Any]) -> list[Problem | None]:
    """A known launcher; for submitit with numbers and plain words as parameters: no commands, no objects."""
    target = str(node.get("_target_"))
    if target in OURS:
        return []
    if target not in SUBMITIT:
        text = "must be the class of a launcher of fedsim"
        return [Problem("launcher._target_", target, text, f"known: {', '.join((*OURS, *SUBMITIT))}")]
    return [
        Problem(
            f"launcher.{key}",
            ...,
            "must be a number, true, false or null: it may hold a command or a path",
            "put it into the script that starts fedsim: jobs inherit its environment",
        )
        for key, value in node.items()
        if key != "_target_" and not _plain_parameter(str(key), value)
    ]


def _plain_parameter(key: str, value: Any) -> bool:
    if key.startswith("_"):
        return False
    is_word = isinstance(value, str) and re.fullmatch(r"(?!-)[\w.:,=\[\]-]*", value) is not None
    return value is None or isinstance(value, bool | int | float) or (key in WORDS and is_word)


def elsewhere(launcher: Mapping[str, Any]) -> bool:
    """Whether jobs run on other machines than this one, whose GPUs are not known here.

    `launcher`: the node hydra.launcher.
    """
    on_slurm = launcher.get("_target_") == SLURM
    return on_slurm or launcher.get("address") == "auto"
