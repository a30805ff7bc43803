from typing import Any

import numpy as np
import pytest

from fedsim.core.errors import ConfigError
from fedsim.selectors.oort import Oort
from tests.toys import picked, toy_cohort, toy_population

SERVER: Any = None


def oort(n: int = 10, k: int = 4, sizes: list[int] | None = None, **more: Any) -> Oort:
    values: dict[str, Any] = {
        **{"exploration": 0.9, "exploration_decay": 0.98, "exploration_floor": 0.2, "cutoff": 0.95, "clip": 0.95},
        **{"cutoff_rank": "last", "first_round": "prior"},
        **{"prior": "size", "penalty": 2.0, "percentile": 50.0, "pacer_window": 2, "pacer_step": 10.0},
    }
    return Oort(toy_population(sizes or [1] * n, k, 100), **(values | more))


def seen(selector: Oort, utility: list[float], last: list[int]) -> None:
    selector.utility[:] = utility
    selector.last_round[:] = last


def test_utility_by_hand() -> None:
    selector = oort()
    for losses in ((1, 1, 1, 1), (2, 0, 0, 0), (2, 2)):
        rms = np.sqrt(np.mean(np.square(losses)))
        selector.observe(1, toy_cohort([3], [len(losses)], [[0, 0]], rms_loss=np.array([rms])), SERVER)
        assert selector.utility[3] == pytest.approx(4)
    assert selector.last_round[3] == 1


def test_the_bonus_of_the_stale_by_hand() -> None:
    selector = oort(3, 1)
    seen(selector, [1, 1, 1], [1, 5, 9])
    bonus = selector.scores(np.arange(3), 10) - selector.normalised(np.arange(3))
    assert bonus == pytest.approx([0.47985, 0.21460, 0.15995], abs=1e-5)
    selector.first_round = "random"
    late = selector.scores(np.arange(3), 10) - selector.normalised(np.arange(3))
    assert late == pytest.approx(np.sqrt(0.1 * np.log(9) / np.array([1, 5, 9])))


def test_utilities_are_clipped_and_scaled_by_hand() -> None:
    """Positive values 1, 2, 50, 100: clipped at that of rank 3, l = .999, u = 100; a utility of 0 comes out below 0."""
    selector = oort(5, 1, clip=0.5)
    seen(selector, [0, 1, 2, 50, 100], [1] * 5)
    expected = (np.array([0, 1, 2, 50, 50]) - 0.999) / (100 - 0.999)
    assert selector.normalised(np.arange(5)) == pytest.approx(expected)
    selector = oort(100, 1, clip=0.29)  # .29 of 100 is rank 29 + 1, although the product is 28.999999999999996
    seen(selector, [float(u) for u in range(1, 101)], [1] * 100)
    assert selector.normalised(np.arange(100)).max() == pytest.approx((30 - 0.999) / (100 - 0.999))
    selector = oort(sizes=[10, 10, 1000], k=1)  # the third is unseen, and counts with its prior
    seen(selector, [5, 20, 0], [1, 1, 0])
    assert selector.normalised(np.arange(3)) == pytest.approx((np.array([5, 20]) - 4.995) / (1000 - 4.995))
    selector = oort(20, 1, clip=0.9)  # by an outlier of 100 utilities from 1 to 2 count little: the stale come first
    seen(selector, [1 + i / 18 for i in range(19)] + [100.0], [*range(1, 20), 19])  # the lower, the longer ago
    assert set(np.argsort(-selector.scores(np.arange(20), 20))[:10].tolist()) == set(range(10))


