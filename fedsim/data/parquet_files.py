"""Parquet files of a data set: where they are, which split each belongs to, and whether all are there."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedsim.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test"}
SPLITS |= dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
"""Words in the names of files and folders, and the split that each stands for."""


def find_files(path: str, data_dir: Path) -> tuple[Path, list[Path]]:
    """Where `path` lies, and its parquet files, sorted. Raises `DataError` saying where they were looked for."""
    places = [Path(path).expanduser(), data_dir / path]
    for place in places:
        files = [place] if place.is_file() else sorted(place.rglob("*.parquet"))
        if files:
            _check_complete(files)
            return place, files
    raise DataError(f"dataset.path={path}: no parquet file at {' or '.join(str(p.absolute()) for p in places)}")


def by_split(root: Path, files: Sequence[Path]) -> dict[str, list[Path]]:
    """Files by split. A file's name counts before its folder's (below `root`); a lone file may say nothing."""
    result: dict[str, list[Path]] = {}
    for file in files:
        folder = file.parent.name if file.parent != root and file != root else ""
        split = _split_of(file.stem, file) or _split_of(folder, file)
        if split is None and len(files) > 1:
            raise DataError(
                f"{file}: neither its name nor its folder has one of the words {', '.join(SPLITS)}; rename it, or move "
                "it away if it is not part of the data set"
            )
        result.setdefault(split or "train", []).append(file)
    return result


def read(paths: Sequence[Path]) -> "pa.Table":
    """The rows of all files. Raises `DataError` naming the file that is not sound."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = []
    for path in paths:
        try:
            tables.append(pq.read_table(path, partitioning=None))
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path} is no sound parquet file ({error}); delete it and fetch it again") from error
    return concatenate(tables)


def concatenate(tables: Sequence["pa.Table"]) -> "pa.Table":
    """The rows of all tables, under the columns of all. Raises `DataError` where their types differ."""
    import pyarrow as pa

    try:
        return pa.concat_tables(tables, promote_options="default").combine_chunks()
    except pa.ArrowException as error:
        raise DataError(f"dataset.path: the parquet files do not agree in their columns ({error})") from error


def _split_of(name: str, file: Path) -> str | None:
    """The split that a word in `name` stands for ("cifar10-train", "train-00000-of-00002")."""
    found = {SPLITS[word] for word in re.findall(r"[a-z]+", name.lower()) if word in SPLITS}
    if len(found) > 1:
        raise DataError(f"{file}: {name!r} has the words of several splits ({', '.join(sorted(found))}); rename it")
    return found.pop() if found else None


def _check_complete(files: Sequence[Path]) -> None:
    """All shards of `<name>-00000-of-00003` are there."""
    shards: dict[tuple[Path, str, int], set[int]] = {}
    for file in files:
        if match := re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})(.*)", file.stem):
            name, number, count = match[1] + match[4], int(match[2]), int(match[3])
            shards.setdefault((file.parent, name, count), set()).add(number)
    for (folder, name, count), numbers in shards.items():
        if missing := sorted(set(range(count)) - numbers):
            raise DataError(f"{folder}: of the {count} shards of {name!r} these are missing: {str(missing)[1:-1]}")
