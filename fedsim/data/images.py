"""Image files, decoded into tensors; images in folders named after their classes, as torchvision's ImageFolder."""

import io
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from fedsim.core.disk import reading_problem
from fedsim.core.errors import DataError, Problem, at_least, at_most, check, rule
from fedsim.data.base import Dataset, LoadedData, normalisation_problems
from fedsim.data.cache import (
    CONTENT,
    content_tensor,
    load_or_build,
    modification_key,
    require_regular,
    require_sha256,
    sha256_problem,
)

GREY = ("1", "L", "LA")
HIGH_BIT_DEPTH = ("I", "I;16", "I;16B", "I;16L", "I;16N", "F")
"""Pillow's modes of grey images, and those with more than 8 bits per pixel, which a conversion would clip."""
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "PPM", "TIFF")
"""Formats that are decoded, whatever a file's name says. Pillow knows many more, some of which start other programs."""
MAX_PIXELS = 80_000_000
"""Pixels of the largest image that is decoded: small files can claim to hold far more than memory does."""
MAX_SIDE = 4096
"""Pixels per side to which images can be scaled."""
MAX_BYTES = 2**36
"""All decoded images of a split."""
CHUNK = 512


class _ColourError(Exception):
    """Raised if an image is in colour although all were expected to be grey."""


def decode(sources: Sequence[Any], *, mode: str | None, size: int | None, name: str) -> Tensor:
    """The images in `sources`, encoded bytes or file paths, as uint8 [n, C, H, W].

    `mode` is L (grey) or RGB; None: L if all images are grey, else RGB. Transparency is dropped. `size` is the number
    of pixels per side to scale to; None: no scaling, all images must have the same size. Raises `DataError` with `name`
    and the number of the image that cannot be used.
    """
    if not len(sources):
        raise DataError(f"{name}: there are no images")
    if mode is not None:
        return _decode(sources, mode, size, name)
    try:
        return _decode(sources, "L", size, name, only_grey=True)
    except _ColourError:
        return _decode(sources, "RGB", size, name)


def _decode(sources: Sequence[Any], mode: str, size: int | None, name: str, only_grey: bool = False) -> Tensor:
    width, height = (size, size) if size is not None else _open_image(sources[0], 0, name).size
    shape = (len(sources), height, width, *((3,) if mode == "RGB" else ()))
    if math.prod(shape) > MAX_BYTES:
        raise DataError(
            f"{name}: {len(sources)} images of {width}x{height} pixels take {math.prod(shape) / 2**30:.0f} GiB "
            f"(at most {MAX_BYTES // 2**30}); set dataset.size to a smaller number of pixels per side"
        )
    result = np.empty(shape, np.uint8)

    def decode_chunk(start: int) -> None:
        for i in range(start, min(start + CHUNK, len(sources))):
            image = _open_image(sources[i], i, name)
            if only_grey and image.mode not in GREY:
                raise _ColourError
            if size is None and image.size != (width, height):
                raise DataError(
                    f"{name}: image {i} has {image.width}x{image.height} pixels and the first {width}x{height}; "
                    "set dataset.size to bring all to one size"
                )
            image = image.convert(mode)
            same = image.size == (width, height)
            result[i] = image if same else image.resize((width, height), Image.Resampling.BILINEAR)

    decode_chunk(0)  # finds most mistakes before the thread pool starts
    with ThreadPoolExecutor() as pool:
        for _ in pool.map(decode_chunk, range(CHUNK, len(sources), CHUNK)):
            pass
    pixels = torch.from_numpy(result)
    return pixels.permute(0, 3, 1, 2).contiguous() if mode == "RGB" else pixels[:, None]


