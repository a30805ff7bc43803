"""Decoding of image files into tensors."""

import io
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from fedsim.errors import DataError

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
            result[i] = _resize(image.convert(mode), (width, height), size is None, f"{name}: image {i}")

    decode_chunk(0)  # finds most mistakes before the thread pool starts
    with ThreadPoolExecutor() as pool:
        for _ in pool.map(decode_chunk, range(CHUNK, len(sources), CHUNK)):
            pass
    pixels = torch.from_numpy(result)
    return pixels.permute(0, 3, 1, 2).contiguous() if mode == "RGB" else pixels[:, None]


def _resize(image: Image.Image, shape: tuple[int, int], required: bool, name: str) -> Image.Image:
    if image.size == shape:
        return image
    if required:
        raise DataError(
            f"{name} has {image.size[0]}x{image.size[1]} pixels and the first {shape[0]}x{shape[1]}; "
            "set dataset.size to bring all to one size"
        )
    return image.resize(shape, Image.Resampling.BILINEAR)


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
    except UnidentifiedImageError as error:
        file = "" if isinstance(source, bytes) else f"{source}: "
        reason = f"cannot be decoded ({file}in none of the formats {', '.join(FORMATS)})"
        raise DataError(f"{name}: image {number} {reason}; convert it, or fetch the file again") from error
    except (OSError, ValueError, SyntaxError, MemoryError, Image.DecompressionBombError) as error:
        file = "" if isinstance(source, bytes) else f"{source}: "
        raise DataError(f"{name}: image {number} cannot be decoded ({file}{error}); fetch the file again") from error
    if image.mode in HIGH_BIT_DEPTH:
        raise DataError(f"{name}: image {number} has more than 8 bits per pixel; convert the images to 8 bits first")
    return image


def _identified(content: bytes) -> Image.Image:
    """The image whose header is in `content`, which is one of `FORMATS`; its pixels are not decoded yet."""
    return Image.open(io.BytesIO(content), formats=FORMATS)
