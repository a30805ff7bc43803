"""The parquet files of a data set: finding them, assigning them to splits, and checking that none is missing."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedsim.data.checksums import require_regular
from fedsim.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test"}
SPLITS |= dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
"""The split that a word in the name of a file or folder stands for."""


def find_files(path: str, data_dir: Path) -> tuple[Path, list[Path]]:
    """The location of `path`, and its parquet files, sorted. Raises `DataError` with the places searched."""
    place, files = _first_with_files(path, data_dir)
    if place is not None:
        require_regular(files)
        _check_complete(files)
        return place, files
    remedy = f"correct the path, or point data_dir or FEDSIM_DATA to the folder that has it (data_dir={data_dir})"
    raise DataError(f"dataset.path={path}: no parquet file at {_searched(path, data_dir)}; {remedy}")


def absent_files(path: str, data_dir: Path) -> list[str]:
    """What `find_files` would miss: all files of `path`, or shards."""
    place, files = _first_with_files(path, data_dir)
    if place is None:
        return [f"a parquet file at {_searched(path, data_dir)}"]
    return [f"shards in {folder}: {what}" for folder, what in _missing_shards(files)]


def _places(path: str, data_dir: Path) -> list[Path]:
    return [Path(path).expanduser(), data_dir / path]


def _searched(path: str, data_dir: Path) -> str:
    return " or ".join(str(place.absolute()) for place in _places(path, data_dir))


def _first_with_files(path: str, data_dir: Path) -> tuple[Path | None, list[Path]]:
    for place in _places(path, data_dir):
        if files := [place] if place.is_file() else sorted(place.rglob("*.parquet")):
            return place, files
    return None, []


def by_split(root: Path, files: Sequence[Path]) -> dict[str, list[Path]]:
    """Files by split, which is derived from a file's name or else its folder (below `root`).

    A single file that names no split is training data. Raises `DataError` if one of several files names none.
    """
    result: dict[str, list[Path]] = {}
    for file in files:
        folder = file.parent.name if file.parent != root and file != root else ""
        split = _split_from_name(file.stem, file) or _split_from_name(folder, file)
        if split is None and len(files) > 1:
            raise DataError(
                f"{file}: neither its name nor its folder has one of the words {', '.join(SPLITS)}; rename it, or move "
                "it away if it is not part of the data set"
            )
        result.setdefault(split or "train", []).append(file)
    return result


def read(paths: Sequence[Path]) -> "pa.Table":
    """The rows of all files as one table. Raises `DataError` naming a file that is not valid.

    Checksums of pages are verified in files that have them (few writers add them).
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = []
    for path in paths:
        try:
            tables.append(pq.read_table(path, partitioning=None, page_checksum_verification=True))
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path} is no sound parquet file ({error}); delete it and fetch it again") from error
    return concatenate(tables)


def concatenate(tables: Sequence["pa.Table"]) -> "pa.Table":
    """One table with the rows and columns of all `tables`. Raises `DataError` if the types of a column differ."""
    import pyarrow as pa

    try:
        return pa.concat_tables(tables, promote_options="default").combine_chunks()
    except pa.ArrowException as error:
        raise DataError(f"dataset.path: the parquet files do not agree in their columns ({error})") from error


def _split_from_name(name: str, file: Path) -> str | None:
    """The split named by a word in `name` ("cifar10-train", "train-00000-of-00002"), or None."""
    splits = {SPLITS[word] for word in re.findall(r"[a-z]+", name.lower()) if word in SPLITS}
    if len(splits) > 1:
        raise DataError(f"{file}: {name!r} has the words of several splits ({', '.join(sorted(splits))}); rename it")
    return splits.pop() if splits else None


def _check_complete(files: Sequence[Path]) -> None:
    """Raise `DataError` unless all shards of files named like `<name>-00000-of-00003` are present."""
    for folder, what in _missing_shards(files):
        raise DataError(f"{folder}: {what}")


def _missing_shards(files: Sequence[Path]) -> list[tuple[Path, str]]:
    """Folders, and which shards of a file are missing in each."""
    shards: dict[tuple[Path, str, int], set[int]] = {}
    for file in files:
        if match := re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})(.*)", file.stem):
            name, number, count = match[1] + match[4], int(match[2]), int(match[3])
            shards.setdefault((file.parent, name, count), set()).add(number)
    return [
        (folder, f"of the {count} shards of {name!r} these are missing: {str(missing)[1:-1]}")
        for (folder, name, count), numbers in shards.items()
        if (missing := sorted(set(range(count)) - numbers))
    ]
