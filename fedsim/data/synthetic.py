"""Synthetic(alpha, beta) of Li et al., "Federated Optimization in Heterogeneous Networks" (FedProx,
MLSys 2020), 5.1: every client has a generator of its own, so that its samples can be made whenever
they are asked for."""

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

MAX_SAMPLES, MAX_NUMBERS, MAX_WEIGHTS = 100_000_000, 2_000_000_000, 10_000_000
"""In either split, on average (labels and owners take 16 bytes each); features of all samples that
are held in memory, or of the test set (8 GB); features times classes, in the model that labels an
owner's samples."""
GENERATOR_VERSION = 1
"""To be increased whenever a change of the code gives other data for the same parameters."""
BLOCK_NUMBERS = 2**18
"""Of models and features, in the making of labels: few enough for the processor's cache."""
MODEL, TRAIN, TEST = range(3)
"""What an owner's generator is for; each draws from a stream of its own."""

Spread = Annotated[float, Interval(ge=0, le=1_000_000)]
"""Of owners' models and means; products of far larger ones are infinite."""


@parameters
class Synthetic(Dataset):
    """Classes that a linear model of the owner's own gives to features around the owner's own mean.

    Owner k draws u ~ N(0, alpha^2), W [C, d] and b [C] ~ N(u, 1); B ~ N(0, beta^2) and v [d] ~ N(B,
    1). Its samples are x ~ N(v, Sigma), with Sigma diagonal and Sigma_jj = j^-1.2, and y = argmax(W
    x + b). `alpha` is how much the models differ between owners, `beta` how much the features do.
    (alpha and beta are standard deviations, as in the published code.) An owner has a log-normal
    number of samples; the test set has as many of each owner, as nearly as possible. `hold:
    on_demand` keeps labels alone in memory, and makes features from the owner's generator, a
    function of (seed, owner), where a client takes part or is asked; `memory` makes all of them
    once. Results are the same.
    """

    num_owners: Annotated[int, Interval(ge=1, le=1_000_000)]
    samples_per_owner: Positive
    size_deviation: Annotated[float, Interval(ge=0, le=3)]
    num_features: Annotated[int, Interval(ge=1, le=MAX_WEIGHTS)]
    num_classes: Annotated[int, Interval(ge=2, le=MAX_WEIGHTS)]
    alpha: Spread
    beta: Spread
    test_samples: Count
    hold: Literal["on_demand", "memory"]
    seed: Annotated[int, Interval(ge=0, le=2**63 - 1)]

    def problems(self) -> Problems:
        features, remedy, most = max(self.num_features, 1), "lower num_owners", MAX_SAMPLES
        if self.hold == "memory":
            remedy, most = (
                "dataset.hold=on_demand need not hold all in memory",
                min(most, MAX_NUMBERS // features),
            )
        yield at_most(
            "samples_per_owner", self.samples_per_owner, most // max(self.num_owners, 1), remedy
        )
        yield at_most(
            "num_classes", self.num_classes, MAX_WEIGHTS // features, "lower num_features"
        )
        yield at_most(
            "test_samples", self.test_samples, MAX_NUMBERS // features, "lower num_features"
        )

    def form(self) -> tuple[tuple[int, ...], int]:
        return (self.num_features,), self.num_classes

    def load(self) -> LoadedData:
        tensors = load_or_generate(self, "synthetic", GENERATOR_VERSION, self._build)
        fingerprint = (
            f"synthetic {digest({'key': parameters_key(GENERATOR_VERSION, self), **tensors})}"
        )
        source = OwnerSamples(self)
        train = Samples(
            source if self.hold == "on_demand" else source.everything(), tensors["train_y"]
        )
        test = Samples(tensors["test_x"], tensors["test_y"])
        owners, tested = (
            np.repeat(np.arange(self.num_owners), n) for n in (self.counts, self.test_counts)
        )
        return LoadedData(
            train, test, self.num_classes, None, None, fingerprint, owners, test_owners=tested
        )

    @cached_property
    def counts(self) -> Ints:
        """Training samples of each owner [num_owners], at least one."""
        normal = np.random.default_rng(self.seed).standard_normal(self.num_owners)
        return log_normal_sizes(self.samples_per_owner, self.size_deviation, normal)

    @cached_property
    def test_counts(self) -> Ints:
        """Test samples of each owner [num_owners]."""
        return np.bincount(
            np.arange(self.test_samples) % self.num_owners, minlength=self.num_owners
        )

    def _build(self) -> dict[str, Tensor]:
        """Labels of the training samples, and the test set, both in order of their owners."""
        train_y = np.empty(int(self.counts.sum()), np.int64)
        test_x = np.empty((self.test_samples, self.num_features), np.float32)
        test_y = np.empty(self.test_samples, np.int64)
        ends, test_ends = np.cumsum(self.counts), np.cumsum(self.test_counts)
        size = max(
            BLOCK_NUMBERS // (self.num_features * (self.num_classes + int(self.counts.max()))), 1
        )
        for first in range(0, self.num_owners, size):
            owners = np.arange(first, min(first + size, self.num_owners))
            models = self._models(owners)
            means, x = self.features(owners, self.counts[owners])
            train_y[ends[first] - self.counts[first] : ends[owners[-1]]] = _labels(
                models, x, self.counts[owners]
            )
            counts = self.test_counts[owners]
            tested = slice(test_ends[first] - counts[0], test_ends[owners[-1]])
            test_x[tested] = self._moved(
                self._drawn(owners, counts, TEST, np.empty((len(owners), 0))), means, counts
            )
            test_y[tested] = _labels(models, test_x[tested], counts)
        made = {"train_y": train_y, "test_x": test_x, "test_y": test_y}
        return {name: torch.as_tensor(values) for name, values in made.items()}

    def features(self, owners: Ints, counts: Ints) -> tuple[Floats32, Floats32]:
        """The means [n, d] of some owners' features, and the first `counts` [n] training samples of
        each, one owner after another [sum of counts, d]."""
        normal = np.empty((len(owners), 1 + self.num_features))
        x = self._drawn(owners, counts, TRAIN, normal)
        means = (self.beta * normal[:, :1] + normal[:, 1:]).astype(np.float32)
        return means, self._moved(x, means, counts)

    def _drawn(
        self,
        owners: Ints,
        counts: Ints,
        purpose: int,
        before: Floats,
    ) -> Floats32:
        """Standard normal numbers [sum of counts, d] of the owners' streams, behind the rows
        `before` [n, ...]."""
        x = np.empty((int(counts.sum()), self.num_features), np.float32)
        first = 0
        for row, owner, count in zip(before, owners.tolist(), counts.tolist(), strict=True):
            rng = self._stream(owner, purpose)
            rng.standard_normal(out=row)
            rng.standard_normal(dtype=np.float32, out=x[first : first + count])
            first += count
        return x

    def _moved(self, x: Floats32, means: Floats32, counts: Ints) -> Floats32:
        """Standard normal `x`, spread by Sigma around the means of their owners; in place."""
        x *= (np.arange(1, self.num_features + 1) ** -0.6).astype(np.float32)
        x += np.repeat(means, counts, axis=0)
        return x

    def _models(self, owners: Ints) -> tuple[Floats, Floats]:
        """What labels the owners' samples: W [n, d, C] and b [n, C]."""
        normal = np.empty((len(owners), 1 + (self.num_features + 1) * self.num_classes))
        for row, owner in zip(normal, owners.tolist(), strict=True):
            self._stream(owner, MODEL).standard_normal(out=row)
        values = normal[:, 1:]
        values += self.alpha * normal[:, :1]
        cut = self.num_features * self.num_classes
        return values[:, :cut].reshape(-1, self.num_features, self.num_classes), values[:, cut:]

    def _stream(self, owner: int, purpose: int) -> np.random.Generator:
        """The owner's generator for a purpose: Philox (Salmon et al., 2011) with the key (seed,
        owner), at the part of its sequence that is for the purpose. Any earlier result of this
        method is reset to it, too."""
        generator, start = self._philox
        start["state"]["counter"][3] = purpose
        start["state"]["key"][1] = owner
        generator.bit_generator.state = start
        return generator

    @cached_property
    def _philox(self) -> tuple[np.random.Generator, dict[str, Any]]:
        """A generator, and the state of one that has drawn nothing, whose key and counter are
        changed in place: to make a new one takes ten times as long, with arrays in it twice as
        long."""
        state = {
            **np.random.Philox(key=0).state,
            "state": {"counter": [0, 0, 0, 0], "key": [self.seed, 0]},
        }
        return np.random.Generator(np.random.Philox(key=0)), state


def _labels(models: tuple[Floats, Floats], x: Floats32, counts: Ints) -> Ints:
    """argmax(W x + b) of samples in order of their owners, `counts` [n] of each [sum of counts]."""
    weights, biases = models
    labels = np.empty(len(x), np.int64)
    starts = np.cumsum(counts) - counts
    for count in np.unique(counts).tolist():
        owners = np.flatnonzero(counts == count)
        where = starts[owners, None] + np.arange(count)
        labels[where] = (
            x[where].astype(np.float64) @ weights[owners] + biases[owners, None]
        ).argmax(2)
    return labels


class OwnerSamples(SampleSource):
    """The training samples of all owners, one after another."""

    def __init__(self, owners: Synthetic) -> None:
        self.owners = owners
        self.ends = np.cumsum(owners.counts)
        super().__init__(int(self.ends[-1]), (owners.num_features,))

    def rows(self, positions: Ints) -> Tensor:
        owners = np.searchsorted(self.ends, positions, side="right")
        inside = positions - (self.ends - self.owners.counts)[owners]
        needed, which = np.unique(owners, return_inverse=True)
        counts = np.zeros(len(needed), np.int64)
        np.maximum.at(counts, which, inside + 1)
        starts = np.cumsum(counts) - counts
        _, x = self.owners.features(needed, counts)
        return torch.from_numpy(x[starts[which] + inside])
