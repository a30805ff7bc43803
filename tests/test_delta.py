from typing import Any

import numpy as np
import pytest

from fedsim.selectors.delta import Delta, redistribute_mass
from tests.toys import selection_of, toy_cohort, toy_population

SERVER: Any = None


def delta(sizes: list[int], k: int, diversity: float = 1.0, variance: float = 0.0) -> Delta:
    return Delta(toy_population(sizes, k), diversity=diversity, variance=variance)


def test_only_those_that_took_part_share_their_mass_anew_and_where_scores_give_none_it_stays() -> None:
    selector = delta([1] * 4, 2)
    selector._ids, selector._spreads = np.array([0, 1, 2]), np.zeros(3)
    selector.observe(1, toy_cohort([0, 1, 2], [1, 1, 1], [[3, 0], [0, 0], [0, 0]]), SERVER)
    # mean gradient -(1, 0): distances 2, 1, 1
    assert selector.probabilities == pytest.approx([0.75 * 0.5, 0.75 * 0.25, 0.75 * 0.25, 0.25])
    mass = np.array([0.2, 0.3])
    for scores in ([0.0, 1.0], [np.nan, 1.0]):
        assert redistribute_mass(mass, np.array(scores)) is mass


def test_draws_are_unbiased() -> None:
    sizes, total = [1, 2, 3, 4], np.zeros(4)
    selector = delta(sizes, 2)
    selector.probabilities = np.array([0.4, 0.3, 0.2, 0.1])
    for s in range(4000):
        selection = selection_of(selector, seed=s)
        assert selection.weights is not None
        total[selection.ids] += selection.weights
    assert total / 4000 == pytest.approx(np.array(sizes) / 10, rel=0.08)


def test_gradients_are_updates_over_lr_and_steps() -> None:
    """Updates (2, 0), (0, 0), (-2, 0) in 1, 1 and 2 steps at lr 1/2: gradients -4, 0 and 2, mean -2/3; spreads count
    in the same units."""
    selector = delta([1] * 3, 3, diversity=1.0, variance=2.0)
    selector._ids, selector._spreads, selector._lr = np.arange(3), np.array([1.0, 2.0, 3.0]), 0.5
    cohort = toy_cohort([0, 1, 2], [1, 1, 1], [[2, 0], [0, 0], [-2, 0]])
    cohort.steps[:] = [1, 1, 2]
    selector.observe(1, cohort, SERVER)
    zeta = np.array([4 - 2 / 3, 2 / 3, 2 + 2 / 3])
    scores = np.sqrt(zeta**2 + 2 * np.array([1.0, 4.0, 9.0]))
    assert selector.probabilities == pytest.approx(scores / scores.sum())


def test_weights_are_draws_times_p_over_k_times_chance() -> None:
    sizes = [1, 3]
    selector = delta(sizes, 4)
    selector.probabilities = np.array([0.5, 0.5])
    draws = np.random.default_rng(0).multinomial(4, [0.5, 0.5])
    assert selection_of(selector).weights == pytest.approx(draws * [0.25, 0.75] / (4 * 0.5))
