"""Shares of a count as whole numbers, where floating point leaves the product a hair beside an integer."""

import pytest

from fedsim.core.errors import ceil, floor


@pytest.mark.parametrize(
    ("value", "expected"), [(0.29 * 100, 29), (1.1 * 100 / 10, 11), (7.5, 7), (0.0, 0), (7 - 1e-6, 6)]
)
def test_a_floor_with_tolerance(value: float, expected: int) -> None:
    assert floor(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"), [(0.29 * 100, 29), (1.1 * 100 / 10, 11), (7.5, 8), (0.0, 0), (7 + 1e-6, 8)]
)
def test_a_ceiling_with_tolerance(value: float, expected: int) -> None:
    assert ceil(value) == expected
