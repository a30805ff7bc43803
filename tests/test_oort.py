from typing import Any

import numpy as np
import pytest

from fedsim.clients.server import Server
from fedsim.selectors.oort import Oort
from tests.toys import toy_clients, toy_cohort, toy_population

SERVER: Server = None  # type: ignore[assignment]


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
    bonus = selector.scores(np.arange(3), 10) - selector.normalised(np.arange(3))
    assert bonus == pytest.approx([0.47985, 0.21460, 0.15995], abs=1e-5)
    selector.first_round = "random"
    late = selector.scores(np.arange(3), 10) - selector.normalised(np.arange(3))
    assert late == pytest.approx(np.sqrt(0.1 * np.log(9) / np.array([1, 5, 9])))


def test_utilities_are_clipped_but_scaled_by_the_unclipped_maximum() -> None:
    """Positive values 1, 2, 50, 100: clipped at that of rank 3, l = .999, u = 100; a utility of 0 comes out below 0."""
    selector = oort(5, 1, clip=0.5)
    seen(selector, [0, 1, 2, 50, 100], [1] * 5)
    expected = (np.array([0, 1, 2, 50, 50]) - 0.999) / (100 - 0.999)
    assert selector.normalised(np.arange(5)) == pytest.approx(expected)


def test_the_rank_of_the_clip_is_not_lost_to_floating_point() -> None:
    """.29 of 100 values is rank 29 + 1, although the product is 28.999999999999996."""
    selector = oort(100, 1, clip=0.29)
    seen(selector, [float(u) for u in range(1, 101)], [1] * 100)
    assert selector.normalised(np.arange(100)).max() == pytest.approx((30 - 0.999) / (100 - 0.999))


def test_an_outlier_leaves_the_weight_of_utility_small_against_that_of_staleness() -> None:
    """19 utilities from 1 to 2 and one of 100: scaled by 99, they differ by about .01, and the stale come first."""
    selector = oort(20, 1, clip=0.9)
    seen(selector, [1 + i / 18 for i in range(19)] + [100.0], [*range(1, 20), 19])  # the lower, the longer ago
    top = np.argsort(-selector.scores(np.arange(20), 20))[:10]
    assert set(top.tolist()) == set(range(10))


def test_unseen_clients_count_with_their_prior_in_the_scale() -> None:
    selector = oort(sizes=[10, 10, 1000], k=1)
    seen(selector, [5, 20, 0], [1, 1, 0])
    assert selector.normalised(np.arange(3)) == pytest.approx((np.array([5, 20]) - 4.995) / (1000 - 4.995))


@pytest.mark.parametrize("first_round", ["prior", "random"])
def test_scores_equal_those_of_the_published_rule(first_round: str) -> None:
    """A list-based rewriting of it, over random states."""
    random = np.random.default_rng(0)
    for t in range(2, 60):
        n = int(random.integers(2, 30))
        sizes = random.integers(1, 50, n)
        selector = oort(
            sizes=sizes.tolist(), k=1, clip=float(random.choice([0.5, 0.95, 0.98])), first_round=first_round
        )
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


def test_round_1_explores_only_and_prefers_large_clients() -> None:
    sizes = [1] * 50 + [100] * 10
    counts = np.zeros(60)
    for s in range(200):
        selector = oort(k=2, sizes=sizes)
        counts[selector.select(1, toy_clients(sizes, selector.needs, cohort_size=2), np.random.default_rng(s)).ids] += 1
    assert counts[50:].sum() == 400  # the pool is the ten of highest prior
    assert (counts[50:] > 0).all()


def test_exploitation_takes_whoever_is_near_the_border_in_proportion_to_score() -> None:
    counts = np.zeros(10)
    for s in range(300):
        selector = oort(k=2, exploration=0.0, exploration_floor=0.0, cutoff=0.5)
        seen(selector, [10, 9, 6, 5.9, 1, 0, 0, 0, 0, 0], [1] * 10)
        clients = toy_clients([1] * 10, selector.needs, cohort_size=2)
        counts[selector.select(1, clients, np.random.default_rng(s)).ids] += 1
    assert counts[4:].sum() == 0
    assert counts[0] > counts[3] > 0


@pytest.mark.parametrize(("cutoff_rank", "drawn"), [("last", [0, 1]), ("next", [0, 1, 2])])
def test_the_cutoff_is_the_score_of_the_last_exploited_or_of_the_one_after_it(
    cutoff_rank: str, drawn: list[int]
) -> None:
    found: set[int] = set()
    for s in range(50):
        selector = oort(k=2, cutoff=1.0, cutoff_rank=cutoff_rank)
        seen(selector, [10, 9, 8, 5, 4, 3, 3, 3, 3, 3], [1] * 10)
        ids = selector.select(1, toy_clients([1] * 10, selector.needs, cohort_size=2), np.random.default_rng(s)).ids
        found |= set(ids.tolist())
    assert sorted(found) == drawn


def test_round_1_of_the_published_driver_is_uniform() -> None:
    sizes = [1] * 50 + [100] * 10
    counts = np.zeros(60)
    for s in range(300):
        selector = oort(k=2, sizes=sizes, first_round="random")
        counts[selector.select(1, toy_clients(sizes, selector.needs, cohort_size=2), np.random.default_rng(s)).ids] += 1
    assert counts[50:].sum() == pytest.approx(100, abs=40)  # 10 of 60


def test_once_everybody_has_been_seen_all_are_exploited() -> None:
    for s in range(50):
        selector = oort(k=4, exploration=0.5, exploration_floor=0.5)
        seen(selector, [1, 1, 1, 1, 1, 1, 90, 90, 90, 90], [1] * 10)
        ids = selector.select(2, toy_clients([1] * 10, selector.needs, cohort_size=4), np.random.default_rng(s)).ids
        assert ids.tolist() == [6, 7, 8, 9]
        assert selector.exploited.shape == (4,)


def test_a_client_without_data_does_not_keep_exploration_going() -> None:
    selector = oort(sizes=[1] * 9 + [0], k=4)
    seen(selector, [1] * 5 + [90] * 4 + [0], [1] * 9 + [0])
    clients = toy_clients([1] * 9 + [0], selector.needs, cohort_size=4)
    assert selector.select(2, clients, np.random.default_rng(0)).ids.tolist() == [5, 6, 7, 8]


def test_while_some_are_unseen_the_share_that_cannot_be_explored_is_uniform() -> None:
    """K = 4, eps = .5: two exploited, the last new client, and one of the others, whatever its score."""
    found: set[int] = set()
    for s in range(80):
        selector = oort(k=4, exploration=0.5, exploration_floor=0.5)
        seen(selector, [1, 1, 1, 1, 1, 1, 1, 90, 90, 0], [1] * 9 + [0])
        ids = selector.select(2, toy_clients([1] * 10, selector.needs, cohort_size=4), np.random.default_rng(s)).ids
        assert {7, 8, 9} <= set(ids.tolist())
        found |= set(ids.tolist())
    assert found == set(range(10))


@pytest.mark.parametrize(("now", "expected"), [(1.0, 60), (1.5, 50), (6.0, 40)])
def test_the_pacer(now: float, expected: float) -> None:
    selector = oort()
    selector.gained = [1.0, 1.0, now, now]
    assert selector._paced_percentile() == expected
    selector.gained = [1.0, 1.0, now]
    assert selector._paced_percentile() == 50
