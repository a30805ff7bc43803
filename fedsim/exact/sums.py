"""Sums and powers of tensors, on a CPU in a fixed order; on a GPU as torch has them."""

import numpy as np
import torch
from torch import Tensor

from fedsim.exact.elementary import power

BLOCK_COLUMNS = 2**14
"""Columns that are worked on at once, so that they stay in the cache."""


def weighted_sum(rows: Tensor, weights: Tensor) -> Tensor:
    """sum_k weights_k rows_k [...] of `rows` [K, ...] and `weights` [K] of the same type: each product is rounded, then
    added to those before."""
    flat = rows.reshape(len(rows), -1)
    if not has_order(rows):
        return (weights @ flat).view(rows.shape[1:])
    result, column = torch.empty_like(flat[0]), weights.numpy()[:, None]
    given, found = flat.numpy(), result.numpy()
    for start in range(0, len(result), BLOCK_COLUMNS):
        part = slice(start, start + BLOCK_COLUMNS)
        np.add.reduce(given[:, part] * column, axis=0, out=found[part])
    return result.view(rows.shape[1:])


def mean_row(rows: Tensor) -> Tensor:
    """The mean [...] of `rows` [K, ...], one added after another."""
    return torch.from_numpy(np.asarray(rows.numpy().mean(0))) if has_order(rows) else rows.mean(0)


def row_sums(rows: Tensor) -> Tensor:
    """The sum of each of `rows` [K, D], [K]: NumPy's pairwise one, whose order depends on D alone."""
    return torch.from_numpy(np.add.reduce(rows.numpy(), axis=1)) if has_order(rows) else rows.sum(1)


def length(values: Tensor) -> Tensor:
    """The Euclidean norm, on a CPU in float64."""
    return row_sums(values.double().square()[None])[0].sqrt() if has_order(values) else values.norm()


def powers(x: Tensor, exponent: float) -> Tensor:
    """x^exponent of a tensor of numbers >= 0."""
    return torch.from_numpy(np.asarray(power(x.numpy(), exponent))).to(x.dtype) if has_order(x) else x.pow(exponent)


def has_order(values: Tensor) -> bool:
    """Whether sums of `values` are taken in an order of our own."""
    return not values.is_cuda and values.dtype in (torch.float32, torch.float64)
