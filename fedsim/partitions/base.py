"""What divides a training set among clients."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Labelled:
    """What a partition may look at: `labels` [n], the number of classes, and `owners` [n] where the data name them."""

    labels: NDArray[np.int64]
    num_classes: int
    owners: NDArray[np.int64] | None = None


class Partition(ABC):
    """Index arrays from labels. Subclasses take their hyper-parameters keyword-only, annotated, without defaults."""

    @abstractmethod
    def split(self, data: Labelled, num_clients: int, rng: np.random.Generator) -> list[Indices]:
        """`num_clients` arrays of positions in `data.labels`, disjoint.

        Raises `DataError` where the data cannot be divided as asked (it says how many samples or writers there are).
        """
