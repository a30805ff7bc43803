"""Kullback-Leibler divergences between the predictions of models."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.exact.elementary import exp
from fedsim.selectors.tools.inner_products import inner_products

LOWEST = -18.420680743952367
"""The logarithm of 1e-8."""


def kl_divergences(log_p: Tensor, reduction: str) -> NDArray[np.float64]:
    """KL(P_k || P_j) [K, K] averaged over samples, from log-probabilities [K models, M samples, C classes].

    `reduction: mean` divides by the number of classes as well, `sum` does not. Probabilities are clipped at 1e-8. All
    sums sum_c p (ln p - ln q) are computed as one matrix product of the rows of p with the rows of ln q.
    """
    log_p = log_p.clamp(min=LOWEST)
    flat = log_p.flatten(1)
    cross = inner_products([flat], lambda x: torch.from_numpy(exp(x.numpy())).to(x.dtype), lambda x: x)
    scale = log_p.shape[1] * (log_p.shape[2] if reduction == "mean" else 1)
    own = cross.diagonal().clone()
    result: NDArray[np.float64] = cross.neg_().add_(own[:, None]).div_(scale).numpy()
    return result
