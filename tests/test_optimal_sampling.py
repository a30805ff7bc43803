from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedsim.clients.ledger import Ledger
from fedsim.selectors import optimal_sampling
from fedsim.selectors.optimal_sampling import OptimalSampling, aggregated_probabilities, exact_probabilities
from tests.clocks import fixed_clock
from tests.toys import picked, selection_of, toy_population


@pytest.mark.parametrize(
    ("u", "m", "expected"),
    [
        ((1, 2, 3, 4), 2, (0.2, 0.4, 0.6, 0.8)),
        ((1, 1, 1, 7), 2, (1 / 3, 1 / 3, 1 / 3, 1)),
        ((2, 2, 2), 1, (1 / 3,) * 3),
        ([0.1] * 100 + [0.2] * 1000, 1050, [0.5] * 100 + [1.0] * 1000),  # whose border falls among equal ones
    ],
)
def test_probabilities_by_hand(u: Any, m: int, expected: Any) -> None:
    assert exact_probabilities(np.array(u, float), m) == pytest.approx(expected)
    assert aggregated_probabilities(np.array(u, float), m, 4)[0] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("u", "m", "iterations", "exchanges"),
    [
        ((1, 2, 3, 4), 2, 4, 1),
        ((1, 1, 1, 7), 2, 4, 2),
        ((1, 2, 4, 8, 16, 32), 3, 1, 1),
        ((10, 1, 1), 2, 1, 1),  # 2 u / sum u is capped at 1 for the first; the others share what is left of 2
        ((10, 1, 1), 2, 2, 2),  # a second exchange finds nothing more to do
        ((10, 1, 1), 2, 9, 2),
    ],
)
def test_exchanges_are_counted_until_nothing_is_left_to_rescale(
    u: Any, m: int, iterations: int, exchanges: int
) -> None:
    chances, asked = aggregated_probabilities(np.array(u, float), m, iterations)
    assert asked == exchanges
    assert u[0] != 10 or chances == pytest.approx([1, 0.5, 0.5])


def test_exchanges_follow_one_another_on_the_simulated_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slowest client, 2: 1 + 4 + 36 s for model and training and 4 s for a norm; then 1 + 8 s for two numbers."""
    answers = aggregated_probabilities(np.array([1.0, 2, 3]), 1, 4)[0], 3
    monkeypatch.setattr(optimal_sampling, "aggregated_probabilities", lambda *_: answers)
    selector = OptimalSampling(toy_population([1, 2, 3], 1), probabilities="aggregated", iterations=4)
    clock = fixed_clock().round(1, 0.0)
    picked(selector, simulated=clock)
    assert clock.asked == 45 + 3 * 9


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 100), min_size=1, max_size=12), st.integers(1, 12))
@example([1.0] * 10 + [2.2e-311, 5e-324], 11)
@example([100.0] * 10 + [5e-324] * 2, 11)
def test_probabilities_sum_to_the_budget_and_grow_with_the_norm(values: list[float], m: int) -> None:
    u, m = np.array(values), min(m, len(values))
    for chances in (exact_probabilities(u, m), aggregated_probabilities(u, m, 50)[0]):
        assert chances.sum() == pytest.approx(m)
        assert ((chances >= 0) & (chances <= 1 + 1e-12)).all()
        assert (np.diff(chances[np.argsort(u, kind="stable")]) >= -1e-9).all()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.1, 100), min_size=3, max_size=8), st.integers(1, 6), st.integers(0, 1000))
def test_exact_minimises_the_variance_and_the_aggregate_form_converges_to_it(
    values: list[float], m: int, seed: int
) -> None:
    u, m = np.array(values), min(m, len(values) - 1)
    best = exact_probabilities(u, m)
    rng = np.random.default_rng(seed)
    for _ in range(20):
        other = np.clip(best + 0.05 * rng.standard_normal(len(u)), 1e-3, 1)
        other *= m / other.sum()
        if other.max() <= 1:
            assert (u**2 / best).sum() <= (u**2 / other).sum() * (1 + 1e-9)
    assert aggregated_probabilities(u, m, 100)[0] == pytest.approx(best)


def test_weights_make_the_average_unbiased() -> None:
    sizes, m = [1, 2, 3, 4], 2
    selector = OptimalSampling(toy_population(sizes, m), probabilities="exact", iterations=4)
    total, uploads = np.zeros(4), []
    for s in range(4000):
        selection = selection_of(selector, seed=s)
        assert selection.weights is not None
        total[selection.ids] += selection.weights
        uploads.append(len(selection.ids))
    # client 0 of the toy has an update of zero, so that it is never asked to send it
    assert total[1:] / 4000 == pytest.approx(np.array(sizes[1:]) / 10, abs=0.02)
    assert np.mean(uploads) == pytest.approx(m, abs=0.05)
    assert len(set(uploads)) > 1


def test_chances_grow_with_the_share_of_data_times_the_norm_of_the_update() -> None:
    """Updates of clients 1 and 2 are as 1 to 2, their shares 1/4 and 3/4: chances 1/7 and 6/7, weights p / chance."""
    selector = OptimalSampling(toy_population([1, 1, 3], 1), probabilities="exact", iterations=1)
    found: dict[int, set[float]] = {1: set(), 2: set()}
    for seed in range(40):
        selection = selection_of(selector, seed=seed, available=[1, 2])
        assert selection.weights is not None
        for client, weight in zip(selection.ids, selection.weights, strict=True):
            found[int(client)].add(round(float(weight), 6))
    assert found == {1: {1.75}, 2: {0.875}}


@pytest.mark.parametrize("count", [1, 2])
def test_an_exchange_is_two_numbers_of_everybody(count: int) -> None:
    sizes, ledger = [1, 1, 3, 1, 40], Ledger()
    selector = OptimalSampling(toy_population(sizes, count), probabilities="aggregated", iterations=4)
    picked(selector, ledger=ledger)
    shares, norms = np.array(sizes) / sum(sizes), np.arange(5) / np.sqrt(2)
    _, exchanges = aggregated_probabilities(shares * norms, count, 4)
    assert exchanges >= 1
    assert ledger.bytes_up == 5 * 4 * (1 + 2 * exchanges)
