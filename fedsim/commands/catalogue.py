"""Groups of the config and the choices in them, from the shipped conf/ and the user's own folder of configs.

What a choice is, is said by the comments of its file and by the source code of its class, which is read without
importing it: an import runs a module, and takes time. Launchers without a file are those of Hydra and its plugins.
"""

import ast
import inspect
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fedsim
from fedsim.config.choice_files import ChoiceFile, ChoiceFiles
from fedsim.core.configs import flat
from fedsim.core.disk import conf_dir
from fedsim.core.errors import ConfigError, Problem

FIELD = re.compile(r"#\s{2,}([a-z]+(?: [a-z]+)?):\s+(\S.*)")
CONTINUED = re.compile(r"#\s{4,}(\S.*)")
KEY = re.compile(r"(\w+):(.*)")
ENTRY = re.compile(r"\s*(?:#\s*)?-\s+(?:override\s+)?/?([\w/]+):\s*[\w.-]+(.*)")


@dataclass(frozen=True)
class Head:
    """The comment at the head of a file: its `text` in one line, and its fields by name."""

    text: str
    fields: Mapping[str, str]

    @property
    def idea(self) -> str:
        """The first sentence."""
        return re.split(r"(?<=[.!?])\s+(?=[A-Z])", self.text, maxsplit=1)[0]


def head_of(text: str) -> Head:
    """The comment with which the YAML file `text` begins, without what is addressed to Hydra (`# @package`)."""
    prose: list[str] = []
    fields: dict[str, str] = {}
    last = ""
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        if line.startswith("# @"):
            continue
        if found := FIELD.fullmatch(line):
            last = found[1]
            fields[last] = found[2].strip()
        elif last and (more := CONTINUED.fullmatch(line)):
            fields[last] += f" {more[1].strip()}"
        else:
            prose.append(line.lstrip("# ").strip())
    return Head(" ".join(filter(None, prose)), fields)


def comments_of_keys(text: str) -> dict[str, str]:
    """The comment behind each top-level key of the YAML file `text`; lines of nothing but comment continue it."""
    return dict(_with_continuations(text.splitlines(), KEY))


def comments_of_groups(text: str) -> dict[str, str]:
    """The comment behind each group of the defaults list of the YAML file `text`."""
    found = re.search(r"^defaults:\s*\n((?:[ \t]+.*\n|\s*\n)*)", text + "\n", re.MULTILINE)
    return dict(_with_continuations(found[1].splitlines(), ENTRY)) if found else {}


