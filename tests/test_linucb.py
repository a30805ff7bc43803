"""LinUCB against a ridge regression by numpy.linalg."""

import numpy as np

from fedsim.selectors.linucb import LinUCB
from tests.toys import picked, toy_cohort, toy_population

SIZES = [4, 2, 8, 1, 8, 2]


def observe(selector: LinUCB, t: int, ids: list[int], losses: list[float]) -> None:
    """Let the updates of `ids` arrive with these training losses."""
    sizes = [SIZES[i] for i in ids]
    cohort = toy_cohort(ids, sizes, [[0.0, 0.0]] * len(ids), loss=np.array(losses))
    selector.observe(t, cohort, None)  # type: ignore[arg-type]


def test_two_rounds_by_hand() -> None:
    """x = 1, n_k / 8, selections per round, rounds since the last one / t, latest loss. At first
    A^-1 = I / 2 and theta = 0, so that the longest contexts have the widest bounds."""
    selector = LinUCB(toy_population(SIZES, 2), alpha=1.0, ridge=2.0)
    assert selector.contexts(1).tolist() == [[1, size / 8, 0, 1, 0] for size in SIZES]
    assert picked(selector, 1) == [2, 4]
    observe(selector, 1, [2], [3.0])  # the update of client 4 did not arrive
    x = np.array([1, 1, 0, 1, 0])
    np.testing.assert_allclose(selector.inverse, np.eye(5) / 2 - np.outer(x, x) / 4 / (1 + 3 / 2))
    np.testing.assert_allclose(selector.theta, 3 * x / (2 + 3))
    selected = [1, 1, 0.5, 2 / 3, 3]
    assert selector.contexts(3)[[0, 2, 4]].tolist() == [[1, 0.5, 0, 1, 3], selected, selected]


def test_bounds_are_those_of_a_ridge_regression_on_all_observations() -> None:
    """Every seventh round a loss is nan."""
    selector = LinUCB(toy_population(SIZES, 2), alpha=0.7, ridge=0.5)
    rng = np.random.default_rng(0)
    a = 0.5 * np.eye(5)
    b = np.zeros(5)
    for t in range(1, 31):
        theta = np.linalg.solve(a, b)
        np.testing.assert_allclose(selector.theta, theta, rtol=1e-9, atol=1e-12)
        contexts = selector.contexts(t)
        variances = np.einsum("ni,ij,nj->n", contexts, np.linalg.inv(a), contexts)
        bounds = contexts @ theta + 0.7 * np.sqrt(variances)
        ids = picked(selector, t, seed=t)
        assert bounds[ids].min() >= np.delete(bounds, ids).max() - 1e-9
        losses = rng.exponential(size=2)
        if t % 7 == 0:
            losses[1] = np.nan
        observe(selector, t, ids, losses.tolist())
        for i, loss in zip(ids, losses, strict=True):
            if np.isfinite(loss):
                a += np.outer(contexts[i], contexts[i])
                b += loss * contexts[i]
    assert selector.counts.sum() == 60
