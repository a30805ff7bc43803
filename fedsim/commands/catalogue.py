"""The config groups and the choices in them, from the shipped conf/ and the user's folder of
configs.

Comments in the file of a choice, and the docstring of its class, describe it. The docstring is read
from the source code, because importing a module runs it and takes time.
"""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fedsim.config.choice_files import ChoiceFile, ChoiceFiles
from fedsim.config.yaml_files import first_sentence, head_of
from fedsim.core.configs import leaves
from fedsim.core.declared_signals import declared_signals, tree_of
from fedsim.core.disk import conf_dir
from fedsim.core.errors import ConfigError, Problem
from fedsim.core.server_data import server_data, server_sees

COMMENT = r".*?(?: #(.*(?:\n\s{8,}#.*)*))?$"
"""The comment after a key, to the end of its line, and comments on the lines below it."""
KEY = re.compile(rf"^(\w+):{COMMENT}", re.MULTILINE)
"""A top-level key of a YAML file."""
GROUP = re.compile(
    rf"^\s*(?:#\s*)?-\s+(?:override\s+)?/?([\w/]+):\s*[\w.-]+{COMMENT}", re.MULTILINE
)
"""An entry of a defaults list."""
INHERITED = ("source", "asks", "bytes", "samples", "needs")
"""Fields that a choice has from the one that it builds on."""


def comments(text: str, pattern: re.Pattern[str]) -> dict[str, str]:
    """Return the comments in a YAML file after its keys (`KEY`), or after its `GROUP` entries."""
    texts: dict[str, str] = {}
    for name, lines in pattern.findall(text):
        comment = " ".join(line.strip("# ") for line in lines.splitlines())
        if comment:
            texts[name] = comment
    return texts


def docstring_of(target: str) -> str:
    """Return the docstring of the class with this dotted path, which is not imported.

    The docstring of a selector's module comes first: it explains the method. The result is empty if
    the class cannot be read.
    """
    module, _, name = target.rpartition(".")
    statements = tree_of(module)
    docstrings = []
    if module.startswith("fedsim.selectors."):
        docstrings.append(ast.get_docstring(ast.Module(statements, type_ignores=[])))
    for node in statements:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            docstrings.append(ast.get_docstring(node))
    return "\n\n".join(filter(None, docstrings))


@dataclass(frozen=True)
class Choice:
    """A file of a config group.

    `base`: the choice of the same group that it builds on, if any. `text` and `fields`: what the
    comment at the head of the file says. A selector has the fields `server`, the samples that its
    class needs at the server, and `sees`, what the server must see of single clients. `comments`:
    those after its keys and after its base's keys.
    """

    file: ChoiceFile
    base: "Choice | None"
    text: str
    fields: Mapping[str, str]
    comments: Mapping[str, str] = field(repr=False)

    @classmethod
    def of(cls, file: ChoiceFile) -> "Choice":
        base = cls.of(file.bases[-1]) if file.bases else None
        text, own_fields = head_of(file.text)
        fields: dict[str, str] = {}
        all_comments: dict[str, str] = {}
        if base is not None:
            fields = {key: base.fields[key] for key in INHERITED if key in base.fields}
            all_comments.update(base.comments)
        fields.update(own_fields)
        if "asks" in fields:
            signals = declared_signals(file.values)
            fields["server"] = server_data(signals)
            fields["sees"] = server_sees(signals)
        all_comments.update(comments(file.text, KEY))
        return cls(file, base, text, fields, all_comments)

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def bases(self) -> list[str]:
        """The names of the choices that it builds on, directly or not."""
        return [] if self.base is None else [self.base.name, *self.base.bases]

    @property
    def target(self) -> str:
        """The dotted path of its class; "" if it has none."""
        target = self.file.values.get("_target_")
        return target if isinstance(target, str) else ""

    @cached_property
    def docstring(self) -> str:
        return docstring_of(self.target)

    @property
    def idea(self) -> str:
        """The first sentence at the head of the file, or of its class's docstring."""
        paragraph = self.docstring.partition("\n\n")[0]
        return first_sentence(self.text or " ".join(paragraph.split()))

    @property
    def values(self) -> list[tuple[str, Any, str]]:
        """The keys that it sets, as on the command line, each with its value and its comment.

        In a preset, a mapping counts as several keys.
        """
        values = dict(self.file.values)
        for key in ("_target_", "hydra", "small"):
            values.pop(key, None)
        package = self.file.package
        pairs = values.items() if package else leaves(values)
        prefix = f"{package}." if package else ""
        return [(f"{prefix}{key}", value, self.comments.get(key, "")) for key, value in pairs]

    @property
    def small(self) -> Mapping[str, Any]:
        """The values that `scale=small` changes."""
        return self._mapping("small")

    @property
    def sweeps(self) -> Mapping[str, Any]:
        """The values that it sweeps over."""
        return self._mapping("hydra", "sweeper", "params")

    def _mapping(self, *keys: str) -> Mapping[str, Any]:
        node: Any = self.file.values
        for key in keys:
            node = node.get(key) if isinstance(node, Mapping) else None
        return node if isinstance(node, Mapping) else {}


@dataclass(frozen=True)
class Group:
    """A folder of configs: its name, such as `selector/threshold`, its purpose, and its choices."""

    name: str
    about: str
    choices: Mapping[str, Choice]

    def builds_on(self, name: str) -> list[Choice]:
        """Return the choices that build on the choice `name`, directly or not."""
        return [choice for choice in self.choices.values() if name in choice.bases]


class Catalogue:
    """All groups in conf/ and in `config_dir`, the user's folder of configs."""

    def __init__(self, config_dir: Path | None = None) -> None:
        folders = [conf_dir()]
        if config_dir is not None:
            if not config_dir.is_dir():
                text = "must be an existing folder"
                raise ConfigError([Problem("--config-dir", str(config_dir), text)])
            folders.append(config_dir.resolve())
        self.files = ChoiceFiles(folders)
        config = (conf_dir() / "config.yaml").read_text(encoding="utf-8")
        self._abouts = comments(config, GROUP)

    @cached_property
    def names(self) -> list[str]:
        """The names of the groups in the order of config.yaml, each followed by those inside of
        it."""
        order = list(self._abouts)

        def place(name: str) -> tuple[int, str]:
            top = name.partition("/")[0]
            return (order.index(top) if top in order else len(order), name)

        return sorted(self.files.groups, key=place)

    def group(self, name: str) -> Group:
        """Return the group `name` with all its choices.

        Raises `ConfigError` if a file cannot be read.
        """
        names = self.files.names(name)
        choices = {choice: Choice.of(self.files.read(name, choice)) for choice in names}
        return Group(name, self.about(name), choices)

    def about(self, name: str) -> str:
        """Return what is chosen in a group; "" if no defaults list that names it says so."""
        if name in self._abouts:
            return self._abouts[name]
        parent, _, leaf = name.rpartition("/")
        for choice in self.files.names(parent) if parent else []:
            text = comments(self.files.read(parent, choice).text, GROUP).get(leaf)
            if text:
                return text
        return ""
