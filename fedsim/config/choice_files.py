"""The choices of all config groups, read from conf/<group>/<choice>.yaml and from --config-dir.

Hydra composes the configs of runs. This file answers questions about choices that must not wait for
Hydra, or that Hydra does not answer: what a choice adds to a config, and which choices have a key.
Error messages, lists of choices, and the fast composition of sweeps (overlay.py) use it.

A choice may build on other choices of its group (its bases), and make choices in other groups, such
as `selector/sketch` for a selector. The defaults list at the top of its file, a notion of Hydra,
names both. The package of a file is the dotted key below which its keys are in a config. Not
supported are three rare kinds of entries of defaults lists: choices put elsewhere
(`gpfl@elsewhere`), several choices of one group, and interpolations.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedsim.config.yaml_files import (
    first_sentence,
    head_of,
    other_names,
    package_of,
    parse_yaml,
    read_text,
    spelt,
)
from fedsim.core.configs import all_keys, merge, nest
from fedsim.core.errors import ConfigError, Problem


@dataclass(frozen=True)
class ChoiceFile:
    """The file of a choice, together with its `bases`.

    `text`: its content. `package`: the dotted key below which its keys are. `values`: its keys and
    those of its bases. `entries`: its defaults list. `included`: the choices that it and its bases
    make in other groups, by group.
    """

    group: str
    name: str
    path: Path
    text: str
    package: str
    values: Mapping[str, Any]
    entries: Sequence[Any]
    included: Mapping[str, str]
    bases: "Sequence[ChoiceFile]"


def missing_package_line(file: ChoiceFile) -> Problem:
    """Return the problem of a file without the line `# @package _global_`, which puts its keys at
    the top level."""
    text = f"has its keys below `{file.group}`, where none is known"
    return Problem(str(file.path), ..., text, "make `# @package _global_` its first line")


class ChoiceFiles:
    """The choices in `folders`. If several folders have a choice, the first folder's is taken."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = tuple(folders)
        self._files: dict[tuple[str, str], ChoiceFile] = {}

    @cached_property
    def groups(self) -> list[str]:
        """The names of all groups: `selector`, `selector/sketch`."""
        groups = set()
        for folder in self.folders:
            for path in folder.rglob("[!.]*.yaml"):
                groups.add(path.parent.relative_to(folder).as_posix())
        return sorted(groups - {"."})

    @cached_property
    def choices_by_key(self) -> dict[str, dict[str, list[str]]]:
        """The names of the choices that have a key, by the dotted key and then by the group.

        For example, `choices_by_key["selector.alpha"]["selector"]` is the list of selectors with this key.
        The key of a subgroup (`selector.sketch`) is no key of the choices that fill it.
        """
        keys: dict[str, dict[str, list[str]]] = {}
        for group in self.groups:
            for name in self.names(group):
                for key in self._keys_of(group, name):
                    keys.setdefault(key, {}).setdefault(group, []).append(name)
        return keys

    def _keys_of(self, group: str, name: str) -> list[str]:
        """Return the dotted keys below its group that a choice has; none if it cannot be read."""
        try:
            subgroups = self.included(group, name)
            config = self.config(group, name)
        except ConfigError:  # fedsim reports it when the user makes this choice
            return []
        prefix = f"{group}/"
        paths = [(key, key.replace(".", "/")) for key in all_keys(config)]
        return [key for key, path in paths if path.startswith(prefix) and path not in subgroups]

    def names(self, group: str) -> list[str]:
        """Return the choices of a group, sorted."""
        return sorted({path.stem for f in self.folders for path in (f / group).glob("*.yaml")})

    def has(self, group: str, name: str) -> bool:
        """Return whether a group has the choice `name`."""
        return self._path(group, name) is not None

    def also_called(self, group: str, word: str) -> dict[str, str]:
        """Return the choices that the literature calls `word`, by the field `also` of their files,
        each with the first sentence of its file."""
        sentences: dict[str, str] = {}
        for name in self.names(group):
            path = self._path(group, name)
            if path is not None:
                prose, fields = head_of(read_text(path))
                if spelt(word) in other_names(fields):
                    sentences[name] = first_sentence(prose)
        return sentences

    def meant(self, group: str, word: str) -> str:
        """Return the choice that the user means by `word`: `gpfl` for GPFL, or the only choice that
        the literature calls so.

        Returns `word` itself if there is no such choice, or several.
        """
        if self.has(group, word):
            return word
        alike = [name for name in self.names(group) if spelt(name) == spelt(word)]
        candidates = alike or list(self.also_called(group, word))
        return candidates[0] if len(candidates) == 1 else word

    def defaults(self, content: Mapping[Any, Any], group: str) -> list[Any]:
        """Return the defaults list in the `content` of a file of `group`, with each word replaced
        by the choice that it means."""
        entries = content.get("defaults")
        if not isinstance(entries, list):
            return []
        defaults: list[Any] = []
        for entry in entries:
            if isinstance(entry, dict):
                entry = dict(entry)
                for key, name in entry.items():
                    if isinstance(name, str):
                        entry[key] = self.meant(_group_of_entry(key, group), name)
            defaults.append(entry)
        return defaults

    def read(self, group: str, name: str, built_upon: Sequence[str] = ()) -> ChoiceFile:
        """Return the choice `name` of a group.

        `built_upon`: the choices whose bases are being read. They are not read again, so that
        choices that build on each other do not recurse for ever. Raises `ConfigError` if the file,
        or one that it builds on, cannot be read.
        """
        if (group, name) in self._files:
            return self._files[group, name]
        path = self._path(group, name)
        assert path is not None, f"conf/{group}/ has no {name}"
        text = read_text(path)
        content = parse_yaml(path, text)
        file_values = {str(key): value for key, value in content.items() if key != "defaults"}
        entries = self.defaults(content, group)
        # `_self_` stands for the file's own keys; as in Hydra, they come last if it is not listed.
        # Later choices override earlier ones.
        choices = list(included_choices(entries, group))
        if (group, "_self_") not in choices:
            choices.append((group, "_self_"))
        values: dict[str, Any] = {}
        inherited: dict[str, str] = {}
        subgroups: dict[str, str] = {}
        bases: list[ChoiceFile] = []
        for other_group, choice in choices:
            if choice == "_self_":
                values = merge(values, file_values)
            elif other_group != group:
                subgroups[other_group] = choice
            elif choice not in (*built_upon, name) and self.has(group, choice):
                base = self.read(group, choice, [*built_upon, name])
                bases.append(base)
                values = merge(values, base.values)
                inherited.update(base.included)
        package = package_of(text, group)
        file = ChoiceFile(
            group, name, path, text, package, values, entries, inherited | subgroups, bases
        )
        self._files[group, name] = file
        return file

    def included(self, group: str, name: str) -> dict[str, str]:
        """Return the choices by group that a choice makes in other groups, and that these make in
        turn."""
        choices: dict[str, str] = {}
        to_read = [(group, name)]
        while to_read:
            file = self.read(*to_read.pop())
            for subgroup, choice in file.included.items():
                if subgroup not in choices and self.has(subgroup, choice):
                    choices[subgroup] = choice
                    to_read.append((subgroup, choice))
        return choices

    def config(self, group: str, name: str) -> dict[str, Any]:
        """Return everything that a choice, with the choices that it makes, adds to a config."""
        config: dict[str, Any] = {}
        # the choice itself comes last, so that it may change values of its subgroups
        for choice in [*self.included(group, name).items(), (group, name)]:
            file = self.read(*choice)
            config = merge(config, nest(file.values, file.package))
        return config

    def _path(self, group: str, name: str) -> Path | None:
        """Return the file of a choice; None if there is none inside the folders."""
        # a name from the command line must not lead out of the folders
        if group.startswith("/") or ".." in f"{group}/{name}".split("/"):
            return None
        for folder in self.folders:
            path = folder / group / f"{name}.yaml"
            try:
                if path.is_file():
                    return path
            except OSError:  # the name is longer than the file system's names
                return None
        return None


def included_choices(entries: Sequence[Any], group: str) -> Iterator[tuple[str, str]]:
    """Yield group and name of each choice that the defaults list of a file of `group` makes.

    For the entry `_self_`, the name is `_self_`.
    """
    for entry in entries:
        if isinstance(entry, str) and "@" not in entry:
            sub, _, name = _from_top(entry, group).rpartition("/")
            yield sub, name
        elif isinstance(entry, dict) and len(entry) == 1:
            ((key, name),) = entry.items()
            if isinstance(name, str) and "@" not in str(key):
                yield _group_of_entry(key, group), name


def _group_of_entry(key: Any, group: str) -> str:
    """Return the group of an entry such as `override /selector: gpfl` in a file of `group`."""
    return _from_top(str(key).split(" ")[-1], group)


def _from_top(path: str, group: str) -> str:
    """Return a path of a defaults list of `group` from the top level: `/x` is x, `x` is group/x."""
    return path.removeprefix("/") if path.startswith("/") else f"{group}/{path}".lstrip("/")
