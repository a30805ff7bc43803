"""The user's own code that a run is made of, as a text that changes with it."""

import hashlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fedsim
from fedsim.config.origin import in_installed_folder


def user_code(config: Mapping[str, Any]) -> str | None:
    """The classes and functions that a config names, without fedsim's and installed ones, each with a hash of its
    source; None if there are none.

    What a class inherits from counts, too; what it calls does not. They have been imported: nothing is imported here.
    """
    sources = {name: source for target in _targets(config) for name, source in _sources(target)}
    hashes = {name: hashlib.sha256(source.encode()).hexdigest()[:12] for name, source in sources.items()}
    return ", ".join(f"{name} {digest}" for name, digest in sorted(hashes.items())) or None


def _targets(node: Any) -> Iterator[str]:
    """Every `_target_` in a config."""
    if isinstance(node, Mapping):
        if isinstance(node.get("_target_"), str):
            yield node["_target_"]
        for value in node.values():
            yield from _targets(value)


def _sources(target: str) -> Iterator[tuple[str, str]]:
    """Names and sources of the user's classes, or function, behind a `_target_`."""
    module, _, name = target.rpartition(".")
    found = getattr(sys.modules.get(module), name, None)
    for part in inspect.getmro(found) if isinstance(found, type) else [found]:
        try:
            if part is not None and _is_users(Path(inspect.getfile(part))):
                yield f"{part.__module__}.{part.__qualname__}", inspect.getsource(part)
        except (OSError, TypeError):  # built in, or made without a file
            continue


def _is_users(path: Path) -> bool:
    own = Path(fedsim.__file__).resolve().parent
    return own not in path.resolve().parents and not in_installed_folder(path)
