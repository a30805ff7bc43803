"""Small values of the core: positions by client in one array, the highest of many, whole shares of
a count."""

import numpy as np
import pytest

from fedsim.core.rounding import ceil, floor
from fedsim.core.types import ClientPositions, positions_of, sizes_of
from fedsim.selectors.base import leading

LISTS = [np.array(own, np.int64) for own in ([4, 1], [], [7], [2, 9, 3], [])]


def test_one_array_is_a_list_of_its_parts() -> None:
    both = ClientPositions.of(LISTS)
    assert ClientPositions.of(both) is both
    assert (
        [own.tolist() for own in both]
        == [own.tolist() for own in LISTS]
        == [both[i].tolist() for i in range(5)]
    )
    assert [own.tolist() for own in both[1:4]] == [[], [7], [2, 9, 3]]
    assert sizes_of(both).tolist() == sizes_of(LISTS).tolist() == [2, 0, 1, 3, 0]
    assert both[-2].tolist() == [2, 9, 3]
    with pytest.raises(IndexError):
        both[5]


@pytest.mark.parametrize("ids", [[3, 0, 1], [], [0, 1, 2, 3, 4], [4], [2, 2]])
def test_rows_come_in_the_order_asked_for(ids: list[int]) -> None:
    for arrays in (LISTS, ClientPositions.of(LISTS)):
        assert [own.tolist() for own in positions_of(arrays, np.array(ids, np.int64))] == [
            LISTS[i].tolist() for i in ids
        ]


def test_each_is_cut_at_its_own_length() -> None:
    head, rest = ClientPositions.of(LISTS).first(np.array([1, 0, 1, 2, 0]))
    assert [own.tolist() for own in head] == [[4], [], [7], [2, 9], []]
    assert [own.tolist() for own in rest] == [[1], [], [], [3], []]


@pytest.mark.parametrize("count", [0, 1, 3, 40, 50, 60])
def test_the_leading_are_those_of_a_stable_sort(count: int) -> None:
    values = np.random.default_rng(count).integers(0, 9, 50).astype(float)
    values[7] = -np.inf
    assert leading(values, count).tolist() == np.argsort(-values, kind="stable")[:count].tolist()


@pytest.mark.parametrize(
    ("value", "low", "high"),
    [
        (0.29 * 100, 29, 29),
        (1.1 * 100 / 10, 11, 11),
        (7.5, 7, 8),
        (0.0, 0, 0),
        (7 - 1e-6, 6, 7),
        (7 + 1e-6, 7, 8),
    ],
)
def test_a_hair_beside_a_whole_number_is_that_number(value: float, low: int, high: int) -> None:
    assert (floor(value), ceil(value)) == (low, high)