def _open_image(source: Any, number: int, name: str) -> Image.Image:
    try:
        content = source if isinstance(source, bytes) else Path(source).read_bytes()
        image = _identified(content)
        if image.width * image.height > MAX_PIXELS:
            raise DataError(
                f"{name}: image {number} has {image.width}x{image.height} pixels, more than {MAX_PIXELS:,} in all; "
                "scale it down, or remove it if it is not part of the data set"
            )
        if image.format == "PNG":  # decoding does not look at the checksums of a PNG file
            image.verify()
            image = _identified(content)
        image.load()
    except (OSError, ValueError, SyntaxError, MemoryError, Image.DecompressionBombError) as error:
        file = "" if isinstance(source, bytes) else f"{source}: "
        reason, remedy = str(error), "fetch the file again"
        if isinstance(error, UnidentifiedImageError):
            reason, remedy = f"in none of the formats {', '.join(FORMATS)}", f"convert it, or {remedy}"
        raise DataError(f"{name}: image {number} cannot be decoded ({file}{reason}); {remedy}") from error
    if image.mode in HIGH_BIT_DEPTH:
        raise DataError(f"{name}: image {number} has more than 8 bits per pixel; convert the images to 8 bits first")
    return image


def _identified(content: bytes) -> Image.Image:
    """The image whose header is in `content`, which is one of `FORMATS`; its pixels are not decoded yet."""
    return Image.open(io.BytesIO(content), formats=FORMATS)


class FromPath(Dataset):
    """A data set at `path`: absolute, or relative to the working folder or to data_dir."""

    path: str

    def source_problem(self) -> Problem | None:
        here = Path(self.path).expanduser()
        return None if here.exists() else reading_problem("data_dir", self.data_dir, [self.data_dir / self.path])

    def _places(self) -> list[Path]:
        return [Path(self.path).expanduser(), self.data_dir / self.path]

    def _searched(self) -> str:
        return " or ".join(str(place.absolute()) for place in self._places())

    def _absent_error(self, what: str) -> DataError:
        remedy = f"point data_dir or FEDSIM_DATA to the folder that has it (data_dir={self.data_dir})"
        return DataError(f"dataset.path={self.path}: no {what} {self._searched()}; correct the path, or {remedy}")


@dataclass(eq=False, kw_only=True)
class ImageFolder(FromPath):
    """Images `path`/train/<class>/* and `path`/test/<class>/*, scaled to `size` x `size` pixels.

    `path` is absolute, or relative to the working folder or to data_dir. `grey` converts to one channel. `mean` and
    `std`: None is .5 per channel. Images are decoded once into a cache whose key includes the names, classes, sizes and
    modification times of all files; they may be links. `sha256`: None, or the checksum that the files must have (see
    `sha256_of_files`).
    """

    path: str
    size: int
    grey: bool
    mean: list[float] | None
    std: list[float] | None
    sha256: str | None = None

    def __post_init__(self) -> None:
        check(
            rule(bool(self.path), "path", self.path, "must name a folder with train/ and test/", "dataset.path=..."),
            at_least("size", self.size, 1),
            at_most("size", self.size, MAX_SIDE),
            *normalisation_problems(self.mean, self.std, 1 if self.grey else 3),
            sha256_problem(self.sha256),
        )

    def absent(self) -> list[str]:
        root = self._root()
        if root is None:
            return [f"train/ in {self._searched()}"]
        return [] if (root / "test").is_dir() else [f"test/ in {root.absolute()}"]

    def _root(self) -> Path | None:
        return next((p for p in self._places() if (p / "train").is_dir()), None)

    def load(self) -> LoadedData:
        root = self._root()
        if root is None:
            raise self._absent_error("folder train/ in")
        (train, classes), (test, test_classes) = (_list_files(root / split) for split in ("train", "test"))
        if classes != test_classes:
            differ = sorted(set(classes) ^ set(test_classes))
            raise DataError(f"dataset.path={self.path}: train/ and test/ differ in their classes: {', '.join(differ)}")
        files = [p for p, _ in (*train, *test)]
        names = [[(p.relative_to(root).as_posix(), c) for p, c in split] for split in (train, test)]
        key = modification_key(files, self.size, self.grey, CONTENT, names)
        tensors = load_or_build(
            self.cache_dir / f"image_folder-{key[:32]}.safetensors",
            lambda: {**self._decode(train), **self._decode(test, "test"), "content": content_tensor(root, files)},
        )
        content = tensors["content"].numpy().tobytes().hex()
        require_sha256(self.sha256, content, f"dataset.path={self.path}")
        unset = [0.5] * (1 if self.grey else 3)
        fingerprint = f"image_folder {self.size} {'L' if self.grey else 'RGB'} {content}"
        return LoadedData.of(tensors, len(classes), self.mean or unset, self.std or unset, fingerprint, sha256=content)

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
