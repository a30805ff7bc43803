"""Groups of the config and the choices in them, from the shipped conf/ and the user's own folder of
configs.

What a choice is, is said by the comments of its file and by the docstring of its class, which is
read in the source code: an import runs a module, and takes time.
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
from fedsim.core.disk import conf_dir
from fedsim.core.errors import ConfigError, Problem
from fedsim.core.server_data import declared_signals, server_data, tree_of

COMMENT = r".*?(?: #(.*(?:\n\s{8,}#.*)*))?$"
"""Behind a key, to the end of its line and of those below that are nothing but comment."""
KEY = re.compile(rf"^(\w+):{COMMENT}", re.MULTILINE)
GROUP = re.compile(
    rf"^\s*(?:#\s*)?-\s+(?:override\s+)?/?([\w/]+):\s*[\w.-]+{COMMENT}", re.MULTILINE
)
"""An entry of a defaults list."""
INHERITED = ("source", "asks", "bytes", "samples", "needs")
"""Fields that a choice has from the one that it builds on."""


def comments(text: str, pattern: re.Pattern[str]) -> dict[str, str]:
    """The comments in a YAML file behind its top-level keys (`KEY`), or the groups of its defaults
    list (`GROUP`)."""
    found = {
        name: " ".join(line.strip("# ") for line in lines.splitlines())
        for name, lines in pattern.findall(text)
    }
    return {name: comment for name, comment in found.items() if comment}


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


SWEEPS = ("hydra", "sweeper", "params")


@dataclass(frozen=True)
class Choice:
    """A file of a config group. `base`: the choice of the same group that it builds on, if any.

    `text` and `fields`: what the comment at its head says, and for a selector, as `server`, which
    samples it needs at the server by what its class declares; `comments`: those behind its keys and
    its base's.
    """

    file: ChoiceFile
    base: "Choice | None"
    text: str
    fields: Mapping[str, str]
    comments: Mapping[str, str] = field(repr=False)

    @classmethod
    def of(cls, file: ChoiceFile) -> "Choice":
        base = cls.of(file.bases[-1]) if file.bases else None
        text, fields = head_of(file.text)
        above = (
            {}
            if base is None
            else {key: base.fields[key] for key in INHERITED if key in base.fields}
        )
        if "asks" in fields or "asks" in above:
            fields["server"] = server_data(declared_signals(file.values))
        told = {**(base.comments if base else {}), **comments(file.text, KEY)}
        return cls(file, base, text, {**above, **fields}, told)

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def bases(self) -> list[str]:
        return [] if self.base is None else [self.base.name, *self.base.bases]

    @property
    def target(self) -> str | None:
        found = self.file.values.get("_target_")
        return found if isinstance(found, str) else None

    @cached_property
    def docstring(self) -> str:
        return docstring_of(self.target) if self.target else ""

    @property
    def idea(self) -> str:
        """The first sentence at the head of the file, else of its class's docstring."""
        return first_sentence(self.text or " ".join(self.docstring.partition("\n\n")[0].split()))

    @property
    def values(self) -> list[tuple[str, Any, str]]:
        """The keys that it sets, as on the command line (`selector.p`), each with its value and the
        comment behind it; a mapping in one of a paper's experiments counts as several."""
        values = {
            k: v for k, v in self.file.values.items() if k not in ("_target_", "hydra", "small")
        }
        package = self.file.package
        shown = values if package else dict(leaves(values))
        return [
            (f"{package}.{key}".lstrip("."), value, self.comments.get(key, ""))
            for key, value in shown.items()
        ]

    def mapping(self, *keys: str) -> Mapping[str, Any]:
        """The mapping at `keys` in the file: what it sweeps over (`SWEEPS`), or what `scale=small`
        changes."""
        found: Any = self.file.values
        for key in keys:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found if isinstance(found, Mapping) else {}


@dataclass(frozen=True)
class Group:
    """A folder of configs: its name (`selector/threshold`, say), what is chosen in it, and its
    choices by name."""

    name: str
    about: str
    choices: Mapping[str, Choice]

    def builds_on(self, name: str) -> list[Choice]:
        """Choices that build on the choice `name`, directly or not."""
        return [choice for choice in self.choices.values() if name in choice.bases]


class Catalogue:
    """All groups, in conf/ and `own`, a user's folder of configs."""

    def __init__(self, own: Path | None = None) -> None:
        if own is not None and not own.is_dir():
            raise ConfigError([Problem("--config-dir", str(own), "must be an existing folder")])
        self.files = ChoiceFiles([conf_dir(), *([own.resolve()] if own else [])])
        self._abouts = comments((conf_dir() / "config.yaml").read_text(encoding="utf-8"), GROUP)

    @cached_property
    def names(self) -> list[str]:
        """Names of the groups: those of the primary config in its order, each with the groups
        inside of it, then others."""
        place = {group: number for number, group in enumerate(self._abouts)}
        return sorted(
            self.files.groups,
            key=lambda name: (place.get(name.partition("/")[0], len(place)), name),
        )

    def group(self, name: str) -> Group:
        """The group `name`, with all its choices. Raises `ConfigError` where a file cannot be
        read."""
        choices = {
            choice: Choice.of(self.files.read(name, choice)) for choice in self.files.names(name)
        }
        return Group(name, self.about(name), choices)

    def about(self, name: str) -> str:
        """What is chosen in the group `name`; empty if no defaults list that names it says so."""
        parent, _, leaf = name.rpartition("/")
        texts = [
            self.files.read(parent, above).text for above in self.files.names(parent) if parent
        ]
        return self._abouts.get(name) or next(
            (t for text in texts if (t := comments(text, GROUP).get(leaf))), ""
        )
