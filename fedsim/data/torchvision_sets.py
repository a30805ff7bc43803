"""MNIST, Fashion-MNIST, EMNIST, CIFAR-10 and CIFAR-100 in torchvision's layout, fetched by it if
absent; verified."""

import hashlib
import math
import os
import pickle
import struct
from abc import abstractmethod
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedsim.core.errors import DataError, Problem, rule
from fedsim.core.parameters import Problems, parameters
from fedsim.data.base import ImageSet, LoadedData, Samples
from fedsim.data.cache import SourceFiles, digest, require_sha256, sha256_problem, stat_of
from fedsim.data.fetch import require_files, source_problem

MD5 = {
    "MNIST": (
        *("6bbc9ace898e44ae57da46a324031adb", "a25bea736e30d166cdddb491f175f624"),
        *("2646ac647ad5339dbf082846283269ea", "27ae3e4e09519cfbb04c329615203637"),
    ),
    "FashionMNIST": (
        *("f4a8712d7a061bf5bd6d2ca38dc4d50a", "9018921c3c673c538a1fc5bad174d6f9"),
        *("8181f5470baa50b63fa0f6fddb340f0a", "15d484375f8d13e6eb1aabb0c3f46965"),
    ),
}
"""Checksums of the unpacked images and labels for training and for testing; torchvision checks only
the archives, and knows no others for EMNIST."""

EMNIST = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10, "mnist": 10}
"""The splits' numbers of classes."""

MEGABYTES = {"MNIST": 67, "FashionMNIST": 86, "EMNIST": 2900, "CIFAR10": 360, "CIFAR100": 360}
"""Roughly what a download needs, archives and what is unpacked from them together."""


class _TorchvisionSet(ImageSet):
    """A data set in files that torchvision's class `source` downloads."""

    source: str

    @abstractmethod
    def _files(self) -> tuple[Path, list[str]]:
        """The folder of the files, and their names."""

    def source_problem(self) -> Problem | None:
        return source_problem(
            self._files()[0], self.data_dir, self.missing, 1_000_000 * MEGABYTES[self.source]
        )

    def missing(self) -> list[str]:
        folder, names = self._files()
        return [name for name in names if not os.path.lexists(folder / name)]

    def _require_downloaded(self, **kwargs: Any) -> None:
        folder, names = self._files()
        for name in set(names) - set(self.missing()):
            stat_of(folder / name)
        fetch = partial(_fetch, self.source, self.data_dir, **kwargs)
        room = 1_000_000 * MEGABYTES[self.source]
        require_files(folder, self.data_dir, self.missing, fetch, room, self._in_parquet())

    def _in_parquet(self) -> str:
        """Say how a folder with parquet files that is called as the data set is read, if there is
        one."""
        name = self.source.lower()
        found = any(any((place / name).glob("*.parquet")) for place in (Path(), self.data_dir))
        return (
            f"; dataset=parquet dataset.path={name} reads the parquet files in {name}/"
            if found
            else ""
        )


def _fetch(source: str, data_dir: Path, **kwargs: Any) -> None:
    import torchvision

    getattr(torchvision.datasets, source)(str(data_dir), download=True, **kwargs)


