"""Images in folders named after their classes, in the layout of torchvision's ImageFolder."""

from pathlib import Path

import torch
from torch import Tensor

from fedsim.data.base import Dataset, LoadedData, Samples, normalisation_problems
from fedsim.data.cache import load_or_build, modification_key
from fedsim.data.checksums import CONTENT, content_tensor, require_regular, require_sha256, sha256_problem
from fedsim.data.images import MAX_SIDE, decode
from fedsim.disk import reading_problem
from fedsim.errors import DataError, Problem, at_least, at_most, check, rule


class ImageFolder(Dataset):
    """Images `path`/train/<class>/* and `path`/test/<class>/*, scaled to `size` x `size` pixels.

    `path` is absolute, or relative to the working folder or to data_dir. `grey` converts to one channel. `mean` and
    `std`: None is .5 per channel. Images are decoded once into a cache whose key includes the names, classes, sizes and
    modification times of all files; they may be links. `sha256`: None, or the checksum that the files must have (see
    `sha256_of_files`).
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
        sha256: str | None = None,
    ) -> None:
        super().__init__(data_dir, cache_dir)
        channels = 1 if grey else 3
        check(
            rule(bool(path), "path", path, "must name a folder with train/ and test/", "dataset.path=..."),
            at_least("size", size, 1),
            at_most("size", size, MAX_SIDE),
            *normalisation_problems(mean, std, channels),
            sha256_problem(sha256),
        )
        self.sha256 = sha256
        self.path, self.size, self.grey = path, size, grey
        self.mean = mean or [0.5] * channels
        self.std = std or [0.5] * channels

    def source_problem(self) -> Problem | None:
        here = Path(self.path).expanduser()
        return None if here.exists() else reading_problem("data_dir", self.data_dir, [self.data_dir / self.path])

    def absent(self) -> list[str]:
        root = self._root()
        if root is None:
            return [f"train/ in {self._searched()}"]
        return [] if (root / "test").is_dir() else [f"test/ in {root.absolute()}"]

    def _places(self) -> list[Path]:
        return [Path(self.path).expanduser(), self.data_dir / self.path]

    def _root(self) -> Path | None:
        return next((p for p in self._places() if (p / "train").is_dir()), None)

    def _searched(self) -> str:
        return " or ".join(str(p.absolute()) for p in self._places())

    def load(self) -> LoadedData:
        root = self._root()
        if root is None:
            searched = self._searched()
            remedy = f"point data_dir or FEDSIM_DATA to the folder that has it (data_dir={self.data_dir})"
            raise DataError(f"dataset.path={self.path}: no folder train/ in {searched}; correct the path, or {remedy}")
        splits = {split: _list_files(root / split) for split in ("train", "test")}
        (train, classes), (test, test_classes) = splits["train"], splits["test"]
        if classes != test_classes:
            differ = sorted(set(classes) ^ set(test_classes))
            raise DataError(f"dataset.path={self.path}: train/ and test/ differ in their classes: {', '.join(differ)}")
        files = [p for p, _ in (*train, *test)]
        names = [[(p.relative_to(root).as_posix(), c) for p, c in split] for split in (train, test)]
        key = modification_key(files, self.size, self.grey, CONTENT, names)
        cache = self.cache_dir / f"image_folder-{key[:32]}.safetensors"
        tensors = load_or_build(
            cache,
            lambda: {**self._decode(train), **self._decode(test, "test"), "content": content_tensor(root, files)},
        )
        content = tensors["content"].numpy().tobytes().hex()
        require_sha256(self.sha256, content, f"dataset.path={self.path}")
        return LoadedData(
            Samples(tensors["train_x"], tensors["train_y"]),
            Samples(tensors["test_x"], tensors["test_y"]),
            len(classes),
            tuple(self.mean),
            tuple(self.std),
            f"image_folder {self.size} {'L' if self.grey else 'RGB'} {content}",
            sha256=content,
        )

    def _decode(self, listing: list[tuple[Path, int]], split: str = "train") -> dict[str, Tensor]:
        mode = "L" if self.grey else "RGB"
        images = decode([p for p, _ in listing], mode=mode, size=self.size, name=f"dataset.path={self.path} ({split})")
        return {f"{split}_x": images, f"{split}_y": torch.tensor([c for _, c in listing])}


def _list_files(folder: Path) -> tuple[list[tuple[Path, int]], list[str]]:
    """The files with their class numbers, and the class names in alphabetical order.

    Raises `DataError` if there are none.
    """
    from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset

    try:
        classes, numbers = find_classes(str(folder))
        files = make_dataset(str(folder), numbers, IMG_EXTENSIONS)
    except FileNotFoundError as error:
        raise DataError(f"dataset.path: {error}") from error
    require_regular(Path(p) for p, _ in files)
    return [(Path(p), c) for p, c in files], classes
