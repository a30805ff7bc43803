"""Image files, decoded into tensors; images in folders named after their classes, as torchvision's
ImageFolder."""

import io
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Interval
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from fedsim.core.disk import reading_problem, user_path
from fedsim.core.errors import DataError, Problem, rule
from fedsim.core.parameters import Problems, parameters
from fedsim.data.base import Dataset, LoadedData, normalisation_problems
from fedsim.data.cache import (
    SourceFiles,
    is_hidden,
    load_or_decode,
    require_memory,
    require_sha256,
    sha256_problem,
)

GREY = ("1", "L", "LA")
HIGH_BIT_DEPTH = ("I", "I;16", "I;16B", "I;16L", "I;16N", "F")
"""Pillow's modes of grey images, and those with more than 8 bits per pixel, which a conversion
would clip."""
SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""Ends of the names of images in folders."""
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "PPM", "TIFF")
"""Formats that are decoded, whatever a file's name says. Pillow knows many more, some of which
start other programs."""
CHUNK = 512
Side = Annotated[int, Interval(ge=1, le=4096)]
"""Pixels per side to which images are scaled."""


def decode(
    read: Callable[[Any], bytes],
    sources: Sequence[Any],
    *,
    mode: str | None,
    size: int | None,
    name: str,
) -> Tensor:
    """Decode images as uint8 [n, C, H, W]: those that `read` returns of each of the `sources`,
    encoded.

    `mode` is L (grey) or RGB; None: L if all are grey, else RGB. `size`: pixels per side to scale
    to; None: all must have the same size. Raises `DataError` with `name` and the image that cannot
    be used.
    """

    def opened(number: int, *, is_header: bool = False) -> Image.Image:
        return _open_image(read(sources[number]), called(number), is_header=is_header)

    def called(number: int) -> str:
        return (
            f"{name}: {sources[number] if isinstance(sources[number], Path) else f'image {number}'}"
        )

    count = len(sources)
    if mode is None:
        all_grey = all(opened(i, is_header=True).mode in GREY for i in range(count))
        mode = "L" if all_grey else "RGB"
    width, height = (size, size) if size is not None else opened(0).size
    shape = (count, height, width, *((3,) if mode == "RGB" else ()))
    require_memory(math.prod(shape), f"{name}: {count:,} images of {width}x{height} pixels")
    result = np.empty(shape, np.uint8)

    def decode_chunk(start: int) -> None:
        for i in range(start, min(start + CHUNK, count)):
            image = opened(i)
            if size is None and image.size != (width, height):
                told = f"{called(i)} has {image.width}x{image.height} pixels and the first {width}x{height}"
                raise DataError(f"{told}; set dataset.size to bring all to one size")
            image = image.convert(mode)
            same = image.size == (width, height)
            result[i] = image if same else image.resize((width, height), Image.Resampling.BILINEAR)

    decode_chunk(0)  # finds most mistakes before the thread pool starts
    with ThreadPoolExecutor() as pool:
        list(pool.map(decode_chunk, range(CHUNK, count, CHUNK)))
    pixels = torch.from_numpy(result)
    return pixels.permute(0, 3, 1, 2).contiguous() if mode == "RGB" else pixels[:, None]


def _open_image(content: bytes, name: str, *, is_header: bool) -> Image.Image:
    """One image, decoded unless its header is enough."""
    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
        if is_header:
            return image
        if image.format == "PNG":  # decoding does not look at the checksums of a PNG file
            image.verify()
            image = Image.open(io.BytesIO(content), formats=FORMATS)
        image.load()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        is_unknown = isinstance(error, UnidentifiedImageError)
        reason = f"in none of the formats {', '.join(FORMATS)}" if is_unknown else str(error)
        raise DataError(
            f"{name} cannot be decoded ({reason}); convert it, or fetch the file again"
        ) from error
    if image.mode in HIGH_BIT_DEPTH:
        raise DataError(
            f"{name} has more than 8 bits per pixel; convert the images to 8 bits first"
        )
    return image


@parameters
class FromPath(Dataset):
    """A data set at `path`: absolute, or relative to the working folder or to data_dir. `mean` and
    `std`: None is .5 each. `sha256`: None, or the checksum that the files must have (see
    `sha256_of_files`)."""

    channels = None
    path: str
    mean: list[float] | None
    std: list[float] | None
    sha256: str | None = None

    def problems(self) -> Problems:
        yield rule(
            bool(self.path), "path", self.path, "must name a file or folder", "dataset.path=..."
        )
        yield from normalisation_problems(self.mean, self.std, self.channels)
        yield sha256_problem(self.sha256)

    def source_problem(self) -> Problem | None:
        here, below = self._places()
        return None if here.exists() else reading_problem("data_dir", self.data_dir, [below])

    def _places(self) -> list[Path]:
        path = user_path(self.path)
        return [path, self.data_dir / path]

    def _searched(self) -> str:
        return " or ".join(str(place.absolute()) for place in self._places())


@parameters
class ImageFolder(FromPath):
    """Images `path`/train/<class>/* and `path`/test/<class>/*, which may be links, scaled to `size`
    x `size` pixels; `grey` converts to one channel."""

    size: Side
    grey: bool

    @property
    def channels(self) -> int:  # type: ignore[override]
        return 1 if self.grey else 3

    def absent(self) -> list[str]:
        if not (self._root() / "train").is_dir():
            return [f"train/ in {self._searched()}"]
        return [] if (self._root() / "test").is_dir() else [f"test/ in {self._root().absolute()}"]

    def _root(self) -> Path:
        places = self._places()
        return next((place for place in places if (place / "train").is_dir()), places[0])

    def inspect(self) -> tuple[list[tuple[Path, int]], list[tuple[Path, int]], int]:
        """The training and the test images with the numbers of their classes, and how many classes
        there are."""
        self.require_present(f"dataset.path={self.path}")
        (train, classes), (test, test_classes) = (
            _list_files(self._root() / split) for split in ("train", "test")
        )
        if classes != test_classes:
            differ = sorted(set(classes) ^ set(test_classes))
            raise DataError(
                f"dataset.path={self.path}: train/ and test/ differ in their classes: {', '.join(differ)}"
            )
        return train, test, len(classes)

    def load(self) -> LoadedData:
        train, test, num_classes = self.inspect()
        root, mode = self._root(), "L" if self.grey else "RGB"
        names = [[(p.relative_to(root).as_posix(), c) for p, c in split] for split in (train, test)]

        def read(sources: SourceFiles) -> dict[str, Tensor]:
            tensors = {}
            for split, listing in (("train", train), ("test", test)):
                name = f"dataset.path={self.path} ({split})"
                paths = [path for path, _ in listing]
                tensors[f"{split}_x"] = decode(
                    sources.read, paths, mode=mode, size=self.size, name=name
                )
                tensors[f"{split}_y"] = torch.tensor([c for _, c in listing])
            return tensors

        files, facts = [p for p, _ in (*train, *test)], (self.size, self.grey, names)
        tensors, sha256 = load_or_decode(self.cache_dir / "image_folder", root, files, facts, read)
        require_sha256(self.sha256, sha256, f"dataset.path={self.path}")
        unset, fingerprint = [0.5] * self.channels, f"image_folder {self.size} {mode} {sha256}"
        return LoadedData.of(
            tensors, num_classes, self.mean or unset, self.std or unset, fingerprint, sha256=sha256
        )


def _list_files(folder: Path) -> tuple[list[tuple[Path, int]], list[str]]:
    """Return the images with the numbers of their classes, and the class names in alphabetical
    order.

    Hidden files and folders are skipped. Raises `DataError` for other files that are no images by
    their names, and for a class without images.
    """
    places = [place for place in folder.iterdir() if place.is_dir()]
    classes = sorted(place.name for place in places if not is_hidden(Path(place.name)))
    images: list[tuple[Path, int]] = []
    for number, name in enumerate(classes):
        for parent, _, names in sorted(os.walk(folder / name, followlinks=True)):
            paths = [Path(parent, file) for file in sorted(names)]
            images += [(path, number) for path in paths if not is_hidden(path.relative_to(folder))]
    others = [path for path, _ in images if path.suffix.lower() not in SUFFIXES]
    if others:
        counts = Counter(path.suffix or "no suffix" for path in others).most_common()
        listed = ", ".join(f"{count} with {suffix}" for suffix, count in counts)
        fault = f"has files that are no images by their names: {listed}, the first is {others[0]}"
        remedy = (
            f"let names of images end in one of {', '.join(SUFFIXES)}, and move other files away"
        )
        raise DataError(f"dataset.path: {folder} {fault}; {remedy}")
    empty = set(range(len(classes))) - {number for _, number in images}
    if empty or not classes:
        missing = ", ".join(classes[number] for number in sorted(empty)) or "at all"
        raise DataError(
            f"dataset.path: {folder} has no images of the classes {missing}; each class is a folder"
        )
    return images, classes
