"""Partitions without label skew."""

from typing import Literal

import numpy as np

from fedsim.errors import check, positive, rule
from fedsim.partitions.apportion import largest_remainder, require_samples
from fedsim.partitions.base import Indices, Labelled, Partition


class IID(Partition):
    """A random permutation cut into blocks whose sizes differ by at most one."""

    def split(self, data: Labelled, num_clients: int, rng: np.random.Generator) -> list[Indices]:
        require_samples(len(data.labels), num_clients, "partition=iid")
        return np.array_split(rng.permutation(len(data.labels)), num_clients)


class QuantitySkew(Partition):
    """Clients differ in size alone: sizes proportional to log-normal or power-law draws, labels at random.

    `lognormal`: exp(skew z), z normal. `powerlaw`: u^(-1 / skew), u uniform on (0, 1] (a Pareto tail of index `skew`:
    smaller is more skewed). Every client gets `min_size` samples first.
    """

    def __init__(self, *, law: Literal["lognormal", "powerlaw"], skew: float, min_size: int) -> None:
        check(positive("skew", skew), rule(min_size >= 1, "min_size", min_size, "must be >= 1"))
        self.law = law
        self.skew = skew
        self.min_size = min_size

    def split(self, data: Labelled, num_clients: int, rng: np.random.Generator) -> list[Indices]:
        num = len(data.labels)
        require_samples(num, num_clients * self.min_size, f"partition.min_size={self.min_size} for every client")
        if self.law == "lognormal":
            shares = np.exp(self.skew * rng.standard_normal(num_clients))
        else:
            shares = (1 - rng.random(num_clients)) ** (-1 / self.skew)
        sizes = self.min_size + largest_remainder(shares, num - num_clients * self.min_size)
        return np.split(rng.permutation(num), np.cumsum(sizes)[:-1])
