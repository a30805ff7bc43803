"""Hierarchical clustering of clients."""

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import fcluster, linkage

Floats = NDArray[np.float64]


def ward(distances: Floats) -> Floats:
    """Ward's linkage [N - 1, 4] of a symmetric table of distances [N, N] (as scipy returns it)."""
    above = np.concatenate([row[i + 1 :] for i, row in enumerate(distances)])
    tree: Floats = linkage(above.astype(np.float64, copy=False), method="ward")
    return tree


def cut(tree: Floats, count: int) -> NDArray[np.int64]:
    """Labels 0..M-1 [N] of at most `count` clusters."""
    labels: NDArray[np.int64] = fcluster(tree, count, criterion="maxclust").astype(np.int64) - 1
    return labels
