"""Any image-classification data set in the Hugging Face layout: parquet files with encoded images.

The name of a file, or of its folder, says to which split its rows belong: train, test or
validation. A split may be divided into several files, its shards. The owner of a row is its natural
client, such as the writer of a text. A column that the config does not name is found by its type
(images) or its name (labels).

`Parquet.load` reads each file, joins the rows of all files, training rows first, and decodes the
images. Shapes: n samples.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
import torch
from annotated_types import Interval
from torch import Tensor

from fedsim.core.arrays import Ints
from fedsim.core.errors import ConfigError, DataError
from fedsim.core.parameters import parameters
from fedsim.data.base import LoadedData, normalisation_problems
from fedsim.data.cache import (
    SourceFiles,
    load_or_build,
    require_memory,
    require_sha256,
    stat_of,
    visible,
)
from fedsim.data.images import FromPath, Side, decode
from fedsim.data.parquet_columns import (
    FileContent,
    class_labels,
    class_names,
    classes_of,
    concatenate,
    described_as,
    encoded_samples,
    holds_bytes,
    is_type,
    owners_of,
    pick_column,
    require_one_column,
    require_same_labels,
)
from fedsim.data.parquet_files import (
    SPLITS,
    are_one_file,
    missing_shards,
    name_of_folder,
    require_new_content,
    require_unique_rows,
    split_in,
    split_of,
)
from fedsim.data.parquet_tables import (
    bytes_needed,
    data_errors,
    open_table,
    read_columns,
    without_categories,
)

if TYPE_CHECKING:
    import pyarrow as pa

LABEL_NAMES = ("label", "labels", "fine_label", "character", "target", "class")
"""Names by which the column of labels is found."""
LARGE_BYTES = 2**30
"""Files that need less memory than this are never rejected for their expansion."""
MAX_EXPANSION = 1000
"""Maximum ratio of memory to file size of a large file; a greater one is a decompression bomb."""


@parameters
class Parquet(FromPath):
    """Parquet files at `path`, which is a file or a folder.

    Without a test split, the validation split becomes the test set; next to one, it is not read.
    Without either, a random `test_fraction` of all rows becomes the test set, which is the same in
    every run. Images are bytes, or structs with a field `bytes`; labels are integers or strings.
    """

    patterns: ClassVar[tuple[str, ...]] = ("**/*.parquet",)
    """The files of a folder that are read."""
    skips_files: ClassVar[bool] = False
    """True if files without a split are skipped; otherwise they are a mistake."""
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
        """Name the missing shards of splits that are read, or the missing file if there is none at
        all. Raises `DataError` as `_files_by_split` does."""
        root, files = self._find_files()
        if not files:
            return [f"a parquet file at {self._searched()}"]
        missing = []
        for files_of_split in self._files_by_split(root, files).values():
            missing += missing_shards(files_of_split)
        return missing

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

    def _files_by_split(self, root: Path, files: Sequence[Path]) -> dict[str, list[Path]]:
        """Return the files of each split that is read. Only their names are read here.

        Raises `DataError` for a file without a split, unless it is to be skipped.
        """
        split_by_file = {file: self._split_of(file, root) for file in files}
        if not any(split_by_file.values()) and self._all_train(root, files):
            return {"train": list(files)}
        splits: dict[str, list[Path]] = {}
        for file, split in split_by_file.items():
            if split is not None:
                splits.setdefault(split, []).append(file)
            elif not self.skips_files:
                raise DataError(
                    f"{file}: its name, or its folder's, must have a word of one split "
                    f"({', '.join(SPLITS)}); rename it, or move it away if it is not part of the "
                    "data set"
                )
        if "test" in splits:
            splits.pop("validation", None)  # it only serves as a test split if there is no other
        return splits

    def _all_train(self, root: Path, files: Sequence[Path]) -> bool:
        """Return whether `files` are for training. This is called if none of them has a split.

        They are if they are one file, or its shards, or if the name of `root` says so.
        """
        return are_one_file(files) or split_in(name_of_folder(root)) == "train"

    def inspect(self) -> tuple[Path, dict[str, list[Path]]]:
        """Return the place of the files, and the files of each split that is read.

        Only the files' footers are read. Raises `DataError` if a file has no usable columns, if
        rows would be read twice, or if there is no training split.
        """
        self.require_present(f"dataset.path={self.path}")
        root, paths = self._find_files()
        splits = self._files_by_split(root, paths)
        for split, files in splits.items():
            for path in files:
                stat_of(path)
                with path.open("rb") as file:
                    self._columns(path, self._described(path, open_table(path, file).schema_arrow))
            require_unique_rows(files, split)
        if "train" not in splits:
            raise DataError(
                f"dataset.path={self.path}: no file is a training split (its name or folder says "
                "'train')"
            )
        return root, splits

    def describe(self) -> list[str]:
        """Return lines about each column of the first training file, the splits and the clients."""
        _, splits = self.inspect()
        lines = self._describe_columns(splits["train"][0])
        read = set()
        for split, files in splits.items():
            lines.append(self._describe_split(split, files))
            read.update(files)
        unread = [file.name for file in self._find_files()[1] if file not in read]
        if unread:
            lines.append(f"not read: {shorten(', '.join(unread), 100)}")
        return lines

    def _describe_columns(self, file: Path) -> list[str]:
        """Return a line about each column of a file: its type, classes or a value, and its use."""
        with file.open("rb") as stream:
            table = open_table(file, stream)
            schema = self._described(file, table.schema_arrow)
            first_batch = next(table.iter_batches(batch_size=1), None)
        first_row = first_batch.to_pylist()[0] if first_batch else {}
        sample, *others = self._columns(file, schema)
        used = (sample.removesuffix(".bytes"), *others)
        uses = dict(zip(used, ("sample", "label", "client"), strict=False))
        lines = []
        for field in schema:
            line = f"column {field.name}: {field.type}"
            classes = class_names(schema, field.name)
            if classes:
                line += f", {len(classes)} classes ({shorten(', '.join(classes), 40)})"
            elif first_row and not holds_bytes(field.type):
                line += f", for example {shorten(str(first_row[field.name]), 40)}"
            if field.name in uses:
                line += f" (the {uses[field.name]})"
            lines.append(line)
        return lines

    def _describe_split(self, split: str, files: Sequence[Path]) -> str:
        """Return a line about the numbers of samples and of clients in the files of a split."""
        num_rows = 0
        clients: set[Any] = set()
        for file in files:
            with file.open("rb") as stream:
                table = open_table(file, stream)
                num_rows += table.metadata.num_rows
                if self.client_column in table.schema_arrow.names:
                    clients.update(table.read([self.client_column]).column(0).to_pylist())
        owned = f" of {len(clients):,} clients" if clients else ""
        return f"split {split}: {num_rows:,} samples{owned}"

    def load(self) -> LoadedData:
        """Return the data, from the cache if the same files were decoded in the same way before."""
        root, splits = self.inspect()
        sources = SourceFiles(root)
        # everything that the decoded tensors depend on; its hash names the file in the cache
        facts = []
        for split, files in splits.items():
            for file in files:
                sources.read(file)
                require_new_content(file, sources)
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

    def _split_of(self, file: Path, root: Path) -> str | None:
        """Return the split of a file below `root`; None: it has none."""
        return split_of(file, root)

    def _columns(self, path: Path, schema: "pa.Schema") -> list[str]:
        """Return the names of a file's columns of samples, labels and, if it has one, clients.

        For images in structs, the first name is the name of the field: `image.bytes`. Raises
        `DataError` if the file has no such columns of samples and labels, or several of a name.
        """
        samples = self._sample_column(path, schema)
        candidates = self._label_columns(schema)
        label = pick_column("label_column", self.label_column, candidates, path, schema)
        columns = [samples, label]
        if self.client_column is not None and self.client_column in schema.names:
            columns.append(self.client_column)
        for key, column in zip(("label_column", "client_column"), columns[1:], strict=False):
            require_one_column(f"dataset.{key}={column}", column, samples, path, schema)
        return columns

    def _sample_column(self, path: Path, schema: "pa.Schema") -> str:
        """Return the name of the column of images, or of its field."""
        candidates = self._image_columns(schema)
        image = pick_column("image_column", self.image_column, candidates, path, schema)
        kind = schema.field(image).type
        if not holds_bytes(kind):
            raise DataError(
                f"dataset.image_column={image}: must hold the encoded images themselves in every "
                f"row, not {kind} as in {path}"
            )
        return f"{image}.bytes" if is_type(kind, "struct") else image

    def _image_columns(self, schema: "pa.Schema") -> list[str]:
        """Return the columns that may hold the images, by their description or their types."""
        with_bytes = [field.name for field in schema if holds_bytes(field.type)]
        return described_as("Image", schema) or with_bytes

    def _label_columns(self, schema: "pa.Schema") -> list[str]:
        """Return the columns that may hold the labels, by their names."""
        return [name for name in LABEL_NAMES if name in schema.names]

    def _decode(self, splits: dict[str, list[Path]], sources: SourceFiles) -> dict[str, Tensor]:
        """Return the tensors of both splits, decoded from the files."""
        train_files = splits["train"]
        test_files = splits.get("test", splits.get("validation", []))
        contents = self._read_files([*train_files, *test_files], sources)
        rows = concatenate(contents)
        num_train = sum(content.rows.num_rows for content in contents[: len(train_files)])
        if test_files:
            train, test = self._given_split(num_train, rows.num_rows)
        else:
            train, test = self._random_split(num_train)
        column, classes = contents[0].label_column, classes_of(contents)
        labels, num_classes = class_labels(rows, column, classes, num_train)
        samples = [sample for content in contents for sample in content.samples]
        x = self._samples(samples)
        y = torch.as_tensor(labels)
        tensors = {"train_x": x[train], "train_y": y[train], "test_x": x[test], "test_y": y[test]}
        tensors["num_classes"] = torch.tensor(num_classes)
        if self.client_column is not None:
            tensors |= owners_of(rows, self.client_column, train, test)
        return tensors

    def _samples(self, values: "list[pa.Scalar]") -> Tensor:
        """Return the samples of the values of their column: images [n, C, H, W] uint8."""
        name = f"dataset.path={self.path}"
        return decode(lambda value: value.as_py(), values, mode=None, size=self.size, name=name)

    def _read_files(self, files: Sequence[Path], sources: SourceFiles) -> list[FileContent]:
        """Return the contents of all files. Raises `DataError` if they do not fit together, or need
        too much memory."""
        contents: list[FileContent] = []
        total_bytes = 0
        for file in files:
            content, num_bytes = self._read_file(file, sources)
            total_bytes += num_bytes
            require_memory(total_bytes, f"dataset.path={self.path}")
            contents.append(content)
        require_same_labels(contents)
        return contents

    def _read_file(self, path: Path, sources: SourceFiles) -> tuple[FileContent, int]:
        """Return the content of a file, and the memory that it needs in bytes.

        Raises `DataError` before reading if that is too much.
        """
        import pyarrow as pa

        data = sources.read(path)
        file = open_table(path, pa.BufferReader(data))
        schema = self._described(path, file.schema_arrow)
        columns = self._columns(path, schema)
        num_bytes = bytes_needed(file.metadata, columns)
        require_memory(num_bytes, str(path), max(LARGE_BYTES, MAX_EXPANSION * len(data)))
        if num_bytes < LARGE_BYTES:
            # As a dictionary, an image that is in many rows is in memory once.
            file = open_table(path, pa.BufferReader(data), read_dictionary=columns[:1])
        with data_errors(path):
            table = read_columns(file, columns).replace_schema_metadata(schema.metadata)
        content = FileContent(
            path=path,
            samples=encoded_samples(table, path),
            rows=without_categories(table.remove_column(0)),
            label_column=columns[1],
            classes=class_names(schema, columns[1]),
        )
        return content, num_bytes

    def _given_split(self, num_train: int, num_rows: int) -> tuple[Ints, Ints]:
        """Return the positions of the training rows, which come first, and of the test rows.

        Raises `DataError` if one of them would be empty.
        """
        for split, count in (("train", num_train), ("test", num_rows - num_train)):
            if count == 0:
                raise DataError(f"dataset.path={self.path}: the {split} split has no rows")
        return np.arange(num_train), np.arange(num_train, num_rows)

    def _random_split(self, num_rows: int) -> tuple[Ints, Ints]:
        """Return the positions of the training rows and of a random share of test rows, both
        ascending.

        Raises `DataError` if one of them would be empty.
        """
        if num_rows == 0:
            raise DataError(f"dataset.path={self.path}: the train split has no rows")
        num_test = round(self.test_fraction * num_rows)
        if not 0 < num_test < num_rows:
            raise DataError(
                f"dataset.test_fraction={self.test_fraction}: {self.path} has no test split; set "
                f"the share of its {num_rows} rows to test on, e.g. 0.1"
            )
        # The seed is fixed, because the split belongs to the data set, not to a run.
        order = np.random.default_rng(0).permutation(num_rows)
        return np.sort(order[num_test:]), np.sort(order[:num_test])
