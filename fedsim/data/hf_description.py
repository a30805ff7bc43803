"""The description of a local folder of the Hugging Face Hub: the head of its README.md, and
dataset_info.json.

Both say which columns hold images or classes, and README.md also which files belong to which split.
Files that the library datasets wrote have the columns' description in themselves.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from fedsim.core.configs import YAML_LOADER
from fedsim.core.disk import read_regular

README, INFO = "README.md", "dataset_info.json"
MAX_BYTES = 10_000_000
"""Size limit of these files."""


@dataclass(frozen=True)
class Description:
    """A folder's own description of its data set.

    - `features`: the description of columns by name, as files have it: `_type` is "Image",
      "ClassLabel" (which has `names`) or "Value".
    - `data_files`: the patterns of the files of each split, relative to the folder, as in a shell
      with `**`; empty if names of files tell their splits.
    """

    features: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    data_files: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def split_of(self, file: Path) -> str | None:
        """Return the split of a file, by its path relative to the folder; None: it has none."""
        for split, patterns in self.data_files.items():
            for pattern in patterns:
                if _matches(file.parts, PurePosixPath(pattern).parts):
                    return split
        return None


def _matches(path: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether a pattern of paths fits a path. Both are given by their parts.

    In a part, `*` stands for any characters. The part `**` stands for any number of folders, also
    for none, and at the end for all files below. (`PurePath.match` reads `**` only since Python
    3.13.)
    """
    if not pattern:
        return not path
    first, rest = pattern[0], pattern[1:]
    if first == "**" and _matches(path, rest):
        return True
    if not path:
        return False
    if first == "**":
        return _matches(path[1:], pattern)
    return fnmatchcase(path[0], first) and _matches(path[1:], rest)


def read_description(folder: Path) -> Description:
    """Return the description in a folder. What is absent or cannot be read is left empty."""
    card = _head_of_readme(folder / README)
    configs = list(_mappings(card.get("configs")))
    config = _default(configs)
    infos = list(_mappings(card.get("dataset_info")))
    named = [info for info in infos if info.get("config_name") == config.get("config_name")]
    info = _default(named if config and named else infos)
    features = dict(_features_of_card(info.get("features")))
    if not features:
        found = _json_of(folder / INFO).get("features")
        if isinstance(found, Mapping):
            features = {name: value for name, value in found.items() if isinstance(value, Mapping)}
    return Description(features, dict(_patterns(config.get("data_files"))))


def _head_of_readme(path: Path) -> Mapping[str, Any]:
    """Return the YAML between the first two lines `---`."""
    lines = _text_of(path).splitlines()
    if not lines or lines[0].strip() != "---" or "---" not in lines[1:]:
        return {}
    end = lines.index("---", 1)
    try:
        head = yaml.load("\n".join(lines[1:end]), YAML_LOADER)
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return head if isinstance(head, Mapping) else {}


def _json_of(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(_text_of(path) or "{}")
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, Mapping) else {}


def _text_of(path: Path) -> str:
    try:
        return read_regular(path, MAX_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the mappings in a list, or a single mapping."""
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, Mapping):
            yield item


def _default(configs: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the only config, or the default of several; {} if none is the default."""
    if len(configs) == 1:
        return configs[0]
    for config in configs:
        if config.get("default") is True or config.get("config_name") == "default":
            return config
    return {}


def _features_of_card(features: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the columns that README.md describes, as files describe them."""
    for feature in _mappings(features):
        name, dtype = feature.get("name"), feature.get("dtype")
        if not isinstance(name, str):
            continue
        if dtype == "image":
            yield name, {"_type": "Image"}
        elif isinstance(dtype, Mapping) and isinstance(dtype.get("class_label"), Mapping):
            names = dtype["class_label"].get("names")
            if isinstance(names, Mapping):  # by number, as text
                names = list(names.values())
            if isinstance(names, list):
                yield name, {"_type": "ClassLabel", "names": list(map(str, names))}
        elif isinstance(dtype, str):
            yield name, {"_type": "Value", "dtype": dtype}


def _patterns(data_files: Any) -> Iterator[tuple[str, list[str]]]:
    """Yield splits with the patterns of their files. Files without a split are for training."""
    if isinstance(data_files, Mapping):
        by_split = list(data_files.items())
    else:
        items = data_files if isinstance(data_files, list) else [data_files]
        by_split = [
            (item.get("split"), item.get("path")) if isinstance(item, Mapping) else ("train", item)
            for item in items
        ]
    patterns: dict[str, list[str]] = {}
    for split, paths in by_split:
        for path in paths if isinstance(paths, list) else [paths]:
            if isinstance(split, str) and isinstance(path, str):
                patterns.setdefault(split, []).append(path.removeprefix("./"))
    yield from patterns.items()
