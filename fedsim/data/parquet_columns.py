"""Columns of parquet files in the Hugging Face layout: which of them hold samples, labels and
clients, and what their values are.

`Parquet` (parquet.py) finds the columns of each file by the first functions here, reads the files
into a `FileContent` each, and joins them. Then it turns labels into class ids and names of clients
into ids. The owner of a row is its natural client, such as the writer of a text.

The Hub stores an image as a struct with the fields `bytes` and `path`, and describes the columns in
the metadata of the file (`features_of`). An array [n] has an element for each of n rows.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.core.arrays import Ints
from fedsim.core.errors import DataError
from fedsim.data.base import numbers_in

if TYPE_CHECKING:
    import pyarrow as pa

MAX_CLASSES = 1_000_000
"""Class ids must be below this number. The last layer of a model has an output for each id up to
the largest one, so that a wrong column would take all memory."""


@dataclass(frozen=True)
class FileContent:
    """The content of a file of n rows.

    - `samples`: the encoded images or texts [n].
    - `rows`: a table of the labels and, if there are any, of the owners.
    - `label_column`: the name of the column of labels.
    - `classes`: the names of the classes by their ids; empty if the metadata do not have them.
    """

    path: Path
    samples: list["pa.Scalar"]
    rows: "pa.Table"
    label_column: str
    classes: list[str]


def require_same_labels(contents: Sequence[FileContent]) -> None:
    """Raise `DataError` if two files have labels in different columns, or names of classes that
    differ."""
    first_described: FileContent | None = None
    for content in contents:
        if content.label_column != contents[0].label_column:
            raise DataError(
                f"dataset.label_column=null: the labels are in the column "
                f"{contents[0].label_column} of {contents[0].path}, and in {content.label_column} "
                f"of {content.path}; rename one of the columns"
            )
        if not content.classes:
            continue
        first_described = first_described or content
        if content.classes != first_described.classes:
            raise DataError(
                f"{first_described.path} and {content.path} number the classes differently: "
                f"{shorten(', '.join(first_described.classes), 60)} and "
                f"{shorten(', '.join(content.classes), 60)}; write both with the same ClassLabel, "
                "or store the labels as strings"
            )


def classes_of(contents: Sequence[FileContent]) -> list[str]:
    """Return the names of the classes from the first file that describes them."""
    for content in contents:
        if content.classes:
            return content.classes
    return []


def concatenate(contents: Sequence[FileContent]) -> "pa.Table":
    """Return the rows of all files as one table.

    Raises `DataError` if columns of equal name have types that do not fit together.
    """
    import pyarrow as pa

    rows = contents[0].rows
    for content in contents[1:]:  # one by one, so that an error names the file
        try:
            rows = pa.concat_tables([rows, content.rows], promote_options="permissive")
        except pa.ArrowException as error:
            raise DataError(
                f"{content.path}: a column differs from that of the files before it ({error}); "
                "write this column with the same type in all files, or move this file away"
            ) from error
    return rows


def pick_column(
    key: str, name: str | None, candidates: list[str], path: Path, schema: "pa.Schema"
) -> str:
    """Return the column `name`, or the only one of the `candidates` if `name` is None.

    Raises `DataError` if there is none, or several. `key` is the config key for the message.
    """
    fitting = candidates if name is None else [column for column in schema.names if column == name]
    if len(fitting) != 1:
        possible = " and ".join(fitting) or "none of them"
        raise DataError(
            f"dataset.{key}={name}: the columns are {', '.join(schema.names)} in {path}, and "
            f"{possible} may be meant; set it to one of them"
        )
    return fitting[0]


def require_one_column(key: str, name: str, samples: str, path: Path, schema: "pa.Schema") -> None:
    """Raise `DataError` if a column of labels or clients is that of the samples, or is not unique.

    `key` is the config key for the message. `samples` is the column of samples, or its field
    `bytes`.
    """
    if name == samples.removesuffix(".bytes"):
        raise DataError(f"{key}: is the column of samples in {path}; set it to another column")
    count = schema.names.count(name)
    if count > 1:
        raise DataError(f"{key}: {path} has {count} columns of this name; rename all but one")


def is_type(kind: "pa.DataType", *names: str) -> bool:
    """Return whether `kind` is one of the types that pyarrow calls `names`."""
    from pyarrow import types

    return any(getattr(types, f"is_{name}")(kind) for name in names)


def holds_bytes(kind: "pa.DataType") -> bool:
    """Return whether a column of this type may hold encoded images: bytes, or the Hub's structs."""
    if is_type(kind, "struct"):
        index = kind.get_field_index("bytes")
        return index >= 0 and holds_bytes(kind.field(index).type)
    return is_type(kind, "binary", "large_binary")


def class_names(schema: "pa.Schema", name: str) -> list[str]:
    """Return the names of the classes of a column by their ids; [] if its description has none."""
    names = features_of(schema).get(name, {}).get("names")
    return list(map(str, names)) if isinstance(names, list) else []


