"""Any local data set of images or texts from the Hugging Face Hub, by its own description.

The description is in the metadata of the files, or in README.md and dataset_info.json next to them
(`fedsim.data.hf_description`): the type of each column, the names of classes, and splits. `Parquet`
reads the files. Shapes: n texts.
"""

import json
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar
from zlib import crc32

import torch
from annotated_types import Interval
from torch import Tensor

from fedsim.core.errors import DataError
from fedsim.core.parameters import parameters
from fedsim.data.base import LoadedData
from fedsim.data.hf_description import Description, read_description
from fedsim.data.parquet import Parquet
from fedsim.data.parquet_columns import described_as, features_of, is_type, pick_column
from fedsim.data.parquet_files import SHARD, SPLITS

if TYPE_CHECKING:
    import pyarrow as pa

WORD = re.compile(r"\w+|[^\w\s]")
"""A word, or a sign between words."""
CACHE_OF_DATASETS = re.compile(r"cache-[0-9a-f]+(_\d+_of_\d+)?\.arrow")
"""The name of a file in which the library datasets keeps computed rows, besides the data."""


@parameters
class HFFolder(Parquet):
    """Parquet or Arrow files below `path`, as the library datasets writes them.

    Samples are images, or texts of `length` words if there is no column of images. The token of a
    word is a hash of it in 1..`vocabulary` - 1, in lower case. Later words are cut off, and shorter
    texts begin with tokens 0.
    """

    patterns: ClassVar[tuple[str, ...]] = ("**/*.parquet", "**/*.arrow")
    text_column: str | None
    """The column of texts; None takes the only one, if there are no images."""
    train_split: str
    """Name of the split for training."""
    test_split: str | None
    """Name of the split for testing; None takes `test`, or without it `validation`. Splits with
    other names are not read."""
    length: Annotated[int, Interval(ge=1, le=10_000)]
    vocabulary: Annotated[int, Interval(ge=2, le=1_000_000)]

    @cached_property
    def _description(self) -> Description:
        """The description in README.md and dataset_info.json."""
        root, _ = self._find_files()
        return read_description(root.parent if root.is_file() else root)

    def _files_below(self, folder: Path) -> list[Path]:
        files = super()._files_below(folder)
        return [file for file in files if not CACHE_OF_DATASETS.fullmatch(file.name)]

    def inspect(self) -> tuple[Path, dict[str, list[Path]]]:
        """Return the place of the files, and the files of each split. Raises `DataError` as
        `Parquet.inspect`, and if no file belongs to `test_split`."""
        root, splits = super().inspect()
        if self.test_split is not None and "test" not in splits:
            raise DataError(
                f"dataset.test_split={self.test_split}: no file of dataset.path={self.path} "
                "belongs to this split (by its name, its folder's, or README.md)"
            )
        return root, splits

    def _features(self, path: Path) -> Mapping[str, Any]:
        """Return the description of a file's columns in README.md and dataset_info.json."""
        return self._description.features or read_description(path.parent).features

    def _described(self, path: Path, schema: "pa.Schema") -> "pa.Schema":
        """Return the schema with its own description, or otherwise with that of the folder."""
        features = self._features(path)
        if features_of(schema) or not features:
            return schema
        text = json.dumps({"info": {"features": features}})
        return schema.with_metadata({**(schema.metadata or {}), b"huggingface": text.encode()})

    def _split_of(self, file: Path, root: Path, *, is_only_file: bool) -> str | None:
        """Return "train", "test" or "validation", or None if the file is not read.

        README.md may give each file a split. Otherwise the file's name decides: the name of a shard
        (`train-00000-of-00002`) begins with its split, and another name has it as a word. Then the
        name of the folder below `root` decides. Raises `DataError` for a name of several splits.
        """
        if self._description.data_files:
            folder = root.parent if root.is_file() else root
            name = str(self._description.split_of(file.relative_to(folder)))
            return self._role_of(name)
        for names in self._possible_splits(file, root):
            roles = {role for role in map(self._role_of, names) if role is not None}
            if len(roles) > 1:
                listed = " and ".join(sorted(roles))
                raise DataError(
                    f"{file}: its name, or its folder's, has words of the splits {listed}; rename "
                    "it, or move it away"
                )
            if roles:
                return roles.pop()
        return "train" if is_only_file and self._role_of("train") == "train" else None

    def _possible_splits(self, file: Path, root: Path) -> list[list[str]]:
        """Return the names by which splits a file may belong to: by its own name, and by its
        folder's."""
        shard = SHARD.fullmatch(file.stem)
        if shard:
            split = shard["before"]
            own_names = [split, *split.split("-")]
        else:
            own_names = [file.stem, *re.split(r"[^a-zA-Z]+", file.stem)]
        if root in (file, file.parent):
            return [own_names]
        return [own_names, [file.parent.name]]

    def _role_of(self, name: str) -> str | None:
        """Return what a split serves for: "train", "test" or "validation"; None: it is not read."""
        if name == self.train_split:
            return "train"
        if self.test_split is not None:
            return "test" if name == self.test_split else None
        role = SPLITS.get(name.lower())
        return None if role == "train" else role

    def _sample_column(self, path: Path, schema: "pa.Schema") -> str:
        """Return the name of the column of texts, or of images."""
        if self.text_column is None and (self.image_column or self._image_columns(schema)):
            return super()._sample_column(path, schema)
        others = {self.label_column, self.client_column, *self._label_columns(schema)}
        texts = []
        for field in schema:
            if is_type(field.type, "string", "large_string") and field.name not in others:
                texts.append(field.name)
        return pick_column("text_column", self.text_column, texts, path, schema)

    def _label_columns(self, schema: "pa.Schema") -> list[str]:
        """Return the columns that the description calls labels of classes."""
        return described_as("ClassLabel", schema) or super()._label_columns(schema)

    def _further_facts(self) -> list[str]:
        facts = [str(["hf_folder 1", self.text_column, self.length, self.vocabulary])]
        _, files = self._find_files()
        texts = {json.dumps(self._features(file), sort_keys=True) for file in files}
        return [*facts, *sorted(texts - {"{}"})]

    def _samples(self, values: "list[pa.Scalar]") -> Tensor:
        """Return images [n, C, H, W] uint8, or texts [n, length] int64."""
        if isinstance(values[0].as_py(), bytes):
            return super()._samples(values)
        tokens = torch.zeros(len(values), self.length, dtype=torch.int64)
        for row, value in enumerate(values):
            words = WORD.findall((value.as_py() or "").lower())[: self.length]
            # At the end, so that the last state of a recurrent network follows the last word.
            for place, word in enumerate(words, start=self.length - len(words)):
                tokens[row, place] = 1 + crc32(word.encode()) % (self.vocabulary - 1)
        return tokens

    def _loaded(self, tensors: dict[str, Tensor], fingerprint: str, sha256: str) -> LoadedData:
        if tensors["train_x"].dtype == torch.uint8:
            return super()._loaded(tensors, fingerprint, sha256)
        num_classes = int(tensors["num_classes"])
        size = self.vocabulary
        return LoadedData.of(
            tensors, num_classes, None, None, fingerprint, sha256=sha256, vocabulary=size
        )
