"""What `${...}` in a config may stand for: other values, as long as they stay small, and few environment variables.

A config is written to files and to trackers with its interpolations resolved: a secret of the environment would be,
too. Values that name others that name others can grow without bound (`a: ${b}${b}`, `b: ${c}${c}`, ...).
"""

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.basecontainer import BaseContainer

from fedsim.errors import ConfigError, Problem

VARIABLES = ("HOME", "LOGNAME", "SCRATCH", "TMPDIR", "USER", "WORK")
"""Environment variables that a config may name, besides those that begin with `FEDSIM_`."""
RESOLVERS = ("oc.env", "oc.select", "oc.decode", "now", "hydra", "python_version")
"""Resolvers that a config may call; the others make nodes out of text."""
MAX_SIZE = 100_000
"""Characters and values that a value may become by resolving it."""

_PATH = re.compile(r"[^\s\\{}()'\",:$]+")
_WHOLE = re.compile(r"\$\{([^{}:]*)\}")
_QUOTED = re.compile(r"""['"]([^'"]*)['"]""")
_CALL = re.compile(r"\$\{\s*([\w.]+)\s*:")
_COMPUTED = re.compile(r"\$\{[^:{}]*\$\{")


class SecretError(ValueError):
    """A config asks for an environment variable that it may not record."""


def environment_variable(name: str, default: Any = "fedsim: no default") -> Any:
    """The resolver `oc.env`. Raises `SecretError` for a variable that is not in `VARIABLES` nor begins with FEDSIM_."""
    if not (name in VARIABLES or name.startswith("FEDSIM_")):
        allowed = ", ".join(("FEDSIM_*", *VARIABLES))
        raise SecretError(f"${{oc.env:{name}}} is refused: a config is recorded, so it may name {allowed} alone")
    if name in os.environ or default == "fedsim: no default":
        return os.environ[name] if name in os.environ else _unset(name)
    return None if default is None else str(default)


def _unset(name: str) -> str:
    raise SecretError(f"${{oc.env:{name}}}: the variable is not set; give a default: ${{oc.env:{name},null}}")


@contextmanager
def restricted_resolvers() -> Iterator[None]:
    """`environment_variable` in the place of OmegaConf's `oc.env`, or of the program's own, which is put back."""
    before = BaseContainer._resolvers.get("oc.env")  # as it is called, which no public name gives
    OmegaConf.register_new_resolver("oc.env", environment_variable, replace=True)
    try:
        yield
    finally:
        OmegaConf.clear_resolver("oc.env")
        if before is not None:
            BaseContainer._resolvers["oc.env"] = before


def check_size(config: DictConfig) -> None:
    """Raise `ConfigError` where resolving `config` would make something large, or calls other resolvers."""
    root = OmegaConf.to_container(config, resolve=False)
    try:
        _Sizes(root).of((), root)
    except RecursionError as error:
        raise ConfigError([Problem("config", ..., "has too long a chain of interpolations")]) from error


class _Sizes:
    """Upper bounds of what values become, by path."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[tuple[str, ...], int] = {}

    def of(self, path: tuple[str, ...], node: Any) -> int:
        """Of the value at `path`. One that contains itself counts as 0 there: OmegaConf refuses it."""
        if path not in self._known:
            self._known[path] = 0
            self._known[path] = size = self._size(path, node)
            if size > MAX_SIZE:
                text = f"must become at most {MAX_SIZE} characters or values when it is resolved"
                raise ConfigError([Problem(".".join(path) or "config", ..., text, "write the value out")])
        return self._known[path]

    def _size(self, path: tuple[str, ...], node: Any) -> int:
        if isinstance(node, Mapping):
            last = sorted(node, key=lambda key: key == "hydra")  # which repeats words of the command line
            return 1 + sum(self.of((*path, str(key)), node[key]) for key in last)
        if isinstance(node, list):
            return 1 + sum(self.of((*path, str(index)), value) for index, value in enumerate(node))
        if not isinstance(node, str):
            return 1
        if "${" not in node:
            return len(node) + 1
        key = ".".join(path)
        for name in _CALL.findall(node):
            if name not in RESOLVERS:
                raise ConfigError([Problem(key, ..., f"must not call the resolver {name}", ", ".join(RESOLVERS))])
        if _COMPUTED.search(node):
            raise ConfigError([Problem(key, ..., "must not compute the name of another value", "write the name out")])
        return len(node) + 1 + sum(self.of(*found) for found in self._named(path, node))

    def _named(self, path: tuple[str, ...], text: str) -> Iterator[tuple[tuple[str, ...], Any]]:
        """Every value that a word of `text` may name, from the root or relative to its own place."""
        text = text[text.index("${") :]
        words = Counter(_PATH.findall(text)) | Counter(_WHOLE.findall(text)) | Counter(_QUOTED.findall(text))
        for word in words.elements():
            dots = len(word) - len(word.lstrip("."))
            parts = [part for part in re.split(r"[.\[\]]+", word) if part]
            start = path[: max(len(path) - dots, 0)] if dots else ()
            found = self._find((*start, *parts))
            if found is not None:
                yield found

    def _find(self, parts: tuple[str, ...]) -> tuple[tuple[str, ...], Any] | None:
        node = self._root
        for part in parts:
            if isinstance(node, Mapping):
                keys = {str(key): key for key in node}
                if part not in keys:
                    return None
                node = node[keys[part]]
            elif isinstance(node, list) and part.isdigit() and int(part) < len(node):
                node = node[int(part)]
            else:
                return None
        return parts, node
