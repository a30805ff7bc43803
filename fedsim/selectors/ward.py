"""Ward's clustering by scipy, which takes long to import: only the selectors that cluster import
this module."""

import numpy as np
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import pdist

from fedsim.core.arrays import Floats, Ints
from fedsim.selectors.tools import WardInput


def ward_linkage(distances: Floats, on: WardInput = "distances") -> Floats:
    """Ward's linkage [N - 1, 4], in scipy's format, from a symmetric matrix of distances [N, N].

    `on: rows` clusters its rows as N points in N dimensions (N^3 / 2 operations): what scipy does
    with a square matrix.
    """
    if len(distances) == 1:
        return np.empty((0, 4))
    condensed = (
        pdist(distances)
        if on == "rows"
        else np.concatenate([row[i + 1 :] for i, row in enumerate(distances)])
    )
    return linkage(condensed.astype(np.float64, copy=False), method="ward")


def cut_tree(tree: Floats, count: int) -> Ints:
    """Cluster labels 0..M-1 [N] from cutting a linkage `tree` [N - 1, 4] into M <= `count`
    clusters."""
    if not len(tree):
        return np.zeros(1, np.int64)
    return fcluster(tree, count, criterion="maxclust").astype(np.int64) - 1
