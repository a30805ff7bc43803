"""Nested mappings and dotted keys, as they are written on the command line."""

from collections.abc import Iterator, Mapping
from typing import Any


def flat(node: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested mappings with their dotted keys: `optimizer.lr`, 0.1. An empty mapping has none."""
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def has_key(node: Any, key: str) -> bool:
    """Whether nested mappings have a dotted key."""
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return False
        node = node[part]
    return True


def all_keys(values: Mapping[str, Any]) -> Iterator[str]:
    """The dotted keys of nested mappings, those of the mappings among them."""
    for key, value in values.items():
        yield str(key)
        if isinstance(value, Mapping):
            yield from (f"{key}.{below}" for below in all_keys(value))


def merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """As Hydra composes: mappings key by key, everything else as a whole."""
    both = {
        k: merged(base[k], v) for k, v in own.items() if isinstance(v, Mapping) and isinstance(base.get(k), Mapping)
    }
    return {**base, **own, **both}


def placed(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """`values` at a dotted key of nested mappings; at the top, if it is empty."""
    for part in reversed(key.split(".") if key else []):
        values = {part: values}
    return dict(values)
