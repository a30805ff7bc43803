"""Synthetic(alpha, beta): a data set whose clients differ by two parameters.

Source: Li et al., "Federated Optimization in Heterogeneous Networks" (FedProx, MLSys 2020), section
5.1. An owner is the natural client of its samples. Each owner has random streams of its own. So the
samples of one owner can be made without those of others and at any time, with the same result.

In shapes, n is the number of owners, d the number of features, C the number of classes, and m the
number of samples.
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
"""Maximum number of training samples, on average. The label and owner of each take 16 bytes."""
MAX_NUMBERS = 2_000_000_000
"""Maximum number of features in memory (8 GB): of all training samples, or of the test set."""
MAX_WEIGHTS = 10_000_000
"""Maximum number of weights (features times classes) of the model that labels an owner's data."""
GENERATOR_VERSION = 1
"""Increase this when a change of the code gives other data for the same parameters."""
BLOCK_NUMBERS = 2**18
"""Numbers in the models and features of the owners that are labelled together. They fit into a
processor's cache."""
MODEL_STREAM, TRAIN_STREAM, TEST_STREAM = range(3)
"""The random streams of an owner."""

Spread = Annotated[float, Interval(ge=0, le=1_000_000)]
"""A standard deviation between owners. Products of far larger ones are infinite."""


@parameters
class Synthetic(Dataset):
    """Random features around each owner's mean, labelled by the owner's linear model.

    An owner draws these from normal distributions, written with mean and variance:

    - a model: u ~ N(0, alpha^2), then all entries of W [C, d] and b [C] ~ N(u, 1);
    - the mean of its features: B ~ N(0, beta^2), then all entries of v [d] ~ N(B, 1);
    - samples x ~ N(v, Sigma), where Sigma is diagonal with Sigma_jj = j^-1.2.

    The label of a sample is argmax(W x + b). As in the published code, alpha and beta are standard
    deviations. The number of training samples of an owner is log-normal. The numbers of test
    samples of two owners differ by at most 1.
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
    """`memory` makes the training samples' features once. `on_demand` makes them again whenever
    they are needed. Results are the same."""
    seed: Annotated[int, Interval(ge=0, le=2**63 - 1)]

    def problems(self) -> Problems:
        """Yield a problem for each size that exceeds its maximum."""
        # Both are divisors, and may be 0: this also runs if values are out of their ranges.
        num_owners = max(self.num_owners, 1)
        num_features = max(self.num_features, 1)
        max_in_memory = MAX_NUMBERS // num_features
        if self.hold == "memory":
            max_samples = min(MAX_SAMPLES, max_in_memory)
            remedy = "dataset.hold=on_demand need not hold all in memory"
        else:
            max_samples = MAX_SAMPLES
            remedy = "lower num_owners"
        max_classes = MAX_WEIGHTS // num_features
        yield at_most(
            "samples_per_owner", self.samples_per_owner, max_samples // num_owners, remedy
        )
        yield at_most("num_classes", self.num_classes, max_classes, "lower num_features")
        yield at_most("test_samples", self.test_samples, max_in_memory, "lower num_features")

    def form(self) -> tuple[tuple[int, ...], int]:
        """Return the shape of a sample and the number of classes."""
        return (self.num_features,), self.num_classes

    def load(self) -> LoadedData:
        """Return the data. Training samples are made on demand unless `hold` is `memory`."""
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
        train_start = test_start = 0
        numbers_per_owner = self.num_features * (self.num_classes + int(self.counts.max()))
        block_size = max(BLOCK_NUMBERS // numbers_per_owner, 1)
        for first in range(0, self.num_owners, block_size):
            owners = np.arange(first, min(first + block_size, self.num_owners))
            models = self._models(owners)

            train_counts = self.counts[owners]
            means, features = self.features(owners, train_counts)
            train_block = slice(train_start, train_start + len(features))
            train_y[train_block] = _labels(models, features, train_counts)
            train_start = train_block.stop

            test_counts = self.test_counts[owners]
            _, features = self._normal_numbers(owners, test_counts, TEST_STREAM, num_leading=0)
            self._standard_to_features(features, means, test_counts)
            test_block = slice(test_start, test_start + len(features))
            test_x[test_block] = features
            test_y[test_block] = _labels(models, features, test_counts)
            test_start = test_block.stop
        return {
            "train_y": torch.as_tensor(train_y),
            "test_x": torch.as_tensor(test_x),
            "test_y": torch.as_tensor(test_y),
        }

    def features(self, owners: Ints, counts: Ints) -> tuple[Floats32, Floats32]:
        """Return the means [n, d] of some owners' features, and features of training samples.

        The latter [sum of counts, d] are of the first `counts` [n] samples of each owner, in order
        of `owners`.
        """
        # The training stream of an owner begins with the numbers for B and v.
        for_means, features = self._normal_numbers(
            owners, counts, TRAIN_STREAM, num_leading=1 + self.num_features
        )
        means = (self.beta * for_means[:, :1] + for_means[:, 1:]).astype(np.float32)
        self._standard_to_features(features, means, counts)
        return means, features

    def _normal_numbers(
        self, owners: Ints, counts: Ints, stream: int, num_leading: int
    ) -> tuple[Floats, Floats32]:
        """Return standard normal numbers of the owners' streams: [n, num_leading] and then
        [sum of counts, d]."""
        leading = np.empty((len(owners), num_leading))
        others = np.empty((int(counts.sum()), self.num_features), np.float32)
        start = 0
        for row, owner, count in zip(leading, owners.tolist(), counts.tolist(), strict=True):
            rng = self._reset_generator(owner, stream)
            rng.standard_normal(out=row)
            rng.standard_normal(dtype=np.float32, out=others[start : start + count])
            start += count
        return leading, others

    def _standard_to_features(self, numbers: Floats32, means: Floats32, counts: Ints) -> None:
        """Turn standard normal `numbers` [m, d] into N(mean of the owner, Sigma), in place."""
        deviations = np.arange(1, self.num_features + 1) ** -0.6  # roots of Sigma_jj = j^-1.2
        numbers *= deviations.astype(np.float32)
        numbers += np.repeat(means, counts, axis=0)

    def _models(self, owners: Ints) -> tuple[Floats, Floats]:
        """Return the models that label the owners' samples: W [n, d, C] and b [n, C]."""
        num_weights = self.num_features * self.num_classes
        normal = np.empty((len(owners), 1 + num_weights + self.num_classes))
        for row, owner in zip(normal, owners.tolist(), strict=True):
            self._reset_generator(owner, MODEL_STREAM).standard_normal(out=row)
        values = normal[:, 1:]
        values += self.alpha * normal[:, :1]
        weights = values[:, :num_weights].reshape(-1, self.num_features, self.num_classes)
        return weights, values[:, num_weights:]

    def _reset_generator(self, owner: int, stream: int) -> np.random.Generator:
        """Return the one generator of this data set, at the beginning of a stream of an owner.

        Draw from it before the next call, which resets it. It is Philox (Salmon et al., 2011) with
        the key (seed, owner). The stream is a part of its counter.
        """
        generator, state = self._generator_and_state
        state["state"]["counter"][3] = stream
        state["state"]["key"][1] = owner
        generator.bit_generator.state = state
        return generator

    @cached_property
    def _generator_and_state(self) -> tuple[np.random.Generator, dict[str, Any]]:
        """A generator, and the state of one that has drawn nothing, for `_reset_generator`.

        A new generator for each owner would take ten times as long, and a state with arrays instead
        of lists twice as long.
        """
        generator = np.random.Generator(np.random.Philox(key=0))
        state: dict[str, Any] = dict(np.random.Philox(key=0).state)
        state["state"] = {"counter": [0, 0, 0, 0], "key": [self.seed, 0]}
        return generator, state


