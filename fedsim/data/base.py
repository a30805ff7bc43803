"""The interface of data sets, and the form of a loaded one.

A config chooses a `Dataset`, which loads a `LoadedData`: labelled training and test samples, with
the facts about them that fedsim needs. An owner is the natural client of a sample, such as its
writer; partition=natural makes clients of owners. Shapes: n samples, C channels.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.core.arrays import Floats, Ints
from fedsim.core.errors import DataError, Problem, rule
from fedsim.core.exact import exp
from fedsim.core.parameters import Problems, parameters
from fedsim.core.text import spanned


class SampleSource(ABC):
    """Training samples that are made when they are needed, in place of a tensor [n, ...].

    A row must be a function of its position only. Results are then the same as with all samples in
    memory. Rows have the form that a model receives; fedsim does not normalise them.
    """

    dtype = torch.float32

    def __init__(self, count: int, input_shape: tuple[int, ...]) -> None:
        """There are `count` samples, each of the shape `input_shape`."""
        self.shape = (count, *input_shape)

    def __len__(self) -> int:
        return self.shape[0]

    @abstractmethod
    def rows(self, positions: Ints) -> Tensor:
        """Return the samples at `positions` [m] as a tensor [m, ...] of `dtype` on the CPU.

        Positions may repeat and come in any order.
        """

    def everything(self) -> Tensor:
        """Return all samples [n, ...]."""
        return self.rows(np.arange(len(self)))


@dataclass(frozen=True)
class Samples:
    """Labelled samples.

    `x` [n, ...] holds uint8 images (channels first), float32 features or int64 token ids; in a
    training set it may be a `SampleSource`. `y` [n] holds int64 labels.
    """

    x: Tensor | SampleSource
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    @property
    def tensor(self) -> Tensor:
        """The tensor `x`. Raises `DataError` if samples are made on demand."""
        if isinstance(self.x, Tensor):
            return self.x
        raise DataError(
            "this needs all training samples in memory, and the data set makes them on demand"
        )


class TokenShape(tuple[int, ...]):
    """The shape (length,) of a text: a sequence of token ids in 0..`vocabulary` - 1."""

    vocabulary: int

    def __new__(cls, length: int, vocabulary: int) -> "TokenShape":
        shape = super().__new__(cls, (length,))
        shape.vocabulary = vocabulary
        return shape

    def __getnewargs__(self) -> tuple[int, int]:
        """Return the arguments with which a copy or an unpickled shape is made."""
        return self[0], self.vocabulary


@dataclass(frozen=True)
class LoadedData:
    """A data set in memory. Its constructor checks the data and raises `DataError`.

    Attributes:
        mean, std: Normalisation for each channel of uint8 images, for pixels scaled to [0, 1];
            None for all other samples, which the model receives as they are.
        fingerprint: A text that identifies the content. Caches of anything that is computed from
            the data use it as their key.
        owners: The natural client of each training sample [n_train], such as its writer; None if
            the source does not say.
        sha256: The checksum of the source files, if it was computed.
        test_owners: The natural client of each test sample [n_test], with the same numbers as
            `owners`; -1 for a client without training samples.
        vocabulary: The number of different tokens, if samples are texts [n, length]; None for
            anything else.
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
        # A user's data set may give anything. (A type checker takes `isinstance` for always true.)
        kind = type(self.num_classes).__name__
        if kind != "int":
            raise DataError(f"num_classes={self.num_classes}: must be an int, not {kind}")
        if not issubclass(type(self.fingerprint), str):
            kind = type(self.fingerprint).__name__
            raise DataError(
                f"fingerprint={self.fingerprint}: must be a str that identifies the content of the "
                f"data, not {kind}. It is the key of caches, and a resumed run compares it"
            )
        self._check_split("training", self.train, self.owners)
        self._check_split("test", self.test, self.test_owners)
        self._check_alike()
        self._check_normalisation()

    def _check_alike(self) -> None:
        """Raise `DataError` unless training and test samples have one shape and one type."""
        train, test = (f"{tuple(s.x.shape[1:])} {s.x.dtype}" for s in (self.train, self.test))
        if train != test:
            raise DataError(
                f"training samples are {train} and test samples {test}; give both the same shape "
                "and type"
            )

    def _check_normalisation(self) -> None:
        """Raise `DataError` unless samples have `mean` and `std` exactly if they are pixels."""
        x = self.train.x
        if x.dtype == torch.uint8:
            if self.mean is None or self.std is None:
                raise DataError(
                    "uint8 samples are pixels and need mean and std, a number for each channel, "
                    "such as 0.5; or give float32 samples without them"
                )
            channels = x.shape[1] if len(x.shape) > 1 else 1
            for problem in normalisation_problems(list(self.mean), list(self.std), channels):
                if problem is not None:
                    raise DataError(f"{problem.key}={problem.value}: {problem.rule}")
        elif self.mean is not None or self.std is not None:
            raise DataError(
                f"mean and std are for uint8 pixels, which are divided by 255, and the samples are "
                f"{x.dtype}; leave them out and normalise the samples in `load`, or give uint8 "
                "pixels"
            )

    def _check_split(self, split: str, samples: Samples, owners: Ints | None) -> None:
        """Raise `DataError` if the samples of a split have a wrong form, label or value."""
        _check_form(samples, split, owners)
        check_labels(samples.y, self.num_classes, split)
        if isinstance(samples.x, Tensor):
            check_finite(samples.x, split)
        if self.vocabulary is not None:
            texts = samples.tensor
            if texts.dim() != 2 or not texts.shape[1]:
                raise DataError(
                    f"the {split} texts must be [n, length], length >= 1, not {tuple(texts.shape)}"
                )
            _check_numbers(texts, self.vocabulary, f"tokens of the {split} texts", "vocabulary")

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, Tensor],
        num_classes: int,
        mean: Sequence[float] | None,
        std: Sequence[float] | None,
        fingerprint: str,
        sha256: str | None = None,
        vocabulary: int | None = None,
    ) -> "LoadedData":
        """Return the data in `tensors`: `train_x`, `train_y`, `test_x` and `test_y`, and optionally
        `train_owners` and `test_owners`."""
        owners = {name: tensors[name].numpy() for name in tensors if name.endswith("_owners")}
        return cls(
            Samples(tensors["train_x"], tensors["train_y"]),
            Samples(tensors["test_x"], tensors["test_y"]),
            num_classes,
            None if mean is None else tuple(mean),
            None if std is None else tuple(std),
            fingerprint,
            owners.get("train_owners"),
            sha256,
            owners.get("test_owners"),
            vocabulary,
        )

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample; a `TokenShape` for texts."""
        shape = tuple(self.train.x.shape[1:])
        return shape if self.vocabulary is None else TokenShape(shape[0], self.vocabulary)

    def normalise(self, x: Tensor) -> Tensor:
        """Return samples `x` in the form that a model receives.

        Images [n, C, ...] become float32: (pixel / 255 - mean) / std. If `mean` is None, values
        become float32 and are not changed otherwise. Texts stay int64.
        """
        if self.vocabulary is not None:
            return x
        x = x.float()
        if self.mean is None or self.std is None:
            return x
        per_channel = (1, len(self.mean)) + (1,) * (x.dim() - 2)
        mean = x.new_tensor(self.mean).view(per_channel)
        std = x.new_tensor(self.std).view(per_channel)
        return x.div_(255).sub_(mean).div_(std)


def describe_loaded(data: LoadedData) -> list[str]:
    """Return lines about the samples, the classes and the owners of loaded data with owners."""
    x = data.train.tensor
    assert data.owners is not None
    _, sizes = np.unique(data.owners, return_counts=True)
    kind = f"{data.vocabulary} tokens" if data.vocabulary else str(x.dtype).removeprefix("torch.")
    return [
        f"sample: {'x'.join(map(str, x.shape[1:]))}, {kind}",
        f"label: {data.num_classes} classes",
        f"samples: train {len(data.train):,}, test {len(data.test):,}",
        f"clients: {len(sizes):,} with {spanned(sizes.min(), sizes.max())} training samples",
    ]


def _check_form(samples: Samples, split: str, owners: Any) -> None:
    """Raise `DataError` unless there are samples, and each has a label. If there are `owners`, each
    must have an owner, too."""
    if not isinstance(samples.x, Tensor | SampleSource):
        raise DataError(_not_a_tensor(split, "samples", samples.x))
    if not isinstance(samples.y, Tensor):
        raise DataError(_not_a_tensor(split, "labels", samples.y))
    if samples.y.dim() != 1:
        raise DataError(f"the {split} labels must be [n], not {tuple(samples.y.shape)}")
    if owners is not None:
        is_array = isinstance(owners, np.ndarray) and owners.ndim == 1
        if not is_array or not np.issubdtype(owners.dtype, np.integer):
            raise DataError(
                f"the {split} owners must be a NumPy array [n] of integers, not "
                f"{type(owners).__name__}; np.asarray makes one, and np.unique(..., "
                "return_inverse=True)[1]"
            )
    num_samples, num_labels = len(samples.x), len(samples.y)
    num_owners = num_samples if owners is None else len(owners)
    if not num_samples == num_labels == num_owners or num_samples == 0:
        counts = f"{num_samples} samples, {num_labels} labels"
        if owners is not None:
            counts += f", {num_owners} owners"
        raise DataError(
            f"the {split} set must have one label and one owner, if any, for each sample, and at "
            f"least one sample; found {counts}"
        )


def _not_a_tensor(split: str, what: str, value: object) -> str:
    """Return the message for samples or labels that are no tensor."""
    return (
        f"the {split} {what} must be a torch tensor, not {type(value).__name__}; torch.as_tensor "
        "makes a tensor of an array"
    )


def check_finite(x: Tensor, split: str) -> None:
    """Raise `DataError` if a sample [n, ...] of the `split` holds a nan or infinity."""
    if not x.is_floating_point() or not x.numel():
        return
    smallest, largest = x.aminmax()
    if smallest.isfinite() and largest.isfinite():
        return
    places = (~x.flatten(1).isfinite()).nonzero()
    row, column = places[0].tolist()
    raise DataError(
        f"dataset: the {split} samples hold {len(places)} values that are nan or infinite, the "
        f"first in row {row}, column {column}, both from 0; correct the file, or drop or "
        "fill such rows in `load`"
    )


def check_labels(y: Tensor, num_classes: int, split: str) -> None:
    """Raise `DataError` unless the labels `y` [n] are int64 in 0..num_classes - 1."""
    _check_numbers(y, num_classes, f"labels of the {split} samples", "number of classes")


def _check_numbers(values: Tensor, count: int, what: str, source: str) -> None:
    """Raise `DataError` unless `values` are int64 in 0..count - 1.

    The message calls them `what`, and `source` the quantity that `count` is.
    """
    if values.dtype != torch.int64:
        raise DataError(f"the {what} must be int64, not {values.dtype}")
    if not len(values):
        return
    low, high = map(int, values.aminmax())
    if low < 0 or high >= count:
        remedy = f"correct the data set, or its {source}"
        raise DataError(f"the {what} must lie in 0..{count - 1}, found {low}..{high}; {remedy}")


@dataclass(eq=False)
class Dataset(ABC):
    """A source of labelled samples: images, features or texts.

    Subclasses add keyword-only parameters. `data_dir` is the folder that has the source files, or
    gets them by download; `cache_dir` is the folder for decoded tensors.

    fedsim calls `source_problem` and `form` before it starts the first job, and `load` when a run
    begins. `fedsim doctor` calls `inspect`.
    """

    data_dir: Path
    cache_dir: Path

    def source_problem(self) -> Problem | None:
        """Return a problem with `data_dir` that shows before files are read, or None."""
        return None

    def form(self) -> tuple[tuple[int, ...], int] | None:
        """Return the shape of a sample and the number of classes; None if only `load` can tell."""
        return None

    def absent(self) -> list[str]:
        """Name what `load` needs and would neither find on disk nor download: files and folders,
        such as `train/ in /data/insects`. Read no file."""
        return []

    def files_to_fetch(self) -> list[str]:
        """Name the files that `load` would download. Read no file."""
        return []

    def inspect(self) -> Any:
        """Raise `DataError` for faults on disk that show before samples are decoded."""
        self.require_present(f"data_dir={self.data_dir}")

    def describe(self) -> list[str]:
        """Return lines about the columns, splits and clients of local data, for `fedsim doctor`."""
        return []

    def require_present(self, key: str) -> None:
        """Raise `DataError` if anything is `absent`; `key` is the config key that may be wrong."""
        missing = self.absent()
        if missing:
            raise DataError(
                f"{key}: is missing {', '.join(missing)}; correct it, or point data_dir or "
                f"FEDSIM_DATA to the folder that has it (data_dir={self.data_dir})"
            )

    @abstractmethod
    def load(self) -> LoadedData:
        """Read, check and decode the data.

        Raises `DataError` with the file, what was expected and the remedy.
        """


@parameters
class ImageDataset(Dataset):
    """The base class of data sets of images [C, H, W], which may be augmented."""

    augment: Literal["crop_flip"] | None = None
    """The random changes of images in local training, and only there; None: no changes.
    `crop_flip` is the usual augmentation for CIFAR (fedsim.engine.augment)."""


@parameters
class ImageSet(ImageDataset):
    """The base class of data sets of images with `channels` channels, normalised with `mean` and
    `std`."""

    channels: ClassVar[int] = 1
    mean: list[float]
    std: list[float]

    def problems(self) -> Problems:
        """Yield the problems of `mean` and `std`."""
        yield from normalisation_problems(self.mean, self.std, self.channels)


def log_normal_sizes(mean: float, deviation: float, normal: Floats) -> Ints:
    """Return log-normal numbers of samples, one for each owner and at least 1.

    `mean` is their expectation, `deviation` the standard deviation of their logarithms and `normal`
    standard normal numbers.
    """
    # the second term makes the expectation `mean`
    sizes = mean * exp(deviation * normal - deviation**2 / 2)
    return np.maximum(np.round(sizes).astype(np.int64), 1)


def numbers_in(known: NDArray[Any], values: NDArray[Any]) -> Ints:
    """Return the position of each value in the sorted array `known`; -1 if it is not in it."""
    places = np.minimum(np.searchsorted(known, values), len(known) - 1)
    return np.where(known[places] == values, places, -1).astype(np.int64)


def normalisation_problems(
    mean: list[float] | None, std: list[float] | None, channels: int | None = None
) -> list[Problem | None]:
    """Return the problems with `mean` and `std` of images with `channels` channels.

    `channels` is None if the number is not known yet. `mean` and `std` may both be None.
    """
    if mean is None or std is None:
        return [rule(mean is std, "std", std, "must be null exactly where mean is")]
    count = channels or len(mean)
    text = f"must have {count} values, one for each channel"
    # Pixels are divided by 255 before.
    means_fit = all(0 <= value <= 1 for value in mean)
    all_positive = all(0 < value < math.inf for value in std)
    return [
        rule(len(mean) == count, "mean", mean, text),
        rule(len(std) == count, "std", std, text),
        rule(means_fit, "mean", mean, "must lie in [0, 1], as pixels do", "divide it by 255"),
        rule(all_positive, "std", std, "must be finite and > 0"),
    ]
