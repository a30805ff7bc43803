"""One client per owner (writer, user) of samples in the data set."""

from typing import Literal

import numpy as np

from fedsim.errors import DataError, at_least, check
from fedsim.partitions.base import Labelled, Partition
from fedsim.positions import ByClient


class Natural(Partition):
    """Clients are `num_clients` random owners, in ascending order, among those with at least `min_samples` samples.

    `cap` limits the number of samples per client (None: no limit); `keep` says which are kept, the `first` in the data
    set (GPFL's Fig. 7: the first 10) or `random` ones.
    """

    def __init__(self, *, min_samples: int, cap: int | None, keep: Literal["random", "first"]) -> None:
        check(at_least("min_samples", min_samples, 1), None if cap is None else at_least("cap", cap, 1))
        self.min_samples = min_samples
        self.cap = cap
        self.keep = keep

    def split(self, data: Labelled, num_clients: int, rng: np.random.Generator) -> ByClient:
        if data.owners is None:
            raise DataError(
                "partition=natural: this data set does not say whose samples are whose; use dataset=femnist, "
                "dataset=synthetic, dataset=text_generated, or dataset=parquet with dataset.client_column"
            )
        order = np.argsort(data.owners, kind="stable")
        ordered = data.owners[order]
        starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        owners, counts = ordered[starts], np.diff(starts, append=len(order))
        eligible = owners[counts >= self.min_samples]
        if len(eligible) < num_clients:
            raise DataError(
                f"num_clients={num_clients}: only {len(eligible)} of {len(owners)} owners have "
                f"partition.min_samples={self.min_samples} training samples; lower one of the two"
            )
        chosen = np.sort(rng.choice(eligible, num_clients, replace=False))
        owned = ByClient(order, counts).rows(np.searchsorted(owners, chosen))
        if self.keep == "first":
            owned = self._capped(owned)
        for positions in owned:
            rng.shuffle(positions)
        return self._capped(owned)

    def _capped(self, owned: ByClient) -> ByClient:
        return owned if self.cap is None else owned.first(np.minimum(owned.sizes, self.cap))[0]
