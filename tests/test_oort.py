"""Selectors that look at clients' speeds: Oort, FedCS and TiFL, on numbers worked out by hand."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedsim.clients.ledger import Ledger
from fedsim.core.errors import ConfigError
from fedsim.selectors.base import Resources
from fedsim.selectors.fedcs import FedCS, one_after_another
from fedsim.selectors.oort import Oort
from fedsim.selectors.tifl import TiFL
from tests.clocks import fixed_clock
from tests.toys import picked, shipped, toy_cohort, toy_population, toy_run

SERVER: Any = None


def oort(n: int = 10, k: int = 4, sizes: list[int] | None = None, **changes: Any) -> Oort:
    """Return `selector=oort` with a pacer of short windows, for n clients of one sample."""
    pacer = {"percentile": 50.0, "pacer_window": 2}
    return shipped("oort", toy_population(sizes or [1] * n, k, 100), **(pacer | changes))


def set_seen(selector: Oort, utility: list[float], last_round: list[int]) -> None:
    selector.utility[:] = utility
    selector.last_round[:] = last_round


@pytest.mark.parametrize("losses", [[1.0, 1, 1, 1], [2.0, 0, 0, 0], [2.0, 2]])
def test_utility_by_hand(losses: list[float]) -> None:
    """n sqrt(mean of squares): 4 x 1, 4 x 1 and 2 x 2."""
    selector = oort()
    rms_loss = np.sqrt(np.mean(np.square([losses]), axis=1))
    selector.observe(1, toy_cohort([3], [len(losses)], [[0, 0]], rms_loss=rms_loss), SERVER)
    assert selector.utility[3] == pytest.approx(4)
    assert selector.last_round[3] == 1


@pytest.mark.parametrize(("first_round", "counted"), [("prior", 10), ("random", 9)])
def test_the_bonus_of_stale_clients_by_hand(first_round: str, counted: int) -> None:
    """sqrt(0.1 ln t / L_k) in round t = 10; with `random` rounds are counted from the second on."""
    selector = oort(3, 1, first_round=first_round)
    last_round = [1, 5, 9]
    set_seen(selector, [1, 1, 1], last_round)
    everybody = np.arange(3)
    bonus = selector.scores_of_seen(everybody, 10) - selector.normalised_utilities_of_seen(
        everybody
    )
    assert bonus == pytest.approx(np.sqrt(0.1 * np.log(counted) / last_round))


def test_utilities_are_clipped_and_scaled_by_hand() -> None:
    """Positive values 1, 2, 50, 100: clipped at rank floor(0.5 x 4) + 1 = 3, l = 0.999, u = 100. A
    utility of 0 comes out below 0."""
    selector = oort(5, 1, clip=0.5)
    set_seen(selector, [0, 1, 2, 50, 100], [1] * 5)
    expected = (np.array([0, 1, 2, 50, 50]) - 0.999) / (100 - 0.999)
    assert selector.normalised_utilities_of_seen(np.arange(5)) == pytest.approx(expected)


def test_an_unseen_client_counts_with_its_prior() -> None:
    """Client 2 with 1000 samples: u = 1000, l = 0.999 x 5."""
    selector = oort(sizes=[10, 10, 1000], k=1)
    set_seen(selector, [5, 20, 0], [1, 1, 0])
    expected = (np.array([5, 20]) - 4.995) / (1000 - 4.995)
    assert selector.normalised_utilities_of_seen(np.arange(3)) == pytest.approx(expected)


@pytest.mark.parametrize("first_round", ["prior", "random"])
def test_scores_equal_those_of_the_published_rule(first_round: str) -> None:
    """The rule is rewritten with lists; states are random."""
    random = np.random.default_rng(0)
    for t in range(2, 60):
        n = int(random.integers(2, 30))
        sizes = random.integers(1, 50, n)
        clip = float(random.choice([0.5, 0.95, 0.98]))
        selector = oort(sizes=sizes.tolist(), k=1, clip=clip, first_round=first_round)
        utility = random.exponential(20, n).tolist()
        last_round = random.integers(0, t, n).tolist()
        set_seen(selector, utility, last_round)
        states = list(zip(utility, last_round, sizes.tolist(), strict=True))
        rewards = sorted(u if last > 0 else size for u, last, size in states)
        clip_value = rewards[min(int(n * clip), n - 1)]
        low = rewards[0] * 0.999
        width = max(rewards[-1] - low, 1e-4)
        counted = t if first_round == "prior" else t - 1
        expected = [
            (min(u, clip_value) - low) / width + (0.1 * np.log(counted) / last) ** 0.5
            for u, last, _ in states
            if last > 0
        ]
        assert selector.scores_of_seen(np.arange(n), t) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("durations", "factors"), [([5, 5, 5], [1, 1, 1]), ([5, 10, 5], [1, 0.25, 1])]
)
def test_only_slow_clients_are_penalised(durations: list[float], factors: list[float]) -> None:
    """T is the median, 5 s. A client of 10 s gets the factor (5 / 10)^2."""
    selector = oort(3, 1)
    set_seen(selector, [1, 1, 1], [9, 9, 9])
    scores = selector.scores_of_seen(np.arange(3), 10)
    selector.durations[:] = durations
    assert selector.scores_of_seen(np.arange(3), 10) / scores == pytest.approx(factors)


def count_selections(make: Callable[[], Oort], num_seeds: int = 300) -> np.ndarray:
    """Return how often each client is selected in round 1 by the selectors that `make` makes."""
    counts = np.zeros(make().population.num_clients)
    for seed in range(num_seeds):
        counts[picked(make(), 1, seed)] += 1
    return counts


def seen_before(utility: list[float], **changes: Any) -> Oort:
    """Return an Oort whose clients of positive utility were seen in round 1."""
    selector = oort(len(utility), **changes)
    set_seen(selector, utility, [int(u > 0) for u in utility])
    return selector


SIXTY = [1] * 50 + [100] * 10
"""Samples of fifty small and ten large clients."""


def test_round_1_explores_the_clients_of_highest_prior() -> None:
    """The pool of K = 2 explored clients has 5 x 2 = 10 clients."""
    counts = count_selections(lambda: oort(k=2, sizes=SIXTY))
    assert counts[:50].sum() == 0
    assert (counts[50:] > 0).all()


def test_round_1_may_be_uniform_as_in_the_published_driver() -> None:
    """300 rounds select 600 clients, and 10 of 60 clients are large."""
    counts = count_selections(lambda: oort(k=2, sizes=SIXTY, first_round="random"))
    assert counts[50:].sum() == pytest.approx(100, abs=40)


def test_exploitation_draws_clients_near_the_border_in_proportion_to_their_scores() -> None:
    """The border is half the score of rank 2."""
    utility = [10.0, 9, 6, 5.9, 1] + [1e-9] * 5
    switches = {"exploration": 0.0, "exploration_floor": 0.0, "cutoff": 0.5}
    counts = count_selections(lambda: seen_before(utility, k=2, **switches))
    assert counts[4:].sum() == 0
    assert counts[0] > counts[3] > 0


@pytest.mark.parametrize(("cutoff_rank", "drawn"), [("last", [0, 1]), ("next", [0, 1, 2])])
def test_the_cutoff_refers_to_the_last_exploited_client_or_to_the_next_one(
    cutoff_rank: str, drawn: list[int]
) -> None:
    utility = [10.0, 9, 8, 5, 4, 3, 3, 3, 3, 3]
    values = {"k": 2, "cutoff": 1.0, "cutoff_rank": cutoff_rank}
    counts = count_selections(lambda: seen_before(utility, **values), 50)
    assert np.flatnonzero(counts).tolist() == drawn


def test_the_cutoff_is_a_share_of_a_score(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.95 x 6 = 5.7 is above 5.6."""
    selector = seen_before([1.0] * 4, k=2, cutoff=0.95)
    monkeypatch.setattr(selector, "scores_of_seen", lambda ids, t: np.array([10.0, 6.0, 5.8, 5.6]))
    exploited = set()
    for seed in range(40):
        exploited.update(selector._exploit(np.arange(4), 2, 2, np.random.default_rng(seed)))
    assert exploited == {0, 1, 2}


