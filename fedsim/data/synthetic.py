"""Synthetic(alpha, beta): a data set whose clients differ by two parameters.

Source: Li et al., "Federated Optimization in Heterogeneous Networks" (FedProx, MLSys 2020), section
5.1. An owner is the natural client of its samples. Each owner has random streams of its own, so its
samples can be made at any time, alone and in the same way. Shapes: n owners, d features, C classes,
m samples.
"""

from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Interval
from torch import Tensor

from fedsim.core.arrays import Floats, Floats32, Ints
from fedsim.core.errors import at_most
from fedsim.core.parameters import Count, Positive, Problems, parameters
from fedsim.data.base import Dataset, LoadedData, Samples, SampleSource, log_normal_sizes
from fedsim.data.cache import digest, load_or_generate, parameters_key

MAX_SAMPLES = 100_000_000
"""Maximum number of samples of a split, on average; labels and owners take 16 bytes each."""
MAX_NUMBERS = 2_000_000_000
"""Maximum number of features in memory (8 GB): of all training samples, or of the test set."""
MAX_WEIGHTS = 10_000_000
"""Maximum number of features times classes, the size of the model that labels an owner's data."""
GENERATOR_VERSION = 1
"""Increase this when a change of the code gives other data for the same parameters."""
BLOCK_NUMBERS = 2**18
"""Numbers of models and features in memory while labels are made; they fit a processor's cache."""
MODEL_STREAM = 0
TRAIN_STREAM = 1
TEST_STREAM = 2
"""Streams of an owner's generator."""

Spread = Annotated[float, Interval(ge=0, le=1_000_000)]
"""A standard deviation between owners; products of far larger ones are infinite."""


