"""Label skew by Dirichlet draws, per class or per client. For the variant with a quadratic program:
dirichlet_qp.py."""

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
    """Each class is divided among the clients in proportions ~ Dir(alpha 1_N) (FedABC; Yurochkin et
    al., 2019).

    The shuffled samples of a class are cut at the rounded cumulative proportions. `balanced`: a
    client that already holds n / N samples or more gets none of the next class, and the proportions
    of the others are scaled to sum to 1 (as in the code of Li et al., "Federated Learning on
    Non-IID Data Silos: An Experimental Study", 2022, which rounds down); if these are all 0, the
    clients below n / N get equal proportions. The partition is drawn again until every client has
    `min_size` samples, at most `max_tries` times; then it raises `DataError`.
    """

    alpha: Positive
    balanced: bool
    min_size: CountOrZero
    max_tries: Annotated[int, Ge(1), Le(100_000)]  # about a millisecond each

    def split(self, data: Labelled, num_clients: int, rng: np.random.Generator) -> list[Indices]:
        require_samples(
            len(data.labels),
            num_clients,
            max(self.min_size, 1),
            f"partition.min_size={self.min_size}",
        )
        smallest = 0
        for _ in range(self.max_tries):
            parts = self._draw(data, num_clients, rng)
            smallest = min(map(len, parts))
            if smallest >= self.min_size:
                return parts
        tries = f"not reached for every client in partition.max_tries={self.max_tries} draws with alpha={self.alpha}"
        told = f"{tries} (the last one's smallest client has {smallest}); lower min_size or num_clients, or raise alpha"
        raise DataError(f"partition.min_size={self.min_size}: {told}")

    def _draw(self, data: Labelled, num_clients: int, rng: np.random.Generator) -> list[Indices]:
        pieces: list[list[Indices]] = [[] for _ in range(num_clients)]
        sizes = np.zeros(num_clients, np.int64)
        for positions in shuffled_by_class(data.labels, data.num_classes, rng):
            shares = rng.dirichlet(np.full(num_clients, self.alpha))
            if self.balanced:
                shares = _restricted(shares, sizes < len(data.labels) / num_clients)
                shares = shares / shares.sum()
            cumulative = np.cumsum(shares)[:-1]
            cuts = np.round(np.clip(cumulative, 0, 1) * len(positions)).astype(np.int64)
            for client, part in enumerate(np.split(positions, cuts)):
                pieces[client].append(part)
                sizes[client] += len(part)
        return [rng.permutation(np.concatenate(p)) for p in pieces]


def _restricted(shares: Floats, has_room: Bools) -> Floats:
    """`shares` [n] where `has_room` is true, else 0; equal ones there, or everywhere, if that
    leaves nothing."""
    kept = np.where(has_room, shares, 0.0)
    if kept.sum() <= 0:
        kept = has_room.astype(float) if has_room.any() else np.ones(len(shares))
    return kept


@parameters
class DirichletClient(Partition):
    """Each client draws its labels from its own distribution q_i ~ Dir(alpha 1_C); client sizes
    differ by at most one.

    This is what "Dir(.2)" often stands for (Hsu et al., 2019, whose alpha is C times this one).
    Clients draw one sample at a time, in an order that is random in each pass; when a class is used
    up, the probabilities of the others are renormalised. All samples are used.
    """

    alpha: Positive

    def split(self, data: Labelled, num_clients: int, rng: np.random.Generator) -> list[Indices]:
        num = len(data.labels)
        require_samples(num, num_clients, 1, "partition=dirichlet_client")
        classes = shuffled_by_class(data.labels, data.num_classes, rng)
        remaining = np.array([len(c) for c in classes])
        label_mixes = rng.dirichlet(np.full(data.num_classes, self.alpha), num_clients)
        sizes = largest_remainder(np.ones(num_clients), num)
        turns = np.concatenate(
            [rng.permutation(np.flatnonzero(sizes > t)) for t in range(int(sizes.max()))]
        )
        parts: list[list[int]] = [[] for _ in range(num_clients)]
        for client, u in zip(turns, rng.random(num), strict=True):
            c = _draw_class(label_mixes[client], remaining, u)
            remaining[c] -= 1
            parts[client].append(classes[c][remaining[c]])
        return [np.array(p, dtype=np.int64) for p in parts]


def _draw_class(probabilities: Floats, remaining: Ints, u: float) -> int:
    """The class at quantile `u` of `probabilities` [C], restricted to classes with samples
    remaining; uniform over these if all of their probabilities are 0."""
    weights = _restricted(probabilities, remaining > 0)
    cumulative, last = np.cumsum(weights), int(np.flatnonzero(weights)[-1])
    # of weights near the smallest numbers that there are, `u` times their sum may be rounded up to
    # the sum itself
    return min(int(np.searchsorted(cumulative, u * cumulative[-1], side="right")), last)
