"""What a config may say to Hydra itself, and what `${...}` in it may stand for.

Hydra instantiates callbacks, sets environment variables, imports packages of its search path and opens log files as
its own node, `hydra`, says. A config may come from a stranger, so everything else than the keys below must be as Hydra
has it: how jobs are swept over and launched, and nothing that runs code.

A config is written to files and to trackers with its interpolations resolved: a secret of the environment would be,
too. Values that name others that name others can grow without bound (`a: ${b}${b}`, `b: ${c}${c}`, ...).
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from typing import Any

import yaml
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.basecontainer import BaseContainer

from fedsim.config.words import LAUNCHERS, typed_in
from fedsim.core.errors import ConfigError, Problem, check, rule

VARIABLES = ("HOME", "LOGNAME", "SCRATCH", "TMPDIR", "USER", "WORK")
"""Environment variables that a config may name, besides those that begin with `FEDSIM_`."""
RESOLVERS = ("oc.env", "oc.select", "oc.decode", "now", "hydra", "python_version")
"""Resolvers that a config may call; the others make nodes out of text."""
MAX_SIZE = 100_000
"""Characters and values that a value may become by resolving it."""

_PATH = re.compile(r"[^\s\\{}()'\",:$]+")
_WHOLE = re.compile(r"\$\{([^{}:]*)\}")
_QUOTED = re.compile(r"""['"]([^'"]*)['"]""")
_CALL = re.compile(r"\$\{\s*([\w.]+)\s*:")
_COMPUTED = re.compile(r"\$\{[^:{}]*\$\{")


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


@contextmanager
def restricted_resolvers() -> Iterator[None]:
    """`environment_variable` in the place of OmegaConf's `oc.env`, or of the program's own, which is put back."""
    before = BaseContainer._resolvers.get("oc.env")  # as it is called, which no public name gives
    OmegaConf.register_new_resolver("oc.env", environment_variable, replace=True)
    try:
        yield
    finally:
        OmegaConf.clear_resolver("oc.env")
        if before is not None:
            BaseContainer._resolvers["oc.env"] = before


def check_size(config: DictConfig) -> None:
    """Raise `ConfigError` where resolving `config` would make something large, or calls other resolvers."""
    root = OmegaConf.to_container(config, resolve=False)
    try:
        _Sizes(root).of((), root)
    except RecursionError as error:
        raise ConfigError([Problem("config", ..., "has too long a chain of interpolations")]) from error


class _Sizes:
    """Upper bounds of what values become, by path."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[tuple[str, ...], int] = {}

    def of(self, path: tuple[str, ...], node: Any) -> int:
        """Of the value at `path`. One that contains itself counts as 0 there: OmegaConf refuses it."""
        if path not in self._known:
            self._known[path] = 0
            self._known[path] = size = self._size(path, node)
            if size > MAX_SIZE:
                text = f"must become at most {MAX_SIZE} characters or values when it is resolved"
                raise ConfigError([Problem(".".join(path) or "config", ..., text, "write the value out")])
        return self._known[path]

    def _size(self, path: tuple[str, ...], node: Any) -> int:
        if isinstance(node, Mapping):
            last = sorted(node, key=lambda key: key == "hydra")  # which repeats words of the command line
            return 1 + sum(self.of((*path, str(key)), node[key]) for key in last)
        if isinstance(node, list):
            return 1 + sum(self.of((*path, str(index)), value) for index, value in enumerate(node))
        if not isinstance(node, str):
            return 1
        if "${" not in node:
            return len(node) + 1
        key = ".".join(path)
        for name in _CALL.findall(node):
            if name not in RESOLVERS:
                raise ConfigError([Problem(key, ..., f"must not call the resolver {name}", ", ".join(RESOLVERS))])
        if _COMPUTED.search(node):
            raise ConfigError([Problem(key, ..., "must not compute the name of another value", "write the name out")])
        return len(node) + 1 + sum(self.of(*found) for found in self._named(path, node))

    def _named(self, path: tuple[str, ...], text: str) -> Iterator[tuple[tuple[str, ...], Any]]:
        """Every value that a word of `text` may name, from the root or relative to its own place."""
        text = text[text.index("${") :]
        words = Counter(_PATH.findall(text)) | Counter(_WHOLE.findall(text)) | Counter(_QUOTED.findall(text))
        for word in words.elements():
            dots = len(word) - len(word.lstrip("."))
            parts = [part for part in re.split(r"[.\[\]]+", word) if part]
            start = path[: max(len(path) - dots, 0)] if dots else ()
            found = self._find((*start, *parts))
            if found is not None:
                yield found

    def _find(self, parts: tuple[str, ...]) -> tuple[tuple[str, ...], Any] | None:
        node = self._root
        for part in parts:
            if isinstance(node, Mapping):
                keys = {str(key): key for key in node}
                if part not in keys:
                    return None
                node = node[keys[part]]
            elif isinstance(node, list) and part.isdigit() and int(part) < len(node):
                node = node[int(part)]
            else:
                return None
        return parts, node


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
BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
OURS = (
    *("fedsim.running.interleaving.Lanes", "fedsim.jobs.joblib_launcher.JoblibJobs"),
    *("fedsim.jobs.ray_launcher.RayJobs", BASIC),
)
"""Launchers whose parameters are checked when they are built, and Hydra's own, which has none."""
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
    check(*problems)


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
    check(*(problem.within("hydra") for problem in found if problem is not None))


def _fixed(raw: Mapping[str, Any]) -> list[Problem | None]:
    """Keys that must have the value that Hydra gives them."""
    job = raw["job"]
    holds = {
        **{key: not raw.get(key) for key in ("callbacks", "searchpath", "env")},
        **{f"job.{key}": not job[key] for key in ("env_set", "env_copy", "chdir")},
        **{f"job.{key}": job[key] == "???" for key in ("id", "num")},
        "job.name": bool(re.fullmatch(r"[\w.-]+", str(job["name"]))),
        "runtime.output_dir": raw["runtime"]["output_dir"] == "???",
        "sweeper._target_": raw["sweeper"].get("_target_") == SWEEPER,
    }
    known = {*holds, "run", "sweep", "sweeper", "launcher", "hydra_logging", "job_logging", "help", "hydra_help"}
    known |= {"mode", "output_subdir", "overrides", "job", "runtime", "verbose"}
    return [
        *(rule(sound, key, ..., "must not be set by a config", REMEDY) for key, sound in holds.items()),
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
    """A known launcher; for submitit with numbers, defaults and plain words as parameters: no commands, no objects."""
    target = str(node.get("_target_"))
    if target in OURS:
        return []
    if target not in LAUNCHERS.values():
        text = "must be the class of a launcher of fedsim"
        return [Problem("launcher._target_", target, text, f"known: {', '.join((*OURS, *LAUNCHERS.values()))}")]
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
    is_word = isinstance(value, str) and re.fullmatch(r"(?!-)[\w.:,=\[\]-]*", value) is not None
    return value is None or isinstance(value, bool | int | float) or (key in WORDS and is_word)


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
    on_slurm = launcher.get("_target_") == LAUNCHERS["submitit_slurm"]
    return on_slurm or launcher.get("address") == "auto"
