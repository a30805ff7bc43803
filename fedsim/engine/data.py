"""All clients' samples on the device, and which of them each client holds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from fedsim.core.types import sizes_of
from fedsim.data.base import SampleSource, check_labels
from fedsim.engine.schedule import Positions

Lists = Sequence[Positions]
ROOM_BYTES = 64 * 2**20
"""Of samples made on demand that are on the device at once."""
LARGEST_CLIENTS = 3
"""As many of the largest clients always find room together: two or more are trained in one call,
never one alone."""


@dataclass(frozen=True)
class ClientData:
    """Samples `x` [n, ...] float32 and labels `y` [n] int64 of all clients; a position is a row of
    both.

    `train` and `evaluate` hold one array of positions for each of N clients: those it trains on,
    and those on which its loss is measured; `true_y` is what `y` should be, where clients err.
    Where a `source` makes samples on demand, positions are rows of it and of `y`, and `x` is room
    for some of them (`ClientData.on_demand`). Raises `DataError` where a label is not the index of
    a class.
    """

    x: Tensor
    y: Tensor
    train: Lists
    evaluate: Lists
    num_classes: int
    source: SampleSource | None = None
    true_y: Tensor | None = None

    def __post_init__(self) -> None:
        check_labels(self.y, self.num_classes, "training")

    @classmethod
    def on_demand(
        cls, source: SampleSource, y: Tensor, train: Lists, evaluate: Lists, num_classes: int
    ) -> Self:
        """Clients whose samples the `source` makes, with room for `ROOM_BYTES` of them or the
        largest clients'."""
        largest = max(int(sizes_of(own).max(initial=0)) for own in (train, evaluate))
        sample_bytes = torch.empty((1, *source.shape[1:]), dtype=source.dtype).nbytes
        room = max(
            ROOM_BYTES // max(sample_bytes, 1), LARGEST_CLIENTS * largest + 1
        )  # 1: padding repeats position 0
        x = torch.zeros(
            (min(room, len(source)), *source.shape[1:]), dtype=source.dtype, device=y.device
        )
        return cls(x, y, train, evaluate, num_classes, source)
