"""Any local data set of images or texts from the Hugging Face Hub, by its own description.

The description is in the metadata of the files, or in README.md and dataset_info.json next to them
(`fedsim.data.hf_description`): the type of each column, the names of classes, and splits. `Parquet`
reads the files, and calls the methods here for what a description may say: which file belongs to
which split, which columns hold samples and labels, and of which kind the samples are. Shapes: n
samples.
"""

import json
import re
from collections.abc import Mapping, Sequence
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
from fedsim.data.parquet_files import SHARD, SPLITS, are_one_file, name_of_folder

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
    skips_files: ClassVar[bool] = True
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

    def _split_of(self, file: Path, root: Path) -> str | None:
        """Return the role of the split that a file belongs to (see `_role_of`).

        If README.md gives files a split, it decides. Otherwise the file's name decides, and if it
        has no split with a role, the name of its folder below `root`. Raises `DataError` for a name
        that has splits of several roles.
        """
        if self._description.data_files:
            folder = root.parent if root.is_file() else root
            split = self._description.split_of(file.relative_to(folder))
            return None if split is None else self._role_of(split)
        candidates = [_splits_in(file)]
        if root not in (file, file.parent):
            candidates.append([file.parent.name])
        for splits in candidates:
            roles = {role for role in map(self._role_of, splits) if role is not None}
            if len(roles) > 1:
                listed = " and ".join(sorted(roles))
                raise DataError(
                    f"{file}: its name, or its folder's, has words of the splits {listed}; rename "
                    "it, or move it away"
                )
            if roles:
                return roles.pop()
        return None

    def _all_train(self, root: Path, files: Sequence[Path]) -> bool:
        if self._description.data_files:
            return False
        # A single file needs no name, unless the user asks for another split than the usual one.
        needs_no_name = are_one_file(files) and self.train_split == "train"
        return needs_no_name or self._role_of(name_of_folder(root)) == "train"

    def _role_of(self, split: str) -> str | None:
        """Return the role of a split: "train", "test" or "validation"; None: it is not read."""
        if split == self.train_split:
            return "train"
        if self.test_split is not None:
            return "test" if split == self.test_split else None
        role = SPLITS.get(split.lower())
        return None if role == "train" else role

    def _sample_column(self, path: Path, schema: "pa.Schema") -> str:
        """Return the name of the column of texts, or of images."""
        if self.text_column is None and (self.image_column or self._image_columns(schema)):
            return super()._sample_column(path, schema)
        others = {self.label_column, self.client_column, *self._label_columns(schema)}
        candidates = []
        for field in schema:
            if is_type(field.type, "string", "large_string") and field.name not in others:
                candidates.append(field.name)
        return pick_column("text_column", self.text_column, candidates, path, schema)

    def _label_columns(self, schema: "pa.Schema") -> list[str]:
        """Return the columns that the description calls labels of classes."""
        return described_as("ClassLabel", schema) or super()._label_columns(schema)

    def _further_facts(self) -> list[str]:
        parameters = str(["hf_folder 1", self.text_column, self.length, self.vocabulary])
        _, files = self._find_files()
        descriptions = {json.dumps(self._features(file), sort_keys=True) for file in files}
        return [parameters, *sorted(descriptions - {"{}"})]

    def _samples(self, values: "list[pa.Scalar]") -> Tensor:
        """Return images [n, C, H, W] uint8, or texts [n, length] int64."""
        if isinstance(values[0].as_py(), bytes):  # encoded images
            return super()._samples(values)
        tokens = torch.zeros(len(values), self.length, dtype=torch.int64)
        for row, value in enumerate(values):
            words = WORD.findall((value.as_py() or "").lower())[: self.length]
            # At the end, because a recurrent network answers after the last token.
            for place, word in enumerate(words, start=self.length - len(words)):
                tokens[row, place] = 1 + crc32(word.encode()) % (self.vocabulary - 1)
        return tokens

    def _loaded(self, tensors: dict[str, Tensor], fingerprint: str, sha256: str) -> LoadedData:
        if tensors["train_x"].dtype == torch.uint8:  # images
            return super()._loaded(tensors, fingerprint, sha256)
        return LoadedData.of(
            tensors,
            int(tensors["num_classes"]),
            None,
            None,
            fingerprint,
            sha256=sha256,
            vocabulary=self.vocabulary,
        )


def _splits_in(file: Path) -> list[str]:
    """Return the names in a file's name that may be those of splits.

    The name of a shard (`train-00000-of-00002`) begins with its split, and another name is a split
    or has it as a word. Splits may have hyphens.
    """
    shard = SHARD.fullmatch(file.stem)
    if shard:
        split = shard["before"]
        return [split, *split.split("-")]
    return [file.stem, *re.split(r"[^a-zA-Z]+", file.stem)]
