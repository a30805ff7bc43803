"""Updates of the clients that have trained on one version of the model in this round. A client trains once."""

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.clients.context import RoundContext
from fedsim.core.exact import row_sums
from fedsim.core.types import Ids, Params
from fedsim.engine.engine import ClientUpdates, Engine, concatenate_updates


class Lent:
    """Tensors that a part of the user's is given and others use, too: which of them it modifies in place."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        self._before = {name: value._version for name, value in tensors.items()}  # which its views count, too

    @property
    def modified(self) -> list[str]:
        return [name for name, value in self._tensors.items() if value._version != self._before[name]]


BLOCK_ENTRIES = 2**20
"""Entries of a block of rows, small enough for the processor's cache."""


class LocalResults:
    """Trains clients with `train`, which gives the updates of client ids to `params`, and keeps the results by
    client."""

    def __init__(self, train: Callable[[Ids], ClientUpdates]) -> None:
        self._train = train
        self._parts: list[ClientUpdates] = []
        self._lent: list[Lent] = []
        self._places: dict[int, tuple[int, int]] = {}  # client -> part and row

    def missing(self, ids: Ids) -> Ids:
        """Those of `ids` that have not trained yet."""
        return np.array([i for i in ids if int(i) not in self._places], dtype=np.int64)

    def train(self, ids: Ids) -> NDArray[np.int64]:
        """Train `ids`, none of which has trained; the samples that each passed forward and backward [len(ids)]."""
        updates = self._train(ids)
        self._places |= {int(i): (len(self._parts), row) for row, i in enumerate(ids)}
        self._parts.append(updates)
        self._lent.append(Lent(updates.delta))
        return updates.samples

    @property
    def modified(self) -> list[str]:
        """Names of tensors of updates that somebody has modified in place since they were trained."""
        return list(dict.fromkeys(name for lent in self._lent for name in lent.modified))

    def updates(self, ids: Ids) -> ClientUpdates:
        """The updates of `ids`, in this order; without a copy if these are all that were trained in one call."""
        part, rows = self._rows(ids)
        whole = len(rows) == len(part.steps) and bool((rows == np.arange(len(rows))).all())
        return part if whole else part.rows(rows)

    def _rows(self, ids: Ids) -> tuple[ClientUpdates, NDArray[np.int64]]:
        places = [self._places[int(i)] for i in ids]
        if len({part for part, _ in places}) > 1:
            self._merge()
            places = [self._places[int(i)] for i in ids]
        return self._parts[places[0][0]], np.array([row for _, row in places], dtype=np.int64)

    def _merge(self) -> None:
        offsets = np.cumsum([0, *(len(part.steps) for part in self._parts)])
        self._places = {i: (0, int(offsets[part]) + row) for i, (part, row) in self._places.items()}
        self._parts = [concatenate_updates(self._parts)]
        self._lent.append(Lent(self._parts[0].delta))


def local_training(
    engine: Engine, context: RoundContext, params: Params, first_model: Callable[[int], Params] | None
) -> Callable[[Ids], ClientUpdates]:
    """Trains clients in this round, from `params` or each from a model of its own."""

    def train(ids: Ids) -> ClientUpdates:
        start = None if first_model is None else [first_model(int(i)) for i in ids]
        return engine.train(params, ids, context.round, context.lr, start)

    return train


def row_norms(matrices: Mapping[str, Tensor]) -> NDArray[np.float64]:
    """Euclidean norm over all `matrices` [n, d], row by row [n], in float64."""
    first = next(iter(matrices.values()))
    squares = torch.zeros(len(first), dtype=torch.float64, device=first.device)
    for matrix in matrices.values():
        for rows, block in row_blocks(matrix):
            squares[rows] += row_sums(block.square_())
    result: NDArray[np.float64] = squares.sqrt().cpu().numpy()
    return result


def row_blocks(matrix: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """A large matrix in float64, some rows at a time, in one buffer that may be overwritten."""
    size = max(BLOCK_ENTRIES // max(matrix.shape[1], 1), 1)
    buffer = matrix.new_empty(min(size, len(matrix)), matrix.shape[1], dtype=torch.float64)
    for start in range(0, len(matrix), size):
        part = matrix[start : start + size]
        yield slice(start, start + len(part)), buffer[: len(part)].copy_(part)
