import numpy as np
import pytest

from fedsim.clients.ledger import Ledger
from fedsim.selectors.afl import AFL
from tests.toys import picked, toy_population


def afl(n: int, k: int, alpha1: float = 0.0, alpha2: float = 0.01, alpha3: float = 0.1, init: str = "equal") -> AFL:
    return AFL(toy_population([1] * n, k), alpha1=alpha1, alpha2=alpha2, alpha3=alpha3, init=init)  # type: ignore[arg-type]


def probabilities(values: list[float], **more: float) -> np.ndarray:
    return afl(len(values), 1, **more).probabilities(np.array(values), np.random.default_rng(0))  # type: ignore[arg-type]


def test_probabilities_by_hand() -> None:
    assert probabilities([100, 200, 300, 400]) == pytest.approx([0.03206, 0.08714, 0.23688, 0.64391], abs=1e-5)
    p = probabilities([10, 40, 20, 30, 80, 60, 70, 50], alpha1=0.75)
    assert np.flatnonzero(p).tolist() == [4, 6]
    assert p[[6, 4]] == pytest.approx([0.47502, 0.52498], abs=1e-5)
    assert probabilities([10, 40, 20, 30], alpha1=0.5, alpha2=0.0) == pytest.approx([0, 0.5, 0, 0.5])


def test_a_value_that_is_not_finite_ranks_lowest_and_has_no_probability_though_it_is_kept() -> None:
    for value in (np.nan, np.inf, -np.inf):
        assert probabilities([value, 1.0], alpha1=0.5).tolist() == [0, 1]
        p = probabilities([1, 2, 3, value, 4, 5], alpha1=0.75)
        assert p == pytest.approx([0, 0, 0, 0, 0.4975, 0.5025], abs=1e-5)
    for alpha2 in (0.0, 0.01):
        p = probabilities([np.nan, np.nan, 1.0, 1.0, np.inf, -np.inf], alpha1=0.2, alpha2=alpha2)
        assert p == pytest.approx([0, 0, 0.5, 0.5, 0, 0])
    assert probabilities([np.nan, np.inf], alpha1=0.5) == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize(("n", "k", "by_value"), [(40, 5, 4), (40, 10, 9), (8, 4, 2)])
def test_a_tenth_of_the_cohort_is_uniform_and_more_where_too_few_are_left(n: int, k: int, by_value: int) -> None:
    """With an extreme softmax those drawn by value are the highest; alpha3 = .1 leaves one place for chance. Of 8
    clients two are left for three picks by value."""
    selector, top, others = afl(n, k, alpha1=0.75, alpha2=20.0), set(range(n - by_value, n)), set()
    for seed in range(30):
        selector.values = np.arange(float(n))
        chosen = set(picked(selector, 2, seed))
        assert top <= chosen
        assert len(chosen) == k
        others |= chosen - top
    assert min(others) < 30  # also the suppressed ones


def test_values_are_root_n_times_loss_and_only_the_selected_report() -> None:
    sizes = [4, 9, 16, 25]
    selector = AFL(toy_population(sizes, 2), alpha1=0.0, alpha2=0.01, alpha3=0.1, init="query")
    ledger = Ledger()
    picked(selector, ledger=ledger)
    assert (ledger.bytes_up, ledger.forward_samples, len(ledger.contacted)) == (4 * 4, sum(sizes), 4)
    mean_positions = np.array([1.5, 8.0, 20.5, 41.0])  # the toy's losses
    assert selector.values == pytest.approx(np.sqrt(sizes) * mean_positions)
    ledger = Ledger()
    ids = picked(selector, 2, 1, ledger=ledger)
    assert ledger.contacted == set(ids)
    assert ledger.forward_samples == sum(sizes[i] for i in ids)


def test_a_client_that_cannot_be_reached_in_round_1_is_asked_when_it_first_can() -> None:
    sizes = [4, 9, 16, 25]
    selector = AFL(toy_population(sizes, 1), alpha1=0.0, alpha2=0.01, alpha3=0.1, init="query")
    asked = []
    for round, available in enumerate(([0, 1], [2, 3], [0, 1, 2, 3]), 1):
        ledger = Ledger()
        picked(selector, round, round, ledger=ledger, available=available)
        asked.append(ledger.contacted)
    assert asked[:2] == [{0, 1}, {2, 3}]
    assert len(asked[2]) == 1  # the selected one
    assert (selector.values > 0).all()
