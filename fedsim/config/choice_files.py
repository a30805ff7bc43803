"""The files of choices, conf/<group>/<choice>.yaml and those of --config-dir, with what their defaults lists add.

They are read one by one, without Hydra, which takes time, and nothing in them is run. What a defaults list puts at a
place of its own (`gpfl@elsewhere`), several choices of one group, and interpolations in a list are left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedsim.config.choice_content import choices_made, package_of, read_content
from fedsim.config.nested import all_keys, has_key, merged, placed
from fedsim.errors import ConfigError


@dataclass(frozen=True)
class ChoiceFile:
    """A file. `package`: what its keys are prefixed with on the command line.

    `own_values`: the keys that it gives itself. `parts`: the choices of its group that it builds on, and None for its
    own keys, a later one replacing an earlier. `own_subgroups`: the choices that it makes in other groups, by group.
    """

    group: str
    name: str
    path: Path
    text: str
    package: str
    own_values: Mapping[str, Any]
    own_subgroups: Mapping[str, str]
    parts: "Sequence[ChoiceFile | None]"

    @property
    def bases(self) -> "list[ChoiceFile]":
        """The choices of its group that it builds on."""
        return [part for part in self.parts if part is not None]

    @cached_property
    def values(self) -> Mapping[str, Any]:
        """All its keys, without those of other groups."""
        found: Mapping[str, Any] = {}
        for part in self.parts:
            found = merged(found, self.own_values if part is None else part.values)
        return found

    @cached_property
    def subgroups(self) -> Mapping[str, str]:
        """The choices that it makes in other groups, by group."""
        inherited = [base.subgroups for base in self.bases]
        return {group: name for made in (*inherited, self.own_subgroups) for group, name in made.items()}


class ChoiceFiles:
    """The choices in `folders`, of which the first that has one is taken."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = tuple(folders)
        self._read: dict[tuple[str, str], ChoiceFile] = {}

    @cached_property
    def groups(self) -> list[str]:
        """Names of all groups: `selector`, `selector/sketch`."""
        found = {
            path.parent.relative_to(folder).as_posix()
            for folder in self.folders
            for path in folder.rglob("*.yaml")
            if path.parent != folder and not path.name.startswith(".")
        }
        return sorted(found)

    def names(self, group: str) -> list[str]:
        """The choices of a group."""
        return sorted({path.stem for folder in self.folders for path in (folder / group).glob("*.yaml")})

    def has(self, group: str, name: str) -> bool:
        return self._path(group, name) is not None

    def read(self, group: str, name: str) -> ChoiceFile:
        """The choice `name` of a group. Raises `ConfigError` where its file or one that it builds on cannot be read."""
        return self._file(group, name, ())

    def made(self, group: str, name: str) -> dict[str, str]:
        """The choices that it makes in other groups, by group, and those that they make."""
        found: dict[str, str] = {}
        to_come = [(group, name)]
        while to_come:
            file = self.read(*to_come.pop())
            more = {sub: choice for sub, choice in file.subgroups.items() if sub not in found and self.has(sub, choice)}
            found |= more
            to_come += more.items()
        return found

    def config(self, group: str, name: str) -> dict[str, Any]:
        """All that it adds to a config, from the config's top: its values, and those of the choices that it makes."""
        found: dict[str, Any] = {}
        for one in [*self.made(group, name).items(), (group, name)]:
            file = self.read(*one)
            found = merged(found, placed(file.values, file.package))
        return found

    def takes(self, group: str, name: str, key: str) -> bool:
        """Whether the config of a choice has the whole `key`, with a value and not a group at it; that of a file that
        cannot be read has not."""
        try:
            return key.replace(".", "/") not in self.made(group, name) and has_key(self.config(group, name), key)
        except ConfigError:  # told where it is chosen
            return False

    def places(self, path: str) -> list[str]:
        """The keys below the top level that end with the dotted `path`, in choices of any group."""
        files = [file for group in self.groups for name in self.names(group) if (file := self._sound(group, name))]
        keys = {f"{file.package}.{key}": None for file in files if file.package for key in all_keys(file.values)}
        return sorted(key for key in keys if key.endswith(f".{path}"))

    def _sound(self, group: str, name: str) -> ChoiceFile | None:
        try:
            return self.read(group, name)
        except ConfigError:
            return None

    def _path(self, group: str, name: str) -> Path | None:
        if group.startswith("/") or ".." in (*group.split("/"), *name.split("/")):
            return None  # a stranger's, which leads out of the folders
        return next((p for folder in self.folders if (p := folder / group / f"{name}.yaml").is_file()), None)

    def _file(self, group: str, name: str, above: Sequence[str]) -> ChoiceFile:
        if (group, name) not in self._read:
            self._read[group, name] = self._from_disk(group, name, [*above, name])
        return self._read[group, name]

    def _from_disk(self, group: str, name: str, above: Sequence[str]) -> ChoiceFile:
        path = self._path(group, name)
        assert path is not None, f"conf/{group}/ has no {name}"
        text, content = read_content(path)
        parts: list[ChoiceFile | None] = []
        subgroups: dict[str, str] = {}
        for sub, choice in choices_made(content.get("defaults"), group):
            if choice == "_self_":
                parts.append(None)
            elif sub != group:
                subgroups[sub] = choice
            elif choice not in above and self.has(group, choice):
                parts.append(self._file(group, choice, above))
        own = {str(key): value for key, value in content.items() if key != "defaults"}
        package = package_of(text, group)
        return ChoiceFile(group, name, path, text, package, own, subgroups, parts if None in parts else [*parts, None])


def on_search_path() -> ChoiceFiles:
    """The choices that Hydra composes from now. To be called inside `fedsim.config.compose.search_path`."""
    from hydra.core.global_hydra import GlobalHydra

    from fedsim.config.sources import CheckedFolder

    instance = GlobalHydra.instance().hydra
    sources = [] if instance is None else instance.config_loader.repository.get_sources()  # type: ignore[attr-defined]
    return ChoiceFiles([Path(source.path) for source in sources if isinstance(source, CheckedFolder)])
