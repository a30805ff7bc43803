"""Rounding of products that floating-point arithmetic misses by a hair."""

import math

TOLERANCE = 1e-9
"""Products of shares and counts miss a whole number by less than this."""


def floor(value: float) -> int:
    """Return the largest integer <= `value` + 1e-9: floor(0.29 * 100) is 29."""
    return math.floor(value + TOLERANCE)


def ceil(value: float) -> int:
    """Return the smallest integer >= `value` - 1e-9: ceil(1.1 * 100 / 10) is 11."""
    return math.ceil(value - TOLERANCE)
