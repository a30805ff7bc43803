"""Shapley values and the selectors that learn from them."""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import scipy.special
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


def by_definition(worth: Callable[[frozenset[int]], float], num: int) -> np.ndarray:
    """Return the mean contributions over all orders."""
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
    """The last player changes no worth."""
    random = np.random.default_rng(seed)
    worths: dict[frozenset[int], float] = defaultdict(random.random)

    def worth(members: frozenset[int]) -> float:
        return worths[members - {num - 1}]

    values = exact_values(worth, num)
    assert values == pytest.approx(by_definition(worth, num))
    assert values.sum() == pytest.approx(worth(frozenset(range(num))) - worth(frozenset()))
    assert values[-1] == pytest.approx(0)


def test_sampling_converges_and_truncation_saves_evaluations() -> None:
    random = np.random.default_rng(0)
    weights = random.random(5)
    calls: list[frozenset[int]] = []

    def worth(members: frozenset[int]) -> float:
        calls.append(members)
        return math.sqrt(sum(weights[i] for i in members))

    exact = exact_values(worth, 5)
    assert sampled_values(worth, 5, 4000, 0.0, random) == pytest.approx(exact, abs=0.02)
    calls.clear()
    # every order ends at once: the worth of all, and of nobody in each order
    sampled_values(worth, 5, 10, 10.0, random)
    assert len(calls) == 1 + 10


@dataclass
class OneNumber:
    """A server at which the accuracy of a model is its first number."""

    calls: int = 0

    def validate(self, params: Params) -> Evaluation:
        self.calls += 1
        value = float(params["w"][0])
        return Evaluation(accuracy=value, loss=-value)


SERVER: Any = OneNumber()


def valuation(**changes: Any) -> Valuation:
    values = {"utility": "loss", "average": "uniform", "method": "auto"}
    return Valuation(**(values | {"permutations": 5, "tolerance": 0.0} | changes))


def bandit(n: int, k: int, confidence: float = 0.0) -> ShapleyBandit:
    return ShapleyBandit(toy_population([1] * n, k), valuation=valuation(), confidence=confidence)


def s_fedavg(n: int, k: int) -> SFedAvg:
    return SFedAvg(toy_population([1] * n, k), valuation=valuation(), keep=0.75)


@pytest.mark.parametrize(
    ("coalition", "by_size", "share", "expected"),
    [
        (set(), False, 1.0, [0, 0]),  # the initial model
        ({0, 1}, False, 1.0, [2, 1]),
        ({0, 1}, True, 1.0, [1.5, 1.5]),
        ({0, 1}, True, 0.5, [0.75, 0.75]),
    ],
)
def test_averages_of_subsets(
    coalition: set[int], by_size: bool, share: float, expected: list[float]
) -> None:
    """Updates (3, 0) and (1, 2) of clients with 1 and 3 samples."""
    cohort = toy_cohort([2, 5, 7], [1, 3, 4], [[3, 0], [1, 2], [9, 9]])
    assert average_model(cohort, frozenset(coalition), by_size, share)["w"].tolist() == expected


@pytest.mark.parametrize(
    ("utility", "average", "both"), [("loss", "uniform", 2.0), ("accuracy", "by_size", 2.5)]
)
def test_values_by_hand_of_averages_that_weigh_as_asked(
    utility: str, average: str, both: float
) -> None:
    """Updates 1 and 3 of clients with 1 and 3 samples: their mean is 2, or 2.5 by size; 2^K
    passes."""
    cohort = toy_cohort([0, 1], [1, 3], [[1, 0], [3, 0]])
    server: Any = OneNumber()
    judge = valuation(utility=utility, average=average)
    values = judge.values(cohort, server, np.random.default_rng(0))
    assert values == pytest.approx([(1 + both - 3) / 2, (3 + both - 1) / 2])
    assert server.calls == 4


def test_relevance_is_a_running_mean() -> None:
    """It starts at 1 / N. Worths of {1}, {2} and both are 2, 0 and 1: values 1.5 and -0.5."""
    selector = s_fedavg(4, 1)
    selector.observe(1, toy_cohort([1, 2], [1, 1], [[2, 0], [0, 0]]), SERVER)
    changed = [0.75 * 0.25 + 0.25 * 1.5, 0.75 * 0.25 - 0.25 * 0.5]
    assert selector.relevance == pytest.approx([0.25, *changed, 0.25])


