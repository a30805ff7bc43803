from typing import Any

import numpy as np
import pytest
import torch

from fedsim.cohort import Evaluation
from fedsim.selectors.gpfl import GPFL, Decreasing, Exploration, Fixed, Linear, Triangular, projections
from fedsim.selectors.gpfl_official import GPFLOfficial, verdict
from tests.toys import toy_door, toy_population

DELTA = {"w": torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, -2.0]])}
G = {"w": torch.tensor([4 / 3, 2 / 3])}


def gpfl(n: int = 3, k: int = 1, exploration: Exploration | None = None, **more: Any) -> GPFL:
    values: dict[str, Any] = {
        **{"metric": "projection", "local_direction": "per_lr", "global_direction": "previous"},
        **{"server_momentum": 0.9, "per_tensor": False, "softmax_over": "all", "reward_average": "rounds"},
        **{"rank_by": "gpcb", "factor": "literal2", "tie_sign": "intent", "reward_eval": "validation"},
    }
    return GPFL(toy_population([1] * n, k, 100), exploration=exploration or Fixed(value=0.2), **(values | more))


def test_projections_by_hand() -> None:
    c = projections(DELTA, G, "projection", False)
    assert c == pytest.approx([4.47214, 0.89443, -0.89443], abs=1e-5)
    shares = np.exp(c) / np.exp(c).sum()
    assert shares == pytest.approx([0.96842, 0.02706, 0.00452], abs=1e-5)


def test_projections_ignore_the_scale_of_g_and_are_linear_in_g_i() -> None:
    c = projections(DELTA, G, "projection", False)
    assert projections(DELTA, {"w": 7 * G["w"]}, "projection", False) == pytest.approx(c)
    assert projections({"w": 3 * DELTA["w"]}, G, "projection", False) == pytest.approx(3 * c)
    cosine = projections(DELTA, G, "cosine", False)
    assert projections({"w": 3 * DELTA["w"]}, G, "cosine", False) == pytest.approx(cosine)
    assert abs(cosine).max() <= 1
    assert projections(DELTA, G, "dot", False) == pytest.approx([20 / 3, 4 / 3, -4 / 3])


def test_per_tensor_is_the_mean_over_tensors_and_zero_directions_give_zero() -> None:
    delta = {"a": torch.tensor([[2.0]]), "b": torch.tensor([[0.0, 3.0]])}
    direction = {"a": torch.tensor([-1.0]), "b": torch.tensor([0.0, 5.0])}
    assert projections(delta, direction, "projection", True) == pytest.approx([(-2 + 3) / 2])
    zero = {n: torch.zeros_like(d) for n, d in direction.items()}
    assert projections(delta, zero, "projection", False) == pytest.approx([0])


def test_the_bonus_by_hand() -> None:
    """alpha = .2, sum of pulls = 100: n_i = 1, 4, 9 -> .60697, .30349, .20232."""
    selector = gpfl(4)
    selector.pulls = np.array([1.0, 4.0, 9.0, 86.0])
    assert selector.gpcb(2)[:3] == pytest.approx([0.60697, 0.30349, 0.20232], abs=1e-5)


@pytest.mark.parametrize(("gain", "factor"), [(0.02, 2.04040), (-0.05, 1.90246)])
def test_the_reward_factor_by_hand(gain: float, factor: float) -> None:
    selector = gpfl()
    selector.previous, selector.last = Evaluation(0.5, 1.0), Evaluation(0.5 + gain, 1.0)
    assert selector.reward_factor() == pytest.approx(factor, abs=1e-5)
    centred = gpfl(factor="centred")
    centred.previous, centred.last = selector.previous, selector.last
    assert centred.reward_factor() == pytest.approx(factor / 2, abs=1e-5)


def test_with_equal_accuracy_a_falling_loss_is_a_reward_unless_read_to_the_letter() -> None:
    for sign, expected in (("intent", np.exp(0.3)), ("literal", np.exp(-0.3))):
        selector = gpfl(tie_sign=sign)
        selector.previous, selector.last = Evaluation(0.5, 1.0), Evaluation(0.5, 0.7)
        assert selector.reward_factor() == pytest.approx(expected)


def test_rewards_are_softmax_shares_of_all_times_the_factor_for_the_selected() -> None:
    selector = gpfl()
    selector.projections = projections(DELTA, G, "projection", False)
    selector.selected = np.array([2])
    selector.previous, selector.last = Evaluation(0.5, 1.0), Evaluation(0.52, 1.0)
    selector._reward()
    assert selector.reward_sum == pytest.approx([0.96842, 0.02706, 0.00452 * 2.0404], abs=1e-5)


def test_exploration_schedules() -> None:
    assert Linear(rho=2.0, reference=None).alpha(50, 100) == 1.0
    assert Linear(rho=1.0, reference=500).alpha(800, 800) == 1.6
    assert Decreasing(rho=1.0).alpha(1, 100) == 1.0
    assert [Triangular(peak=100).alpha(t, 500) for t in (50, 100, 300)] == [0.5, 1.0, 0.5]


def test_a_large_alpha_is_a_round_robin_and_gp_ranks_by_projection_alone() -> None:
    selector = gpfl(10, 2, Fixed(value=1e6))
    for t in range(2, 42):
        top = np.argsort(-selector.gpcb(t), kind="stable")[:2]
        selector.pulls[top] += 1
    assert np.ptp(selector.pulls) <= 1


# --- the authors' code


def official(n: int = 10, k: int = 3, warmup: int = 4) -> GPFLOfficial:
    return GPFLOfficial(
        toy_population([2] * n, k, 100), warmup=warmup, exploration=Triangular(peak=100), reward_eval="test"
    )


def test_coverage_takes_exactly_the_warm_up() -> None:
    selector = official()
    picked = []
    for t in range(1, 5):
        door = toy_door([2] * 10, selector.needs, round=t, cohort_size=3)
        picked.append(selector.select(t, door, np.random.default_rng(t)).ids.tolist())
    assert [len(p) for p in picked] == [3, 3, 3, 1]
    assert sorted(sum(picked, [])) == list(range(10))
    assert selector.caveat is not None


def test_scores_divide_by_selections_plus_one() -> None:
    """Rewards +.2 and -.2 give 0, +.2 once gives .1."""
    selector = official(4)
    selector.pulls = np.array([2.0, 1.0, 1.0, 1.0])
    selector.reward_sum = np.array([0.0, 0.2, 0.0, 0.0])
    assert selector.index(2)[:2] == pytest.approx([0, 0.1])  # ln 1 = 0: no bonus


def test_ties_go_to_the_higher_id() -> None:
    selector = official(5, 2)
    selector.pulls[:] = 1
    door = toy_door([2] * 5, selector.needs, round=9, cohort_size=2)
    assert selector.select(9, door, np.random.default_rng(0)).ids.tolist() == [3, 4]


@pytest.mark.parametrize(
    ("accuracy", "loss", "expected"), [(0.6, 9, 1), (0.4, 0, -1), (0.5, 0.9, 0.5), (0.5, 1.1, -0.5), (0.5, 1.0, 0)]
)
def test_the_verdict(accuracy: float, loss: float, expected: float) -> None:
    assert verdict(Evaluation(0.5, 1.0), Evaluation(accuracy, loss)) == expected
