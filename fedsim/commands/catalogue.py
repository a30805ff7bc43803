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
from fedsim.core.errors import check, rule
from fedsim.core.server_data import server_data, server_sees

COMMENT = r".*?(?: #(.*(?:\n\s{8,}#.*)*))?$"
"""The rest of a line with its comment. Lines that continue the comment begin with 8 blanks or more.
"""
KEY = re.compile(rf"^(\w+):{COMMENT}", re.MULTILINE)
"""A top-level key of a YAML file: `lr: 0.1  # the learning rate of clients`."""
GROUP = re.compile(
    rf"^\s*(?:#\s*)?-\s+(?:override\s+)?/?([\w/]+):\s*[\w.-]+{COMMENT}", re.MULTILINE
)
"""An entry of a defaults list: `  - override /model: mlp  # the network that is trained`. An entry
that is commented out counts, too."""
INHERITED = ("source", "asks", "bytes", "samples", "needs")
"""Fields that a choice inherits from its base."""


def comments(text: str, pattern: re.Pattern[str]) -> dict[str, str]:
    """Return the comments in a YAML file by the names before them: keys (`KEY`) or groups
    (`GROUP`)."""
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
    """A choice of a config group: a file of the group's folder.

    Attributes:
        file: The file.
        base: The choice of the same group that the file builds on, if any.
        text: The prose of the comment at the head of the file.
        fields: The fields of this comment. A selector, whose head has the field `asks`, also has
            the fields `server`, the samples that its class needs at the server, and `sees`, what
            the server must see of single clients.
        comments: The comments after the keys of the file and of its base, by key.
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
        """The names of its base, of the base of this one, and so on."""
        return [] if self.base is None else [self.base.name, *self.base.bases]

    @property
    def target(self) -> str:
        """The dotted path of the choice's class; "" if it has none."""
        target = self.file.values.get("_target_")
        return target if isinstance(target, str) else ""

    @cached_property
    def docstring(self) -> str:
        return docstring_of(self.target)

    @property
    def idea(self) -> str:
        """The first sentence at the head of the file, or of the class's docstring."""
        paragraph = self.docstring.partition("\n\n")[0]
        return first_sentence(self.text or " ".join(paragraph.split()))

    @property
    def values(self) -> list[tuple[str, Any, str]]:
        """The keys of the file, as on the command line, each with its value and its comment.

        A file without a package, such as a preset, sets values anywhere in the config: its keys are
        the dotted ones of its leaves.
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
        """The values that a preset has with `scale=small`, by key."""
        return self._mapping("small")

    @property
    def sweeps(self) -> Mapping[str, Any]:
        """The values that a preset sweeps over, by key."""
        return self._mapping("hydra", "sweeper", "params")

    def _mapping(self, *keys: str) -> Mapping[str, Any]:
        node: Any = self.file.values
        for key in keys:
            node = node.get(key) if isinstance(node, Mapping) else None
        return node if isinstance(node, Mapping) else {}


@dataclass(frozen=True)
class Group:
    """A config group: its name, such as `selector/threshold`, what is chosen in it, and its choices
    by name."""

    name: str
    about: str
    choices: Mapping[str, Choice]

    def builds_on(self, name: str) -> list[Choice]:
        """Return the choices with the choice `name` among their bases."""
        return [choice for choice in self.choices.values() if name in choice.bases]


class Catalogue:
    """All groups in conf/ and in `config_dir`, the user's folder of configs."""

    def __init__(self, config_dir: Path | None = None) -> None:
        folders = [conf_dir()]
        if config_dir is not None:
            text = "must be an existing folder"
            check(rule(config_dir.is_dir(), "--config-dir", str(config_dir), text))
            folders.append(config_dir.resolve())
        self.files = ChoiceFiles(folders)
        config = (conf_dir() / "config.yaml").read_text(encoding="utf-8")
        self._abouts = comments(config, GROUP)

    @cached_property
    def names(self) -> list[str]:
        """The names of the groups: top-level ones in the order of config.yaml, and then others.

        The groups in the folder of a group come after it.
        """
        places = {name: place for place, name in enumerate(self._abouts)}
        groups = sorted(self.files.groups)
        return sorted(groups, key=lambda name: places.get(name.partition("/")[0], len(places)))

    def group(self, name: str) -> Group:
        """Return the group `name` with all its choices.

        Raises `ConfigError` if a file cannot be read.
        """
        names = self.files.names(name)
        choices = {choice: Choice.of(self.files.read(name, choice)) for choice in names}
        return Group(name, self.about(name), choices)

    def about(self, name: str) -> str:
        """Return what is chosen in a group, from the comment on it in a defaults list.

        The list is that of config.yaml, or of a choice in the group around this one. The result is
        "" if no list has such a comment.
        """
        if name in self._abouts:
            return self._abouts[name]
        parent, _, leaf = name.rpartition("/")
        choices = self.files.names(parent) if parent else []
        for choice in choices:
            abouts = comments(self.files.read(parent, choice).text, GROUP)
            if leaf in abouts:
                return abouts[leaf]
        return ""
