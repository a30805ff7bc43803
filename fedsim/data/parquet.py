"""Any image-classification data set in the Hugging Face layout: parquet files with encoded images
and labels.

Files are assigned to splits by their names; a column whose name is None is found by its type or
name.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from annotated_types import Interval
from numpy.typing import NDArray
from torch import Tensor

from fedsim.core.arrays import Ints
from fedsim.core.errors import ConfigError, DataError
from fedsim.core.parameters import parameters
from fedsim.data.base import LoadedData, normalisation_problems, numbers_in
from fedsim.data.cache import (
    SourceFiles,
    load_or_build,
    require_memory,
    require_sha256,
    stat_of,
    visible,
)
from fedsim.data.images import FromPath, Side, decode

if TYPE_CHECKING:
    import pyarrow as pa

MAX_CLASSES = 1_000_000
"""The last layer of a model has an output for each number up to the largest label."""
LABEL_NAMES = ("label", "labels", "fine_label", "character", "target", "class")
SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test"}
SPLITS |= dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
"""The split that a word in the name of a file or folder stands for."""
SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})(.*)")
COPY = re.compile(r"[ _-]*\bcopy( \d+)?$|( - copy)? ?\(\d+\)$", re.IGNORECASE)
"""The end of a name that systems and browsers give to a copy: `train (1)`, `train copy`."""
BYTES_OF_ROW = 300
"""Memory that a row needs besides its values, while it is read."""
LARGE, MOST_EXPANSION = 2**30, 1000
"""Bytes above which a file is refused that expands by more than this factor."""


@parameters
class Parquet(FromPath):
    """Parquet files at `path`, a file or a folder.

    Without a test split, the validation split is used as test set; without either, a fixed random
    `test_fraction` of all rows. Images are structs with a field `bytes`, or bytes; labels are
    integers or strings. `client_column` holds the owner of each row. `size` scales all images to
    `size` x `size` pixels.
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
            if files := [place] if place.is_file() else visible(place, "**/*.parquet"):
                return place, files
        return self._places()[0], []

    def inspect(self) -> tuple[Path, dict[str, list[Path]]]:
        """The place of the files, and the files of each split. Of these, footers alone are read."""
        self.require_present(f"dataset.path={self.path}")
        root, paths = self._found()
        splits: dict[str, list[Path]] = {}
        for path in paths:
            splits.setdefault(_split_of(path, root, len(paths) == 1), []).append(path)
            stat_of(path)
            with path.open("rb") as file:
                self._columns(path, _open(path, file).schema_arrow)
        for split, files in splits.items():
            _require_one_reading(files, split)
        if "train" not in splits:
            raise DataError(
                f"dataset.path={self.path}: no file is a training split (its name or folder says 'train')"
            )
        return root, splits

    def load(self) -> LoadedData:
        root, splits = self.inspect()
        sources = SourceFiles(root)
        facts = []
        for split, files in splits.items():
            for file in files:
                sources.read(file)
                facts.append(f"{split} {file.name} {sources.sums[file]}")
        sha256 = sources.sha256
        require_sha256(self.sha256, sha256, f"dataset.path={self.path}")
        columns = {
            "image": self.image_column,
            "label": self.label_column,
            "client": self.client_column,
        }
        settings = [columns, self.size, self.test_fraction]
        fingerprint = hashlib.sha256(os.fsencode("\n".join([*facts, str(settings)]))).hexdigest()
        cache = self.cache_dir / f"parquet-{fingerprint[:32]}.safetensors"
        tensors = load_or_build(cache, lambda: self._decode(splits, sources))
        channels = tensors["train_x"].shape[1]
        mean, std = self.mean or [0.5] * channels, self.std or [0.5] * channels
        if problems := list(filter(None, normalisation_problems(mean, std, channels))):
            raise ConfigError(p.within("dataset") for p in problems)
        classes = int(tensors["num_classes"])
        return LoadedData.of(tensors, classes, mean, std, f"parquet {fingerprint}", sha256=sha256)

    def _columns(self, path: Path, schema: "pa.Schema") -> list[str]:
        """The columns of images (of a struct, its field `bytes`), of labels and, if any, of clients
        in a file."""
        images = [field.name for field in schema if _holds_bytes(field.type)]
        image = _chosen("image_column", self.image_column, images, path, schema)
        labels = [name for name in LABEL_NAMES if name in schema.names]
        columns = [image, _chosen("label_column", self.label_column, labels, path, schema)]
        columns += [
            name for name in schema.names if name == self.client_column
        ]  # test rows may have none
        kind = schema.field(image).type
        if not _holds_bytes(kind):
            rule = "must hold the encoded images themselves in every row"
            raise DataError(f"dataset.image_column={image}: {rule}, not {kind} as in {path}")
        if _is(kind, "struct"):
            columns[0] = f"{image}.bytes"
        return columns

    def _decode(self, splits: dict[str, list[Path]], sources: SourceFiles) -> dict[str, Tensor]:
        import pyarrow as pa

        train_files = splits["train"]
        test_files = splits.get("test", splits.get("validation", []))
        tables: list[pa.Table] = []
        images: list[pa.Scalar] = []
        total = 0
        for path in (*train_files, *test_files):
            content = sources.read(path)
            file = _open(path, pa.BufferReader(content))
            columns = self._columns(path, file.schema_arrow)
            need = _bytes_needed(file.metadata, columns)
            total += need
            require_memory(need, str(path), max(LARGE, MOST_EXPANSION * len(content)))
            require_memory(total, f"dataset.path={self.path}")
            if need < LARGE:  # then an image that is in many rows is in memory once
                file = _open(path, pa.BufferReader(content), read_dictionary=columns[:1])
            with _sound(path):
                table = file.read(columns=columns)
            images += _encoded_images(table, path)
            tables.append(_without_categories(table.remove_column(0)))
            rows = _concatenate(tables, path)
        num_train = sum(table.num_rows for table in tables[: len(train_files)])
        train, test = self._split_rows(num_train, rows.num_rows if test_files else None)
        labels, num_classes = _class_labels(rows, columns[1])
        name = f"dataset.path={self.path}"
        x = decode(methodcaller("as_py"), images, mode=None, size=self.size, name=name)
        y = torch.as_tensor(labels)
        tensors = {"train_x": x[train], "train_y": y[train], "test_x": x[test], "test_y": y[test]}
        tensors["num_classes"] = torch.tensor(num_classes)
        return (
            tensors
            if self.client_column is None
            else tensors | _owners(rows, self.client_column, train, test)
        )

    def _split_rows(self, num_train: int, num_rows: int | None) -> tuple[Ints, Ints]:
        """The positions of the training rows and of the test rows, which come after `num_train`
        others.

        `num_rows` counts both; None: there is no test split.
        """
        for split, count in (
            ("train", num_train),
            ("test", num_train if num_rows is None else num_rows - num_train),
        ):
            if not count:
                raise DataError(f"dataset.path={self.path}: the {split} split has no rows")
        if num_rows is not None:
            return np.arange(num_train), np.arange(num_train, num_rows)
        count = round(self.test_fraction * num_train)
        if not 0 < count < num_train:
            told = f"{self.path} has no test split; set the share of its {num_train} rows to test on, e.g. 0.1"
            raise DataError(f"dataset.test_fraction={self.test_fraction}: {told}")
        order = np.random.default_rng(0).permutation(
            num_train
        )  # fixed: it belongs to the data set, not to a run
        return np.sort(order[count:]), np.sort(order[:count])


