"""Inner products of many rows, with the same result on every CPU.

A matrix product adds in an order that depends on the processor and its library, and rounding then
makes results differ. Here the entries are rounded to whole numbers first. Products and sums of
these are exact, so their order does not matter. Selectors that compare updates with each other use
it.
"""

import math

import numpy as np
import torch
from torch import Tensor

from fedsim.core.exact import has_fixed_order

SMALLEST_EXPONENT = -900
"""Rows whose largest entry is below 2^this are treated as if it were that large: its inverse would
be infinite."""


class Factors:
    """Rows [n, D] to be multiplied with other rows of the same D.

    In float64 on a CPU, each entry becomes the sum of two whole numbers of b bits times a unit. The
    unit of the high one is a power of 2 for each row; the unit of the low one is 2^-b times that.
    b = (53 - log2 D) / 2, rounded down, so that sums of D products of these stay below 2^53 and are
    exact. Entries lose what is below 2^(-2 b) of their row's largest entry. Other rows (on a GPU,
    or in float32) are multiplied as they are.
    """

    def __init__(self, rows: Tensor, parts: tuple[Tensor, Tensor, int] | None = None) -> None:
        """`parts` are the `_whole_parts` of `rows`, if the caller has them."""
        self._rows = rows
        if parts is None and has_fixed_order(rows) and rows.dtype == torch.float64:
            parts = _whole_parts(rows)
        self._parts = parts

    def __getitem__(self, rows: slice) -> "Factors":
        if self._parts is None:
            return Factors(self._rows[rows])
        whole, units, bits = self._parts
        return Factors(self._rows[rows], (whole[:, rows], units[rows], bits))

    def add_products(self, table: Tensor, other: "Factors") -> None:
        """Add the inner products with the rows of `other` to `table` [n, m]."""
        if self._parts is None or other._parts is None:
            table.addmm_(self._rows, other._rows.T)
            return
        left, left_units, bits = self._parts
        right, right_units, _ = other._parts
        n, m = left.shape[1], right.shape[1]
        products = left.flatten(0, 1) @ right.flatten(0, 1).T  # one product [2 n, 2 m] for all four
        high_high, high_low = products[:n, :m], products[:n, m:]
        low_high, low_low = products[n:, :m], products[n:, m:]
        # from the smallest to the largest, in units of high x high
        result = low_low.mul(2.0**-bits)
        result += high_low + low_high
        result *= 2.0**-bits
        result += high_high
        result *= left_units
        result *= right_units.T
        table += result


def _whole_parts(rows: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return the high and low parts [2, n, D], the units of the high ones [n, 1], and the bits of
    each."""
    width = max(rows.shape[1], 1)
    bits = (53 - math.ceil(math.log2(width))) // 2
    largest = np.zeros((len(rows), 1))
    if rows.shape[1]:
        largest = rows.abs().amax(1, keepdim=True).numpy()
    _, exponents = np.frexp(largest)
    exponents = np.maximum(exponents, SMALLEST_EXPONENT)
    parts = rows.new_empty(2, *rows.shape)
    scaled = rows * torch.from_numpy(np.ldexp(1.0, bits - exponents))
    torch.round(scaled, out=parts[0])
    scaled -= parts[0]
    scaled *= 2.0**bits
    torch.round(scaled, out=parts[1])
    return parts, torch.from_numpy(np.ldexp(1.0, exponents - bits)), bits