@pytest.mark.parametrize("first_round", ["prior", "random"])
def test_scores_equal_those_of_the_published_rule(first_round: str) -> None:
    """A list-based rewriting of it, over random states."""
    random = np.random.default_rng(0)
    for t in range(2, 60):
        n = int(random.integers(2, 30))
        sizes = random.integers(1, 50, n)
        clip = float(random.choice([0.5, 0.95, 0.98]))
        selector = oort(sizes=sizes.tolist(), k=1, clip=clip, first_round=first_round)
        utility, last = random.exponential(20, n), random.integers(0, t, n)
        seen(selector, utility.tolist(), last.tolist())
        rewards = sorted(float(u) if at else float(size) for u, at, size in zip(utility, last, sizes, strict=True))
        clip, low = rewards[min(int(n * selector.clip), n - 1)], rewards[0] * 0.999
        width = max(rewards[-1] - low, 1e-4)
        now = t if first_round == "prior" else t - 1
        expected = [
            (min(float(u), clip) - low) / width + (0.1 * np.log(now) / at) ** 0.5
            for u, at in zip(utility, last, strict=True)
            if at > 0
        ]
        assert selector.scores(np.arange(n), t) == pytest.approx(expected)


def test_slow_clients_are_punished_only_where_durations_differ() -> None:
    selector = oort(3, 1)
    seen(selector, [1, 1, 1], [9, 9, 9])
    base = selector.scores(np.arange(3), 10)
    selector.durations[:] = [5, 5, 5]
    assert selector.scores(np.arange(3), 10) == pytest.approx(base)
    selector.durations[:] = [5, 10, 5]
    assert selector.scores(np.arange(3), 10) / base == pytest.approx([1, 0.25, 1])


def counted(num_seeds: int, make: Any, round: int = 1) -> np.ndarray:
    """How often each client is selected by what `make` makes, over seeds."""
    counts = np.zeros(make().population.num_clients)
    for seed in range(num_seeds):
        counts[picked(make(), round, seed)] += 1
    return counts


def seen_before(utility: list[float], **values: Any) -> Oort:
    """Clients of a positive utility have been seen in round 1."""
    selector = oort(len(utility), **values)
    seen(selector, utility, [int(u > 0) for u in utility])
    return selector


@pytest.mark.parametrize("first_round", ["prior", "random"])
def test_round_1_prefers_large_clients_or_is_uniform_as_that_of_the_published_driver(first_round: str) -> None:
    counts = counted(300, lambda: oort(k=2, sizes=[1] * 50 + [100] * 10, first_round=first_round))
    if first_round == "prior":
        assert counts[50:].sum() == 600  # the pool is the ten of highest prior
        assert (counts[50:] > 0).all()
    else:
        assert counts[50:].sum() == pytest.approx(100, abs=40)  # 10 of 60


def test_exploitation_takes_whoever_is_near_the_border_in_proportion_to_score() -> None:
    utility = [10.0, 9, 6, 5.9, 1, 1e-9, 1e-9, 1e-9, 1e-9, 1e-9]
    counts = counted(300, lambda: seen_before(utility, k=2, exploration=0.0, exploration_floor=0.0, cutoff=0.5))
    assert counts[4:].sum() == 0
    assert counts[0] > counts[3] > 0


@pytest.mark.parametrize(("cutoff_rank", "drawn"), [("last", [0, 1]), ("next", [0, 1, 2])])
def test_the_cutoff_is_the_score_of_the_last_exploited_or_of_the_one_after_it(
    cutoff_rank: str, drawn: list[int]
) -> None:
    utility = [10.0, 9, 8, 5, 4, 3, 3, 3, 3, 3]
    counts = counted(50, lambda: seen_before(utility, k=2, cutoff=1.0, cutoff_rank=cutoff_rank))
    assert np.flatnonzero(counts).tolist() == drawn


@pytest.mark.parametrize(
    ("utility", "sizes", "always", "possible"),
    [
        ([1.0] * 6 + [90] * 4, [1] * 10, [6, 7, 8, 9], 4),  # everybody has been seen: all are exploited
        ([1.0] * 5 + [90] * 4 + [0], [1] * 9 + [0], [5, 6, 7, 8], 4),  # a client without data is not waited for
        ([1.0] * 7 + [90] * 2 + [0], [1] * 10, [7, 8, 9], 10),  # two exploited, the only new one, and one of the others
    ],
)
def test_exploration_goes_on_while_there_are_unseen_clients(
    utility: list[float], sizes: list[int], always: list[int], possible: int
) -> None:
    found = []
    for seed in range(80):
        selector = seen_before(utility, k=4, sizes=sizes, exploration=0.5, exploration_floor=0.5)
        found.append(set(picked(selector, 2, seed)))
    assert set.intersection(*found) == set(always)
    assert len(set.union(*found)) == possible


