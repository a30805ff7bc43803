"""FedCor's Gaussian process over the loss changes of N clients, each of which has an embedding x_i
in R^q.

Linear kernels are handled in low-rank form, exactly and linear in N: the covariance is F^T F +
noise^2 I with F [q, N], and by Woodbury's identity its inverse is (I - F^T A) / noise^2 with A =
(noise^2 I + F F^T)^-1 F. Other kernels and objectives use dense matrices and automatic
differentiation.
"""

from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedsim.core.arrays import Floats
from fedsim.core.types import Positions

Parameters = dict[
    str, Floats
]  # `embedding` [q, N] and, for kernels that have one, the scalar `amplitude` []
Kernel = Literal["linear", "linear_normalised", "se"]
Objective = Literal["mml", "loo"]

JITTER = (0.0, 1e-6, 1e-5, 1e-4)
"""Shares of the mean variance that are tried as additions to the diagonal until a Cholesky factor
exists."""


class LowRank:
    """The covariance matrix [N, N] F^T F + noise^2 I with `factor` F [q, N], in place of an array:
    its product with a vector [N], its diagonal, and its column `[:, j]`."""

    def __init__(self, factor: Floats, noise: float) -> None:
        self.factor, self.noise = factor, noise

    def __matmul__(self, vector: Floats) -> Floats:
        return self.factor.T @ (self.factor @ vector) + self.noise**2 * vector

    def diagonal(self) -> Floats:
        return (self.factor**2).sum(0) + self.noise**2

    def __getitem__(self, key: tuple[slice, int]) -> Floats:
        column: Floats = self.factor.T @ self.factor[:, key[1]]
        column[key[1]] += self.noise**2
        return column


Covariance = LowRank | Floats


class Process:
    """A Gaussian process with the kernel x_i . x_j, or amplitude^2 cos(x_i, x_j)
    (`linear_normalised`), fitted by marginal likelihood. `trained` names the parameters that a fit
    changes."""

    def __init__(self, noise: float, lr: float, *, kernel: Kernel) -> None:
        self.noise, self.lr, self.kernel = noise, lr, kernel
        self.trained = ("embedding",) if kernel == "linear" else ("embedding", "amplitude")

    def fit(
        self, parameters: Parameters, residuals: Floats, weights: Floats, steps: int
    ) -> Parameters:
        """`parameters` after `steps` steps of Adam, with fresh state, on -sum_e weights_e log
        p(residuals_e), with `residuals` [E, N] and `weights` [E]; the last ones before a gradient
        that is not finite.
        """
        start = {name: parameters[name] for name in self.trained}
        return parameters | adam(
            start, lambda p: self.gradient(parameters | p, residuals, weights), self.lr, steps
        )

    def covariance(self, parameters: Parameters) -> Covariance:
        """The covariance [N, N] of the clients in `parameters`, noise included."""
        return LowRank(self._factor(parameters), self.noise)

    def gradient(self, parameters: Parameters, residuals: Floats, weights: Floats) -> Parameters:
        """dL/dF = 2 F dL/dSigma with dL/dSigma = (G Sigma^-1 - Sigma^-1 S Sigma^-1) / 2, S = sum_e
        g_e r_e r_e^T."""
        f = self._factor(parameters)
        try:
            a = np.linalg.solve(self.noise**2 * np.eye(len(f)) + f @ f.T, f)
        except np.linalg.LinAlgError:  # noise^2 is lost beside f f^T, whose rank is at most N
            return {name: np.full_like(parameters[name], np.nan) for name in self.trained}
        ar = a @ residuals.T
        with np.errstate(invalid="ignore"):  # the caller checks for values that are not finite
            solved = (residuals.T - f.T @ ar) / self.noise**2  # Sigma^-1 r_e, [N, E]
        gradient_: Floats = weights.sum() * a - (ar * weights) @ solved.T
        if self.kernel == "linear":
            return {"embedding": gradient_}
        x, amplitude = parameters["embedding"], parameters["amplitude"]
        unit = f / amplitude
        tangent = (
            amplitude * (gradient_ - unit * (unit * gradient_).sum(0)) / np.linalg.norm(x, axis=0)
        )
        return {"embedding": tangent, "amplitude": np.asarray((gradient_ * unit).sum())}

    def _factor(self, parameters: Parameters) -> Floats:
        x = parameters["embedding"]
        return (
            x
            if self.kernel == "linear"
            else x / np.linalg.norm(x, axis=0) * parameters["amplitude"]
        )


