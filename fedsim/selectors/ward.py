"""Ward's clustering by SciPy.

SciPy takes long to import, so only the selectors that cluster import this module.
"""

import numpy as np
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import pdist, squareform

from fedsim.core.arrays import Floats, Ints
from fedsim.selectors.tools import WardInput


def ward_linkage(distances: Floats, on: WardInput = "distances") -> Floats:
    """Return Ward's linkage [N - 1, 4] in SciPy's format from symmetric `distances` [N, N].

    `on: rows` clusters the rows of the matrix as N points in N dimensions (N^3 / 2 operations).
    SciPy does so with a square matrix.
    """
    if len(distances) == 1:
        return np.empty((0, 4))
    condensed = pdist(distances) if on == "rows" else squareform(distances, checks=False)
    return linkage(condensed.astype(np.float64, copy=False), method="ward")


def cut_tree(tree: Floats, count: int) -> Ints:
    """Return cluster labels 0..M-1 [N] from cutting a linkage into M <= `count` clusters."""
    if not len(tree):
        return np.zeros(1, np.int64)
    return fcluster(tree, count, criterion="maxclust").astype(np.int64) - 1
