"""LinUCB against a ridge regression by numpy.linalg."""

import numpy as np

from fedsim.selectors.linucb import LinUCB
from tests.toys import picked, toy_cohort, toy_population

SIZES = [4, 2, 8, 1, 8, 2]


def observed(selector: LinUCB, t: int, ids: list[int], loss: list[float]) -> None:
    cohort = toy_cohort(ids, [SIZES[i] for i in ids], [[0.0, 0.0]] * len(ids), loss=np.array(loss))
    selector.observe(t, cohort, None)  # type: ignore[arg-type]


def test_two_rounds_by_hand() -> None:
    """x = 1, n_k / 8, selections per round, rounds since the last one / t, latest loss; A^-1 = I /
    2 at first."""
    selector = LinUCB(toy_population(SIZES, 2), alpha=1.0, ridge=2.0)
    assert selector.contexts(1).tolist() == [[1, size / 8, 0, 1, 0] for size in SIZES]
    assert picked(selector, 1) == [
        2,
        4,
    ]  # theta is 0, and the longest contexts have the widest bounds
    observed(selector, 1, [2], [3.0])  # the update of 4 did not arrive
    x = np.array([1, 1, 0, 1, 0])
    np.testing.assert_allclose(selector.inverse, np.eye(5) / 2 - np.outer(x, x) / 4 / (1 + 3 / 2))
    np.testing.assert_allclose(selector.theta, 3 * x / (2 + 3))
    assert selector.contexts(3)[[0, 2, 4]].tolist() == [
        [1, 0.5, 0, 1, 3],
        [1, 1, 0.5, 2 / 3, 3],
        [1, 1, 0.5, 2 / 3, 3],
    ]


def test_bounds_are_those_of_a_ridge_regression_on_all_that_was_observed() -> None:
    selector, rng = LinUCB(toy_population(SIZES, 2), alpha=0.7, ridge=0.5), np.random.default_rng(0)
    seen, rewards = [], []
    for t in range(1, 31):
        contexts = selector.contexts(t)
        a = 0.5 * np.eye(5) + sum((np.outer(x, x) for x in seen), np.zeros((5, 5)))
        theta = np.linalg.solve(
            a, sum((r * x for r, x in zip(rewards, seen, strict=True)), np.zeros(5))
        )
        np.testing.assert_allclose(selector.theta, theta, rtol=1e-9, atol=1e-12)
        bounds = contexts @ theta + 0.7 * np.sqrt(
            np.einsum("ni,ij,nj->n", contexts, np.linalg.inv(a), contexts)
        )
        ids = picked(selector, t, seed=t)
        assert bounds[ids].min() >= np.delete(bounds, ids).max() - 1e-9
        losses = rng.exponential(size=2) * [1, np.nan if t % 7 == 0 else 1]
        observed(selector, t, ids, losses.tolist())
        seen += [contexts[i] for i, loss in zip(ids, losses, strict=True) if np.isfinite(loss)]
        rewards += losses[np.isfinite(losses)].tolist()
    assert selector.counts.sum() == 60
