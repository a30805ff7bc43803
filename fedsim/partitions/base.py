"""The interface of partitions, and functions that several of them share.

A partition divides the training set, without the samples of the server, among clients.
`fedsim.partitions.division` calls it. Shapes: n samples, N clients, C classes.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedsim.core.arrays import Floats, Ints
from fedsim.core.errors import DataError

Indices = Ints
"""Positions in the training set."""


@dataclass(frozen=True)
class Labelled:
    """The data that a partition may use: `labels` [n] of the samples, and the number of classes.

    `owners` [n] are the natural clients of the samples, such as their writers; None if the data set
    does not say.
    """

    labels: Ints
    num_classes: int
    owners: Ints | None = None


class Partition(ABC):
    """A rule that divides samples among clients by their labels or owners.

    Subclasses have keyword-only parameters.
    """

    @abstractmethod
    def split(
        self, data: Labelled, num_clients: int, rng: np.random.Generator
    ) -> Sequence[Indices]:
        """Return `num_clients` disjoint arrays of positions in `data.labels`, one for each client.

        The result may be a list or a `ClientPositions`, which is faster for many clients. Not every
        sample need be used. `rng` is a random stream of the run. Raises `DataError` if the data
        cannot be divided in this way.
        """


def largest_remainder(shares: Floats, total: int) -> Ints:
    """Return integers [n] that are proportional to `shares` [n] and sum to `total`.

    This is Hamilton's method; among equal remainders the lower index goes first.
    """
    quotas = shares / shares.sum() * total
    counts: Ints = np.floor(quotas).astype(np.int64)
    order = np.argsort(-(quotas - counts), kind="stable")
    counts[order[: total - counts.sum()]] += 1
    return counts


def require_samples(num_samples: int, num_clients: int, min_per_client: int, setting: str) -> None:
    """Raise `DataError` if there are fewer than `min_per_client` samples for each client.

    `setting` is the config key with the value that requires them, for the message.
    """
    needed = num_clients * min_per_client
    if num_samples < needed:
        raise DataError(
            f"num_clients={num_clients}: {setting} needs at least {needed} training samples and "
            f"there are {num_samples}; lower num_clients, or the samples that the server keeps "
            "(server.*)"
        )


def shuffled_by_class(labels: Ints, num_classes: int, rng: np.random.Generator) -> list[Indices]:
    """Return an array for each of the C classes: the positions of its samples in random order."""
    return [rng.permutation(np.flatnonzero(labels == label)) for label in range(num_classes)]
