"""Let Hydra read the files of conf/ and of --config-dir, which may come from a stranger.

Hydra has two kinds of plugins for this. A `ConfigSource` reads a folder, and a `SearchPathPlugin`
says which folders are read. fedsim registers one of each. Outside of the context `search_path` they
change nothing. Inside of it, `options` and `known_choices` tell which config groups and choices
there are.
"""

import filecmp
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import ClassVar

from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from fedsim.config.choice_files import ChoiceFiles, included_choices
from fedsim.config.hydra_node import guarded_environment, node_problems
from fedsim.config.yaml_files import PACKAGE, package_of, parse_yaml, read_text
from fedsim.core.configs import leaves, nest
from fedsim.core.disk import conf_dir
from fedsim.core.errors import Problem, check, rule


class CheckedFolder(ConfigSource):
    """Reads a folder of YAML files (`checked://<folder>`), and no file outside of it."""

    @staticmethod
    def scheme() -> str:
        """Return the beginning of a folder's address, by which Hydra chooses this class."""
        return "checked"

    def load_config(self, config_path: str) -> ConfigResult:
        """Return a file's content. Raises `ConfigError` if it is no config, or sets forbidden keys
        below `hydra`."""
        path = self._file(config_path)
        if not path.is_file():
            raise ConfigLoadError(f"Config not found : {path}")
        text = read_text(path)
        content = parse_yaml(path, text)
        group = config_path.rpartition("/")[0]
        in_config = leaves(nest(content, package_of(text, group)))
        check(*node_problems(key for key, _ in in_config))
        if "defaults" in content:
            defaults = known_choices().defaults(content, group)
            check(*node_problems(name for name, _ in included_choices(defaults, group)))
            content = content | {"defaults": defaults}
        package = PACKAGE.match(text)
        header = {"package": package[1] if package else None}
        url = f"checked://{self.path}"
        return ConfigResult(self.provider, url, OmegaConf.create(content), header)

    def available(self) -> bool:
        """Return whether the folder exists."""
        return Path(self.path).is_dir()

    def is_group(self, config_path: str) -> bool:
        """Return whether there is a folder of choices at this path."""
        return self._inside(config_path).is_dir()

    def is_config(self, config_path: str) -> bool:
        """Return whether there is a YAML file at this path, whose suffix may be left out."""
        try:
            return self._file(config_path).is_file()
        except OSError:  # the name is longer than the file system's names
            return False

    def list(self, config_path: str, results_filter: ObjectType | None) -> "list[str]":
        """Return the names of groups and choices in a folder, sorted, without hidden files."""
        names: set[str] = set()
        for path in self._inside(config_path).glob("[!.]*"):
            if results_filter is not ObjectType.CONFIG and path.is_dir():
                names.add(path.name)
            is_choice = path.suffix == ".yaml" and path.is_file()
            if results_filter is not ObjectType.GROUP and is_choice:
                names.add(path.stem)
        return sorted(names)

    def _file(self, config_path: str) -> Path:
        """Return the file of a config."""
        return self._inside(f"{config_path.removesuffix('.yaml')}.yaml")

    def _inside(self, config_path: str) -> Path:
        """Return a path inside the folder. Raises `ConfigError` if it would lead out of it."""
        inside = ".." not in Path(config_path).parts and not Path(config_path).is_absolute()
        check(rule(inside, "defaults", config_path, "must not lead out of its folder of configs"))
        return Path(self.path) / config_path


class ConfigDir(SearchPathPlugin):
    """Adds the folder of --config-dir after conf/, and has `CheckedFolder` read both."""

    active: ClassVar[bool] = False
    """True while the program is inside `search_path`. Hydra makes the objects of plugins itself, so
    their state is in the class."""
    folder: ClassVar[str | None] = None
    """The folder of --config-dir; None: there is none."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Change Hydra's search path, in place; Hydra calls this when it is initialized."""
        if not self.active:
            return
        if self.folder is not None:
            folder = Path(self.folder).resolve()
            search_path.append(provider="command-line", path=f"file://{folder}")
        for element in search_path.get_path():
            path = str(element.path).removeprefix("file://")
            if Path(path).is_absolute():
                element.path = f"{CheckedFolder.scheme()}://{path}"


