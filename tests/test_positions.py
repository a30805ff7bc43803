"""Positions by client in one array, the highest of many values, and rounding near whole numbers."""

import numpy as np
import pytest

from fedsim.core.rounding import ceil, floor
from fedsim.core.types import ClientPositions, positions_of, sizes_of
from fedsim.selectors.base import highest, leading

LISTS = [[4, 1], [], [7], [2, 9, 3], []]
ARRAYS = [np.array(positions, np.int64) for positions in LISTS]
POSITIONS = ClientPositions.of(ARRAYS)


def as_lists(arrays: object) -> list[list[int]]:
    return [array.tolist() for array in arrays]  # type: ignore[attr-defined]


def test_positions_are_the_arrays_that_they_were_made_of() -> None:
    assert as_lists(POSITIONS) == LISTS
    assert as_lists(POSITIONS[i] for i in range(5)) == LISTS
    assert as_lists(POSITIONS[1:4]) == LISTS[1:4]
    assert POSITIONS[-2].tolist() == LISTS[-2]
    with pytest.raises(IndexError):
        POSITIONS[5]


def test_positions_are_not_copied_again() -> None:
    assert ClientPositions.of(POSITIONS) is POSITIONS


@pytest.mark.parametrize("arrays", [ARRAYS, POSITIONS], ids=["list", "positions"])
def test_sizes(arrays: ClientPositions) -> None:
    assert sizes_of(arrays).tolist() == [2, 0, 1, 3, 0]


@pytest.mark.parametrize("arrays", [ARRAYS, POSITIONS], ids=["list", "positions"])
@pytest.mark.parametrize("ids", [[3, 0, 1], [], [0, 1, 2, 3, 4], [4], [2, 2]])
def test_clients_come_in_the_requested_order(arrays: ClientPositions, ids: list[int]) -> None:
    assert as_lists(positions_of(arrays, np.array(ids, np.int64))) == [LISTS[i] for i in ids]


def test_each_client_is_split_at_its_own_count() -> None:
    first, rest = POSITIONS.split(np.array([1, 0, 1, 2, 0]))
    assert as_lists(first) == [[4], [], [7], [2, 9], []]
    assert as_lists(rest) == [[1], [], [], [3], []]


@pytest.mark.parametrize("count", [0, 1, 3, 40, 50, 60])
def test_the_leading_positions_are_those_of_a_stable_sort(count: int) -> None:
    values = np.random.default_rng(count).integers(0, 9, 50).astype(float)
    values[7] = -np.inf
    expected = np.argsort(-values, kind="stable")[:count]
    assert leading(values, count).tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint64, np.int64, np.float32, bool])
def test_scores_of_every_type_rank_by_their_values(dtype: type) -> None:
    """The negative of an unsigned number is a large one, and of a boolean an error."""
    scores = np.array([0, 1, 2, 0]).astype(dtype)
    by_value = [1, 2] if dtype is bool else [2, 1]
    assert leading(scores, 2).tolist() == by_value
    positions = highest(scores, 2, np.random.default_rng(0))
    assert scores[positions].tolist() == scores[by_value].tolist()


ROUNDED = [
    (0.29 * 100, 29, 29),
    (1.1 * 100 / 10, 11, 11),
    (7.5, 7, 8),
    (0.0, 0, 0),
    (7 - 1e-6, 6, 7),
    (7 + 1e-6, 7, 8),
]


@pytest.mark.parametrize(("value", "low", "high"), ROUNDED)
def test_a_value_within_a_billionth_of_a_whole_number_is_that_number(
    value: float, low: int, high: int
) -> None:
    assert floor(value) == low
    assert ceil(value) == high
