"""Clusters of N clients by the density of their distances, by scikit-learn.

scikit-learn takes long to import, so only the selectors that cluster import this module.
"""

from typing import Literal

import numpy as np
from scipy.spatial.distance import pdist, squareform
from sklearn.cluster import OPTICS

from fedsim.core.arrays import Floats, Ints


def label_distances(shares: Floats, distance: Literal["euclidean", "hellinger"]) -> Floats:
    """Return the distances [N, N] of the distributions `shares` [N, C].

    The Hellinger distance of p and q is the Euclidean one of their roots, divided by the root of 2.
    """
    if distance == "euclidean":
        return squareform(pdist(shares))
    return squareform(pdist(np.sqrt(shares))) / np.sqrt(2)


def density_clusters(distances: Floats, max_distance: float | None = None) -> Ints:
    """Return the clusters 0..M-1 [N] that OPTICS finds in `distances` [N, N].

    `max_distance` None extracts them by the steepness of the reachability, and a number as DBSCAN
    does: clients up to this distance are neighbours. A cluster has at least two clients. A client
    outside of all clusters gets one of its own.
    """
    if len(distances) == 1:  # scikit-learn rejects a single client
        return np.zeros(1, np.int64)
    # Equal clients have distance 0, by which OPTICS divides.
    with np.errstate(divide="ignore", invalid="ignore"):
        method = "xi" if max_distance is None else "dbscan"
        optics = OPTICS(
            min_samples=2, metric="precomputed", cluster_method=method, eps=max_distance
        )
        found = optics.fit_predict(distances)
    labels = found.astype(np.int64)
    outside = labels < 0
    labels[outside] = labels.max() + 1 + np.arange(outside.sum())
    return labels
