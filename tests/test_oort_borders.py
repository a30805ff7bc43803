"""Where Oort's shares and its pacer change."""

import pytest

from tests.test_oort import oort


def test_the_share_of_the_new_falls_by_the_decay_from_round_2_on_down_to_the_floor() -> None:
    """Shares .9, .45, .225, .2 of ten leave 1, 5, 7 and 8 to exploit, while anybody is left to explore."""
    selector = oort(20, 10, exploration_decay=0.5)
    assert [selector._num_exploited(t, 10) for t in (1, 2, 3, 4, 50)] == [1, 5, 7, 8, 8]
    selector.last_round[:] = 1
    assert selector._num_exploited(1, 10) == 10


@pytest.mark.parametrize(("now", "moved"), [(10.9, 10), (9.1, 10), (11.5, 0), (8.5, 0), (55.0, 0), (61.0, -10)])
def test_the_pacer_moves_where_gains_stand_still_or_leap(now: float, moved: float) -> None:
    """After a window that gained 10: within a tenth of it one step up, five times as much away one step down."""
    selector = oort(pacer_window=1)
    selector.gained = [10.0, now]
    assert selector._paced_percentile() == 50 + moved


def test_the_pacer_looks_once_a_window() -> None:
    selector = oort(pacer_window=2)
    for gained, moved in (([5.0, 5.0], 0), ([5.0, 5.0, 5.0], 0), ([5.0, 5.0, 4.0, 6.0], 10)):
        selector.gained = gained
        assert selector._paced_percentile() == 50 + moved
