"""FedCor's Gaussian process over the loss changes of N clients.

Each client i has an embedding x_i in R^q. The vector of all clients' loss changes over a round is
Gaussian. Its covariance Sigma [N, N] is made of the embeddings by a kernel, plus noise^2 on the
diagonal. A fit changes the embeddings such that the E observed vectors become likely.

Linear kernels are handled in low-rank form, which is exact and takes time linear in N. The
covariance is F^T F + noise^2 I with F [q, N]. By Woodbury's identity its inverse is
(I - F^T A) / noise^2 with A = (noise^2 I + F F^T)^-1 F. Other kernels and objectives use dense
matrices and automatic differentiation.
"""

from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedsim.selectors.base import Floats

Parameters = dict[str, Floats]
"""`embedding` [q, N] and, for kernels that have one, the scalar `amplitude` []."""
Kernel = Literal["linear", "linear_normalised", "se"]
"""`linear_normalised` is linear in x / |x|, and `se` is the squared exponential kernel."""
Objective = Literal["mml", "loo"]
"""What fits maximise: the marginal likelihood, or the leave-one-out likelihood."""

JITTER = (0.0, 1e-6, 1e-5, 1e-4)
"""Shares of the mean variance that are added to the diagonal, one after another, until a Cholesky
factor exists."""


class LowRank:
    """The covariance matrix F^T F + noise^2 I [N, N] with `factor` F [q, N].

    It can be used like an array for products with a vector [N], the diagonal, and columns
    `[:, j]`.
    """

    def __init__(self, factor: Floats, noise: float) -> None:
        self.factor = factor
        self.variance = noise**2

    def __matmul__(self, vector: Floats) -> Floats:
        return self.factor.T @ (self.factor @ vector) + self.variance * vector

    def diagonal(self) -> Floats:
        return (self.factor**2).sum(0) + self.variance

    def __getitem__(self, key: tuple[slice, int]) -> Floats:
        _, j = key
        column: Floats = self.factor.T @ self.factor[:, j]
        column[j] += self.variance
        return column


Covariance = LowRank | Floats
"""A covariance matrix [N, N]."""


class Process:
    """A Gaussian process with a linear kernel, fitted by marginal likelihood.

    The kernel is x_i . x_j, or amplitude^2 cos(x_i, x_j) (`linear_normalised`). `trained` names the
    parameters that a fit changes.
    """

    def __init__(self, noise: float, lr: float, *, kernel: Kernel) -> None:
        self.noise = noise
        self.lr = lr
        self.kernel = kernel
        self.trained = ("embedding",) if kernel == "linear" else ("embedding", "amplitude")

    def fit(
        self, parameters: Parameters, residuals: Floats, weights: Floats, steps: int
    ) -> Parameters:
        """Return `parameters` after `steps` steps of Adam on -sum_e weights_e log p(residuals_e).

        `residuals` [E, N] are the observed loss changes, and `weights` [E] their weights. Adam
        starts with moments of zero. The fit stops before a gradient that is not finite.
        """

        def gradient(trained: Parameters) -> Parameters:
            return self.gradient(parameters | trained, residuals, weights)

        start = {name: parameters[name] for name in self.trained}
        return parameters | adam(start, gradient, self.lr, steps)

    def covariance(self, parameters: Parameters) -> Covariance:
        """Return the covariance [N, N] of the clients in `parameters`, noise included."""
        return LowRank(self._factor(parameters), self.noise)

    def gradient(self, parameters: Parameters, residuals: Floats, weights: Floats) -> Parameters:
        """Return the gradient of L = -sum_e g_e log p(r_e) by the trained parameters.

        dL/dF = 2 F dL/dSigma with dL/dSigma = (G Sigma^-1 - Sigma^-1 S Sigma^-1) / 2, G = sum_e g_e
        and S = sum_e g_e r_e r_e^T. `weights` [E] are g, and `residuals` [E, N] are r.
        """
        f = self._factor(parameters)
        variance = self.noise**2
        try:
            a = np.linalg.solve(variance * np.eye(len(f)) + f @ f.T, f)
        except np.linalg.LinAlgError:  # noise^2 is lost next to f f^T, whose rank is at most N
            return {name: np.full_like(parameters[name], np.nan) for name in self.trained}
        ar = a @ residuals.T
        with np.errstate(invalid="ignore"):  # the caller checks for values that are not finite
            solved = (residuals.T - f.T @ ar) / variance  # Sigma^-1 r_e, [N, E]
        by_factor: Floats = weights.sum() * a - (ar * weights) @ solved.T  # dL/dF
        if self.kernel == "linear":
            return {"embedding": by_factor}
        # F = amplitude x / |x|: only the part of the gradient at right angles to x moves x
        amplitude = parameters["amplitude"]
        unit = f / amplitude
        tangent = by_factor - unit * (unit * by_factor).sum(0)
        by_embedding = amplitude * tangent / np.linalg.norm(parameters["embedding"], axis=0)
        return {"embedding": by_embedding, "amplitude": np.asarray((by_factor * unit).sum())}

    def _factor(self, parameters: Parameters) -> Floats:
        """Return F [q, N]."""
        x = parameters["embedding"]
        if self.kernel == "linear":
            return x
        return x / np.linalg.norm(x, axis=0) * parameters["amplitude"]


