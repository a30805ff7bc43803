"""Cosine similarity under the p-norm, in the readings that PNCS's text leaves open (its Eq. 9 and 10 are missing)."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedsim.selectors.tools.inner_products import Floats, chunks, products

Reading = Literal["signed_power", "polar", "dot_over_norms", "even_power", "semi"]


def similarities(pieces: Sequence[Tensor], p: float, reading: Reading = "signed_power") -> Floats:
    """s(x_i, x_j) of all pairs of N vectors (in pieces), [N, N]; 0 where one is zero. At p = 2 each is the cosine.

    Each vector is divided by its largest entry first, as powers underflow otherwise. The readings:

    - `signed_power`: sum_l sgn(x_l y_l) |x_l y_l|^(p/2) / sqrt(sum |x|^p sum |y|^p), in [-1, 1]: the cosine of the
      vectors sgn(x) |x|^(p/2);
    - `polar`: (|x+y|_p^2 - |x-y|_p^2) / (4 |x|_p |y|_p), which depends on |x| / |y| and takes N^2 powers a coordinate;
    - `dot_over_norms`: <x, y> / (|x|_p |y|_p), not bounded;
    - `even_power`: sum x^(p/2) y^(p/2) / sqrt(sum x^p sum y^p), for even p;
    - `semi`: sum sgn(x) |x|^(p-1) y / (|x|_p^(p-1) |y|_p), averaged over both orders.
    """
    scale = _largest(pieces)
    if reading == "signed_power":
        return _normalised(products(pieces, lambda x: signed_power(x / scale, p / 2))).clip(-1, 1)
    if reading == "even_power":
        return _normalised(products(pieces, lambda x: (x / scale) ** int(p // 2)))
    if reading == "polar":
        scale = scale.max().expand_as(scale)  # unlike the others it depends on the relative lengths
    norm = _norms(pieces, scale, p)
    if reading == "dot_over_norms":
        return _divided(products(pieces, lambda x: x / scale), np.outer(norm, norm))
    if reading == "semi":
        crossed = products(pieces, lambda x: signed_power(x / scale, p - 1), lambda x: x / scale)
        one_way = _divided(crossed, np.outer(norm ** (p - 1), norm))
        return (one_way + one_way.T) / 2
    return _divided(_polar(pieces, scale, p), 4 * np.outer(norm, norm))


def signed_power(x: Tensor, exponent: float) -> Tensor:
    """sgn(x) |x|^exponent."""
    if exponent == 1:
        return x
    return x * x.abs() if exponent == 2 else x.abs().pow_(exponent).mul_(x.sign())


def _largest(pieces: Sequence[Tensor]) -> Tensor:
    """The largest magnitude of each vector [N, 1], 1 for a zero vector."""
    largest = torch.stack([c.abs().amax(1) for c in chunks(pieces)]).amax(0)
    return torch.where(largest > 0, largest, 1.0)[:, None]


def _norms(pieces: Sequence[Tensor], scale: Tensor, p: float) -> Floats:
    """|x|_p of each scaled vector [N]."""
    sums = torch.stack([(c / scale).abs().pow_(p).sum(1) for c in chunks(pieces)]).double().sum(0)
    norms: Floats = (sums ** (1 / p)).cpu().numpy()
    return norms


def _polar(pieces: Sequence[Tensor], scale: Tensor, p: float) -> Tensor:
    """|x+y|_p^2 - |x-y|_p^2 of all pairs [N, N]."""
    num = len(scale)
    sums, differences = scale.new_zeros(num, num), scale.new_zeros(num, num)
    for chunk in chunks(pieces):
        x = chunk / scale
        for i in range(num):
            sums[i] += (x + x[i]).abs().pow_(p).sum(1)
            differences[i] += (x - x[i]).abs().pow_(p).sum(1)
    return sums ** (2 / p) - differences ** (2 / p)


def _normalised(gram: Tensor) -> Floats:
    """Inner products over the lengths of both."""
    table: Floats = gram.cpu().numpy()
    length = np.sqrt(table.diagonal())
    inverse = np.divide(1, length, out=np.zeros_like(length), where=length > 0)
    table *= inverse[:, None]
    table *= inverse[None, :]
    return table


def _divided(table: Tensor, by: Floats) -> Floats:
    result: Floats = np.divide(table.cpu().numpy(), by, out=np.zeros(by.shape), where=by > 0)
    return result
