"""Products of matrices that no order of additions rounds."""

import math

import numpy as np
import torch
from torch import Tensor

from fedsim.exact.sums import has_order

SMALLEST_EXPONENT = -900
"""Rows whose largest entry is below 2^this are taken as if it were that large: the inverse would be infinite."""


class Factors:
    """Rows [n, D] to be multiplied with others of the same D.

    In float64 on a CPU each entry becomes the sum of a high and a low whole number of b bits, in units of its row, so
    that D products of them stay below 2^53: b = (53 - log2 D) / 2 rounded down, 20 for D = 2^13. What is below 2^(-2 b)
    of a row's largest entry is lost; the products of the parts are exact, whatever BLAS does.
    """

    def __init__(self, rows: Tensor, parts: tuple[Tensor, Tensor, int] | None = None) -> None:
        self._rows = rows
        self._parts = parts or (_whole_parts(rows) if has_order(rows) and rows.dtype == torch.float64 else None)

    def __getitem__(self, some: slice) -> "Factors":
        if self._parts is None:
            return Factors(self._rows[some])
        whole, units, bits = self._parts
        return Factors(self._rows[some], (whole[:, some], units[some], bits))

    def add_products(self, table: Tensor, other: "Factors") -> None:
        """Add the inner products with the rows of `other` to `table` [n, m]."""
        if self._parts is None or other._parts is None:
            table.addmm_(self._rows, other._rows.T)
        else:
            table += self.times(other)

    def times(self, other: "Factors") -> Tensor:
        """The inner products [n, m] with the rows of `other`."""
        if self._parts is None or other._parts is None:
            return self._rows @ other._rows.T
        (mine, units, bits), (theirs, their_units, _) = self._parts, other._parts
        n, m = mine.shape[1], theirs.shape[1]
        table = mine.flatten(0, 1) @ theirs.flatten(0, 1).T
        result = table[n:, m:].mul(2.0**-bits)
        result += table[:n, m:] + table[n:, :m]
        result *= 2.0**-bits
        result += table[:n, :m]
        result *= units
        result *= their_units.T
        return result


def _whole_parts(rows: Tensor) -> tuple[Tensor, Tensor, int]:
    """High and low parts [2, n, D], the units of the high ones [n, 1], and the bits of each."""
    width = max(rows.shape[1], 1)
    bits = (53 - math.ceil(math.log2(width))) // 2
    _, exponents = np.frexp(rows.abs().amax(1, keepdim=True).numpy() if rows.shape[1] else np.zeros((len(rows), 1)))
    exponents = np.maximum(exponents, SMALLEST_EXPONENT)
    parts = rows.new_empty(2, *rows.shape)
    scaled = rows * torch.from_numpy(np.ldexp(1.0, bits - exponents))
    torch.round(scaled, out=parts[0])
    scaled -= parts[0]
    scaled *= 2.0**bits
    torch.round(scaled, out=parts[1])
    return parts, torch.from_numpy(np.ldexp(1.0, exponents - bits)), bits