def _split_of(file: Path, root: Path, is_lone: bool) -> str:
    """The split of a file below `root`, from a word in its name ("train-00000-of-00002") or else
    its folder's.

    A lone file that names no split, or several, is training data; one of several files raises
    `DataError`.
    """
    for name in (file.stem, file.parent.name if root not in (file.parent, file) else ""):
        splits = {SPLITS[word] for word in re.findall(r"[a-z]+", name.lower()) if word in SPLITS}
        if len(splits) == 1:
            return splits.pop()
    if is_lone:
        return "train"
    told = f"its name, or its folder's, must have a word of one split ({', '.join(SPLITS)})"
    raise DataError(f"{file}: {told}; rename it, or move it away if it is not part of the data set")


def _require_one_reading(files: Sequence[Path], split: str) -> None:
    """Raise `DataError` where the rows of a split are there twice: in two folders, such as those of
    two versions or configs, as a copy, or divided into two numbers of shards."""
    first: dict[str, tuple[object, Path]] = {"": (files[0].parent, files[0])}
    for file in files:
        name = COPY.sub("", file.stem)
        shard = SHARD.fullmatch(name)
        form = (name != file.stem, shard and shard[3])
        for key, reading in (("", file.parent), (shard[1] + shard[4] if shard else name, form)):
            other, path = first.setdefault(key, (reading, file))
            if other != reading:
                remedy = "move one of them away, or let dataset.path name the folder of one"
                raise DataError(
                    f"{path} and {file} would be read as one {split} split, its rows twice; {remedy}"
                )


