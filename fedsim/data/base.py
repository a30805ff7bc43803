"""The interface of data sets, and the form of a loaded one: labelled training and test samples with
metadata."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.core.arrays import Floats, Ints
from fedsim.core.errors import DataError, Problem, rule
from fedsim.core.exact import exp
from fedsim.core.parameters import Problems, parameters


class SampleSource(ABC):
    """Stands where a data set has the tensor `x` [n, ...] of its training samples: `rows` makes
    some of them.

    A row is a function of its position alone, so that results are those of the same samples held in
    memory. Rows are what a model receives; they are not normalised further.
    """

    dtype = torch.float32

    def __init__(self, count: int, input_shape: tuple[int, ...]) -> None:
        self.shape = (count, *input_shape)

    def __len__(self) -> int:
        return self.shape[0]

    @abstractmethod
    def rows(self, positions: Ints) -> Tensor:
        """The samples at `positions` [m], which may repeat and come in any order: [m, ...] of
        `dtype`, on the CPU."""

    def everything(self) -> Tensor:
        return self.rows(np.arange(len(self)))


@dataclass(frozen=True)
class Samples:
    """`x` [n, ...] uint8 images (channels first), float32 features or int64 ids of tokens; `y` [n]
    int64 labels.

    `x` of a training set may be a `SampleSource`, which makes samples when they are asked for.
    """

    x: Tensor | SampleSource
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    @property
    def tensor(self) -> Tensor:
        """`x`, which is in memory. Raises `DataError` if samples are made on demand."""
        if isinstance(self.x, Tensor):
            return self.x
        raise DataError(
            "this needs all training samples in memory, and the data set makes them on demand"
        )


class TokenShape(tuple[int, ...]):
    """The shape (length,) of a text, a sequence of ids of tokens in 0..`vocabulary` - 1."""

    vocabulary: int

    def __new__(cls, length: int, vocabulary: int) -> "TokenShape":
        shape = super().__new__(cls, (length,))
        shape.vocabulary = vocabulary
        return shape

    def __getnewargs__(self) -> tuple[int, int]:
        return self[0], self.vocabulary


@dataclass(frozen=True)
class LoadedData:
    """A data set in memory.

    `mean` and `std` (per channel, for pixels scaled to [0, 1]) are None if `x` needs no
    normalisation. `vocabulary` is the number of tokens of texts, whose `x` [n, length] int64 are
    ids of tokens; None for anything else. `owners` [n_train] is the natural client of each training
    sample (writer, user), or None if the source does not say; `test_owners` [n_test] that of each
    test sample, by the same numbers, and -1 for one without training samples. `fingerprint`
    identifies the content; caches of anything computed from the data use it as their key. `sha256`
    is the checksum of the source files where it was computed. Raises `DataError` if samples or
    labels are no tensors, labels or tokens out of range, a split empty, or if its samples, labels
    and owners differ in number.
    """

    train: Samples
    test: Samples
    num_classes: int
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    fingerprint: str
    owners: Ints | None = None
    sha256: str | None = None
    test_owners: Ints | None = None
    vocabulary: int | None = None

    def __post_init__(self) -> None:
        for split, samples, owners in (
            ("training", self.train, self.owners),
            ("test", self.test, self.test_owners),
        ):
            _check_form(samples, split, owners)
            check_labels(samples.y, self.num_classes, split)
            if isinstance(samples.x, Tensor):
                check_finite(samples.x, split)
            if self.vocabulary is not None:
                x = samples.tensor
                if x.dim() != 2 or not x.shape[1]:
                    raise DataError(
                        f"the {split} texts must be [n, length], length >= 1, not {tuple(x.shape)}"
                    )
                _check_numbers(x, self.vocabulary, f"tokens of the {split} texts", "vocabulary")

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, Tensor],
        num_classes: int,
        mean: Any,
        std: Any,
        *others: Any,
        **named: Any,
    ) -> "LoadedData":
        """Of `train_x`, `train_y`, `test_x` and `test_y`; and of `train_owners` and `test_owners`,
        if there are any."""
        train, test = (
            Samples(tensors[f"{split}_x"], tensors[f"{split}_y"]) for split in ("train", "test")
        )
        for key, name in (("owners", "train_owners"), ("test_owners", "test_owners")):
            named[key] = tensors[name].numpy() if name in tensors else None
        mean, std = None if mean is None else tuple(mean), None if std is None else tuple(std)
        return cls(train, test, num_classes, mean, std, *others, **named)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of one sample; a `TokenShape` for texts."""
        shape = tuple(self.train.x.shape[1:])
        return shape if self.vocabulary is None else TokenShape(shape[0], self.vocabulary)

    def normalise(self, x: Tensor) -> Tensor:
        """Samples as the model receives them. Images [n, C, ...]: float32, (pixel / 255 - mean) /
        std.

        Values are unchanged if `mean` is None; texts stay int64.
        """
        if self.vocabulary is not None:
            return x
        x = x.float()
        if self.mean is None or self.std is None:
            return x
        shape = (1, len(self.mean)) + (1,) * (x.dim() - 2)
        return (
            x.div_(255)
            .sub_(x.new_tensor(self.mean).view(shape))
            .div_(x.new_tensor(self.std).view(shape))
        )


