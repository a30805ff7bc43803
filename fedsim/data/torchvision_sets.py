"""MNIST, Fashion-MNIST, EMNIST, CIFAR-10 and CIFAR-100 in torchvision's layout, downloaded by it if absent.

Headers, lengths and checksums of the files are verified.
"""

import hashlib
import math
import pickle
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedsim.core.errors import DataError, Problem, check, rule
from fedsim.data.base import Dataset, LoadedData, Samples, normalisation_problems
from fedsim.data.cache import digest, require_regular, require_sha256, sha256_of_files, sha256_problem
from fedsim.data.fetch import require_files, source_problem

MD5 = {
    "MNIST": {
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    },
    "FashionMNIST": {
        "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
    },
}
"""Checksums of the unpacked files; torchvision checks only the archives. EMNIST's files are checked by length."""

EMNIST = {
    "byclass": (62, 697_932, 116_323),
    "bymerge": (47, 697_932, 116_323),
    "balanced": (47, 112_800, 18_800),
    "letters": (26, 124_800, 20_800),
    "digits": (10, 240_000, 40_000),
    "mnist": (10, 60_000, 10_000),
}
"""Number of classes, of training images and of test images of each split."""


BYTES = {
    "MNIST": 67_000_000,
    "FashionMNIST": 86_000_000,
    "EMNIST": 2_900_000_000,
    "CIFAR10": 360_000_000,
    "CIFAR100": 360_000_000,
}
"""Roughly what a download needs, archives and what is unpacked from them together."""


class _TorchvisionSet(Dataset):
    """A data set in files that torchvision's class `source` downloads."""

    source: str

    @abstractmethod
    def _files(self) -> tuple[Path, list[str]]:
        """The folder of the files, and their names."""

    def source_problem(self) -> Problem | None:
        return source_problem(self._files()[0], self.data_dir, self.missing, BYTES[self.source])

    def missing(self) -> list[str]:
        folder, names = self._files()
        return [name for name in names if not (folder / name).is_file()]

    def _require_downloaded(self, **kwargs: Any) -> None:
        if problem := self.source_problem():
            raise DataError(str(problem))
        folder, names = self._files()
        require_regular(path for path in (folder / name for name in names) if path.is_symlink() or path.exists())
        fetch = partial(_fetch, self.source, self.data_dir, **kwargs)
        require_files(folder, self.data_dir, self.missing, fetch, BYTES[self.source])


def _fetch(source: str, data_dir: Path, **kwargs: Any) -> None:
    import torchvision

    getattr(torchvision.datasets, source)(str(data_dir), download=True, **kwargs)


