"""Positions of samples by client, in one array: what a list of a million arrays takes a second to walk through is
arithmetic on their ends."""

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]


class ByClient(Sequence[Positions]):
    """A sequence of N arrays, which are consecutive parts of `flat` [n], of the lengths `sizes` [N]."""

    def __init__(self, flat: Positions, sizes: NDArray[np.int64]) -> None:
        self.flat, self.sizes = flat, sizes
        self.ends: NDArray[np.int64] = np.cumsum(sizes)

    @classmethod
    def of(cls, arrays: Sequence[Positions]) -> "ByClient":
        """`arrays` as they are if they are in one array already, else a copy."""
        if isinstance(arrays, ByClient):
            return arrays
        sizes = np.array([len(own) for own in arrays], dtype=np.int64)
        return cls(np.concatenate([np.empty(0, np.int64), *arrays]), sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, client: int) -> Positions: ...
    @overload
    def __getitem__(self, client: slice) -> list[Positions]: ...
    def __getitem__(self, client: int | slice) -> Positions | list[Positions]:
        if isinstance(client, slice):
            return [self[row] for row in range(*client.indices(len(self)))]
        end = self.ends[client]
        return self.flat[end - self.sizes[client] : end]

    def __iter__(self) -> Iterator[Positions]:
        first = 0
        for end in self.ends.tolist():
            yield self.flat[first:end]
            first = end

    def rows(self, ids: NDArray[np.int64]) -> "ByClient":
        """Those of the clients `ids`, in this order."""
        if np.array_equal(ids, np.arange(len(self))):
            return self
        sizes = self.sizes[ids]
        where = np.repeat(self.ends[ids] - np.cumsum(sizes), sizes)
        where += np.arange(len(where))
        return ByClient(self.flat[where], sizes)

    def first(self, counts: NDArray[np.int64]) -> tuple["ByClient", "ByClient"]:
        """The first `counts` [N] of each, and the rest of each."""
        within = np.arange(len(self.flat)) - np.repeat(self.ends - self.sizes, self.sizes)
        head = within < np.repeat(counts, self.sizes)
        return ByClient(self.flat[head], counts), ByClient(self.flat[~head], self.sizes - counts)


def sizes_of(arrays: Sequence[Positions]) -> NDArray[np.int64]:
    """The length of each [N]."""
    return arrays.sizes if isinstance(arrays, ByClient) else np.array([len(own) for own in arrays], dtype=np.int64)


def chosen(arrays: Sequence[Positions], ids: NDArray[np.int64]) -> ByClient:
    """The arrays of the clients `ids`, in this order."""
    return arrays.rows(ids) if isinstance(arrays, ByClient) else ByClient.of([arrays[i] for i in ids])
