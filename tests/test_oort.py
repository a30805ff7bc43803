from typing import Any

import numpy as np
import pytest

from fedsim.selectors.oort import Oort
from fedsim.server import Server
from tests.toys import toy_cohort, toy_door, toy_population

SERVER: Server = None  # type: ignore[assignment]


def oort(n: int = 10, k: int = 4, sizes: list[int] | None = None, **more: Any) -> Oort:
    values: dict[str, Any] = {
        **{"exploration": 0.9, "exploration_decay": 0.98, "exploration_floor": 0.2, "cutoff": 0.95, "clip": 0.95},
        **{"prior": "size", "penalty": 2.0, "percentile": 50.0, "pacer_window": 2, "pacer_step": 10.0},
    }
    return Oort(toy_population(sizes or [1] * n, k, 100), **(values | more))


def seen(selector: Oort, utility: list[float], last: list[int]) -> None:
    selector.utility[:] = utility
    selector.last_round[:] = last


@pytest.mark.parametrize(("losses", "expected"), [((1, 1, 1, 1), 4), ((2, 0, 0, 0), 4), ((2, 2), 4)])
def test_utility_by_hand(losses: tuple[float, ...], expected: float) -> None:
    selector = oort()
    rms = np.sqrt(np.mean(np.square(losses)))
    selector.observe(1, toy_cohort([3], [len(losses)], [[0, 0]], rms_loss=np.array([rms])), SERVER)
    assert selector.utility[3] == pytest.approx(expected)
    assert selector.last_round[3] == 1


def test_the_bonus_of_the_stale_by_hand() -> None:
    selector = oort(3, 1)
    seen(selector, [1, 1, 1], [1, 5, 9])
    assert selector.scores(np.arange(3), 10) == pytest.approx([0.47985, 0.21460, 0.15995], abs=1e-5)


def test_utilities_are_clipped_and_scaled() -> None:
    selector = oort(5, 1, clip=0.5)
    seen(selector, [0, 1, 2, 50, 100], [1] * 5)
    assert selector.scores(np.arange(5), 1) == pytest.approx([0, 0.5, 1, 1, 1])


def test_slow_clients_are_punished_only_where_durations_differ() -> None:
    selector = oort(3, 1)
    seen(selector, [1, 1, 1], [9, 9, 9])
    base = selector.scores(np.arange(3), 10)
    selector.durations[:] = [5, 5, 5]
    assert selector.scores(np.arange(3), 10) == pytest.approx(base)
    selector.durations[:] = [5, 10, 5]
    assert selector.scores(np.arange(3), 10) / base == pytest.approx([1, 0.25, 1])


def test_round_1_explores_only_and_prefers_large_clients() -> None:
    sizes = [1] * 50 + [100] * 10
    counts = np.zeros(60)
    for s in range(200):
        selector = oort(k=2, sizes=sizes)
        counts[selector.select(1, toy_door(sizes, selector.needs, cohort_size=2), np.random.default_rng(s)).ids] += 1
    assert counts[50:].sum() == 400  # the pool is the ten of highest prior
    assert (counts[50:] > 0).all()


def test_exploitation_takes_whoever_is_near_the_border_in_proportion_to_score() -> None:
    counts = np.zeros(10)
    for s in range(300):
        selector = oort(k=2, exploration=0.0, exploration_floor=0.0, cutoff=0.5)
        seen(selector, [10, 9, 6, 5.9, 1, 0, 0, 0, 0, 0], [1] * 10)
        counts[selector.select(1, toy_door([1] * 10, selector.needs, cohort_size=2), np.random.default_rng(s)).ids] += 1
    assert counts[4:].sum() == 0
    assert counts[0] > counts[3] > 0


def test_when_everybody_has_been_seen_random_draws_fill_up() -> None:
    selector = oort(k=4, exploration=0.5, exploration_floor=0.5)
    seen(selector, list(range(10)), [1] * 10)
    ids = selector.select(2, toy_door([1] * 10, selector.needs, cohort_size=4), np.random.default_rng(0)).ids
    assert len(ids) == 4
    assert {9} <= set(ids.tolist()) or {8} <= set(ids.tolist())


@pytest.mark.parametrize(("now", "expected"), [(1.0, 60), (1.5, 50), (6.0, 40)])
def test_the_pacer(now: float, expected: float) -> None:
    selector = oort()
    selector.gained = [1.0, 1.0, now, now]
    assert selector._paced() == expected
    selector.gained = [1.0, 1.0, now]
    assert selector._paced() == 50
