"""MNIST, Fashion-MNIST, EMNIST, CIFAR-10 and CIFAR-100 in torchvision's layout.

torchvision downloads what is absent; fedsim reads and verifies the files.
"""

import hashlib
import math
import os
import pickle
import struct
from abc import abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedsim.core.errors import DataError, Problem, rule
from fedsim.core.parameters import Problems, parameters
from fedsim.data.base import ImageSet, LoadedData, Samples
from fedsim.data.cache import SourceFiles, digest, require_sha256, sha256_problem, stat_of, visible
from fedsim.data.fetch import require_files, source_problem
from fedsim.data.parquet import Parquet

MD5 = {
    "MNIST": [
        "6bbc9ace898e44ae57da46a324031adb",
        "a25bea736e30d166cdddb491f175f624",
        "2646ac647ad5339dbf082846283269ea",
        "27ae3e4e09519cfbb04c329615203637",
    ],
    "FashionMNIST": [
        "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "9018921c3c673c538a1fc5bad174d6f9",
        "8181f5470baa50b63fa0f6fddb340f0a",
        "15d484375f8d13e6eb1aabb0c3f46965",
    ],
}
"""Checksums of the unpacked training images and labels, test images and labels. torchvision checks
only the archives, and knows no checksums of EMNIST's files."""

EMNIST = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10, "mnist": 10}
"""Number of classes of each split of EMNIST."""

MEGABYTES = {"MNIST": 67, "FashionMNIST": 86, "EMNIST": 2900, "CIFAR10": 360, "CIFAR100": 360}
"""Approximate size of a download: the archives and what is unpacked from them."""


class _TorchvisionSet(ImageSet):
    """The base class of data sets in files that torchvision's class `source` downloads."""

    source: str

    @abstractmethod
    def _files(self) -> tuple[Path, list[str]]:
        """Return the folder of the files, and their names."""

    @property
    def _download_bytes(self) -> int:
        """The approximate bytes of a download."""
        return 1_000_000 * MEGABYTES[self.source]

    def source_problem(self) -> Problem | None:
        """Return the problem of a `data_dir` from which files can be neither read nor fetched."""
        folder, _ = self._files()
        return source_problem(folder, self.data_dir, self.files_to_fetch, self._download_bytes)

    def files_to_fetch(self) -> list[str]:
        """Name the files that `load` would download."""
        folder, names = self._files()
        return [name for name in names if not os.path.lexists(folder / name)]

    def _require_downloaded(self, **options: Any) -> None:
        """Download the files if they are absent; `options` are for torchvision."""
        folder, names = self._files()
        for name in set(names) - set(self.files_to_fetch()):
            stat_of(folder / name)  # raises for a folder or a pipe, which torchvision would read

        def fetch() -> None:
            _fetch(self.source, self.data_dir, **options)

        hint = self._parquet_hint()
        require_files(folder, self.data_dir, self.files_to_fetch, fetch, self._download_bytes, hint)

    def _parquet_hint(self) -> str:
        """Say how to read parquet files in a folder with the data set's name, if there are any."""
        name = self.source.lower()
        for place in (Path(), self.data_dir):
            if any((place / name).glob("*.parquet")):
                return f"; dataset=parquet dataset.path={name} reads the parquet files in {name}/"
        return ""


def _fetch(source: str, data_dir: Path, **options: Any) -> None:
    """Download the files by making an object of torchvision's class `source`."""
    import torchvision

    getattr(torchvision.datasets, source)(str(data_dir), download=True, **options)


