"""Hierarchical clustering of clients."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import pdist

Floats = NDArray[np.float64]
WardOn = Literal["distances", "rows"]


def ward(table: Floats, on: WardOn = "distances") -> Floats:
    """Ward's linkage [N - 1, 4] of a symmetric table of distances [N, N] (as scipy returns it).

    `on` rows: of the table's rows taken as N points in N dimensions, as codes have it that hand scipy the square table
    (N^3 / 2 operations).
    """
    if len(table) == 1:
        return np.empty((0, 4))
    above = pdist(table) if on == "rows" else np.concatenate([row[i + 1 :] for i, row in enumerate(table)])
    tree: Floats = linkage(above.astype(np.float64, copy=False), method="ward")
    return tree


def cut(tree: Floats, count: int) -> NDArray[np.int64]:
    """Labels 0..M-1 [N] of at most `count` clusters."""
    labels: NDArray[np.int64] = fcluster(tree, count, criterion="maxclust").astype(np.int64) - 1
    return labels
