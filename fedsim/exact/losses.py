"""Log-probabilities of logits in float64: on a CPU in a fixed order, on a GPU as torch has them."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedsim.exact.elementary import exp, log
from fedsim.exact.sums import has_order

BLOCK = 1024
"""Samples that are worked on at once, so that they stay in the cache."""


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities [n, C] of `logits` [n, C]."""
    if not has_order(logits):
        return F.log_softmax(logits.double(), dim=1)
    result = np.empty(logits.shape)
    for start in range(0, len(logits), BLOCK):
        part = slice(start, start + BLOCK)
        shifted = np.ascontiguousarray(logits[part].T.double().numpy())
        with np.errstate(invalid="ignore"):
            shifted -= shifted.max(0)
            result[part] = (shifted - log(np.add.reduce(exp(shifted), axis=0))).T
    return torch.from_numpy(result)
