"""Any image-classification data set in the Hugging Face layout: parquet files with encoded images and labels.

Files are assigned to splits by their names; a column whose name is None is found by its type or name.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.core.errors import ConfigError, DataError, at_least, at_most, between, check, rule
from fedsim.data.base import LoadedData, normalisation_problems
from fedsim.data.cache import (
    load_or_build,
    require_regular,
    require_sha256,
    sha256_of_list,
    sha256_problem,
    sums_of_files,
)
from fedsim.data.images import MAX_SIDE, FromPath, decode

if TYPE_CHECKING:
    import pyarrow as pa


MAX_CLASSES = 1_000_000
"""The last layer of a model has an output for each number up to the largest label."""
BYTES = ("binary", "large_binary")
LABEL_NAMES = ("label", "labels", "fine_label", "character", "target", "class")


def _encoded_images(table: "pa.Table", name: str | None) -> list[bytes]:
    """The encoded images of all rows, from a column of bytes or of structs with a field `bytes`.

    Raises `DataError` if there is no such column.
    """
    import pyarrow as pa

    name = name or _image_name(table)
    column = _column(table, name, "image_column")
    if _is(column.type, "struct") and (index := column.type.get_field_index("bytes")) >= 0:
        column = pa.chunked_array([chunk.field(index) for chunk in column.chunks])
    if not _is(column.type, *BYTES) or column.null_count:
        raise DataError(f"dataset.image_column={name}: must hold the encoded images themselves in every row")
    return column.to_pylist()


def _class_labels(table: "pa.Table", name: str | None) -> tuple[NDArray[np.int64], int]:
    """Labels [n] and the number of classes. Integer labels are kept; others are numbered in sorted order."""
    name = name or next((n for n in LABEL_NAMES if n in table.column_names), None)
    if name is None:
        raise DataError(f"dataset.label_column: none of {', '.join(LABEL_NAMES)} among {table.column_names}")
    values = _column_values(table, name, "label_column")
    if not np.issubdtype(values.dtype, np.integer):
        labels = np.unique(values, return_inverse=True)[1].astype(np.int64)
        return labels, int(labels.max()) + 1
    if values.min() < 0:
        raise DataError(f"dataset.label_column={name}: labels must be >= 0, found {values.min()}")
    if values.max() >= MAX_CLASSES:
        raise DataError(
            f"dataset.label_column={name}: labels are numbers of classes and must be < {MAX_CLASSES:,}, found "
            f"{values.max()}; number the classes from 0, or store the labels as strings"
        )
    return values.astype(np.int64), max(int(values.max()) + 1, _num_named_classes(table, name))


def _owners(
    table: "pa.Table", name: str, rows: NDArray[np.int64], test: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """The owners of the training `rows`, numbered in sorted order, and those of the `test` rows by the same numbers.

    -1 for owners of no training row. Test rows, or rows of neither, may lack an owner: None if a test row does.
    """
    table = _only(table, name, "client_column")
    known, codes = np.unique(_column_values(table.take(rows), name, "client_column"), return_inverse=True)
    tested = table.take(test)
    if tested.column(name).null_count:
        return codes.astype(np.int64), None
    values = _column_values(tested, name, "client_column")
    places = np.minimum(np.searchsorted(known, values), len(known) - 1)
    return codes.astype(np.int64), np.where(known[places] == values, places, -1).astype(np.int64)


def _image_name(table: "pa.Table") -> str:
    for field in table.schema:
        if _is(field.type, *BYTES) or (_is(field.type, "struct") and field.type.get_field_index("bytes") >= 0):
            return str(field.name)
    raise DataError(f"dataset.image_column: no column of images among {', '.join(table.column_names)}")


def _is(kind: "pa.DataType", *names: str) -> bool:
    """Whether a type is one of those that pyarrow calls `names`."""
    from pyarrow import types

    return any(getattr(types, f"is_{name}")(kind) for name in names)


def _column_values(table: "pa.Table", name: str, key: str) -> NDArray[np.generic]:
    """The values of a column of integers, booleans or strings. Raises `DataError` for other types."""
    column = _column(table, name, key)
    if not _is(column.type, "integer", "string", "large_string", "boolean"):
        raise DataError(f"dataset.{key}={name}: must hold integers or strings, not {column.type}")
    return column.to_numpy()


def _only(table: "pa.Table", name: str, key: str) -> "pa.Table":
    """The table with the column `name` alone. Raises `DataError` if it is absent."""
    if name not in table.column_names:
        raise DataError(f"dataset.{key}={name}: the columns are {', '.join(table.column_names)}")
    return table.select([name])


def _column(table: "pa.Table", name: str, key: str) -> "pa.ChunkedArray":
    """The column `name`, categories resolved. Raises `DataError` if it is absent or has missing values."""
    column = _only(table, name, key).column(name)
    if column.null_count:
        raise DataError(f"dataset.{key}={name}: {column.null_count} of its {len(column)} values are missing")
    return column.cast(column.type.value_type) if _is(column.type, "dictionary") else column


def _num_named_classes(table: "pa.Table", name: str) -> int:
    """Number of class names in the Hugging Face metadata of a column; 0 if there are none."""
    try:
        features = json.loads((table.schema.metadata or {})[b"huggingface"])["info"]["features"]
        return len(features[name]["names"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return 0


SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test"}
SPLITS |= dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
"""The split that a word in the name of a file or folder stands for."""


def _by_split(root: Path, files: Sequence[Path]) -> dict[str, list[Path]]:
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


def _read(paths: Sequence[Path]) -> "pa.Table":
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
    return _concatenate(tables)


def _concatenate(tables: Sequence["pa.Table"]) -> "pa.Table":
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


@dataclass(eq=False, kw_only=True)
class Parquet(FromPath):
    """Parquet files at `path`: a file or a folder (absolute, or relative to the working folder or to data_dir).

    The split of a file is derived from its name or folder. Without a test split, the validation split is used as test
    set; without either, a fixed random `test_fraction` of all rows. Columns that are None are found by type and name:
    images are structs with a field `bytes`, or bytes; labels are integers or strings. `client_column` holds the owner
    of each row. `size` scales all images to `size` x `size` pixels; `mean` and `std`: None is .5 per channel. Images
    are decoded once into a cache whose key includes the checksums of the files. `sha256`: None, or the checksum that
    the files must have (see `sha256_of_files`); few parquet files hold checksums of their own.
    """

    path: str
    image_column: str | None
    label_column: str | None
    client_column: str | None
    test_fraction: float
    size: int | None
    mean: list[float] | None
    std: list[float] | None
    sha256: str | None = None

    def __post_init__(self) -> None:
        check(
            rule(
                bool(self.path), "path", self.path, "must name a parquet file or a folder of them", "dataset.path=..."
            ),
            between("test_fraction", self.test_fraction, 0, 1, open_high=True),
            None if self.size is None else at_least("size", self.size, 1),
            None if self.size is None else at_most("size", self.size, MAX_SIDE),
            *normalisation_problems(self.mean, self.std),
            sha256_problem(self.sha256),
        )

    def absent(self) -> list[str]:
        found = self._found()
        if found is None:
            return [f"a parquet file at {self._searched()}"]
        return [f"shards in {folder}: {what}" for folder, what in _missing_shards(found[1])]

    def _found(self) -> tuple[Path, list[Path]] | None:
        """The first place of `path` that has parquet files, and these, sorted."""
        for place in self._places():
            if files := [place] if place.is_file() else sorted(place.rglob("*.parquet")):
                return place, files
        return None

    def load(self) -> LoadedData:
        found = self._found()
        if found is None:
            raise self._absent_error("parquet file at")
        root, paths = found
        require_regular(paths)
        for folder, what in _missing_shards(paths):
            raise DataError(f"{folder}: {what}")
        files = _by_split(root, paths)
        named = sums_of_files(root, paths)
        sha256 = sha256_of_list(named)
        require_sha256(self.sha256, sha256, f"dataset.path={self.path}")
        sums = dict(zip(paths, named.values(), strict=True))
        facts = [f"{split} {f.name} {sums[f]}" for split, own in files.items() for f in own]
        columns = {"image": self.image_column, "label": self.label_column, "client": self.client_column}
        settings = [columns, self.size, self.test_fraction]
        fingerprint = hashlib.sha256("\n".join([*facts, str(settings)]).encode()).hexdigest()
        kind = "parquet" if self.client_column is None else "parquet-owners"
        cache = self.cache_dir / f"{kind}-{fingerprint[:32]}.safetensors"
        return self._to_loaded_data(load_or_build(cache, lambda: self._decode(files)), fingerprint, sha256)

    def _to_loaded_data(self, tensors: dict[str, Tensor], fingerprint: str, sha256: str) -> LoadedData:
        channels = tensors["train_x"].shape[1]
        mean, std = self.mean or [0.5] * channels, self.std or [0.5] * channels
        try:
            check(*normalisation_problems(mean, std, channels))
        except ConfigError as error:
            raise ConfigError(p.within("dataset") for p in error.problems) from error
        owners = {name: tensors[name].numpy() for name in ("owners", "test_owners") if name in tensors}
        classes = int(tensors["num_classes"])
        return LoadedData.of(tensors, classes, mean, std, f"parquet {fingerprint}", sha256=sha256, **owners)

    def _decode(self, files: dict[str, list[Path]]) -> dict[str, Tensor]:
        rows, train, test = self._split_rows({split: _read(paths) for split, paths in files.items()})
        labels, num_classes = _class_labels(rows, self.label_column)
        encoded = _encoded_images(rows, self.image_column)
        x = decode(encoded, mode=None, size=self.size, name=f"dataset.path={self.path}")
        y = torch.as_tensor(labels)
        tensors = {"train_x": x[train], "train_y": y[train], "test_x": x[test], "test_y": y[test]}
        tensors["num_classes"] = torch.tensor(num_classes)
        if self.client_column is not None:
            of_train, of_test = _owners(rows, self.client_column, train.numpy(), test.numpy())
            tensors["owners"] = torch.as_tensor(of_train)
            if of_test is not None:
                tensors["test_owners"] = torch.as_tensor(of_test)
        return tensors

    def _split_rows(self, tables: dict[str, "pa.Table"]) -> tuple["pa.Table", Tensor, Tensor]:
        """A table of all rows, and the positions of its training rows and of its test rows."""
        test = next((tables[split] for split in ("test", "validation") if split in tables), None)
        for split, table in (("train", tables.get("train")), ("test", test)):
            if table is not None and not table.num_rows:
                raise DataError(f"dataset.path={self.path}: the {split} split has no rows")
        if "train" not in tables:
            raise DataError(f"dataset.path={self.path}: no file is a training split (its name or folder says 'train')")
        train = tables["train"]
        if test is None:
            return train, *self._random_split(train.num_rows)
        return _concatenate([train, test]), *torch.arange(train.num_rows + test.num_rows).tensor_split([train.num_rows])

    def _random_split(self, num_rows: int) -> tuple[Tensor, Tensor]:
        count = round(self.test_fraction * num_rows)
        if not 0 < count < num_rows:
            raise DataError(
                f"dataset.test_fraction={self.test_fraction}: {self.path} has no test split; set the share of its "
                f"{num_rows} rows to test on, e.g. 0.1"
            )
        order = np.random.default_rng(0).permutation(num_rows)  # fixed: the split belongs to the data set, not to a run
        return torch.as_tensor(np.sort(order[count:])), torch.as_tensor(np.sort(order[:count]))
