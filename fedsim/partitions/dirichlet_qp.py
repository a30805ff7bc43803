"""The Dirichlet partition of FedCor and GPFL.

A client's label mix is its distribution of labels. Label mixes are Dirichlet draws, and the sizes
of clients solve a quadratic program. Shapes: N clients, C classes.
"""

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
    """A partition with label mixes q_i ~ Dir(alpha p) and sizes x = argmin |x|^2 subject to
    Q x = b, x >= 0.

    p [C] are the class frequencies, and x [N] the sizes of clients. Q [C, N] holds the label mixes
    q_i as columns, and b [C] the class sizes, so that all samples are used. Client i gets
    floor(Q_ci x_i) samples of class c. Each sample that rounding leaves goes to a uniformly random
    client. If the program has no solution, which is common below 50 clients, the label mixes are
    drawn again. (FedCor does not check the solver's status.)
    """

    alpha: Positive
    """The total concentration: with 10 balanced classes alpha = 0.2 is 0.02 per class, and the
    largest class makes up 90 % of a client's samples on average."""
    solver: str
    """The solver of the quadratic program, by its name in cvxpy."""
    retries: Annotated[int, Ge(0), Le(10_000)]  # some ten milliseconds each
    """How often label mixes are drawn again."""
    fallback: Literal["error", "nnls"]
    """After the last retry, `error` raises `DataError`. `nnls` takes the least-squares solution x
    >= 0 and scales every class to its size."""

    def problems(self) -> Problems:
        """Yield a problem if the solver cannot solve a small program."""
        if self.solver != "CLARABEL":  # which is a dependency; importing cvxpy is slow
            is_usable = solve_sizes(np.eye(2), np.ones(2), self.solver) is not None
            text = "must be an installed cvxpy solver for quadratic programs"
            yield rule(is_usable, "solver", self.solver, text, "set partition.solver=CLARABEL")

    def split(self, data: Labelled, num_clients: int, rng: np.random.Generator) -> list[Indices]:
        """Return the positions of each client for the first label mixes that have sizes."""
        require_samples(len(data.labels), num_clients, 1, "partition=dirichlet_qp")
        class_sizes = np.bincount(data.labels, minlength=data.num_classes).astype(np.float64)
        for _ in range(self.retries + 1):
            mixes = self._label_mixes(class_sizes, num_clients, rng)
            sizes = solve_sizes(mixes, class_sizes, self.solver)
            if sizes is not None:
                return _assign_samples(mixes * sizes, data, rng)
        if self.fallback == "nnls":
            return _assign_samples(_least_squares_counts(mixes, class_sizes), data, rng)
        raise DataError(
            f"partition.alpha={self.alpha}: no sizes use all samples of every class in "
            f"{self.retries + 1} draws for num_clients={num_clients}; raise num_clients (100 "
            "rarely fails) or alpha, or set partition.fallback=nnls"
        )

    def _label_mixes(
        self, class_sizes: Floats, num_clients: int, rng: np.random.Generator
    ) -> Floats:
        """Return Q [C, N]. Columns sum to 1; the row of a class without samples is 0."""
        present = class_sizes > 0
        frequencies = class_sizes[present] / class_sizes.sum()
        draws = rng.dirichlet(self.alpha * class_sizes[present] / class_sizes.sum(), num_clients)
        # A draw is nan if all gamma draws in it underflowed; in the limit it is a single class.
        underflowed = ~np.isfinite(draws).all(1)
        if underflowed.any():
            draws[underflowed] = rng.multinomial(1, frequencies, int(underflowed.sum()))
        mixes = np.zeros((len(class_sizes), num_clients))
        mixes[present] = draws.T
        return mixes


def solve_sizes(mixes: Floats, class_sizes: Floats, solver: str) -> Floats | None:
    """Return the x >= 0 [N] of least norm with Q x = b; None if the solver finds none.

    `mixes` is Q [C, N] and `class_sizes` is b [C]. The solution is verified.
    """
    import cvxpy as cp

    present = class_sizes > 0
    num_clients = mixes.shape[1]
    unit = class_sizes.sum() / num_clients  # the mean size: solvers work best with numbers near 1
    x = cp.Variable(num_clients, nonneg=True)
    uses_all = mixes[present] @ x == class_sizes[present] / unit
    program = cp.Problem(cp.Minimize(cp.sum_squares(x)), [uses_all])
    try:
        program.solve(solver=solver)
    except Exception:  # a solver that is not installed, or has no licence, may fail in any way
        return None
    if program.status != cp.OPTIMAL or x.value is None or not np.isfinite(x.value).all():
        return None
    sizes = np.maximum(np.asarray(x.value, dtype=np.float64), 0) * unit
    largest_error = np.abs(mixes @ sizes - class_sizes).max()
    return sizes if largest_error <= TOLERANCE * class_sizes.max() else None


def _least_squares_counts(mixes: Floats, class_sizes: Floats) -> Floats:
    """Return counts of samples for each class and client [C, N].

    Their row sums are the class sizes, and their columns are near multiples of the label mixes.
    """
    from scipy.optimize import nnls

    sizes, _ = nnls(mixes, class_sizes)
    counts: Floats = mixes * sizes
    totals = counts.sum(1, keepdims=True)
    shares = np.divide(counts, totals, out=np.zeros_like(counts), where=totals > 0)
    return shares * class_sizes[:, None]


def _assign_samples(quotas: Floats, data: Labelled, rng: np.random.Generator) -> list[Indices]:
    """Return the positions of each client.

    A client gets floor(quotas) [C, N] random samples of each class. Other samples go to random
    clients.
    """
    num_clients = quotas.shape[1]
    parts: list[list[Indices]] = [[] for _ in range(num_clients)]
    classes = shuffled_by_class(data.labels, data.num_classes, rng)
    for positions, quota in zip(classes, quotas, strict=True):
        # A quota may miss a whole number by the solver's error. The last pieces of a class may then
        # find too few samples, hence the minimum.
        counts = np.floor(quota + TOLERANCE).astype(np.int64)
        cuts = np.minimum(np.cumsum(counts), len(positions))
        *pieces, leftover = np.split(positions, cuts)
        for part, piece in zip(parts, pieces, strict=True):
            part.append(piece)
        lucky_clients = rng.integers(num_clients, size=len(leftover))
        for position, client in zip(leftover, lucky_clients, strict=True):
            parts[client].append(np.array([position]))
    return [rng.permutation(np.concatenate(part)) for part in parts]
