"""`floor` and `ceil` for products such as a share of clients times their number.

In floating point 0.29 * 100 is 28.999999999999996, and `math.floor` gives 28. The functions of this
file treat a value that misses a whole number by at most `TOLERANCE` as that number.
"""

import math

TOLERANCE = 1e-9
"""Largest distance to a whole number that counts as a rounding error. It is absolute.

It is larger than the error of a share in [0, 1] times a count of up to about a million. It is
smaller than any difference that a user means.
"""


def floor(value: float) -> int:
    """Return the largest integer <= `value` + `TOLERANCE`.

    floor(0.29 * 100) is 29, where `math.floor` gives 28. The result may exceed `value` by up to the
    tolerance.
    """
    return math.floor(value + TOLERANCE)


def ceil(value: float) -> int:
    """Return the smallest integer >= `value` - `TOLERANCE`.

    1.1 * 100 is 110.00000000000001, so ceil(1.1 * 100) is 110, where `math.ceil` gives 111. `value`
    may exceed the result by up to the tolerance.
    """
    return math.ceil(value - TOLERANCE)
