"""Faults of the solver of partition=dirichlet_qp: drawn again, then an error; never a wrong partition."""

from collections.abc import Callable
from typing import Any

import cvxpy as cp
import numpy as np
import pytest

from fedsim.core.errors import DataError
from fedsim.partitions import dirichlet_qp
from fedsim.partitions.base import Labelled
from fedsim.partitions.dirichlet_qp import DirichletQP

DATA = Labelled(np.repeat(np.arange(3), 40), 3, None)
CLIENTS = 12
Fault = Callable[[Any, cp.Problem], None]


def ends(status: str, value: Callable[[int], Any]) -> Fault:
    """A solver that says `status` and leaves `value` of the number of clients as its solution."""

    def fault(solve: Any, program: cp.Problem) -> None:
        (x,) = program.variables()
        x.save_value(value(x.size))
        program._status = status

    return fault


def raises(error: Exception) -> Fault:
    def fault(solve: Any, program: cp.Problem) -> None:
        raise error

    return fault


def exact_but(change: Callable[[Any], Any]) -> Fault:
    """The true solution, changed, which the solver calls optimal."""

    def fault(solve: Any, program: cp.Problem) -> None:
        solve(program, solver="CLARABEL")
        (x,) = program.variables()
        if x.value is not None:
            x.save_value(change(np.array(x.value)))

    return fault


WRONG = exact_but(lambda x: x * 1.01)
FAULTS: dict[str, Fault] = {
    "infeasible, without a solution": ends(cp.INFEASIBLE, lambda n: None),
    "infeasible, with numbers": ends(cp.INFEASIBLE, np.ones),
    "infeasible or unbounded": ends(cp.settings.INFEASIBLE_OR_UNBOUNDED, lambda n: None),
    "unbounded": ends(cp.UNBOUNDED, lambda n: np.full(n, np.inf)),
    "stopped early": ends(cp.USER_LIMIT, np.ones),
    "solver error as a status": ends(cp.SOLVER_ERROR, lambda n: None),
    "optimal, without a solution": ends(cp.OPTIMAL, lambda n: None),
    "optimal, nan": ends(cp.OPTIMAL, lambda n: np.full(n, np.nan)),
    "optimal, infinite": ends(cp.OPTIMAL, lambda n: np.full(n, np.inf)),
    "optimal, one nan": exact_but(lambda x: np.where(np.arange(len(x)) == 2, np.nan, x)),
    "optimal, one per cent too much": WRONG,
    "optimal, one client's share is negative": exact_but(lambda x: np.where(np.arange(len(x)) == x.argmax(), -x, x)),
    "solver error": raises(cp.error.SolverError("failed")),
    "singular matrix": raises(np.linalg.LinAlgError("singular")),
    "overflow": raises(OverflowError("overflow")),
}


def patched(monkeypatch: pytest.MonkeyPatch, fault: Fault, times: int) -> list[int]:
    """Let the first `times` solutions fail; returns a list that gets an entry for each solution asked for."""
    solve, asked = cp.Problem.solve, []

    def replacement(self: cp.Problem, **settings: Any) -> Any:
        asked.append(len(asked))
        return fault(solve, self) if len(asked) <= times else solve(self, **settings)

    monkeypatch.setattr(cp.Problem, "solve", replacement)
    return asked


def split(rng: np.random.Generator, retries: int = 20) -> list[np.ndarray]:
    return DirichletQP(alpha=3.0, solver="CLARABEL", retries=retries, fallback="error").split(DATA, CLIENTS, rng)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_solution_that_fails_is_drawn_again_and_then_an_error(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    later = np.random.default_rng(0)
    DirichletQP(alpha=3.0, solver="CLARABEL", retries=0, fallback="error")._label_mixes(
        np.full(3, 40.0), CLIENTS, later
    )
    expected = split(later)
    with monkeypatch.context() as patch:
        patched(patch, FAULTS[fault], times=1)
        found = split(np.random.default_rng(0))
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True)), "not those of the second draw"
    assert sorted(np.concatenate(found)) == list(range(120))
    asked = patched(monkeypatch, FAULTS[fault], times=10**6)
    with pytest.raises(DataError, match=r"partition.alpha=3.0: no sizes use all samples of every class in 4 draws"):
        split(np.random.default_rng(0), retries=3)
    assert len(asked) == 4


def test_without_the_check_a_wrong_solution_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    monkeypatch.setattr(dirichlet_qp, "TOLERANCE", 0.02)
    asked = patched(monkeypatch, WRONG, times=10**6)
    split(np.random.default_rng(0))
    assert len(asked) == 1
