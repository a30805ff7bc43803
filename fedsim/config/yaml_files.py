"""Read YAML files of conf/ and --config-dir: their values, and the comment at the head of a file
that describes it.

The head has prose, whose first sentence is shown in lists, and then fields such as `#   source:
...`. The package of a file, a notion of Hydra, is the dotted key below which its keys are in a
config; a line `# @package <key>` sets it.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import yaml

from fedsim.core.configs import YAML_LOADER
from fedsim.core.errors import ConfigError, Problem, check, rule

PACKAGE = re.compile(r"(?:\s*#\s*@.*\n|\s*\n)*\s*#\s*@package[ \t]+(\S+)")
"""The comment at the head of a file that says where in a config its keys are."""
FIELD = re.compile(r"#\s{2,}([a-z]+(?: [a-z]+)?):\s+(\S.*)")
"""A field of the comment at the head of a file: `#   source: ...`."""
CONTINUED = re.compile(r"#\s{4,}(\S.*)")
"""A further line of a field."""


class Loader(YAML_LOADER):  # type: ignore[misc]
    """Reads a plain value as the command line does: `010`, `1:30`, `0x1F`, `on` and dates are
    texts.

    YAML 1.1 would make numbers, truth values and dates of them.
    """

    yaml_implicit_resolvers: ClassVar[dict[Any, Any]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping. Raises `ConfigError` if it has a key twice."""
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name = str(key.value)
            line = key.start_mark.line + 1
            if name in lines:
                text = f"is there twice, in lines {lines[name]} and {line}"
                raise ConfigError([Problem(name, ..., text, "leave one of them out")])
            lines[name] = line
        content: dict[Any, Any] = super().construct_mapping(node, deep)
        return content


# The plain values of Hydra's grammar for overrides, by the YAML tag that they get.
DIGITS = r"(?:0|[1-9](?:_?\d)*)"
POINT = rf"{DIGITS}\.|{DIGITS}?\.\d(?:_?\d)*"
PLAIN_VALUES = {
    "null": "~|null|",
    "bool": "true|false",
    "int": rf"[+-]?{DIGITS}",
    "float": rf"[+-]?(?:{POINT}|(?:{DIGITS}|{POINT})e[+-]?\d(?:_?\d)*|\.?inf)|\.?nan",
    "merge": "<<",
}
for tag, pattern in PLAIN_VALUES.items():
    regex = re.compile(rf"(?i:{pattern})\Z", re.ASCII)
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", regex, None)


def read_text(path: Path) -> str:
    """Return the text of a YAML file. Raises `ConfigError` if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(str(path), ..., f"cannot be read ({error})")]) from error


@lru_cache(maxsize=1024)
def parse_yaml(path: Path, text: str) -> dict[Any, Any]:
    """Return the keys and values of the file `path`, whose text is `text`.

    Raises `ConfigError` if it is no mapping.
    """
    try:
        content = yaml.load(text, Loader) or {}
    except ConfigError as error:
        raise ConfigError(replace(p, key=f"{path}: {p.key}") for p in error.problems) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or " ".join(str(error).split())[:300]
        raise ConfigError([Problem(str(path), ..., f"is not YAML{line}: {reason}")]) from error
    check(rule(isinstance(content, dict), str(path), ..., "must be a mapping of keys to values"))
    return content


def head_of(text: str) -> tuple[str, dict[str, str]]:
    """Return the prose and the fields of the comment with which a YAML file begins.

    The prose is one line. A field is a line such as `#   source: ...`, with its continuations.
    """
    prose: list[str] = []
    fields: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        if line.startswith("# @"):  # a line for Hydra
            continue
        if field := FIELD.fullmatch(line):
            name = field[1]
            fields[name] = field[2].strip()
        elif name and (continued := CONTINUED.fullmatch(line)):
            fields[name] += f" {continued[1].strip()}"
        elif words := line.strip("# "):
            prose.append(words)
    return " ".join(prose), fields


def first_sentence(text: str) -> str:
    """Return the text up to the first end of a sentence that a capital letter follows."""
    return re.split(r"(?<=[.!?])\s+(?=[A-Z])", text, maxsplit=1)[0]


def spelt(name: str) -> str:
    """Return a name in the spelling in which names are compared: small letters, and _ for -."""
    return name.lower().replace("-", "_")


def other_names(fields: Mapping[str, str]) -> list[str]:
    """Return the names of a choice in the literature, from the field `also` at the head of its
    file."""
    return spelt(fields.get("also", "")).replace(",", " ").split()


def package_of(text: str, group: str) -> str:
    """Return the dotted key below which a file of `group` puts its keys; "" for the top level."""
    group_key = group.replace("/", ".")
    package = PACKAGE.match(text)
    if package is None:
        return group_key
    return re.sub(r"_global_\.?", "", package[1].replace("_group_", group_key))
