"""The first round of a method is the first round in which clients can be reached."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedsim.core.record import Record
from fedsim.rounds.loop import Simulation
from fedsim.selectors.base import Selector
from tests.clocks import fixed_clock
from tests.test_fedabc import fedabc, top_loss
from tests.test_gpfl import gpfl
from tests.test_oort import oort, tifl
from tests.toys import NobodyIn, ToyEngine, toy_components, toy_params, toy_population


def run(
    selector: Selector,
    absent: set[int],
    num_rounds: int,
    sizes: Sequence[int] = (1,) * 4,
    clock: Any = None,
) -> list[Record]:
    """Return the records of a run in which nobody can be reached in the rounds `absent`."""
    population = toy_population(sizes, selector.population.cohort_size, num_rounds)
    parts = toy_components(
        ToyEngine(sizes),
        population,
        selector,
        availability=NobodyIn(absent),
        validation=True,
        num_public=2,
        simulated_clock=clock,
    )
    return list(Simulation(parts, toy_params()))


def test_top_loss_is_full_in_the_first_round_with_clients() -> None:
    assert [len(record.selected) for record in run(top_loss(), {1, 2}, 4)] == [0, 0, 4, 2]


def test_fedabc_trains_all_clients_in_the_first_round_with_clients() -> None:
    selector = fedabc()
    records = run(selector, {1}, 3, [1] * 3)
    assert [len(record.selected) for record in records][:2] == [0, 3]
    assert records[2].bytes_up < records[1].bytes_up
    assert set(selector.predictions) == {0, 1, 2}


def test_gpfl_collects_all_updates_in_the_first_round_with_clients() -> None:
    late, at_once = gpfl(4, 2), gpfl(4, 2)
    records = run(late, {1}, 4)
    expected = run(at_once, set(), 3)
    assert [record.bytes_up for record in records] == [0] + [r.bytes_up for r in expected]
    assert records[1].selected == expected[0].selected
    assert late.projections == pytest.approx(at_once.projections)
    assert late.reward_sum == pytest.approx(at_once.reward_sum)


def test_gpfl_rewards_nobody_before_a_selection() -> None:
    selector = gpfl(4, 2, init="none")
    run(selector, {1}, 2)
    assert not selector.reward_sum.any()


def test_oort_draws_uniformly_in_the_first_round_with_clients() -> None:
    """By their prior, the small clients would be drawn in three of a thousand draws."""
    sizes = [1, 1, 1, 1000]
    drawn = set()
    for seed in range(20):
        selector = oort(sizes=sizes, k=1, first_round="random", exploration=1.0)
        engine = ToyEngine(sizes, seed=seed)
        parts = toy_components(engine, selector.population, selector, availability=NobodyIn({1}))
        simulation = Simulation(parts, toy_params())
        simulation.step()
        drawn |= set(simulation.step().selected)
    assert drawn == {0, 1, 2, 3}


@pytest.mark.parametrize("absent", [set(), {1}])
def test_first_models_of_clients_are_those_of_the_first_round_with_clients(
    absent: set[int],
) -> None:
    """Client i moves its own model (100 i, 100 i) halfway to (i, -i). The mean over 0, 1, 2 is that
    of (50.5 i, 49.5 i)."""
    selector = fedabc()
    parts = toy_components(
        ToyEngine([1] * 3),
        selector.population,
        selector,
        availability=NobodyIn(absent),
        num_public=2,
    )
    parts = replace(parts, first_model=lambda i: {"w": torch.full((2,), 100.0 * i)})
    simulation = Simulation(parts, toy_params())
    for _ in range(1 + len(absent)):
        simulation.step()
    assert simulation.params["w"].tolist() == [50.5, 49.5]
    resumed = Simulation(parts, toy_params())
    resumed.load_state_dict(simulation.state_dict())
    assert resumed.started


@pytest.mark.parametrize(
    ("absent", "expected"),
    [(set(), [1, 3, 5, 7, 9]), ({1, 5}, [2, 3, 6, 7, 9]), ({1, 5, 6}, [2, 3, 7, 9])],
)
def test_tifl_asks_for_accuracies_in_the_round_after_they_were_due(
    absent: set[int], expected: list[int]
) -> None:
    """They are due every other round. All three clients are contacted to report them."""
    selector = tifl([1] * 3, 1, probabilities=None, interval=2)
    records = run(selector, absent, 9, [1] * 3, clock=fixed_clock())
    assert [record.round for record in records if record.contacted == 3] == expected