@pytest.mark.parametrize(
    ("utility", "sizes", "always", "num_possible"),
    [
        # all have been seen: all K = 4 are exploited
        ([1.0] * 6 + [90] * 4, [1] * 10, [6, 7, 8, 9], 4),
        # a client without data is not waited for
        ([1.0] * 5 + [90] * 4 + [0], [1] * 9 + [0], [5, 6, 7, 8], 4),
        # two are exploited, the only unseen one is explored, and one of the others fills up
        ([1.0] * 7 + [90] * 2 + [0], [1] * 10, [7, 8, 9], 10),
    ],
)
def test_exploration_lasts_while_there_are_unseen_clients(
    utility: list[float], sizes: list[int], always: list[int], num_possible: int
) -> None:
    cohorts = []
    for seed in range(80):
        selector = seen_before(utility, k=4, sizes=sizes, exploration=0.5, exploration_floor=0.5)
        cohorts.append(set(picked(selector, 2, seed)))
    assert set.intersection(*cohorts) == set(always)
    assert len(set.union(*cohorts)) == num_possible


def test_exploration_decays_from_round_2_on_down_to_the_floor() -> None:
    """Shares 0.9, 0.45, 0.225 and 0.2 of ten clients leave 1, 5, 7 and 8 to exploit. Once all have
    been seen, all ten are exploited."""
    selector = oort(20, 10, exploration_decay=0.5)
    everybody = np.arange(20)
    exploited = [selector._num_exploited(t, 10, everybody) for t in (1, 2, 3, 4, 50)]
    assert exploited == [1, 5, 7, 8, 8]
    selector.last_round[:] = 1
    assert selector._num_exploited(1, 10, everybody[:0]) == 10


