"""The folders of configs, whose files may come from a stranger, as Hydra reads them for fedsim."""

import filecmp
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from omegaconf import OmegaConf

from fedsim.config.choice_files import ChoiceFiles, parsed, read_text
from fedsim.core.errors import Problem, check, rule


class CheckedFolder(ConfigSource):
    """A folder of YAML files (`checked://<folder>`), none of them outside of it, and none too large
    to work on."""

    @staticmethod
    def scheme() -> str:
        return "checked"

    def load_config(self, config_path: str) -> ConfigResult:
        path = self._file(config_path)
        if not path.is_file():
            raise ConfigLoadError(f"Config not found : {path}")
        text = read_text(path)
        header = ConfigSource._get_header_dict(text[:512])
        content = parsed(path, text)
        if "defaults" in content:
            content = content | {
                "defaults": on_search_path().defaults(content, config_path.rpartition("/")[0])
            }
        return ConfigResult(
            self.provider, f"checked://{self.path}", OmegaConf.create(content), header
        )

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
            self._list_add_result(
                found, str(Path(config_path) / entry.name), entry.name, results_filter
            )
        return sorted(set(found))

    def _file(self, config_path: str) -> Path:
        return self._inside(self._normalize_file_name(config_path))

    def _inside(self, config_path: str) -> Path:
        inside = ".." not in Path(config_path).parts and not Path(config_path).is_absolute()
        check(rule(inside, "defaults", config_path, "must not lead out of its folder of configs"))
        return Path(self.path) / config_path


def loader() -> Any:
    """Return what Hydra composes from now, if it is ready to."""
    return getattr(GlobalHydra.instance().hydra, "config_loader", None)


def on_search_path() -> ChoiceFiles:
    """The choices that Hydra composes from now. To be called inside
    `fedsim.config.compose.search_path`."""
    sources = loader().repository.get_sources()
    return ChoiceFiles(
        [Path(source.path) for source in sources if isinstance(source, CheckedFolder)]
    )


def hidden_files(folder: Path, primary: Path) -> list[Problem]:
    """Files of `folder` (--config-dir) that Hydra would never read, because `primary` has others of
    the same names."""
    names = [path.relative_to(primary) for path in sorted(primary.rglob("*.yaml"))]
    return [
        Problem(
            "--config-dir",
            str(folder / name),
            f"is hidden by {primary / name}, which differs",
            "rename it",
        )
        for name in names
        if (folder / name).is_file()
        and not filecmp.cmp(folder / name, primary / name, shallow=False)
    ]
