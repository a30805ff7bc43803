"""Images in folders named after their class, as torchvision's ImageFolder reads them."""

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from fedsim.data.base import Dataset, LoadedData, Samples, normalisation
from fedsim.data.cache import file_sha256, load_or_build, stamp
from fedsim.data.images import decode
from fedsim.errors import DataError, at_least, check, rule


class ImageFolder(Dataset):
    """`path`/train/<class>/* and `path`/test/<class>/*, scaled to `size` pixels a side; `grey` makes one channel.

    `path` is absolute, or relative to the working folder or to data_dir. `mean` and `std` of None are .5 per channel.
    Decoded once into the cache, whose key holds all files' sizes and times of change.
    """

    def __init__(
        self,
        data_dir: Path,
        cache_dir: Path,
        *,
        path: str,
        size: int,
        grey: bool,
        mean: list[float] | None,
        std: list[float] | None,
    ) -> None:
        super().__init__(data_dir, cache_dir)
        channels = 1 if grey else 3
        check(
            rule(bool(path), "path", path, "must name a folder with train/ and test/", "dataset.path=..."),
            at_least("size", size, 1),
            *normalisation(mean, std, channels),
        )
        self.path, self.size, self.grey = path, size, grey
        self.mean = mean or [0.5] * channels
        self.std = std or [0.5] * channels

    def load(self) -> LoadedData:
        places = [Path(self.path).expanduser(), self.data_dir / self.path]
        root = next((p for p in places if (p / "train").is_dir()), None)
        if root is None:
            wanted = " or ".join(str(p.absolute()) for p in places)
            raise DataError(f"dataset.path={self.path}: no folder train/ in {wanted}")
        splits = {split: _listing(root / split) for split in ("train", "test")}
        (train, classes), (test, test_classes) = splits["train"], splits["test"]
        if classes != test_classes:
            differ = sorted(set(classes) ^ set(test_classes))
            raise DataError(f"dataset.path={self.path}: train/ and test/ differ in their classes: {', '.join(differ)}")
        files = [p for p, _ in (*train, *test)]
        cache = self.cache_dir / f"image_folder-{stamp(files, self.size, self.grey)[:32]}.safetensors"
        found = load_or_build(
            cache, lambda: {**self._decode(train), **self._decode(test, "test"), "content": _content(root, files)}
        )
        content = found["content"].numpy().tobytes().hex()
        return LoadedData(
            Samples(found["train_x"], found["train_y"]),
            Samples(found["test_x"], found["test_y"]),
            len(classes),
            tuple(self.mean),
            tuple(self.std),
            f"image_folder {self.size} {'L' if self.grey else 'RGB'} {content}",
        )

    def _decode(self, listing: list[tuple[Path, int]], split: str = "train") -> dict[str, Tensor]:
        mode = "L" if self.grey else "RGB"
        images = decode([p for p, _ in listing], mode=mode, size=self.size, name=f"dataset.path={self.path} ({split})")
        return {f"{split}_x": images, f"{split}_y": torch.tensor([c for _, c in listing])}


def _content(root: Path, files: list[Path]) -> Tensor:
    """SHA-256 of all names and contents, as bytes: the same wherever the folder lies."""
    listing = "\n".join(f"{file.relative_to(root).as_posix()} {file_sha256(file)}" for file in files)
    return torch.tensor(list(hashlib.sha256(listing.encode()).digest()), dtype=torch.uint8)


def _listing(folder: Path) -> tuple[list[tuple[Path, int]], list[str]]:
    """Files with the number of their class, and the classes in alphabetical order."""
    from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset

    try:
        classes, numbers = find_classes(str(folder))
        files = make_dataset(str(folder), numbers, IMG_EXTENSIONS)
    except FileNotFoundError as error:
        raise DataError(f"dataset.path: {error}") from error
    return [(Path(p), c) for p, c in files], classes
