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
    selector = oort(sizes=[10, 10, 1000], k=1)  # the third is unseen, and counts with its prior
    seen(selector, [5, 20, 0], [1, 1, 0])
    assert selector.normalised(np.arange(3)) == pytest.approx((np.array([5, 20]) - 4.995) / (1000 - 4.995))


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


def test_round_1_prefers_large_clients_or_is_uniform_as_that_of_the_published_driver() -> None:
    prior, random = (
        counted(300, lambda how=how: oort(k=2, sizes=[1] * 50 + [100] * 10, first_round=how))
        for how in ("prior", "random")
    )
    assert prior[50:].sum() == 600  # the pool is the ten of highest prior
    assert (prior[50:] > 0).all()
    assert random[50:].sum() == pytest.approx(100, abs=40)  # 10 of 60


def test_exploitation_takes_whoever_is_near_the_border_in_proportion_to_score() -> None:
    utility = [10.0, 9, 6, 5.9, 1, 1e-9, 1e-9, 1e-9, 1e-9, 1e-9]
    counts = counted(300, lambda: seen_before(utility, k=2, exploration=0.0, exploration_floor=0.0, cutoff=0.5))
    assert counts[4:].sum() == 0
    assert counts[0] > counts[3] > 0


def test_the_cutoff_is_a_share_of_the_score_of_the_last_exploited_or_of_the_one_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for cutoff_rank, drawn in (("last", [0, 1]), ("next", [0, 1, 2])):
        values = {"k": 2, "cutoff": 1.0, "cutoff_rank": cutoff_rank}
        counts = counted(50, lambda v=values: seen_before([10.0, 9, 8, 5, 4, 3, 3, 3, 3, 3], **v))
        assert np.flatnonzero(counts).tolist() == drawn
    selector = seen_before([1.0] * 4, k=2, cutoff=0.95)
    monkeypatch.setattr(selector, "scores", lambda ids, t: np.array([10.0, 6.0, 5.8, 5.6]))  # .95 x 6 = 5.7
    picks = [selector._exploit(np.arange(4), 2, 2, np.random.default_rng(seed)) for seed in range(40)]
    assert set(np.concatenate(picks).tolist()) == {0, 1, 2}


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


def test_the_pacer_moves_where_gains_stand_still_or_leap() -> None:
    """After a window that gained 10: within a tenth of it one step up, five times as much away one step down."""
    cases = [([10.0, now], 1, moved) for now, moved in ((10.9, 10), (9.1, 10), (11.5, 0), (8.5, 0), (55, 0), (61, -10))]
    cases += [([5.0, 5.0], 2, 0), ([5.0, 5.0, 5.0], 2, 0), ([5.0, 5.0, 4.0, 6.0], 2, 10)]  # it looks once a window
    for gained, window, moved in cases:
        selector = oort(pacer_window=window)
        selector.gained, selector.gain = gained[:-1], gained[-1]
        selector._pace()
        assert (selector.percentile, selector.gained, selector.gain) == (50 + moved, gained, 0)


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


@pytest.mark.parametrize(
    ("late", "away", "gained", "last"),
    [
        ((), (), [0, 5, 5, 5, 5], [50, 50]),  # windows of two rounds: 0 and 5, then 5 and 5
        ((2, 3), (), [0, 0, 0, 5, 5], [40, 40]),
        ((), (2, 3), [0, 0, 0, 5, 5], [40, 40]),
        ((), (1, 2, 3), [0, 0, 0, 0, 5], [60, 60]),  # nobody had been seen when round 4 came
    ],
)
def test_a_round_in_which_nothing_arrives_or_nobody_can_be_reached_gains_nothing_and_counts(
    late: Any, away: Any, gained: list[float], last: list[float]
) -> None:
    selector = oort(40, 4, sizes=[5] * 40, exploration=0.5, exploration_floor=0.5, pacer_window=2)
    assert percentiles(selector, 6, late, away)[-2:] == last
    assert selector.gained == gained


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
