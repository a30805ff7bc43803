"""Configs as plain mappings: dotted keys, and what two of them must share to mean the same."""

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

SEED_KEYS = ("seed", "partition_seed", "init_seed")
"""Top-level keys in which the runs differ that a mean is taken over."""


IRRELEVANT_KEYS = (
    "name",
    "data_dir",
    "cache_dir",
    "output_dir",
    "overwrite",
    "checkpoint",
    "tracker",
)
"""Top-level keys that cannot change a result; all others are in the hash that names a run's
folder."""
YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


SHORTHANDS = {
    "selector.alpha": ("selector/exploration", "fixed", "selector.exploration.value"),
    "selector.rho": ("selector/exploration", "", "selector.exploration.rho"),
}
"""Keys by a paper's symbols: each with the group in which it lies, the choice to be made there, if
any, and the key."""


def canonical(node: Any) -> Any:
    """A copy of a config (plain containers) that differs only where results can.

    Classes of fedsim are told by their names alone, so that moving code changes no hash, and what
    is null is left out, so that a key that comes later, null where nothing changes, changes none
    either.
    """
    if isinstance(node, Mapping):
        return {
            k: _class_name(v) if k == "_target_" else canonical(v)
            for k, v in node.items()
            if v is not None
        }
    return [canonical(item) for item in node] if isinstance(node, list) else node


def _class_name(target: Any) -> Any:
    return (
        target.rpartition(".")[2]
        if isinstance(target, str) and target.startswith("fedsim.")
        else target
    )


def leaves(node: Mapping[Any, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """The leaves of nested mappings with their dotted keys: `optimizer.lr`, 0.1. An empty mapping
    has none."""
    found: list[tuple[str, Any]] = []
    for key, value in node.items():
        found += (
            leaves(value, f"{prefix}{key}.")
            if isinstance(value, Mapping)
            else [(f"{prefix}{key}", value)]
        )
    return found


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


def merge(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """As Hydra composes: mappings key by key, everything else as a whole."""
    in_both = [
        k for k, v in own.items() if isinstance(v, Mapping) and isinstance(base.get(k), Mapping)
    ]
    return {**base, **own, **{k: merge(base[k], own[k]) for k in in_both}}


def nest(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """`values` at a dotted key of nested mappings; at the top, if it is empty."""
    for part in reversed(key.split(".") if key else []):
        values = {part: values}
    return dict(values)