@parameters
class MNISTLike(_TorchvisionSet):
    """MNIST, FashionMNIST or EMNIST, in <data_dir>/<source>/raw.

    EMNIST's images are stored transposed and are transposed back. The labels of its letters are
    shifted to begin at 0.
    """

    source: Literal["MNIST", "FashionMNIST", "EMNIST"]
    split: str | None
    """One of EMNIST's splits; None for the others."""
    sha256: str | None = None
    """The checksum that the files must have (see `SourceFiles.sha256`); None accepts any. The files
    of MNIST and FashionMNIST must have their known MD5 as well."""

    def problems(self) -> Problems:
        """Yield the problems of `split`, of `mean` and `std`, and of `sha256`."""
        if self.source == "EMNIST":
            is_known = self.split in EMNIST
            allowed = ", ".join(EMNIST)
        else:
            is_known = self.split is None
            allowed = "null"
        yield rule(is_known, "split", self.split, f"must be one of {allowed} for {self.source}")
        yield from super().problems()
        yield sha256_problem(self.sha256)

    def form(self) -> tuple[tuple[int, ...], int]:
        """Return the shape of an image and the number of classes."""
        return (1, 28, 28), 10 if self.split is None else EMNIST[self.split]

    def _files(self) -> tuple[Path, list[str]]:
        """Return the folder, and the names of training images and labels, test images and
        labels."""
        prefixes = ["train", "t10k"]
        if self.split is not None:
            prefixes = [f"emnist-{self.split}-train", f"emnist-{self.split}-test"]
        names = []
        for prefix in prefixes:
            names += [f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"]
        return self.data_dir / self.source / "raw", names

    def load(self) -> LoadedData:
        """Return the data, after downloading absent files and verifying all."""
        folder, names = self._files()
        options = {} if self.split is None else {"split": self.split}
        self._require_downloaded(**options)
        sources = SourceFiles(folder)
        contents = [sources.read(folder / name) for name in names]
        require_sha256(self.sha256, sources.sha256, str(folder))
        checksums = MD5.get(self.source, [None] * 4)
        files: dict[str, Tensor] = {}
        for name, content, md5 in zip(names, contents, checksums, strict=True):
            _require_md5(folder / name, content, md5)
            files[name] = _parse_idx(folder / name, content)
        train_x, train_y, test_x, test_y = files.values()
        tensors = {
            "train_x": self._upright(train_x),
            "train_y": self._from_zero(train_y),
            "test_x": self._upright(test_x),
            "test_y": self._from_zero(test_y),
        }
        fingerprint = f"{self.source} {self.split} {digest(files)}"
        _, num_classes = self.form()
        return LoadedData.of(
            tensors, num_classes, self.mean, self.std, fingerprint, sha256=sources.sha256
        )

    def _upright(self, images: Tensor) -> Tensor:
        """Return images [n, 28, 28] as [n, 1, 28, 28], transposed if they are EMNIST's."""
        if self.source == "EMNIST":
            images = images.transpose(1, 2).contiguous()
        return images[:, None]

    def _from_zero(self, labels: Tensor) -> Tensor:
        """Return labels that begin at 0; EMNIST's letters are numbered from 1."""
        return labels.long() - (1 if self.split == "letters" else 0)


def _parse_idx(path: Path, content: bytes) -> Tensor:
    """Return the images [n, 28, 28] or labels [n], uint8, in the content of an IDX file.

    Raises `DataError` if it is damaged.
    """
    shape = (28, 28) if "images" in path.name else ()
    header_bytes = 4 * (len(shape) + 2)
    values = np.frombuffer(content, np.uint8)[header_bytes:]
    count, rest = divmod(len(values), math.prod(shape))
    magic = 0x801 + len(shape)  # unsigned bytes, and one dimension more than a sample has
    header = struct.pack(f">{len(shape) + 2}I", magic, count, *shape)
    if rest or content[:header_bytes] != header:
        expected = "x".join(map(str, ("n", *shape)))
        raise DataError(
            f"{path} is damaged: expected IDX, unsigned bytes, {expected}; delete it and fetch it "
            "again"
        )
    return torch.tensor(values).view(-1, *shape)


@parameters
class CIFAR(_TorchvisionSet):
    """CIFAR10 or CIFAR100, in <data_dir>/cifar-10-batches-py or cifar-100-python.

    The files are pickles. A file is unpickled only if its checksum is the one that torchvision
    lists. Without them, parquet files in <data_dir>/cifar10 or cifar100 are read. If these hold
    JPEG images, as many on the Hub do, the pixels are not those of the original.
    """

    channels = 3
    source: Literal["CIFAR10", "CIFAR100"]

    @property
    def _torchvision_class(self) -> Any:
        """The class of torchvision, which lists the files and their checksums."""
        import torchvision

        return getattr(torchvision.datasets, self.source)

    def _files(self) -> tuple[Path, list[str]]:
        """Return the folder and the names of the files."""
        kind = self._torchvision_class
        names = [name for name, _ in (*kind.train_list, *kind.test_list)]
        return self.data_dir / kind.base_folder, names

    def _parquet(self) -> Parquet | None:
        """Return the data set in <data_dir>/cifar10 or cifar100, if that has parquet files and
        torchvision's files are absent."""
        folder = self.data_dir / self.source.lower()
        if not super().files_to_fetch() or not visible(folder, "**/*.parquet"):
            return None
        return Parquet(
            self.data_dir,
            self.cache_dir,
            path=str(folder.absolute()),
            image_column=None,
            label_column=None,
            client_column=None,
            size=None,
            test_fraction=0.0,
            mean=self.mean,
            std=self.std,
        )

    def files_to_fetch(self) -> list[str]:
        """Name the files that `load` would download; none if there are parquet files."""
        return [] if self._parquet() else super().files_to_fetch()

    def describe(self) -> list[str]:
        """Return lines about parquet files, if they are read."""
        parquet = self._parquet()
        return parquet.describe() if parquet else []

    def form(self) -> tuple[tuple[int, ...], int]:
        """Return the shape of an image and the number of classes."""
        return (3, 32, 32), 10 if self.source == "CIFAR10" else 100

    def load(self) -> LoadedData:
        """Return the data, after downloading absent files and verifying all."""
        parquet = self._parquet()
        if parquet:
            _, splits = parquet.inspect()
            if not splits.keys() & {"test", "validation"}:
                raise DataError(
                    f"{parquet.path} has parquet files for training and none for testing; fetch "
                    "the Hub's file of the test split, too"
                )
            _, num_classes = self.form()
            return replace(parquet.load(), num_classes=num_classes)
        self._require_downloaded()
        train_files = self._torchvision_class.train_list
        test_files = self._torchvision_class.test_list
        checksums = sorted(md5 for _, md5 in (*train_files, *test_files))
        _, num_classes = self.form()
        return LoadedData(
            self._samples(train_files),
            self._samples(test_files),
            num_classes,
            tuple(self.mean),
            tuple(self.std),
            f"{self.source} {' '.join(checksums)}",
        )

    def _samples(self, files: list[tuple[str, str]]) -> Samples:
        """Return the images and labels in `files`: pairs of a name and an MD5 checksum."""
        folder, _ = self._files()
        label_key = "labels" if self.source == "CIFAR10" else "fine_labels"
        images = []
        labels: list[int] = []
        for name, md5 in files:
            content = SourceFiles(folder).read(folder / name)
            _require_md5(folder / name, content, md5)
            batch = pickle.loads(content, encoding="latin1")
            images.append(batch["data"])
            labels += batch[label_key]
        x = torch.as_tensor(np.concatenate(images)).view(-1, 3, 32, 32)
        return Samples(x, torch.as_tensor(labels))


def _require_md5(path: Path, content: bytes, md5: str | None) -> None:
    """Raise `DataError` if the content of a file has another checksum (None accepts any)."""
    if md5 is not None and md5 != hashlib.md5(content).hexdigest():
        raise DataError(f"{path} is damaged: expected md5 {md5}; delete it and fetch it again")
