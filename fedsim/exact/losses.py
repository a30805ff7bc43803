"""Log-probabilities and cross-entropies of logits in float64: on a CPU in a fixed order, on a GPU as torch has them."""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from fedsim.exact.elementary import exp, log

Floats = NDArray[np.float64]

BLOCK = 1024
"""Samples that are worked on at once, so that they stay in the cache."""


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities [n, C] of `logits` [n, C]."""
    if logits.is_cuda:
        return F.log_softmax(logits.double(), dim=1)
    result = np.empty(logits.shape)
    for part, shifted, logs in _blocks(logits):
        result[part] = (shifted - logs).T
    return torch.from_numpy(result)


def cross_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    """-log p of the `labels` [n] by `logits` [n, C], one for each sample [n]."""
    if logits.is_cuda:
        return F.cross_entropy(logits.double(), labels, reduction="none")
    result, chosen = np.empty(len(logits)), labels.numpy()
    for part, shifted, logs in _blocks(logits):
        result[part] = logs - np.take_along_axis(shifted, chosen[None, part], 0)[0]
    return torch.from_numpy(result)


def _blocks(logits: Tensor) -> Iterator[tuple[slice, Floats, Floats]]:
    """Of some samples at a time: which, their logits less the largest [C, m], and the logarithms of the sums of their
    exponentials [m], class after class."""
    for start in range(0, len(logits), BLOCK):
        part = slice(start, start + BLOCK)
        shifted = np.ascontiguousarray(logits[part].T.double().numpy())
        with np.errstate(invalid="ignore"):
            shifted -= shifted.max(0)
            yield part, shifted, log(np.add.reduce(exp(shifted), axis=0))