@parameters
class MNISTLike(_TorchvisionSet):
    """MNIST, FashionMNIST or EMNIST, as `source` says, in <data_dir>/<source>/raw.

    `split` is one of EMNIST's splits, and None for the others. EMNIST's images are stored
    transposed and are transposed back; the labels of its letters are shifted to begin at 0.
    `sha256`: as in `FromPath`; the files of MNIST and FashionMNIST have known checksums anyhow.
    """

    source: Literal["MNIST", "FashionMNIST", "EMNIST"]
    split: str | None
    sha256: str | None = None

    def problems(self) -> Problems:
        splits = list(EMNIST) if self.source == "EMNIST" else [None]
        allowed = ", ".join("null" if s is None else s for s in splits)
        yield rule(
            self.split in splits, "split", self.split, f"must be one of {allowed} for {self.source}"
        )
        yield from super().problems()
        yield sha256_problem(self.sha256)

    def form(self) -> tuple[tuple[int, ...], int]:
        return (1, 28, 28), 10 if self.split is None else EMNIST[self.split]

    def _files(self) -> tuple[Path, list[str]]:
        """Training images and labels, test images and labels."""
        parts = (
            ("train", "t10k")
            if self.split is None
            else (f"emnist-{self.split}-train", f"emnist-{self.split}-test")
        )
        names = [
            f"{p}-{kind}" for p in parts for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")
        ]
        return self.data_dir / self.source / "raw", names

    def load(self) -> LoadedData:
        folder, names = self._files()
        self._require_downloaded(**({} if self.split is None else {"split": self.split}))
        sources = SourceFiles(folder)
        contents = [sources.read(folder / name) for name in names]
        require_sha256(self.sha256, sources.sha256, str(folder))
        files: dict[str, Tensor] = {}
        for name, content, md5 in zip(
            names, contents, MD5.get(self.source, (None,) * 4), strict=True
        ):
            _require_md5(folder / name, content, md5)
            files[name] = _parse_idx(folder / name, content)
        tensors = dict(zip(("train_x", "train_y", "test_x", "test_y"), files.values(), strict=True))
        for split in ("train", "test"):
            x, y = tensors[f"{split}_x"], tensors[f"{split}_y"]
            tensors[f"{split}_x"] = (
                x.transpose(1, 2).contiguous() if self.source == "EMNIST" else x
            )[:, None]
            tensors[f"{split}_y"] = y.long() - (1 if self.split == "letters" else 0)
        fingerprint = f"{self.source} {self.split} {digest(files)}"
        return LoadedData.of(
            tensors, self.form()[1], self.mean, self.std, fingerprint, sha256=sources.sha256
        )


def _parse_idx(path: Path, content: bytes) -> Tensor:
    """Return the images [n, 28, 28] or labels [n], uint8, in a file's content.

    Raises `DataError` if it is damaged.
    """
    shape = (28, 28) if "images" in path.name else ()
    header_bytes = 4 * (len(shape) + 2)
    values = np.frombuffer(content, np.uint8)[header_bytes:]
    count, rest = divmod(len(values), math.prod(shape))
    header = struct.pack(f">{len(shape) + 2}I", 0x801 + len(shape), count, *shape)
    if rest or content[:header_bytes] != header:
        expected = f"IDX, unsigned bytes, {'x'.join(map(str, ('n', *shape)))}"
        raise DataError(f"{path} is damaged: expected {expected}; delete it and fetch it again")
    return torch.tensor(values).view(-1, *shape)


@parameters
class CIFAR(_TorchvisionSet):
    """CIFAR10 or CIFAR100, as `source` says, in <data_dir>/cifar-10-batches-py or cifar-100-python.

    The files are pickles; a file is unpickled only if its checksum is the one listed in
    torchvision.
    """

    channels = 3
    source: Literal["CIFAR10", "CIFAR100"]

    @property
    def _kind(self) -> Any:
        import torchvision

        return getattr(torchvision.datasets, self.source)

    def _files(self) -> tuple[Path, list[str]]:
        kind = self._kind
        return self.data_dir / kind.base_folder, [
            name for name, _ in (*kind.train_list, *kind.test_list)
        ]

    def form(self) -> tuple[tuple[int, ...], int]:
        return (3, 32, 32), {"CIFAR10": 10, "CIFAR100": 100}[self.source]

    def load(self) -> LoadedData:
        self._require_downloaded()
        train, test = self._kind.train_list, self._kind.test_list
        fingerprint = f"{self.source} {' '.join(sorted(md5 for _, md5 in (*train, *test)))}"
        mean, std = tuple(self.mean), tuple(self.std)
        return LoadedData(
            self._samples(train), self._samples(test), self.form()[1], mean, std, fingerprint
        )

    def _samples(self, files: list[tuple[str, str]]) -> Samples:
        folder, batches = self._files()[0], []
        for name, md5 in files:
            content = SourceFiles(folder).read(folder / name)
            _require_md5(folder / name, content, md5)
            batches.append(pickle.loads(content, encoding="latin1"))
        key = "labels" if self.source == "CIFAR10" else "fine_labels"
        x = torch.as_tensor(np.concatenate([batch["data"] for batch in batches])).view(
            -1, 3, 32, 32
        )
        return Samples(x, torch.as_tensor([label for batch in batches for label in batch[key]]))


def _require_md5(path: Path, content: bytes, md5: str | None) -> None:
    """Raise `DataError` if the content of a file has another checksum (None: any)."""
    if md5 not in (None, hashlib.md5(content).hexdigest()):
        raise DataError(f"{path} is damaged: expected md5 {md5}; delete it and fetch it again")
