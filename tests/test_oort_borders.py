"""Where Oort's shares and its pacer change."""

from typing import Any

import numpy as np
import pytest

from fedsim.core.errors import ConfigError
from fedsim.selectors.oort import Oort
from tests.test_oort import SERVER, oort
from tests.toys import toy_clients, toy_cohort


def test_the_share_of_the_new_falls_by_the_decay_from_round_2_on_down_to_the_floor() -> None:
    """Shares .9, .45, .225, .2 of ten leave 1, 5, 7 and 8 to exploit, while anybody is left to explore."""
    selector = oort(20, 10, exploration_decay=0.5)
    everybody, nobody = np.arange(20), np.arange(0)
    assert [selector._num_exploited(t, 10, everybody) for t in (1, 2, 3, 4, 50)] == [1, 5, 7, 8, 8]
    selector.last_round[:] = 1
    assert selector._num_exploited(1, 10, nobody) == 10


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


def percentiles(selector: Oort, num_rounds: int, late: tuple[int, ...] = (), away: tuple[int, ...] = ()) -> list[float]:
    """Those by which the clients of rounds 1 to `num_rounds` were selected; every utility is that of five samples with
    losses of 1, nothing arrives in the rounds `late`, and nobody can be asked in the rounds `away`."""
    sizes, found = selector.population.sizes.tolist(), []
    for t in range(1, num_rounds + 1):
        if t in away:
            continue
        clients = toy_clients(sizes, selector.needs, round=t, cohort_size=selector.population.cohort_size)
        ids = selector.select(t, clients, np.random.default_rng(t)).ids.tolist()
        found.append(selector.percentile)
        if t not in late:
            selector.observe(t, toy_cohort(ids, [sizes[i] for i in ids], [[0, 0]] * len(ids)), SERVER)
    return found


@pytest.mark.parametrize("first_round", ["prior", "random"])
def test_the_pacer_sees_that_utility_is_flat_while_ever_more_clients_are_exploited(first_round: str) -> None:
    """Nobody is exploited in round 1: a mean of 0, and of 5 ever after. After 40 rounds 95 is compared with 100."""
    values: dict[str, Any] = {"pacer_window": 20, "percentile": 30.0, "first_round": first_round}
    found = percentiles(oort(1000, 10, sizes=[5] * 1000, **values), 121)
    assert (found[39], *found[40::20]) == (30, 40, 50, 60, 70, 80)


def test_a_round_in_which_nothing_arrives_gains_nothing_and_counts() -> None:
    """Windows of two rounds: gains 0 and 5, then 5 and 5; a second time without those of rounds 2 and 3."""
    values: dict[str, Any] = {"exploration": 0.5, "exploration_floor": 0.5, "pacer_window": 2}
    for late, gained, now in (((), [0, 5, 5, 5], 50), ((2, 3), [0, 0, 0, 5], 40)):
        selector = oort(40, 4, sizes=[5] * 40, **values)
        assert percentiles(selector, 5, late)[3:] == [50, now]
        assert selector.gained == gained
    assert selector.gain == 5
    assert {"gained", "gain"} <= set(selector.state)


@pytest.mark.parametrize("away", [(2, 3), (1, 2, 3)])
def test_a_round_in_which_nobody_can_be_reached_gains_nothing_and_counts(away: tuple[int, ...]) -> None:
    """As above; the second window ends with round 4, whenever the first client was there."""
    values: dict[str, Any] = {"exploration": 0.5, "exploration_floor": 0.5, "pacer_window": 2}
    selector = oort(40, 4, sizes=[5] * 40, **values)
    found = percentiles(selector, 6, away=away)
    if len(away) == 2:  # gains 0 and 0, then 0 and 5
        assert selector.gained == [0, 0, 0, 5, 5]
        assert found[-2:] == [40, 40]
    else:  # nobody had been seen when round 4 came
        assert selector.gained == [0, 0, 0, 0, 5]
        assert found[-2:] == [60, 60]


def test_a_pacer_step_beyond_all_percentiles_is_refused() -> None:
    """A leap would have set the percentile to the step, which is none beyond 100."""
    with pytest.raises(ConfigError, match=r"pacer_step=150\.0: must be at most 100"):
        oort(pacer_step=150.0)
    selector = oort(6, 2, pacer_step=100.0, pacer_window=1)
    selector.gained = [1.0, 10.0]
    assert selector._paced_percentile() == 100


@pytest.mark.parametrize(
    "key", ["exploration", "exploration_decay", "exploration_floor", "cutoff", "clip", "percentile"]
)
def test_shares_lie_between_none_and_all(key: str) -> None:
    most = 100.0 if key == "percentile" else 1.0
    for value in (0.0, most):
        oort(**{key: value})
    for value in (-0.5, most + 0.5):
        with pytest.raises(ConfigError, match=f"{key}={value}"):
            oort(**{key: value})


def test_the_least_window_and_penalty_are_taken() -> None:
    oort(pacer_window=1, penalty=0.0, pacer_step=100.0)
    for mistake in ({"pacer_window": 0}, {"penalty": -0.5}, {"pacer_step": 0.0}, {"pacer_step": 100.5}):
        with pytest.raises(ConfigError):
            oort(**mistake)


def test_the_pool_reaches_a_share_of_the_last_utility_that_has_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    selector = oort(4, 2, cutoff=0.95, cutoff_rank="last")
    selector.last_round[:] = 1
    monkeypatch.setattr(selector, "scores", lambda ids, t: np.array([10.0, 6.0, 5.8, 5.6]))  # .95 x 6 = 5.7
    picked = [selector._exploit(np.arange(4), 2, 2, np.random.default_rng(seed)) for seed in range(40)]
    assert set(np.concatenate(picked).tolist()) == {0, 1, 2}
