"""A method's first round is the first round in which clients can be reached, and not always round
1."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from fedsim.clients.system import SimulatedClock
from fedsim.core.record import Record
from fedsim.rounds.loop import Simulation
from fedsim.selectors.base import Selector
from tests.clocks import fixed_clock
from tests.test_fedabc import fedabc, top_loss
from tests.test_fedcor import NobodyIn
from tests.test_gpfl import gpfl
from tests.test_oort import oort, tifl
from tests.toys import ToyEngine, toy_components, toy_params, toy_population


def run_with_absences(
    selector: Selector,
    absent: set[int],
    num_rounds: int,
    sizes: Sequence[int] = (1,) * 4,
    clock: SimulatedClock | None = None,
) -> list[Record]:
    """Run rounds, in those of `absent` without any available client."""
    population = toy_population(sizes, selector.population.cohort_size, num_rounds)
    components = toy_components(
        ToyEngine(sizes),
        population,
        selector,
        availability=NobodyIn(absent),
        validation=True,
        num_public=2,
        simulated_clock=clock,
    )
    return list(Simulation(components, toy_params()))


def test_top_loss_selects_everybody_in_its_first_round() -> None:
    records = run_with_absences(top_loss(), {1, 2}, 4)
    assert [len(record.selected) for record in records] == [0, 0, 4, 2]


def test_fedabc_trains_everybody_in_its_first_round() -> None:
    selector = fedabc()
    _, first, second = run_with_absences(selector, {1}, 3, [1] * 3)
    assert len(first.selected) == 3
    assert second.bytes_up < first.bytes_up
    assert set(selector.predictions) == {0, 1, 2}


def test_gpfl_collects_all_updates_in_its_first_round() -> None:
    late, punctual = gpfl(4, 2), gpfl(4, 2)
    empty, *records = run_with_absences(late, {1}, 4)
    expected = run_with_absences(punctual, set(), 3)
    assert empty.bytes_up == 0
    assert [record.bytes_up for record in records] == [record.bytes_up for record in expected]
    assert records[0].selected == expected[0].selected
    assert late.projections == pytest.approx(punctual.projections)
    assert late.reward_sum == pytest.approx(punctual.reward_sum)


def test_gpfl_rewards_nobody_before_a_selection() -> None:
    selector = gpfl(4, 2, init="none")
    run_with_absences(selector, {1}, 2)
    assert not selector.reward_sum.any()


def test_oort_draws_uniformly_in_its_first_round() -> None:
    """With its prior, the small clients would be drawn in three of a thousand seeds."""
    sizes = [1, 1, 1, 1000]
    drawn: set[int] = set()
    for seed in range(20):
        selector = oort(sizes=sizes, k=1, first_round="random", exploration=1.0)
        engine = ToyEngine(sizes, seed=seed)
        components = toy_components(
            engine, selector.population, selector, availability=NobodyIn({1})
        )
        run = Simulation(components, toy_params())
        run.step()
        drawn |= set(run.step().selected)
    assert drawn == {0, 1, 2, 3}


@pytest.mark.parametrize("absent", [set(), {1}])
def test_clients_train_from_models_of_their_own_in_the_first_round(absent: set[int]) -> None:
    """Client i moves its own model (100 i, 100 i) halfway to (i, -i). The mean over i = 0, 1, 2 is
    (100 + 1, 100 - 1) / 2."""
    selector = fedabc()
    components = toy_components(
        ToyEngine([1] * 3),
        selector.population,
        selector,
        availability=NobodyIn(absent),
        num_public=2,
    )
    components = replace(components, first_model=lambda i: {"w": torch.full((2,), 100.0 * i)})
    run = Simulation(components, toy_params())
    for _ in range(1 + len(absent)):
        run.step()
    assert run.params["w"].tolist() == [50.5, 49.5]
    resumed = Simulation(components, toy_params())
    resumed.load_state_dict(run.state_dict())
    assert resumed.started


TIFL_ROUNDS = [
    (set(), [1, 3, 5, 7, 9]),
    ({1, 5}, [2, 3, 6, 7, 9]),
    ({1, 5, 6}, [2, 3, 7, 9]),
]


@pytest.mark.parametrize(("absent", "asking"), TIFL_ROUNDS)
def test_tifl_asks_late_for_accuracies_that_were_due_in_an_empty_round(
    absent: set[int], asking: list[int]
) -> None:
    """They are due in every second round. TiFL contacts all three clients to ask for them."""
    selector = tifl([1] * 3, 1, probabilities=None, interval=2)
    records = run_with_absences(selector, absent, 9, [1] * 3, clock=fixed_clock())
    assert [record.round for record in records if record.contacted == 3] == asking
