"""The samples of every local step of stacked clients, and what their losses come to."""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.engine.batched.gradients import StackedBatch
from fedsim.engine.engine import ClientData
from fedsim.engine.schedule import StackedBatches


def feed(data: ClientData, batches: StackedBatches, keys: Tensor | None) -> Iterator[StackedBatch]:
    """One step after another; rows that have finished are left out, `keys` [S, K] are those of dropout."""
    device, counts = data.x.device, batches.counts
    positions = torch.as_tensor(batches.positions, device=device)
    labels = data.y[positions]
    rows, widths = (counts > 0).sum(1).tolist(), counts.max(1, initial=0).tolist()
    for step, (num, width) in enumerate(zip(rows, widths, strict=True)):
        chosen = positions[step, :num, :width]
        x = data.x.index_select(0, chosen.reshape(-1)).view(num, width, *data.x.shape[1:])
        yield StackedBatch(
            x,
            labels[step, :num, :width],
            _weights(counts[step, :num], width, data.x),
            None if keys is None else keys[step, :num],
        )


def _weights(counts: NDArray[np.int64], width: int, like: Tensor) -> Tensor | None:
    """1 / count for valid samples and 0 for padding [R, width]; None where nothing is padded."""
    if counts.min() == width:
        return None
    inverse = (np.arange(width) < counts[:, None]) / counts[:, None]
    return torch.as_tensor(inverse, dtype=like.dtype, device=like.device)


def loss_statistics(losses: list[Tensor], counts: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """From the samples' losses of each step [R, width]: per row [K] the mean over steps of their means, and the root of
    the mean of all their squares; nan for a row without a step."""
    table = np.zeros((*counts.shape, max((x.shape[1] for x in losses), default=0)))
    for step, each in enumerate(losses):
        table[step, : each.shape[0], : each.shape[1]] = each.cpu().numpy()
    table *= np.arange(table.shape[2]) < counts[:, :, None]
    with np.errstate(invalid="ignore"):
        means = _over_steps(table.sum(2) / np.maximum(counts, 1)) / (counts > 0).sum(0)
        return means, np.sqrt(_over_steps((table**2).sum(2)) / counts.sum(0))


def _over_steps(table: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sums [K] of [S, K], each in the same order of additions whatever K is."""
    sums: NDArray[np.float64] = np.ascontiguousarray(table.T).sum(1)
    return sums
