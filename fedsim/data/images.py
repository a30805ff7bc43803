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


def decode(sources: Sequence[Any], *, mode: str | None, size: int | None, name: str) -> Tensor:
    """uint8 [n, C, H, W] from image bytes or files.

    `mode` L or RGB (None: RGB if the first image has colours, else grey); `size` pixels a side (None: as they are, all
    alike). Raises `DataError` naming the image by its number in `name`.
    """
    if not len(sources):
        raise DataError(f"{name}: there are no images")
    first = _open(sources[0], 0, name)
    mode = mode or ("L" if first.mode in ("1", "L", "LA", "I", "I;16") else "RGB")
    shape = (size, size) if size is not None else first.size
    result = torch.empty(len(sources), len(mode) if mode == "RGB" else 1, shape[1], shape[0], dtype=torch.uint8)

    def work(i: int) -> None:
        image = _open(sources[i], i, name).convert(mode)
        if image.size != shape:
            if size is None:
                raise DataError(
                    f"{name}: image {i} has {image.size[0]}x{image.size[1]} pixels and the first {shape[0]}x{shape[1]};"
                    " set dataset.size to bring all to one size"
                )
            image = image.resize(shape, Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.asarray(image).copy())
        result[i] = pixels.permute(2, 0, 1) if pixels.dim() == 3 else pixels[None]

    with ThreadPoolExecutor() as pool:
        for _ in pool.map(work, range(len(sources)), chunksize=256):
            pass
    return result


def _open(source: Any, number: int, name: str) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
        image.load()
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{name}: image {number} cannot be decoded ({error}); fetch the file again") from error
    return image
