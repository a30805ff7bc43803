"""Projections of clients' directions on the direction of the server's step, for GPFL (gpfl.py and
gpfl_official.py).

A direction is a vector as long as the model's trained parameters, split into their tensors.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from fedsim.clients.local_results import row_blocks
from fedsim.core.arrays import Floats
from fedsim.core.exact import mean_row, row_sums
from fedsim.core.types import Params, Stack

Metric = Literal["projection", "cosine", "dot"]
"""<g_i, g> / |g|, <g_i, g> / (|g_i| |g|), or <g_i, g>."""


def usable(direction: Params) -> Params:
    """Return `direction`, or {} if it is zero or not finite, because nothing projects on it."""
    squares = [tensor.double().square().sum() for tensor in direction.values()]
    return direction if 0 < float(torch.stack(squares).sum()) < math.inf else {}


def project(local: Stack, direction: Params, metric: Metric, *, per_tensor: bool) -> Floats:
    """Return the projections [K] of K local directions g_i on the `direction` g, by a `metric`.

    `local` holds the g_i by tensor [K, ...], and `direction` g. A projection whose denominator is 0
    is 0. With `per_tensor` the result is the mean of one projection for each tensor.
    """
    products = []  # <g_i, g>, |g_i|^2 and |g|^2 of each tensor
    for name, vectors in local.items():
        products.append(_products(vectors.flatten(1), direction[name].flatten().double()))
    dots, local_squares, squares = (torch.stack(rows) for rows in zip(*products, strict=True))
    if per_tensor:
        values = mean_row(_quotients(dots, local_squares, squares, metric))
    else:  # all tensors together are one vector
        sums = row_sums(dots.T), row_sums(local_squares.T), row_sums(squares.T)
        values = _quotients(*sums, metric)
    return values.cpu().numpy()


def _products(vectors: Tensor, direction: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return <g_i, g> [K], |g_i|^2 [K] and |g|^2 [1] of one tensor in float64."""
    dots = direction.new_zeros(len(vectors))
    squares = direction.new_zeros(len(vectors))
    for rows, block in row_blocks(vectors):
        dots[rows] = row_sums(block * direction)
        squares[rows] = row_sums(block.square_())
    return dots, squares, row_sums(direction.square()[None])


def _quotients(dots: Tensor, local_squares: Tensor, squares: Tensor, metric: Metric) -> Tensor:
    """Return <g_i, g> [..., K] divided by the norms of a metric; 0 where these are 0."""
    if metric == "dot":
        return dots
    norms = squares.sqrt()
    if metric == "cosine":
        norms = norms * local_squares.sqrt()
    return torch.where(norms > 0, dots / norms, 0.0)