def _with_continuations(lines: Sequence[str], pattern: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """Names that `pattern` finds at the beginning of lines, with the comments behind them."""
    name, comment = "", ""
    for line in lines:
        if found := pattern.fullmatch(line):
            if name:
                yield name, comment
            name, comment = found[1], found[2].partition(" #")[2].strip()
        elif name and comment and re.fullmatch(r"\s{8,}#.*", line):
            comment += f" {line.strip('# ')}"
        elif name:
            yield name, comment
            name = ""
    if name:
        yield name, comment


GROUP = "hydra/launcher"
IDEAS = {
    "basic": "Hydra's own: the jobs one after another, in this process.",
    "joblib": "The jobs of a sweep in several processes of this machine, by joblib.",
    "submitit_local": "The jobs of a sweep as tasks of submitit on this machine: docs/clusters.md.",
    "submitit_slurm": "The jobs of a sweep as tasks of Slurm, by submitit: docs/clusters.md.",
}


def _registered() -> Mapping[str, Any]:
    """The launchers that Hydra and its plugins register, by name."""
    from hydra.core.config_store import ConfigStore

    from fedsim.config.words import plugins

    plugins()
    found = ConfigStore.instance().repo.get("hydra", {}).get("launcher", {})
    return {name.removesuffix(".yaml"): entry.node for name, entry in found.items()}


def with_extra(known: Collection[str]) -> dict[str, str]:
    """The launchers that are not installed, and the extra of this package that each comes with."""
    from fedsim.config.suggestions import LAUNCHERS

    return {
        name: extra
        for name, extra in sorted(LAUNCHERS.items())
        if name not in known or (name == "ray" and find_spec(name) is None)  # whose file is in conf/
    }


def _as_file(name: str, node: Any) -> ChoiceFile:
    from omegaconf import OmegaConf

    content: Any = OmegaConf.to_container(OmegaConf.create(OmegaConf.structured(node)), resolve=False)
    values = {str(key): value for key, value in content.items() if key != "defaults"}
    text = f"# {IDEAS.get(name) or _idea(str(values.get('_target_')))}\n"
    return ChoiceFile(GROUP, name, Path(), text, GROUP.replace("/", "."), values, {})


def _idea(target: str) -> str:
    """The first line of its class's docstring, if that can be found."""
    code = described(target)
    parts = [part for part in target.split(".")[:-1] if part != "hydra_plugins"]
    return code.summary if code is not None and code.summary else f"By Hydra's plugin {parts[0] if parts else target}."


def size_of(sweeps: Mapping[str, Any]) -> dict[str, int]:
    """The number of values of each key, as in `seed: range(5)` or `selector: random,gpfl`."""
    return {key: _count(str(value)) for key, value in sweeps.items()}


def _count(value: str) -> int:
    if found := re.fullmatch(r"range\((-?\d+)(?:,(-?\d+))?(?:,(-?\d+))?\)", value.replace(" ", "")):
        return len(range(*(int(number) for number in found.groups() if number is not None)))
    depth, commas = 0, 0
    for character in value:
        depth += (character in "([{") - (character in ")]}")
        commas += character == "," and depth == 0
    return commas + 1


@dataclass(frozen=True)
class Described:
    """The docstring of a class, that of its module, and the signals in its `needs`, if the class lists them."""

    docstring: str
    of_module: str
    needs: tuple[str, ...] | None

    @property
    def summary(self) -> str:
        """The first paragraph of the docstring in one line."""
        return " ".join(self.docstring.partition("\n\n")[0].split())


def described(target: str) -> Described | None:
    """What the code of the class with the dotted path `target` says; None where it cannot be found or read."""
    module, _, name = target.rpartition(".")
    path = _file_of(module)
    tree = None if path is None else _tree(path)
    body = tree.body if tree else []
    found = next((n for n in body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == name), None)
    if tree is None or found is None:
        return None
    return Described(_docstring(found), _docstring(tree), _needs(found))


def _file_of(module: str) -> Path | None:
    """The source file of a module, in fedsim or on Python's path."""
    parts = Path(*module.split(".")) if module else Path()
    inside_fedsim = module.split(".")[0] == "fedsim"
    folders = [Path(fedsim.__file__).parents[1]] if inside_fedsim else [Path.cwd(), *map(Path, filter(None, sys.path))]
    places = (
        place for folder in folders for place in (folder / parts.with_suffix(".py"), folder / parts / "__init__.py")
    )
    return next((place for place in places if module and place.is_file()), None)


@cache
def _tree(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> str:
    return inspect.cleandoc(ast.get_docstring(node, clean=False) or "")


def _needs(node: ast.ClassDef | ast.FunctionDef) -> tuple[str, ...] | None:
    """The signals of `needs = frozenset({Signal.LOSSES, ...})` in the body of a class; None without such a line."""
    for line in node.body:
        text = ast.unparse(line) if isinstance(line, ast.Assign) else ""
        if text.startswith("needs = "):
            return tuple(sorted(set(map(str.lower, re.findall(r"\bSignal\.(\w+)", text)))))
    return None


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
        values = {k: v for k, v in self.values.items() if k not in ("_target_", "hydra", "small")}
        shown = values if self.package else dict(flat(values))
        return [Parameter(f"{self.package}.{k}".lstrip("."), v, self._comment(k)) for k, v in shown.items()]

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
        place = {group: number for number, group in enumerate(self._abouts)}
        return sorted(self._files.groups, key=lambda name: (place.get(name.partition("/")[0], len(place)), name))

    def group(self, name: str, *, plugins: bool = True) -> Group:
        """The group `name`, with all its choices; without `plugins`, for which Hydra is imported, those of files."""
        choices = {choice: self.choice(name, choice) for choice in self._files.names(name)}
        if not plugins or name != GROUP:
            return Group(name, self.about(name), choices)
        choices = {**{name: _choice(_as_file(name, node)) for name, node in _registered().items()}, **choices}
        return Group(name, self.about(name), dict(sorted(choices.items())), with_extra(choices))

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
