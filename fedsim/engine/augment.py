"""Random crops and mirror images of training samples (`dataset.augment=crop_flip`).

This is the usual augmentation for CIFAR (He et al. 2016, section 4.2): 4 pixels of padding on each
side, a crop of the image's own size at a random place, and a mirror image with probability 1/2. One
number from 0 to `NUM_CROPS` - 1 says both. It is a function of seed, round, client, step and sample
only, so that all selectors and engines train on the same images.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.core.arrays import Ints
from fedsim.engine.training_layers import GOLDEN, mix

PADDING = 4
"""Pixels of padding on each side of an image."""
PLACES = 2 * PADDING + 1
"""Number of places of a crop along each axis."""
NUM_CROPS = 2 * PLACES**2
"""Number of crops, with and without mirroring."""


def crop_numbers(keys: Ints, positions: Ints) -> NDArray[np.uint8]:
    """Return the number of the crop of each sample [K, S, B].

    `keys` [K, S] belong to the clients' steps, and `positions` [K, S, B] are the samples in them.
    """
    start = mix(torch.as_tensor(keys)).unsqueeze(-1)
    bits = mix(start + torch.as_tensor(positions) * GOLDEN)
    numbers = ((bits >> 32) & (2**31 - 1)) % NUM_CROPS
    return numbers.numpy().astype(np.uint8)


@dataclass(frozen=True)
class CropFlip:
    """Crops and mirrors images. Padding has the values `fill` [C, 1, 1].

    They stand for a black pixel, as if images were padded before they are normalised.
    """

    fill: Tensor

    def __call__(self, images: Tensor, numbers: Tensor) -> Tensor:
        """Return `images` [..., C, H, W], each cropped by its number in `numbers` [...]."""
        *_, channels, height, width = images.shape
        numbers = numbers.reshape(-1, 1).long()
        is_mirrored = numbers % 2 == 1
        first_column = numbers // 2 % PLACES - PADDING
        first_row = numbers // (2 * PLACES) - PADDING
        # 1. Find the image's row [n, H] and column [n, W] of each row and column of the crop.
        rows = first_row + torch.arange(height, device=images.device)
        steps = torch.arange(width, device=images.device)
        columns = first_column + torch.where(is_mirrored, width - 1 - steps, steps)
        # 2. Take these pixels. Outside of the image, take any pixel, and replace it.
        valid_rows = (rows >= 0) & (rows < height)
        valid_columns = (columns >= 0) & (columns < width)
        row_starts = rows.clamp(0, height - 1) * width
        pixels = row_starts[:, :, None] + columns.clamp(0, width - 1)[:, None, :]
        flat = images.reshape(len(numbers), channels, -1)
        crops = flat.gather(2, pixels.flatten(1)[:, None].expand(-1, channels, -1))
        valid = valid_rows[:, :, None] & valid_columns[:, None, :]
        crops = torch.where(valid[:, None], crops.view(-1, channels, height, width), self.fill)
        return crops.view(images.shape)
