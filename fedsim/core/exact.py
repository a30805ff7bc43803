"""Arithmetic that is the same on every processor: sums, products and log-probabilities on a CPU in
a fixed order (on a GPU as torch has them).

exp, log, arccos and powers in float64 are within 2 units in the last place (power: 2 for each unit
of its logarithm's size).
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedsim.core.arrays import Floats, Ints

BLOCK = 8192
"""Elements that are worked on at once, so that all that is computed of them stays in the cache."""
_BITS = 12
_LN2 = 0.6931471805599453
_STEP_HIGH = round(_LN2 * 2**28) / 2**40  # ln 2 / 2^12 in 28 bits, so that its multiples are exact,
_STEP_LOW = 4.444912105723013e-13  # and what is missing
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
# of fdlibm (Sun Microsystems, 1993): log(1 + f) and arcsin(x)
_LOG = (
    *(
        6.666666666666735130e-01,
        3.999999999940941908e-01,
        2.857142874366239149e-01,
        2.222219843214978396e-01,
    ),
    *(1.818357216161805012e-01, 1.531383769920937332e-01, 1.479819860511658591e-01),
)
_ARCSIN = (
    *(1.66666666666666657415e-01, -3.25565818622400915405e-01, 2.01212532134862925881e-01),
    *(-4.00555345006794114027e-02, 7.91534994289814532176e-04, 3.47933107596021167570e-05),
)
_ARCSIN_DIVISOR = (
    *(1.0, -2.40339491173441421878e00, 2.02094576023350569471e00),
    *(-6.88283971605453293030e-01, 7.70381505559019352791e-02),
)


def _in_blocks(function: Callable[[Floats], Floats]) -> Callable[[Any], Any]:
    """A function of an array or of a number, by one of blocks that stay in the cache."""

    @functools.wraps(function)
    def of_all(x: Any) -> Any:
        x = np.asarray(x, np.float64)
        result = np.empty(x.shape)
        given, found = x.reshape(-1), result.reshape(-1)
        with np.errstate(all="ignore"):
            for start in range(0, len(given), BLOCK):
                found[start : start + BLOCK] = function(given[start : start + BLOCK])
        return result[()]

    return of_all


def power(x: Any, exponent: float) -> Any:
    """x^exponent of an array of numbers >= 0, or of one: by products and a root for half-integer
    exponents up to 8."""
    x, doubled = np.asarray(x, np.float64), 2 * exponent
    if not (doubled == int(doubled) and 0 < doubled <= 16):
        return exp(exponent * log(x))
    result = np.sqrt(x) if doubled % 2 else x
    for _ in range(int(doubled - 1) // 2):
        result = result * x
    return result


def _powers_of_two() -> Floats:
    """2^(j / 2^12) for j = 0..2^12 - 1, rounded correctly: from roots of roots of 2, in 120
    bits."""
    one = 1 << 120
    root, table = 2 * one, [one]
    for _ in range(_BITS):
        root = math.isqrt(root * one)
        table = [value for v in table for value in (v, v * root // one)]
    return np.array([value / one for value in table])


_TABLE = _powers_of_two()


@_in_blocks
def exp(x: Floats) -> Floats:
    """e^x as 2^(k / 2^12) e^r with |r| <= ln 2 / 2^13."""
    ordinary = x.min() > -708 and x.max() < 709
    if not ordinary:
        x = np.clip(x, -746.0, 710.0)  # beyond them it is 0 or infinity all the same
    steps = np.rint(x * (2**_BITS / _LN2))
    r = x - steps * _STEP_HIGH
    r -= steps * _STEP_LOW
    result: Floats = r * (1 / 6)
    for c in (1 / 2, 1.0):
        result += c
        result *= r
    k = steps.astype(np.int64)
    part = _TABLE[k & (2**_BITS - 1)]
    result *= part
    result += part
    k >>= _BITS
    if ordinary:
        k <<= 52
        k += result.view(np.int64)
        result[:] = k.view(np.float64)
        return result
    half = k >> 1  # 2^k itself may be no number where the result is one
    result *= _power_of_two(half)
    result *= _power_of_two(k - half)
    return result


def _power_of_two(n: Ints) -> Floats:
    return ((n + 1023) << 52).view(np.float64)


@_in_blocks
def log(x: Floats) -> Floats:
    """The natural logarithm, -inf of 0, nan below: k ln 2 + log(1 + f) with 1 + f between the roots
    of 1/2 and 2."""
    mantissa, exponent = np.frexp(x)
    low = mantissa < math.sqrt(0.5)
    f, k = np.where(low, 2 * mantissa, mantissa) - 1, (exponent - low).astype(np.float64)
    s, h = f / (2 + f), 0.5 * f * f
    rest = _polynomial(s * s, _LOG) * (s * s)
    result = k * _LN2_HIGH - ((h - (s * (h + rest) + k * _LN2_LOW)) - f)
    result = np.where(x == 0, -np.inf, np.where(x < 0, np.nan, result))
    return np.where(np.isposinf(x), x, result)


@_in_blocks
def arccos(x: Floats) -> Floats:
    """The angle in radians: pi / 2 - arcsin(x) in the middle, else twice the arcsin of the root of
    (1 - |x|) / 2."""
    size = np.abs(x)
    middle = size <= 0.5
    square = np.where(middle, x * x, (1 - size) / 2)
    argument = np.where(middle, x, np.sqrt(square))
    arcsin = argument + argument * (
        square * _polynomial(square, _ARCSIN) / _polynomial(square, _ARCSIN_DIVISOR)
    )
    return np.where(middle, np.pi / 2 - arcsin, np.where(x > 0, 2 * arcsin, np.pi - 2 * arcsin))


def _polynomial(x: Floats, coefficients: tuple[float, ...]) -> Floats:
    """sum_i coefficients_i x^i, the highest first."""
    result = np.full_like(x, coefficients[-1])
    for c in coefficients[-2::-1]:
        result = result * x + c
    return result


BLOCK_COLUMNS = 2**14
"""Columns that are worked on at once, so that they stay in the cache."""


def weighted_sum(rows: Tensor, weights: Tensor) -> Tensor:
    """sum_k weights_k rows_k [...] of `rows` [K, ...] and `weights` [K] of the same type: each
    product is rounded, then added to those before."""
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


def normal(rng: np.random.Generator, count: int) -> Floats:
    """Standard normal numbers [count] by Marsaglia's polar method: NumPy's own take the C library's
    logarithm."""
    found = np.empty(0)
    while len(found) < count:
        points = 2 * rng.random((2, count - len(found))) - 1
        squares = points[0] * points[0] + points[1] * points[1]
        points, squares = (
            values[..., (squares > 0) & (squares < 1)] for values in (points, squares)
        )
        found = np.concatenate([found, (points * np.sqrt(-2 * log(squares) / squares)).ravel()])
    return found[:count]


def row_sums(rows: Tensor) -> Tensor:
    """The sum of each of `rows` [K, D], [K]: NumPy's pairwise one, whose order depends on D
    alone."""
    return torch.from_numpy(np.add.reduce(rows.numpy(), axis=1)) if has_order(rows) else rows.sum(1)


def length(values: Tensor) -> Tensor:
    """The Euclidean norm, on a CPU in float64."""
    return (
        row_sums(values.double().square()[None])[0].sqrt() if has_order(values) else values.norm()
    )


def powers(x: Tensor, exponent: float) -> Tensor:
    """x^exponent of a tensor of numbers >= 0."""
    return (
        torch.from_numpy(np.asarray(power(x.numpy(), exponent))).to(x.dtype)
        if has_order(x)
        else x.pow(exponent)
    )


def has_order(values: Tensor) -> bool:
    """Whether sums of `values` are taken in an order of our own."""
    return not values.is_cuda and values.dtype in (torch.float32, torch.float64)


SMALLEST_EXPONENT = -900
"""Rows whose largest entry is below 2^this are taken as if it were that large: the inverse would be
infinite."""


class Factors:
    """Rows [n, D] to be multiplied with others of the same D. In float64 on a CPU each entry
    becomes the sum of a high and a low whole number of b bits, in units of its row, so that D
    products of them stay below 2^53: b = (53 - log2 D) / 2 rounded down. What is below 2^(-2 b) of
    a row's largest entry is lost; the products of the parts are exact.
    """

    def __init__(self, rows: Tensor, parts: tuple[Tensor, Tensor, int] | None = None) -> None:
        self._rows = rows
        self._parts = parts or (
            _whole_parts(rows) if has_order(rows) and rows.dtype == torch.float64 else None
        )

    def __getitem__(self, some: slice) -> "Factors":
        if self._parts is None:
            return Factors(self._rows[some])
        whole, units, bits = self._parts
        return Factors(self._rows[some], (whole[:, some], units[some], bits))

    def add_products(self, table: Tensor, other: "Factors") -> None:
        """Add the inner products with the rows of `other` to `table` [n, m]."""
        if self._parts is None or other._parts is None:
            table.addmm_(self._rows, other._rows.T)
            return
        (mine, units, bits), (theirs, their_units, _) = self._parts, other._parts
        n, m = mine.shape[1], theirs.shape[1]
        products = mine.flatten(0, 1) @ theirs.flatten(0, 1).T
        result = products[n:, m:].mul(2.0**-bits)
        result += products[:n, m:] + products[n:, :m]
        result *= 2.0**-bits
        result += products[:n, :m]
        result *= units
        result *= their_units.T
        table += result


def _whole_parts(rows: Tensor) -> tuple[Tensor, Tensor, int]:
    """High and low parts [2, n, D], the units of the high ones [n, 1], and the bits of each."""
    width = max(rows.shape[1], 1)
    bits = (53 - math.ceil(math.log2(width))) // 2
    _, exponents = np.frexp(
        rows.abs().amax(1, keepdim=True).numpy() if rows.shape[1] else np.zeros((len(rows), 1))
    )
    exponents = np.maximum(exponents, SMALLEST_EXPONENT)
    parts = rows.new_empty(2, *rows.shape)
    scaled = rows * torch.from_numpy(np.ldexp(1.0, bits - exponents))
    torch.round(scaled, out=parts[0])
    scaled -= parts[0]
    scaled *= 2.0**bits
    torch.round(scaled, out=parts[1])
    return parts, torch.from_numpy(np.ldexp(1.0, exponents - bits)), bits


SAMPLES_AT_ONCE = 1024
"""Samples that are worked on at once, so that they stay in the cache."""


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities [n, C] of `logits` [n, C]."""
    if not has_order(logits):
        return F.log_softmax(logits.double(), dim=1)
    result = np.empty(logits.shape)
    for start in range(0, len(logits), SAMPLES_AT_ONCE):
        part = slice(start, start + SAMPLES_AT_ONCE)
        shifted = np.ascontiguousarray(logits[part].T.double().numpy())
        with np.errstate(invalid="ignore"):
            shifted -= shifted.max(0)
            result[part] = (shifted - log(np.add.reduce(exp(shifted), axis=0))).T
    return torch.from_numpy(result)
