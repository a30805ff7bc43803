"""The interface of partitions, which divide a training set among clients, and what they share."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedsim.core.arrays import Floats, Ints
from fedsim.core.errors import DataError

Indices = Ints


@dataclass(frozen=True)
class Labelled:
    """The data that a partition may use: `labels` [n], the number of classes, and `owners` [n] if
    there are any."""

    labels: Ints
    num_classes: int
    owners: Ints | None = None


class Partition(ABC):
    """A rule that divides samples among clients by their labels or owners, with keyword-only
    hyper-parameters."""

    @abstractmethod
    def split(
        self, data: Labelled, num_clients: int, rng: np.random.Generator
    ) -> Sequence[Indices]:
        """`num_clients` disjoint arrays of positions in `data.labels`, one per client: a list, or a
        `ClientPositions`, which is faster where clients are many. Raises `DataError` if the data cannot be
        divided in this way."""


def largest_remainder(shares: Floats, total: int) -> Ints:
    """Integers [n] proportional to `shares` [n] with sum `total` (Hamilton's method; ties go to the
    lower index)."""
    quotas = shares / shares.sum() * total
    counts: Ints = np.floor(quotas).astype(np.int64)
    order = np.argsort(-(quotas - counts), kind="stable")
    counts[order[: total - counts.sum()]] += 1
    return counts


def require_samples(num_samples: int, num_clients: int, min_per_client: int, key: str) -> None:
    """Raise `DataError` if there are fewer than `min_per_client` samples per client, as the setting
    `key` requires."""
    if num_samples < num_clients * min_per_client:
        raise DataError(
            f"num_clients={num_clients}: {key} needs at least {num_clients * min_per_client} training samples and "
            f"there are {num_samples}; lower num_clients, or the samples that the server keeps (server.*)"
        )


def shuffled_by_class(labels: Ints, num_classes: int, rng: np.random.Generator) -> list[Ints]:
    """For each class, the positions of its samples in random order."""
    return [rng.permutation(np.flatnonzero(labels == c)) for c in range(num_classes)]
