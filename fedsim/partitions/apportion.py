"""Whole numbers from shares, and the errors that all partitions have in common."""

import numpy as np
from numpy.typing import NDArray

from fedsim.errors import DataError


def largest_remainder(shares: NDArray[np.float64], total: int) -> NDArray[np.int64]:
    """Integers proportional to `shares` that sum to `total` (Hamilton's method; ties to the lower index)."""
    quotas = shares / shares.sum() * total
    counts: NDArray[np.int64] = np.floor(quotas).astype(np.int64)
    order = np.argsort(-(quotas - counts), kind="stable")
    counts[order[: total - counts.sum()]] += 1
    return counts


def require_samples(num_samples: int, num_clients: int, each: int, what: str) -> None:
    """Raise `DataError` unless there are `each` samples for every client; `what` names the key that wants them."""
    if num_samples < num_clients * each:
        raise DataError(
            f"num_clients={num_clients}: {what} needs at least {num_clients * each} training samples and there are "
            f"{num_samples}; lower num_clients, or the samples that the server keeps (server.*)"
        )


def shuffled_by_class(labels: NDArray[np.int64], num_classes: int, rng: np.random.Generator) -> list[NDArray[np.int64]]:
    """Positions of each class in random order."""
    return [rng.permutation(np.flatnonzero(labels == c)) for c in range(num_classes)]
