"""Partitions that do not look at labels: clients of equal or skewed sizes, or one client for each
owner (the natural client of samples, such as their writer)."""

from typing import Annotated, Literal

import numpy as np
from annotated_types import Interval

from fedsim.core.errors import DataError
from fedsim.core.exact import exp, log
from fedsim.core.parameters import Count, parameters
from fedsim.core.types import ClientPositions
from fedsim.partitions.base import Indices, Labelled, Partition, largest_remainder, require_samples


class IID(Partition):
    """A partition into random parts whose sizes differ by at most 1."""

    def split(self, data: Labelled, num_clients: int, rng: np.random.Generator) -> list[Indices]:
        """Return consecutive parts of a random permutation."""
        require_samples(len(data.labels), num_clients, 1, "partition=iid")
        return np.array_split(rng.permutation(len(data.labels)), num_clients)


@parameters
class QuantitySkew(Partition):
    """A partition into random parts whose sizes are proportional to log-normal or power-law
    draws."""

    law: Literal["lognormal", "powerlaw"]
    """`lognormal`: exp(skew z) with z standard normal. `powerlaw`: u^(-1 / skew) with u uniform on
    (0, 1], a Pareto tail of index `skew` (smaller is more skewed)."""
    skew: Annotated[float, Interval(ge=0.001, le=1000)]
    min_size: Count
    """Number of samples that every client gets in advance; the rest is in proportion to the
    draws."""

    def split(self, data: Labelled, num_clients: int, rng: np.random.Generator) -> list[Indices]:
        """Return consecutive parts of a random permutation."""
        num_samples = len(data.labels)
        setting = f"partition.min_size={self.min_size}"
        require_samples(num_samples, num_clients, self.min_size, setting)
        if self.law == "lognormal":
            logs = self.skew * rng.standard_normal(num_clients)
        else:
            logs = -log(1 - rng.random(num_clients)) / self.skew  # 1 - [0, 1) is (0, 1]
        shares = exp(logs - logs.max())  # the largest share is 1, so no skew overflows
        num_shared = num_samples - num_clients * self.min_size
        sizes = self.min_size + largest_remainder(shares, num_shared)
        return np.split(rng.permutation(num_samples), np.cumsum(sizes)[:-1])


@parameters
class Natural(Partition):
    """A partition whose clients are random owners (writers, users) with at least `min_samples`
    samples. Clients are in the order of their owners' numbers."""

    min_samples: Count
    cap: Count | None
    """The largest number of samples of a client; None: all (GPFL's Fig. 7: 10)."""
    keep: Literal["random", "first"]
    """The samples that a capped client keeps: random ones, or its first in the data set."""

    def split(self, data: Labelled, num_clients: int, rng: np.random.Generator) -> ClientPositions:
        """Return the positions of each selected owner, in random order."""
        if data.owners is None:
            raise DataError(
                "partition=natural: this data set does not say whose samples are whose; use one "
                "with owners, such as dataset=femnist, or dataset=parquet with "
                "dataset.client_column"
            )
        owners, counts = np.unique(data.owners, return_counts=True)
        by_owner = ClientPositions(np.argsort(data.owners, kind="stable"), counts)
        eligible = np.flatnonzero(counts >= self.min_samples)
        if len(eligible) < num_clients:
            all_count = len(eligible) == len(owners)
            remedy = f"at most num_clients={len(owners)}" if all_count else "lower one of the two"
            raise DataError(
                f"num_clients={num_clients}: only {len(eligible)} of {len(owners)} owners have "
                f"partition.min_samples={self.min_samples} training samples; {remedy}"
            )
        selected = np.sort(rng.choice(eligible, num_clients, replace=False))
        positions = by_owner.of_clients(selected)
        # A cap before the shuffle keeps the first samples, a cap after it keeps random ones.
        if self.keep == "first":
            positions = self._cap(positions)
        for client_positions in positions:
            rng.shuffle(client_positions)  # in place: they are views of `positions.flat`
        return self._cap(positions)

    def _cap(self, positions: ClientPositions) -> ClientPositions:
        """Return at most the first `cap` positions of each client."""
        if self.cap is None:
            return positions
        capped, _ = positions.split(np.minimum(positions.sizes, self.cap))
        return capped
