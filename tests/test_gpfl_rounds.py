"""GPFL's first three rounds by hand, with a learning rate that is not 1.

Client i pulls the model w halfway to (i, -i), accuracy is w[0] and loss w[1]. From w = 0 with K = 1 of N = 3 and
lr = 1/4: updates (0, 0), (1/2, -1/2), (1, -1), so g_i = (w - w_i) / lr = (-2i, 2i), their mean g = (-2, 2) and
c_i = <g_i, g> / |g| = sqrt(8) i. Client 2 is selected and w = (1, -1); it stays ahead, and w = (3/2, -3/2).
"""

from typing import Any

import numpy as np
import pytest
import torch

from fedsim.clients.server import Server
from fedsim.core.errors import DivergedError
from fedsim.rounds.loop import Simulation
from fedsim.selectors.gpfl import GPFL, Linear
from tests.clocks import fixed_clock
from tests.test_gpfl import gpfl
from tests.toys import ToyEngine, toy_clients, toy_cohort, toy_components, toy_params, toy_population

ROOT8, LR = np.sqrt(8), 0.25


def rounds(num_rounds: int, **switches: Any) -> GPFL:
    selector = gpfl(3, 1, **switches)
    engine = ToyEngine([1, 1, 1])
    population = toy_population([1, 1, 1], 1, num_rounds)
    parts = toy_components(engine, population, selector, validation=True, learning_rate=lambda t: LR)
    list(Simulation(parts, toy_params()))
    return selector


def shares(c: list[float]) -> np.ndarray:
    return np.exp(c) / np.exp(c).sum()


def test_round_1() -> None:
    selector = rounds(1)
    assert selector.projections == pytest.approx([0, ROOT8, 2 * ROOT8])
    assert selector.pulls.tolist() == [1, 1, 2]
    assert selector.selected.tolist() == [2]
    assert selector.direction["w"].tolist() == [-4, 4]  # (0 - w) / lr, the server's step
    assert selector.reward_sum.tolist() == [0, 0, 0]


def test_round_2_projects_on_the_step_of_round_1_and_rewards_its_selected() -> None:
    """Client 2 changes w by (1/2, -1/2), so g_2 = (-2, 2) and c_2 = sqrt(8), towards where the server went."""
    selector = rounds(2)
    assert selector.projections == pytest.approx([0, ROOT8, ROOT8])
    assert selector.pulls.tolist() == [1, 1, 3]
    assert selector.direction["w"].tolist() == [-2, 2]
    assert selector.reward_sum == pytest.approx(shares([0, ROOT8, 2 * ROOT8]) * [1, 1, 2 * np.exp(1.0)])


def test_round_3_adds_rewards_and_their_mean_is_over_rounds() -> None:
    selector = rounds(3)
    first = shares([0, ROOT8, 2 * ROOT8]) * [1, 1, 2 * np.exp(1.0)]
    second = shares([0, ROOT8, ROOT8]) * [1, 1, 2 * np.exp(0.5)]
    assert selector.reward_sum == pytest.approx(first + second)
    assert selector.projections[2] == pytest.approx(ROOT8 / 2)
    bonus = 0.2 * np.sqrt(2 * np.log(6) / np.array([1, 1, 4]))
    assert selector.gpcb(4) == pytest.approx((first + second) / 3 + bonus)


@pytest.mark.parametrize(
    ("direction", "in_round_1", "in_round_2"),
    [("per_lr", 2 * ROOT8, ROOT8), ("update", 2 * ROOT8 * LR, ROOT8 * LR), ("per_step", ROOT8, ROOT8 / 2)],
)
def test_local_directions(direction: str, in_round_1: float, in_round_2: float) -> None:
    """A client with one sample makes two steps in its two epochs."""
    assert rounds(1, local_direction=direction).projections[2] == pytest.approx(in_round_1)
    assert rounds(2, local_direction=direction).projections[2] == pytest.approx(in_round_2)


@pytest.mark.parametrize(
    ("direction", "expected", "projection"),
    [("previous", [-2, 2], ROOT8), ("same_round", [-2, 2], ROOT8), ("server_momentum", [-7.22, 7.22], ROOT8)],
)
def test_global_directions(direction: str, expected: list[float], projection: float) -> None:
    """With momentum .9: (-2, 2), then .9 (-2, 2) + (-4, 4) = (-5.8, 5.8), then .9 of that + (-2, 2)."""
    selector = rounds(2, global_direction=direction)
    assert selector.direction["w"].tolist() == pytest.approx(expected)
    assert selector.projections[2] == pytest.approx(projection)


