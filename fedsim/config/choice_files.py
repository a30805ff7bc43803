"""The files of choices, conf/<group>/<choice>.yaml and those of --config-dir, with what their
defaults lists add.

They are read one by one, without Hydra, which takes time, and nothing in them is run. What a
defaults list puts at a place of its own (`gpfl@elsewhere`), several choices of one group, and
interpolations in a list are left out.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar

import yaml

from fedsim.core.configs import YAML_LOADER, all_keys, merge, nest
from fedsim.core.errors import ConfigError, Problem, check, rule

MAX_NAME = 200
"""Characters of a choice."""
PACKAGE = re.compile(r"(?:\s*#\s*@.*\n|\s*\n)*\s*#\s*@package[ \t]+(\S+)")
"""The comment at the head of a file that says where in a config its keys are."""
FIELD = re.compile(r"#\s{2,}([a-z]+(?: [a-z]+)?):\s+(\S.*)")
CONTINUED = re.compile(r"#\s{4,}(\S.*)")


class Loader(YAML_LOADER):  # type: ignore[misc]
    """Reads a plain value as the command line does: `010`, `1:30`, `0x1F`, `on` and dates are
    texts. YAML 1.1 makes other numbers, truth values and dates of them."""

    yaml_implicit_resolvers: ClassVar[dict[Any, Any]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                text = f"is there twice, in lines {lines[name]} and {line}"
                raise ConfigError([Problem(name, ..., text, "leave one of them out")])
            lines[name] = line
        content: dict[Any, Any] = super().construct_mapping(node, deep)
        return content


DIGITS = r"(?:0|[1-9](?:_?\d)*)"
POINT = rf"{DIGITS}\.|{DIGITS}?\.\d(?:_?\d)*"
for tag, pattern in {
    "null": "~|null|",
    "bool": "true|false",
    "int": rf"[+-]?{DIGITS}",
    "float": rf"[+-]?(?:{POINT}|(?:{DIGITS}|{POINT})e[+-]?\d(?:_?\d)*|\.?inf)|\.?nan",
    "merge": "<<",
}.items():
    Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{tag}", re.compile(rf"(?i:{pattern})\Z", re.ASCII), None
    )


def read_text(path: Path) -> str:
    """The text of a YAML file. Raises `ConfigError` where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(str(path), ..., f"cannot be read ({error})")]) from error


def _no_yaml(path: Path, error: Exception) -> ConfigError:
    mark = getattr(error, "problem_mark", None)
    place = f" in line {mark.line + 1}" if mark else ""
    text = getattr(error, "problem", None) or " ".join(str(error).split())[:300]
    return ConfigError([Problem(str(path), ..., f"is not YAML{place}: {text}")])


@lru_cache(maxsize=1024)
def parsed(path: Path, text: str) -> dict[Any, Any]:
    """The keys of a file. Raises `ConfigError` where it is no mapping."""
    try:
        content = yaml.load(text, Loader) or {}
    except ConfigError as error:
        raise ConfigError(replace(p, key=f"{path}: {p.key}") for p in error.problems) from error
    except (
        yaml.YAMLError,
        ValueError,
        RecursionError,
    ) as error:  # a `!!timestamp` that there is not, for example
        raise _no_yaml(path, error) from error
    check(rule(isinstance(content, dict), str(path), ..., "must be a mapping of keys to values"))
    return content


def head_of(text: str) -> tuple[str, dict[str, str]]:
    """The comment with which a YAML file begins: its prose in one line, and its fields (`source:
    ...`) by name."""
    prose: list[str] = []
    fields: dict[str, str] = {}
    last = ""
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        if line.startswith("# @"):  # addressed to Hydra
            continue
        if found := FIELD.fullmatch(line):
            last = found[1]
            fields[last] = found[2].strip()
        elif last and (more := CONTINUED.fullmatch(line)):
            fields[last] += f" {more[1].strip()}"
        else:
            prose.append(line.strip("# "))
    return " ".join(filter(None, prose)), fields


