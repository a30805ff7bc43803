"""Configs as plain nested mappings: their dotted keys, how they are merged, and which parts of them
can change a result."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import yaml

SEED_KEYS = ("seed", "partition_seed", "init_seed")
"""Top-level keys of seeds: runs that differ only in these are averaged."""

IRRELEVANT_KEYS = (
    "name",
    "data_dir",
    "cache_dir",
    "output_dir",
    "overwrite",
    "checkpoint",
    "tracker",
)
"""Top-level keys that cannot change a result. All others are in the hash that names a run's
folder."""

COMMAND_KEYS = ("scale", "small", "debug")
"""Top-level keys that serve only to compose a config. A run's config does not have them."""

YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

SHORTHANDS = {
    "selector.alpha": ("selector/exploration", "fixed", "selector.exploration.value"),
    "selector.rho": ("selector/exploration", "", "selector.exploration.rho"),
}
"""Keys named by a paper's symbols. Each has its config group, the choice that must be made in the
group (empty: any), and the real key."""
SYMBOLS = {key: symbol for symbol, (*_, key) in SHORTHANDS.items()}
"""The shorthands by their real keys."""


def short_names(keys: Iterable[str]) -> dict[str, str]:
    """Return the shortest end of each key that no other key has, such as `lr` for `optimizer.lr`.

    A real key that has a shorthand is named by it: `alpha` for `selector.exploration.value`.
    """
    long_names = {key: SYMBOLS.get(key, key) for key in keys}
    names = {}
    for key, long_name in long_names.items():
        starts = [match.end() for match in re.finditer(r"[./]", long_name)]
        for start in (*reversed(starts), 0):
            names[key] = long_name[start:]
            ends = (f".{names[key]}", f"/{names[key]}")
            is_unique = sum(f".{other}".endswith(ends) for other in long_names.values()) == 1
            if is_unique and names[key] != "_target_":  # of which component, says what is before it
                break
    return names


def canonical(node: Any) -> Any:
    """Return a copy of a config (plain containers) that differs only if results can differ.

    The hash of this copy names a run's folder. Classes of fedsim are reduced to their names, so
    that moving code changes no hash. Values of null are dropped: a new key that is null by default
    changes no hash either.
    """
    if isinstance(node, list):
        return [canonical(item) for item in node]
    if not isinstance(node, Mapping):
        return node
    copy = {}
    for key, value in node.items():
        if value is None:
            continue
        is_class = key == "_target_" and isinstance(value, str) and value.startswith("fedsim.")
        copy[key] = value.rpartition(".")[2] if is_class else canonical(value)
    return copy


def leaves(node: Mapping[Any, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return the leaves of nested mappings with their dotted keys, such as `optimizer.lr`, 0.1.

    An empty mapping has none.
    """
    pairs: list[tuple[str, Any]] = []
    for key, value in node.items():
        if isinstance(value, Mapping):
            pairs += leaves(value, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", value))
    return pairs


def has_key(node: Any, key: str) -> bool:
    """Return whether nested mappings have a dotted key."""
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return False
        node = node[part]
    return True


def all_keys(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield all dotted keys of nested mappings, both of inner mappings and of leaves."""
    for key, value in values.items():
        yield str(key)
        if isinstance(value, Mapping):
            for inner_key in all_keys(value):
                yield f"{key}.{inner_key}"


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two configs as Hydra does: mappings key by key, everything else as a whole."""
    merged = dict(base)
    for key, value in changes.items():
        old = base.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            value = merge(old, value)
        merged[key] = value
    return merged


def nest(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return nested mappings with `values` at a dotted key; `values` itself if the key is empty."""
    nested = dict(values)
    if key:
        for part in reversed(key.split(".")):
            nested = {part: nested}
    return nested


def labels_of(words: Sequence[str]) -> dict[str, str]:
    """Return the values of a job's overrides by key. `+` in front of a key is dropped."""
    labels = {}
    for word in words:
        key, equals_sign, value = word.lstrip("+").partition("=")
        if equals_sign:
            labels[key] = value
    return labels


def differing_keys(labels: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys in which jobs differ, in the order in which they occur."""
    values: dict[str, set[str]] = {}
    for row in labels:
        for key in row:
            values[key] = set()
    for key, known in values.items():
        known.update(str(row.get(key)) for row in labels)
    return [key for key, known in values.items() if len(known) > 1]
