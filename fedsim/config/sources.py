"""The folders of `--config-dir` and `--config-path`, whose files may come from a stranger, as Hydra reads them.

In place of Hydra's own reader of folders: files outside the folder, too long ones and those that YAML's aliases make
too large are refused, before Hydra works on them.
"""

import filecmp
import io
from functools import lru_cache
from pathlib import Path

import yaml
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from omegaconf import OmegaConf

from fedsim.config.hydra_node import Spent
from fedsim.core.errors import ConfigError, Problem, check, rule

MAX_BYTES = 256 * 1024
"""Of one YAML file; those of conf/ have at most 5 kB."""
MAX_VALUES = 5_000
"""Of one YAML file, aliases written out; Hydra takes 0.1 ms for each, and several times."""
MAX_DEPTH = 50


class CheckedFolder(ConfigSource):
    """A folder of YAML files (`checked://<folder>`)."""

    @staticmethod
    def scheme() -> str:
        return "checked"

    def load_config(self, config_path: str) -> ConfigResult:
        Spent.reset()  # a config is composed anew
        path = self._file(config_path)
        if not path.is_file():
            raise ConfigLoadError(f"Config not found : {path}")
        text = read_checked(path)
        header = ConfigSource._get_header_dict(text[:512])
        try:
            config = OmegaConf.load(io.StringIO(text))
        except OSError as error:  # a set, or another node that is neither mapping, list nor text
            raise ConfigError([Problem(str(path), ..., f"must be a mapping of keys to values ({error})")]) from error
        return ConfigResult(self.provider, f"checked://{self.path}", config, header)

    def available(self) -> bool:
        return Path(self.path).is_dir()

    def is_group(self, config_path: str) -> bool:
        return self._inside(config_path).is_dir()

    def is_config(self, config_path: str) -> bool:
        try:
            return self._file(config_path).is_file()
        except OSError:  # a name that is longer than file systems take
            return False

    def list(self, config_path: str, results_filter: ObjectType | None) -> "list[str]":
        found: list[str] = []
        for entry in self._inside(config_path).iterdir():
            self._list_add_result(found, str(Path(config_path) / entry.name), entry.name, results_filter)
        return sorted(set(found))

    def _file(self, config_path: str) -> Path:
        return self._inside(self._normalize_file_name(config_path))

    def _inside(self, config_path: str) -> Path:
        inside = ".." not in Path(config_path).parts and not Path(config_path).is_absolute()
        check(rule(inside, "defaults", config_path, "must not lead out of its folder of configs"))
        return Path(self.path) / config_path


def hidden_files(folder: Path, primary: Path) -> list[Problem]:
    """Files of `folder` (--config-dir) that Hydra would never read, because `primary` has others of the same names."""
    names = [path.relative_to(primary) for path in sorted(primary.rglob("*.yaml"))]
    return [
        Problem("--config-dir", str(folder / name), f"is hidden by {primary / name}, which differs", "rename it")
        for name in names
        if (folder / name).is_file() and not filecmp.cmp(folder / name, primary / name, shallow=False)
    ]


def read_checked(path: Path) -> str:
    """The text of a YAML file. Raises `ConfigError` where it is too large for a config."""
    state = path.stat()
    return _read_checked(path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=64)  # a sweep composes the same files once a job
def _read_checked(path: Path, _modified: int, _size: int) -> str:
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    remedy = "a config holds the values of an experiment, not data"
    check(rule(len(content) <= MAX_BYTES, str(path), ..., f"must have at most {MAX_BYTES // 1024} KiB", remedy))
    try:
        text = content.decode()
        size = _size_of(yaml.compose(text, yaml.SafeLoader), 1, {})
    except UnicodeDecodeError as error:
        raise ConfigError([Problem(str(path), ..., f"must be UTF-8 ({error})")]) from error
    except yaml.YAMLError as error:
        raise ConfigError([Problem(str(path), ..., f"is not YAML: {' '.join(str(error).split())[:300]}")]) from error
    except RecursionError as error:
        raise ConfigError([Problem(str(path), ..., "is nested too deeply", remedy)]) from error
    limit = f"must have at most {MAX_VALUES} values, aliases written out"
    check(rule(size <= MAX_VALUES, str(path), ..., limit, remedy))
    return text


def _size_of(node: yaml.Node | None, depth: int, known: dict[int, int]) -> int:
    """Number of values, with each alias counted as what it stands for, but nothing made of them.

    Raises `RecursionError` where they are nested too deeply.
    """
    if depth > MAX_DEPTH:
        raise RecursionError
    if id(node) not in known:
        known[id(node)] = MAX_VALUES + 1  # a node that holds itself is endless
        below = node.value if isinstance(node, yaml.SequenceNode) else []
        below = [one for pair in node.value for one in pair] if isinstance(node, yaml.MappingNode) else below
        known[id(node)] = 1 + sum(_size_of(one, depth + 1, known) for one in below)
    return known[id(node)]
