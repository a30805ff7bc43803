"""Selectors that look at clients' speeds: Oort, FedCS and TiFL, on numbers worked out by hand."""

from typing import Any

import numpy as np
import pytest

from fedsim.clients.ledger import Ledger
from fedsim.core.errors import ConfigError
from fedsim.selectors.base import Resources
from fedsim.selectors.fedcs import FedCS, one_after_another
from fedsim.selectors.oort import Oort, OortBySpeed
from fedsim.selectors.tifl import TiFL
from tests.clocks import fixed_clock
from tests.toys import picked, toy_cohort, toy_population, toy_run

SERVER: Any = None


def oort(n: int = 10, k: int = 4, sizes: list[int] | None = None, **more: Any) -> Oort:
    values: dict[str, Any] = {
        **{
            "exploration": 0.9,
            "exploration_decay": 0.98,
            "exploration_floor": 0.2,
            "cutoff": 0.95,
            "clip": 0.95,
        },
        **{"cutoff_rank": "last", "first_round": "prior"},
        **{
            "prior": "size",
            "penalty": 2.0,
            "percentile": 50.0,
            "pacer_window": 2,
            "pacer_step": 10.0,
        },
    }
    return Oort(toy_population(sizes or [1] * n, k, 100), **(values | more))


def seen(selector: Oort, utility: list[float], last: list[int]) -> None:
    selector.utility[:] = utility
    selector.last_round[:] = last


def test_utility_by_hand() -> None:
    selector = oort()
    for losses in ((1, 1, 1, 1), (2, 0, 0, 0), (2, 2)):
        rms = np.sqrt(np.mean(np.square(losses)))
        selector.observe(
            1, toy_cohort([3], [len(losses)], [[0, 0]], rms_loss=np.array([rms])), SERVER
        )
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
    """Positive values 1, 2, 50, 100: clipped at that of rank 3, l = .999, u = 100; a utility of 0
    comes out below 0."""
    selector = oort(5, 1, clip=0.5)
    seen(selector, [0, 1, 2, 50, 100], [1] * 5)
    expected = (np.array([0, 1, 2, 50, 50]) - 0.999) / (100 - 0.999)
    assert selector.normalised(np.arange(5)) == pytest.approx(expected)
    selector = oort(sizes=[10, 10, 1000], k=1)  # the third is unseen, and counts with its prior
    seen(selector, [5, 20, 0], [1, 1, 0])
    assert selector.normalised(np.arange(3)) == pytest.approx(
        (np.array([5, 20]) - 4.995) / (1000 - 4.995)
    )


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
        rewards = sorted(
            float(u) if at else float(size)
            for u, at, size in zip(utility, last, sizes, strict=True)
        )
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
    counts = counted(
        300, lambda: seen_before(utility, k=2, exploration=0.0, exploration_floor=0.0, cutoff=0.5)
    )
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
    monkeypatch.setattr(
        selector, "scores", lambda ids, t: np.array([10.0, 6.0, 5.8, 5.6])
    )  # .95 x 6 = 5.7
    picks = [
        selector._exploit(np.arange(4), 2, 2, np.random.default_rng(seed)) for seed in range(40)
    ]
    assert set(np.concatenate(picks).tolist()) == {0, 1, 2}


