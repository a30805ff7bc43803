"""Kullback-Leibler divergences between the predictions of models."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


def kl_divergences(log_p: Tensor, reduction: str) -> NDArray[np.float64]:
    """KL(P_k || P_j) [K, K] averaged over samples, from log-probabilities [K models, M samples, C classes].

    `reduction: mean` divides by the number of classes as well, `sum` does not. Probabilities are clipped at 1e-8. All
    sums sum_c p (ln p - ln q) are computed as one matrix product of the rows of p with the rows of ln q.
    """
    log_p = log_p.clamp(min=float(np.log(1e-8)))
    flat = log_p.flatten(1)
    p = flat.exp()
    cross = p @ flat.T
    scale = log_p.shape[1] * (log_p.shape[2] if reduction == "mean" else 1)
    own = cross.diagonal().clone()
    result: NDArray[np.float64] = cross.neg_().add_(own[:, None]).div_(scale).numpy()
    return result
