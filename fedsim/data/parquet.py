"""Any image-classification data set in the Hugging Face layout: parquet files with encoded images and labels."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedsim.data.base import Dataset, LoadedData, Samples, normalisation_problems
from fedsim.data.cache import file_sha256, load_or_build
from fedsim.data.checksums import require_sha256, sha256_of_list, sha256_problem
from fedsim.data.images import MAX_SIDE, decode
from fedsim.data.parquet_columns import class_labels, encoded_images, owners
from fedsim.data.parquet_files import absent_files, by_split, concatenate, find_files, read
from fedsim.disk import reading_problem
from fedsim.errors import ConfigError, DataError, Problem, at_least, at_most, between, check, rule

if TYPE_CHECKING:
    import pyarrow as pa


class Parquet(Dataset):
    """Parquet files at `path`: a file or a folder (absolute, or relative to the working folder or to data_dir).

    The split of a file is derived from its name or folder. Without a test split, the validation split is used as test
    set; without either, a fixed random `test_fraction` of all rows. Columns that are None are found by type and name:
    images are structs with a field `bytes`, or bytes; labels are integers or strings. `client_column` holds the owner
    of each row. `size` scales all images to `size` x `size` pixels; `mean` and `std`: None is .5 per channel. Images
    are decoded once into a cache whose key includes the checksums of the files. `sha256`: None, or the checksum that
    the files must have (see `sha256_of_files`); few parquet files hold checksums of their own.
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
        sha256: str | None = None,
    ) -> None:
        super().__init__(data_dir, cache_dir)
        check(
            rule(bool(path), "path", path, "must name a parquet file or a folder of them", "dataset.path=..."),
            between("test_fraction", test_fraction, 0, 1, open_high=True),
            None if size is None else at_least("size", size, 1),
            None if size is None else at_most("size", size, MAX_SIDE),
            *normalisation_problems(mean, std),
            sha256_problem(sha256),
        )
        self.path = path
        self.sha256 = sha256
        self.columns = {"image": image_column, "label": label_column, "client": client_column}
        self.test_fraction = test_fraction
        self.size = size
        self.mean, self.std = mean, std

    def source_problem(self) -> Problem | None:
        here = Path(self.path).expanduser()
        return None if here.exists() else reading_problem("data_dir", self.data_dir, [self.data_dir / self.path])

    def absent(self) -> list[str]:
        return absent_files(self.path, self.data_dir)

    def load(self) -> LoadedData:
        root, found = find_files(self.path, self.data_dir)
        files = by_split(root, found)
        sums = {file: file_sha256(file) for file in found}
        sha256 = sha256_of_list({f.name if f == root else f.relative_to(root).as_posix(): s for f, s in sums.items()})
        require_sha256(self.sha256, sha256, f"dataset.path={self.path}")
        facts = [f"{split} {f.name} {sums[f]}" for split, paths in files.items() for f in paths]
        settings = [self.columns, self.size, self.test_fraction]
        fingerprint = hashlib.sha256("\n".join([*facts, str(settings)]).encode()).hexdigest()
        kind = "parquet" if self.columns["client"] is None else "parquet-owners"
        cache = self.cache_dir / f"{kind}-{fingerprint[:32]}.safetensors"
        return self._to_loaded_data(load_or_build(cache, lambda: self._decode(files)), fingerprint, sha256)

    def _to_loaded_data(self, tensors: dict[str, Tensor], fingerprint: str, sha256: str) -> LoadedData:
        channels = tensors["train_x"].shape[1]
        mean, std = self.mean or [0.5] * channels, self.std or [0.5] * channels
        try:
            check(*normalisation_problems(mean, std, channels))
        except ConfigError as error:
            raise ConfigError(p.within("dataset") for p in error.problems) from error
        return LoadedData(
            train=Samples(tensors["train_x"], tensors["train_y"]),
            test=Samples(tensors["test_x"], tensors["test_y"]),
            num_classes=int(tensors["num_classes"]),
            mean=tuple(mean),
            std=tuple(std),
            fingerprint=f"parquet {fingerprint}",
            owners=tensors["owners"].numpy() if "owners" in tensors else None,
            sha256=sha256,
            test_owners=tensors["test_owners"].numpy() if "test_owners" in tensors else None,
        )

    def _decode(self, files: dict[str, list[Path]]) -> dict[str, Tensor]:
        rows, train, test = self._split_rows({split: read(paths) for split, paths in files.items()})
        labels, num_classes = class_labels(rows, self.columns["label"])
        encoded = encoded_images(rows, self.columns["image"])
        x = decode(encoded, mode=None, size=self.size, name=f"dataset.path={self.path}")
        y = torch.as_tensor(labels)
        tensors = {"train_x": x[train], "train_y": y[train], "test_x": x[test], "test_y": y[test]}
        tensors["num_classes"] = torch.tensor(num_classes)
        if (client := self.columns["client"]) is not None:
            of_train, of_test = owners(rows, client, train.numpy(), test.numpy())
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
        return concatenate([train, test]), *torch.arange(train.num_rows + test.num_rows).tensor_split([train.num_rows])

    def _random_split(self, num_rows: int) -> tuple[Tensor, Tensor]:
        count = round(self.test_fraction * num_rows)
        if not 0 < count < num_rows:
            raise DataError(
                f"dataset.test_fraction={self.test_fraction}: {self.path} has no test split; set the share of its "
                f"{num_rows} rows to test on, e.g. 0.1"
            )
        order = np.random.default_rng(0).permutation(num_rows)  # fixed: the split belongs to the data set, not to a run
        return torch.as_tensor(np.sort(order[count:])), torch.as_tensor(np.sort(order[:count]))
