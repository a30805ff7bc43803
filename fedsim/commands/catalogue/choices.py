"""Groups of the config and the choices in them, from the shipped conf/ and the user's own folder of configs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fedsim.commands.catalogue import launchers
from fedsim.commands.catalogue.code import Described, described
from fedsim.commands.catalogue.comments import Head, comments_of_groups, comments_of_keys, head_of
from fedsim.config.choice_files import ChoiceFile, ChoiceFiles
from fedsim.config.nested import flat
from fedsim.config.shipped import conf_dir
from fedsim.errors import ConfigError, Problem

INHERITED = ("source", "asks", "bytes", "samples", "needs")
"""Fields that a choice has from the one that it builds on: where a method is from, what it asks of clients, its costs,
and keys that it needs. Others, such as the command of a paper's experiment, are its own."""


@dataclass(frozen=True)
class Parameter:
    """A key that a choice sets (as on the command line: `selector.p`), its value, and the comment behind it."""

    name: str
    value: Any
    comment: str


@dataclass(frozen=True)
class Choice:
    """A file of a config group, with its comments. `base`: the choice of the same group that it builds on, if any."""

    file: ChoiceFile
    head: Head
    base: "Choice | None"
    comments: Mapping[str, str] = field(repr=False)

    @property
    def group(self) -> str:
        return self.file.group

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def package(self) -> str:
        """What its keys are prefixed with on the command line."""
        return self.file.package

    @property
    def target(self) -> str | None:
        """The class that it names."""
        found = self.values.get("_target_")
        return found if isinstance(found, str) else None

    @property
    def values(self) -> Mapping[str, Any]:
        """All its top-level keys, those of its base among them."""
        return self.file.values

    @cached_property
    def fields(self) -> Mapping[str, str]:
        """The fields at its head; those that a method does not give are its base's."""
        inherited = self.base.fields if self.base else {}
        return {**{k: v for k, v in inherited.items() if k in INHERITED}, **self.head.fields}

    @property
    def subgroups(self) -> Mapping[str, str]:
        """The choices that it makes in other groups, by group."""
        return self.file.subgroups

    @cached_property
    def code(self) -> Described | None:
        """What the source code of its class says, if that can be found."""
        return described(self.target) if self.target else None

    @property
    def idea(self) -> str:
        """One sentence: the first at the head of the file, else of its class's docstring."""
        return self.head.idea or (head_of(f"# {self.code.summary}").idea if self.code else "")

    @cached_property
    def parameters(self) -> list[Parameter]:
        """The values that it sets; a mapping in one of a paper's experiments counts as several."""
        nested = not self.package
        values = {k: v for k, v in self.values.items() if k not in ("_target_", "hydra", "small")}
        shown = dict(flat(values)) if nested else values
        return [Parameter(_join(self.package, k), v, self._comment(k)) for k, v in shown.items()]

    @property
    def sweeps(self) -> Mapping[str, Any]:
        """What it sweeps over by itself, by key."""
        return self._mapping("hydra", "sweeper", "params")

    @property
    def small(self) -> Mapping[str, Any]:
        """What `scale=small` changes in it, by key."""
        return self._mapping("small")

    def _mapping(self, *keys: str) -> Mapping[str, Any]:
        found: Any = self.values
        for key in keys:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found if isinstance(found, Mapping) else {}

    def _comment(self, key: str) -> str:
        """The comment behind a key; of a base's key, that of the base."""
        return self.comments.get(key) or (self.base._comment(key) if self.base else "")


@dataclass(frozen=True)
class Group:
    """A folder of configs: its name (`selector/threshold`, say), what is chosen in it, and its choices by name.

    `with_extra`: choices that are not installed, and the extra of this package that each comes with.
    """

    name: str
    about: str
    choices: Mapping[str, Choice]
    with_extra: Mapping[str, str] = field(default_factory=dict)

    def builds_on(self, name: str) -> list[Choice]:
        """Choices that build on the choice `name`, directly or not."""
        return [c for c in self.choices.values() if any(base.name == name for base in _bases(c))]


def _bases(choice: Choice) -> Iterator[Choice]:
    while choice.base is not None:
        choice = choice.base
        yield choice


class Catalogue:
    """All groups. `folders`: those with configs, the shipped one first; the first that has a choice is taken."""

    def __init__(self, own: Path | None = None) -> None:
        if own is not None and not own.is_dir():
            raise ConfigError([Problem("--config-dir", str(own), "must be an existing folder")])
        self._files = ChoiceFiles([conf_dir(), *([own.resolve()] if own else [])])

    @cached_property
    def names(self) -> list[str]:
        """Names of the groups: those of the primary config in its order, each with the groups inside of it, then
        others."""
        order = list(self._abouts)
        return sorted(self._files.groups, key=lambda name: (_place(order, name.partition("/")[0]), name))

    def group(self, name: str, *, plugins: bool = True) -> Group:
        """The group `name`, with all its choices; without `plugins`, for which Hydra is imported, those of files."""
        choices = {choice: self.choice(name, choice) for choice in self._files.names(name)}
        if not plugins or name != launchers.GROUP:
            return Group(name, self.about(name), choices)
        choices = {**{name: _choice(file) for name, file in launchers.of_hydra().items()}, **choices}
        return Group(name, self.about(name), dict(sorted(choices.items())), launchers.with_extra(choices))

    def about(self, name: str) -> str:
        """What is chosen in the group `name`; empty if no defaults list that names it says so."""
        return self._abouts.get(name, "") or next(filter(None, self._abouts_in_choices(name)), "")

    def choice(self, group: str, name: str) -> Choice:
        """The choice `name` of a group. Raises `ConfigError` where its file cannot be read."""
        return _choice(self._files.read(group, name))

    @cached_property
    def _abouts(self) -> dict[str, str]:
        """What the primary config says of each group."""
        return comments_of_groups((conf_dir() / "config.yaml").read_text(encoding="utf-8"))

    def _abouts_in_choices(self, name: str) -> Iterator[str]:
        """What the choices of the group above say of the group `name`."""
        parent, _, leaf = name.rpartition("/")
        for above in self._files.names(parent) if parent else []:
            yield comments_of_groups(self._files.read(parent, above).text).get(leaf, "")


def _choice(file: ChoiceFile) -> Choice:
    base = _choice(file.bases[-1]) if file.bases else None
    return Choice(file, head_of(file.text), base, comments_of_keys(file.text))


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def _place(order: Sequence[str], name: str) -> int:
    return order.index(name) if name in order else len(order)
