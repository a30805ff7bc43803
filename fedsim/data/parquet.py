"""Any image-classification set in the Hugging Face layout: parquet files with encoded images and labels."""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.data.base import Dataset, LoadedData, Samples
from fedsim.data.cache import file_sha256, load_or_build
from fedsim.data.images import decode
from fedsim.errors import DataError, between, check, rule

if TYPE_CHECKING:
    import pyarrow as pa

LABEL_NAMES = ("label", "labels", "fine_label", "character", "target", "class")
SPLITS = {"train": r"train", "test": r"test|t10k", "validation": r"valid|val\b|dev\b"}


class Parquet(Dataset):
    """`path`: a parquet file or a folder of them (absolute, or relative to the working folder or to data_dir).

    A file's split is read off its name or folder. Without a test split the validation split takes its place; without
    either, a fixed random `test_fraction` of all rows. Columns set to None are found by type and name: images as
    structs with `bytes` or as bytes, labels as integers or strings. `client_column` names the owner of each row.
    `size` scales all images to so many pixels a side; `mean` and `std` of None are .5 per channel. Decoded once into
    the cache, whose key holds the files' checksums.
    """

    def __init__(
        self,
        data_dir: Path,
        cache_dir: Path,
        *,
        path: str,
        image_column: str | None,
        label_column: str | None,
        client_column: str | None,
        test_fraction: float,
        size: int | None,
        mean: list[float] | None,
        std: list[float] | None,
    ) -> None:
        super().__init__(data_dir, cache_dir)
        check(
            rule(bool(path), "path", path, "must name a parquet file or a folder of them", "dataset.path=..."),
            between("test_fraction", test_fraction, 0, 1, open_high=True),
            rule(size is None or size >= 1, "size", size, "must be null or >= 1"),
            rule((mean is None) == (std is None), "std", std, "must be given together with dataset.mean"),
        )
        self.path = path
        self.columns = {"image": image_column, "label": label_column, "client": client_column}
        self.test_fraction = test_fraction
        self.size = size
        self.mean, self.std = mean, std

    def load(self) -> LoadedData:
        root, files = find_files(self.path, self.data_dir)
        facts = [*(f"{f.name} {file_sha256(f)}" for f in files), str(self.columns), str(self.size)]
        facts.append(str(self.test_fraction))
        fingerprint = hashlib.sha256("\n".join(facts).encode()).hexdigest()
        cache = self.cache_dir / f"parquet-{fingerprint[:32]}.safetensors"
        return self._loaded(load_or_build(cache, lambda: self._decode(by_split(root, files))), fingerprint)

    def _loaded(self, tensors: dict[str, Tensor], fingerprint: str) -> LoadedData:
        channels = tensors["train_x"].shape[1]
        mean = self.mean or [0.5] * channels
        std = self.std or [0.5] * channels
        check(rule(len(mean) == len(std) == channels, "dataset.mean", mean, f"must have {channels} values, as std"))
        return LoadedData(
            train=Samples(tensors["train_x"], tensors["train_y"]),
            test=Samples(tensors["test_x"], tensors["test_y"]),
            num_classes=int(tensors["num_classes"]),
            mean=tuple(mean),
            std=tuple(std),
            fingerprint=f"parquet {fingerprint}",
            owners=tensors["owners"].numpy() if "owners" in tensors else None,
        )

    def _decode(self, files: dict[str, list[Path]]) -> dict[str, Tensor]:
        tables = {split: _read(paths) for split, paths in files.items()}
        train, test = self._train_and_test(tables)
        whole = _concatenate([train, test])
        labels, num_classes = self._labels(whole)
        images = self._images(whole)
        n = train.num_rows
        tensors = {
            "train_x": images[:n].clone(),
            "train_y": labels[:n].clone(),
            "test_x": images[n:].clone(),
            "test_y": labels[n:].clone(),
            "num_classes": torch.tensor(num_classes),
        }
        client = self.columns["client"]
        if client is not None:
            tensors["owners"] = torch.as_tensor(_codes(_column(train, client, "client_column")))
        return tensors

    def _train_and_test(self, tables: dict[str, "pa.Table"]) -> tuple["pa.Table", "pa.Table"]:
        if "train" not in tables:
            raise DataError(f"dataset.path={self.path}: no file is a training split (its name or folder says 'train')")
        for split in ("test", "validation"):
            if split in tables:
                return tables["train"], tables[split]
        train = tables["train"]
        count = round(self.test_fraction * train.num_rows)
        if not 0 < count < train.num_rows:
            raise DataError(
                f"dataset.test_fraction={self.test_fraction}: {self.path} has no test split; set the share of its "
                f"{train.num_rows} rows to test on, e.g. 0.1"
            )
        order = np.random.default_rng(0).permutation(train.num_rows)  # part of the data set, not of a run
        return train.take(np.sort(order[count:])), train.take(np.sort(order[:count]))

    def _images(self, table: "pa.Table") -> Tensor:
        import pyarrow as pa

        column = _column(table, self.columns["image"] or _image_name(table), "image_column")
        if pa.types.is_struct(column.type):
            column = pa.chunked_array([c.field("bytes") for c in column.chunks])
        return decode(column.to_pylist(), mode=None, size=self.size, name=f"dataset.path={self.path}")

    def _labels(self, table: "pa.Table") -> tuple[Tensor, int]:
        name = self.columns["label"] or next((n for n in LABEL_NAMES if n in table.column_names), None)
        if name is None:
            raise DataError(f"dataset.label_column: none of {', '.join(LABEL_NAMES)} among {table.column_names}")
        values = _column(table, name, "label_column").to_numpy()
        labels = values if np.issubdtype(values.dtype, np.integer) else _codes(values)
        if labels.min() < 0:
            raise DataError(f"dataset.label_column={name}: labels must be >= 0, found {labels.min()}")
        return torch.as_tensor(labels.astype(np.int64)), int(labels.max()) + 1