@pytest.mark.parametrize(
    ("gains", "window", "change"),
    [
        # after a gain of 10: a step up within 10 %, a step down from 5 times as much on
        ([10.0, 10.9], 1, 10),
        ([10.0, 9.1], 1, 10),
        ([10.0, 11.5], 1, 0),
        ([10.0, 8.5], 1, 0),
        ([10.0, 55.0], 1, 0),
        ([10.0, 61.0], 1, -10),
        # once a window, if there are two
        ([5.0, 5.0], 2, 0),
        ([5.0, 5.0, 5.0], 2, 0),
        ([5.0, 5.0, 4.0, 6.0], 2, 10),
    ],
)
def test_the_pacer_compares_the_gains_of_windows(
    gains: list[float], window: int, change: int
) -> None:
    selector = oort(pacer_window=window)
    *selector.past_gains, selector.latest_gain = gains
    selector._pace()
    assert (selector.percentile, selector.past_gains, selector.latest_gain) == (
        50 + change,
        gains,
        0,
    )


def test_a_leap_lowers_the_percentile_at_most_to_the_step() -> None:
    selector = oort(pacer_step=100.0, pacer_window=1)
    selector.past_gains = [1.0]
    selector.latest_gain = 10.0
    selector._pace()
    assert selector.percentile == 100


@pytest.mark.parametrize(
    ("late", "away", "gains", "percentile"),
    [
        ((), (), [0, 5, 5, 5, 5], 50),  # windows of two rounds: 0 and 5, then 5 and 5
        ((2, 3), (), [0, 0, 0, 5, 5], 40),
        ((), (2, 3), [0, 0, 0, 5, 5], 40),
        ((), (1, 2, 3), [0, 0, 0, 0, 5], 60),  # nobody had been seen when round 4 came
    ],
)
def test_a_round_without_updates_or_without_clients_gains_nothing_and_counts(
    late: Any, away: Any, gains: list[float], percentile: float
) -> None:
    """Six rounds. Every utility is 5 x 1. Nothing arrives in the rounds `late`, and nobody can be
    reached in the rounds `away`."""
    selector = oort(40, 4, sizes=[5] * 40, exploration=0.5, exploration_floor=0.5)
    for t in range(1, 7):
        if t not in away:
            ids = picked(selector, t, t)
            if t not in late:
                selector.observe(t, toy_cohort(ids, [5] * len(ids), [[0, 0]] * len(ids)), SERVER)
    assert selector.percentile == percentile
    assert selector.past_gains == gains