def first_sentence(text: str) -> str:
    return re.split(r"(?<=[.!?])\s+(?=[A-Z])", text, maxsplit=1)[0]


def spelt(name: str) -> str:
    """A name without what it may be typed with: capitals, and - for _."""
    return name.lower().replace("-", "_")


def other_names(fields: Mapping[str, str]) -> list[str]:
    """What the literature calls a choice, by the line `also:` at the head of its file."""
    return spelt(fields.get("also", "")).replace(",", " ").split()


def package_of(text: str, group: str) -> str:
    """The dotted key below which the keys of a file of `group` are: its own package or that of its
    group."""
    own = group.replace("/", ".")
    found = PACKAGE.match(text)
    return own if found is None else re.sub(r"_global_\.?", "", found[1].replace("_group_", own))


def choices_made(entries: Sequence[Any], group: str) -> Iterator[tuple[str, str]]:
    """The choices that a defaults list makes: group and name, or `group` and `_self_`."""
    for entry in entries:
        if isinstance(entry, str) and "@" not in entry:
            sub, _, name = _absolute(entry, group).rpartition("/")
            yield sub, name
        elif isinstance(entry, dict) and len(entry) == 1:
            ((key, name),) = entry.items()
            if isinstance(name, str) and "@" not in str(key):
                yield _group_at(key, group), name


def _group_at(key: Any, group: str) -> str:
    """The group of an entry of a defaults list, such as `override /selector`, in a file of
    `group`."""
    return _absolute(str(key).split(" ")[-1], group)


def _absolute(path: str, group: str) -> str:
    return (path if path.startswith("/") else f"{group}/{path}").lstrip("/")


@dataclass(frozen=True)
class ChoiceFile:
    """A file, with what it has from the choices of its group that it builds on, its `bases`.
    `package`: what its keys are prefixed with on the command line. `subgroups`: the choices that it
    makes in other groups."""

    group: str
    name: str
    path: Path
    text: str
    package: str
    values: Mapping[str, Any]
    entries: Sequence[Any]
    subgroups: Mapping[str, str]
    bases: "Sequence[ChoiceFile]" = ()


def no_package(file: ChoiceFile) -> Problem:
    """The problem of a file without the line that has its keys set at the top of the config."""
    text = f"has its keys below `{file.group}`, where none is known"
    return Problem(str(file.path), ..., text, "make `# @package _global_` its first line")


