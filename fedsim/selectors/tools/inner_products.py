"""Inner products of N long vectors, computed in blocks without a copy of the vectors.

The vectors are given as a list of matrices [N, d_l], one per parameter tensor; concatenated along their columns they
are the N vectors.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.exact.products import Factors
from fedsim.exact.sums import has_order
from fedsim.flat import to_device
from fedsim.types import Ids

Floats = NDArray[np.float64]
Transform = Callable[[Tensor], Tensor]

MAX_FLOAT64_PRODUCTS = 2e10
"""Up to this number of multiplications float64 is used, and on a CPU the products are the same on every processor;
beyond it float32 (a quarter of the time, half the memory)."""
BLOCK_ROWS = 256
"""Rows per block of the upper triangle (at most half of all): smaller blocks compute fewer products twice."""
BLOCK_ENTRIES, BLOCK_COLUMNS, MOST_COLUMNS = 2**20, 1024, 2**13
"""Entries of a chunk, so that it fits into the cache, its minimum of columns, so that products stay efficient, and its
maximum, so that their factors keep 40 bits."""


def inner_products(matrices: Sequence[Tensor], left: Transform | None = None, right: Transform | None = None) -> Tensor:
    """sum_l f(x_il) g(x_jl) for all pairs i, j of the N vectors, [N, N].

    f = `left` and g = `right` are functions of chunks [N, columns] that act on each entry; None is the identity.
    Without `right`, g = f and only half of the products are computed. Entries of the vectors that are not finite count
    as 0.
    """
    num = len(matrices[0])
    out = torch.zeros(num, num, dtype=_product_dtype(matrices), device=matrices[0].device)
    for chunk in column_chunks(matrices):
        a = chunk if left is None else left(chunk)
        factors = Factors(a)
        others = factors if right is None else Factors(right(chunk))
        for start in range(0, num, _block_rows(num)):
            rows, first = slice(start, start + _block_rows(num)), start if right is None else 0
            factors[rows].add_products(out[rows, first:], others[first:])
    return out if right is not None else _mirror_upper(out)


def update_inner_products(products: Tensor | None, vectors: Tensor, ids: Ids) -> Tensor:
    """The inner products [N, N] of `vectors` [N, D] after the rows `ids` have changed.

    `products` are the inner products before the change; they are updated in place. None: all other rows are zero.
    """
    if 2 * len(ids) > len(vectors):
        return inner_products([vectors])
    if products is None:
        products = torch.zeros(len(vectors), len(vectors), dtype=_product_dtype([vectors]), device=vectors.device)
    rows = to_device(torch.as_tensor(ids), vectors.device)
    new = torch.zeros(len(rows), len(vectors), dtype=products.dtype, device=products.device)
    for chunk in column_chunks([vectors]):
        Factors(chunk[rows]).add_products(new, Factors(chunk))
    products[rows] = new
    products[:, rows] = new.T
    return products


def column_chunks(matrices: Sequence[Tensor]) -> Iterator[Tensor]:
    """The vectors in chunks [N, columns], in the precision of their products; nan and infinity are 0. Read-only."""
    dtype = _product_dtype(matrices)
    columns = max(BLOCK_ENTRIES // len(matrices[0]), BLOCK_COLUMNS)
    columns = min(columns, MOST_COLUMNS) if has_order(matrices[0]) else columns
    for matrix in matrices:
        for part in matrix.split(columns, dim=1):
            chunk = part.to(dtype)
            finite = not chunk.is_cuda and bool(torch.isfinite(chunk.sum()))  # a GPU would have to be waited for
            yield chunk if finite else torch.nan_to_num(chunk, nan=0.0, posinf=0.0, neginf=0.0)


def euclidean_distances(products: Tensor) -> Floats:
    """Euclidean distances [N, N] of vectors with the inner products `products` [N, N], all of them finite.

    The distance to a vector whose square overflows float32 counts as the root of its largest number.
    """
    squares, most = products.diagonal().clone(), torch.finfo(products.dtype).max
    result = products.mul(-2).add_(squares[:, None]).add_(squares[None, :]).clamp_(min=0)
    distances: Floats = result.nan_to_num_(nan=most, posinf=most).sqrt_().cpu().numpy()
    np.fill_diagonal(distances, 0)
    return distances


def _product_dtype(matrices: Sequence[Tensor]) -> torch.dtype:
    work = len(matrices[0]) ** 2 * sum(p.shape[1] for p in matrices)
    return torch.float64 if work <= MAX_FLOAT64_PRODUCTS else torch.float32


def _block_rows(num: int) -> int:
    return min(BLOCK_ROWS, -(-num // 2))


def _mirror_upper(upper: Tensor) -> Tensor:
    """Fill the lower triangle of a symmetric matrix from its upper block triangle, in place."""
    num = len(upper)
    for start in range(0, num, _block_rows(num)):
        stop = min(start + _block_rows(num), num)
        upper[stop:, start:stop] = upper[start:stop, stop:].T
    return upper
