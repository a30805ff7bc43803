"""Arithmetic with the same result on every CPU: elementary functions, sums in a fixed order, and
log-probabilities. On a GPU, torch's own functions are used.

NumPy's and torch's functions differ in the last bit between processors and between versions of
their libraries, and a run would then differ after some rounds. The functions here only use
operations that IEEE 754 rounds in one way (+, -, x, /, square root), in a fixed order.

exp, log, arccos and powers in float64 are within 2 units in the last place (powers: 2 for each unit
of the logarithm's size).
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
"""Elements that are worked on at once, so that all intermediate values stay in the cache."""
TABLE_BITS = 12
"""`exp` reads 2^(j / 2^12) from a table of 2^12 entries."""
LN2 = 0.6931471805599453
STEP_HIGH = round(LN2 * 2**28) / 2**40
"""ln 2 / 2^12 in 28 bits, so that its multiples are exact."""
STEP_LOW = 4.444912105723013e-13
"""The difference of ln 2 / 2^12 and `STEP_HIGH`."""
# from fdlibm (Sun Microsystems, 1993): ln 2 in two parts, log(1 + f) and arcsin(x)
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
    """Decorate a `function` of a block [n <= BLOCK], so that it takes a number or any array."""

    @functools.wraps(function)
    def of_all(x: Any) -> Any:
        x = np.asarray(x, np.float64)
        result = np.empty(x.shape)
        inputs, outputs = x.reshape(-1), result.reshape(-1)
        with np.errstate(all="ignore"):
            for start in range(0, len(inputs), BLOCK):
                outputs[start : start + BLOCK] = function(inputs[start : start + BLOCK])
        return result[()]  # a number if `x` is one

    return of_all


def power(x: Any, exponent: float) -> Any:
    """Return x^exponent for a number >= 0, or an array of them. x^0 is 1, also for 0.

    Half-integer exponents up to 8 are computed by products and a root.
    """
    x = np.asarray(x, np.float64)
    if exponent == 0:
        return np.ones_like(x)[()]
    doubled = 2.0 * exponent
    if not (doubled.is_integer() and 0 < doubled <= 16):
        return exp(exponent * log(x))
    result = np.sqrt(x) if doubled % 2 else x
    for _ in range(int(doubled - 1) // 2):
        result = result * x
    return result


def _powers_of_two() -> Floats:
    """Return 2^(j / 2^12) for j = 0..2^12 - 1, correctly rounded, from roots of roots of 2 in 120
    bits."""
    one = 1 << 120  # stands for the number 1 in integers of 120 binary places
    root = 2 * one
    powers = [one]
    for _ in range(TABLE_BITS):
        root = math.isqrt(root * one)
        # Each power, and its product with the new root, which lies halfway to the next power.
        finer = []
        for value in powers:
            finer += [value, value * root // one]
        powers = finer
    return np.array([value / one for value in powers])


POWERS_OF_TWO = _powers_of_two()


@_in_blocks
def exp(x: Floats) -> Floats:
    """Return e^x, computed as 2^(k / 2^12) e^r with |r| <= ln 2 / 2^13."""
    # between these bounds, neither the result nor 2^k is subnormal or infinite
    is_ordinary = x.min() > -708 and x.max() < 709
    if not is_ordinary:
        x = np.clip(x, -746.0, 710.0)  # beyond these, the result is 0 or infinity all the same
    # 1. k and r
    steps = np.rint(x * (2**TABLE_BITS / LN2))
    r = x - steps * STEP_HIGH
    r -= steps * STEP_LOW
    # 2. e^r - 1 by Horner's rule
    result: Floats = r * (1 / 6)
    for coefficient in (1 / 2, 1.0):
        result += coefficient
        result *= r
    # 3. times the fraction's power of 2 from the table
    k = steps.astype(np.int64)
    fraction = POWERS_OF_TWO[k & (2**TABLE_BITS - 1)]
    result *= fraction
    result += fraction
    # 4. times the whole power of 2, which is added to the exponent's bits
    k >>= TABLE_BITS
    if is_ordinary:
        k <<= 52
        k += result.view(np.int64)
        result[:] = k.view(np.float64)
        return result
    half = k >> 1  # in two factors: 2^k itself may overflow although the result does not
    result *= _power_of_two(half)
    result *= _power_of_two(k - half)
    return result


def _power_of_two(n: Ints) -> Floats:
    """Return 2^n, built from its bits: the biased exponent n + 1023, and a fraction of 0."""
    return ((n + 1023) << 52).view(np.float64)


@_in_blocks
def log(x: Floats) -> Floats:
    """Return the natural logarithm; -inf for 0, nan below 0.

    It is k ln 2 + log(1 + f), where x = 2^k (1 + f) and 1 + f lies between the roots of 1/2 and 2.
    log(1 + f) is fdlibm's series in s = f / (2 + f).
    """
    mantissa, exponent = np.frexp(x)
    is_low = mantissa < math.sqrt(0.5)
    f = np.where(is_low, 2 * mantissa, mantissa) - 1
    k = (exponent - is_low).astype(np.float64)
    s = f / (2 + f)
    h = 0.5 * f * f
    rest = _polynomial(s * s, LOG_COEFFICIENTS) * (s * s)
    result = k * LN2_HIGH - ((h - (s * (h + rest) + k * LN2_LOW)) - f)
    result = np.where(x < 0, np.nan, result)
    result = np.where(x == 0, -np.inf, result)
    return np.where(np.isposinf(x), x, result)


@_in_blocks
def arccos(x: Floats) -> Floats:
    """Return the angle in radians.

    It is pi / 2 - arcsin(x) for |x| <= 1/2, otherwise twice the arcsin of the root of (1 - |x|) /
    2.
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


