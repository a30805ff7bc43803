"""Inner products of many long vectors, in blocks: no copy of the vectors is ever made.

Vectors come as *pieces*: matrices [N, d], one per parameter tensor, that side by side are the N vectors.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.types import Ids

Floats = NDArray[np.float64]
Transform = Callable[[Tensor], Tensor]

EXACT_WORK = 2e10
"""Up to so many multiplications products are taken in float64, beyond in float32 (half the time and memory)."""
BLOCK_ROWS = 256
"""Rows of a block of the upper triangle, half of all where they are few: the smaller, the less is multiplied twice."""
BLOCK_ENTRIES, BLOCK_COLUMNS = 2**20, 1024
"""Entries of a chunk, that it stays in the cache, and its least columns, that products stay worth their sums."""


def products(pieces: Sequence[Tensor], left: Transform | None = None, right: Transform | None = None) -> Tensor:
    """sum_l f(x_il) g(x_jl) for all pairs i, j, [N, N]; f = `left` and g = `right` act on each entry, rows in place.

    None: the entry itself; without `right`, g = f, and only half of the products are taken. Entries that are not
    finite count as 0.
    """
    num = len(pieces[0])
    out = torch.zeros(num, num, dtype=_dtype(pieces), device=pieces[0].device)
    for chunk in chunks(pieces):
        a = chunk if left is None else left(chunk)
        b = a if right is None else right(chunk)
        for start in range(0, num, _rows(num)):
            rows, first = slice(start, start + _rows(num)), start if right is None else 0
            out[rows, first:].addmm_(a[rows], b[first:].T)
    return out if right is not None else _mirrored(out)


def refreshed(gram: Tensor | None, vectors: Tensor, ids: Ids) -> Tensor:
    """The inner products of `vectors` [N, D], of which only `ids` differ from those that gave `gram`; in place.

    Without a `gram` all others are zero vectors.
    """
    if 2 * len(ids) > len(vectors):
        return products([vectors])
    if gram is None:
        gram = torch.zeros(len(vectors), len(vectors), dtype=_dtype([vectors]), device=vectors.device)
    rows = torch.as_tensor(ids, device=vectors.device)
    new = torch.zeros(len(rows), len(vectors), dtype=gram.dtype, device=gram.device)
    for chunk in chunks([vectors]):
        new.addmm_(chunk[rows], chunk.T)
    gram[rows] = new
    gram[:, rows] = new.T
    return gram


def chunks(pieces: Sequence[Tensor]) -> Iterator[Tensor]:
    """The vectors a few columns at a time, finite, in the precision of their products. Not to be modified."""
    columns, dtype = max(BLOCK_ENTRIES // len(pieces[0]), BLOCK_COLUMNS), _dtype(pieces)
    for piece in pieces:
        for part in piece.split(columns, dim=1):
            chunk = part.to(dtype)
            finite = bool(torch.isfinite(chunk.sum()))
            yield chunk if finite else torch.nan_to_num(chunk, nan=0.0, posinf=0.0, neginf=0.0)


def distances(gram: Tensor) -> Floats:
    """Euclidean distances [N, N] of vectors with these inner products."""
    squares = gram.diagonal().clone()
    result = gram.mul(-2).add_(squares[:, None]).add_(squares[None, :]).clamp_(min=0).sqrt_()
    return result.fill_diagonal_(0).cpu().numpy()


def _dtype(pieces: Sequence[Tensor]) -> torch.dtype:
    work = len(pieces[0]) ** 2 * sum(p.shape[1] for p in pieces)
    return torch.float64 if work <= EXACT_WORK else torch.float32


def _rows(num: int) -> int:
    return min(BLOCK_ROWS, -(-num // 2))


def _mirrored(upper: Tensor) -> Tensor:
    """The symmetric matrix whose upper block triangle is given, in place."""
    num = len(upper)
    for start in range(0, num, _rows(num)):
        stop = min(start + _rows(num), num)
        upper[stop:, start:stop] = upper[start:stop, stop:].T
    return upper
