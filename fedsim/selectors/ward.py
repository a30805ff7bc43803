"""Ward's hierarchical clustering of N clients, by SciPy.

SciPy takes long to import, so only the selectors that cluster import this module.
"""

from typing import Literal

import numpy as np
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import pdist, squareform

from fedsim.core.arrays import Floats, Ints


def ward_linkage(distances: Floats, on: Literal["distances", "rows"] = "distances") -> Floats:
    """Return Ward's tree as a linkage [N - 1, 4] in SciPy's format, from `distances` [N, N].

    `distances` is symmetric. `on: rows` clusters its rows as N points in N dimensions (N^3 / 2
    operations). SciPy's `linkage` does so if it gets a square matrix.
    """
    if len(distances) == 1:  # SciPy rejects a single client
        return np.empty((0, 4))
    condensed = pdist(distances) if on == "rows" else squareform(distances, checks=False)
    return linkage(condensed.astype(np.float64, copy=False), method="ward")


def cut_tree(tree: Floats, count: int) -> Ints:
    """Return cluster labels 0..M-1 [N] from cutting the linkage `tree` into M <= `count` clusters.

    An empty tree belongs to a single client.
    """
    if not len(tree):
        return np.zeros(1, np.int64)
    return fcluster(tree, count, criterion="maxclust").astype(np.int64) - 1
