"""The Dirichlet partition of FedCor and GPFL: Dirichlet label mixes, and sizes from a quadratic
program."""

from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Le

from fedsim.core.arrays import Floats
from fedsim.core.errors import DataError, rule
from fedsim.core.parameters import Positive, Problems, parameters
from fedsim.partitions.base import Indices, Labelled, Partition, require_samples, shuffled_by_class

TOLERANCE = 1e-6
"""Largest accepted max |Q x - b|, relative to the size of the largest class."""


@parameters
class DirichletQP(Partition):
    """q_i ~ Dir(alpha p) with p the class frequencies; sizes x = argmin |x|^2 subject to Q x = b, x
    >= 0.

    Q [C, N] holds the label mixes q_i as columns and b [C] the class sizes, so that all samples are
    used. `alpha` is the total concentration: with 10 balanced classes alpha = 0.2 is 0.02 per
    class, and the largest class makes up 90 % of a client's samples on average. Client i gets
    floor(Q_ci x_i) samples of class c; the samples left by rounding go to uniformly random clients
    one by one. (FedCor does not check the solver's status.) If the program has no solution, which
    is common below 50 clients, label mixes are drawn again up to `retries` times. After that a
    `DataError` is raised, or, with `fallback: nnls`, x >= 0 is the least-squares solution and every
    class is scaled to its size.
    """

    alpha: Positive
    solver: str
    retries: Annotated[int, Ge(0), Le(10_000)]  # some ten milliseconds each
    fallback: Literal["error", "nnls"]

    def problems(self) -> Problems:
        if self.solver != "CLARABEL":  # which is a dependency; importing cvxpy is slow
            serves = solve_sizes(np.eye(2), np.ones(2), self.solver) is not None
            text = "must be an installed cvxpy solver for quadratic programs"
            yield rule(serves, "solver", self.solver, text, "set partition.solver=CLARABEL")

    def split(self, data: Labelled, num_clients: int, rng: np.random.Generator) -> list[Indices]:
        require_samples(len(data.labels), num_clients, 1, "partition=dirichlet_qp")
        b = np.bincount(data.labels, minlength=data.num_classes).astype(np.float64)
        for _ in range(self.retries + 1):
            q = self._label_mixes(b, num_clients, rng)
            sizes = solve_sizes(q, b, self.solver)
            if sizes is not None:
                return _assign_samples(q * sizes, data, rng)
        if self.fallback == "nnls":
            return _assign_samples(_least_squares_counts(q, b), data, rng)
        told = f"no sizes use all samples of every class in {self.retries + 1} draws for num_clients={num_clients}"
        remedy = "raise num_clients (100 rarely fails) or alpha, or set partition.fallback=nnls"
        raise DataError(f"partition.alpha={self.alpha}: {told}; {remedy}")

    def _label_mixes(self, b: Floats, num_clients: int, rng: np.random.Generator) -> Floats:
        """The label mixes Q [C, N] with columns of sum 1; the row of a class without samples is
        zero."""
        present = b > 0
        q = np.zeros((len(b), num_clients))
        draws = rng.dirichlet(self.alpha * b[present] / b.sum(), num_clients)
        undrawn = ~np.isfinite(draws).all(
            1
        )  # every gamma draw underflowed: the limit is a single class
        if undrawn.any():
            draws[undrawn] = rng.multinomial(1, b[present] / b.sum(), int(undrawn.sum()))
        q[present] = draws.T
        return q


def solve_sizes(q: Floats, b: Floats, solver: str) -> Floats | None:
    """The x >= 0 [N] of least norm with Q x = b, verified; None if the solver finds none."""
    import cvxpy as cp

    present, unit = b > 0, b.sum() / q.shape[1]
    x = cp.Variable(q.shape[1], nonneg=True)
    program = cp.Problem(cp.Minimize(cp.sum_squares(x)), [q[present] @ x == b[present] / unit])
    try:
        program.solve(solver=solver)
    except Exception:  # a solver that is not there, or has no licence, may fail in any way
        return None
    if program.status != cp.OPTIMAL or x.value is None or not np.isfinite(x.value).all():
        return None
    sizes = np.maximum(np.asarray(x.value, dtype=np.float64), 0) * unit
    return sizes if np.abs(q @ sizes - b).max() <= TOLERANCE * b.max() else None


def _least_squares_counts(q: Floats, b: Floats) -> Floats:
    from scipy.optimize import nnls

    sizes, _ = nnls(q, b)
    counts: Floats = q * sizes
    totals = counts.sum(1, keepdims=True)
    return np.divide(counts, totals, out=np.zeros_like(counts), where=totals > 0) * b[:, None]


def _assign_samples(quotas: Floats, data: Labelled, rng: np.random.Generator) -> list[Indices]:
    """Positions per client: floor(quotas) [C, N] random samples of each class; the rest go to
    random clients."""
    num_clients = quotas.shape[1]
    parts: list[list[Indices]] = [[] for _ in range(num_clients)]
    for positions, quota in zip(
        shuffled_by_class(data.labels, data.num_classes, rng), quotas, strict=True
    ):
        cuts = np.minimum(np.cumsum(np.floor(quota + TOLERANCE).astype(np.int64)), len(positions))
        *pieces, leftover = np.split(positions, cuts)
        for part, piece in zip(parts, pieces, strict=True):
            part.append(piece)
        for position, client in zip(
            leftover, rng.integers(num_clients, size=len(leftover)), strict=True
        ):
            parts[client].append(np.array([position]))
    return [rng.permutation(np.concatenate(p)) for p in parts]
