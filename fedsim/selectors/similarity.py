"""Inner products of N long vectors, computed in blocks without a copy of the vectors, and
similarities made of them.

The vectors are a list of matrices [N, d_l], one per parameter tensor, which are not
concatenated."""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedsim.core.arrays import Floats
from fedsim.core.exact import has_order, power, powers, row_sums
from fedsim.core.factors import Factors
from fedsim.core.flat import to_device
from fedsim.core.types import Ids

Transform = Callable[[Tensor], Tensor]

MAX_FLOAT64_PRODUCTS = (
    2e10  # up to which, on a CPU, they are the same on every processor; float32 beyond
)
BLOCK_ROWS = (
    256  # of the upper triangle, at most half of all: smaller blocks compute fewer products twice
)
BLOCK_ENTRIES, BLOCK_COLUMNS, MOST_COLUMNS = 2**20, 1024, 2**13
"""Entries of a chunk, for the cache, its fewest columns, for the speed of products, and its most,
whose factors keep 40 bits."""


def inner_products(
    matrices: Sequence[Tensor], left: Transform | None = None, right: Transform | None = None
) -> Tensor:
    """sum_l f(x_il) g(x_jl) for all pairs i, j of the N vectors, [N, N].

    f = `left` and g = `right` are functions of chunks [N, columns] that act on each entry; None is
    the identity. Without `right`, g = f and only half of the products are computed. Entries that
    are not finite count as 0.
    """
    num = len(matrices[0])
    size = min(BLOCK_ROWS, -(-num // 2))
    out = torch.zeros(num, num, dtype=_product_dtype(matrices), device=matrices[0].device)
    for chunk in column_chunks(matrices):
        a = chunk if left is None else left(chunk)
        factors = Factors(a)
        others = factors if right is None else Factors(right(chunk))
        for start in range(0, num, size):
            rows, first = slice(start, start + size), start if right is None else 0
            factors[rows].add_products(out[rows, first:], others[first:])
    for start in range(
        0, num if right is None else 0, size
    ):  # the lower triangle from the upper one
        stop = min(start + size, num)
        out[stop:, start:stop] = out[start:stop, stop:].T
    return out


def update_inner_products(products: Tensor | None, vectors: Tensor, ids: Ids) -> Tensor:
    """The inner products [N, N] of `vectors` [N, D] after the rows `ids` have changed, from the
    `products` before, which are updated in place. None: all other rows are zero.
    """
    if 2 * len(ids) > len(vectors):
        return inner_products([vectors])
    if products is None:
        products = torch.zeros(
            len(vectors), len(vectors), dtype=_product_dtype([vectors]), device=vectors.device
        )
    rows = to_device(torch.as_tensor(ids), vectors.device)
    new = torch.zeros(len(rows), len(vectors), dtype=products.dtype, device=products.device)
    for chunk in column_chunks([vectors]):
        Factors(chunk[rows]).add_products(new, Factors(chunk))
    products[rows] = new
    products[:, rows] = new.T
    return products


def with_latest(vectors: Tensor | None, num: int, ids: Ids, latest: Tensor) -> Tensor:
    """`vectors` [num, D] with the rows `latest` of the clients `ids`, in place; at first (None) all
    others are zero."""
    if vectors is None:
        vectors = latest.new_zeros(num, latest.shape[1])
    vectors[to_device(torch.as_tensor(ids), vectors.device)] = latest
    return vectors


def among(table: Tensor, ids: Ids) -> Tensor:
    """The rows and columns `ids` of a square `table`, without a copy if these are all."""
    if len(ids) == len(table):
        return table
    rows = to_device(torch.as_tensor(ids), table.device)
    return table[rows][:, rows]


def column_chunks(matrices: Sequence[Tensor]) -> Iterator[Tensor]:
    """The vectors in read-only chunks [N, columns], in the precision of their products; nan and
    infinity are 0."""
    dtype = _product_dtype(matrices)
    columns = max(BLOCK_ENTRIES // len(matrices[0]), BLOCK_COLUMNS)
    columns = min(columns, MOST_COLUMNS) if has_order(matrices[0]) else columns
    for matrix in matrices:
        for part in matrix.split(columns, dim=1):
            chunk = part.to(dtype)
            finite = not chunk.is_cuda and bool(
                torch.isfinite(chunk.sum())
            )  # a GPU would have to be waited for
            yield chunk if finite else torch.nan_to_num(chunk, nan=0.0, posinf=0.0, neginf=0.0)


def euclidean_distances(products: Tensor) -> Floats:
    """Euclidean distances [N, N] of vectors with the inner products `products` [N, N], all of them
    finite: if the square of a vector overflows float32, the root of its largest number."""
    squares, most = products.diagonal().clone(), torch.finfo(products.dtype).max
    result = products.mul(-2).add_(squares[:, None]).add_(squares[None, :]).clamp_(min=0)
    distances: Floats = result.nan_to_num_(nan=most, posinf=most).sqrt_().cpu().numpy()
    np.fill_diagonal(distances, 0)
    return distances


def _product_dtype(matrices: Sequence[Tensor]) -> torch.dtype:
    work = len(matrices[0]) ** 2 * sum(p.shape[1] for p in matrices)
    return torch.float64 if work <= MAX_FLOAT64_PRODUCTS else torch.float32


PowerSimilarity = Literal["signed_power", "polar", "dot_over_norms", "even_power", "semi"]


def similarities(
    matrices: Sequence[Tensor], p: float, similarity: PowerSimilarity = "signed_power"
) -> Floats:
    """Similarities s(x_i, x_j) of all pairs of N vectors, [N, N]; 0 if one of the two is zero.

    At p = 2 all kinds of `similarity` are the cosine. Vectors are divided by their largest
    magnitude first, because powers would underflow otherwise. The kinds:

    - `signed_power`: sum sgn(x y) |x y|^(p/2) / sqrt(sum |x|^p sum |y|^p): the cosine of the vectors sgn(x) |x|^(p/2);
    - `polar`: (|x+y|_p^2 - |x-y|_p^2) / (4 |x|_p |y|_p), which depends on |x| / |y| and takes N^2 powers per
      coordinate;
    - `dot_over_norms`: <x, y> / (|x|_p |y|_p), not bounded;
    - `even_power`: sum x^(p/2) y^(p/2) / sqrt(sum x^p sum y^p), for even p;
    - `semi`: sum sgn(x) |x|^(p-1) y / (|x|_p^(p-1) |y|_p), averaged over both orders.
    """
    scale = _max_magnitudes(matrices)
    if similarity == "signed_power":
        return _cosines(inner_products(matrices, lambda x: signed_power(x / scale, p / 2))).clip(
            -1, 1
        )
    if similarity == "even_power":
        half = int(p // 2)
        return _cosines(
            inner_products(
                matrices,
                lambda x: powers((x / scale).abs(), half).mul_(x.sign() if half % 2 else 1),
            )
        )
    if similarity == "polar":
        scale = scale.max().expand_as(
            scale
        )  # one scale for all vectors: polar depends on their relative lengths
    norm = _norms(matrices, scale, p)
    if similarity == "dot_over_norms":
        return _divide(inner_products(matrices, lambda x: x / scale), np.outer(norm, norm))
    if similarity == "semi":
        crossed = inner_products(
            matrices, lambda x: signed_power(x / scale, p - 1), lambda x: x / scale
        )
        lengths = np.where(norm > 0, power(np.where(norm > 0, norm, 1.0), p - 1), 0.0)
        one_way = _divide(crossed, np.outer(lengths, norm))
        return (one_way + one_way.T) / 2
    return _divide(_polarisation(matrices, scale, p), 4 * np.outer(norm, norm))


def signed_power(x: Tensor, exponent: float) -> Tensor:
    """sgn(x) |x|^exponent; 0 where x is 0, whatever the exponent."""
    if exponent == 1:
        return x
    raised = x * x.abs() if exponent == 2 else powers(x.abs(), exponent).mul_(x.sign())
    return raised if exponent > 0 else raised.masked_fill_(x == 0, 0.0)


def _max_magnitudes(matrices: Sequence[Tensor]) -> Tensor:
    """The largest magnitude of each vector, [N, 1]; 1 for a zero vector."""
    largest = torch.stack([c.abs().amax(1) for c in column_chunks(matrices)]).amax(0)
    return torch.where(largest > 0, largest, 1.0)[:, None]


def _norms(matrices: Sequence[Tensor], scale: Tensor, p: float) -> Floats:
    """The p-norms [N] of the vectors divided by `scale` [N, 1]."""
    sums = sum(row_sums(powers((c / scale).abs(), p)).double() for c in column_chunks(matrices))
    assert isinstance(sums, Tensor)
    return powers(sums, 1 / p).cpu().numpy()


def _polarisation(matrices: Sequence[Tensor], scale: Tensor, p: float) -> Tensor:
    """|x+y|_p^2 - |x-y|_p^2 of all pairs [N, N] of the vectors divided by `scale` [N, 1]."""
    num = len(scale)
    sums, differences = scale.new_zeros(num, num), scale.new_zeros(num, num)
    for chunk in column_chunks(matrices):
        x = chunk / scale
        for i in range(num):
            sums[i] += row_sums(powers((x + x[i]).abs(), p))
            differences[i] += row_sums(powers((x - x[i]).abs(), p))
    return powers(sums, 2 / p) - powers(differences, 2 / p)


def _cosines(products: Tensor) -> Floats:
    """Inner products [N, N] divided by the lengths of both vectors; 0 for zero vectors."""
    table: Floats = products.cpu().numpy()
    length = np.sqrt(table.diagonal())
    inverse = np.divide(1, length, out=np.zeros_like(length), where=length > 0)
    table *= inverse[:, None]
    table *= inverse[None, :]
    return table


def _divide(table: Tensor, by: Floats) -> Floats:
    return np.divide(table.cpu().numpy(), by, out=np.zeros(by.shape), where=by > 0)
