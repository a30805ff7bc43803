"""Selectors that look at clients' speeds: FedCS, TiFL, and Oort's system utility, on numbers worked out by hand."""

from typing import Any

import numpy as np
import pytest

from fedsim.clients.ledger import Ledger
from fedsim.core.errors import ConfigError
from fedsim.rounds.loop import Simulation
from fedsim.selectors.base import Resources
from fedsim.selectors.fedcs import FedCS, one_after_another
from fedsim.selectors.oort import OortBySpeed
from fedsim.selectors.tifl import TiFL
from tests.clocks import fixed_clock
from tests.test_oort import oort
from tests.toys import ToyEngine, picked, toy_components, toy_params, toy_population

SIZES = [1, 2, 3]  # a round of clients 0, 1 and 2 takes 7, 19 and 49 s (tests/test_clock.py)


SIX = [1] * 6
"""Trained in 1 + 1 + 3 + 1, 1 + 2 + 6 + 2 and 1 + 4 + 12 + 4 s by the three devices, which repeat: three tiers."""


def choose(selector: Any, round: int = 1, sizes: list[int] = SIX, seed: int | None = None, **more: Any) -> list[int]:
    clock = fixed_clock(len(sizes)).round(1, 0.0)
    return picked(selector, round, round if seed is None else seed, simulated=clock, **more)


# --- FedCS ------------------------------------------------------------------------------------------------------------


def fedcs(**more: Any) -> FedCS:
    values: dict[str, Any] = {"deadline": 20.0, "candidate_fraction": 1.0, "uploads": "parallel"}
    return FedCS(toy_population(SIZES, 2), **(values | more))


@pytest.mark.parametrize(("deadline", "chosen"), [(7.0, []), (7.1, [0]), (20, [0, 1]), (49.1, [0, 1, 2])])
def test_fedcs_takes_whoever_is_done_before_the_deadline(deadline: float, chosen: list[int]) -> None:
    selector, ledger = fedcs(deadline=deadline), Ledger()
    assert choose(selector, sizes=SIZES, ledger=ledger) == chosen
    assert (ledger.bytes_up, ledger.bytes_down) == (3 * 3 * 4, 0)
    for fraction, count in ((None, 2), (1e-12, 1), (0.34, 2), (1.0, 3)):  # a share of all clients, or K of them
        choose(fedcs(candidate_fraction=fraction), sizes=SIZES, ledger=(ledger := Ledger()))
        assert ledger.bytes_up == count * 3 * 4


def test_sequential_uploads_by_hand() -> None:
    """Theta = 0: increases 1 + 4 + 5 = 10, 2 + 6 + 1 = 9, 3 + 1 + 9 = 13: client 1, Theta = 7, T^d = 2.
    Then 0 + 4 + 0 = 4 and 1 + 1 + 2 = 4: client 0, Theta = 11. Then 1 + 1 + 0 = 2: client 2, Theta = 12, T^d = 3."""
    found = Resources(download=np.array([1.0, 2, 3]), training=np.array([5.0, 1, 9]), upload=np.array([4.0, 6, 1]))
    assert one_after_another(found, 15.1).tolist() == [1, 0, 2]
    assert one_after_another(found, 15.0).tolist() == [1, 0]  # 3 + 12 is not below it
    assert one_after_another(found, 13.0).tolist() == [1]  # nor is 2 + 11, nor, without client 0, 3 + 7 + 1 + 2
    assert one_after_another(found, 9.0).tolist() == []  # 2 + 7 is not; alone, the others take 10 and 13
    found = Resources(download=np.array([1.0, 5, 5]), training=np.zeros(3), upload=np.array([5.0, 3, 0.5]))
    assert one_after_another(found, 100.0).tolist() == [2, 1, 0]  # 6, 8 and 5.5; then, with T^d = 5, 5 and 3


# --- TiFL -------------------------------------------------------------------------------------------------------------


def tifl(sizes: list[int] = SIX, k: int = 2, **more: Any) -> TiFL:
    values: dict[str, Any] = {"num_tiers": 3, "interval": 1, "credits": 10.0, "probabilities": [0.0, 1.0, 0.0]}
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
    assert set(choose(tifl(), available=[0, 5])) == {0, 5}  # nobody of the tier is there: the others are equally likely


