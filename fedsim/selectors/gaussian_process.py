"""FedCor's Gaussian process over the loss changes of N clients.

Each client i has an embedding x_i in R^q. The vector of all clients' loss changes over a round is
Gaussian. Its covariance Sigma [N, N] is made of the embeddings by a kernel, plus noise^2 on the
diagonal. A fit changes the embeddings such that the E observed vectors become likely.

Linear kernels with the marginal likelihood are handled in low-rank form (`LowRankProcess`), which
is exact and takes time linear in N. The covariance is F^T F + noise^2 I with F [q, N]. By
Woodbury's identity its inverse is (I - F^T A) / noise^2 with A = (noise^2 I + F F^T)^-1 F. Other
kernels and objectives use dense matrices and automatic differentiation (`DenseProcess`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedsim.selectors.base import Floats

KernelParameters = dict[str, Floats]
"""`embedding` [q, N] and, for kernels that have one, the scalar `amplitude` []."""
Kernel = Literal["linear", "linear_normalised", "se"]
"""`linear_normalised` is linear in x / |x|, and `se` is the squared exponential kernel."""
Objective = Literal["mml", "loo"]
"""What fits maximise: the marginal likelihood, or the leave-one-out likelihood."""

JITTER = (0.0, 1e-6, 1e-5, 1e-4)
"""Shares of the mean variance that are added to the diagonal, one after another, until a Cholesky
factor exists."""


class LowRankCovariance:
    """The covariance matrix F^T F + noise^2 I [N, N] with `factor` F [q, N].

    It stands for a dense matrix in three operations: the product with a vector [N], the diagonal,
    and a whole column `[:, j]`.
    """

    def __init__(self, factor: Floats, noise: float) -> None:
        self.factor = factor
        self.variance = noise**2

    def __matmul__(self, vector: Floats) -> Floats:
        return self.factor.T @ (self.factor @ vector) + self.variance * vector

    def diagonal(self) -> Floats:
        return (self.factor**2).sum(0) + self.variance

    def __getitem__(self, key: tuple[slice, int]) -> Floats:
        _, j = key  # the slice is `:`
        column: Floats = self.factor.T @ self.factor[:, j]
        column[j] += self.variance
        return column


Covariance = LowRankCovariance | Floats
"""A covariance matrix [N, N]."""


class Process(ABC):
    """A Gaussian process that is fitted by Adam.

    `trained` names the parameters that a fit changes.
    """

    def __init__(self, noise: float, lr: float, *, kernel: Kernel) -> None:
        self.noise = noise
        self.lr = lr
        self.kernel = kernel
        self.trained = ("embedding",) if kernel == "linear" else ("embedding", "amplitude")

    def fit(
        self, parameters: KernelParameters, residuals: Floats, weights: Floats, steps: int
    ) -> KernelParameters:
        """Return `parameters` after `steps` steps of Adam on -sum_e weights_e log p(residuals_e).

        `residuals` [E, N] are the observed loss changes, and `weights` [E] their weights. Adam
        starts with moments of zero. The fit stops before a gradient that is not finite.
        """

        def gradient(trained: KernelParameters) -> KernelParameters:
            return self.gradient(parameters | trained, residuals, weights)

        start = {name: parameters[name] for name in self.trained}
        return parameters | adam(start, gradient, self.lr, steps)

    @abstractmethod
    def covariance(self, parameters: KernelParameters) -> Covariance:
        """Return the covariance [N, N] of the clients in `parameters`, noise included."""

    @abstractmethod
    def gradient(
        self, parameters: KernelParameters, residuals: Floats, weights: Floats
    ) -> KernelParameters:
        """Return the gradient of L = -sum_e g_e log p(r_e) by the trained parameters.

        `weights` [E] are g, and `residuals` [E, N] are r.
        """


class LowRankProcess(Process):
    """A Gaussian process with a linear kernel, fitted by marginal likelihood.

    The kernel is x_i . x_j, or amplitude^2 cos(x_i, x_j) (`linear_normalised`).
    """

    def covariance(self, parameters: KernelParameters) -> Covariance:
        return LowRankCovariance(self._factor(parameters), self.noise)

    def gradient(
        self, parameters: KernelParameters, residuals: Floats, weights: Floats
    ) -> KernelParameters:
        factor = self._factor(parameters)
        by_factor = self._gradient_by_factor(factor, residuals, weights)
        if self.kernel == "linear":
            return {"embedding": by_factor}
        # F = amplitude x / |x|: only the part of the gradient at right angles to x moves x.
        amplitude = parameters["amplitude"]
        directions = factor / amplitude  # x / |x|
        across = by_factor - directions * (directions * by_factor).sum(0)
        by_embedding = amplitude * across / np.linalg.norm(parameters["embedding"], axis=0)
        return {"embedding": by_embedding, "amplitude": np.asarray((by_factor * directions).sum())}

    def _factor(self, parameters: KernelParameters) -> Floats:
        """Return F [q, N]."""
        x = parameters["embedding"]
        if self.kernel == "linear":
            return x
        return x / np.linalg.norm(x, axis=0) * parameters["amplitude"]

    def _gradient_by_factor(self, factor: Floats, residuals: Floats, weights: Floats) -> Floats:
        """Return dL/dF [q, N], with nan in all entries if it cannot be computed.

        dL/dF = 2 F dL/dSigma with dL/dSigma = (G Sigma^-1 - Sigma^-1 S Sigma^-1) / 2, G = sum_e g_e
        and S = sum_e g_e r_e r_e^T. As F Sigma^-1 = A, this is
        G A - sum_e g_e (A r_e) (Sigma^-1 r_e)^T.
        """
        variance = self.noise**2
        try:
            a = np.linalg.solve(variance * np.eye(len(factor)) + factor @ factor.T, factor)  # A
        except np.linalg.LinAlgError:  # noise^2 is lost next to F F^T, whose rank is at most N
            return np.full_like(factor, np.nan)
        products = a @ residuals.T  # A r_e, [q, E]
        with np.errstate(invalid="ignore"):  # the caller checks for values that are not finite
            solved = (residuals.T - factor.T @ products) / variance  # Sigma^-1 r_e, [N, E]
        by_factor: Floats = weights.sum() * a - (products * weights) @ solved.T
        return by_factor


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

    def covariance(self, parameters: KernelParameters) -> Covariance:
        return self._matrix({name: torch.as_tensor(p) for name, p in parameters.items()}).numpy()

    def gradient(
        self, parameters: KernelParameters, residuals: Floats, weights: Floats
    ) -> KernelParameters:
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
            directions = x / x.norm(dim=0)
            kernel = parameters["amplitude"] ** 2 * (directions.T @ directions)
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
        return LowRankProcess(noise, lr, kernel=kernel)
    return DenseProcess(noise, lr, kernel=kernel, length=length, objective=objective)


def adam(
    start: KernelParameters,
    gradient: Callable[[KernelParameters], KernelParameters],
    lr: float,
    steps: int,
) -> KernelParameters:
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
