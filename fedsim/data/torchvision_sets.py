"""MNIST, Fashion-MNIST, EMNIST, CIFAR-10 and CIFAR-100 as torchvision lays them out and, if absent, fetches them."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from filelock import FileLock

from fedsim.data.base import Dataset, LoadedData, Samples
from fedsim.data.cache import digest
from fedsim.data.idx import read_idx
from fedsim.errors import DataError, check, rule

FASHION_MD5 = {
    "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
    "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
    "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
}
"""Of the unpacked files; torchvision checks only the archives."""

EMNIST_CLASSES = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10, "mnist": 10}


class MNISTLike(Dataset):
    """`source` MNIST, FashionMNIST or EMNIST in <data_dir>/<source>/raw; `split` is EMNIST's, else None.

    EMNIST's images, stored transposed, are turned upright; its letters are numbered from 0.
    """

    def __init__(
        self,
        data_dir: Path,
        cache_dir: Path,
        *,
        source: Literal["MNIST", "FashionMNIST", "EMNIST"],
        split: str | None,
        mean: list[float],
        std: list[float],
    ) -> None:
        super().__init__(data_dir, cache_dir)
        splits = list(EMNIST_CLASSES) if source == "EMNIST" else [None]
        check(rule(split in splits, "split", split, f"must be one of {', '.join(map(str, splits))} for {source}"))
        self.source, self.split, self.mean, self.std = source, split, mean, std

    def load(self) -> LoadedData:
        names = self._names()
        folder = self.data_dir / self.source / "raw"
        kwargs: dict[str, Any] = {} if self.split is None else {"split": self.split}
        require_files(folder, names, self.data_dir, lambda: _fetch(self.source, self.data_dir, **kwargs))
        md5 = FASHION_MD5 if self.source == "FashionMNIST" else {}
        tensors = {
            name: read_idx(folder / name, (-1, 28, 28) if "images" in name else (-1,), md5.get(name)) for name in names
        }
        train_x, train_y, test_x, test_y = tensors.values()
        return LoadedData(
            train=self._samples(train_x, train_y),
            test=self._samples(test_x, test_y),
            num_classes=10 if self.split is None else EMNIST_CLASSES[self.split],
            mean=tuple(self.mean),
            std=tuple(self.std),
            fingerprint=f"{self.source} {self.split} {digest(tensors)}",
        )

    def _names(self) -> list[str]:
        """Training images and labels, test images and labels."""
        parts = ("train", "t10k") if self.split is None else (f"emnist-{self.split}-train", f"emnist-{self.split}-test")
        return [f"{p}-{kind}" for p in parts for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")]

    def _samples(self, x: torch.Tensor, y: torch.Tensor) -> Samples:
        if len(x) != len(y):
            raise DataError(f"{self.data_dir / self.source}: {len(x)} images but {len(y)} labels; fetch them again")
        if self.source == "EMNIST":
            x = x.transpose(1, 2).contiguous()
        return Samples(x[:, None], y.long() - (1 if self.split == "letters" else 0))


class CIFAR(Dataset):
    """`source` CIFAR10 or CIFAR100 in <data_dir>, every file checked against torchvision's md5 before it is opened."""

    def __init__(
        self,
        data_dir: Path,
        cache_dir: Path,
        *,
        source: Literal["CIFAR10", "CIFAR100"],
        mean: list[float],
        std: list[float],
    ) -> None:
        super().__init__(data_dir, cache_dir)
        self.source, self.mean, self.std = source, mean, std

    def load(self) -> LoadedData:
        import torchvision
        from torchvision.datasets.utils import check_integrity

        kind = getattr(torchvision.datasets, self.source)
        folder = self.data_dir / kind.base_folder
        md5 = dict([*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"])])
        require_files(folder, list(md5), self.data_dir, lambda: _fetch(self.source, self.data_dir))
        for name, expected in md5.items():
            if not check_integrity(str(folder / name), expected):
                raise DataError(f"{folder / name} is damaged: its md5 is not {expected}; delete it and fetch it again")
        train, test = (self._samples(kind(str(self.data_dir), train=t)) for t in (True, False))
        return LoadedData(
            train,
            test,
            len(kind(str(self.data_dir), train=False).classes),
            tuple(self.mean),
            tuple(self.std),
            fingerprint=f"{self.source} {' '.join(sorted(md5.values()))}",
        )

    def _samples(self, source: Any) -> Samples:
        return Samples(torch.as_tensor(source.data).permute(0, 3, 1, 2).contiguous(), torch.as_tensor(source.targets))


def require_files(folder: Path, names: Sequence[str], data_dir: Path, fetch: Callable[[], None]) -> None:
    """All `names` in `folder`, fetched by one process at a time if any is absent. Raises `DataError` naming them."""

    def missing() -> list[str]:
        return [name for name in names if not (folder / name).is_file()]

    if not missing():
        return
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        with FileLock(data_dir / f".{folder.parts[len(data_dir.parts)]}.lock"):
            if missing():
                fetch()
    except Exception as error:  # torchvision and urllib raise all kinds
        _remove_empty(folder, data_dir)
        raise DataError(
            f"data_dir={data_dir}: no {', '.join(missing() or names)} in {folder}, and fetching them failed "
            f"({str(error).splitlines()[0]}). Put the files there, or point data_dir or FEDSIM_DATA to them"
        ) from error
    if missing():
        raise DataError(f"data_dir={data_dir}: {', '.join(missing())} should now be in {folder} but are not")


def _remove_empty(folder: Path, data_dir: Path) -> None:
    """Leave no trace of a failed attempt."""
    for lock in data_dir.glob(".*.lock"):
        lock.unlink(missing_ok=True)
    for place in (folder, *folder.parents):
        if place.is_relative_to(data_dir):
            with contextlib.suppress(OSError):
                place.rmdir()


def _fetch(source: str, data_dir: Path, **kwargs: Any) -> None:
    import torchvision

    getattr(torchvision.datasets, source)(str(data_dir), download=True, **kwargs)