@contextmanager
def search_path(config_dir: str | None = None, config_path: str | None = None) -> Iterator[None]:
    """Make Hydra ready to compose from conf/ (or `config_path`) and the user's own `config_dir`.

    A program that uses Hydra itself finds it as it was before. Raises `ConfigError` if `config_dir`
    is no folder, or has files that those of conf/ hide.
    """
    primary = Path(config_path or conf_dir()).resolve()
    if config_dir is not None:
        is_folder = Path(config_dir).is_dir()
        check(rule(is_folder, "--config-dir", config_dir, "must be an existing folder"))
        check(*_hidden_files(Path(config_dir), primary))
    plugins = load_plugins()
    plugins.register(ConfigDir)
    plugins.register(CheckedFolder)
    before = (ConfigDir.active, ConfigDir.folder)  # `search_path` may be inside another one
    ConfigDir.active = True
    ConfigDir.folder = config_dir
    try:
        with nullcontext() if before[0] else guarded_environment():
            GlobalHydra.instance().clear()
            with initialize_config_dir(str(primary), "fedsim", version_base="1.3"):
                yield
    finally:
        ConfigDir.active, ConfigDir.folder = before


def load_plugins() -> Plugins:
    """Return Hydra's registry of plugins.

    Its first call imports every folder `hydra_plugins` on Python's path. Files in the working
    folder may be a stranger's; they are not imported unless PYTHONPATH names the folder. The
    launchers of the package hydra-submitit-launcher are removed, because conf/ has fedsim's own of
    these names.
    """
    working_folder = Path.cwd()
    path_before = sys.path[:]
    named = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if working_folder not in {Path(folder).resolve() for folder in named}:
        sys.path[:] = [f for f in path_before if Path(f).resolve() != working_folder]
    try:
        plugins = Plugins.instance()
    finally:
        sys.path[:] = path_before
    launchers = ConfigStore.instance().repo.get("hydra", {}).get("launcher", {})
    for name in ("submitit_local.yaml", "submitit_slurm.yaml"):
        launchers.pop(name, None)
    return plugins


def loader() -> ConfigLoader | None:
    """Return Hydra's present loader of configs; None outside of `search_path`."""
    hydra = GlobalHydra.instance()
    return hydra.config_loader() if hydra.is_initialized() else None


def sources() -> list[ConfigSource]:
    """Return the places from which Hydra reads configs at present, in their order."""
    current = loader()
    return [] if current is None else current.get_sources()


def fingerprint_of_sources() -> tuple[object, ...]:
    """Return a value that differs after any change of the places from which Hydra reads configs, or
    of a file in their folders."""
    parts: list[object] = []
    for source in sources():
        parts.append((source.scheme(), source.path))
        if isinstance(source, CheckedFolder):
            for folder, _, names in os.walk(source.path):
                for name in names:
                    with suppress(OSError):  # a link that leads nowhere, or a file deleted just now
                        status = Path(folder, name).stat()
                        state = (status.st_mtime_ns, status.st_size, status.st_ino)
                        parts.append((folder, name, *state))
    return tuple(parts)


def options(group: str) -> list[str]:
    """Return the choices of a config group; [] if there is no such group."""
    names: set[str] = set()
    for source in sources() if group else []:
        if source.is_group(group):
            names.update(source.list(group, ObjectType.CONFIG))
    return sorted(names)


def known_choices() -> ChoiceFiles:
    """Return the choices from which Hydra composes at present; none outside of `search_path`."""
    folders = [Path(source.path) for source in sources() if isinstance(source, CheckedFolder)]
    return ChoiceFiles(folders)


def _hidden_files(folder: Path, primary: Path) -> Iterator[Problem]:
    """Yield a problem for each file of `folder` (--config-dir) that Hydra would never read.

    `primary` has another file of the same name.
    """
    for path in sorted(primary.rglob("*.yaml")):
        hidden = folder / path.relative_to(primary)
        if hidden.is_file() and not filecmp.cmp(hidden, path, shallow=False):
            text = f"is hidden by {path}, which differs"
            yield Problem("--config-dir", str(hidden), text, "rename it")
