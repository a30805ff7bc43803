"""Whole numbers from a share of a count, whose product floating point can leave a hair beside an integer."""

import math

TOLERANCE = 1e-9


def floor(value: float) -> int:
    """The integer below `value`, or `value` where it lies within 1e-9 below an integer: floor(.29 * 100) is 29."""
    return math.floor(value + TOLERANCE)


def ceil(value: float) -> int:
    """The integer above `value`, or `value` where it lies within 1e-9 above one: ceil(1.1 * 100 / 10) is 11."""
    return math.ceil(value - TOLERANCE)
