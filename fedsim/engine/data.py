"""All clients' samples on the device, and which of them each client holds."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedsim.data.base import check_labels


@dataclass(frozen=True)
class ClientData:
    """Samples `x` [n, ...] float32 and labels `y` [n] int64 of all clients; a position is a row of both.

    `train` and `evaluate` hold one array of positions for each of N clients: those it trains on, and those on which its
    loss is measured. Raises `DataError` where a label is not the index of a class.
    """

    x: Tensor
    y: Tensor
    train: Sequence[NDArray[np.int64]]
    evaluate: Sequence[NDArray[np.int64]]
    num_classes: int

    def __post_init__(self) -> None:
        check_labels(self.y, self.num_classes, "training")