class ChoiceFiles:
    """The choices in `folders`, of which the first that has one is taken."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = tuple(folders)
        self._read: dict[tuple[str, str], ChoiceFile] = {}

    @cached_property
    def groups(self) -> list[str]:
        """Names of all groups: `selector`, `selector/sketch`."""
        files = [(folder, path) for folder in self.folders for path in folder.rglob("[!.]*.yaml")]
        return sorted(
            {
                path.parent.relative_to(folder).as_posix()
                for folder, path in files
                if path.parent != folder
            }
        )

    @cached_property
    def keys(self) -> dict[str, dict[str, list[str]]]:
        """The dotted keys below all groups, each with the choices whose configs have it, by group.
        A place for a group of choices is no key of the choice that makes one there."""
        found: dict[str, dict[str, list[str]]] = {}
        for group, name in [(one, name) for one in self.groups for name in self.names(one)]:
            try:
                made, config = self.made(group, name), self.config(group, name)
            except ConfigError:  # told where it is chosen
                continue
            for key in all_keys(config):
                if (
                    key.startswith(f"{group.replace('/', '.')}.")
                    and key.replace(".", "/") not in made
                ):
                    found.setdefault(key, {}).setdefault(group, []).append(name)
        return found

    def names(self, group: str) -> list[str]:
        return sorted(
            {path.stem for folder in self.folders for path in (folder / group).glob("*.yaml")}
        )

    def has(self, group: str, name: str) -> bool:
        return self._path(group, name) is not None

    def called(self, group: str, word: str) -> dict[str, str]:
        """The choices of a group that the literature calls `word`, each with the first sentence of
        its file."""
        heads = {
            name: head_of(read_text(path))
            for name in self.names(group)
            if (path := self._path(group, name))
        }
        return {
            n: first_sentence(text)
            for n, (text, fields) in heads.items()
            if spelt(word) in other_names(fields)
        }

    def meant(self, group: str, word: str) -> str:
        """The choice of a group that `word` names, in capitals or not, or that alone is also called
        so; else `word`."""
        if self.has(group, word):
            return word
        alike = [name for name in self.names(group) if spelt(name) == spelt(word)] or [
            *self.called(group, word)
        ]
        return alike[0] if len(alike) == 1 else word

    def defaults(self, content: Mapping[Any, Any], group: str) -> list[Any]:
        """The defaults list of a file of `group`, with the choices that its entries mean."""
        entries = content.get("defaults")
        meant: list[Any] = []
        for entry in entries if isinstance(entries, list) else []:
            pairs = entry.items() if isinstance(entry, dict) else ()
            names = {
                key: self.meant(_group_at(key, group), name)
                for key, name in pairs
                if isinstance(name, str)
            }
            meant.append(entry | names if names else entry)
        return meant

    def read(self, group: str, name: str, above: Sequence[str] = ()) -> ChoiceFile:
        """The choice `name` of a group. Raises `ConfigError` where its file or one that it builds
        on cannot be read. `above`: the choices that build on it, on which it does not build in
        turn."""
        if (group, name) in self._read:
            return self._read[group, name]
        path = self._path(group, name)
        assert path is not None, f"conf/{group}/ has no {name}"
        text = read_text(path)
        content = parsed(path, text)
        own = {str(key): value for key, value in content.items() if key != "defaults"}
        listed = self.defaults(content, group)
        entries = [*choices_made(listed, group)]
        values: dict[str, Any] = {}
        inherited: dict[str, str] = {}
        subgroups: dict[str, str] = {}
        bases: list[ChoiceFile] = []
        for sub, choice in (
            entries if (group, "_self_") in entries else [*entries, (group, "_self_")]
        ):
            if choice == "_self_":
                values = merge(values, own)
            elif sub != group:
                subgroups[sub] = choice
            elif choice not in (*above, name) and self.has(group, choice):
                bases.append(base := self.read(group, choice, [*above, name]))
                values, inherited = merge(values, base.values), {**inherited, **base.subgroups}
        made, package = {**inherited, **subgroups}, package_of(text, group)
        self._read[group, name] = ChoiceFile(
            group, name, path, text, package, values, listed, made, bases
        )
        return self._read[group, name]

    def made(self, group: str, name: str) -> dict[str, str]:
        """The choices that it makes in other groups, by group, and those that they make."""
        found: dict[str, str] = {}
        to_come = [(group, name)]
        while to_come:
            file = self.read(*to_come.pop())
            more = {
                sub: choice
                for sub, choice in file.subgroups.items()
                if sub not in found and self.has(sub, choice)
            }
            found |= more
            to_come += more.items()
        return found

    def config(self, group: str, name: str) -> dict[str, Any]:
        """All that it adds to a config, from the config's top: its values, and those of the choices
        that it makes."""
        found: dict[str, Any] = {}
        for one in [*self.made(group, name).items(), (group, name)]:
            file = self.read(*one)
            found = merge(found, nest(file.values, file.package))
        return found

    def _path(self, group: str, name: str) -> Path | None:
        if (
            group.startswith("/")
            or ".." in (*group.split("/"), *name.split("/"))
            or len(name) > MAX_NAME
        ):
            return (
                None  # a stranger's, which leads out of the folders or is longer than a file's name
            )
        return next(
            (p for folder in self.folders if (p := folder / group / f"{name}.yaml").is_file()), None
        )
