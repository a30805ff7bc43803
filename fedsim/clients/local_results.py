"""The updates of clients that have trained in this round, norms over many rows of them, and a guard
that notices if a user's class modifies them.

`Clients` stores updates here. n is the number of clients, d the number of entries of a row.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from fedsim.core.arrays import Bools, Floats
from fedsim.core.exact import row_sums
from fedsim.core.types import Cohort, Ids, Params

BLOCK_ENTRIES = 2**20
"""Entries of a block of rows, few enough for the processor's cache."""


class GuardedTensors:
    """Tensors that fedsim lends to a user's class and still needs. The class must not modify them.

    `modified` names the tensors that it has modified all the same. The guard compares a tensor's
    version (`Tensor._version`), which counts torch's operations in place on it and on its views.
    Writes through `numpy()` or `data` are not counted.
    """

    def __init__(self, *lent: Params) -> None:
        self._lent: list[tuple[Params, dict[str, tuple[Tensor, int]]]] = []
        """Each lent mapping, and its tensors and their versions when it was lent."""
        for tensors in lent:
            self.add(tensors)

    def add(self, tensors: Params) -> Params:
        """Guard these tensors, too, and return them."""
        versions = {name: (tensor, tensor._version) for name, tensor in tensors.items()}
        self._lent.append((tensors, versions))
        return tensors

    def copy_of(self, params: Params) -> Params:
        """Return a guarded copy of a model."""
        return self.add({name: value.clone() for name, value in params.items()})

    @property
    def modified(self) -> list[str]:
        """Names of tensors that have been modified, replaced, added or deleted."""
        names: dict[str, None] = {}  # a set that keeps its order
        for tensors, versions in self._lent:
            for name, (tensor, version) in versions.items():
                if tensors.get(name) is not tensor or tensor._version != version:
                    names[name] = None
            for name in tensors:
                if name not in versions:
                    names[name] = None
        return list(names)


class LocalResults:
    """The updates of clients at one version of the model.

    A client trains at most once on it. Its update is then returned as often as it is requested.
    """

    def __init__(self, num_clients: int) -> None:
        self._cohorts: list[Cohort] = []
        self.lent = GuardedTensors()
        """The updates, which selectors must not modify."""
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
        self.lent.add(cohort.delta)

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
