"""What a method does in its first round is done in the first round in which clients can be
reached."""

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
from tests.test_fedcor import NobodyIn
from tests.test_gpfl import gpfl
from tests.test_oort import oort, tifl
from tests.toys import ToyEngine, toy_components, toy_params, toy_population


def rounds(
    selector: Selector,
    absent: set[int],
    num_rounds: int,
    sizes: Sequence[int] = (1,) * 4,
    clock: Any = None,
) -> list[Record]:
    population = toy_population(sizes, selector.population.cohort_size, num_rounds)
    more = {
        "availability": NobodyIn(absent),
        "validation": True,
        "num_public": 2,
        "simulated_clock": clock,
    }
    return list(
        Simulation(toy_components(ToyEngine(sizes), population, selector, **more), toy_params())
    )


def test_top_loss_asks_nobody_in_the_first_round_of_somebody() -> None:
    assert [len(record.selected) for record in rounds(top_loss(), {1, 2}, 4)] == [0, 0, 4, 2]


def test_fedabc_trains_everybody_in_the_first_round_of_somebody() -> None:
    selector = fedabc()
    found = rounds(selector, {1}, 3, [1] * 3)
    assert [len(record.selected) for record in found][:2] == [0, 3]
    assert found[2].bytes_up < found[1].bytes_up
    assert set(selector.predictions) == {0, 1, 2}


def test_gpfl_collects_all_updates_in_the_first_round_of_somebody() -> None:
    late, at_once = gpfl(4, 2), gpfl(4, 2)
    found, expected = rounds(late, {1}, 4), rounds(at_once, set(), 3)
    assert [record.bytes_up for record in found] == [0] + [record.bytes_up for record in expected]
    assert found[1].selected == expected[0].selected
    assert late.projections == pytest.approx(at_once.projections)
    assert late.reward_sum == pytest.approx(at_once.reward_sum)
    selector = gpfl(4, 2, init="none")  # rewards nobody before a selection
    rounds(selector, {1}, 2)
    assert not selector.reward_sum.any()


def test_oort_draws_uniformly_in_the_first_round_of_somebody() -> None:
    """By their prior, the small clients would come in three of a thousand draws."""
    drawn, sizes = set(), [1, 1, 1, 1000]
    for seed in range(20):
        selector = oort(sizes=sizes, k=1, first_round="random", exploration=1.0)
        engine = ToyEngine(sizes, seed=seed)
        parts = toy_components(engine, selector.population, selector, availability=NobodyIn({1}))
        run = Simulation(parts, toy_params())
        run.step()
        drawn |= set(run.step().selected)
    assert drawn == {0, 1, 2, 3}


def test_clients_own_first_models_are_those_of_the_first_round_of_somebody() -> None:
    """Each client moves its own model halfway to (i, -i): the mean of those three is far from the
    server's zeros."""
    found = []
    for absent in (set[int](), {1}):
        selector = fedabc()
        more = {"availability": NobodyIn(absent), "num_public": 2}
        parts = toy_components(ToyEngine([1] * 3), selector.population, selector, **more)
        run = Simulation(
            replace(parts, first_model=lambda i: {"w": torch.full((2,), 100.0 * i)}), toy_params()
        )
        for _ in range(1 + len(absent)):
            run.step()
        found.append(run.params["w"].tolist())
        again = Simulation(parts, toy_params())
        again.load_state_dict(run.state_dict())
        assert again.started
    assert found == [[50.5, 49.5]] * 2


def test_tifl_asks_for_accuracies_that_were_due_in_a_round_of_nobody() -> None:
    """Everybody is contacted to report them: due every other round, and done one later where nobody
    was there."""
    for absent, told in (
        (set(), [1, 3, 5, 7, 9]),
        ({1, 5}, [2, 3, 6, 7, 9]),
        ({1, 5, 6}, [2, 3, 7, 9]),
    ):
        selector = tifl([1] * 3, 1, probabilities=None, interval=2)
        found = rounds(selector, absent, 9, [1] * 3, clock=fixed_clock())
        assert [record.round for record in found if record.contacted == 3] == told
