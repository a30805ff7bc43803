"""Any image-classification data set in the Hugging Face layout: parquet files with encoded images.

The name of a file, or of its folder, says to which split its rows belong: train, test or
validation. A split may be divided into several files, its shards. The owner of a row is its natural
client, such as the writer of a text. A column that the config does not name is found by its type
(images) or its name (labels).

`Parquet.load` reads each file, joins the rows of all files, training rows first, and decodes the
images. Shapes: n samples.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

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
"""Maximum number of classes; the last layer of a model has an output for each label up to the
largest."""
LABEL_NAMES = ("label", "labels", "fine_label", "character", "target", "class")
"""Names by which the column of labels is found."""
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
SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})(.*)")
"""The name of a shard, such as train-00000-of-00002: what precedes, number, count, what follows."""
COPY = re.compile(r"[ _-]*\bcopy( \d+)?$|( - copy)? ?\(\d+\)$", re.IGNORECASE)
"""The end of a name that systems and browsers give to a copy: `train (1)`, `train copy`."""
ROW_BYTES = 300
"""Memory that a row needs in addition to its values while it is read."""
LARGE_BYTES = 2**30
"""Files that need less memory than this are never rejected for their expansion."""
MAX_EXPANSION = 1000
"""Maximum ratio of memory to file size of a large file; a greater one is a decompression bomb."""


@parameters
class Parquet(FromPath):
    """Parquet files at `path`, which is a file or a folder.

    Without a test split, the validation split becomes the test set. Without either, a random
    `test_fraction` of all rows does, which is the same in every run. Images are bytes, or structs
    with a field `bytes`; labels are integers or strings.
    """

    patterns: ClassVar[tuple[str, ...]] = ("**/*.parquet",)
    """The files of a folder that are read."""
    image_column: str | None
    """The column of images; None finds it."""
    label_column: str | None
    """The column of labels; None finds it."""
    client_column: str | None
    """The column that names the owner of each row; None: rows have no owners."""
    test_fraction: Annotated[float, Interval(ge=0, lt=1)]
    """The share of all rows that becomes the test set if no file is one."""
    size: Side | None
    """Height and width to which images are scaled; None keeps their size."""

    def absent(self) -> list[str]:
        """Name the missing shards, or the missing file if there is none at all."""
        _, files = self._find_files()
        return _missing_shards(files) if files else [f"a parquet file at {self._searched()}"]

    def _find_files(self) -> tuple[Path, list[Path]]:
        """Return the first place of `path` that has parquet files, and these files, sorted."""
        places = self._places()
        for place in places:
            files = [place] if place.is_file() else self._files_below(place)
            if files:
                return place, files
        return places[0], []

    def _files_below(self, folder: Path) -> list[Path]:
        return sorted(file for pattern in self.patterns for file in visible(folder, pattern))

    def inspect(self) -> tuple[Path, dict[str, list[Path]]]:
        """Return the place of the files, and the files of each split.

        Only the files' footers are read. Raises `DataError` if a file has no usable columns, if
        rows would be read twice, or if there is no training split.
        """
        self.require_present(f"dataset.path={self.path}")
        root, paths = self._find_files()
        splits: dict[str, list[Path]] = {}
        for path in paths:
            split = self._split_of(path, root, is_only_file=len(paths) == 1)
            if split is None:
                continue
            splits.setdefault(split, []).append(path)
            stat_of(path)
            with path.open("rb") as file:
                self._columns(path, self._described(path, open_table(path, file).schema_arrow))
        for split, files in splits.items():
            _require_unique_rows(files, split)
        if "train" not in splits:
            raise DataError(
                f"dataset.path={self.path}: no file is a training split (its name or folder says "
                "'train')"
            )
        return root, splits

    def describe(self) -> list[str]:
        """Return lines about each column of the first training file, the splits and the clients."""
        _, splits = self.inspect()
        file = splits["train"][0]
        with file.open("rb") as stream:
            table = open_table(file, stream)
            schema = self._described(file, table.schema_arrow)
            first_batch = next(table.iter_batches(batch_size=1), None)
        sample, *others = self._columns(file, schema)
        chosen = (sample.removesuffix(".bytes"), *others)
        uses = dict(zip(chosen, ("sample", "label", "client"), strict=False))
        rows = first_batch.to_pylist() if first_batch else []
        lines = []
        for field in schema:
            line = f"column {field.name}: {field.type}"
            classes = _class_names(schema, field.name)
            if classes:
                line += f", {len(classes)} classes ({shorten(', '.join(classes), 40)})"
            elif rows and not _holds_bytes(field.type):
                line += f", for example {shorten(str(rows[0][field.name]), 40)}"
            if field.name in uses:
                line += f" (the {uses[field.name]})"
            lines.append(line)
        for split, files in splits.items():
            num_rows = 0
            clients: set[Any] = set()
            for file in files:
                with file.open("rb") as stream:
                    table = open_table(file, stream)
                    num_rows += table.metadata.num_rows
                    if self.client_column in table.schema_arrow.names:
                        clients.update(table.read([self.client_column]).column(0).to_pylist())
            owned = f" of {len(clients):,} clients" if clients else ""
            lines.append(f"split {split}: {num_rows:,} samples{owned}")
        read = {file for files in splits.values() for file in files}
        unread = [file.name for file in self._find_files()[1] if file not in read]
        if unread:
            lines.append(f"not read: {shorten(', '.join(unread), 100)}")
        return lines

    def load(self) -> LoadedData:
        """Return the data, from the cache if the same files were decoded in the same way before."""
        root, splits = self.inspect()
        sources = SourceFiles(root)
        # everything that the decoded tensors depend on; its hash names the file in the cache
        facts = []
        for split, files in splits.items():
            for file in files:
                sources.read(file)
                _require_new_content(file, sources)
                facts.append(f"{split} {file.name} {sources.sums[file]}")
        sha256 = sources.sha256
        require_sha256(self.sha256, sha256, f"dataset.path={self.path}")
        columns = {
            "image": self.image_column,
            "label": self.label_column,
            "client": self.client_column,
        }
        facts.append(str([columns, self.size, self.test_fraction]))
        facts += self._further_facts()
        fingerprint = hashlib.sha256(os.fsencode("\n".join(facts))).hexdigest()
        cache = self.cache_dir / f"parquet-{fingerprint[:32]}.safetensors"
        tensors = load_or_build(cache, lambda: self._decode(splits, sources))
        return self._loaded(tensors, f"parquet {fingerprint}", sha256)

    def _further_facts(self) -> list[str]:
        """Return what the tensors of a subclass depend on in addition."""
        return []

    def _loaded(self, tensors: dict[str, Tensor], fingerprint: str, sha256: str) -> LoadedData:
        """Return the data. Raises `ConfigError` if `mean` or `std` has another number of
        channels."""
        channels = tensors["train_x"].shape[1]
        mean = self.mean or [0.5] * channels
        std = self.std or [0.5] * channels
        problems = [p for p in normalisation_problems(mean, std, channels) if p is not None]
        if problems:
            raise ConfigError(problem.within("dataset") for problem in problems)
        num_classes = int(tensors["num_classes"])
        return LoadedData.of(tensors, num_classes, mean, std, fingerprint, sha256=sha256)

    def _described(self, path: Path, schema: "pa.Schema") -> "pa.Schema":
        """Return the schema of a file with the description of its columns, if there is one."""
        return schema

    def _split_of(self, file: Path, root: Path, *, is_only_file: bool) -> str | None:
        """Return the split of a file below `root`; None: the file is not read."""
        return _split_of(file, root, is_only_file=is_only_file)

    def _columns(self, path: Path, schema: "pa.Schema") -> list[str]:
        """Return the names of a file's columns of samples, labels and, if it has one, clients.

        For images in structs, the first name is the name of the field: `image.bytes`. Raises
        `DataError` if the file has no such columns of samples and labels.
        """
        samples = self._sample_column(path, schema)
        candidates = self._label_columns(schema)
        label = pick_column("label_column", self.label_column, candidates, path, schema)
        columns = [samples, label]
        if self.client_column is not None and self.client_column in schema.names:
            columns.append(self.client_column)
        return columns

    def _sample_column(self, path: Path, schema: "pa.Schema") -> str:
        """Return the name of the column of images, or of its field."""
        candidates = self._image_columns(schema)
        image = pick_column("image_column", self.image_column, candidates, path, schema)
        kind = schema.field(image).type
        if not _holds_bytes(kind):
            raise DataError(
                f"dataset.image_column={image}: must hold the encoded images themselves in every "
                f"row, not {kind} as in {path}"
            )
        return f"{image}.bytes" if is_type(kind, "struct") else image

    def _image_columns(self, schema: "pa.Schema") -> list[str]:
        """Return the columns that may hold the images, by their description or their types."""
        with_bytes = [field.name for field in schema if _holds_bytes(field.type)]
        return described_as("Image", schema) or with_bytes

    def _label_columns(self, schema: "pa.Schema") -> list[str]:
        """Return the columns that may hold the labels, by their names."""
        return [name for name in LABEL_NAMES if name in schema.names]

    def _decode(self, splits: dict[str, list[Path]], sources: SourceFiles) -> dict[str, Tensor]:
        """Return the tensors of both splits, decoded from the files."""
        train_files = splits["train"]
        test_files = splits.get("test", splits.get("validation", []))
        tables: list[pa.Table] = []
        samples: list[pa.Scalar] = []
        total_bytes = 0
        first_with_classes: tuple[Path, list[str]] | None = None
        for path in (*train_files, *test_files):
            table, num_bytes, label_column = self._read_table(path, sources)
            classes = _class_names(table.schema, label_column)
            if classes:
                first_with_classes = first_with_classes or (path, classes)
                _require_same_classes(*first_with_classes, path, classes)
            total_bytes += num_bytes
            require_memory(total_bytes, f"dataset.path={self.path}")
            samples += _encoded_samples(table, path)
            tables.append(_without_categories(table.remove_column(0)))
            rows = _concatenate(tables, path)  # after each file, so that an error names the file
        num_train = sum(table.num_rows for table in tables[: len(train_files)])
        train, test = self._split_rows(num_train, rows.num_rows if test_files else None)
        labels, num_classes = _class_labels(rows, label_column, num_train if test_files else None)
        x = self._samples(samples)
        y = torch.as_tensor(labels)
        tensors = {"train_x": x[train], "train_y": y[train], "test_x": x[test], "test_y": y[test]}
        tensors["num_classes"] = torch.tensor(num_classes)
        if self.client_column is not None:
            tensors |= _owners(rows, self.client_column, train, test)
        return tensors

    def _samples(self, values: "list[pa.Scalar]") -> Tensor:
        """Return the samples of the values of their column: images [n, C, H, W] uint8."""
        name = f"dataset.path={self.path}"
        return decode(lambda value: value.as_py(), values, mode=None, size=self.size, name=name)

    def _read_table(self, path: Path, sources: SourceFiles) -> tuple["pa.Table", int, str]:
        """Return the rows of a file, the memory that they need, and the name of the label column.

        The first column holds the images. Raises `DataError` before reading if the rows need too
        much memory.
        """
        import pyarrow as pa

        content = sources.read(path)
        file = open_table(path, pa.BufferReader(content))
        schema = self._described(path, file.schema_arrow)
        columns = self._columns(path, schema)
        num_bytes = _bytes_needed(file.metadata, columns)
        require_memory(num_bytes, str(path), max(LARGE_BYTES, MAX_EXPANSION * len(content)))
        if num_bytes < LARGE_BYTES:
            # As a dictionary, an image that is in many rows is in memory once.
            file = open_table(path, pa.BufferReader(content), read_dictionary=columns[:1])
        with _data_errors(path):
            table = file.read(columns=columns).replace_schema_metadata(schema.metadata)
            return table, num_bytes, columns[1]

    def _split_rows(self, num_train: int, num_rows: int | None) -> tuple[Ints, Ints]:
        """Return the positions of the training rows and of the test rows.

        The first `num_train` rows are those of the training split, and the rows of the test split
        follow. `num_rows` is the number of rows of both; None: there is no test split. Raises
        `DataError` if one of them would be empty.
        """
        if num_rows is not None:
            for split, count in (("train", num_train), ("test", num_rows - num_train)):
                if count == 0:
                    raise DataError(f"dataset.path={self.path}: the {split} split has no rows")
            return np.arange(num_train), np.arange(num_train, num_rows)
        if num_train == 0:
            raise DataError(f"dataset.path={self.path}: the train split has no rows")
        num_test = round(self.test_fraction * num_train)
        if not 0 < num_test < num_train:
            raise DataError(
                f"dataset.test_fraction={self.test_fraction}: {self.path} has no test split; set "
                f"the share of its {num_train} rows to test on, e.g. 0.1"
            )
        # The seed is fixed, because the split belongs to the data set, not to a run.
        order = np.random.default_rng(0).permutation(num_train)
        return np.sort(order[num_test:]), np.sort(order[:num_test])


def _split_of(file: Path, root: Path, *, is_only_file: bool) -> str:
    """Return the split of a file below `root`.

    A word in the file's name decides ("train-00000-of-00002"), otherwise a word in its folder's
    name. If these words name no split, or several, the only file of a data set is training data.
    One of several files raises `DataError`.
    """
    names = [file.stem]
    if root not in (file, file.parent):
        names.append(file.parent.name)
    for name in names:
        words = re.findall(r"[a-z]+", name.lower())
        splits = {SPLITS[word] for word in words if word in SPLITS}
        if len(splits) == 1:
            return splits.pop()
    if is_only_file:
        return "train"
    raise DataError(
        f"{file}: its name, or its folder's, must have a word of one split ({', '.join(SPLITS)}); "
        "rename it, or move it away if it is not part of the data set"
    )


def _require_unique_rows(files: Sequence[Path], split: str) -> None:
    """Raise `DataError` if the files hold the rows of a split twice.

    fedsim concludes this if they lie in two folders (two versions or configs), if one is a copy of
    another, or if they divide the rows into two different numbers of shards.
    """
    # What all files with equal key must have in common, and the first of these files. The key "" is
    # for all files, whose folder must be the same.
    variants: dict[str, tuple[object, Path]] = {"": (files[0].parent, files[0])}
    for file in files:
        name = COPY.sub("", file.stem)
        is_copy = name != file.stem
        shard = SHARD.fullmatch(name)
        data_name = shard[1] + shard[4] if shard else name
        num_shards = shard and shard[3]
        for key, variant in (("", file.parent), (data_name, (is_copy, num_shards))):
            first_variant, first_file = variants.setdefault(key, (variant, file))
            if first_variant != variant:
                raise DataError(
                    f"{first_file} and {file} would be read as one {split} split, its rows twice; "
                    "move one of them away, or let dataset.path name the folder of one"
                )


def _require_new_content(file: Path, sources: SourceFiles) -> None:
    """Raise `DataError` if another of the files that were read has the same rows as `file`."""
    for other, checksum in sources.sums.items():
        if other == file or checksum != sources.sums[file]:
            continue
        with file.open("rb") as stream:
            has_rows = open_table(file, stream).metadata.num_rows > 0
        if has_rows:
            raise DataError(f"{other} and {file} have the same content; move one of them away")


def _require_same_classes(
    first: Path, first_classes: list[str], path: Path, classes: list[str]
) -> None:
    """Raise `DataError` if the numbers of classes have other names in `path` than in the first
    file."""
    if classes != first_classes:
        raise DataError(
            f"{first} and {path} number the classes differently: "
            f"{shorten(', '.join(first_classes), 60)} and {shorten(', '.join(classes), 60)}; write "
            "both with the same ClassLabel, or store the labels as strings"
        )


def _missing_shards(files: Sequence[Path]) -> list[str]:
    """Name the shards that are not there. The names of the other shards tell how many there are."""
    present: dict[tuple[Path, str, int], set[int]] = {}  # by folder, name and count
    for file in files:
        shard = SHARD.fullmatch(file.stem)
        if shard:
            key = (file.parent, shard[1] + shard[4], int(shard[3]))
            present.setdefault(key, set()).add(int(shard[2]))
    messages = []
    for (folder, name, count), numbers in present.items():
        missing = sorted(set(range(count)) - numbers)
        if missing:
            listed = ", ".join(map(str, missing))
            messages.append(f"shards {listed} of the {count} of {name!r} in {folder}")
    return messages


@contextmanager
def _data_errors(path: Path) -> Iterator[None]:
    """Raise `DataError` in place of the errors of PyArrow about a file."""
    import pyarrow as pa

    try:
        yield
    except MemoryError:  # which is an ArrowException, too
        raise
    except (pa.ArrowException, OSError) as error:
        remedy = "fetch it again, or make it again"
        if path.suffix not in (".parquet", ".arrow"):
            remedy = "convert it, for example with pandas.read_csv and DataFrame.to_parquet"
        raise DataError(f"{path} is no sound parquet file ({error}); {remedy}") from error


def open_table(path: Path, source: Any, **options: Any) -> Any:
    """Return a file of the Hub's, opened as a parquet file.

    The checksums of its pages are verified, if it has any (few files do).
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with _data_errors(path):
        if path.suffix == ".arrow":
            # A stream of Arrow's tables has no footer, so that it is rewritten as a parquet file.
            content = pa.BufferOutputStream()
            pq.write_table(pa.ipc.open_stream(source).read_all(), content)
            source = pa.BufferReader(content.getvalue())
        return pq.ParquetFile(source, page_checksum_verification=True, **options)


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


