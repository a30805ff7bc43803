"""Decoding of image files into tensors, and images in folders named after their classes.

The layout of the folders is that of torchvision's ImageFolder. parquet.py uses `decode` and
`FromPath`, too. Shapes: n images, C channels, H and W pixels of height and width.
"""

import io
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
from fedsim.data.base import ImageDataset, LoadedData, normalisation_problems
from fedsim.data.cache import (
    SourceFiles,
    is_hidden,
    load_or_decode,
    require_memory,
    require_sha256,
    sha256_problem,
    visible,
)

GREY = ("1", "L", "LA")
"""Pillow's modes of grey images."""
HIGH_BIT_DEPTH = ("I", "I;16", "I;16B", "I;16L", "I;16N", "F")
"""Pillow's modes with more than 8 bits per pixel, which a conversion to 8 bits would clip."""
SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""Suffixes of image files in folders."""
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "PPM", "TIFF")
"""Formats that fedsim decodes, whatever a file's suffix says. Pillow knows many more, some of which
start other programs."""
CHUNK = 512
"""Images that a thread decodes at a time."""
Side = Annotated[int, Interval(ge=1, le=4096)]
"""Height and width in pixels of the square to which images are scaled."""


def decode(
    read: Callable[[Any], bytes],
    sources: Sequence[Any],
    *,
    mode: str | None,
    size: int | None,
    name: str,
) -> Tensor:
    """Decode encoded images as a tensor [n, C, H, W] uint8.

    Args:
        read: Returns the encoded image of one of the `sources`.
        sources: One object for each image, such as its path.
        mode: "L" (grey) or "RGB"; None takes grey if all images are grey, and RGB otherwise.
        size: Height and width to scale to; None requires images of one size.
        name: The name of the data set in messages.

    Raises `DataError` with `name` and the image that cannot be used.
    """
    count = len(sources)

    def describe(number: int) -> str:
        source = sources[number]
        return f"{name}: {source if isinstance(source, Path) else f'image {number}'}"

    def read_header(number: int) -> Image.Image:
        return _open_image(read(sources[number]), describe(number), header_only=True)

    # 1. The mode and the size of all images, from the headers
    if mode is None:
        all_grey = all(read_header(number).mode in GREY for number in range(count))
        mode = "L" if all_grey else "RGB"
    width, height = (size, size) if size is not None else read_header(0).size
    shape = (count, height, width) if mode == "L" else (count, height, width, 3)
    require_memory(math.prod(shape), f"{name}: {count:,} images of {width}x{height} pixels")
    result = np.empty(shape, np.uint8)

    # 2. Decode all images into `result`, chunk by chunk in threads (Pillow decodes without the GIL)
    def decode_chunk(start: int) -> None:
        for number in range(start, min(start + CHUNK, count)):
            image = _open_image(read(sources[number]), describe(number))
            if size is None and image.size != (width, height):
                raise DataError(
                    f"{describe(number)} has {image.width}x{image.height} pixels and the first "
                    f"{width}x{height}; set dataset.size to bring all to one size"
                )
            image = image.convert(mode)
            if image.size != (width, height):
                image = image.resize((width, height), Image.Resampling.BILINEAR)
            result[number] = np.asarray(image)

    decode_chunk(0)  # finds most mistakes before the thread pool starts
    with ThreadPoolExecutor() as pool:
        list(pool.map(decode_chunk, range(CHUNK, count, CHUNK)))

    # 3. Channels first
    pixels = torch.from_numpy(result)
    return pixels.permute(0, 3, 1, 2).contiguous() if mode == "RGB" else pixels[:, None]


def _open_image(content: bytes, name: str, *, header_only: bool = False) -> Image.Image:
    """Return the image, decoded unless `header_only`. Raises `DataError`."""
    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
        if header_only:
            return image
        if image.format == "PNG":  # decoding ignores the checksums of a PNG file
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
class FromPath(ImageDataset):
    """The base class of data sets at `path`, which is absolute, or relative to the working folder
    or to data_dir."""

    channels = None  # known only after reading, unless a subclass sets it
    path: str
    mean: list[float] | None
    """Mean of each channel; None is 0.5."""
    std: list[float] | None
    """Standard deviation of each channel; None is 0.5."""
    sha256: str | None = None
    """The checksum that the files must have (see `SourceFiles.sha256`); None accepts any."""
    name: str | None = None
    """The name of the data in reports; None: the last part of `path` (`Run.dataset`)."""

    def problems(self) -> Problems:
        """Yield the problems of `path`, of `mean` and `std`, and of `sha256`."""
        yield rule(
            bool(self.path), "path", self.path, "must name a file or folder", "dataset.path=..."
        )
        yield from normalisation_problems(self.mean, self.std, self.channels)
        yield sha256_problem(self.sha256)

    def source_problem(self) -> Problem | None:
        """Return a problem if `path`, or the `data_dir` that it would have to be in, cannot be
        read."""
        here, below_data_dir = self._places()
        try:
            if here.exists():
                return None
        except OSError:  # A folder on the way must not be searched.
            return reading_problem("dataset.path", here)
        return reading_problem("data_dir", self.data_dir, [below_data_dir])

    def source_bytes(self) -> int:
        """Return the size of all files at `path`."""
        place = next((place for place in self._places() if place.exists()), None)
        if place is None:
            return 0
        files = visible(place, "**/*") if place.is_dir() else [place]
        return sum(file.stat().st_size for file in files if file.is_file())

    def _places(self) -> list[Path]:
        """Return the two places that `path` may mean; the first one has precedence."""
        path = user_path(self.path)
        return [path, self.data_dir / path]

    def _searched(self) -> str:
        """Return both places in words, for messages."""
        return " or ".join(str(place.absolute()) for place in self._places())


@dataclass(frozen=True)
class Listing:
    """The image files of one split, with the numbers of their classes, in the same order."""

    files: list[Path]
    labels: list[int]
    classes: list[str]
    """Names of the classes in alphabetical order."""


@parameters
class ImageFolder(FromPath):
    """Images `path`/train/<class>/* and `path`/test/<class>/*, which may be links.

    They are scaled to `size` x `size` pixels; `grey` converts them to one channel.
    """

    size: Side
    grey: bool

    @property
    def channels(self) -> int:  # type: ignore[override]
        """1 for grey images, 3 for coloured ones."""
        return 1 if self.grey else 3

    def absent(self) -> list[str]:
        """Name the folder train/ or test/ that is missing."""
        root = self._root()
        if not (root / "train").is_dir():
            return [f"train/ in {self._searched()}"]
        return [] if (root / "test").is_dir() else [f"test/ in {root.absolute()}"]

    def _root(self) -> Path:
        """Return the first place of `path` that has a folder train/."""
        places = self._places()
        for place in places:
            if (place / "train").is_dir():
                return place
        return places[0]

    def inspect(self) -> tuple[Listing, Listing]:
        """Return the training and the test images. Raises `DataError` if they differ in their
        classes, or as `_list_images`."""
        self.require_present(f"dataset.path={self.path}")
        train, test = (_list_images(self._root() / split) for split in ("train", "test"))
        differing = sorted(set(train.classes) ^ set(test.classes))
        if differing:
            raise DataError(
                f"dataset.path={self.path}: train/ and test/ differ in their classes: "
                f"{', '.join(differing)}"
            )
        return train, test

    def load(self) -> LoadedData:
        """Return the data, decoded or from the cache."""
        train, test = self.inspect()
        root = self._root()
        mode = "L" if self.grey else "RGB"

        def read(sources: SourceFiles) -> dict[str, Tensor]:
            tensors = {}
            for split, listing in (("train", train), ("test", test)):
                name = f"dataset.path={self.path} ({split})"
                tensors[f"{split}_x"] = decode(
                    sources.read, listing.files, mode=mode, size=self.size, name=name
                )
                tensors[f"{split}_y"] = torch.tensor(listing.labels)
            return tensors

        # Links are followed when files are compared with the cache, so the names of files and the
        # classes that follow from them are a part of its key.
        names = []
        for listing in (train, test):
            relative = [file.relative_to(root).as_posix() for file in listing.files]
            names.append(list(zip(relative, listing.labels, strict=True)))
        tensors, sha256 = load_or_decode(
            self.cache_dir / "image_folder",
            root,
            [*train.files, *test.files],
            (self.size, self.grey, names),
            read,
        )
        require_sha256(self.sha256, sha256, f"dataset.path={self.path}")
        default = [0.5] * self.channels
        return LoadedData.of(
            tensors,
            len(train.classes),
            self.mean or default,
            self.std or default,
            f"image_folder {self.size} {mode} {sha256}",
            sha256=sha256,
        )


def _list_images(folder: Path) -> Listing:
    """Return the images below a folder of classes, without hidden files and folders.

    Raises `DataError` for images that are in no class, for files with other suffixes than images
    have, and for a class without images.
    """
    classes = []
    strays = []
    for place in sorted(folder.iterdir()):
        if is_hidden(Path(place.name)):
            continue
        if place.is_dir():
            classes.append(place.name)
        elif place.suffix.lower() in SUFFIXES:
            strays.append(place)
    if strays:
        count = "an image" if len(strays) == 1 else f"{len(strays)} images"
        raise DataError(
            f"dataset.path: {folder} has {count} outside the folders of classes, the first is "
            f"{strays[0]}; move each into the folder of its class, or away"
        )
    listing = Listing([], [], classes)
    for number, name in enumerate(classes):
        for parent, _, file_names in sorted(os.walk(folder / name, followlinks=True)):
            for file_name in sorted(file_names):
                file = Path(parent, file_name)
                if not is_hidden(file.relative_to(folder)):
                    listing.files.append(file)
                    listing.labels.append(number)
    others = [file for file in listing.files if file.suffix.lower() not in SUFFIXES]
    if others:
        counts = Counter(file.suffix or "no suffix" for file in others).most_common()
        listed = ", ".join(f"{count} with {suffix}" for suffix, count in counts)
        raise DataError(
            f"dataset.path: {folder} has files that are no images by their names: {listed}, the "
            f"first is {others[0]}; let names of images end in one of {', '.join(SUFFIXES)}, and "
            "move other files away"
        )
    empty = sorted(set(range(len(classes))) - set(listing.labels))
    if empty or not classes:
        missing = ", ".join(classes[number] for number in empty) or "at all"
        raise DataError(
            f"dataset.path: {folder} has no images of the classes {missing}; each class is a folder"
        )
    return listing