@parameters
class Synthetic(Dataset):
    """Random features around each owner's mean, with the classes that the owner's linear model
    assigns to them.

    Each owner draws u ~ N(0, alpha^2), W [C, d] and b [C] ~ N(u, 1), B ~ N(0, beta^2) and v [d] ~
    N(B, 1). Its samples are x ~ N(v, Sigma), where Sigma is diagonal with Sigma_jj = j^-1.2, and
    y = argmax(W x + b). As in the published code, alpha and beta are standard deviations. An owner
    has a log-normal number of training samples. The numbers of test samples of owners differ by at
    most 1.
    """

    num_owners: Annotated[int, Interval(ge=1, le=1_000_000)]
    samples_per_owner: Positive
    size_deviation: Annotated[float, Interval(ge=0, le=3)]
    num_features: Annotated[int, Interval(ge=1, le=MAX_WEIGHTS)]
    num_classes: Annotated[int, Interval(ge=2, le=MAX_WEIGHTS)]
    alpha: Spread
    """Spread of the models between owners."""
    beta: Spread
    """Spread of the features between owners."""
    test_samples: Count
    hold: Literal["on_demand", "memory"]
    """`on_demand` holds only labels and makes features when they are needed, as a function of
    (seed, owner). `memory` makes all features once. Results are the same."""
    seed: Annotated[int, Interval(ge=0, le=2**63 - 1)]

    def problems(self) -> Problems:
        """Yield a problem for each size that exceeds its maximum."""
        num_features = max(self.num_features, 1)
        max_samples = MAX_SAMPLES
        remedy = "lower num_owners"
        if self.hold == "memory":
            max_samples = min(MAX_SAMPLES, MAX_NUMBERS // num_features)
            remedy = "dataset.hold=on_demand need not hold all in memory"
        max_per_owner = max_samples // max(self.num_owners, 1)
        max_classes = MAX_WEIGHTS // num_features
        max_test = MAX_NUMBERS // num_features
        yield at_most("samples_per_owner", self.samples_per_owner, max_per_owner, remedy)
        yield at_most("num_classes", self.num_classes, max_classes, "lower num_features")
        yield at_most("test_samples", self.test_samples, max_test, "lower num_features")

    def form(self) -> tuple[tuple[int, ...], int]:
        """Return the shape of a sample and the number of classes."""
        return (self.num_features,), self.num_classes

    def load(self) -> LoadedData:
        """Return the data; training samples are made on demand unless `hold` is `memory`."""
        tensors = load_or_generate(self, "synthetic", GENERATOR_VERSION, self._build)
        key = parameters_key(GENERATOR_VERSION, self)
        source = OwnerSamples(self)
        x = source if self.hold == "on_demand" else source.everything()
        numbers = np.arange(self.num_owners)
        return LoadedData(
            train=Samples(x, tensors["train_y"]),
            test=Samples(tensors["test_x"], tensors["test_y"]),
            num_classes=self.num_classes,
            mean=None,
            std=None,
            fingerprint=f"synthetic {digest({'key': key, **tensors})}",
            owners=np.repeat(numbers, self.counts),
            test_owners=np.repeat(numbers, self.test_counts),
        )

    @cached_property
    def counts(self) -> Ints:
        """Number of training samples of each owner [num_owners], at least 1."""
        normal = np.random.default_rng(self.seed).standard_normal(self.num_owners)
        return log_normal_sizes(self.samples_per_owner, self.size_deviation, normal)

    @cached_property
    def test_counts(self) -> Ints:
        """Number of test samples of each owner [num_owners]."""
        owners = np.arange(self.test_samples) % self.num_owners
        return np.bincount(owners, minlength=self.num_owners)

    def _build(self) -> dict[str, Tensor]:
        """Return the labels of the training samples, and the test set, in order of the owners."""
        train_y = np.empty(int(self.counts.sum()), np.int64)
        test_x = np.empty((self.test_samples, self.num_features), np.float32)
        test_y = np.empty(self.test_samples, np.int64)
        train_end = test_end = 0
        numbers_per_owner = self.num_features * (self.num_classes + int(self.counts.max()))
        block_size = max(BLOCK_NUMBERS // numbers_per_owner, 1)
        for first in range(0, self.num_owners, block_size):
            owners = np.arange(first, min(first + block_size, self.num_owners))
            models = self._models(owners)
            counts = self.counts[owners]
            means, x = self.features(owners, counts)
            train_start, train_end = train_end, train_end + len(x)
            train_y[train_start:train_end] = _labels(models, x, counts)

            counts = self.test_counts[owners]
            no_numbers = np.empty((len(owners), 0))  # the means come from the training stream
            x = self._draw(owners, counts, TEST_STREAM, no_numbers)
            self._move(x, means, counts)
            test_start, test_end = test_end, test_end + len(x)
            test_x[test_start:test_end] = x
            test_y[test_start:test_end] = _labels(models, x, counts)
        return {
            "train_y": torch.as_tensor(train_y),
            "test_x": torch.as_tensor(test_x),
            "test_y": torch.as_tensor(test_y),
        }

    def features(self, owners: Ints, counts: Ints) -> tuple[Floats32, Floats32]:
        """Return the means [n, d] of some owners' features, and their first training samples.

        The samples [sum of counts, d] are the first `counts` [n] of each owner, owner after owner.
        """
        # B and v of each owner: the first 1 + d numbers of its training stream
        normal = np.empty((len(owners), 1 + self.num_features))
        x = self._draw(owners, counts, TRAIN_STREAM, normal)
        means = (self.beta * normal[:, :1] + normal[:, 1:]).astype(np.float32)
        self._move(x, means, counts)
        return means, x

    def _draw(self, owners: Ints, counts: Ints, stream: int, leading: Floats) -> Floats32:
        """Return standard normal numbers [sum of counts, d] from the owners' streams.

        The first numbers of each stream fill the owner's row of `leading` [n, ...].
        """
        x = np.empty((int(counts.sum()), self.num_features), np.float32)
        start = 0
        for row, owner, count in zip(leading, owners.tolist(), counts.tolist(), strict=True):
            rng = self._generator(owner, stream)
            rng.standard_normal(out=row)
            rng.standard_normal(dtype=np.float32, out=x[start : start + count])
            start += count
        return x

    def _move(self, x: Floats32, means: Floats32, counts: Ints) -> None:
        """Turn standard normal `x` into N(mean of the owner, Sigma), in place."""
        # the standard deviations: roots of Sigma_jj = j^-1.2
        x *= (np.arange(1, self.num_features + 1) ** -0.6).astype(np.float32)
        x += np.repeat(means, counts, axis=0)

    def _models(self, owners: Ints) -> tuple[Floats, Floats]:
        """Return the models that label the owners' samples: W [n, d, C] and b [n, C]."""
        num_weights = self.num_features * self.num_classes
        normal = np.empty((len(owners), 1 + num_weights + self.num_classes))
        for row, owner in zip(normal, owners.tolist(), strict=True):
            self._generator(owner, MODEL_STREAM).standard_normal(out=row)
        values = normal[:, 1:]
        values += self.alpha * normal[:, :1]
        weights = values[:, :num_weights].reshape(-1, self.num_features, self.num_classes)
        return weights, values[:, num_weights:]

    def _generator(self, owner: int, stream: int) -> np.random.Generator:
        """Return the owner's generator at the beginning of a stream.

        It is Philox (Salmon et al., 2011) with the key (seed, owner); the stream is a part of its
        counter. There is one generator: the next call resets it.
        """
        generator, state = self._philox
        state["state"]["counter"][3] = stream
        state["state"]["key"][1] = owner
        generator.bit_generator.state = state
        return generator

    @cached_property
    def _philox(self) -> tuple[np.random.Generator, dict[str, Any]]:
        """A generator, and a state that has drawn nothing, to be changed in place.

        Making a new generator takes ten times as long. Arrays in the state would take twice as
        long as lists.
        """
        generator = np.random.Generator(np.random.Philox(key=0))
        state: dict[str, Any] = dict(np.random.Philox(key=0).state)
        state["state"] = {"counter": [0, 0, 0, 0], "key": [self.seed, 0]}
        return generator, state


def _labels(models: tuple[Floats, Floats], x: Floats32, counts: Ints) -> Ints:
    """Return argmax(W x + b) for samples in order of their owners, `counts` [n] of each."""
    weights, biases = models
    labels = np.empty(len(x), np.int64)
    starts = np.cumsum(counts) - counts
    for count in np.unique(counts).tolist():  # one product for owners with equally many samples
        owners = np.flatnonzero(counts == count)
        rows = starts[owners, None] + np.arange(count)
        logits = x[rows].astype(np.float64) @ weights[owners] + biases[owners, None]
        labels[rows] = logits.argmax(2)
    return labels


class OwnerSamples(SampleSource):
    """The training samples of all owners, owner after owner."""

    def __init__(self, dataset: Synthetic) -> None:
        self.dataset = dataset
        self.ends = np.cumsum(dataset.counts)
        super().__init__(int(self.ends[-1]), (dataset.num_features,))

    def rows(self, positions: Ints) -> Tensor:
        """Return the samples at `positions` [m, d].

        An owner's samples come from one stream, so the ones before the last needed are made, too.
        """
        # 1. The owner of each position, and the index of the sample among the owner's
        owner_of_position = np.searchsorted(self.ends, positions, side="right")
        starts = self.ends - self.dataset.counts
        index_in_owner = positions - starts[owner_of_position]
        # 2. The samples of these owners, up to the last needed one of each
        owners, which_owner = np.unique(owner_of_position, return_inverse=True)
        counts = np.zeros(len(owners), np.int64)
        np.maximum.at(counts, which_owner, index_in_owner + 1)
        # 3. Their rows among the samples made
        first_rows = np.cumsum(counts) - counts
        _, x = self.dataset.features(owners, counts)
        return torch.from_numpy(x[first_rows[which_owner] + index_in_owner])
