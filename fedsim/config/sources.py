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
        path = self._file(config_path)
        if not path.is_file():
            raise ConfigLoadError(f"Config not found : {path}")
        text = read_checked(path)
        header = ConfigSource._get_header_dict(text[:512])
        try:
            config = OmegaConf.load(io.StringIO(text))
        except OSError as error:  # a set, or another node that is neither mapping, list nor text
            problem = Problem(str(path), ..., f"must be a mapping of keys to values ({error})")
            raise ConfigError([problem]) from error
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
        check(
            rule(
                ".." not in Path(config_path).parts and not Path(config_path).is_absolute(),
                "defaults",
                config_path,
                "must not lead out of its folder of configs",
            )
        )
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
        size, depth = size_and_depth(text)
    except UnicodeDecodeError as error:
        raise ConfigError([Problem(str(path), ..., f"must be UTF-8 ({error})")]) from error
    except yaml.YAMLError as error:
        raise ConfigError([Problem(str(path), ..., f"is not YAML: {' '.join(str(error).split())[:300]}")]) from error
    except RecursionError as error:
        raise ConfigError([Problem(str(path), ..., "is nested too deeply")]) from error
    check(
        rule(size <= MAX_VALUES, str(path), ..., f"must have at most {MAX_VALUES} values, aliases written out", remedy),
        rule(depth <= MAX_DEPTH, str(path), ..., f"must be nested at most {MAX_DEPTH} deep", remedy),
    )
    return text


def size_and_depth(text: str) -> tuple[int, int]:
    """Number of values, with each alias counted as what it stands for, and the depth of their nesting.

    Read event by event: nothing is built, and a file that is too deep or too large is given up early.
    """
    sizes: dict[str, int] = {}
    open_nodes: list[tuple[str | None, int]] = []
    total, deepest = 0, 0

    def add(size: int, anchor: str | None = None) -> None:
        nonlocal total
        if anchor is not None:
            sizes[anchor] = size
        if open_nodes:
            name, own = open_nodes[-1]
            open_nodes[-1] = (name, own + size)
        else:
            total += size

    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            add(sizes.get(event.anchor, MAX_VALUES + 1))  # a node that holds itself is endless
        elif isinstance(event, yaml.ScalarEvent):
            add(1, event.anchor)
        elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            open_nodes.append((event.anchor, 1))
            deepest = max(deepest, len(open_nodes))
            if deepest > MAX_DEPTH:
                break
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            anchor, size = open_nodes.pop()
            add(size, anchor)
    return total + sum(size for _, size in open_nodes), deepest
