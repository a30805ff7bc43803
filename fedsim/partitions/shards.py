"""Shards: samples sorted by label are cut into pieces, and each client gets a few of these.

Source: McMahan et al., 2017. Shapes: n samples, N clients, s shards per client.
"""

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
    """A partition in which each client gets `shards_per_client` random shards.

    These are the partitions 1SPC and 2SPC (one and two shards per client) of FedCor and GPFL, and
    those of PNCS with its parameter s. Samples of equal label are in random order. (FedCor's
    unstable sort leaves them in an arbitrary order.)
    """

    shards_per_client: Count
    pure: bool
    """Whether every shard holds one label. Each class is then cut into a number of shards that is
    proportional to its size, and the sizes of shards differ by class. Other shards have floor(n /
    (N s)) samples, and a shard at a border between labels holds both."""
    leftover: Literal["drop", "spread"]
    """What happens to the last samples of the sorted list, which fill no shard: `drop` leaves them
    unused, `spread` gives one to each of the first shards."""

    def split(self, data: Labelled, num_clients: int, rng: np.random.Generator) -> list[Indices]:
        """Return the positions of each client, shard after shard."""
        per_client = self.shards_per_client
        setting = f"partition.shards_per_client={per_client}"
        require_samples(len(data.labels), num_clients, per_client, setting)
        classes = shuffled_by_class(data.labels, data.num_classes, rng)
        num_shards = num_clients * per_client
        if self.pure:
            shards = self._pure_shards(classes, num_shards)
        else:
            shards = self._cut(np.concatenate(classes), num_shards)
        parts = []
        for shard_numbers in rng.permutation(num_shards).reshape(-1, per_client):
            parts.append(np.concatenate([shards[number] for number in shard_numbers]))
        return parts

    def _cut(self, positions: Indices, num_shards: int) -> list[Indices]:
        """Return `num_shards` consecutive parts of `positions`."""
        if self.leftover == "spread":
            return np.array_split(positions, num_shards)
        size = len(positions) // num_shards
        return list(positions[: size * num_shards].reshape(num_shards, size))

    def _pure_shards(self, classes: list[Indices], num_shards: int) -> list[Indices]:
        """Return shards of one class each. Raises `DataError` if there are more classes."""
        present = [positions for positions in classes if len(positions)]
        if num_shards < len(present):
            raise DataError(
                f"partition.pure=true: {num_shards} shards (num_clients * shards_per_client) "
                f"cannot hold {len(present)} classes one by one; raise either, or set "
                "partition.pure=false"
            )
        sizes = np.array([len(positions) for positions in present], dtype=np.float64)
        shards: list[Indices] = []
        for positions, count in zip(present, _shards_per_class(sizes, num_shards), strict=True):
            shards += self._cut(positions, int(count))
        return shards


def _shards_per_class(sizes: Floats, num_shards: int) -> Ints:
    """Return the number of shards of each class, at least 1, proportional to the class sizes."""
    counts = np.maximum(largest_remainder(sizes, num_shards), 1)
    while counts.sum() > num_shards:
        # Take a shard from the class whose shards are smallest, but not its last one.
        shard_sizes = np.where(counts > 1, sizes / counts, np.inf)
        counts[np.argmin(shard_sizes)] -= 1
    return counts
