"""The samples of all clients on the device, and which of them each client holds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from fedsim.core.types import Positions, sizes_of
from fedsim.data.base import SampleSource, check_labels
from fedsim.engine.augment import CropFlip

BUFFER_BYTES = 64 * 2**20
"""Size of the buffer for samples that are made on demand."""
LARGEST_CLIENTS = 3
"""The samples of so many of the largest clients always fit into the buffer. Any cohort can then be
cut into parts that fit and have two clients or more (`OnDemandBackend._parts_that_fit`)."""


def samples_at(x: Tensor, positions: Tensor) -> Tensor:
    """Return the rows of `x` [n, ...] at `positions` of any shape."""
    return x.index_select(0, positions.reshape(-1)).view(*positions.shape, *x.shape[1:])


@dataclass(frozen=True)
class ClientData:
    """Samples `x` [n, ...] float32 and labels `y` [n] int64 of all clients.

    A position is a row of `x` and `y`. `train` and `evaluate` hold one array of positions for each
    of the N clients: the samples that it trains on, and the samples on which its loss is measured.
    `true_y` [n] are the correct labels, if clients have wrong ones. `augment` changes
    images in local training; None leaves them as they are.

    If a `source` makes the samples on demand, positions are rows of the source and of `y`, and `x`
    is a buffer for some of the samples (see `ClientData.on_demand`). Raises `DataError` if a label
    is not the index of a class.
    """

    x: Tensor
    y: Tensor
    train: Sequence[Positions]
    evaluate: Sequence[Positions]
    num_classes: int
    source: SampleSource | None = None
    true_y: Tensor | None = None
    augment: CropFlip | None = None

    def __post_init__(self) -> None:
        check_labels(self.y, self.num_classes, "training")

    def batch(self, positions: Tensor, crops: Tensor | None) -> Tensor:
        """Return the samples at `positions` of any shape, cropped by the numbers `crops` if any."""
        x = samples_at(self.x, positions)
        if self.augment is None or crops is None:
            return x
        return self.augment(x, crops)

    @classmethod
    def on_demand(
        cls,
        source: SampleSource,
        y: Tensor,
        train: Sequence[Positions],
        evaluate: Sequence[Positions],
        num_classes: int,
    ) -> Self:
        """Return clients whose samples the `source` makes.

        The buffer has `BUFFER_BYTES`, or more if the largest clients need it, but never more rows
        than the source.
        """
        sample_shape = source.shape[1:]
        sample_bytes = torch.empty(sample_shape, dtype=source.dtype).nbytes
        rows = max(BUFFER_BYTES // max(sample_bytes, 1), rows_for_largest_clients(train, evaluate))
        shape = (min(rows, len(source)), *sample_shape)
        buffer = torch.zeros(shape, dtype=source.dtype, device=y.device)
        return cls(buffer, y, train, evaluate, num_classes, source)


def rows_for_largest_clients(train: Sequence[Positions], evaluate: Sequence[Positions]) -> int:
    """Return the rows of a buffer for the samples of the `LARGEST_CLIENTS` largest clients."""
    largest = max(sizes_of(train).max(initial=0), sizes_of(evaluate).max(initial=0))
    # One row more, because padding in a schedule repeats position 0.
    return LARGEST_CLIENTS * int(largest) + 1