def _missing_shards(files: Sequence[Path]) -> list[str]:
    shards: dict[tuple[Path, str, int], set[int]] = {}
    for file in files:
        if match := SHARD.fullmatch(file.stem):
            name, number, count = match[1] + match[4], int(match[2]), int(match[3])
            shards.setdefault((file.parent, name, count), set()).add(number)
    return [
        f"shards {str(missing)[1:-1]} of the {count} of {name!r} in {folder}"
        for (folder, name, count), numbers in shards.items()
        if (missing := sorted(set(range(count)) - numbers))
    ]


@contextmanager
def _sound(path: Path) -> Iterator[None]:
    """Raise `DataError` for what PyArrow finds wrong with a file."""
    import pyarrow as pa

    try:
        yield
    except MemoryError:  # an ArrowException, too
        raise
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path} is no sound parquet file ({error}); delete it and fetch it again"
        ) from error


def _open(path: Path, source: Any, **options: Any) -> Any:
    """A parquet file. Checksums of its pages are verified, if it has them (few writers add
    them)."""
    import pyarrow.parquet as pq

    with _sound(path):
        return pq.ParquetFile(source, page_checksum_verification=True, **options)


def _chosen(
    key: str, name: str | None, candidates: list[str], path: Path, schema: "pa.Schema"
) -> str:
    """The column `name`, or the only one of the `candidates` if that is None."""
    fitting = candidates if name is None else [column for column in schema.names if column == name]
    if len(fitting) != 1:
        fault = f"the columns are {', '.join(schema.names)} in {path}"
        seen = " and ".join(fitting) or "none of them"
        raise DataError(
            f"dataset.{key}={name}: {fault}, and {seen} may be meant; set it to one of them"
        )
    return fitting[0]


def _bytes_needed(metadata: Any, columns: Sequence[str]) -> int:
    """Memory that the columns of a file need, by its footer."""
    need = BYTES_OF_ROW * metadata.num_rows
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for index in range(group.num_columns):
            chunk = group.column(index)
            if chunk.path_in_schema in columns:
                need += chunk.total_uncompressed_size
    return need


def _without_categories(table: "pa.Table") -> "pa.Table":
    """Replace numbers of categories by what they stand for."""
    for index, column in enumerate(table.columns):
        if _is(column.type, "dictionary"):
            table = table.set_column(
                index, table.column_names[index], column.cast(column.type.value_type)
            )
    return table


def _concatenate(tables: Sequence["pa.Table"], latest: Path) -> "pa.Table":
    import pyarrow as pa

    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        remedy = "write the files of all splits with one type a column, or move one away"
        raise DataError(
            f"{latest}: a column differs from that of the files before it ({error}); {remedy}"
        ) from error


