"""What a data set is once it is loaded: two labelled tensors and a few facts."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.errors import DataError, Problem, rule


@dataclass(frozen=True)
class Samples:
    """`x` [n, ...] uint8 images (channels first) or float32 features; `y` [n] int64 labels."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class LoadedData:
    """A data set in memory.

    `mean` and `std` (per channel, for pixels scaled to [0, 1]) are None where `x` is float32 and ready to use.
    `owners` [n_train] names the natural client of each training sample, where the source knows it.
    `fingerprint` identifies the content; caches of anything computed from the data are keyed by it. Raises `DataError`
    where a label is not one of 0..num_classes - 1.
    """

    train: Samples
    test: Samples
    num_classes: int
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    fingerprint: str
    owners: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        check_labels(self.train.y, self.num_classes, "training")
        check_labels(self.test.y, self.num_classes, "test")

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.train.x.shape[1:])

    def normalise(self, x: Tensor) -> Tensor:
        """Images as the model sees them: float32, scaled to [0, 1], shifted and scaled per channel."""
        x = x.float()
        if self.mean is None or self.std is None:
            return x
        shape = (1, len(self.mean)) + (1,) * (x.dim() - 2)
        return (x.div_(255) - x.new_tensor(self.mean).view(shape)).div_(x.new_tensor(self.std).view(shape))


def check_labels(y: Tensor, num_classes: int, of: str) -> None:
    """Raise `DataError` unless the labels `y` [n] of the set named `of` are int64 in 0..num_classes - 1."""
    if y.dtype != torch.int64:
        raise DataError(f"the labels of the {of} samples must be int64, not {y.dtype}")
    low, high = map(int, y.aminmax()) if len(y) else (0, 0)
    if low < 0 or high >= num_classes:
        raise DataError(
            f"the labels of the {of} samples must lie in 0..{num_classes - 1}, found {low}..{high}; mend the data set, "
            "or its number of classes"
        )


class Dataset(ABC):
    """A source of labelled images. Subclasses take their hyper-parameters keyword-only, annotated, without defaults."""

    def __init__(self, data_dir: Path, cache_dir: Path) -> None:
        """`data_dir`: where sources are looked for and downloaded to; `cache_dir`: where decoded tensors are kept."""
        self.data_dir = data_dir
        self.cache_dir = cache_dir

    @abstractmethod
    def load(self) -> LoadedData:
        """Read, check and decode the data. Raises `DataError` with file, expectation and remedy."""


def normalisation(
    mean: Sequence[float] | None, std: Sequence[float] | None, channels: int | None = None
) -> list[Problem | None]:
    """Problems of `mean` and `std` for images of so many channels (None: not known yet). Both may be None."""
    if mean is None or std is None:
        return [rule(mean is std, "std", std, "must be null exactly where mean is")]
    count = channels or len(mean)
    return [
        *(
            rule(len(values) == count, key, values, f"must have {count} values, one for each channel")
            for key, values in (("mean", mean), ("std", std))
        ),
        rule(all(map(math.isfinite, mean)), "mean", mean, "must be finite"),
        rule(all(math.isfinite(v) and v > 0 for v in std), "std", std, "must be finite and > 0"),
    ]