class DenseProcess(Process):
    """A Gaussian process with any kernel, fitted by marginal or leave-one-out likelihood.

    The kernel `se` is amplitude^2 exp(-|x_i - x_j|^2 / (2 length)).
    """

    def __init__(
        self, noise: float, lr: float, *, kernel: Kernel, length: float, objective: Objective
    ) -> None:
        super().__init__(noise, lr, kernel=kernel)
        self.length = length
        self.likelihood = _marginal if objective == "mml" else _leave_one_out

    def covariance(self, parameters: Parameters) -> Covariance:
        return self._matrix({name: torch.as_tensor(p) for name, p in parameters.items()}).numpy()

    def gradient(self, parameters: Parameters, residuals: Floats, weights: Floats) -> Parameters:
        leaves = {
            name: torch.tensor(p, dtype=torch.float64, requires_grad=name in self.trained)
            for name, p in parameters.items()
        }
        factor = _cholesky(self._matrix(leaves))
        log_likelihoods = self.likelihood(factor, torch.as_tensor(residuals))
        loss = -(torch.as_tensor(weights) * log_likelihoods).sum()
        gradients = torch.autograd.grad(loss, [leaves[name] for name in self.trained])
        return {name: g.numpy() for name, g in zip(self.trained, gradients, strict=True)}

    def _matrix(self, parameters: dict[str, Tensor]) -> Tensor:
        """Return the covariance matrix [N, N]."""
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


def _marginal(factor: Tensor, residuals: Tensor) -> Tensor:
    """Return log N(r_e; 0, Sigma) of each row of `residuals` [E, N], up to a constant, [E].

    `factor` is the Cholesky factor of Sigma.
    """
    solved = torch.linalg.solve_triangular(factor, residuals.T, upper=False)
    return -solved.square().sum(0) / 2 - factor.diagonal().log().sum()


def _leave_one_out(factor: Tensor, residuals: Tensor) -> Tensor:
    """Return sum_i log p(r_ei | the others) of each row of `residuals`, up to a constant, [E].

    Rasmussen and Williams, 2006, Eq. 5.10-5.12. `factor` is the Cholesky factor of Sigma.
    """
    inverse = torch.cholesky_inverse(factor)
    precision = inverse.diagonal()
    squares = (residuals @ inverse).square()
    return (precision.log() / 2 - squares / (2 * precision)).sum(1)


def _cholesky(matrix: Tensor) -> Tensor:
    """Return the lower Cholesky factor of `matrix`, or nan in all entries if there is none.

    If rounding has made the matrix indefinite, a small number is added to its diagonal (`JITTER`).
    """
    identity = torch.eye(len(matrix), dtype=matrix.dtype)
    for share in JITTER:
        jitter = share * matrix.diagonal().mean()
        factor, info = torch.linalg.cholesky_ex(matrix + jitter * identity)
        if not info:
            return factor
    return matrix * torch.nan


def is_dense(kernel: Kernel, objective: Objective) -> bool:
    """Return whether a process with this kernel and objective needs dense matrices [N, N]."""
    return kernel == "se" or objective != "mml"


def make_process(
    kernel: Kernel, objective: Objective, noise: float, length: float, lr: float
) -> Process:
    """Return a process with this kernel and objective, in low-rank form if that is exact."""
    if not is_dense(kernel, objective):
        return Process(noise, lr, kernel=kernel)
    return DenseProcess(noise, lr, kernel=kernel, length=length, objective=objective)


def adam(
    start: Parameters, gradient: Callable[[Parameters], Parameters], lr: float, steps: int
) -> Parameters:
    """Return the parameters after `steps` steps of Adam from `start`, along `gradient`.

    Adam has betas 0.9 and 0.999 and eps 1e-8. It stops early if a gradient is not finite.
    """
    x = dict(start)
    first = {name: np.zeros_like(p) for name, p in x.items()}  # first moments
    second = {name: np.zeros_like(p) for name, p in x.items()}  # second moments
    for step in range(1, steps + 1):
        gradients = gradient(x)
        if not all(np.isfinite(g).all() for g in gradients.values()):
            break
        for name, g in gradients.items():
            first[name] += 0.1 * (g - first[name])
            second[name] += 0.001 * (g**2 - second[name])
            mean = first[name] / (1 - 0.9**step)
            deviation = np.sqrt(second[name] / (1 - 0.999**step))
            x[name] = x[name] - lr * mean / (deviation + 1e-8)
    return x
