"""Divergences between the predictions of several models for the same samples."""

import torch
from torch import Tensor

from fedsim.core.exact import exp
from fedsim.selectors.base import Floats
from fedsim.selectors.similarity import inner_products

LOG_SMALLEST_PROBABILITY = -18.420680743952367
"""ln 1e-8, written out so that it is the same on every machine."""


def kl_divergences(log_p: Tensor, reduction: str) -> Floats:
    """Return the Kullback-Leibler divergences KL(P_i || P_j) [n, n] of n models' predictions.

    `log_p` [n, M, C] holds the log-probabilities of C classes that each model predicts for M
    samples. They are clipped from below at ln 1e-8. Divergences are averaged over the samples.
    `reduction: mean` also divides them by C, `sum` does not.
    """
    log_p = log_p.clamp(min=LOG_SMALLEST_PROBABILITY)
    # The sum of p_i ln p_j over samples and classes, for all pairs of models. KL(P_i || P_j) is the
    # diagonal entry of row i minus entry (i, j).
    cross = inner_products(
        [log_p.flatten(1)], lambda x: torch.from_numpy(exp(x.numpy())).to(x.dtype), lambda x: x
    )
    _, num_samples, num_classes = log_p.shape
    divisor = num_samples * (num_classes if reduction == "mean" else 1)
    negative_entropy = cross.diagonal().clone()
    return cross.neg_().add_(negative_entropy[:, None]).div_(divisor).numpy()
