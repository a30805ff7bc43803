"""Encoded images to tensors."""

import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from fedsim.errors import DataError

GREY = ("1", "L", "LA")
DEEP = ("I", "I;16", "I;16B", "I;16L", "I;16N", "F")
"""Pillow's modes of grey images, and of those of more than 8 bits, which it would clip."""
CHUNK = 512


class _ColourError(Exception):
    """A colour image among grey ones."""


def decode(sources: Sequence[Any], *, mode: str | None, size: int | None, name: str) -> Tensor:
    """uint8 [n, C, H, W] from image bytes or files.

    `mode` L or RGB (None: grey if all images are, else RGB); transparency is dropped. `size` pixels a side (None: as
    they are, all alike). Raises `DataError` naming the image by its number in `name`.
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
    width, height = (size, size) if size is not None else _open(sources[0], 0, name).size
    result = np.empty((len(sources), height, width, *((3,) if mode == "RGB" else ())), np.uint8)

    def work(start: int) -> None:
        for i in range(start, min(start + CHUNK, len(sources))):
            image = _open(sources[i], i, name)
            if only_grey and image.mode not in GREY:
                raise _ColourError
            result[i] = _fit(image.convert(mode), (width, height), size is None, f"{name}: image {i}")

    work(0)  # tells most mistakes before all threads are at work
    with ThreadPoolExecutor() as pool:
        for _ in pool.map(work, range(CHUNK, len(sources), CHUNK)):
            pass
    pixels = torch.from_numpy(result)
    return pixels.permute(0, 3, 1, 2).contiguous() if mode == "RGB" else pixels[:, None]


def _fit(image: Image.Image, shape: tuple[int, int], exactly: bool, name: str) -> Image.Image:
    if image.size == shape:
        return image
    if exactly:
        raise DataError(
            f"{name} has {image.size[0]}x{image.size[1]} pixels and the first {shape[0]}x{shape[1]}; "
            "set dataset.size to bring all to one size"
        )
    return image.resize(shape, Image.Resampling.BILINEAR)


def _open(source: Any, number: int, name: str) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
        image.load()
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{name}: image {number} cannot be decoded ({error}); fetch the file again") from error
    if image.mode in DEEP:
        raise DataError(f"{name}: image {number} has more than 8 bits per pixel; convert the images to 8 bits first")
    return image
