"""How much the predictions of models differ."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


def divergences(log_p: Tensor, reduction: str) -> NDArray[np.float64]:
    """KL(P_k || P_j) averaged over samples, [K, K], from log-probabilities [K, M, C]; `mean`: over classes as well.

    Probabilities are clipped at 1e-8. sum_c p (ln p - ln q) is one matrix product: rows of p against rows of ln q.
    """
    log_p = log_p.clamp(min=float(np.log(1e-8)))
    flat = log_p.flatten(1)
    p = flat.exp()
    cross = p @ flat.T
    scale = log_p.shape[1] * (log_p.shape[2] if reduction == "mean" else 1)
    result: NDArray[np.float64] = ((cross.diagonal()[:, None] - cross) / scale).numpy()
    return result
