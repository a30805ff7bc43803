"""The partition whose client sizes are the solution of a quadratic program (dirichlet_qp)."""

from collections.abc import Callable
from typing import Any

import cvxpy as cp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng
from scipy.optimize import nnls

from fedsim.core.errors import ConfigError, DataError
from fedsim.partitions.dirichlet_qp import DirichletQP, _assign_samples, solve_sizes
from tests.partition_toys import balanced, build, histograms, labelled, lists, sizes, split


def label_mixes(num_clients: int, seed: int = 0) -> np.ndarray:
    """Return random label mixes [10, N], most of which are nearly one class."""
    return default_rng(seed).dirichlet(np.full(10, 0.02), num_clients).T


@pytest.mark.parametrize("solver", ["CLARABEL", "OSQP"])
def test_the_solvers_agree_with_an_independent_method(solver: str) -> None:
    """The method is least squares with x >= 0, where Q x = b has 10^6 times the weight of x = 0."""
    mixes = label_mixes(100)
    class_sizes = np.full(10, 600.0)
    equations = np.vstack([1000 * mixes, np.eye(100)])
    expected, _ = nnls(equations, np.concatenate([1000 * class_sizes, np.zeros(100)]))
    solution = solve_sizes(mixes, class_sizes, solver)
    assert solution is not None
    np.testing.assert_allclose(solution, expected, atol=0.01)


@pytest.mark.parametrize(("num_clients", "is_feasible"), [(100, True), (10, False)])
def test_the_program_has_a_solution_for_many_clients(num_clients: int, is_feasible: bool) -> None:
    for seed in range(5):
        solution = solve_sizes(label_mixes(num_clients, seed), np.full(10, 500.0), "CLARABEL")
        assert (solution is not None) == is_feasible


def test_a_program_without_solution_is_an_error_with_a_remedy() -> None:
    rule = r"partition\.alpha=0\.2: .*in 4 draws.*num_clients=10; raise num_clients"
    with pytest.raises(DataError, match=rule):
        split("dirichlet_qp", balanced(100), 10, retries=3)


def test_the_fallback_uses_all_samples_without_a_solution() -> None:
    parts = split("dirichlet_qp", balanced(100), 10, retries=1, fallback="nnls")
    assert len(np.unique(np.concatenate(parts))) == 1000


def test_samples_that_rounding_leaves_go_to_clients_uniformly() -> None:
    """Each of 5 clients gets 1000 of 5000 samples, within 4 standard deviations of a binomial."""
    quotas = np.array([[0.9, 0.1, 0.5, 0.0, 0.0]])
    counts = sizes(_assign_samples(quotas, labelled(5000), default_rng(0)))
    assert sum(counts) == 5000
    assert counts == pytest.approx([1000] * 5, abs=4 * np.sqrt(5000 * 0.2 * 0.8))


def test_dirichlet_qp_has_the_published_sizes_and_a_dominant_class() -> None:
    """FedCor and GPFL: 100 clients share 50,000 samples; one class is 90 % of a client's samples.

    Sizes have a standard deviation of about 173.
    """
    data = balanced(5000)
    parts_by_seed = [split("dirichlet_qp", data, 100, seed) for seed in range(4)]
    counts = np.stack([histograms(data, parts) for parts in parts_by_seed])  # [seeds, N, C]
    assert (counts.sum(1) == 5000).all()
    client_sizes = counts.sum(2)
    assert client_sizes.std(1).mean() == pytest.approx(173, abs=40)
    assert client_sizes.max(1).mean() == pytest.approx(1100, rel=0.25)
    assert client_sizes.min(1).mean() == pytest.approx(300, rel=0.25)
    assert (counts.max(2) / client_sizes).mean() == pytest.approx(0.9, abs=0.03)


@pytest.mark.parametrize("solver", ["GUROBY", "SCIPY"])
def test_a_solver_that_is_unknown_or_only_for_linear_programs_is_rejected(solver: str) -> None:
    """SCIPY is installed. Its failure must not look like a hundred draws without solution."""
    rule = rf"partition\.solver='{solver}': must be .*quadratic programs\n.*=CLARABEL"
    with pytest.raises(ConfigError, match=rule):
        build("dirichlet_qp", solver=solver)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(0, 400), min_size=3, max_size=6).filter(lambda totals: sum(totals) >= 90),
    st.integers(60, 90),
    st.integers(0, 99),
)
def test_clients_get_the_floor_of_every_quota_and_all_samples_are_used(
    totals: list[int], num_clients: int, seed: int
) -> None:
    data = labelled(*totals)
    class_sizes = np.array(totals, dtype=float)
    partition = DirichletQP(alpha=1.0, solver="CLARABEL", retries=100, fallback="nnls")
    parts = partition.split(data, num_clients, default_rng(seed))
    assert sorted(np.concatenate(parts)) == list(range(sum(totals)))

    mixes = partition._label_mixes(class_sizes, num_clients, default_rng(seed))
    np.testing.assert_allclose(mixes.sum(0), 1)
    client_sizes = solve_sizes(mixes, class_sizes, "CLARABEL")
    if client_sizes is not None:  # then the partition has used this first draw
        quotas = mixes * client_sizes
        assert (histograms(data, parts) >= np.floor(quotas).T).all()
        leftover = class_sizes - np.floor(quotas + 1e-6).sum(1)
        assert ((leftover >= 0) & (leftover < num_clients)).all()


# --- faults of the solver ------------------------------------------------------------------------


def with_nan(x: np.ndarray) -> np.ndarray:
    return np.where(np.arange(len(x)) == 2, np.nan, x)


def with_negative_share(x: np.ndarray) -> np.ndarray:
    return np.where(x == x.max(), -x, x)


def raise_error(x: np.ndarray) -> None:
    raise RuntimeError("no licence")


FAULTS: dict[str, tuple[str, Callable[[np.ndarray], Any]]] = {
    "infeasible, with numbers": (cp.INFEASIBLE, np.ones_like),
    "unbounded": (cp.UNBOUNDED, lambda x: x + np.inf),
    "stopped early": (cp.USER_LIMIT, lambda x: x),
    "without a solution": (cp.OPTIMAL, lambda x: None),
    "one nan": (cp.OPTIMAL, with_nan),
    "one per cent too much": (cp.OPTIMAL, lambda x: x * 1.01),
    "a negative share": (cp.OPTIMAL, with_negative_share),
    "an error": (cp.OPTIMAL, raise_error),
}
"""The status that a solver reports, and what it makes of the true solution x."""


def let_solver_fail_once(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Change the next solution by a fault, and no later one."""
    solve = cp.Problem.solve
    status, change = FAULTS[fault]

    def solve_and_fail(problem: cp.Problem, **settings: Any) -> None:
        monkeypatch.undo()
        solve(problem, **settings)
        (x,) = problem.variables()
        x.save_value(change(np.array(x.value)))
        problem._status = status

    monkeypatch.setattr(cp.Problem, "solve", solve_and_fail)


QP = DirichletQP(alpha=3.0, solver="CLARABEL", retries=3, fallback="error")


def split_by(rng: np.random.Generator) -> list[np.ndarray]:
    return QP.split(labelled(40, 40, 40), 12, rng)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_solution_that_fails_is_drawn_again(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = default_rng(0)
    QP._label_mixes(np.full(3, 40.0), 12, rng)  # the draw whose solution fails
    expected = split_by(rng)
    assert lists(split_by(default_rng(0))) != lists(expected)
    let_solver_fail_once(monkeypatch, fault)
    assert lists(split_by(default_rng(0))) == lists(expected)
