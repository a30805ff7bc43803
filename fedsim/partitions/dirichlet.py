"""Label skew by Dirichlet draws, per class or per client. The quadratic-programming kind is in dirichlet_qp.py."""

import numpy as np
from numpy.typing import NDArray

from fedsim.errors import DataError, at_least, check, positive
from fedsim.partitions.apportion import largest_remainder, require_samples, shuffled_by_class
from fedsim.partitions.base import Indices, Labelled, Partition


class DirichletClass(Partition):
    """For each class, proportions over the clients ~ Dir(alpha 1_N) (FedABC; Yurochkin et al., 2019).

    The shuffled class is cut at rounded cumulative proportions. `balanced`: a client that already holds n / N samples
    or more gets none of the next class, and the others' proportions are scaled up (Li et al., "Federated Learning on
    Non-IID Data Silos: An Experimental Study", 2022, in their code, which rounds down); where those are 0, all with
    room get as much. Drawn again until every client has `min_size` samples, at most `max_tries` times.
    """

    def __init__(self, *, alpha: float, balanced: bool, min_size: int, max_tries: int) -> None:
        check(positive("alpha", alpha), at_least("min_size", min_size, 0), at_least("max_tries", max_tries, 1))
        self.alpha = alpha
        self.balanced = balanced
        self.min_size = min_size
        self.max_tries = max_tries

    def split(self, data: Labelled, num_clients: int, rng: np.random.Generator) -> list[Indices]:
        require_samples(len(data.labels), num_clients, max(self.min_size, 1), f"partition.min_size={self.min_size}")
        smallest = 0
        for _ in range(self.max_tries):
            parts = self._draw(data, num_clients, rng)
            smallest = min(map(len, parts))
            if smallest >= self.min_size:
                return parts
        raise DataError(
            f"partition.min_size={self.min_size}: not reached for every client in partition.max_tries={self.max_tries} "
            f"draws with alpha={self.alpha} (the last one's smallest client has {smallest}); lower min_size or "
            "num_clients, or raise alpha"
        )

    def _draw(self, data: Labelled, num_clients: int, rng: np.random.Generator) -> list[Indices]:
        pieces: list[list[Indices]] = [[] for _ in range(num_clients)]
        sizes = np.zeros(num_clients, np.int64)
        for positions in shuffled_by_class(data.labels, data.num_classes, rng):
            shares = rng.dirichlet(np.full(num_clients, self.alpha))
            if self.balanced:
                shares = _among(shares, sizes < len(data.labels) / num_clients)
            cumulative = np.cumsum(shares)[:-1]
            cuts = np.round(np.clip(cumulative, 0, 1) * len(positions)).astype(np.int64)
            for client, part in enumerate(np.split(positions, cuts)):
                pieces[client].append(part)
                sizes[client] += len(part)
        return [rng.permutation(np.concatenate(p)) for p in pieces]


def _among(shares: NDArray[np.float64], room: NDArray[np.bool_]) -> NDArray[np.float64]:
    """`shares` of those with `room`, scaled to sum 1; equal ones where they have none."""
    kept = np.where(room, shares, 0.0)
    if kept.sum() <= 0:
        kept = room.astype(float) if room.any() else np.ones(len(shares))
    scaled: NDArray[np.float64] = kept / kept.sum()
    return scaled


class DirichletClient(Partition):
    """Each client draws its labels from its own q_i ~ Dir(alpha 1_C); sizes are equal up to one ("Dir(.2)" elsewhere;
    Hsu et al., 2019, whose alpha is C times this one).

    Clients take turns in random order, one sample at a time; a class that has run out leaves the others' probabilities
    renormalised. Every sample is used.
    """

    def __init__(self, *, alpha: float) -> None:
        check(positive("alpha", alpha))
        self.alpha = alpha

    def split(self, data: Labelled, num_clients: int, rng: np.random.Generator) -> list[Indices]:
        num = len(data.labels)
        require_samples(num, num_clients, 1, "partition=dirichlet_client")
        classes = shuffled_by_class(data.labels, data.num_classes, rng)
        left = np.array([len(c) for c in classes])
        mix = rng.dirichlet(np.full(data.num_classes, self.alpha), num_clients)
        sizes = largest_remainder(np.ones(num_clients), num)
        turns = np.concatenate([rng.permutation(np.flatnonzero(sizes > t)) for t in range(int(sizes.max()))])
        parts: list[list[int]] = [[] for _ in range(num_clients)]
        for client, u in zip(turns, rng.random(num), strict=True):
            c = _draw_class(mix[client], left, u)
            left[c] -= 1
            parts[client].append(classes[c][left[c]])
        return [np.array(p, dtype=np.int64) for p in parts]


def _draw_class(probabilities: NDArray[np.float64], left: NDArray[np.int64], u: float) -> int:
    """The class at quantile `u` among those with samples left; uniform over them where they have no probability."""
    weights = np.where(left > 0, probabilities, 0.0)
    if weights.sum() <= 0:
        weights = (left > 0).astype(float)
    cumulative = np.cumsum(weights)
    return int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
