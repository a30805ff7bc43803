"""The choices of all config groups, read from conf/<group>/<choice>.yaml and from --config-dir.

A *choice* is such a file: an option of its group, which the override `group=choice` names. Its
defaults list, a notion of Hydra, *includes* other choices. Its *bases* are choices of the same
group, whose keys it inherits; other included choices are of other groups. For example, with this
file as conf/selector/mine.yaml:

    defaults:
      - gpfl                         # a base
      - override exploration: fixed  # conf/selector/exploration/fixed.yaml
      - _self_                       # the keys below are merged last
    metric: dot

    files.config("selector", "mine") == {"selector": {
        "exploration": {"_target_": "fedsim.selectors.gpfl.Fixed", "value": 0.0},
        "metric": "dot",
        ...  # all other keys of gpfl.yaml
    }}

The *package* of a file is the dotted key below which its keys are in a config: `selector` here.

Hydra composes the configs of runs. This file answers two questions, the first one faster than
Hydra, which cannot answer the second: which keys does a choice add to a config, and which choices
have a key? Error messages, lists of choices and the fast composition of sweeps (overlay.py) use the
answers. For shipped choices they equal Hydra's: tests/test_choice_files.py compares keys, and
tests/test_overlay.py whole configs.

Three rare kinds of entries are ignored here, although Hydra composes them: a choice with a package
(`gpfl@elsewhere`), several choices of one group, and interpolations. Only files of users have them;
messages and lists then lack the keys that they add.
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
    """The file of a choice, together with its bases.

    The example is conf/selector/mine.yaml at the head of this module.

    - `group`, `name`, `path`, `text`: `selector`, `mine`, and the file with its content.
    - `package`: the dotted key below which its keys are in a config, `selector`.
    - `own_values`: its keys with their values, `{"metric": "dot"}`.
    - `values`: these, merged with the `values` of the bases that have the same package.
    - `entries`: its defaults list, `["gpfl", {"override exploration": "fixed"}, "_self_"]`.
    - `included`: the choices of other groups in its defaults list and in those of its bases, by
      group: `{"selector/exploration": "fixed"}`. `ChoiceFiles.all_included` adds what these choices
      include.
    - `bases`: the files of its bases, here gpfl.yaml.
    """

    group: str
    name: str
    path: Path
    text: str
    package: str
    own_values: Mapping[str, Any]
    values: Mapping[str, Any]
    entries: Sequence[Any]
    included: Mapping[str, str]
    bases: "Sequence[ChoiceFile]"


class ChoiceFiles:
    """The choices in `folders`, which are conf/ and perhaps that of --config-dir.

    If several folders have a choice, the first folder's is taken.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = tuple(folders)
        self._files: dict[tuple[str, str], ChoiceFile] = {}

    @cached_property
    def groups(self) -> list[str]:
        """The names of all groups, such as `selector` and `selector/sketch`, sorted."""
        groups = set()
        for folder in self.folders:
            for path in folder.rglob("*.yaml"):
                inside = path.relative_to(folder)
                if not any(part.startswith(".") for part in inside.parts):  # none is hidden
                    groups.add(inside.parent.as_posix())
        return sorted(groups - {"."})

    @cached_property
    def choices_by_key(self) -> dict[str, dict[str, list[str]]]:
        """The names of the choices that have a key, by the dotted key and then by the group.

        For example, `choices_by_key["selector.metric"]["selector"]` is the list of selectors with
        this key. gpfl.yaml includes a choice of `selector/exploration`. The keys of this choice,
        such as `selector.exploration.rho`, are keys of gpfl. `selector.exploration` itself is not,
        because it is a group.
        """
        choices: dict[str, dict[str, list[str]]] = {}
        for group in self.groups:
            for name in self.names(group):
                for key in self._keys_of(group, name):
                    choices.setdefault(key, {}).setdefault(group, []).append(name)
        return choices

    def _keys_of(self, group: str, name: str) -> list[str]:
        """Return the dotted keys of a choice below its group; none if the file cannot be read."""
        try:
            included = self.all_included(group, name)
            config = self.config(group, name)
        except ConfigError:  # fedsim reports it when the user takes this choice
            return []
        prefix = f"{group}/"
        keys = []
        for key in all_keys(config):
            path = key.replace(".", "/")
            if path.startswith(prefix) and path not in included:
                keys.append(key)
        return keys

    def names(self, group: str) -> list[str]:
        """Return the choices of a group, sorted. Hidden files, which editors make, are none."""
        names: set[str] = set()
        for folder in self.folders:
            for path in (folder / group).glob("[!.]*.yaml"):
                if path.is_file():  # not a link that leads nowhere
                    names.add(path.stem)
        return sorted(names)

    def has(self, group: str, name: str) -> bool:
        """Return whether a group has the choice `name`."""
        return (group, name) in self._files or self._path(group, name) is not None

    def also_called(self, group: str, word: str) -> dict[str, str]:
        """Return the choices that the literature calls `word`, each with its file's first sentence.

        The field `also` at the head of a file has the names that the literature uses.
        """
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
        """Return the defaults list in the `content` of a file of `group`; [] if it has none.

        In entries `group: name`, fedsim's spelling replaces the name (see `meant`). Entries without
        a group, such as bases, stay as they are.
        """
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

    def read(self, group: str, name: str, derived: Sequence[str] = ()) -> ChoiceFile:
        """Return the choice `name`, which its group must have (see `has`).

        `derived` is for the recursion: choices that are being read, each of which has the next one
        as a base. The last of them has this one as a base.
        Raises `ConfigError` if this file or a base cannot be read, or if a choice is its own base.
        A base that does not exist is skipped: Hydra reports it.
        """
        if (group, name) in self._files:
            return self._files[group, name]
        path = self._path(group, name)
        assert path is not None, f"conf/{group}/ has no {name}"
        text = read_text(path)
        content = parse_yaml(path, text)
        package = package_of(text, group)
        entries = self.defaults(content, group)
        own_values = {str(key): value for key, value in content.items() if key != "defaults"}

        bases = self._bases(group, entries, path, [*derived, name])
        values: dict[str, Any] = {}
        included_by_bases: dict[str, str] = {}
        included: dict[str, str] = {}
        for other_group, choice in included_choices(entries, group):
            if choice == "_self_":
                values = merge(values, own_values)
            elif other_group != group:
                included[other_group] = choice
            elif choice in bases:
                base = bases[choice]
                included_by_bases.update(base.included)
                if base.package == package:
                    values = merge(values, base.values)
        file = ChoiceFile(
            group=group,
            name=name,
            path=path,
            text=text,
            package=package,
            own_values=own_values,
            values=values,
            entries=entries,
            included=included_by_bases | included,
            bases=list(bases.values()),
        )
        self._files[group, name] = file
        return file

    def _bases(
        self, group: str, entries: Sequence[Any], path: Path, chain: Sequence[str]
    ) -> dict[str, ChoiceFile]:
        """Return the bases in the defaults list `entries` of the file `path`, by name.

        `chain` has the choices that are being read, each of which has the next one as a base. The
        last of them is the choice of this file. Raises `ConfigError`.
        """
        bases: dict[str, ChoiceFile] = {}
        for other_group, choice in included_choices(entries, group):
            if other_group != group or choice == "_self_":
                continue
            if choice in chain:
                circle = [*chain[chain.index(choice) :], choice]
                text = f"is its own base: {' -> '.join(circle)}"
                remedy = "leave one of them out of a defaults list"
                raise ConfigError([Problem(str(path), ..., text, remedy)])
            if self.has(group, choice):
                bases[choice] = self.read(group, choice, chain)
        return bases

    def all_included(self, group: str, name: str) -> dict[str, str]:
        """Return what a choice includes in other groups, directly or not, by group.

        If several files include a choice of the same group, the outer file's counts.
        """
        choices: dict[str, str] = {}
        to_read = [(group, name)]
        while to_read:
            file = self.read(*to_read.pop())
            for other_group, choice in file.included.items():
                if other_group not in choices and self.has(other_group, choice):
                    choices[other_group] = choice
                    to_read.append((other_group, choice))
        return choices

    def config(self, group: str, name: str) -> dict[str, Any]:
        """Return everything that a choice, with all that it includes, adds to a config.

        The keys are nested from the top level, as in the example at the head of this module.
        """
        config: dict[str, Any] = {}
        included = self.all_included(group, name)
        for file in self._files_to_merge(group, name, included, set()):
            config = merge(config, nest(file.own_values, file.package))
        return config

    def _files_to_merge(
        self, group: str, name: str, included: Mapping[str, str], done: set[str]
    ) -> Iterator[ChoiceFile]:
        """Yield the files of a choice and of all that it includes in Hydra's order: the own values
        of a later file win.

        For the example at the head of this module, these are exploration/fixed.yaml, gpfl.yaml and
        mine.yaml. A file stands where its defaults list has `_self_`. All that another entry
        includes stands where this entry is. A group has one choice, that in `included`, and it
        stands at the first entry about the group. So an `override` takes the place of the entry
        that it overrides, which comes earlier. `done` has the groups whose choice has been yielded;
        this method extends it.
        """
        file = self.read(group, name)
        for other_group, choice in included_choices(file.entries, group):
            if choice == "_self_":
                yield file
            elif other_group == group:
                if self.has(group, choice):
                    yield from self._files_to_merge(group, choice, included, done)
            elif other_group in included and other_group not in done:
                done.add(other_group)
                choice = included[other_group]
                yield from self._files_to_merge(other_group, choice, included, done)

    def _path(self, group: str, name: str) -> Path | None:
        """Return the file of a choice; None if there is none inside the folders."""
        # A name from the command line must not lead out of the folders. In pathlib,
        # `folder / "/etc/x"` is /etc/x.
        is_absolute = group.startswith("/") or name.startswith("/")
        if is_absolute or ".." in f"{group}/{name}".split("/"):
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
    """Yield group and name of each choice that the defaults list of a file of `group` includes.

    For the example at the head of this module, these are `selector`, `gpfl`; then
    `selector/exploration`, `fixed`; then `selector`, `_self_`. The name `_self_` stands for the
    file's own keys. As in Hydra, they come last if it is not listed. Entries that are not supported
    are skipped (see the head of this module).
    """
    has_self = False
    for entry in entries:
        if isinstance(entry, str) and "@" not in entry:
            other_group, _, name = _from_top(entry, group).rpartition("/")
            has_self |= name == "_self_"
            yield other_group, name
        elif isinstance(entry, dict) and len(entry) == 1:
            ((key, name),) = entry.items()
            if isinstance(name, str) and "@" not in str(key):
                yield _group_of_entry(key, group), name
    if not has_self:
        yield group, "_self_"


def _group_of_entry(key: Any, group: str) -> str:
    """Return the group of an entry `key: name` in a file of `group`.

    Examples for the group selector: `/model` is model, `exploration` is selector/exploration, and
    `override /selector` is selector.
    """
    return _from_top(str(key).split(" ")[-1], group)


def _from_top(path: str, group: str) -> str:
    """Return a path in a defaults list of `group` as it reads from the top level, without a slash
    in front: `/x` is x, and `x` is group/x."""
    if path.startswith("/"):
        return path.removeprefix("/")
    return f"{group}/{path}".lstrip("/")