SHARES = ("exploration", "exploration_decay", "exploration_floor", "cutoff", "clip")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pacer_window", 0),
        ("penalty", -0.5),
        ("pacer_step", 0.0),
        ("pacer_step", 100.5),
        ("percentile", -0.5),
        ("percentile", 100.5),
        *((key, value) for key in SHARES for value in (-0.5, 1.5)),
    ],
)
def test_values_out_of_their_range_are_rejected(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{key}={value}: must"):
        oort(**{key: value})


# --- deadlines and tiers, on the three devices of tests/clocks.py

SIZES = [1, 2, 3]
"""Samples of three clients whose round takes 7, 19 and 49 s (tests/test_clock.py)."""
SIX = [1] * 6
"""Samples of six clients on three devices, which repeat: three tiers. They answer after training in
1 + 1 + 3 + 1, 1 + 2 + 6 + 2 and 1 + 4 + 12 + 4 s."""


def choose(
    selector: Any, round: int = 1, sizes: list[int] = SIX, seed: int | None = None, **more: Any
) -> list[int]:
    clock = fixed_clock(len(sizes)).round(1, 0.0)
    return picked(selector, round, round if seed is None else seed, round_clock=clock, **more)


# --- FedCS


def fedcs(**changes: Any) -> FedCS:
    """Return `selector=fedcs` that asks all three clients, with K = 2 and a deadline of 20 s."""
    values = {"deadline": 20.0, "candidate_fraction": 1.0}
    return shipped("fedcs", toy_population(SIZES, 2), **(values | changes))


@pytest.mark.parametrize(
    ("deadline", "chosen"), [(7.0, []), (7.1, [0]), (20, [0, 1]), (49.1, [0, 1, 2])]
)
def test_fedcs_selects_clients_that_finish_before_the_deadline(
    deadline: float, chosen: list[int]
) -> None:
    assert choose(fedcs(deadline=deadline), sizes=SIZES) == chosen


@pytest.mark.parametrize(("fraction", "num_asked"), [(None, 2), (1e-12, 1), (0.34, 2), (1.0, 3)])
def test_fedcs_asks_a_share_of_all_clients_or_k(fraction: float | None, num_asked: int) -> None:
    """Each client sends three numbers of 4 bytes, without any model."""
    ledger = Ledger()
    choose(fedcs(candidate_fraction=fraction), sizes=SIZES, ledger=ledger)
    assert (ledger.bytes_up, ledger.bytes_down) == (num_asked * 3 * 4, 0)


@pytest.mark.parametrize(
    ("deadline", "chosen"),
    [
        (15.1, [1, 0, 2]),
        (15.0, [1, 0]),  # T^d + Theta' = 3 + 12 is not below it
        (13.0, [1]),  # nor is 2 + 11, nor, without client 0, 3 + (7 + 1 + 2)
        (9.0, []),  # nor is 2 + 7; alone, the others take 10 and 13
    ],
)
def test_sequential_uploads_by_hand(deadline: float, chosen: list[int]) -> None:
    """Theta = 0: increases 1 + 4 + 5 = 10, 2 + 6 + 1 = 9, 3 + 1 + 9 = 13. Client 1: Theta = 7, T^d
    = 2. Then 0 + 4 + 0 = 4 and 1 + 1 + 2 = 4. Client 0: Theta = 11. Then 1 + 1 + 0 = 2. Client 2:
    Theta = 12, T^d = 3."""
    seconds = Resources(
        download=np.array([1.0, 2, 3]), training=np.array([5.0, 1, 9]), upload=np.array([4.0, 6, 1])
    )
    assert one_after_another(seconds, deadline).tolist() == chosen


def test_a_long_download_counts_once() -> None:
    """Increases 6, 8 and 5.5. Client 2: T^d = 5. Then 5 and 3: client 1, and client 0."""
    seconds = Resources(
        download=np.array([1.0, 5, 5]), training=np.zeros(3), upload=np.array([5.0, 3, 0.5])
    )
    assert one_after_another(seconds, 100.0).tolist() == [2, 1, 0]


# --- TiFL


def tifl(sizes: list[int] = SIX, k: int = 2, **changes: Any) -> TiFL:
    """Return `selector=tifl` with three tiers, by default always the one in the middle."""
    values = {"num_tiers": 3, "interval": 1, "credits": 10.0, "probabilities": [0.0, 1.0, 0.0]}
    return shipped("tifl", toy_population(sizes, k, 10), **(values | changes))


def test_response_times_are_asked_for_once() -> None:
    """A time is a number of 4 bytes; a client passes its sample twice."""
    selector = tifl()
    ledger = Ledger()
    choose(selector, ledger=ledger, available=[0, 1, 2])
    assert (ledger.bytes_up, ledger.train_samples) == (3 * 4, 3 * 2)
    choose(selector, ledger=ledger)
    assert (ledger.bytes_up, ledger.train_samples) == (6 * 4, 6 * 2)
    assert selector.training_seconds.tolist() == [6, 11, 21, 6, 11, 21]


def test_all_clients_are_of_one_tier() -> None:
    selector = tifl()
    assert choose(selector) == [1, 4]
    assert [tier.tolist() for tier in selector.tiers()] == [[0, 3], [1, 4], [2, 5]]
    assert choose(tifl(probabilities=[0.0, 0.0, 1.0])) == [2, 5]


def test_a_tier_with_too_few_clients_is_filled_up_from_its_neighbours() -> None:
    """Of the tiers next to the middle the faster one comes first. If nobody of the tier is there,
    the others are equally likely."""
    chosen = set(choose(tifl(k=3)))
    assert {1, 4} < chosen
    assert chosen & {0, 3}
    assert choose(tifl(), available=[2, 4]) == [2, 4]
    assert choose(tifl(), available=[0, 5]) == [0, 5]


def test_probabilities_follow_ranks_once_a_tier_has_not_become_more_accurate() -> None:
    """The toy's accuracy of client i is 1 / (1 + i). In round 1 there is nothing to compare with,
    and in round 2 accuracies are the same: n = 3 tiers get 1, 2 and 3 of D = 6."""
    selector = tifl(probabilities=None)
    choose(selector)
    by_tier = [(1 + 1 / 4) / 2, (1 / 2 + 1 / 5) / 2, (1 / 3 + 1 / 6) / 2]
    assert selector.tier_accuracies == pytest.approx(by_tier)
    assert selector.tier_probabilities == pytest.approx([1 / 3, 1 / 3, 1 / 3])
    choose(selector, 2)
    assert selector.tier_probabilities == pytest.approx([1 / 6, 2 / 6, 3 / 6])


def test_a_tier_without_credits_has_no_rank() -> None:
    """The other two get 1 and 2 of D = 3."""
    selector = tifl(probabilities=None)
    selector.tier_accuracies = np.ones(3)
    selector.credits_left = np.array([4, 0, 4])
    selector._adapt(np.array([0.6, 0.1, 0.2]))
    assert selector.tier_probabilities == pytest.approx([1 / 3, 0, 2 / 3])


def test_probabilities_stay_if_the_tier_has_become_more_accurate() -> None:
    selector = tifl(probabilities=None)
    choose(selector)
    selector.tier_accuracies = np.array([0.6, 0.3, 0.2])  # all lower than those of the next round
    choose(selector, 2)
    assert selector.tier_probabilities == pytest.approx([1 / 3, 1 / 3, 1 / 3])


def test_accuracies_are_asked_for_every_interval() -> None:
    """Six clients with eight samples in all, in rounds 1, 4 and 7."""
    sizes = [1, 1, 1, 3, 1, 1]
    selector = tifl(sizes, probabilities=None, interval=3)
    asked = []
    for t in range(1, 8):
        ledger = Ledger()
        choose(selector, t, sizes, ledger=ledger)
        asked.append(ledger.forward_samples)
    assert asked == [8, 0, 0, 8, 0, 0, 8]


def test_the_accuracy_of_a_tier_is_weighted_by_samples() -> None:
    """Client 3 takes 12 s with its three samples. Their positions 3 to 5 have the mean 4, client
    4's is 6."""
    sizes = [1, 1, 1, 3, 1, 1]
    selector = tifl(sizes, probabilities=None)
    choose(selector, 1, sizes)
    assert [tier.tolist() for tier in selector.tiers()] == [[0, 1], [4, 3], [2, 5]]
    assert selector.tier_accuracies[1] == pytest.approx((1 * 1 / 7 + 3 * 1 / 5) / 4)


def test_a_tier_without_credits_is_not_drawn_until_none_has_any() -> None:
    """ceil(0.3 x 10 / 3) = 1 credit for each tier."""
    selector = tifl(probabilities=None, credits=0.3, interval=100)
    drawn = []
    for t in (1, 2, 3):
        choose(selector, t)
        drawn.append(selector.latest_tier)
    assert sorted(drawn) == [0, 1, 2]
    assert selector.credits_left.tolist() == [0, 0, 0]
    assert len(choose(selector, 4)) == 2


@pytest.mark.parametrize(
    ("credits", "expected"), [(1.1, 11), (1.11, 12), (1e-12, 1), (1e20, 100), (1e38, 100)]
)
def test_credits_are_exact_and_at_most_the_number_of_rounds(credits: float, expected: int) -> None:
    """1.1 x 100 / 10 is 11, but 11.000000000000002 in floating point. A checkpoint cannot hold the
    integer 10^21."""
    population = toy_population([1] * 10, 2, 100)
    selector = shipped("tifl", population, num_tiers=10, credits=credits)
    assert selector.credits_left.tolist() == [expected] * 10
    assert selector.credits_left.dtype == np.int64


@pytest.mark.parametrize(
    ("key", "value"),
    [("probabilities", [0.5, 0.5]), ("probabilities", [0.0, 0.0, 0.0]), ("num_tiers", 7)],
)
def test_tiers_that_do_not_fit_are_rejected(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key):
        tifl(**{key: value})


# --- Oort on a simulated clock


def test_oort_observes_durations_and_scales_slow_clients_by_equation_1() -> None:
    """With one more number to send, rounds take 8, 21 and 53 s. T is their median, 21. Only client
    2 is slower."""
    selector = oort(sizes=SIZES, k=3)
    toy_run(selector, simulated_clock=fixed_clock()).step()
    assert selector.durations.tolist() == [8, 21, 53]
    scores = selector.scores_of_seen(np.arange(3), 2)
    selector.penalty = 0.0
    without_penalty = selector.scores_of_seen(np.arange(3), 2)
    assert scores / without_penalty == pytest.approx([1, 1, (21 / 53) ** 2])


def test_nothing_is_learnt_of_late_clients() -> None:
    selector = oort(sizes=SIZES, k=3)
    clock = fixed_clock(deadline=30.0)
    run = toy_run(selector, simulated_clock=clock)
    assert (run.step().late, run.observed) == ([2], True)
    assert selector.durations.tolist() == pytest.approx([8, 21, np.nan], nan_ok=True)
    assert selector.last_round.tolist() == [1, 1, 0]
    clock.system.deadline = 0.5
    run.step()
    assert not run.observed


def test_oort_by_speed_asks_once_and_explores_fast_clients_more_often() -> None:
    """Seconds for download, training and upload, which clients report as three numbers. Three
    standard deviations of a share over 300 rounds are 0.09."""
    sizes = [1, 1, 1]
    changes = {"exploration": 1.0, "exploration_decay": 1.0, "exploration_floor": 1.0}
    changes["_target_"] = "fedsim.selectors.oort.OortBySpeed"
    counts = np.zeros(3)
    for seed in range(300):
        selector = shipped("oort", toy_population(sizes, 1, 10), **changes)
        ledger = Ledger()
        counts[choose(selector, 1, sizes, seed, ledger=ledger)] += 1
        choose(selector, 2, sizes, seed, ledger=ledger)
        assert ledger.bytes_up == 3 * 3 * 4
    assert selector.expected_seconds.tolist() == [1 + 1 + 3 + 2, 1 + 2 + 6 + 4, 1 + 4 + 12 + 8]
    speeds = 1 / selector.expected_seconds
    assert counts / 300 == pytest.approx(speeds / speeds.sum(), abs=0.1)