def find_files(path: str, data_dir: Path) -> tuple[Path, list[Path]]:
    """Where `path` lies, and its parquet files, sorted. Raises `DataError` saying where they were looked for."""
    places = [Path(path), data_dir / path]
    for place in places:
        files = [place] if place.is_file() else sorted(place.rglob("*.parquet"))
        if files:
            return place, files
    raise DataError(f"dataset.path={path}: no parquet file at {' or '.join(str(p.absolute()) for p in places)}")


def by_split(root: Path, files: Sequence[Path]) -> dict[str, list[Path]]:
    """Files by split. A file's name counts before its folder's (below `root`); a lone file may say nothing."""
    result: dict[str, list[Path]] = {}
    for file in files:
        folder = file.parent.name if file.parent != root and file != root else ""
        split = _split_of(file.stem) or _split_of(folder)
        if split is None and len(files) > 1:
            raise DataError(f"{file}: neither its name nor its folder says train, validation or test")
        result.setdefault(split or "train", []).append(file)
    return result


def _split_of(name: str) -> str | None:
    return next((split for split, pattern in SPLITS.items() if re.search(pattern, name.lower())), None)


def _read(paths: Sequence[Path]) -> "pa.Table":
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = []
    for path in paths:
        try:
            tables.append(pq.read_table(path))
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path} is no sound parquet file ({error}); delete it and fetch it again") from error
    return _concatenate(tables)


def _concatenate(tables: Sequence["pa.Table"]) -> "pa.Table":
    import pyarrow as pa

    return pa.concat_tables(tables, promote_options="default").combine_chunks()


def _column(table: "pa.Table", name: str, key: str) -> Any:
    if name not in table.column_names:
        raise DataError(f"dataset.{key}={name}: the columns are {', '.join(table.column_names)}")
    return table.column(name)


def _image_name(table: "pa.Table") -> str:
    import pyarrow as pa

    for field in table.schema:
        is_struct = pa.types.is_struct(field.type) and field.type.get_field_index("bytes") >= 0
        if is_struct or pa.types.is_binary(field.type) or pa.types.is_large_binary(field.type):
            return str(field.name)
    raise DataError(f"dataset.image_column: no column of images among {', '.join(table.column_names)}")


def _codes(values: Any) -> NDArray[np.int64]:
    """Values numbered in sorted order."""
    _, codes = np.unique(np.asarray(values), return_inverse=True)
    return codes.astype(np.int64)