class DenseProcess(Process):
    """Any kernel (`se`: amplitude^2 exp(-|x_i - x_j|^2 / (2 length))); marginal or leave-one-out
    likelihood."""

    def __init__(
        self, noise: float, lr: float, *, kernel: Kernel, length: float, objective: Objective
    ) -> None:
        super().__init__(noise, lr, kernel=kernel)
        self.length, self.objective = length, objective

    def covariance(self, parameters: Parameters) -> Covariance:
        return self._matrix({n: torch.as_tensor(p) for n, p in parameters.items()}).numpy()

    def gradient(self, parameters: Parameters, residuals: Floats, weights: Floats) -> Parameters:
        leaves = {
            n: torch.tensor(p, dtype=torch.float64, requires_grad=True)
            for n, p in parameters.items()
        }
        sigma, r = self._matrix(leaves), torch.as_tensor(residuals)
        each = (self._marginal if self.objective == "mml" else self._leave_one_out)(
            _cholesky(sigma), r
        )
        gradients = torch.autograd.grad(
            -(torch.as_tensor(weights) * each).sum(), [leaves[n] for n in self.trained]
        )
        return {n: s.numpy() for n, s in zip(self.trained, gradients, strict=True)}

    def _matrix(self, parameters: dict[str, Tensor]) -> Tensor:
        x = parameters["embedding"]
        if self.kernel == "linear":
            kernel = x.T @ x
        elif self.kernel == "linear_normalised":
            unit = x / x.norm(dim=0)
            kernel = parameters["amplitude"] ** 2 * (unit.T @ unit)
        else:
            squares = (x[:, :, None] - x[:, None, :]).square().sum(0)
            kernel = parameters["amplitude"] ** 2 * (-squares / (2 * self.length)).exp()
        return kernel + self.noise**2 * torch.eye(x.shape[1], dtype=x.dtype)

    @staticmethod
    def _marginal(factor: Tensor, residuals: Tensor) -> Tensor:
        """log N(r_e; 0, Sigma) of each row of `residuals`, up to a constant, [E]."""
        solved = torch.linalg.solve_triangular(factor, residuals.T, upper=False)
        return -solved.square().sum(0) / 2 - factor.diagonal().log().sum()

    @staticmethod
    def _leave_one_out(factor: Tensor, residuals: Tensor) -> Tensor:
        """sum_i log p(r_ei | the others) up to a constant, [E] (Rasmussen and Williams 2006, Eq.
        5.10-5.12)."""
        inverse = torch.cholesky_inverse(factor)
        precision = inverse.diagonal()
        return (precision.log() / 2 - (residuals @ inverse).square() / (2 * precision)).sum(1)


def is_dense(kernel: Kernel, objective: Objective) -> bool:
    """Whether a process with these needs matrices [N, N]."""
    return kernel == "se" or objective != "mml"


def make_process(
    kernel: Kernel, objective: Objective, noise: float, length: float, lr: float
) -> Process:
    """The process with this kernel and objective, in its cheapest exact form."""
    if not is_dense(kernel, objective):
        return Process(noise, lr, kernel=kernel)
    return DenseProcess(noise, lr, kernel=kernel, length=length, objective=objective)


def adam(
    start: Parameters, gradient: Callable[[Parameters], Parameters], lr: float, steps: int
) -> Parameters:
    """Minimise by Adam with betas .9 and .999 and eps 1e-8; stops if a gradient is not finite."""
    x = {n: np.array(p, dtype=np.float64) for n, p in start.items()}
    first, second = ({n: np.zeros_like(p) for n, p in x.items()} for _ in range(2))
    for step in range(1, steps + 1):
        gradients = gradient(x)
        if not all(np.isfinite(s).all() for s in gradients.values()):
            break
        for n, gradient_ in gradients.items():
            first[n] += 0.1 * (gradient_ - first[n])
            second[n] += 0.001 * (gradient_**2 - second[n])
            x[n] = x[n] - lr * (first[n] / (1 - 0.9**step)) / (
                np.sqrt(second[n] / (1 - 0.999**step)) + 1e-8
            )
    return x


def greedy_selection(
    covariance: Covariance,
    shares: Floats,
    discounts: Floats,
    count: int,
    rng: np.random.Generator,
    epsilon: float = 0.0,
    min_fall: float | None = None,
) -> Positions:
    """FedCor's selection (Eq. 13): `count` positions, each with the largest expected fall of the
    weighted losses.

    Starting from the covariance C, it repeats j = argmax_k a_k / sqrt(C_kk) * sum_i p_i C_ik and C
    <- C - C_:j C_j: / C_jj, with `shares` p [N] and `discounts` a [N]. With probability `epsilon` a
    pick is random. From the second pick on, picking stops if the largest expected fall is below
    `min_fall`.
    """
    weighted_sums, diagonal = covariance @ shares, covariance.diagonal().copy()
    if not np.isfinite(weighted_sums).all():  # the fit failed: random selection
        return rng.choice(len(shares), count, replace=False)
    left = np.ones(len(shares), dtype=bool)
    removed: list[Floats] = []  # C_:j / sqrt(C_jj) of the clients picked so far
    for picks in range(count):
        falls = np.where(
            left, discounts * weighted_sums / np.sqrt(np.maximum(diagonal, 1e-300)), -np.inf
        )
        if min_fall is not None and picks and falls.max() < min_fall:
            break
        at_random = epsilon > 0 and rng.random() < epsilon
        j = int(rng.choice(np.flatnonzero(left if at_random else falls == falls.max())))
        left[j] = False
        column = covariance[:, j].copy()
        for unit in removed:
            column -= unit * unit[j]
        if column[j] <= 0:  # by rounding: the picks before leave nothing of j that is not known
            continue
        unit = column / np.sqrt(column[j])
        weighted_sums -= unit * (unit @ shares)
        diagonal -= unit**2
        removed.append(unit)
    return np.flatnonzero(~left)


def _cholesky(matrix: Tensor) -> Tensor:
    """The lower Cholesky factor, with jitter on the diagonal if rounding requires it; nan if no
    jitter suffices."""
    for share in JITTER:
        padded = matrix + share * matrix.diagonal().mean() * torch.eye(
            len(matrix), dtype=matrix.dtype
        )
        factor, info = torch.linalg.cholesky_ex(padded)
        if not info:
            return factor
    return matrix * torch.nan
