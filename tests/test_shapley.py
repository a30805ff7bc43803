import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import scipy.special
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.core.types import Evaluation, Params
from fedsim.selectors.base import softmax, weighted_without_replacement
from fedsim.selectors.shapley import (
    SFedAvg,
    ShapleyBandit,
    Valuation,
    average_model,
    exact_values,
    sampled_values,
)
from tests.toys import picked, toy_cohort, toy_population


def enumerated(worth: Callable[[frozenset[int]], float], num: int) -> np.ndarray:
    """The definition: mean marginal worth over all orders."""
    values = np.zeros(num)
    for order in itertools.permutations(range(num)):
        for place, i in enumerate(order):
            values[i] += worth(frozenset(order[: place + 1])) - worth(frozenset(order[:place]))
    return values / math.factorial(num)


def test_two_players_by_hand() -> None:
    worths = {frozenset(): 0.1, frozenset({0}): 0.3, frozenset({1}): 0.2, frozenset({0, 1}): 0.6}
    assert exact_values(worths.__getitem__, 2) == pytest.approx([0.3, 0.2])


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(0, 10**6))
def test_exact_equals_the_definition_is_efficient_and_null_players_get_nothing(
    num: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    table = {
        frozenset(s): random.random()
        for r in range(num)
        for s in itertools.combinations(range(num - 1), r)
    }
    worth = lambda members: table[frozenset(members) - {num - 1}]
    values = exact_values(worth, num)
    assert values == pytest.approx(enumerated(worth, num))
    assert values.sum() == pytest.approx(worth(frozenset(range(num))) - worth(frozenset()))
    assert values[-1] == pytest.approx(0)


def test_sampling_converges_and_truncation_saves_evaluations() -> None:
    random, calls = np.random.default_rng(0), list[frozenset[int]]()
    weights = random.random(5)

    def worth(members: frozenset[int]) -> float:
        calls.append(members)
        return math.sqrt(sum(weights[i] for i in members))

    exact = exact_values(worth, 5)
    assert sampled_values(worth, 5, 4000, 0.0, random) == pytest.approx(exact, abs=0.02)
    calls.clear()
    sampled_values(worth, 5, 10, 10.0, random)
    assert len(calls) == 1 + 10


@dataclass
class OneNumber:
    calls: int = 0

    def validate(self, params: Params) -> Evaluation:
        self.calls += 1
        value = float(params["w"][0])
        return Evaluation(accuracy=value, loss=-value)


def valuation(**more: Any) -> Valuation:
    values = {
        "utility": "loss",
        "average": "uniform",
        "method": "auto",
        "permutations": 5,
        "tolerance": 0.0,
    }
    return Valuation(**(values | more))


def test_averages_of_subsets() -> None:
    cohort = toy_cohort([2, 5, 7], [1, 3, 4], [[3, 0], [1, 2], [9, 9]])
    assert torch.equal(average_model(cohort, frozenset(), False)["w"], cohort.start["w"])
    assert average_model(cohort, frozenset({0, 1}), False)["w"].tolist() == [2, 1]
    assert average_model(cohort, frozenset({0, 1}), True)["w"].tolist() == [1.5, 1.5]
    assert average_model(cohort, frozenset({0, 1}), True, 0.5)["w"].tolist() == [0.75, 0.75]


@pytest.mark.parametrize(
    ("utility", "average", "both"), [("loss", "uniform", 2.0), ("accuracy", "by_size", 2.5)]
)
def test_values_by_hand_of_averages_that_weigh_as_asked(
    utility: str, average: str, both: float
) -> None:
    """Updates 1 and 3 of clients with 1 and 3 samples: their mean is 2, or 2.5 by size; 2^K
    passes."""
    cohort, server = toy_cohort([0, 1], [1, 3], [[1, 0], [3, 0]]), OneNumber()
    judge: Any = valuation(utility=utility, average=average)
    values = judge.values(cohort, server, np.random.default_rng(0))
    assert values == pytest.approx([(1 + both - 3) / 2, (3 + both - 1) / 2])
    assert server.calls == 4


def test_relevance_is_a_running_mean_and_the_draw_a_softmax_of_it() -> None:
    selector = SFedAvg(toy_population([1] * 4, 1), valuation=valuation(), keep=0.75)
    assert selector.relevance.tolist() == [0.25] * 4
    selector.observe(1, toy_cohort([1, 2], [1, 1], [[2, 0], [0, 0]]), OneNumber())  # type: ignore[arg-type]
    assert selector.relevance == pytest.approx(
        [0.25, 0.1875 + 0.25 * 1.5, 0.1875 + 0.25 * -0.5, 0.25]
    )
    assert {relevant([0, 0, 50, 0], 1, seed)[0] for seed in range(20)} == {2}


def test_a_client_is_as_likely_as_scipys_softmax_of_its_relevance() -> None:
    relevance = [0.5, -1.0, 1.0, 0.0]
    counts = np.zeros(4)
    for seed in range(1000):
        counts[relevant(relevance, 1, seed)] += 1
    assert counts / 1000 == pytest.approx(
        scipy.special.softmax(relevance), abs=4 * np.sqrt(0.25 / 1000)
    )


def test_everybody_is_valued_once_and_then_the_highest_means_win() -> None:
    selector = ShapleyBandit(toy_population([1] * 6, 2), valuation=valuation(), confidence=0.0)
    worth, rounds = np.array([0.0, 5, 1, 4, 2, 3]), []
    for t in range(1, 6):
        rounds.append(ids := picked(selector, t, t))
        delta = [[float(worth[i]), 0.0] for i in ids]
        selector.observe(t, toy_cohort(ids, [1, 1], delta), OneNumber())  # type: ignore[arg-type]
    assert sorted(sum(rounds[:3], [])) == list(range(6))
    assert rounds[3] == rounds[4]
    assert 1 in rounds[3]


def test_values_that_are_not_finite_are_dropped() -> None:
    cohort = toy_cohort([0, 1], [1, 1], [[np.inf, 0], [1, 0]])
    for selector in (
        SFedAvg(toy_population([1] * 2, 1), valuation=valuation(), keep=0.75),
        ShapleyBandit(toy_population([1] * 2, 1), valuation=valuation(), confidence=0.0),
    ):
        before = selector.state_dict()
        with np.errstate(invalid="ignore"):
            selector.observe(1, cohort, OneNumber())  # type: ignore[arg-type]
        assert all(np.array_equal(before[n], v) for n, v in selector.state_dict().items())
    selector.valuation.values = lambda *_: np.array([1.0, np.nan])  # type: ignore[method-assign]
    selector.observe(1, cohort, OneNumber())  # type: ignore[arg-type]
    assert (selector.times.tolist(), selector.total.tolist()) == ([1, 0], [1, 0])  # type: ignore[attr-defined]


def test_the_confidence_bound_is_the_root_of_ln_t_over_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[np.ndarray] = []

    def watched(scores: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
        seen.append(scores)
        return np.arange(count)

    monkeypatch.setattr("fedsim.selectors.shapley.highest", watched)
    selector = ShapleyBandit(toy_population([1] * 3, 1), valuation=valuation(), confidence=0.3)
    selector.total, selector.times = np.array([2.0, -1.0, 0.0]), np.array([4, 1, 0])
    for t in (1, 7):
        picked(selector, t)
        assert seen[-1] == pytest.approx(
            [0.5 + 0.3 * np.sqrt(np.log(t) / 4), -1 + 0.3 * np.sqrt(np.log(t)), np.inf]
        )


def test_auto_is_exact_up_to_ten_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    for name in ("exact_values", "sampled_values"):
        monkeypatch.setattr(f"fedsim.selectors.shapley.{name}", lambda *_, n=name: used.append(n))
    for num in (10, 11):
        cohort = toy_cohort(list(range(num)), [1] * num, [[0, 0]] * num)
        valuation().values(cohort, OneNumber(), np.random.default_rng(0))  # type: ignore[arg-type]
    assert used == ["exact_values", "sampled_values"]


def test_an_order_is_cut_short_near_to_everybodys_worth_and_not_before() -> None:
    """Worth is the number of members, at most 2 of 3: of each order the first two count, whoever
    they are."""
    values = sampled_values(lambda s: float(min(len(s), 2)), 3, 300, 0.5, np.random.default_rng(0))
    assert values.sum() == pytest.approx(2)
    assert values == pytest.approx([2 / 3] * 3, abs=0.1)


def relevant(relevance: list[float], count: int, seed: int = 0) -> list[int]:
    """Whom S-FedAvg draws for these relevances."""
    selector = SFedAvg(
        toy_population([1] * len(relevance), count), valuation=valuation(), keep=0.75
    )
    selector.relevance[:] = relevance
    return picked(selector, 2, seed)


def test_relevances_draw_whom_the_softmax_does_and_far_lower_ones_where_there_are_no_others() -> (
    None
):
    for seed in range(20):
        assert relevant([0, -1e5, -800, 1e300], 3, seed) == [0, 2, 3]
        relevance = np.random.default_rng(1000 + seed).normal(0, 3, 8)
        drawn = weighted_without_replacement(softmax(relevance), 3, np.random.default_rng(seed))
        assert relevant(relevance.tolist(), 3, seed) == sorted(drawn.tolist())