def _encoded_images(table: "pa.Table", path: Path) -> list["pa.Scalar"]:
    """The encoded images of all rows, from the first column, of bytes or of structs with a field
    `bytes`."""
    from pyarrow import compute

    column = table.column(0)
    if _is(column.type, "struct"):
        column = compute.struct_field(column, "bytes")
    if column.null_count:
        fault = f"must hold the encoded images themselves in every row; {column.null_count} are missing in {path}"
        raise DataError(f"dataset.image_column={table.column_names[0]}: {fault}")
    return list(column)


def _holds_bytes(kind: "pa.DataType") -> bool:
    if _is(kind, "struct"):
        place = kind.get_field_index("bytes")
        return place >= 0 and _holds_bytes(kind.field(place).type)
    return _is(kind, "binary", "large_binary")


def _is(kind: "pa.DataType", *names: str) -> bool:
    """Whether a type is one of those that pyarrow calls `names`."""
    from pyarrow import types

    return any(getattr(types, f"is_{name}")(kind) for name in names)


def _class_labels(table: "pa.Table", name: str) -> tuple[Ints, int]:
    """Labels [n] and the number of classes. Integer labels are kept; others are numbered in sorted
    order."""
    values = _values(table, name, "label_column")
    if not np.issubdtype(values.dtype, np.integer):
        known, labels = np.unique(values, return_inverse=True)
        return labels.astype(np.int64), len(known)
    least = int(values.min())
    if least < 0:
        count = np.count_nonzero(values == least)
        fault = f"{count} of {len(values)} labels are {least}, as in a test split that hides them"
        remedy = "move its files away: the validation split, or a dataset.test_fraction of the rows, takes its place"
        raise DataError(f"dataset.label_column={name}: {fault}; {remedy}")
    if values.max() >= MAX_CLASSES:
        found = f"must lie in 0..{MAX_CLASSES - 1}, found {values.min()}..{values.max()}"
        remedy = "number the classes from 0, or store the labels as strings"
        raise DataError(
            f"dataset.label_column={name}: labels are numbers of classes and {found}; {remedy}"
        )
    return values.astype(np.int64), max(int(values.max()) + 1, _num_named_classes(table, name))


def _num_named_classes(table: "pa.Table", name: str) -> int:
    """Number of class names in the Hugging Face metadata of a column; 0 if there are none."""
    try:
        features = json.loads((table.schema.metadata or {})[b"huggingface"])["info"]["features"]
        return len(features[name]["names"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return 0


def _owners(table: "pa.Table", name: str, train: Ints, test: Ints) -> dict[str, Tensor]:
    """The owners of the training rows, and those of the test rows by the same numbers, -1 for
    owners of no training row; none of test rows if one of them lacks an owner."""
    known, codes = np.unique(_values(table.take(train), name, "client_column"), return_inverse=True)
    owners = {"train_owners": torch.as_tensor(codes.astype(np.int64))}
    tested = table.select([name]).take(test)
    if tested.column(name).null_count:
        return owners
    return owners | {
        "test_owners": torch.as_tensor(numbers_in(known, _values(tested, name, "client_column")))
    }


def _values(table: "pa.Table", name: str, key: str) -> NDArray[np.generic]:
    """The values of a column of integers, booleans or strings.

    Raises `DataError` for other types, and where a value is missing.
    """
    if name not in table.column_names:
        raise DataError(f"dataset.{key}={name}: no file has this column")
    column = table.column(name)
    if column.null_count:
        raise DataError(
            f"dataset.{key}={name}: {column.null_count} of its {len(column)} values are missing"
        )
    if not _is(column.type, "integer", "string", "large_string", "boolean"):
        raise DataError(f"dataset.{key}={name}: must hold integers or strings, not {column.type}")
    return column.to_numpy()
