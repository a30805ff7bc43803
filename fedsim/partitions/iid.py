"""Partitions without label skew: equal sizes, or skewed sizes."""

from typing import Literal

import numpy as np

from fedsim.errors import at_least, between, check
from fedsim.exact.elementary import exp, log
from fedsim.partitions.apportion import largest_remainder, require_samples
from fedsim.partitions.base import Indices, Labelled, Partition


class IID(Partition):
    """A random permutation cut into blocks whose sizes differ by at most one."""

    def split(self, data: Labelled, num_clients: int, rng: np.random.Generator) -> list[Indices]:
        require_samples(len(data.labels), num_clients, 1, "partition=iid")
        return np.array_split(rng.permutation(len(data.labels)), num_clients)


class QuantitySkew(Partition):
    """Clients differ only in size: sizes are proportional to log-normal or power-law draws, labels are random.

    `law: lognormal`: exp(skew z) with z standard normal. `law: powerlaw`: u^(-1 / skew) with u uniform on (0, 1], a
    Pareto tail of index `skew` (smaller is more skewed). Every client gets `min_size` samples in advance.
    """

    def __init__(self, *, law: Literal["lognormal", "powerlaw"], skew: float, min_size: int) -> None:
        check(between("skew", skew, 0.001, 1000), at_least("min_size", min_size, 1))
        self.law = law
        self.skew = skew
        self.min_size = min_size

    def split(self, data: Labelled, num_clients: int, rng: np.random.Generator) -> list[Indices]:
        num = len(data.labels)
        require_samples(num, num_clients, self.min_size, f"partition.min_size={self.min_size}")
        if self.law == "lognormal":
            logs = self.skew * rng.standard_normal(num_clients)
        else:
            logs = -log(1 - rng.random(num_clients)) / self.skew
        shares = exp(logs - logs.max())  # the largest is 1, so that no skew overflows
        sizes = self.min_size + largest_remainder(shares, num - num_clients * self.min_size)
        return np.split(rng.permutation(num), np.cumsum(sizes)[:-1])