@dataclass(eq=False, kw_only=True)
class MNISTLike(_TorchvisionSet):
    """MNIST, FashionMNIST or EMNIST, as `source` says, in <data_dir>/<source>/raw.

    `split` is one of EMNIST's splits, and None for the others. EMNIST's images are stored transposed and are transposed
    back; the labels of its letters are shifted to begin at 0. `sha256`: None, or the checksum that the four files must
    have (see `sha256_of_files`); those of MNIST and FashionMNIST have known checksums anyhow.
    """

    source: Literal["MNIST", "FashionMNIST", "EMNIST"]
    split: str | None
    mean: list[float]
    std: list[float]
    sha256: str | None = None

    def __post_init__(self) -> None:
        splits = list(EMNIST) if self.source == "EMNIST" else [None]
        allowed = ", ".join("null" if s is None else s for s in splits)
        check(
            rule(self.split in splits, "split", self.split, f"must be one of {allowed} for {self.source}"),
            *normalisation_problems(self.mean, self.std, 1),
            sha256_problem(self.sha256),
        )

    def form(self) -> tuple[tuple[int, ...], int]:
        return (1, 28, 28), 10 if self.split is None else EMNIST[self.split][0]

    def _files(self) -> tuple[Path, list[str]]:
        """Training images and labels, test images and labels."""
        parts = ("train", "t10k") if self.split is None else (f"emnist-{self.split}-train", f"emnist-{self.split}-test")
        names = [f"{p}-{kind}" for p in parts for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")]
        return self.data_dir / self.source / "raw", names

    def load(self) -> LoadedData:
        folder, names = self._files()
        self._require_downloaded(**({} if self.split is None else {"split": self.split}))
        classes, *sizes = (10, -1, -1) if self.split is None else EMNIST[self.split]
        md5 = MD5.get(self.source, {})
        tensors = {}
        for name, size in zip(names, np.repeat(sizes, 2).tolist(), strict=True):
            tensors[name] = _read_idx(folder / name, (size, 28, 28) if "images" in name else (size,), md5.get(name))
        sha256 = sha256_of_files(folder, [folder / name for name in names])
        require_sha256(self.sha256, sha256, str(folder))
        train_x, train_y, test_x, test_y = tensors.values()
        return LoadedData(
            train=self._samples(train_x, train_y, classes),
            test=self._samples(test_x, test_y, classes),
            num_classes=classes,
            mean=tuple(self.mean),
            std=tuple(self.std),
            fingerprint=f"{self.source} {self.split} {digest(tensors)}",
            sha256=sha256,
        )

    def _samples(self, x: Tensor, y: Tensor, classes: int) -> Samples:
        y = y.long() - (1 if self.split == "letters" else 0)
        if len(x) != len(y) or not len(y) or y.min() < 0 or y.max() >= classes:
            raise DataError(
                f"{self._files()[0]} is damaged: expected as many labels as images, all in "
                f"0..{classes - 1}, found {len(y)} labels in {y.min() if len(y) else ''}..{y.max() if len(y) else ''} "
                f"and {len(x)} images; delete the files and fetch them again"
            )
        if self.source == "EMNIST":
            x = x.transpose(1, 2).contiguous()
        return Samples(x[:, None], y)


@dataclass(eq=False, kw_only=True)
class CIFAR(_TorchvisionSet):
    """CIFAR10 or CIFAR100, as `source` says, in <data_dir>/cifar-10-batches-py or cifar-100-python.

    The files are pickles; a file is unpickled only if its checksum is the one listed in torchvision.
    """

    source: Literal["CIFAR10", "CIFAR100"]
    mean: list[float]
    std: list[float]

    def __post_init__(self) -> None:
        check(*normalisation_problems(self.mean, self.std, 3))

    @property
    def _kind(self) -> Any:
        import torchvision

        return getattr(torchvision.datasets, self.source)

    def _files(self) -> tuple[Path, list[str]]:
        kind = self._kind
        return self.data_dir / kind.base_folder, [name for name, _ in (*kind.train_list, *kind.test_list)]

    def form(self) -> tuple[tuple[int, ...], int]:
        return (3, 32, 32), {"CIFAR10": 10, "CIFAR100": 100}[self.source]

    def load(self) -> LoadedData:
        self._require_downloaded()
        md5 = dict([*self._kind.train_list, *self._kind.test_list])
        return LoadedData(
            train=self._samples(self._kind.train_list),
            test=self._samples(self._kind.test_list),
            num_classes=self.form()[1],
            mean=tuple(self.mean),
            std=tuple(self.std),
            fingerprint=f"{self.source} {' '.join(sorted(md5.values()))}",
        )

    def _samples(self, files: Sequence[tuple[str, str]]) -> Samples:
        folder, _ = self._files()
        batches = [pickle.loads(_read_checked(folder / name, md5), encoding="latin1") for name, md5 in files]
        key = "labels" if self.source == "CIFAR10" else "fine_labels"
        x = torch.as_tensor(np.concatenate([batch["data"] for batch in batches])).view(-1, 3, 32, 32)
        return Samples(x, torch.as_tensor([label for batch in batches for label in batch[key]]))


def _read_idx(path: Path, shape: tuple[int, ...], md5: str | None = None) -> Tensor:
    """The uint8 tensor in `path`, which must have the given `shape` (-1: any length).

    Raises `DataError` with the expected and the actual value if the header, length or `md5` checksum is wrong
    (truncated files, bit errors, an HTML page in place of the data).
    """
    content = _read_checked(path, md5=None)
    header = 4 + 4 * len(shape)
    magic = bytes((0, 0, 8, len(shape)))
    if content[:4] != magic:
        raise _damaged_error(
            path, f"first bytes {magic.hex()} (IDX, unsigned bytes)", content[:4].hex() or "an empty file"
        )
    if len(content) < header:
        raise _damaged_error(path, f"at least {header} bytes", f"{len(content)} bytes")
    dims = tuple(np.frombuffer(content[4:header], ">u4").tolist())
    if any(expected not in (-1, found) for expected, found in zip(shape, dims, strict=True)):
        raise _damaged_error(path, f"dimensions {_format_shape(shape)}", _format_shape(dims))
    if len(content) != header + math.prod(dims):
        raise _damaged_error(path, f"{header + math.prod(dims)} bytes", f"{len(content)} bytes")
    _check_md5(path, content, md5)
    return torch.from_numpy(np.frombuffer(bytearray(content), np.uint8, offset=header).reshape(dims))


def _read_checked(path: Path, md5: str | None) -> bytes:
    """The content of `path`. Raises `DataError` if it cannot be read or its checksum is not `md5` (None: any)."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error})") from error
    _check_md5(path, content, md5)
    return content


def _check_md5(path: Path, content: bytes, md5: str | None) -> None:
    if md5 is not None and (found := hashlib.md5(content, usedforsecurity=False).hexdigest()) != md5:
        raise _damaged_error(path, f"md5 {md5}", found)


def _damaged_error(path: Path, expected: str, found: str) -> DataError:
    return DataError(f"{path} is damaged: expected {expected}, found {found}; delete it and fetch it again")


def _format_shape(dims: tuple[int, ...]) -> str:
    return "x".join("any" if d < 0 else str(d) for d in dims)
