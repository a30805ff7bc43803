"""Cosine similarity under the p-norm, in five interpretations: PNCS's text lacks the definition (Eq. 9 and 10)."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedsim.exact.elementary import power
from fedsim.exact.sums import powers, row_sums
from fedsim.selectors.tools.inner_products import Floats, column_chunks, inner_products

PowerSimilarity = Literal["signed_power", "polar", "dot_over_norms", "even_power", "semi"]


def similarities(matrices: Sequence[Tensor], p: float, similarity: PowerSimilarity = "signed_power") -> Floats:
    """Similarities s(x_i, x_j) of all pairs of N vectors, [N, N]; 0 if one of the two is zero.

    The vectors are given as in `inner_products`. At p = 2 all kinds of `similarity` are the cosine. Vectors are divided
    by their largest magnitude first, because powers would underflow otherwise. The kinds:

    - `signed_power`: sum_l sgn(x_l y_l) |x_l y_l|^(p/2) / sqrt(sum |x|^p sum |y|^p), in [-1, 1]: the cosine of the
      vectors sgn(x) |x|^(p/2);
    - `polar`: (|x+y|_p^2 - |x-y|_p^2) / (4 |x|_p |y|_p), which depends on |x| / |y| and takes N^2 powers per
      coordinate;
    - `dot_over_norms`: <x, y> / (|x|_p |y|_p), not bounded;
    - `even_power`: sum x^(p/2) y^(p/2) / sqrt(sum x^p sum y^p), for even p;
    - `semi`: sum sgn(x) |x|^(p-1) y / (|x|_p^(p-1) |y|_p), averaged over both orders.
    """
    scale = _max_magnitudes(matrices)
    if similarity == "signed_power":
        return _cosines(inner_products(matrices, lambda x: signed_power(x / scale, p / 2))).clip(-1, 1)
    if similarity == "even_power":
        return _cosines(inner_products(matrices, lambda x: _whole_power(x / scale, int(p // 2))))
    if similarity == "polar":
        scale = scale.max().expand_as(scale)  # one scale for all vectors: polar depends on their relative lengths
    norm = _norms(matrices, scale, p)
    if similarity == "dot_over_norms":
        return _divide(inner_products(matrices, lambda x: x / scale), np.outer(norm, norm))
    if similarity == "semi":
        crossed = inner_products(matrices, lambda x: signed_power(x / scale, p - 1), lambda x: x / scale)
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


def _whole_power(x: Tensor, exponent: int) -> Tensor:
    raised = powers(x.abs(), exponent)
    return raised.mul_(x.sign()) if exponent % 2 else raised


def _max_magnitudes(matrices: Sequence[Tensor]) -> Tensor:
    """The largest magnitude of each vector, [N, 1]; 1 for a zero vector."""
    largest = torch.stack([c.abs().amax(1) for c in column_chunks(matrices)]).amax(0)
    return torch.where(largest > 0, largest, 1.0)[:, None]


def _norms(matrices: Sequence[Tensor], scale: Tensor, p: float) -> Floats:
    """The p-norms [N] of the vectors divided by `scale` [N, 1]."""
    sums = sum(row_sums(powers((c / scale).abs(), p)).double() for c in column_chunks(matrices))
    assert isinstance(sums, Tensor)
    norms: Floats = powers(sums, 1 / p).cpu().numpy()
    return norms


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
    result: Floats = np.divide(table.cpu().numpy(), by, out=np.zeros(by.shape), where=by > 0)
    return result
