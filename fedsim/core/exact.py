"""Arithmetic with the same result on every CPU.

NumPy's and torch's functions differ in the last bit between processors and between versions of
their libraries, and a run would then differ after some rounds. The functions here only use
operations that IEEE 754 rounds in one way (+, -, x, /, square root), in a fixed order. There are
two kinds:

- Elementary functions of NumPy arrays in float64: `power`, `exp`, `log`, `arccos`, and `normal` for
  random numbers. The error of exp, log and arccos is at most 2 units in the last place. The error
  of `power` is at most 2 units for each unit of the size of exponent * log(x).
- Functions of torch tensors, most of them sums: `weighted_sum`, `mean_row`, `row_sums`, `length`,
  `tensor_power` and `log_softmax`. On a GPU, these call torch's own functions.
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

# Sizes of blocks that are computed at once. Their intermediate values stay in the cache.
BLOCK_NUMBERS = 8192
BLOCK_COLUMNS = 2**14
BLOCK_SAMPLES = 1024

TABLE_BITS = 12
"""`exp` reads 2^(j / 2^12) from a table of 2^12 entries."""
LN2 = 0.6931471805599453
STEP_HIGH = round(LN2 * 2**28) / 2**40
"""ln 2 / 2^12, rounded to 28 bits, so that its products with whole numbers are exact."""
STEP_LOW = 4.444912105723013e-13
"""The difference of ln 2 / 2^12 and `STEP_HIGH`."""
# Constants of fdlibm (Sun Microsystems, 1993): ln 2 as the sum of two numbers, and coefficients of
# the approximations of log(1 + f) and arcsin(x).
LN2_HIGH = 6.93147180369123816490e-01
LN2_LOW = 1.90821492927058770002e-10
LOG_COEFFICIENTS = (
    6.666666666666735130e-01,
    3.999999999940941908e-01,
    2.857142874366239149e-01,
    2.222219843214978396e-01,
    1.818357216161805012e-01,
    1.531383769920937332e-01,
    1.479819860511658591e-01,
)
ARCSIN_COEFFICIENTS = (
    1.66666666666666657415e-01,
    -3.25565818622400915405e-01,
    2.01212532134862925881e-01,
    -4.00555345006794114027e-02,
    7.91534994289814532176e-04,
    3.47933107596021167570e-05,
)
ARCSIN_DIVISOR = (
    1.0,
    -2.40339491173441421878e00,
    2.02094576023350569471e00,
    -6.88283971605453293030e-01,
    7.70381505559019352791e-02,
)


def _in_blocks(function: Callable[[Floats], Floats]) -> Callable[[Any], Any]:
    """Decorate a `function` of a block [n <= BLOCK_NUMBERS], so that it takes a number or an array
    of any shape, and returns the same."""

    @functools.wraps(function)
    def function_of_any(x: Any) -> Any:
        x = np.asarray(x, np.float64)
        result = np.empty(x.shape)
        inputs, outputs = x.reshape(-1), result.reshape(-1)
        with np.errstate(all="ignore"):
            for start in range(0, len(inputs), BLOCK_NUMBERS):
                block = slice(start, start + BLOCK_NUMBERS)
                outputs[block] = function(inputs[block])
        return result[()]  # a number if `x` is one

    return function_of_any


def power(x: Any, exponent: float) -> Any:
    """Return x^exponent for a number >= 0 or an array of them. 0^0 is 1.

    If the exponent is a multiple of 1/2 up to 8, the result is a product, with one square root if
    needed.
    """
    x = np.asarray(x, np.float64)
    if exponent == 0:
        return np.ones_like(x)[()]
    doubled = 2.0 * exponent
    if not (doubled.is_integer() and 0 < doubled <= 16):
        return exp(exponent * log(x))
    is_whole = doubled % 2 == 0
    result = x if is_whole else np.sqrt(x)
    for _ in range(int(doubled - 1) // 2):
        result = result * x
    return result


def _table_for_exp() -> Floats:
    """Return 2^(j / 2^12) for j = 0..2^12 - 1, correctly rounded.

    The table is refined `TABLE_BITS` times, with whole numbers of 120 binary places. Each time it
    gets twice as many entries, by a root of the ratio of neighbours.
    """
    one = 1 << 120  # the number 1
    ratio = 2 * one
    table = [one]
    for _ in range(TABLE_BITS):
        ratio = math.isqrt(ratio * one)
        finer = []
        for entry in table:
            finer += [entry, entry * ratio // one]
        table = finer
    return np.array([entry / one for entry in table])


TABLE_FOR_EXP = _table_for_exp()


@_in_blocks
def exp(x: Floats) -> Floats:
    """Return e^x, computed as 2^(k / 2^12) e^r with |r| <= ln 2 / 2^13."""
    # Between these bounds, neither the result nor 2^k is subnormal or infinite.
    is_ordinary = x.min() > -708 and x.max() < 709
    if not is_ordinary:
        x = np.clip(x, -746.0, 710.0)  # outside, the result is 0 or infinity all the same
    # 1. k, as floats in `steps`, and r
    steps = np.rint(x * (2**TABLE_BITS / LN2))
    r = x - steps * STEP_HIGH
    r -= steps * STEP_LOW
    # 2. e^r - 1 by Horner's rule
    result: Floats = r * (1 / 6)
    for coefficient in (1 / 2, 1.0):
        result += coefficient
        result *= r
    # 3. Times 2^(fractional part of k / 2^12) from the table: e^r f = (e^r - 1) f + f
    k = steps.astype(np.int64)
    factor = TABLE_FOR_EXP[k & (2**TABLE_BITS - 1)]
    result *= factor
    result += factor
    # 4. Times 2^(whole part of k / 2^12)
    k >>= TABLE_BITS
    if is_ordinary:
        k <<= 52  # the first bit of the exponent of a float64
        bits = result.view(np.int64)
        bits += k
        return result
    # In two factors, because the power itself may overflow although the result does not.
    half = k >> 1
    result *= _power_of_two(half)
    result *= _power_of_two(k - half)
    return result


def _power_of_two(n: Ints) -> Floats:
    """Return 2^n, made of its bits: the exponent n + 1023 at bit 52, and a fraction of 0."""
    return ((n + 1023) << 52).view(np.float64)


@_in_blocks
def log(x: Floats) -> Floats:
    """Return the natural logarithm; -inf for 0, nan below 0.

    It is k ln 2 + log(1 + f), where x = 2^k (1 + f) and 1 + f lies between the roots of 1/2 and 2.
    As in fdlibm, with s = f / (2 + f), h = f^2 / 2 and a remainder R that is a polynomial in s^2,
    log(1 + f) = f - (h - s (h + R)).
    """
    mantissa, exponent = np.frexp(x)
    is_low = mantissa < math.sqrt(0.5)
    f = np.where(is_low, 2 * mantissa, mantissa) - 1
    k = (exponent - is_low).astype(np.float64)
    s = f / (2 + f)
    h = 0.5 * f * f
    remainder = _polynomial(s * s, LOG_COEFFICIENTS) * (s * s)
    small_terms = s * (h + remainder) + k * LN2_LOW
    result = k * LN2_HIGH - ((h - small_terms) - f)
    result = np.where(x < 0, np.nan, result)
    result = np.where(x == 0, -np.inf, result)
    return np.where(np.isposinf(x), x, result)


@_in_blocks
def arccos(x: Floats) -> Floats:
    """Return the angle in radians, of `x` in [-1, 1].

    It is pi / 2 - arcsin(x) for |x| <= 1/2. For larger x it is 2 arcsin(root of (1 - |x|) / 2), and
    for smaller x pi minus that.
    """
    size = np.abs(x)
    is_middle = size <= 0.5
    square = np.where(is_middle, x * x, (1 - size) / 2)
    argument = np.where(is_middle, x, np.sqrt(square))
    rational = square * _polynomial(square, ARCSIN_COEFFICIENTS)
    arcsin = argument + argument * (rational / _polynomial(square, ARCSIN_DIVISOR))
    outer = np.where(x > 0, 2 * arcsin, np.pi - 2 * arcsin)
    return np.where(is_middle, np.pi / 2 - arcsin, outer)


def _polynomial(x: Floats, coefficients: tuple[float, ...]) -> Floats:
    """Return sum_i coefficients_i x^i, by Horner's rule."""
    result = np.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        result = result * x + coefficient
    return result