@pytest.mark.parametrize(
    ("utility", "sizes", "always", "possible"),
    [
        (
            [1.0] * 6 + [90] * 4,
            [1] * 10,
            [6, 7, 8, 9],
            4,
        ),  # everybody has been seen: all are exploited
        (
            [1.0] * 5 + [90] * 4 + [0],
            [1] * 9 + [0],
            [5, 6, 7, 8],
            4,
        ),  # a client without data is not waited for
        (
            [1.0] * 7 + [90] * 2 + [0],
            [1] * 10,
            [7, 8, 9],
            10,
        ),  # two exploited, the only new one, and one of the others
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
    """Shares .9, .45, .225, .2 of ten leave 1, 5, 7 and 8 to exploit, while anybody is left to
    explore."""
    selector = oort(20, 10, exploration_decay=0.5)
    everybody, nobody = np.arange(20), np.arange(0)
    assert [selector._num_exploited(t, 10, everybody) for t in (1, 2, 3, 4, 50)] == [1, 5, 7, 8, 8]
    selector.last_round[:] = 1
    assert selector._num_exploited(1, 10, nobody) == 10


def test_the_pacer_moves_where_gains_stand_still_or_leap() -> None:
    """After a window that gained 10: within a tenth of it one step up, five times as much away one
    step down."""
    cases = [
        ([10.0, now], 1, moved)
        for now, moved in ((10.9, 10), (9.1, 10), (11.5, 0), (8.5, 0), (55, 0), (61, -10))
    ]
    cases += [
        ([5.0, 5.0], 2, 0),
        ([5.0, 5.0, 5.0], 2, 0),
        ([5.0, 5.0, 4.0, 6.0], 2, 10),
    ]  # it looks once a window
    for gained, window, moved in cases:
        selector = oort(pacer_window=window)
        selector.gained, selector.gain = gained[:-1], gained[-1]
        selector._pace()
        assert (selector.percentile, selector.gained, selector.gain) == (50 + moved, gained, 0)


def percentiles(
    selector: Oort, num_rounds: int, late: tuple[int, ...] = (), away: tuple[int, ...] = ()
) -> list[float]:
    """Those by which the clients of rounds 1 to `num_rounds` were selected; every utility is that
    of five samples with losses of 1, nothing arrives in the rounds `late`, and nobody can be asked
    in the rounds `away`."""
    sizes, found = selector.population.sizes.tolist(), []
    for t in range(1, num_rounds + 1):
        if t in away:
            continue
        ids = picked(selector, t, t)
        found.append(selector.percentile)
        if t not in late:
            selector.observe(
                t, toy_cohort(ids, [sizes[i] for i in ids], [[0, 0]] * len(ids)), SERVER
            )
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
    wrong: dict[str, tuple[Any, ...]] = {
        "pacer_window": (0,),
        "penalty": (-0.5,),
        "pacer_step": (0.0, 100.5),
    }
    wrong |= {"percentile": (-0.5, 100.5)}
    wrong |= dict.fromkeys(
        ("exploration", "exploration_decay", "exploration_floor", "cutoff", "clip"), (-0.5, 1.5)
    )
    for key, values in wrong.items():
        for value in values:
            with pytest.raises(ConfigError, match=f"{key}={value}: must"):
                oort(**{key: value})


# --- deadlines and tiers: a round of clients 0, 1 and 2 takes 7, 19 and 49 s (tests/test_clock.py) ---

SIZES = [1, 2, 3]  # a round of clients 0, 1 and 2 takes 7, 19 and 49 s (tests/test_clock.py)


SIX = [1] * 6
"""Trained in 1 + 1 + 3 + 1, 1 + 2 + 6 + 2 and 1 + 4 + 12 + 4 s by the three devices, which repeat:
three tiers."""


def choose(
    selector: Any, round: int = 1, sizes: list[int] = SIX, seed: int | None = None, **more: Any
) -> list[int]:
    clock = fixed_clock(len(sizes)).round(1, 0.0)
    return picked(selector, round, round if seed is None else seed, round_clock=clock, **more)


# --- FedCS ------------------------------------------------------------------------------------------------------------


def fedcs(**more: Any) -> FedCS:
    values: dict[str, Any] = {"deadline": 20.0, "candidate_fraction": 1.0, "uploads": "parallel"}
    return FedCS(toy_population(SIZES, 2), **(values | more))


@pytest.mark.parametrize(
    ("deadline", "chosen"), [(7.0, []), (7.1, [0]), (20, [0, 1]), (49.1, [0, 1, 2])]
)
def test_fedcs_takes_whoever_is_done_before_the_deadline(
    deadline: float, chosen: list[int]
) -> None:
    selector, ledger = fedcs(deadline=deadline), Ledger()
    assert choose(selector, sizes=SIZES, ledger=ledger) == chosen
    assert (ledger.bytes_up, ledger.bytes_down) == (3 * 3 * 4, 0)
    for fraction, count in (
        (None, 2),
        (1e-12, 1),
        (0.34, 2),
        (1.0, 3),
    ):  # a share of all clients, or K of them
        choose(fedcs(candidate_fraction=fraction), sizes=SIZES, ledger=(ledger := Ledger()))
        assert ledger.bytes_up == count * 3 * 4


def test_sequential_uploads_by_hand() -> None:
    """Theta = 0: increases 1 + 4 + 5 = 10, 2 + 6 + 1 = 9, 3 + 1 + 9 = 13: client 1, Theta = 7, T^d
    = 2. Then 0 + 4 + 0 = 4 and 1 + 1 + 2 = 4: client 0, Theta = 11. Then 1 + 1 + 0 = 2: client 2,
    Theta = 12, T^d = 3."""
    found = Resources(
        download=np.array([1.0, 2, 3]), training=np.array([5.0, 1, 9]), upload=np.array([4.0, 6, 1])
    )
    assert one_after_another(found, 15.1).tolist() == [1, 0, 2]
    assert one_after_another(found, 15.0).tolist() == [1, 0]  # 3 + 12 is not below it
    assert one_after_another(found, 13.0).tolist() == [
        1
    ]  # nor is 2 + 11, nor, without client 0, 3 + 7 + 1 + 2
    assert (
        one_after_another(found, 9.0).tolist() == []
    )  # 2 + 7 is not; alone, the others take 10 and 13
    found = Resources(
        download=np.array([1.0, 5, 5]), training=np.zeros(3), upload=np.array([5.0, 3, 0.5])
    )
    assert one_after_another(found, 100.0).tolist() == [
        2,
        1,
        0,
    ]  # 6, 8 and 5.5; then, with T^d = 5, 5 and 3


# --- TiFL -------------------------------------------------------------------------------------------------------------


def tifl(sizes: list[int] = SIX, k: int = 2, **more: Any) -> TiFL:
    values: dict[str, Any] = {
        "num_tiers": 3,
        "interval": 1,
        "credits": 10.0,
        "probabilities": [0.0, 1.0, 0.0],
    }
    return TiFL(toy_population(sizes, k, 10), **(values | more))


def test_tiers_are_cut_by_response_times_asked_for_once_and_one_of_them_is_selected_from() -> None:
    selector, ledger = tifl(), Ledger()
    choose(selector, ledger=ledger, available=[0, 1, 2])
    assert (ledger.bytes_up, ledger.train_samples) == (3 * 4, 3 * 2)
    assert choose(selector, ledger=ledger) == [1, 4]
    assert (ledger.bytes_up, ledger.train_samples) == (6 * 4, 6 * 2)
    assert selector.latency.tolist() == [6, 11, 21, 6, 11, 21]
    assert [tier.tolist() for tier in selector.tiers()] == [[0, 3], [1, 4], [2, 5]]
    assert choose(tifl(probabilities=[0.0, 0.0, 1.0])) == [2, 5]


def test_a_tier_with_too_few_clients_is_filled_from_its_neighbours() -> None:
    chosen = choose(tifl(k=3))
    assert chosen[0] in (0, 3) or chosen[1] in (0, 3)
    assert {1, 4} < set(chosen)
    assert set(choose(tifl(), available=[2, 4])) == {2, 4}
    assert set(choose(tifl(), available=[0, 5])) == {
        0,
        5,
    }  # nobody of the tier is there: the others are equally likely


def test_probabilities_follow_ranks_of_accuracies_once_a_tier_has_not_become_better() -> None:
    """The toy's accuracy of client i is 1 / (1 + i): of the tiers (1 + 1/4) / 2, (1/2 + 1/5) / 2,
    (1/3 + 1/6) / 2."""
    selector = tifl(probabilities=None)
    choose(selector)
    assert selector.accuracies == pytest.approx([0.625, 0.35, 0.25])
    assert selector.chances == pytest.approx([1 / 3] * 3)  # nothing to compare with yet
    choose(selector, 2)
    assert selector.chances == pytest.approx([1 / 6, 2 / 6, 3 / 6])
    selector.left = np.array([4, 0, 4])
    selector._adapt(np.array([0.6, 0.1, 0.2]))
    assert selector.chances == pytest.approx(
        [1 / 3, 0, 2 / 3]
    )  # tier 1 has no credits, and no rank
    better = tifl(probabilities=None)
    choose(better)
    better.accuracies = np.array([0.6, 0.3, 0.2])
    choose(better, 2)
    assert better.chances == pytest.approx([1 / 3] * 3)


def test_accuracies_are_asked_for_every_so_many_rounds_and_weigh_samples() -> None:
    sizes, asked = [1, 1, 1, 3, 1, 1], []
    selector = tifl(sizes, probabilities=None, interval=3)
    for t in range(1, 8):
        ledger = Ledger()
        choose(selector, t, sizes, ledger=ledger)
        asked.append(ledger.forward_samples)
    assert asked == [8, 0, 0, 8, 0, 0, 8]
    assert [tier.tolist() for tier in selector.tiers()] == [
        [0, 1],
        [4, 3],
        [2, 5],
    ]  # client 3 takes 12 s
    assert selector.accuracies[1] == pytest.approx(
        (1 / 7 + 3 / 5) / 4
    )  # positions 6, and 3 to 5, whose mean is 4


def test_a_tier_without_credits_is_not_drawn_until_none_has_any() -> None:
    selector = tifl(
        probabilities=None, credits=0.3, interval=100
    )  # ceil(.3 x 10 / 3) = 1 for each tier
    choose(selector)
    drawn = [selector.current]
    for t in (2, 3):
        choose(selector, t)
        drawn.append(selector.current)
    assert sorted(drawn) == [0, 1, 2]
    assert selector.left.tolist() == [0, 0, 0]
    assert len(choose(selector, 4)) == 2


@pytest.mark.parametrize(
    ("credits", "expected"), [(1.1, 11), (1.11, 12), (1e-12, 1), (1e20, 100), (1e38, 100)]
)
def test_credits_are_exact_and_never_more_than_there_are_rounds(
    credits: float, expected: int
) -> None:
    """1.1 x 100 / 10 is 11 (11.000000000000002 in floating point); a checkpoint cannot hold the
    integer 10^21."""
    population = toy_population([1] * 10, 2, 100)
    selector = TiFL(population, num_tiers=10, interval=1, credits=credits, probabilities=None)
    assert selector.left.tolist() == [expected] * 10
    assert selector.left.dtype == np.int64
    wrong: list[dict[str, Any]] = [
        {"probabilities": [0.5, 0.5]},
        {"probabilities": [0.0] * 3},
        {"num_tiers": 7},
    ]
    for values in wrong:
        with pytest.raises(ConfigError, match=next(iter(values))):
            tifl(**values)


# --- Oort -------------------------------------------------------------------------------------------------------------


def test_oort_observes_durations_and_scales_the_slow_by_equation_1() -> None:
    """With a number more to send: 8, 21 and 53 s. T is their median, 21: only client 2 is slower,
    by (21 / 53)^2."""
    selector = oort(sizes=SIZES, k=3)
    toy_run(selector, simulated_clock=fixed_clock()).step()
    assert selector.durations.tolist() == [8, 21, 53]
    scores = selector.scores(np.arange(3), 2)
    selector.penalty = 0.0
    assert scores / selector.scores(np.arange(3), 2) == pytest.approx([1, 1, (21 / 53) ** 2])


def test_the_late_are_not_learnt_of_and_rounds_without_an_update_not_observed() -> None:
    selector, clock = oort(sizes=SIZES, k=3), fixed_clock(deadline=30.0)
    run = toy_run(selector, simulated_clock=clock)
    assert (run.step().late, run.observed) == ([2], True)
    assert selector.durations[:2].tolist() == [8, 21]
    assert np.isnan(selector.durations[2])
    assert selector.last_round.tolist() == [1, 1, 0]
    clock.system.deadline = 0.5
    run.step()
    assert not run.observed


def test_oort_by_speed_asks_once_and_explores_the_fast() -> None:
    values = {
        name: getattr(oort(), name) for name in OortBySpeed.__parameters__ if name != "population"
    }  # type: ignore[attr-defined]
    values |= {"exploration": 1.0, "exploration_decay": 1.0, "exploration_floor": 1.0}
    sizes, counts = [1, 1, 1], np.zeros(3)
    for s in range(300):
        selector, ledger = OortBySpeed(toy_population(sizes, 1, 10), **values), Ledger()
        counts[choose(selector, 1, sizes, s, ledger=ledger)] += 1
        choose(selector, 2, sizes, s, ledger=ledger)
        assert ledger.bytes_up == 3 * 3 * 4
    assert selector.expected.tolist() == [1 + 1 + 3 + 2, 1 + 2 + 6 + 4, 1 + 4 + 12 + 8]
    speeds = 1 / selector.expected
    assert counts / 300 == pytest.approx(
        speeds / speeds.sum(), abs=0.1
    )  # three standard deviations are .09