def test_the_share_of_the_new_falls_by_the_decay_from_round_2_on_down_to_the_floor() -> None:
    """Shares .9, .45, .225, .2 of ten leave 1, 5, 7 and 8 to exploit, while anybody is left to explore."""
    selector = oort(20, 10, exploration_decay=0.5)
    everybody, nobody = np.arange(20), np.arange(0)
    assert [selector._num_exploited(t, 10, everybody) for t in (1, 2, 3, 4, 50)] == [1, 5, 7, 8, 8]
    selector.last_round[:] = 1
    assert selector._num_exploited(1, 10, nobody) == 10


@pytest.mark.parametrize(
    ("gained", "window", "moved"),
    [
        *(
            ([10.0, now], 1, moved)
            for now, moved in ((10.9, 10), (9.1, 10), (11.5, 0), (8.5, 0), (55.0, 0), (61.0, -10))
        ),
        *(([5.0, 5.0], 2, 0), ([5.0, 5.0, 5.0], 2, 0), ([5.0, 5.0, 4.0, 6.0], 2, 10)),  # it looks once a window
    ],
)
def test_the_pacer_moves_where_gains_stand_still_or_leap(gained: list[float], window: int, moved: float) -> None:
    """After a window that gained 10: within a tenth of it one step up, five times as much away one step down."""
    selector = oort(pacer_window=window)
    selector.gained, selector.gain = gained[:-1], gained[-1]
    selector._pace()
    assert selector.percentile == 50 + moved
    assert (selector.gained, selector.gain) == (gained, 0)


def percentiles(selector: Oort, num_rounds: int, late: tuple[int, ...] = (), away: tuple[int, ...] = ()) -> list[float]:
    """Those by which the clients of rounds 1 to `num_rounds` were selected; every utility is that of five samples with
    losses of 1, nothing arrives in the rounds `late`, and nobody can be asked in the rounds `away`."""
    sizes, found = selector.population.sizes.tolist(), []
    for t in range(1, num_rounds + 1):
        if t in away:
            continue
        ids = picked(selector, t, t)
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


def test_values_out_of_their_range_are_refused() -> None:
    selector = oort(6, 2, pacer_step=100.0, pacer_window=1, penalty=0.0)
    selector.gained, selector.gain = [1.0], 10.0
    selector._pace()
    assert selector.percentile == 100  # a leap sets it to the step
    wrong: dict[str, tuple[Any, ...]] = {"pacer_window": (0,), "penalty": (-0.5,), "pacer_step": (0.0, 100.5)}
    wrong |= {"percentile": (-0.5, 100.5)}
    wrong |= dict.fromkeys(("exploration", "exploration_decay", "exploration_floor", "cutoff", "clip"), (-0.5, 1.5))
    for key, values in wrong.items():
        for value in values:
            with pytest.raises(ConfigError, match=f"{key}={value}: must"):
                oort(**{key: value})


def test_the_pool_reaches_a_share_of_the_last_utility_that_has_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    selector = oort(4, 2, cutoff=0.95, cutoff_rank="last")
    selector.last_round[:] = 1
    monkeypatch.setattr(selector, "scores", lambda ids, t: np.array([10.0, 6.0, 5.8, 5.6]))  # .95 x 6 = 5.7
    picked = [selector._exploit(np.arange(4), 2, 2, np.random.default_rng(seed)) for seed in range(40)]
    assert set(np.concatenate(picked).tolist()) == {0, 1, 2}
