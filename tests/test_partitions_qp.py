"""The partition whose sizes a quadratic program gives (dirichlet_qp)."""

from collections.abc import Callable
from typing import Any

import cvxpy as cp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from fedsim.core.errors import ConfigError, DataError
from fedsim.partitions.base import Labelled
from fedsim.partitions.dirichlet_qp import DirichletQP, _assign_samples, solve_sizes
from tests.partition_toys import balanced, build, histograms, split


def mixes(num_clients: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.full(10, 0.02), num_clients).T


def test_the_solvers_agree_with_an_independent_method() -> None:
    """Least squares with x >= 0, in which Q x = b has 10^6 times the weight of x = 0."""
    q, b = mixes(100), np.full(10, 600.0)
    expected, _ = nnls(
        np.vstack([1000 * q, np.eye(100)]), np.concatenate([1000 * b, np.zeros(100)])
    )
    for solver in ("CLARABEL", "OSQP"):
        assert build("dirichlet_qp", solver=solver) is not None
        np.testing.assert_allclose(solve_sizes(q, b, solver), expected, atol=0.01)


def test_the_program_is_feasible_for_a_hundred_clients_and_for_ten_an_error_that_says_what_to_do() -> (
    None
):
    for num_clients, feasible in ((100, 5), (10, 0)):
        found = [
            solve_sizes(mixes(num_clients, seed), np.full(10, 500.0), "CLARABEL")
            for seed in range(5)
        ]
        assert sum(x is not None for x in found) == feasible
    with pytest.raises(
        DataError, match=r"partition\.alpha=0\.2: .*in 4 draws.*num_clients=10; raise num_clients"
    ):
        split("dirichlet_qp", balanced(100), 10, retries=3)
    parts = split("dirichlet_qp", balanced(100), 10, retries=1, fallback="nnls")
    assert len(np.unique(np.concatenate(parts))) == 1000


def test_what_rounding_leaves_goes_to_clients_uniformly() -> None:
    data = Labelled(np.zeros(5000, np.int64), 1)
    sizes = [
        len(p)
        for p in _assign_samples(
            np.array([[0.9, 0.1, 0.5, 0.0, 0.0]]), data, np.random.default_rng(0)
        )
    ]
    assert sum(sizes) == 5000
    assert all(abs(n - 1000) < 4 * np.sqrt(5000 * 0.2 * 0.8) for n in sizes)


def test_dirichlet_qp_has_the_published_sizes_and_a_dominant_class() -> None:
    """selectors.md 4.2: at N = 100 and n = 50,000 sizes have a standard deviation of about 173; .9
    is one class."""
    data = balanced(5000)
    counts = [histograms(data, split("dirichlet_qp", data, 100, seed)) for seed in range(4)]
    assert all((c.sum(0) == 5000).all() for c in counts)
    assert np.mean([c.sum(1).std() for c in counts]) == pytest.approx(173, abs=40)
    assert np.mean([c.sum(1).max() for c in counts]) == pytest.approx(1100, rel=0.25)
    assert np.mean([c.sum(1).min() for c in counts]) == pytest.approx(300, rel=0.25)
    assert np.mean([(c.max(1) / c.sum(1)).mean() for c in counts]) == pytest.approx(0.9, abs=0.03)


@pytest.mark.parametrize("solver", ["GUROBY", "SCIPY"])
def test_a_solver_that_cannot_serve_is_refused(solver: str) -> None:
    """SCIPY is installed but only for linear programs: it must not look like a hundred infeasible
    draws."""
    with pytest.raises(
        ConfigError,
        match=rf"partition\.solver='{solver}': must be .*quadratic programs\n.*=CLARABEL",
    ):
        build("dirichlet_qp", solver=solver)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(0, 400), min_size=3, max_size=6), st.integers(60, 90), st.integers(0, 99)
)
def test_dirichlet_qp_deals_the_floor_of_every_quota_and_all_samples(
    totals: list[int], num_clients: int, seed: int
) -> None:
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(totals)), totals))
    data = Labelled(labels, len(totals))
    if len(labels) < num_clients:
        return
    partition = build("dirichlet_qp", alpha=1.0, fallback="nnls")
    assert isinstance(partition, DirichletQP)
    q = partition._label_mixes(
        np.array(totals, dtype=float), num_clients, np.random.default_rng(seed)
    )
    np.testing.assert_allclose(q.sum(0), 1)
    sizes = solve_sizes(q, np.array(totals, dtype=float), "CLARABEL")
    parts = partition.split(data, num_clients, np.random.default_rng(seed))
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    if sizes is not None:  # the first draw, which the partition then used
        assert (histograms(data, parts) >= np.floor(q * sizes).T).all()
        left = np.array(totals) - np.floor(q * sizes + 1e-6).sum(1)
        assert ((left >= 0) & (left < num_clients)).all()


# --- faults of the solver ------------------------------------------------------------------------------------------

DATA = Labelled(np.repeat(np.arange(3), 40), 3, None)
CLIENTS = 12
FAULTS: dict[str, tuple[str, Callable[[np.ndarray], Any]]] = {
    "infeasible, with numbers": (cp.INFEASIBLE, np.ones_like),
    "unbounded": (cp.UNBOUNDED, lambda x: x + np.inf),
    "stopped early": (cp.USER_LIMIT, lambda x: x),
    "without a solution": (cp.OPTIMAL, lambda x: None),
    "one nan": (cp.OPTIMAL, lambda x: np.where(np.arange(len(x)) == 2, np.nan, x)),
    "one per cent too much": (cp.OPTIMAL, lambda x: x * 1.01),
    "one client's share is negative": (
        cp.OPTIMAL,
        lambda x: np.where(np.arange(len(x)) == x.argmax(), -x, x),
    ),
    "an error": ("", lambda x: None),
}
"""What a solver says of its solution, and what it makes of the true one."""


def patched(monkeypatch: pytest.MonkeyPatch, fault: str, times: int) -> list[int]:
    """Let the first `times` solutions fail; returns a list that gets an entry for each solution
    asked for."""
    solve, asked = cp.Problem.solve, []
    status, change = FAULTS[fault]

    def replacement(self: cp.Problem, **settings: Any) -> None:
        asked.append(len(asked))
        solve(self, **settings)
        (x,) = self.variables()
        if len(asked) <= times and not status:
            raise RuntimeError("no licence")
        if len(asked) <= times and x.value is not None:
            x.save_value(change(np.array(x.value)))
            self._status = status

    monkeypatch.setattr(cp.Problem, "solve", replacement)
    return asked


def solved(rng: np.random.Generator, retries: int = 20) -> list[np.ndarray]:
    return DirichletQP(alpha=3.0, solver="CLARABEL", retries=retries, fallback="error").split(
        DATA, CLIENTS, rng
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_a_solution_that_fails_is_drawn_again_and_then_an_error(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = np.random.default_rng(0)
    build("dirichlet_qp", alpha=3.0)._label_mixes(np.full(3, 40.0), CLIENTS, later)  # type: ignore[attr-defined]
    expected = solved(later)
    with monkeypatch.context() as patch:
        patched(patch, fault, times=1)
        found = solved(np.random.default_rng(0))
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True)), (
        "not those of the second draw"
    )
    assert sorted(np.concatenate(found)) == list(range(120))
    asked = patched(monkeypatch, fault, times=10**6)
    with pytest.raises(
        DataError, match=r"partition.alpha=3.0: no sizes use all samples of every class in 4 draws"
    ):
        solved(np.random.default_rng(0), retries=3)
    assert len(asked) == 4
