"""Any image-classification data set in the Hugging Face layout: parquet files with encoded images and labels.

Files are assigned to splits by their names; a column whose name is None is found by its type or name.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import torch
from annotated_types import Interval
from numpy.typing import NDArray
from torch import Tensor

from fedsim.core.errors import ConfigError, DataError
from fedsim.core.parameters import parameters
from fedsim.data.base import LoadedData, normalisation_problems, numbers_in
from fedsim.data.cache import load_or_build, require_sha256, sha256_of_files
from fedsim.data.images import FromPath, Side, decode

if TYPE_CHECKING:
    import pyarrow as pa

MAX_CLASSES = 1_000_000
"""The last layer of a model has an output for each number up to the largest label."""
LABEL_NAMES = ("label", "labels", "fine_label", "character", "target", "class")
SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test"}
SPLITS |= dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
"""The split that a word in the name of a file or folder stands for."""


@parameters
class Parquet(FromPath):
    """Parquet files at `path`, a file or a folder.

    Without a test split, the validation split is used as test set; without either, a fixed random `test_fraction` of
    all rows. Images are structs with a field `bytes`, or bytes; labels are integers or strings. `client_column` holds
    the owner of each row. `size` scales all images to `size` x `size` pixels.
    """

    image_column: str | None
    label_column: str | None
    client_column: str | None
    test_fraction: Annotated[float, Interval(ge=0, lt=1)]
    size: Side | None

    def absent(self) -> list[str]:
        _, files = self._found()
        return _missing_shards(files) if files else [f"a parquet file at {self._searched()}"]

    def _found(self) -> tuple[Path, list[Path]]:
        """The first place of `path` that has parquet files, and these, sorted."""
        for place in self._places():
            if files := [place] if place.is_file() else sorted(place.rglob("*.parquet")):
                return place, files
        return self._places()[0], []

    def load(self) -> LoadedData:
        self.require_present(f"dataset.path={self.path}")
        root, paths = self._found()
        splits = [_split_of(file, root, len(paths) == 1) for file in paths]
        files = {split: [f for f, own in zip(paths, splits, strict=True) if own == split] for split in splits}
        sha256, sums = sha256_of_files(root, paths)
        require_sha256(self.sha256, sha256, f"dataset.path={self.path}")
        facts = [f"{split} {f.name} {sums[f]}" for split, own in files.items() for f in own]
        columns = {"image": self.image_column, "label": self.label_column, "client": self.client_column}
        settings = [columns, self.size, self.test_fraction]
        fingerprint = hashlib.sha256("\n".join([*facts, str(settings)]).encode()).hexdigest()
        cache = self.cache_dir / f"parquet-{fingerprint[:32]}.safetensors"
        tensors = load_or_build(cache, lambda: self._decode(files))
        channels = tensors["train_x"].shape[1]
        mean, std = self.mean or [0.5] * channels, self.std or [0.5] * channels
        if problems := list(filter(None, normalisation_problems(mean, std, channels))):
            raise ConfigError(p.within("dataset") for p in problems)
        classes = int(tensors["num_classes"])
        return LoadedData.of(tensors, classes, mean, std, f"parquet {fingerprint}", sha256=sha256)

    def _decode(self, files: dict[str, list[Path]]) -> dict[str, Tensor]:
        rows, train, test = self._split_rows({split: _read(paths) for split, paths in files.items()})
        labels, num_classes = _class_labels(rows, self.label_column)
        encoded = _encoded_images(rows, self.image_column)
        x = decode(encoded, mode=None, size=self.size, name=f"dataset.path={self.path}")
        y = torch.as_tensor(labels)
        tensors = {"train_x": x[train], "train_y": y[train], "test_x": x[test], "test_y": y[test]}
        tensors["num_classes"] = torch.tensor(num_classes)
        return tensors if self.client_column is None else tensors | _owners(rows, self.client_column, train, test)

    def _split_rows(self, tables: dict[str, "pa.Table"]) -> tuple["pa.Table", NDArray[np.int64], NDArray[np.int64]]:
        """A table of all rows, and the positions of its training rows and of its test rows."""
        train, test = tables.get("train"), tables.get("test", tables.get("validation"))
        if train is None:
            raise DataError(f"dataset.path={self.path}: no file is a training split (its name or folder says 'train')")
        for split, table in (("train", train), ("test", test)):
            if table is not None and not table.num_rows:
                raise DataError(f"dataset.path={self.path}: the {split} split has no rows")
        if test is not None:
            rows = _concatenate([train, test])
            return rows, np.arange(train.num_rows), np.arange(train.num_rows, rows.num_rows)
        count = round(self.test_fraction * train.num_rows)
        if not 0 < count < train.num_rows:
            told = f"{self.path} has no test split; set the share of its {train.num_rows} rows to test on, e.g. 0.1"
            raise DataError(f"dataset.test_fraction={self.test_fraction}: {told}")
        order = np.random.default_rng(0).permutation(train.num_rows)  # fixed: it belongs to the data set, not to a run
        return train, np.sort(order[count:]), np.sort(order[:count])


def _split_of(file: Path, root: Path, is_lone: bool) -> str:
    """The split of a file below `root`, from a word in its name ("train-00000-of-00002") or else its folder's.

    A lone file that names no split, or several, is training data; one of several files raises `DataError`.
    """
    for name in (file.stem, file.parent.name if root not in (file.parent, file) else ""):
        splits = {SPLITS[word] for word in re.findall(r"[a-z]+", name.lower()) if word in SPLITS}
        if len(splits) == 1:
            return splits.pop()
    if is_lone:
        return "train"
    told = f"its name, or its folder's, must have a word of one split ({', '.join(SPLITS)})"
    raise DataError(f"{file}: {told}; rename it, or move it away if it is not part of the data set")


def _missing_shards(files: Sequence[Path]) -> list[str]:
    shards: dict[tuple[Path, str, int], set[int]] = {}
    for file in files:
        if match := re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})(.*)", file.stem):
            name, number, count = match[1] + match[4], int(match[2]), int(match[3])
            shards.setdefault((file.parent, name, count), set()).add(number)
    return [
        f"shards {str(missing)[1:-1]} of the {count} of {name!r} in {folder}"
        for (folder, name, count), numbers in shards.items()
        if (missing := sorted(set(range(count)) - numbers))
    ]


def _read(paths: Sequence[Path]) -> "pa.Table":
    """The rows of all files. Checksums of pages are verified in files that have them (few writers add them)."""
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
    import pyarrow as pa

    try:
        return pa.concat_tables(tables, promote_options="default").combine_chunks()
    except pa.ArrowException as error:
        raise DataError(f"dataset.path: the parquet files do not agree in their columns ({error})") from error


def _encoded_images(table: "pa.Table", name: str | None) -> list[bytes]:
    """The encoded images of all rows, from a column of bytes or of structs with a field `bytes`."""
    from pyarrow import compute

    name = name or next((field.name for field in table.schema if _holds_bytes(field.type)), None)
    if name is None:
        raise DataError(f"dataset.image_column: no column of images among {', '.join(table.column_names)}")
    column = _column(table, name, "image_column")
    if _holds_bytes(column.type):
        column = compute.struct_field(column, "bytes") if _is(column.type, "struct") else column
        if not column.null_count:
            return column.to_pylist()
    raise DataError(f"dataset.image_column={name}: must hold the encoded images themselves in every row")


def _holds_bytes(kind: "pa.DataType") -> bool:
    if _is(kind, "struct"):
        place = kind.get_field_index("bytes")
        return place >= 0 and _holds_bytes(kind.field(place).type)
    return _is(kind, "binary", "large_binary")


def _is(kind: "pa.DataType", *names: str) -> bool:
    """Whether a type is one of those that pyarrow calls `names`."""
    from pyarrow import types

    return any(getattr(types, f"is_{name}")(kind) for name in names)


def _class_labels(table: "pa.Table", name: str | None) -> tuple[NDArray[np.int64], int]:
    """Labels [n] and the number of classes. Integer labels are kept; others are numbered in sorted order."""
    name = name or next((n for n in LABEL_NAMES if n in table.column_names), None)
    if name is None:
        raise DataError(f"dataset.label_column: none of {', '.join(LABEL_NAMES)} among {table.column_names}")
    values = _values(table, name, "label_column")
    if not np.issubdtype(values.dtype, np.integer):
        known, labels = np.unique(values, return_inverse=True)
        return labels.astype(np.int64), len(known)
    if values.min() < 0 or values.max() >= MAX_CLASSES:
        found = f"must lie in 0..{MAX_CLASSES - 1}, found {values.min()}..{values.max()}"
        remedy = "number the classes from 0, or store the labels as strings"
        raise DataError(f"dataset.label_column={name}: labels are numbers of classes and {found}; {remedy}")
    return values.astype(np.int64), max(int(values.max()) + 1, _num_named_classes(table, name))


def _num_named_classes(table: "pa.Table", name: str) -> int:
    """Number of class names in the Hugging Face metadata of a column; 0 if there are none."""
    try:
        features = json.loads((table.schema.metadata or {})[b"huggingface"])["info"]["features"]
        return len(features[name]["names"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return 0


def _owners(table: "pa.Table", name: str, train: NDArray[np.int64], test: NDArray[np.int64]) -> dict[str, Tensor]:
    """The owners of the training rows, and those of the test rows by the same numbers, -1 for owners of no training
    row; none of test rows if one of them lacks an owner."""
    known, codes = np.unique(_values(table.take(train), name, "client_column"), return_inverse=True)
    owners = {"train_owners": torch.as_tensor(codes.astype(np.int64))}
    tested = table.select([name]).take(test)
    if tested.column(name).null_count:
        return owners
    return owners | {"test_owners": torch.as_tensor(numbers_in(known, _values(tested, name, "client_column")))}


def _values(table: "pa.Table", name: str, key: str) -> NDArray[np.generic]:
    """The values of a column of integers, booleans or strings. Raises `DataError` for other types."""
    column = _column(table, name, key)
    if not _is(column.type, "integer", "string", "large_string", "boolean"):
        raise DataError(f"dataset.{key}={name}: must hold integers or strings, not {column.type}")
    return column.to_numpy()


def _column(table: "pa.Table", name: str, key: str) -> "pa.ChunkedArray":
    """The column `name`, categories resolved. Raises `DataError` if it is absent or has missing values."""
    if name not in table.column_names:
        raise DataError(f"dataset.{key}={name}: the columns are {', '.join(table.column_names)}")
    column = table.column(name)
    if column.null_count:
        raise DataError(f"dataset.{key}={name}: {column.null_count} of its {len(column)} values are missing")
    return column.cast(column.type.value_type) if _is(column.type, "dictionary") else column
