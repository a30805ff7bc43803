"""Label skew by Dirichlet draws, for each class or for each client.

The variant of FedCor and GPFL, with a quadratic program, is in dirichlet_qp.py. Shapes: n samples,
N clients, C classes.
"""

from typing import Annotated

import numpy as np
from annotated_types import Ge, Le

from fedsim.core.arrays import Bools, Floats, Ints
from fedsim.core.errors import DataError
from fedsim.core.parameters import CountOrZero, Positive, parameters
from fedsim.partitions.base import (
    Indices,
    Labelled,
    Partition,
    largest_remainder,
    require_samples,
    shuffled_by_class,
)


@parameters
class DirichletClass(Partition):
    """A partition that divides each class among the clients in random proportions ~ Dir(alpha 1_N).

    1_N is a vector of N ones. Source: FedABC; Yurochkin et al., 2019. The shuffled samples of a
    class are cut at the rounded cumulative proportions.
    """

    alpha: Positive
    balanced: bool
    """Whether a client that holds n / N samples or more gets none of the next class. The
    proportions of the others are scaled to sum to 1; if all of these are 0, they become equal. (Li
    et al., "Federated Learning on Non-IID Data Silos: An Experimental Study", 2022, whose code
    rounds down.)"""
    min_size: CountOrZero
    """Every client must have this many samples; otherwise the partition is drawn again."""
    max_tries: Annotated[int, Ge(1), Le(100_000)]  # about a millisecond each
    """Number of draws after which `split` raises `DataError`."""

    def split(self, data: Labelled, num_clients: int, rng: np.random.Generator) -> list[Indices]:
        """Return the first draw in which every client has enough samples."""
        min_size = max(self.min_size, 1)
        setting = f"partition.min_size={self.min_size}"
        require_samples(len(data.labels), num_clients, min_size, setting)
        smallest = 0
        for _ in range(self.max_tries):
            parts = self._draw(data, num_clients, rng)
            smallest = min(map(len, parts))
            if smallest >= self.min_size:
                return parts
        raise DataError(
            f"{setting}: not reached for every client in partition.max_tries={self.max_tries} "
            f"draws with alpha={self.alpha} (the last one's smallest client has {smallest}); lower "
            "min_size or num_clients, or raise alpha"
        )

    def _draw(self, data: Labelled, num_clients: int, rng: np.random.Generator) -> list[Indices]:
        """Return the positions of each client in one draw, in random order."""
        pieces: list[list[Indices]] = [[] for _ in range(num_clients)]
        sizes = np.zeros(num_clients, np.int64)
        mean_size = len(data.labels) / num_clients
        for positions in shuffled_by_class(data.labels, data.num_classes, rng):
            shares = rng.dirichlet(np.full(num_clients, self.alpha))
            if self.balanced:
                shares = _restrict(shares, sizes < mean_size)
                shares = shares / shares.sum()
            # without the last sum, 1, at which nothing is cut; rounding may exceed 1
            cumulative = np.clip(np.cumsum(shares)[:-1], 0, 1)
            cuts = np.round(cumulative * len(positions)).astype(np.int64)
            for client, piece in enumerate(np.split(positions, cuts)):
                pieces[client].append(piece)
                sizes[client] += len(piece)
        return [rng.permutation(np.concatenate(client_pieces)) for client_pieces in pieces]


def _restrict(shares: Floats, allowed: Bools) -> Floats:
    """Return `shares` [n] where `allowed` [n] is true, and 0 elsewhere.

    If all allowed shares are 0, they become equal. If none is allowed, all shares become equal.
    """
    restricted = np.where(allowed, shares, 0.0)
    if restricted.sum() > 0:
        return restricted
    return allowed.astype(float) if allowed.any() else np.ones(len(shares))


@parameters
class DirichletClient(Partition):
    """A partition in which each client i draws its labels from its own distribution
    q_i ~ Dir(alpha 1_C).

    1_C is a vector of C ones. This is what "Dir(0.2)" often stands for (Hsu et al., 2019, whose
    alpha is C times this one). The sizes of clients differ by at most 1. In each pass, every client
    draws one sample; the order of clients is random in each pass. After the last sample of a class,
    the probabilities of the other classes are renormalised. All samples are used.
    """

    alpha: Positive

    def split(self, data: Labelled, num_clients: int, rng: np.random.Generator) -> list[Indices]:
        """Return the positions of each client, in the order in which it has drawn them."""
        num_samples = len(data.labels)
        require_samples(num_samples, num_clients, 1, "partition=dirichlet_client")
        classes = shuffled_by_class(data.labels, data.num_classes, rng)
        remaining = np.array([len(positions) for positions in classes])
        label_mixes = rng.dirichlet(np.full(data.num_classes, self.alpha), num_clients)
        sizes = largest_remainder(np.ones(num_clients), num_samples)
        passes = []
        for pass_number in range(int(sizes.max())):
            drawing_clients = np.flatnonzero(sizes > pass_number)
            passes.append(rng.permutation(drawing_clients))
        turns = np.concatenate(passes)  # the client that draws each of the n samples
        parts: list[list[int]] = [[] for _ in range(num_clients)]
        for client, quantile in zip(turns, rng.random(num_samples), strict=True):
            label = _draw_class(label_mixes[client], remaining, quantile)
            remaining[label] -= 1
            parts[client].append(classes[label][remaining[label]])
        return [np.array(part, dtype=np.int64) for part in parts]


def _draw_class(probabilities: Floats, remaining: Ints, quantile: float) -> int:
    """Return the class at the `quantile`, in [0, 1), of the distribution `probabilities` [C].

    Only classes with `remaining` [C] samples count. If their probabilities are all 0, they become
    equal.
    """
    weights = _restrict(probabilities, remaining > 0)
    cumulative = np.cumsum(weights)
    last_class = int(np.flatnonzero(weights)[-1])
    # With weights near the smallest floating-point numbers, the product may be rounded up to the
    # sum. The position is then beyond the last class.
    position = np.searchsorted(cumulative, quantile * cumulative[-1], side="right")
    return min(int(position), last_class)
