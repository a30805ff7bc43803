"""Partitions without label skew of their own: equal or skewed sizes, or one client per owner
(writer, user)."""

from typing import Annotated, Literal

import numpy as np
from annotated_types import Interval

from fedsim.core.errors import DataError
from fedsim.core.exact import exp, log
from fedsim.core.parameters import Count, parameters
from fedsim.core.types import ClientPositions
from fedsim.partitions.base import Indices, Labelled, Partition, largest_remainder, require_samples


class IID(Partition):
    """A random permutation cut into blocks whose sizes differ by at most one."""

    def split(self, data: Labelled, num_clients: int, rng: np.random.Generator) -> list[Indices]:
        require_samples(len(data.labels), num_clients, 1, "partition=iid")
        return np.array_split(rng.permutation(len(data.labels)), num_clients)


@parameters
class QuantitySkew(Partition):
    """Clients differ only in size: sizes are proportional to log-normal or power-law draws, labels
    are random.

    `law: lognormal`: exp(skew z) with z standard normal. `law: powerlaw`: u^(-1 / skew) with u
    uniform on (0, 1], a Pareto tail of index `skew` (smaller is more skewed). Every client gets
    `min_size` samples in advance.
    """

    law: Literal["lognormal", "powerlaw"]
    skew: Annotated[float, Interval(ge=0.001, le=1000)]
    min_size: Count

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


@parameters
class Natural(Partition):
    """Clients are `num_clients` random owners, in ascending order, among those with at least
    `min_samples` samples. `cap` limits the samples per client to the first in the data set (GPFL's
    Fig. 7: 10) or to random ones (`keep`)."""

    min_samples: Count
    cap: Count | None
    keep: Literal["random", "first"]

    def split(self, data: Labelled, num_clients: int, rng: np.random.Generator) -> ClientPositions:
        if data.owners is None:
            remedy = "use one with owners, such as dataset=femnist, or dataset=parquet with dataset.client_column"
            raise DataError(
                f"partition=natural: this data set does not say whose samples are whose; {remedy}"
            )
        order = np.argsort(data.owners, kind="stable")
        ordered = data.owners[order]
        starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        owners, counts = ordered[starts], np.diff(starts, append=len(order))
        eligible = owners[counts >= self.min_samples]
        if len(eligible) < num_clients:
            found = f"only {len(eligible)} of {len(owners)} owners have partition.min_samples={self.min_samples}"
            raise DataError(
                f"num_clients={num_clients}: {found} training samples; lower one of the two"
            )
        chosen = np.sort(rng.choice(eligible, num_clients, replace=False))
        owned = ClientPositions(order, counts).rows(np.searchsorted(owners, chosen))
        if self.keep == "first":
            owned = self._capped(owned)
        for positions in owned:
            rng.shuffle(positions)
        return self._capped(owned)

    def _capped(self, owned: ClientPositions) -> ClientPositions:
        return owned if self.cap is None else owned.first(np.minimum(owned.sizes, self.cap))[0]
