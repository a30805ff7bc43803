"""Inner products of many rows, with the same result on every CPU.

A matrix product adds in an order that depends on the processor and its library. Because each sum is
rounded, results then differ. Here the entries are rounded to whole numbers first. Products and sums
of these are exact, so their order does not matter. Selectors use this to compare clients' updates.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedsim.core.exact import has_fixed_order

SMALLEST_EXPONENT = -900
"""A row whose largest entry is smaller than 2^-900 gets the unit of a row with that entry, because
the inverse of its own unit could be infinite."""


class WholeNumbers(NamedTuple):
    """Rows [n, D] of float64 as whole numbers of `bits` bits times units.

    An entry of a row is about (high + low * 2^-bits) * unit.
    """

    high_and_low: Tensor
    """The whole numbers, high ones first, [2, n, D] in float64."""
    units: Tensor
    """The unit of each row [n, 1], a power of 2."""
    bits: int


class Factors:
    """Rows [n, D] that are to be multiplied with other rows of the same D.

    In float64 on a CPU, entries are rounded to `WholeNumbers`. Each whole number has
    (53 - log2 D) / 2 bits, rounded down. A sum of D products then stays below 2^53, so float64
    holds it exactly. An entry loses what is below 2^(-2 bits) times the largest entry of its row.
    On a GPU or in float32, rows are multiplied as they are.
    """

    def __init__(self, rows: Tensor, numbers: WholeNumbers | None = None) -> None:
        """`numbers` are the whole numbers of `rows`, if the caller has them."""
        self._rows = rows
        if numbers is None and has_fixed_order(rows) and rows.dtype == torch.float64:
            numbers = _whole_numbers(rows)
        self._numbers = numbers

    def __getitem__(self, index: slice) -> "Factors":
        if self._numbers is None:
            return Factors(self._rows[index])
        high_and_low, units, bits = self._numbers
        return Factors(self._rows[index], WholeNumbers(high_and_low[:, index], units[index], bits))

    def add_products(self, table: Tensor, other: "Factors") -> None:
        """Add the inner products with the rows of `other` to `table` [n, m]."""
        if self._numbers is None or other._numbers is None:
            table.addmm_(self._rows, other._rows.T)
            return
        left, left_units, bits = self._numbers
        right, right_units, _ = other._numbers
        n, m = left.shape[1], right.shape[1]
        # One matrix product [2 n, 2 m] for all pairs of high and low numbers.
        products = left.flatten(0, 1) @ right.flatten(0, 1).T
        high_high, high_low = products[:n, :m], products[:n, m:]
        low_high, low_low = products[n:, :m], products[n:, m:]
        # Add them from the smallest to the largest.
        result = low_low.mul(2.0**-bits)
        result += high_low + low_high
        result *= 2.0**-bits
        result += high_high
        result *= left_units
        result *= right_units.T
        table += result


def _whole_numbers(rows: Tensor) -> WholeNumbers:
    """Return the entries of `rows`, rounded to whole numbers."""
    num_columns = max(rows.shape[1], 1)
    bits = (53 - math.ceil(math.log2(num_columns))) // 2
    largest = np.zeros((len(rows), 1))
    if rows.shape[1]:
        largest = rows.abs().amax(1, keepdim=True).numpy()
    _, exponents = np.frexp(largest)
    exponents = np.maximum(exponents, SMALLEST_EXPONENT)
    high_and_low = rows.new_empty(2, *rows.shape)
    scaled = rows * torch.from_numpy(np.ldexp(1.0, bits - exponents))
    torch.round(scaled, out=high_and_low[0])
    scaled -= high_and_low[0]
    scaled *= 2.0**bits
    torch.round(scaled, out=high_and_low[1])
    return WholeNumbers(high_and_low, torch.from_numpy(np.ldexp(1.0, exponents - bits)), bits)
