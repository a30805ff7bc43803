"""What selectors share, and the simple ones where clients are away or rounds have borders."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsim.core.types import Evaluation
from fedsim.selectors.base import highest, softmax, weighted_without_replacement
from fedsim.selectors.full import Full
from fedsim.selectors.pair_study import PairStudy, pair_features
from fedsim.selectors.power_of_choice import PowerOfChoice
from fedsim.selectors.random import MultinomialRandom, Random
from fedsim.selectors.round_robin import RoundRobin
from fedsim.selectors.top_loss import TopLoss
from tests.test_selectors import FixedLosses
from tests.toys import toy_clients, toy_cohort, toy_population


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_a_softmax_of_large_values_does_not_overflow() -> None:
    assert softmax(np.array([1000.0, 1000.0, -1000.0])).tolist() == [0.5, 0.5, 0]
    assert softmax(np.log([1.0, 3.0])) == pytest.approx([0.25, 0.75])


def test_positions_without_weight_are_not_drawn_even_where_others_do_not_suffice() -> None:
    assert sorted(weighted_without_replacement(np.array([0.0, 2, 0, 1]), 3, rng())) == [1, 3]


def test_draws_are_proportional_to_weights() -> None:
    firsts = [int(weighted_without_replacement(np.array([1.0, 3, 6]), 1, rng(s))[0]) for s in range(4000)]
    assert np.bincount(firsts) / 4000 == pytest.approx([0.1, 0.3, 0.6], abs=0.03)


def test_the_highest_come_best_first_and_nan_comes_last() -> None:
    assert highest(np.array([1.0, np.nan, -np.inf, 5.0]), 4, rng()).tolist() == [3, 0, 2, 1]


def test_k_is_at_most_the_number_of_those_available() -> None:
    clients = toy_clients([1] * 5, frozenset(), available=[1, 4])
    assert Full(toy_population([1] * 5, 3)).cohort_size(clients) == 2
    assert Full(toy_population([1] * 5, 1)).cohort_size(clients) == 1


def test_sizes_are_those_of_the_clients_that_are_available() -> None:
    """Of sizes 50, 1, 9 the first is away: 9 of 10 go to the last."""
    for selector in (
        Random(toy_population([50, 1, 9], 1), mode="size"),
        MultinomialRandom(toy_population([50, 1, 9], 1)),
    ):
        clients = toy_clients([50, 1, 9], frozenset(), available=[1, 2])
        picks = [int(selector.select(1, clients, rng(s)).ids[0]) for s in range(2000)]
        assert np.mean(np.array(picks) == 2) == pytest.approx(0.9, abs=0.03)


def test_a_saved_state_is_not_changed_by_going_on() -> None:
    selector, other = (RoundRobin(toy_population([1] * 4, 2)) for _ in range(2))
    clients = toy_clients([1] * 4, frozenset())
    selector.select(1, clients, rng())
    other.load_state_dict({"queue": (state := np.array([3, 2, 1, 0]))})
    other.queue[:] = 9
    assert state.tolist() == [3, 2, 1, 0]


# --- power of choice -----------------------------------------------------------------------------------------------


def pow_d(sizes: list[int], k: int, d: int | None = None, num_rounds: int = 10, **more: Any) -> PowerOfChoice:
    values: dict[str, Any] = {"estimate": "full", "schedule": "constant"} | more
    return PowerOfChoice(toy_population(sizes, k, num_rounds), num_candidates=d, **values)


def test_candidates_are_twice_k_unless_there_are_fewer_clients() -> None:
    assert pow_d([1] * 10, 3).drawn == 6
    assert pow_d([1] * 5, 3).drawn == 5
    assert pow_d([1] * 5, 3, 3).drawn == 3


@pytest.mark.parametrize(("num_rounds", "last"), [(10, 5), (9, 4)])
def test_adaptive_asks_everybody_up_to_half_of_the_rounds(num_rounds: int, last: int) -> None:
    selector = pow_d([1] * 6, 2, num_rounds=num_rounds, schedule="adaptive")
    assert [selector._num_candidates_in(t) for t in (1, last, last + 1, num_rounds)] == [6, 6, 2, 2]


def test_latest_losses_are_of_those_that_took_part_and_others_come_first() -> None:
    selector = pow_d([1] * 4, 1, 4, estimate="last")
    selector.observe(1, toy_cohort([0, 2], [1, 1], [[0, 0], [0, 0]], loss=np.array([5.0, 7.0])), None)  # type: ignore[arg-type]
    assert selector.seen.tolist() == [True, False, True, False]
    clients = toy_clients([1] * 4, selector.needs)
    picks = set()
    for s in range(20):
        selector.last_tried[:] = [1, 0, 1, 0]
        picks.add(int(selector.select(2, clients, rng(s)).ids[0]))
    assert picks == {1, 3}
    selector.seen[:] = True
    assert selector.select(3, clients, rng()).ids.tolist() == [2]


def test_candidates_are_drawn_by_size_among_those_available() -> None:
    selector = pow_d([90, 1, 9, 1], 1, 1)
    clients = toy_clients([90, 1, 9, 1], selector.needs, available=[1, 2])
    picks = [int(selector.select(1, clients, rng(s)).ids[0]) for s in range(2000)]
    assert np.mean(np.array(picks) == 2) == pytest.approx(0.9, abs=0.03)


@pytest.mark.parametrize(("estimate", "question"), [("full", "losses"), ("batch", "batch_losses")])
def test_each_estimate_asks_its_own_question(estimate: str, question: str, monkeypatch: pytest.MonkeyPatch) -> None:
    selector = pow_d([1] * 3, 1, 3, estimate=estimate)
    clients = toy_clients([1] * 3, selector.needs)
    asked: list[str] = []
    for name in ("losses", "batch_losses"):
        monkeypatch.setattr(clients, name, lambda ids, n=name: (asked.append(n), np.array([1.0, 3.0, 2.0])[ids])[1])
    assert selector.select(1, clients, rng()).ids.tolist() == [1]
    assert asked == [question]


# --- highest losses ------------------------------------------------------------------------------------------------


def test_another_runs_participation_of_exactly_as_many_rounds_is_enough(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"uploaded": n}) + "\n" for n in (1, 3)))
    population = toy_population([1] * 4, 2, 2)
    selector = TopLoss(population, count=None, match=str(tmp_path), first_round_full=False)
    clients = toy_clients([1] * 4, selector.needs, engine=FixedLosses([0.5, 2.0, 1.0, 3.0]))
    assert [selector.select(t, clients, rng()).ids.tolist() for t in (1, 2)] == [[3], [1, 2, 3]]


# --- pairs ---------------------------------------------------------------------------------------------------------


def test_a_pairs_step_is_against_its_mean_gradient_and_step_times_lr_long() -> None:
    """The toy's gradients are (m + 1, -m^2 / 7), m the mean position: (1, 0), (2, -1/7) and (3, -4/7) at lr 1."""
    tried: list[list[float]] = []

    class Server:
        def validate(self, params: dict[str, torch.Tensor]) -> Evaluation:
            tried.append(params["w"].tolist())
            return Evaluation(0.5, 1.0)

    selector = PairStudy(toy_population([1] * 3, 1), powers=[2], step=0.5)
    selector.select(1, toy_clients([1] * 3, selector.needs), rng())
    assert selector._before is not None
    before, lr, *rest = selector._before
    assert lr == 1.0
    selector._before = (before, 0.1, *rest)
    selector.observe(1, toy_cohort([0], [1], [[0, 0]]), Server())  # type: ignore[arg-type]
    means = np.array([[1.5, -1 / 14], [2, -2 / 7], [2.5, -5 / 14]])
    assert np.array(tried) == pytest.approx(-0.05 * means, rel=1e-5)
    assert selector.trace is not None
    assert selector.trace["pairs"] == [[0, 1], [0, 2], [1, 2]]


def test_features_do_not_depend_on_the_order_of_a_pair_nor_sparsity_on_scale() -> None:
    vectors = np.array([[3.0, -4.0, 1e-6, 0.2], [0.0, 2.0, 1.0, -1.0]])
    one, other = pair_features(vectors, [1, 2]), pair_features(vectors[::-1], [1, 2])
    assert set(one) == set(other)
    assert all(one[name] == pytest.approx(other[name]) for name in one)
    small = pair_features(1e-4 * vectors, [1, 2])
    assert small["sparsity sum"] == one["sparsity sum"] == [0.25 + 0.25]
