from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from fedsim.core.arrays import Bools, Floats
from fedsim.core.exact import row_sums
from fedsim.core.types import Cohort, Ids, Params

BLOCK_ENTRIES = 2**20  # entries of a block of rows, small enough for the processor's cache


class GuardedTensors:
    """Dictionaries of tensors that a part of the user's is given and others use, too, and which of
    the tensors it has modified in place.

    A tensor's version counts torch's operations on it and on its views, not what is written through
    `numpy()` or `data`.
    """

    def __init__(self, *lent: Params) -> None:
        self._lent: list[tuple[Params, dict[str, tuple[Tensor, int]]]] = []
        for tensors in lent:
            self.add(tensors)

    def add(self, tensors: Params) -> Params:
        """Watch these, too."""
        self._lent.append(
            (tensors, {name: (value, value._version) for name, value in tensors.items()})
        )
        return tensors

    def copy_of(self, params: Params) -> Params:
        """A copy to be given, watched from now on."""
        return self.add({name: value.clone() for name, value in params.items()})

    @property
    def modified(self) -> list[str]:
        """Names of tensors that have been modified, replaced, added or deleted."""
        found: dict[str, None] = {}
        for now, before in self._lent:
            changed = [
                n
                for n, (own, version) in before.items()
                if now.get(n) is not own or own._version != version
            ]
            found |= dict.fromkeys([*changed, *(name for name in now if name not in before)])
        return list(found)


class LocalResults:
    """A client trains once on a version of the model: its update is kept, and given as often as it
    is asked for."""

    def __init__(self, num_clients: int) -> None:
        self._parts: list[Cohort] = []
        self.lent = GuardedTensors()
        """The updates."""
        self._part, self._row = np.full((2, num_clients), -1)  # where the update of each client is

    def known(self, ids: Ids) -> Bools:
        """Which of `ids` have trained."""
        return self._part[ids] >= 0

    def add(self, part: Cohort) -> None:
        """The updates of clients that have just trained."""
        self._part[part.ids], self._row[part.ids] = len(self._parts), np.arange(len(part.ids))
        self._parts.append(part)
        self.lent.add(part.delta)

    def of(self, ids: Ids) -> Cohort:
        """The updates of `ids`, in this order; without a copy if these are all that were trained in
        one call."""
        if len(set(self._part[ids].tolist())) > 1:
            self._parts, parts = [], self._parts
            self.add(Cohort.concat(parts))
        part, rows = self._parts[self._part[ids[0]]], self._row[ids]
        return part if np.array_equal(rows, np.arange(len(part.ids))) else part.rows(rows)


def row_norms(matrices: Mapping[str, Tensor]) -> Floats:
    """Euclidean norm over all `matrices` [n, d], row by row [n], in float64."""
    first = next(iter(matrices.values()))
    squares = torch.zeros(len(first), dtype=torch.float64, device=first.device)
    for matrix in matrices.values():
        for rows, block in row_blocks(matrix):
            squares[rows] += row_sums(block.square_())
    return squares.sqrt().cpu().numpy()


def row_blocks(matrix: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """A large matrix in float64, some rows at a time, in one buffer that may be overwritten."""
    size = max(BLOCK_ENTRIES // max(matrix.shape[1], 1), 1)
    buffer = matrix.new_empty(min(size, len(matrix)), matrix.shape[1], dtype=torch.float64)
    for start in range(0, len(matrix), size):
        part = matrix[start : start + size]
        yield slice(start, start + len(part)), buffer[: len(part)].copy_(part)
