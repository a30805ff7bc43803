"""The updates of clients that have trained in this round, and norms over many rows of them.

`Clients` stores updates here. n is the number of clients, d the number of entries of a row.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from fedsim.core.arrays import Bools, Floats
from fedsim.core.exact import row_sums
from fedsim.core.types import Cohort, Ids

BLOCK_ENTRIES = 2**20
"""Entries of a block of rows, few enough for the processor's cache."""


class LocalResults:
    """The updates of clients at one version of the model.

    A client trains at most once on it. Its update is then returned as often as it is requested.
    """

    def __init__(self, num_clients: int) -> None:
        self._cohorts: list[Cohort] = []
        self._cohort_of = np.full(num_clients, -1)
        """Index of the cohort with which each client trained [N]; -1: it has not trained."""
        self._row_of = np.full(num_clients, -1)
        """Row of each client in its cohort [N]."""

    def has_trained(self, ids: Ids) -> Bools:
        """Return which of `ids` have trained [len(ids)]."""
        return self._cohort_of[ids] >= 0

    def add(self, cohort: Cohort) -> None:
        """Add the updates of clients that have just trained."""
        self._cohort_of[cohort.ids] = len(self._cohorts)
        self._row_of[cohort.ids] = np.arange(len(cohort.ids))
        self._cohorts.append(cohort)

    def of(self, ids: Ids) -> Cohort:
        """Return the updates of `ids`, at least one, in this order. All of them have trained.

        They are not copied if these are exactly the clients that were added together.
        """
        # clients that were added in different calls: merge all calls into one cohort, once
        if len(set(self._cohort_of[ids].tolist())) > 1:
            merged = Cohort.concat(self._cohorts)
            self._cohorts = []
            self.add(merged)
        cohort = self._cohorts[self._cohort_of[ids[0]]]
        rows = self._row_of[ids]
        return cohort if np.array_equal(rows, np.arange(len(cohort.ids))) else cohort.rows(rows)


def row_norms(matrices: Mapping[str, Tensor]) -> Floats:
    """Return the Euclidean norm of each row over all `matrices` [n, d] together, float64 [n]."""
    first = next(iter(matrices.values()))
    squares = torch.zeros(len(first), dtype=torch.float64, device=first.device)
    for matrix in matrices.values():
        for rows, block in row_blocks(matrix):
            squares[rows] += row_sums(block.square_())
    return squares.sqrt().cpu().numpy()


def row_blocks(matrix: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield a slice of rows of a large matrix, and these rows in float64, slice after slice.

    All blocks share one buffer, so a block is valid until the next one. The caller may overwrite
    it.
    """
    size = max(BLOCK_ENTRIES // max(matrix.shape[1], 1), 1)
    buffer = matrix.new_empty(min(size, len(matrix)), matrix.shape[1], dtype=torch.float64)
    for start in range(0, len(matrix), size):
        rows = matrix[start : start + size]
        yield slice(start, start + len(rows)), buffer[: len(rows)].copy_(rows)
