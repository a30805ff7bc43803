"""Files of a data set in the Hugging Face layout: to which splits they belong, and mistakes such as
missing shards and rows that occur twice.

The name of a file, or of its folder, says to which split its rows belong: train, test or
validation. A split may be divided into several files, its shards.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fedsim.core.errors import DataError
from fedsim.data.cache import SourceFiles
from fedsim.data.parquet_tables import open_table

SPLITS = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
}
"""The split that a word in the name of a file or folder stands for."""
SHARD = re.compile(
    r"(?P<before>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(-[0-9a-f]{16})?(?P<after>.*)"
)
"""The name of a shard, such as train-00000-of-00002. Older ones of the Hub end in a hash, which is
another one for each shard."""
COPY = re.compile(r"(^|[ _-]+)copy( \d+)?$|( - copy)? ?\(\d+\)$", re.IGNORECASE)
"""The end of a name that systems and browsers give to a copy: `train (1)`, `train copy`."""


def split_of(file: Path, root: Path) -> str | None:
    """Return the split of a file below `root`; None: its name and its folder's tell none.

    A word in the file's name decides ("train-00000-of-00002"). If it has none, or words of several
    splits, a word in the name of its folder decides, unless this is `root`.
    """
    names = [file.stem]
    if root not in (file, file.parent):
        names.append(file.parent.name)
    for name in names:
        split = split_in(name)
        if split is not None:
            return split
    return None


def split_in(name: str) -> str | None:
    """Return the only split of which a name has words; None: there is none, or several."""
    words = re.findall(r"[a-z]+", name.lower())
    splits = {SPLITS[word] for word in words if word in SPLITS}
    return splits.pop() if len(splits) == 1 else None


def name_of_folder(root: Path) -> str:
    """Return the name of a folder or file. The relative path `root` may leave it open (".")."""
    return os.path.basename(os.path.abspath(root))  # noqa: PTH100, PTH119


def are_one_file(files: Sequence[Path]) -> bool:
    """Return whether the files are a single one, or shards of one in a folder."""
    return len({(file.parent, _name_of_data(file.stem)) for file in files}) == 1


def _name_of_data(name: str) -> str:
    """Return the name of a file without the number of its shard."""
    shard = SHARD.fullmatch(name)
    return shard["before"] + shard["after"] if shard else name


def require_unique_rows(files: Sequence[Path], split: str) -> None:
    """Raise `DataError` if the files hold the rows of a split twice.

    fedsim concludes this if they lie in two folders (two versions or configs), if one is a copy of
    another, or if they divide the rows into two different numbers of shards.
    """
    first_by_name: dict[str, tuple[Path, _Version]] = {}
    for file in files:
        name = COPY.sub("", file.stem)
        shard = SHARD.fullmatch(name)
        version = _Version(is_copy=name != file.stem, num_shards=shard and shard["count"])
        first_file, first_version = first_by_name.setdefault(_name_of_data(name), (file, version))
        if file.parent != files[0].parent:
            _reject_twice(files[0], file, split)
        if version != first_version:
            _reject_twice(first_file, file, split)


class _Version(NamedTuple):
    """The version of a file. Files of the same data must agree in it, or rows are read twice."""

    is_copy: bool
    num_shards: str | None


def _reject_twice(first: Path, second: Path, split: str) -> None:
    raise DataError(
        f"{first} and {second} would be read as one {split} split, its rows twice; move one of "
        "them away, or let dataset.path name the folder of one"
    )


def require_new_content(file: Path, sources: SourceFiles) -> None:
    """Raise `DataError` if another of the files that were read has the same bytes as `file`, and
    rows. `sources` has the checksums of these files, and that of `file`."""
    for other, checksum in sources.sums.items():
        if other == file or checksum != sources.sums[file]:
            continue
        with file.open("rb") as stream:
            has_rows = open_table(file, stream).metadata.num_rows > 0
        if has_rows:
            raise DataError(f"{other} and {file} have the same content; move one of them away")


def missing_shards(files: Sequence[Path]) -> list[str]:
    """Name the shards that are not there. The names of the other shards tell how many there are."""
    present: dict[tuple[Path, str, int], set[int]] = {}  # by folder, name and count
    for file in files:
        shard = SHARD.fullmatch(file.stem)
        if shard:
            key = (file.parent, _name_of_data(file.stem), int(shard["count"]))
            present.setdefault(key, set()).add(int(shard["number"]))
    messages = []
    for (folder, name, count), numbers in present.items():
        missing = sorted(set(range(count)) - numbers)
        if missing:
            listed = ", ".join(map(str, missing))
            messages.append(f"shards {listed} of the {count} of {name!r} in {folder}")
    return messages
