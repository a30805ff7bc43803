"""The interface of partitions, which divide a training set among clients."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Labelled:
    """The data that a partition may use: `labels` [n], the number of classes, and `owners` [n] if there are any."""

    labels: NDArray[np.int64]
    num_classes: int
    owners: NDArray[np.int64] | None = None


class Partition(ABC):
    """A rule that divides samples among clients by their labels or owners.

    Subclasses take their hyper-parameters keyword-only, with type annotations and without defaults.
    """

    @abstractmethod
    def split(self, data: Labelled, num_clients: int, rng: np.random.Generator) -> Sequence[Indices]:
        """`num_clients` disjoint arrays of positions in `data.labels`, one per client: a list, or a
        `ByClient`, which is faster where clients are many.

        Raises `DataError` if the data cannot be divided in this way, naming the number of samples or owners.
        """
