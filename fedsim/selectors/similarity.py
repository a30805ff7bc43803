"""Inner products of N long vectors, and similarities and distances made of them.

The vectors, such as the gradients of N clients, are a list of matrices [N, d_l], one for each
parameter tensor l. The matrices are neither concatenated nor copied: products are summed over
chunks of columns that fit into the cache. Each chunk is wrapped in `Factors`, whose products are
the same on every CPU (core/factors.py).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedsim.core.arrays import Floats
from fedsim.core.exact import has_fixed_order, power, row_sums, tensor_power
from fedsim.core.factors import Factors
from fedsim.core.flat import to_device
from fedsim.core.types import Ids

Transform = Callable[[Tensor], Tensor]
"""A function that maps the entries of a chunk one by one."""

MAX_FLOAT64_PRODUCTS = 2e10
"""Maximum number of multiplications in float64, beyond which float32 is used. On a CPU, float64
products are the same on every processor."""
BLOCK_ROWS = 256
"""Rows of the upper triangle that are computed at once. Smaller blocks compute fewer products
twice."""
BLOCK_ENTRIES = 2**20
"""Entries of a chunk, which suit the cache."""
MIN_COLUMNS = 1024
"""Minimum number of columns of a chunk, for the speed of products."""
MAX_COLUMNS = 2**13
"""Maximum number of columns of a chunk on a CPU. `Factors` of more columns would keep fewer than 40
bits of each entry."""


def inner_products(
    matrices: Sequence[Tensor], left: Transform | None = None, right: Transform | None = None
) -> Tensor:
    """Return the sums over all coordinates c of f(x_ic) g(x_jc), for all pairs i, j, [N, N].

    x_i are the N vectors. f = `left` and g = `right` map chunks [N, columns] entry by entry. If
    `left` is None, f is the identity. If `right` is None, g is f, and only half of the products are
    computed. Entries that are not finite count as 0.
    """
    num = len(matrices[0])
    half = -(-num // 2)  # rounded up
    block_rows = min(BLOCK_ROWS, half)
    starts = range(0, num, block_rows)
    symmetric = right is None
    products = _zero_products(matrices, num)
    for chunk in column_chunks(matrices):
        left_factors = Factors(chunk if left is None else left(chunk))
        right_factors = left_factors if right is None else Factors(right(chunk))
        for start in starts:
            rows = slice(start, start + block_rows)
            first_column = start if symmetric else 0
            block = products[rows, first_column:]
            left_factors[rows].add_products(block, right_factors[first_column:])
    if symmetric:  # copy the upper triangle to the lower one
        for start in starts:
            stop = start + block_rows
            products[stop:, start:stop] = products[start:stop, stop:].T
    return products


def update_inner_products(products: Tensor | None, vectors: Tensor, ids: Ids) -> Tensor:
    """Return the inner products [N, N] of `vectors` [N, D] after the rows `ids` have changed.

    `products` are the inner products before the change. They may be updated in place. None means
    that all other rows of `vectors` are 0.
    """
    if 2 * len(ids) > len(vectors):
        return inner_products([vectors])
    if products is None:
        products = _zero_products([vectors], len(vectors))
    rows = to_device(torch.as_tensor(ids), vectors.device)
    new = _zero_products([vectors], len(rows))
    for chunk in column_chunks([vectors]):
        Factors(chunk[rows]).add_products(new, Factors(chunk))
    products[rows] = new
    products[:, rows] = new.T
    return products


def with_latest(vectors: Tensor | None, num: int, ids: Ids, latest: Tensor) -> Tensor:
    """Return `vectors` [num, D] with the rows `ids` replaced by `latest`, changed in place.

    If `vectors` is None, all other rows are 0.
    """
    if vectors is None:
        vectors = latest.new_zeros(num, latest.shape[1])
    vectors[to_device(torch.as_tensor(ids), vectors.device)] = latest
    return vectors


def among(table: Tensor, ids: Ids) -> Tensor:
    """Return the rows and columns `ids` of a square `table`, without a copy if these are all."""
    if len(ids) == len(table):
        return table
    rows = to_device(torch.as_tensor(ids), table.device)
    return table[rows][:, rows]


def column_chunks(matrices: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the vectors in read-only chunks [N, columns] in the precision of their products.

    Entries that are not finite become 0.
    """
    dtype = _product_dtype(matrices)
    num_columns = max(BLOCK_ENTRIES // len(matrices[0]), MIN_COLUMNS)
    if has_fixed_order(matrices[0]):  # real numbers on a CPU: `Factors` round the entries
        num_columns = min(num_columns, MAX_COLUMNS)
    for matrix in matrices:
        for part in matrix.split(num_columns, dim=1):
            chunk = part.to(dtype)
            # On a GPU nothing is checked, because the program would have to wait for the answer.
            is_known_to_be_finite = not chunk.is_cuda and bool(torch.isfinite(chunk.sum()))
            if not is_known_to_be_finite:
                chunk = torch.nan_to_num(chunk, nan=0.0, posinf=0.0, neginf=0.0)
            yield chunk


def euclidean_distances(products: Tensor) -> Floats:
    """Return Euclidean distances [N, N] of vectors with the inner products `products` [N, N].

    All distances are finite: if the square of a vector's length overflows float32, the distance is
    the square root of float32's largest number.
    """
    squares = products.diagonal().clone()
    largest = torch.finfo(products.dtype).max
    result = products.mul(-2).add_(squares[:, None]).add_(squares[None, :]).clamp_(min=0)
    distances: Floats = result.nan_to_num_(nan=largest, posinf=largest).sqrt_().cpu().numpy()
    np.fill_diagonal(distances, 0)
    return distances


def _product_dtype(matrices: Sequence[Tensor]) -> torch.dtype:
    """Return float64, or float32 beyond `MAX_FLOAT64_PRODUCTS` multiplications."""
    num_columns = sum(matrix.shape[1] for matrix in matrices)
    num_products = len(matrices[0]) ** 2 * num_columns
    return torch.float64 if num_products <= MAX_FLOAT64_PRODUCTS else torch.float32


def _zero_products(matrices: Sequence[Tensor], num_rows: int) -> Tensor:
    """Return zeros [num_rows, N] in the precision of the vectors' products."""
    vectors = matrices[0]
    return vectors.new_zeros(num_rows, len(vectors), dtype=_product_dtype(matrices))


PowerSimilarity = Literal["signed_power", "polar", "dot_over_norms", "even_power", "semi"]


def similarities(
    matrices: Sequence[Tensor], p: float, similarity: PowerSimilarity = "signed_power"
) -> Floats:
    """Return similarities s(x_i, x_j) [N, N] of all pairs of N vectors; 0 for a zero vector.

    At p = 2 all kinds of `similarity` are the cosine. Vectors are divided by their largest
    magnitude first, because powers would underflow otherwise. The kinds:

    - `signed_power`: sum sgn(x y) |x y|^(p/2) / sqrt(sum |x|^p sum |y|^p). It is the cosine of the
      vectors sgn(x) |x|^(p/2).
    - `polar`: (|x+y|_p^2 - |x-y|_p^2) / (4 |x|_p |y|_p). It depends on |x| / |y| and takes N^2
      powers for each coordinate.
    - `dot_over_norms`: <x, y> / (|x|_p |y|_p), which is not bounded.
    - `even_power`: sum x^(p/2) y^(p/2) / sqrt(sum x^p sum y^p), for even p.
    - `semi`: sum sgn(x) |x|^(p-1) y / (|x|_p^(p-1) |y|_p), averaged over both orders.
    """
    scale = _max_magnitudes(matrices)
    if similarity == "even_power" and p % 4 == 0:  # p / 2 is even: x^(p/2) has no sign
        return _cosines(inner_products(matrices, lambda x: signed_power(x / scale, p / 2).abs()))
    if similarity in ("signed_power", "even_power"):  # an odd power p / 2 keeps the sign of x
        products = inner_products(matrices, lambda x: signed_power(x / scale, p / 2))
        return _cosines(products).clip(-1, 1)
    if similarity == "polar":
        # It depends on relative lengths, so that all vectors need the same scale.
        largest = scale.max().expand_as(scale)
        norms = _norms(matrices, largest, p)
        return _divide(_polarisation(matrices, largest, p), 4 * np.outer(norms, norms))
    norms = _norms(matrices, scale, p)
    if similarity == "dot_over_norms":
        products = inner_products(matrices, lambda x: x / scale)
        return _divide(products, np.outer(norms, norms))
    products = inner_products(
        matrices, lambda x: signed_power(x / scale, p - 1), lambda x: x / scale
    )
    positive_norms = np.where(norms > 0, norms, 1.0)
    raised_norms = np.where(norms > 0, power(positive_norms, p - 1), 0.0)
    one_way = _divide(products, np.outer(raised_norms, norms))
    return (one_way + one_way.T) / 2


def signed_power(x: Tensor, exponent: float) -> Tensor:
    """Return sgn(x) |x|^exponent; 0 where x is 0, whatever the exponent."""
    if exponent == 1:
        return x
    raised = x * x.abs() if exponent == 2 else tensor_power(x.abs(), exponent).mul_(x.sign())
    return raised if exponent > 0 else raised.masked_fill_(x == 0, 0.0)


def _max_magnitudes(matrices: Sequence[Tensor]) -> Tensor:
    """Return the largest magnitude of each vector [N, 1]; 1 for a zero vector."""
    by_chunk = [chunk.abs().amax(1) for chunk in column_chunks(matrices)]
    largest = torch.stack(by_chunk).amax(0)
    return torch.where(largest > 0, largest, 1.0)[:, None]


def _norms(matrices: Sequence[Tensor], scale: Tensor, p: float) -> Floats:
    """Return the p-norms [N] of the vectors divided by `scale` [N, 1]."""
    sums = torch.zeros(len(scale), dtype=torch.float64, device=scale.device)
    for chunk in column_chunks(matrices):
        sums += row_sums(tensor_power((chunk / scale).abs(), p))
    return tensor_power(sums, 1 / p).cpu().numpy()


def _polarisation(matrices: Sequence[Tensor], scale: Tensor, p: float) -> Tensor:
    """Return |x+y|_p^2 - |x-y|_p^2 [N, N] of all pairs of vectors divided by `scale` [N, 1]."""
    num = len(scale)
    sums = scale.new_zeros(num, num)
    differences = scale.new_zeros(num, num)
    for chunk in column_chunks(matrices):
        x = chunk / scale
        for i in range(num):
            sums[i] += row_sums(tensor_power((x + x[i]).abs(), p))
            differences[i] += row_sums(tensor_power((x - x[i]).abs(), p))
    return tensor_power(sums, 2 / p) - tensor_power(differences, 2 / p)


def _cosines(products: Tensor) -> Floats:
    """Return inner products [N, N] divided by the lengths of both vectors; 0 for zero vectors."""
    cosines: Floats = products.cpu().numpy()
    lengths = np.sqrt(cosines.diagonal())
    inverse = np.divide(1, lengths, out=np.zeros_like(lengths), where=lengths > 0)
    cosines *= inverse[:, None]
    cosines *= inverse[None, :]
    return cosines


def _divide(products: Tensor, divisors: Floats) -> Floats:
    """Return `products` / `divisors`; 0 where a divisor is 0."""
    zeros = np.zeros(divisors.shape)
    return np.divide(products.cpu().numpy(), divisors, out=zeros, where=divisors > 0)