def normal(rng: np.random.Generator, count: int) -> Floats:
    """Return standard normal numbers [count] by Marsaglia's polar method.

    NumPy's own normal numbers depend on the C library's logarithm.
    """
    numbers = np.empty(0)
    while len(numbers) < count:
        # Each random point of a square that lies inside the unit circle gives two numbers.
        points = 2 * rng.random((2, count - len(numbers))) - 1
        squares = points[0] * points[0] + points[1] * points[1]
        is_inside = (squares > 0) & (squares < 1)
        points = points[:, is_inside]
        squares = squares[is_inside]
        pairs = points * np.sqrt(-2 * log(squares) / squares)
        numbers = np.concatenate([numbers, pairs.ravel()])
    return numbers[:count]


def has_fixed_order(values: Tensor) -> bool:
    """Return whether fedsim itself fixes the order in which `values` are added.

    It does so for float32 and float64 on a CPU, by means of NumPy. Otherwise torch adds.
    """
    return not values.is_cuda and values.dtype in (torch.float32, torch.float64)


def weighted_sum(rows: Tensor, weights: Tensor) -> Tensor:
    """Return sum_k weights_k rows_k [...] of `rows` [K, ...] and `weights` [K], of the same type.

    On a CPU, each product is rounded and then added to the sum of the earlier ones. There is one
    exception: NumPy adds a block of a single column in pairs, in an order that depends only on K.
    """
    flat = rows.reshape(len(rows), -1)
    if not has_fixed_order(rows):
        return (weights @ flat).view(rows.shape[1:])
    result = torch.empty_like(flat[0])
    column = weights.numpy()[:, None]
    inputs, outputs = flat.numpy(), result.numpy()
    for start in range(0, len(result), BLOCK_COLUMNS):
        block = slice(start, start + BLOCK_COLUMNS)
        np.add.reduce(inputs[:, block] * column, axis=0, out=outputs[block])
    return result.view(rows.shape[1:])


