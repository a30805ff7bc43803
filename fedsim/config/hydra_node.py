"""What a config may say in Hydra's own node, `hydra`: how jobs are swept over and launched, and nothing that runs code.

Hydra instantiates callbacks, sets environment variables, imports packages of its search path and opens log files as
this node says. A config may come from a stranger, so everything else than the keys below must be as Hydra has it.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import yaml
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig, OmegaConf

from fedsim.config import submitit_options
from fedsim.config.overrides import typed_in
from fedsim.config.plugins import plugins
from fedsim.errors import ConfigError, Problem, rule

OPEN = (
    *("mode", "sweeper.params", "sweeper.max_batch_size"),
    *("job.chdir", "launcher", "verbose"),
)
"""Keys under `hydra` that an override may set."""
FOLDERS = {
    "run.dir": (".", "outputs/${now:%Y-%m-%d}/${now:%H-%M-%S}"),
    "sweep.dir": ("${output_dir}/${name}", "multirun/${now:%Y-%m-%d}/${now:%H-%M-%S}"),
    "sweep.subdir": (".", "${hydra.job.num}", "${hydra:job.num}"),
    "output_subdir": (None, ".hydra"),
}
"""Where Hydra would keep its own files: as conf/config.yaml has it, and with Hydra's defaults, with which a primary
config is left that says nothing of folders."""
OURS = {"fedsim.running.interleaving.Lanes", "fedsim.jobs.ray_launcher.RayJobs"}
"""Launchers of this package, whose parameters are checked when they are built."""
OF_PLUGIN = frozenset(submitit_options.LAUNCHERS.values())
"""Launchers of this package that take the parameters of a plugin, which are checked as those of others."""
WORDS = (
    *("account", "backend", "comment", "constraint", "exclude", "gres", "mem_per_cpu", "mem_per_gpu", "name"),
    *("nodelist", "partition", "prefer", "qos"),
)
"""Launchers' parameters that may be any plain word."""
SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
REMEDY = "leave it out: of `hydra`, a config sets " + ", ".join(OPEN)
OWN_FOLDERS = "has no effect: a run's folder is <output_dir>/<name>/<choices>-<seed>-<hash of its config>"
REMEDY_OF_FOLDERS = "set output_dir=... or name=...; its config.yaml holds every value of the run"


def check_words(overrides: Iterable[Override]) -> None:
    """Raise `ConfigError` for overrides of keys under `hydra` that are not open, before anything is composed."""
    problems = []
    for override in overrides:
        node, _, key = override.key_or_group.partition(".")
        if node == "hydra" and key in FOLDERS:
            problems.append(Problem(override.key_or_group, typed_in(override), OWN_FOLDERS, REMEDY_OF_FOLDERS))
        elif node == "hydra" and not any(key == name or key.startswith(f"{name}.") for name in OPEN):
            problems.append(Problem(override.key_or_group, ..., "must not be set by an override", REMEDY))
    if problems:
        raise ConfigError(problems)


def check_search_path(loader: ConfigLoader, config_name: str) -> None:
    """Refuse a primary config that adds to Hydra's search path: packages named there would be imported."""
    for source in loader.get_sources():
        if source.is_config(config_name):
            found = source.load_config(config_name).config
            if OmegaConf.is_dict(found) and OmegaConf.select(found, "hydra.searchpath"):
                raise ConfigError([Problem("hydra.searchpath", ..., "is not supported", "use --config-dir")])
            return


def check_node(config: DictConfig) -> None:
    """Raise `ConfigError` for what the node `hydra` of the composed `config` must not say."""
    node = config.hydra
    raw: Any = OmegaConf.to_container(node, resolve=False)
    found = [
        *(_fixed(raw)),
        *(_logging(raw, name) for name in ("hydra_logging", "job_logging")),
        *(_folder(raw, key) for key in FOLDERS),
        *_swept(raw["sweeper"]),
        *_launcher(raw["launcher"]),
    ]
    problems = [problem.within("hydra") for problem in found if problem is not None]
    if problems:
        raise ConfigError(problems)