def has_fixed_order(values: Tensor) -> bool:
    """Return whether fedsim itself fixes the order of sums of `values`: real ones on a CPU."""
    return not values.is_cuda and values.dtype in (torch.float32, torch.float64)


BLOCK_COLUMNS = 2**14
"""Columns that are worked on at once, so that they stay in the cache."""


def weighted_sum(rows: Tensor, weights: Tensor) -> Tensor:
    """Return sum_k weights_k rows_k [...] of `rows` [K, ...] and `weights` [K], of one type.

    On a CPU, each product is rounded and then added to the sum of the earlier ones. NumPy adds a
    single column, or a last block of one column, in pairs, in an order that depends only on K.
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
    """Return the mean [...] of `rows` [K, ...], added one after another."""
    return (
        torch.from_numpy(np.asarray(rows.numpy().mean(0)))
        if has_fixed_order(rows)
        else rows.mean(0)
    )


def row_sums(rows: Tensor) -> Tensor:
    """Return the sum [K] of each row of `rows` [K, D].

    If rows are contiguous, NumPy adds the numbers of a row in pairs, in an order that depends only
    on D. For other layouts of the memory the order is another one.
    """
    return (
        torch.from_numpy(np.add.reduce(rows.numpy(), axis=1))
        if has_fixed_order(rows)
        else rows.sum(1)
    )


def length(values: Tensor) -> Tensor:
    """Return the Euclidean norm, on a CPU in float64."""
    if not has_fixed_order(values):
        return values.norm()
    return row_sums(values.double().square()[None])[0].sqrt()


def tensor_power(x: Tensor, exponent: float) -> Tensor:
    """Return x^exponent for a tensor of numbers >= 0."""
    if not has_fixed_order(x):
        return x.pow(exponent)
    return torch.from_numpy(np.asarray(power(x.numpy(), exponent))).to(x.dtype)


def normal(rng: np.random.Generator, count: int) -> Floats:
    """Return standard normal numbers [count] by Marsaglia's polar method.

    NumPy's own depend on the C library's logarithm.
    """
    numbers = np.empty(0)
    while len(numbers) < count:
        # Random points of a square; those inside the unit circle give two numbers each.
        points = 2 * rng.random((2, count - len(numbers))) - 1
        squares = points[0] * points[0] + points[1] * points[1]
        is_inside = (squares > 0) & (squares < 1)
        points = points[:, is_inside]
        squares = squares[is_inside]
        pairs = points * np.sqrt(-2 * log(squares) / squares)
        numbers = np.concatenate([numbers, pairs.ravel()])
    return numbers[:count]


SAMPLES_AT_ONCE = 1024
"""Samples that are worked on at once, so that they stay in the cache."""


def log_softmax(logits: Tensor) -> Tensor:
    """Return log-probabilities [n, C] of `logits` [n, C], in float64."""
    if not has_fixed_order(logits):
        return F.log_softmax(logits.double(), dim=1)
    result = np.empty(logits.shape)
    for start in range(0, len(logits), SAMPLES_AT_ONCE):
        block = slice(start, start + SAMPLES_AT_ONCE)
        shifted = np.ascontiguousarray(logits[block].T.double().numpy())
        with np.errstate(invalid="ignore"):
            shifted -= shifted.max(0)
            result[block] = (shifted - log(np.add.reduce(exp(shifted), axis=0))).T
    return torch.from_numpy(result)