def mean_row(rows: Tensor) -> Tensor:
    """Return the mean [...] of `rows` [K, ...], which are added one after another."""
    if not has_fixed_order(rows):
        return rows.mean(0)
    return torch.from_numpy(np.asarray(rows.numpy().mean(0)))


def row_sums(rows: Tensor) -> Tensor:
    """Return the sum [K] of each row of `rows` [K, D].

    If rows are contiguous in memory, NumPy adds the numbers of a row in pairs, in an order that
    depends only on D. In other layouts it adds in another order.
    """
    if not has_fixed_order(rows):
        return rows.sum(1)
    return torch.from_numpy(np.add.reduce(rows.numpy(), axis=1))


def length(values: Tensor) -> Tensor:
    """Return the Euclidean norm of all `values`, computed in float64 on a CPU."""
    if not has_fixed_order(values):
        return values.norm()
    return row_sums(values.double().square()[None])[0].sqrt()


def tensor_power(x: Tensor, exponent: float) -> Tensor:
    """Return x^exponent for a tensor of numbers >= 0."""
    if not has_fixed_order(x):
        return x.pow(exponent)
    return torch.from_numpy(np.asarray(power(x.numpy(), exponent))).to(x.dtype)


def log_softmax(logits: Tensor) -> Tensor:
    """Return log-probabilities [n, C] of `logits` [n, C], in float64."""
    if not has_fixed_order(logits):
        return F.log_softmax(logits.double(), dim=1)
    result = np.empty(logits.shape)
    for start in range(0, len(logits), BLOCK_SAMPLES):
        block = slice(start, start + BLOCK_SAMPLES)
        # One row for each class, so that all samples are added class by class.
        shifted = np.ascontiguousarray(logits[block].T.double().numpy())
        with np.errstate(invalid="ignore"):
            shifted -= shifted.max(0)
            sums = np.add.reduce(exp(shifted), axis=0)
            result[block] = (shifted - log(sums)).T
    return torch.from_numpy(result)