def test_a_client_is_as_likely_as_scipys_softmax_of_its_relevance() -> None:
    relevance = [0.5, -1.0, 1.0, 0.0]
    counts = np.zeros(4)
    for seed in range(1000):
        counts[drawn_by(relevance, 1, seed)] += 1
    expected = scipy.special.softmax(relevance)
    assert counts / 1000 == pytest.approx(expected, abs=4 * np.sqrt(0.25 / 1000))


def test_every_client_is_valued_once_and_then_the_highest_means_win() -> None:
    selector = bandit(6, 2)
    worth = [0.0, 5, 1, 4, 2, 3]
    cohorts = []
    for t in range(1, 6):
        ids = picked(selector, t, t)
        cohorts.append(ids)
        selector.observe(t, toy_cohort(ids, [1, 1], [[worth[i], 0.0] for i in ids]), SERVER)
    assert sorted(sum(cohorts[:3], [])) == list(range(6))
    assert cohorts[3] == cohorts[4]
    assert 1 in cohorts[3]


@pytest.mark.parametrize("make", [bandit, s_fedavg])
def test_values_of_broken_updates_are_ignored(make: Callable[[int, int], Any]) -> None:
    selector = make(2, 1)
    before = selector.state_dict()
    with np.errstate(invalid="ignore"):
        selector.observe(1, toy_cohort([0, 1], [1, 1], [[np.inf, 0], [1, 0]]), SERVER)
    for name, value in selector.state_dict().items():
        assert np.array_equal(before[name], value)


def test_only_values_that_are_not_finite_are_ignored() -> None:
    selector: Any = bandit(2, 1)
    selector.valuation.values = lambda *_: np.array([1.0, np.nan])
    selector.observe(1, toy_cohort([0, 1], [1, 1], [[1, 0], [1, 0]]), SERVER)
    assert (selector.num_values.tolist(), selector.value_sum.tolist()) == ([1, 0], [1, 0])


@pytest.mark.parametrize("t", [1, 7])
def test_the_confidence_bound_is_the_root_of_ln_t_over_times(
    t: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Means 2 / 4 and -1 / 1. A client without a value comes first."""
    seen: list[np.ndarray] = []

    def watched(scores: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
        seen.append(scores)
        return np.arange(count)

    monkeypatch.setattr("fedsim.selectors.base.highest", watched)
    selector = bandit(3, 1, confidence=0.3)
    selector.value_sum = np.array([2.0, -1.0, 0.0])
    selector.num_values = np.array([4, 1, 0])
    picked(selector, t)
    widths = 0.3 * np.sqrt(np.log(t) / np.array([4, 1]))
    assert seen[0] == pytest.approx([0.5 + widths[0], -1 + widths[1], np.inf])


def test_auto_is_exact_up_to_ten_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    for name in ("exact_values", "sampled_values"):
        monkeypatch.setattr(f"fedsim.selectors.shapley.{name}", lambda *_, n=name: used.append(n))
    for num in (10, 11):
        cohort = toy_cohort(list(range(num)), [1] * num, [[0, 0]] * num)
        valuation().values(cohort, SERVER, np.random.default_rng(0))
    assert used == ["exact_values", "sampled_values"]


def test_an_order_ends_near_the_worth_of_all_and_not_before() -> None:
    """The worth is the number of members, at most 2 of 3: the first two of each order count."""
    values = sampled_values(lambda s: float(min(len(s), 2)), 3, 300, 0.5, np.random.default_rng(0))
    assert values.sum() == pytest.approx(2)
    assert values == pytest.approx([2 / 3] * 3, abs=0.1)


def drawn_by(relevance: list[float], count: int, seed: int) -> list[int]:
    """Return the clients that S-FedAvg draws for these relevances."""
    selector = s_fedavg(len(relevance), count)
    selector.relevance[:] = relevance
    return picked(selector, 2, seed)


@pytest.mark.parametrize("seed", range(20))
def test_relevances_draw_the_clients_that_weights_of_the_softmax_draw(seed: int) -> None:
    relevance = np.random.default_rng(1000 + seed).normal(0, 3, 8)
    drawn = weighted_without_replacement(softmax(relevance), 3, np.random.default_rng(seed))
    assert drawn_by(relevance.tolist(), 3, seed) == sorted(drawn.tolist())


@pytest.mark.parametrize("seed", range(20))
def test_far_lower_relevances_are_drawn_if_there_are_no_others(seed: int) -> None:
    """exp(-800) is 0 in floating point."""
    assert drawn_by([0, -1e5, -800, 1e300], 3, seed) == [0, 2, 3]