def _bytes_needed(metadata: Any, columns: Sequence[str]) -> int:
    """Return the memory that the columns of a file need, computed from its footer."""
    num_bytes = ROW_BYTES * metadata.num_rows
    for group_number in range(metadata.num_row_groups):
        group = metadata.row_group(group_number)
        for index in range(group.num_columns):
            chunk = group.column(index)
            if chunk.path_in_schema in columns:
                num_bytes += chunk.total_uncompressed_size
    return num_bytes


def _without_categories(table: "pa.Table") -> "pa.Table":
    """Return the table with plain columns in place of dictionary-encoded ones (categories)."""
    for index, column in enumerate(table.columns):
        if is_type(column.type, "dictionary"):
            values = column.cast(column.type.value_type)
            table = table.set_column(index, table.column_names[index], values)
    return table


def _concatenate(tables: Sequence["pa.Table"], latest: Path) -> "pa.Table":
    """Return the rows of all tables as one. `latest` is the file of the last table, for messages.

    Raises `DataError` if columns of equal name have types that do not fit together.
    """
    import pyarrow as pa

    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        raise DataError(
            f"{latest}: a column differs from that of the files before it ({error}); write the "
            "files of all splits with one type a column, or move one away"
        ) from error


def _encoded_samples(table: "pa.Table", path: Path) -> list["pa.Scalar"]:
    """Return the encoded images, or texts, of all rows, which are in the first column.

    Raises `DataError` if a row has no image; a text may be missing.
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


def _holds_bytes(kind: "pa.DataType") -> bool:
    """Return whether a column of this type may hold encoded images: bytes, or structs of these."""
    if is_type(kind, "struct"):
        index = kind.get_field_index("bytes")
        return index >= 0 and _holds_bytes(kind.field(index).type)
    return is_type(kind, "binary", "large_binary")


def is_type(kind: "pa.DataType", *names: str) -> bool:
    """Return whether `kind` is one of the types that pyarrow calls `names`."""
    from pyarrow import types

    return any(getattr(types, f"is_{name}")(kind) for name in names)


def _class_labels(table: "pa.Table", name: str, num_train: int | None) -> tuple[Ints, int]:
    """Return the labels [n] and the number of classes.

    Integer labels stay as they are; other values are numbered in sorted order. The first
    `num_train` rows are those of the training files; None: no file is one of the test split. Raises
    `DataError` if integers are out of range, or if only test files have a class.
    """
    values = _values(table, name, "label_column")
    key = f"dataset.label_column={name}"
    if not np.issubdtype(values.dtype, np.integer):
        classes, labels = np.unique(values, return_inverse=True)
        if num_train is not None:
            unknown = np.setdiff1d(values[num_train:], values[:num_train])
            if len(unknown):
                listed = shorten(", ".join(map(repr, unknown.tolist())), 60)
                raise DataError(
                    f"{key}: test rows have classes that no training row has: {listed}; correct "
                    "the spelling, or leave out these rows"
                )
        return labels.astype(np.int64), len(classes)
    low, high = int(values.min()), int(values.max())
    if low < 0:
        count = np.count_nonzero(values == low)
        message = f"{key}: {count} of {len(values)} labels are {low}"
        if num_train is None or values[:num_train].min() < 0:
            raise DataError(f"{message}; number the classes from 0, or store the labels as strings")
        raise DataError(
            f"{message}, as in a test split that hides them; move its files away: the validation "
            "split, or a dataset.test_fraction of the rows, takes its place"
        )
    if high >= MAX_CLASSES:
        raise DataError(
            f"dataset.label_column={name}: labels are numbers of classes and must lie in "
            f"0..{MAX_CLASSES - 1}, found {low}..{high}; number the classes from 0, or store the "
            "labels as strings"
        )
    names = _class_names(table.schema, name)
    if names and high >= len(names):
        raise DataError(
            f"{key}: has the label {high}, but its description names only {len(names)} classes; "
            "correct the description"
        )
    return values.astype(np.int64), len(names) or high + 1


def _class_names(schema: "pa.Schema", name: str) -> list[str]:
    """Return the names of classes in a column's Hugging Face metadata; none without any."""
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


def _owners(table: "pa.Table", name: str, train: Ints, test: Ints) -> dict[str, Tensor]:
    """Return `train_owners` [n_train] and `test_owners` [n_test]: the number of each row's owner.

    Owners are numbered in the sorted order of their names. A test owner without training rows is
    -1. There are no `test_owners` if one of the test rows names no owner.
    """
    train_names = _values(table.take(train), name, "client_column")
    known, numbers = np.unique(train_names, return_inverse=True)
    owners = {"train_owners": torch.as_tensor(numbers.astype(np.int64))}
    test_table = table.select([name]).take(test)
    if not test_table.column(name).null_count:
        test_names = _values(test_table, name, "client_column")
        owners["test_owners"] = torch.as_tensor(numbers_in(known, test_names))
    return owners


def _values(table: "pa.Table", name: str, key: str) -> NDArray[np.generic]:
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