def features_of(schema: "pa.Schema") -> dict[str, dict[str, Any]]:
    """Return the Hugging Face description of each column that has one.

    `_type` is "Image", "ClassLabel" (which has `names`), "Value" and so on.
    """
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {name: value for name, value in features.items() if isinstance(value, dict)}
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return {}


def described_as(kind: str, schema: "pa.Schema") -> list[str]:
    """Return the columns that the Hugging Face description says to be of a kind."""
    features = features_of(schema)
    return [name for name in schema.names if features.get(name, {}).get("_type") == kind]


def class_labels(
    rows: "pa.Table", name: str, classes: Sequence[str], num_train: int
) -> tuple[Ints, int]:
    """Return the class ids [n] in the column `name`, and the number of classes.

    Integers are class ids, and `classes` the names of these classes, if the files have them. Other
    values are names of classes, which get ids in sorted order. The first `num_train` rows are those
    of the training files. Raises `DataError` if an id is out of range, or if a name occurs in test
    rows alone.
    """
    values = values_of(rows, name, "label_column")
    if np.issubdtype(values.dtype, np.integer):
        _check_ids(values, name, classes, num_train)
        return values.astype(np.int64), len(classes) or int(values.max()) + 1
    unknown = np.setdiff1d(values[num_train:], values[:num_train])
    if len(unknown):
        listed = shorten(", ".join(map(repr, unknown.tolist())), 60)
        raise DataError(
            f"dataset.label_column={name}: test rows have classes that no training row has: "
            f"{listed}; correct the spelling, or leave out these rows"
        )
    distinct, labels = np.unique(values, return_inverse=True)
    return labels.astype(np.int64), len(distinct)


def _check_ids(values: NDArray[Any], name: str, classes: Sequence[str], num_train: int) -> None:
    """Raise `DataError` if one of the `values` is not a class id."""
    key = f"dataset.label_column={name}"
    low, high = int(values.min()), int(values.max())
    if low < 0:
        count = np.count_nonzero(values == low)
        message = f"{key}: {count} of {len(values)} labels are {low}"
        if values[:num_train].min() < 0:
            raise DataError(f"{message}; number the classes from 0, or store the labels as strings")
        raise DataError(
            f"{message}, as in a test split without labels; move the files of the test split away: "
            "the validation split, or dataset.test_fraction of the rows, takes its place"
        )
    if high >= MAX_CLASSES:
        raise DataError(
            f"{key}: labels are numbers of classes and must lie in 0..{MAX_CLASSES - 1}, found "
            f"{low}..{high}; number the classes from 0, or store the labels as strings"
        )
    if classes and high >= len(classes):
        raise DataError(
            f"{key}: has the label {high}, but its description names only {len(classes)} classes; "
            "correct the description"
        )


def owners_of(table: "pa.Table", name: str, train: Ints, test: Ints) -> dict[str, Tensor]:
    """Return the id of each row's owner: `train_owners` [n_train] and `test_owners` [n_test].

    `train` and `test` are the positions of these rows. Owners get ids in the sorted order of their
    names. An owner of test rows that has no training row has the id -1. There are no `test_owners`
    if a test row has no owner: then only the training rows are divided by owners.
    """
    train_names = values_of(table.take(train), name, "client_column")
    known, numbers = np.unique(train_names, return_inverse=True)
    owners = {"train_owners": torch.as_tensor(numbers.astype(np.int64))}
    test_table = table.select([name]).take(test)
    if not test_table.column(name).null_count:
        test_names = values_of(test_table, name, "client_column")
        owners["test_owners"] = torch.as_tensor(numbers_in(known, test_names))
    return owners


def values_of(table: "pa.Table", name: str, key: str) -> NDArray[np.generic]:
    """Return the values of a column of integers, booleans or strings.

    Raises `DataError` for other types, and if a value is missing.
    """
    if name not in table.column_names:
        raise DataError(f"dataset.{key}={name}: no file has this column")
    column = table.column(name)
    if column.null_count:
        raise DataError(
            f"dataset.{key}={name}: {column.null_count} of its {len(column)} values are missing"
        )
    if not is_type(column.type, "integer", "string", "large_string", "boolean"):
        raise DataError(f"dataset.{key}={name}: must hold integers or strings, not {column.type}")
    return column.to_numpy()


def encoded_samples(table: "pa.Table", path: Path) -> list["pa.Scalar"]:
    """Return the encoded images, or texts, of all rows, which are in the first column.

    Raises `DataError` if a row has no image. A missing text counts as an empty one.
    """
    from pyarrow import compute

    column = table.column(0)
    if is_type(column.type, "struct"):
        column = compute.struct_field(column, "bytes")
    value_type = getattr(column.type, "value_type", column.type)
    if column.null_count and not is_type(value_type, "string", "large_string"):
        raise DataError(
            f"dataset.image_column={table.column_names[0]}: must hold the encoded images "
            f"themselves in every row; {column.null_count} are missing in {path}"
        )
    return list(column)