def test_rewards_by_pulls_leave_the_first_round_of_everybody_out() -> None:
    selector = rounds(3, reward_average="pulls")
    assert selector.pulls.tolist() == [1, 1, 4]
    bonus = 0.2 * np.sqrt(2 * np.log(6) / np.array([1, 1, 4]))
    assert selector.gpcb(4) == pytest.approx(np.array([0, 0, selector.reward_sum[2] / 3]) + bonus)
    plus_one = rounds(3, reward_average="pulls_plus_one")
    assert plus_one.gpcb(4) == pytest.approx(plus_one.reward_sum / np.array([1, 1, 4]) + bonus)
    selector = gpfl(3, 1, exploration=Linear(rho=1.0, reference=None))  # of 100 rounds, at the round itself
    selector.pulls = np.array([1.0, 2.0, 3.0])
    assert selector.gpcb(50) == pytest.approx(0.5 * np.sqrt(2 * np.log(6) / selector.pulls))


def broken_rounds(num_rounds: int, broken: set[int], **switches: Any) -> GPFL:
    """Six clients, two of them selected; the updates of the `broken` ones are nan."""
    engine, population = ToyEngine([1] * 6), toy_population([1] * 6, 2, num_rounds)
    engine.broken = broken
    selector = gpfl(6, 2, **switches)
    list(Simulation(toy_components(engine, population, selector, validation=True), toy_params()))
    return selector


@pytest.mark.parametrize("switches", [{}, {"local_direction": "momentum_buffer"}, {"local_direction": "per_step"}])
def test_one_broken_update_in_round_1_leaves_the_projections_of_the_others(switches: dict[str, Any]) -> None:
    """They are on the mean of five clients now, which points the same way."""
    sound, hurt = broken_rounds(1, set(), **switches).projections, broken_rounds(1, {1}, **switches).projections
    assert hurt[1] == 0
    assert np.delete(hurt, 1) == pytest.approx(np.delete(sound, 1))
    assert (np.diff(np.abs(hurt[2:])) > 0).all()
    assert hurt[2] != 0
    selector = broken_rounds(8, {0}, global_direction="server_momentum")
    assert torch.isfinite(selector.direction["w"]).all()
    assert selector.projections[3:].all()
    with pytest.raises(DivergedError, match="every update of the round"):
        broken_rounds(1, set(range(6)))


@pytest.mark.parametrize("direction", ["previous", "same_round"])
def test_projections_stay_where_the_global_direction_is_zero(direction: str) -> None:
    """|g| = 0 says nothing about a client: its c stays as it is, in place of 0, which others may be below."""
    selector = gpfl(3, 1, init="none", global_direction=direction)
    selector.projections[:] = [1.0, 2.0, 3.0]
    engine, context = ToyEngine([1] * 3), toy_clients([1] * 3, selector.needs)._context
    data = toy_components(engine, selector.population, selector, validation=True).server_data
    server = Server(engine, data, context, toy_params())
    selector.observe(2, toy_cohort([0, 2], [1, 1], [[0, 0], [0, 0]]), server)
    selector.observe(3, toy_cohort([0, 2], [1, 1], [[1, 1], [2, 2]]), server)
    assert selector.projections.tolist() == [1, 2, 3]


def test_a_round_in_which_nothing_arrives_multiplies_no_reward() -> None:
    """Nothing arrives in time in round 3, so that the accuracy of the model does not change."""
    selector, clock = gpfl(6, 2), fixed_clock(6, 2)
    parts = toy_components(ToyEngine([1] * 6), selector.population, selector, validation=True, simulated=clock)
    run = Simulation(parts, toy_params())
    run.step()
    run.step()
    assert selector.reward_factor() > 2
    clock.system.deadline = 0.5
    assert run.step().uploaded == 0
    assert selector.reward_factor() == 1
    before = selector.reward_sum.copy()
    run.step()
    assert selector.reward_sum - before == pytest.approx(shares(selector.projections.tolist()))