def test_probabilities_follow_ranks_of_accuracies_once_a_tier_has_not_become_better() -> None:
    """The toy's accuracy of client i is 1 / (1 + i): of the tiers (1 + 1/4) / 2, (1/2 + 1/5) / 2, (1/3 + 1/6) / 2."""
    selector = tifl(probabilities=None)
    choose(selector)
    assert selector.accuracies == pytest.approx([0.625, 0.35, 0.25])
    assert selector.chances == pytest.approx([1 / 3] * 3)  # nothing to compare with yet
    choose(selector, 2)
    assert selector.chances == pytest.approx([1 / 6, 2 / 6, 3 / 6])
    selector.left = np.array([4, 0, 4])
    selector._adapt(np.array([0.6, 0.1, 0.2]))
    assert selector.chances == pytest.approx([1 / 3, 0, 2 / 3])  # tier 1 has no credits, and no rank
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
    assert [tier.tolist() for tier in selector.tiers()] == [[0, 1], [4, 3], [2, 5]]  # client 3 takes 12 s
    assert selector.accuracies[1] == pytest.approx((1 / 7 + 3 / 5) / 4)  # positions 6, and 3 to 5, whose mean is 4


def test_a_tier_without_credits_is_not_drawn_until_none_has_any() -> None:
    selector = tifl(probabilities=None, credits=0.3, interval=100)  # ceil(.3 x 10 / 3) = 1 for each tier
    choose(selector)
    drawn = [selector.current]
    for t in (2, 3):
        choose(selector, t)
        drawn.append(selector.current)
    assert sorted(drawn) == [0, 1, 2]
    assert selector.left.tolist() == [0, 0, 0]
    assert len(choose(selector, 4)) == 2


@pytest.mark.parametrize(("credits", "expected"), [(1.1, 11), (1.11, 12), (1e-12, 1), (1e20, 100), (1e38, 100)])
def test_credits_are_exact_and_never_more_than_there_are_rounds(credits: float, expected: int) -> None:
    """1.1 x 100 / 10 is 11 (11.000000000000002 in floating point); a checkpoint cannot hold the integer 10^21."""
    population = toy_population([1] * 10, 2, 100)
    selector = TiFL(population, num_tiers=10, interval=1, credits=credits, probabilities=None)
    assert selector.left.tolist() == [expected] * 10
    assert selector.left.dtype == np.int64
    wrong: list[dict[str, Any]] = [{"probabilities": [0.5, 0.5]}, {"probabilities": [0.0] * 3}, {"num_tiers": 7}]
    for values in wrong:
        with pytest.raises(ConfigError, match=next(iter(values))):
            tifl(**values)


# --- Oort -------------------------------------------------------------------------------------------------------------


def test_oort_observes_durations_and_scales_the_slow_by_equation_1() -> None:
    """With a number more to send: 8, 21 and 53 s. T is their median, 21: only client 2 is slower, by (21 / 53)^2."""
    selector = oort(sizes=SIZES, k=3)
    run = Simulation(
        toy_components(ToyEngine(SIZES), selector.population, selector, simulated=fixed_clock()), toy_params()
    )
    run.step()
    assert selector.durations.tolist() == [8, 21, 53]
    scores = selector.scores(np.arange(3), 2)
    selector.penalty = 0.0
    assert scores / selector.scores(np.arange(3), 2) == pytest.approx([1, 1, (21 / 53) ** 2])


def test_the_late_are_not_learnt_of_and_rounds_without_an_update_not_observed() -> None:
    selector, clock = oort(sizes=SIZES, k=3), fixed_clock(deadline=30.0)
    run = Simulation(toy_components(ToyEngine(SIZES), selector.population, selector, simulated=clock), toy_params())
    assert (run.step().late, run.observed) == ([2], True)
    assert selector.durations[:2].tolist() == [8, 21]
    assert np.isnan(selector.durations[2])
    assert selector.last_round.tolist() == [1, 1, 0]
    clock.system.deadline = 0.5
    run.step()
    assert not run.observed


def test_oort_by_speed_asks_once_and_explores_the_fast() -> None:
    values = {name: getattr(oort(), name) for name in OortBySpeed.__parameters__ if name != "population"}  # type: ignore[attr-defined]
    values |= {"exploration": 1.0, "exploration_decay": 1.0, "exploration_floor": 1.0}
    sizes, counts = [1, 1, 1], np.zeros(3)
    for s in range(300):
        selector, ledger = OortBySpeed(toy_population(sizes, 1, 10), **values), Ledger()
        counts[choose(selector, 1, sizes, s, ledger=ledger)] += 1
        choose(selector, 2, sizes, s, ledger=ledger)
        assert ledger.bytes_up == 3 * 3 * 4
    assert selector.expected.tolist() == [1 + 1 + 3 + 2, 1 + 2 + 6 + 4, 1 + 4 + 12 + 8]
    speeds = 1 / selector.expected
    assert counts / 300 == pytest.approx(speeds / speeds.sum(), abs=0.1)  # three standard deviations are .09
