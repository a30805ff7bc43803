"""Shards: samples sorted by label, cut into equal pieces, a few of which go to each client (McMahan
et al., 2017)."""

from typing import Literal

import numpy as np

from fedsim.core.arrays import Floats, Ints
from fedsim.core.errors import DataError
from fedsim.core.parameters import Count, parameters
from fedsim.partitions.base import (
    Indices,
    Labelled,
    Partition,
    largest_remainder,
    require_samples,
    shuffled_by_class,
)


@parameters
class Shards(Partition):
    """Each client gets `shards_per_client` random shards: 1SPC and 2SPC of FedCor and GPFL, s of
    PNCS.

    Samples of equal label are in random order (FedCor's unstable sort leaves them in an arbitrary
    one). Plain shards have floor(n / (N s)) samples; the remainder of the sorted list is dropped
    (`leftover: drop`) or distributed one by one over the first shards (`leftover: spread`). A plain
    shard at a border between labels holds both. `pure` shards hold one label each: every class is
    cut into a number of shards proportional to its size, and the size of shards differs by class.
    """

    shards_per_client: Count
    pure: bool
    leftover: Literal["drop", "spread"]

    def split(self, data: Labelled, num_clients: int, rng: np.random.Generator) -> list[Indices]:
        each, num_shards = self.shards_per_client, num_clients * self.shards_per_client
        require_samples(len(data.labels), num_clients, each, f"partition.shards_per_client={each}")
        classes = shuffled_by_class(data.labels, data.num_classes, rng)
        shards = (
            self._pure_shards(classes, num_shards)
            if self.pure
            else self._cut_shards(classes, num_shards)
        )
        return [
            np.concatenate([shards[s] for s in own])
            for own in rng.permutation(num_shards).reshape(-1, each)
        ]

    def _cut_shards(self, classes: list[Indices], num_shards: int) -> list[Indices]:
        positions = np.concatenate(classes)
        size, extra = divmod(len(positions), num_shards)
        if self.leftover == "drop":
            return list(positions[: size * num_shards].reshape(num_shards, size))
        return np.split(positions, np.cumsum([size + (i < extra) for i in range(num_shards)])[:-1])

    def _pure_shards(self, classes: list[Indices], num_shards: int) -> list[Indices]:
        present = [c for c in classes if len(c)]
        if num_shards < len(present):
            told = f"{num_shards} shards (num_clients * shards_per_client) cannot hold {len(present)} classes one by one"
            raise DataError(
                f"partition.pure=true: {told}; raise either, or set partition.pure=false"
            )
        counts = _shards_per_class(
            np.array([len(c) for c in present], dtype=np.float64), num_shards
        )
        return [
            shard
            for c, k in zip(present, counts, strict=True)
            for shard in self._cut_shards([c], int(k))
        ]


def _shards_per_class(sizes: Floats, num_shards: int) -> Ints:
    """Number of shards of each class, proportional to the class sizes by largest remainder, at
    least one."""
    counts = np.maximum(largest_remainder(sizes, num_shards), 1)
    while counts.sum() > num_shards:
        counts[np.argmin(sizes / counts + np.where(counts > 1, 0, np.inf))] -= 1
    return counts
