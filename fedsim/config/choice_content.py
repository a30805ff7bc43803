"""What the file of a choice says: its YAML, where its keys are in a config, and what its defaults list chooses."""

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from fedsim.config.shipped import conf_dir
from fedsim.errors import ConfigError, Problem

PACKAGE = re.compile(r"(?:\s*#\s*@.*\n|\s*\n)*\s*#\s*@package[ \t]+(\S+)")
"""The comment at the head of a file that says where in a config its keys are."""


def read_content(path: Path) -> tuple[str, dict[Any, Any]]:
    """The text of a file and its keys. Raises `ConfigError` where it cannot be read or is no mapping."""
    state = path.stat()
    return _parsed(path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=1024)  # a mistake may be looked up in all files, and in those of several jobs
def _parsed(path: Path, _modified: int, _size: int) -> tuple[str, dict[Any, Any]]:
    try:
        text = path.read_text(encoding="utf-8") if conf_dir() in path.parents else _checked(path)
        content = yaml.safe_load(text)
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError([Problem(str(path), ..., f"cannot be read ({error.strerror or error})")]) from error
    except (yaml.YAMLError, ValueError) as error:  # a date that there is not, say
        raise ConfigError([Problem(str(path), ..., f"is not YAML: {' '.join(str(error).split())[:300]}")]) from error
    if content is not None and not isinstance(content, dict):
        raise ConfigError([Problem(str(path), ..., "must be a mapping of keys to values")])
    return text, content or {}


def _checked(path: Path) -> str:
    """The text of a user's file, which may be a stranger's."""
    from fedsim.config.sources import read_checked  # takes time: it imports Hydra

    return read_checked(path)


def package_of(text: str, group: str) -> str:
    """The dotted key below which the keys of a file of `group` are: its own package or that of its group."""
    own = group.replace("/", ".")
    found = PACKAGE.match(text)
    return own if found is None else re.sub(r"_global_\.?", "", found[1].replace("_group_", own))


def choices_made(entries: Any, group: str) -> Iterator[tuple[str, str]]:
    """The choices that a defaults list makes: group and name, or `group` and `_self_`."""
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, str) and "@" not in entry:
            sub, _, name = _absolute(entry, group).rpartition("/")
            yield sub, name
        elif isinstance(entry, dict) and len(entry) == 1:
            ((key, name),) = entry.items()
            if isinstance(name, str) and "@" not in str(key):
                yield _absolute(str(key).split(" ")[-1], group), name


def _absolute(path: str, group: str) -> str:
    return path[1:] if path.startswith("/") else f"{group}/{path}"