def _labels(models: tuple[Floats, Floats], x: Floats32, counts: Ints) -> Ints:
    """Return argmax(W x + b) [m] for the samples `x` [m, d], which are in order of their owners.

    `models` are W [n, d, C] and b [n, C] of the owners, and `counts` [n] their numbers of samples.
    """
    weights, biases = models
    labels = np.empty(len(x), np.int64)
    starts = np.cumsum(counts) - counts
    # One product for all owners with the same number of samples.
    for count in np.unique(counts).tolist():
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

        An owner's samples come from one stream. So all samples before the last needed one are made
        with it.
        """
        # 1. The owner of each position, and the index of the sample among the owner's samples
        owner_of_position = np.searchsorted(self.ends, positions, side="right")
        starts = self.ends - self.dataset.counts
        index_in_owner = positions - starts[owner_of_position]
        # 2. The number of samples to make of each of these owners, up to the last needed one
        owners, which_owner = np.unique(owner_of_position, return_inverse=True)
        counts = np.zeros(len(owners), np.int64)
        np.maximum.at(counts, which_owner, index_in_owner + 1)
        # 3. The features of these samples, and of them the rows that are needed
        _, x = self.dataset.features(owners, counts)
        first_rows = np.cumsum(counts) - counts
        return torch.from_numpy(x[first_rows[which_owner] + index_in_owner])