def _fixed(raw: Mapping[str, Any]) -> list[Problem | None]:
    """Keys that must have the value that Hydra gives them."""
    job = raw["job"]
    unset: dict[str, Callable[[], bool]] = {
        "callbacks": lambda: not raw["callbacks"],
        "searchpath": lambda: not raw["searchpath"],
        "env": lambda: not raw.get("env"),
        "job.env_set": lambda: not job["env_set"],
        "job.env_copy": lambda: not job["env_copy"],
        "job.chdir": lambda: not job["chdir"],
        "job.id": lambda: job["id"] == "???",
        "job.num": lambda: job["num"] == "???",
        "job.name": lambda: bool(re.fullmatch(r"[\w.-]+", str(job["name"]))),
        "runtime.output_dir": lambda: raw["runtime"]["output_dir"] == "???",
        "sweeper._target_": lambda: raw["sweeper"].get("_target_") == SWEEPER,
    }
    known = {*unset, "run", "sweep", "sweeper", "launcher", "hydra_logging", "job_logging", "help", "hydra_help"}
    known |= {"mode", "output_subdir", "overrides", "job", "runtime", "verbose"}
    return [
        *(rule(holds(), key, ..., "must not be set by a config", REMEDY) for key, holds in unset.items()),
        *(Problem(str(key), ..., "is not a known key", REMEDY) for key in raw if key not in known),
    ]


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


def _folder(raw: Mapping[str, Any], key: str) -> Problem | None:
    """Folders that have no effect on where runs are, and that a stranger's config could make or fill elsewhere."""
    group, _, name = key.rpartition(".")
    value = raw[group][name] if group else raw[name]
    return rule(value in FOLDERS[key], key, value, OWN_FOLDERS, REMEDY_OF_FOLDERS)


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
    """An installed launcher, with numbers, its own defaults and plain words as parameters: no commands, no objects."""
    target = node.get("_target_")
    if target in OURS:
        return []
    classes = {f"{cls.__module__}.{cls.__qualname__}" for cls in plugins().discover(Launcher)} | OF_PLUGIN
    if target not in classes:
        text = "must be the class of an installed launcher of Hydra"
        return [Problem("launcher._target_", target, text, f"known here: {', '.join(sorted({*classes, *OURS}))}")]
    defaults = _defaults_of(target)
    return [
        Problem(
            f"launcher.{key}",
            ...,
            "must be a number, true, false, null or the launcher's default: it may hold a command or a path",
            "put it into the script that starts fedsim: jobs inherit its environment",
        )
        for key, value in node.items()
        if key != "_target_" and not _plain_parameter(str(key), value) and value != defaults.get(key, ...)
    ]


def _plain_parameter(key: str, value: Any) -> bool:
    if key.startswith("_"):
        return False
    return value is None or isinstance(value, bool | int | float) or (key in WORDS and _is_word(value))


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and bool(re.fullmatch(r"[\w.:,=\[\]-]*", value)) and not value.startswith("-")


def _defaults_of(target: str) -> Mapping[str, Any]:
    """The parameters that a launcher's plugin has registered."""
    registered = ConfigStore.instance().repo.get("hydra", {}).get("launcher", {})
    for entry in registered.values():
        node: Any = OmegaConf.to_container(entry.node, resolve=False)
        if isinstance(node, dict) and node.get("_target_") == target:
            return node
    return {}


def elsewhere(launcher: Mapping[str, Any]) -> bool:
    """Whether jobs run on other machines than this one, whose GPUs are not known here.

    `launcher`: the node hydra.launcher.
    """
    on_slurm = launcher.get("_target_") == submitit_options.LAUNCHERS["submitit_slurm"]
    return on_slurm or launcher.get("address") == "auto"
