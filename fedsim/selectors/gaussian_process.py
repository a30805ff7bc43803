"""FedCor's Gaussian process in its low-rank form: covariance F^T F + noise^2 I with F [q, N], q much smaller than N.

Everything is exact and linear in N: by Woodbury's identity Sigma^-1 = (I - F^T A) / noise^2 with
A = (noise^2 I + F F^T)^-1 F, and a greedy pick needs one column of the covariance at a time.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class LowRankGP:
    """Kernel x_i . x_j, or with `normalised` the cosine of x_i and x_j, plus noise^2 on the diagonal.

    (FedCor's normalised kernel has a trained amplitude besides; here the amplitude is 1.)
    """

    def __init__(self, noise: float, normalised: bool, lr: float) -> None:
        self.noise = noise
        self.normalised = normalised
        self.lr = lr

    def factor(self, embedding: Floats) -> Floats:
        """F [q, N] of an embedding X [q, N]."""
        return embedding / np.linalg.norm(embedding, axis=0) if self.normalised else embedding

    def fit(self, embedding: Floats, residuals: Floats, weights: Floats, steps: int) -> Floats:
        """X after `steps` of Adam on -sum_e weights_e log N(residuals_e; 0, Sigma), from `embedding`.

        `residuals` [E, N]. Adam's state is fresh; lr as given, betas .9 and .999, eps 1e-8.
        """
        x = embedding.copy()
        first, second = np.zeros_like(x), np.zeros_like(x)
        for step in range(1, steps + 1):
            gradient = self.gradient(x, residuals, weights)
            first += 0.1 * (gradient - first)
            second += 0.001 * (gradient**2 - second)
            x -= self.lr * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)
        return x

    def gradient(self, embedding: Floats, residuals: Floats, weights: Floats) -> Floats:
        """dL/dX = 2 X dL/dSigma with dL/dSigma = (G Sigma^-1 - Sigma^-1 S Sigma^-1) / 2, S = sum_e g_e r_e r_e^T."""
        f = self.factor(embedding)
        a = np.linalg.solve(self.noise**2 * np.eye(len(f)) + f @ f.T, f)
        ar = a @ residuals.T
        solved = (residuals.T - f.T @ ar) / self.noise**2  # Sigma^-1 r_e, [N, E]
        slope: Floats = weights.sum() * a - (ar * weights) @ solved.T
        if not self.normalised:
            return slope
        norms = np.linalg.norm(embedding, axis=0)
        tangent: Floats = (slope - f * (f * slope).sum(0)) / norms
        return tangent


def greedy_falls(
    factor: Floats, noise: float, shares: Floats, discounts: Floats, count: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """FedCor's selection (Eq. 13): `count` positions, each with the largest discounted fall of the weighted losses.

    Repeats j = argmax_k a_k / sqrt(C_kk) * sum_i p_i C_ik and C <- C - C_:j C_j: / C_jj, from C = F^T F + noise^2 I.
    """
    total = factor.T @ (factor @ shares) + noise**2 * shares  # C p
    diagonal = (factor**2).sum(0) + noise**2
    left = np.ones(len(shares), dtype=bool)
    seen: list[Floats] = []  # C_:j / sqrt(C_jj) of the clients picked so far
    for _ in range(count):
        falls = np.where(left, discounts * total / np.sqrt(np.maximum(diagonal, 1e-300)), -np.inf)
        j = int(rng.choice(np.flatnonzero(falls == falls.max())))
        column = factor.T @ factor[:, j]
        column[j] += noise**2
        for unit in seen:
            column -= unit * unit[j]
        unit = column / np.sqrt(column[j])
        total -= unit * (unit @ shares)
        diagonal -= unit**2
        seen.append(unit)
        left[j] = False
    return np.flatnonzero(~left)