def _check_form(samples: Samples, split: str, owners: Ints | None) -> None:
    for what, value, kinds in (
        ("samples", samples.x, (Tensor, SampleSource)),
        ("labels", samples.y, (Tensor,)),
    ):
        if not isinstance(value, kinds):
            told = f"the {split} {what} must be a torch tensor, not {type(value).__name__}"
            raise DataError(f"{told}; torch.as_tensor makes one of an array")
    sizes = len(samples.x), len(samples.y), len(samples.y if owners is None else owners)
    if len(set(sizes)) > 1 or not len(samples):
        rule = "must have one label and one owner, if any, for each image, and at least one image"
        raise DataError(
            f"the {split} set {rule}; found {sizes[0]} images, {sizes[1]} labels, {sizes[2]} owners"
        )


def check_finite(x: Tensor, split: str) -> None:
    """Raise `DataError` if a sample of the `split` [n, ...] holds a nan or infinity."""
    if not x.is_floating_point() or not x.numel() or torch.stack(x.aminmax()).isfinite().all():
        return
    places = (~x.flatten(1).isfinite()).nonzero()
    row, column = places[0].tolist()
    fault = f"hold {len(places)} values that are nan or infinite, the first in row {row}, column {column}, both from 0"
    raise DataError(
        f"dataset: the {split} samples {fault}; correct the file, or drop or fill such rows in `load`"
    )


def check_labels(y: Tensor, num_classes: int, split: str) -> None:
    """Raise `DataError` unless the labels `y` [n] of the `split` are int64 in 0..num_classes -
    1."""
    _check_numbers(y, num_classes, f"labels of the {split} samples", "number of classes")


def _check_numbers(values: Tensor, count: int, what: str, source: str) -> None:
    if values.dtype != torch.int64:
        raise DataError(f"the {what} must be int64, not {values.dtype}")
    low, high = map(int, values.aminmax()) if len(values) else (0, 0)
    if low < 0 or high >= count:
        remedy = f"correct the data set, or its {source}"
        raise DataError(f"the {what} must lie in 0..{count - 1}, found {low}..{high}; {remedy}")


@dataclass(eq=False)
class Dataset(ABC):
    """A source of labelled samples: images, features or texts, with keyword-only hyper-parameters.

    `data_dir`: where source files are and are downloaded to; `cache_dir`: where decoded tensors are
    stored.
    """

    data_dir: Path
    cache_dir: Path

    def source_problem(self) -> Problem | None:
        """A problem with `data_dir` that shows before files are read, asked of all jobs before the
        first one starts."""
        return None

    def form(self) -> tuple[tuple[int, ...], int] | None:
        """The shape of an input and the number of classes, where they are known before files are
        read."""
        return None

    def absent(self) -> list[str]:
        """What is not on disk, and `load` needs and would not fetch: `train/ in /data/insects`.
        Nothing is read."""
        return []

    def inspect(self) -> Any:
        """Raise `DataError` for what is missing on disk, or wrong and shows before samples are
        decoded."""
        self.require_present(f"data_dir={self.data_dir}")

    def require_present(self, key: str) -> None:
        """Raise `DataError` if anything is `absent`, naming the setting `key` that may be wrong."""
        if absent := self.absent():
            remedy = f"point data_dir or FEDSIM_DATA to the folder that has it (data_dir={self.data_dir})"
            raise DataError(f"{key}: is missing {', '.join(absent)}; correct it, or {remedy}")

    @abstractmethod
    def load(self) -> LoadedData:
        """Read, check and decode the data. Raises `DataError` naming the file, what was expected
        and the remedy."""


@parameters
class ImageSet(Dataset):
    """Images of `channels` channels, which `mean` and `std` normalise."""

    channels: ClassVar[int] = 1
    mean: list[float]
    std: list[float]

    def problems(self) -> Problems:
        yield from normalisation_problems(self.mean, self.std, self.channels)


def log_normal_sizes(mean: float, deviation: float, normal: Floats) -> Ints:
    """Owners' log-normal numbers of samples, `mean` on average and at least one, from standard
    normal numbers."""
    return np.maximum(
        np.round(mean * exp(deviation * normal - deviation**2 / 2)).astype(np.int64), 1
    )


def numbers_in(known: NDArray[Any], values: NDArray[Any]) -> Ints:
    """The position of each value in the sorted array `known`; -1 of those that are not in it."""
    places = np.minimum(np.searchsorted(known, values), len(known) - 1)
    return np.where(known[places] == values, places, -1).astype(np.int64)


def normalisation_problems(
    mean: Any, std: Any, channels: int | None = None
) -> list[Problem | None]:
    """Problems with `mean` and `std` for images of `channels` channels (None: not known yet); both
    may be None."""
    if mean is None or std is None:
        return [rule(mean is std, "std", std, "must be null exactly where mean is")]
    count = channels or len(mean)
    text = f"must have {count} values, one for each channel"
    return [
        rule(len(mean) == count, "mean", mean, text),
        rule(len(std) == count, "std", std, text),
        rule(all(map(math.isfinite, mean)), "mean", mean, "must be finite"),
        rule(all(math.isfinite(v) and v > 0 for v in std), "std", std, "must be finite and > 0"),
    ]
