"""The division of the training set between clients, their held-out samples and the server: a
function of the config and the seed; and its file format."""

import hashlib
import io
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from fedsim.core.arrays import Ints
from fedsim.core.errors import DataError
from fedsim.core.rng import Purpose, Streams
from fedsim.core.types import ClientPositions, sizes_of
from fedsim.partitions.base import Indices, Labelled, Partition, largest_remainder
from fedsim.partitions.server_split import ServerSplit

COMPRESSION = 1
"""zlib's level for partition.npz: of a million clients, a fifth of the time that the usual 6
takes."""


@dataclass(frozen=True)
class Division:
    """Positions in the training set: of each client's training and held-out samples, and of the
    server's two sets.

    `histograms` [N, C] are the label counts of the clients' training samples.
    """

    train: Sequence[Indices]
    holdout: Sequence[Indices]
    validation: Indices
    public: Indices
    histograms: Ints

    @property
    def sizes(self) -> Ints:
        """Training samples n_k, [N]."""
        return sizes_of(self.train)

    @cached_property
    def hash(self) -> str:
        """SHA-256 (hexadecimal) over the names and values of all arrays, in order."""
        digest = hashlib.sha256()
        for name, array in self._arrays().items():
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(array, dtype="<i8").reshape(-1).data)
        return digest.hexdigest()

    def _arrays(self) -> dict[str, Ints]:
        train, holdout = ClientPositions.of(self.train), ClientPositions.of(self.holdout)
        held = {
            "train": train.flat,
            "sizes": train.sizes,
            "holdout": holdout.flat,
            "holdout_sizes": holdout.sizes,
        }
        return held | {
            "validation": self.validation,
            "public": self.public,
            "histograms": self.histograms,
        }

    def to_bytes(self) -> bytes:
        """The content of partition.npz: flat arrays with the sizes of the clients, the histograms
        and the hash."""
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=COMPRESSION) as archive:
            for name, array in {"hash": np.array(self.hash), **self._arrays()}.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                    np.lib.format.write_array(entry, array, allow_pickle=False)
        return file.getvalue()

    @classmethod
    def load(cls, path: Path) -> "Division":
        """Read a file that holds `to_bytes`. Raises `DataError` if it cannot be read or does not
        match its hash."""
        try:
            with np.load(path, allow_pickle=False) as file:
                train = ClientPositions(file["train"], file["sizes"])
                holdout = ClientPositions(file["holdout"], file["holdout_sizes"])
                division = cls(
                    train, holdout, file["validation"], file["public"], file["histograms"]
                )
                intact = division.hash == str(file["hash"])
        except (
            Exception
        ) as error:  # a damaged archive fails in zipfile, zlib or numpy, each in its own way
            reason = f"cannot be read as a saved partition ({type(error).__name__}: {error})"
            raise DataError(f"{path}: {reason}; delete the run's folder and run again") from error
        if not intact:
            raise DataError(
                f"{path}: the partition's content does not match its hash; delete the run's folder"
            )
        return division


def divide(
    data: Labelled,
    partition: Partition,
    num_clients: int,
    streams: Streams,
    server: ServerSplit,
    holdout_share: float,
) -> Division:
    """Take the server's samples, partition the rest, then hold out a share `holdout_share` of each
    client's samples. Raises `DataError` if there are too few samples."""
    public, validation, rest = _server_samples(
        data, server, streams.generator(Purpose.SERVER_SPLIT)
    )
    remaining = Labelled(
        data.labels[rest], data.num_classes, None if data.owners is None else data.owners[rest]
    )
    parts = partition.split(remaining, num_clients, streams.generator(Purpose.PARTITION))
    own = _checked(parts, num_clients, len(rest), type(partition).__name__)
    train, holdout = _hold_out(ClientPositions(rest[own.flat], own.sizes), holdout_share, streams)
    cells = np.repeat(np.arange(num_clients) * data.num_classes, train.sizes)
    cells += data.labels[train.flat]
    counts = np.bincount(cells, minlength=num_clients * data.num_classes)
    return Division(
        train, holdout, validation, public, counts.reshape(num_clients, data.num_classes)
    )


def _checked(parts: object, num_clients: int, num_samples: int, name: str) -> ClientPositions:
    """What a partition returned, which may be a user's class. Raises `DataError` unless it is as
    many arrays of different positions as there are clients; empty ones may be of any type."""
    told = f"partition: {name}.split must return {num_clients} arrays of different positions in [0, {num_samples}); it"
    if not isinstance(parts, ClientPositions):
        arrays = (
            [np.asarray(part) for part in parts]
            if isinstance(parts, Iterable)
            else [np.asarray(parts)]
        )
        for one in arrays:
            if one.ndim != 1 or (len(one) and not np.issubdtype(one.dtype, np.integer)):
                raise DataError(f"{told} returned one of {one.dtype} with the shape {one.shape}")
        parts = [one.astype(np.int64, copy=False) for one in arrays]
    own = ClientPositions.of(parts)
    found = np.zeros(num_samples, np.bool_)
    found[own.flat[(own.flat >= 0) & (own.flat < num_samples)]] = True
    num_different = int(np.count_nonzero(found))
    if len(own) != num_clients or num_different < len(own.flat):
        different = (
            f"{len(own.flat)} positions, {num_different} of them different and in that range"
        )
        raise DataError(f"{told} returned {len(own)} arrays of {different}")
    return own


def _server_samples(
    data: Labelled, server: ServerSplit, rng: np.random.Generator
) -> tuple[Indices, Indices, Indices]:
    """Positions of the public set (in random order), the validation set and the rest (ascending).
    The validation set is stratified and does not depend on the size of the public set."""
    num = len(data.labels)
    num_validation = round(server.validation_fraction * num)
    if num_validation + server.public_samples >= num:
        keys = f"server.validation_fraction={server.validation_fraction}, server.public_samples={server.public_samples}"
        taken = f"take {num_validation} and {server.public_samples} of {num} training samples and leave none"
        raise DataError(f"{keys}: {taken} for the clients; lower one of them")
    order = rng.permutation(num)
    validation = _stratified(data, order, num_validation)
    free = np.ones(num, np.bool_)
    free[validation] = False
    public = order[:0]
    if server.public_samples:
        others = order[free[order]]
        public = (
            _stratified(data, others, server.public_samples) if server.public_stratified else others
        )
        public = public[: server.public_samples]
    free[public] = False
    return public, np.sort(validation), np.flatnonzero(free)


def _stratified(data: Labelled, positions: Indices, count: int) -> Indices:
    """The first `count` of `positions`, in their order, with classes in proportion to their
    frequencies."""
    labels = data.labels[positions]
    frequencies = np.bincount(labels, minlength=data.num_classes).astype(np.float64)
    quota = largest_remainder(frequencies, count)
    chosen = np.concatenate([np.flatnonzero(labels == c)[:k] for c, k in enumerate(quota)])
    return positions[np.sort(chosen)]


def _hold_out(
    own: ClientPositions, fraction: float, streams: Streams
) -> tuple[ClientPositions, ClientPositions]:
    """The clients' training and held-out positions, `own` shuffled; one is left to train on, if
    there is any."""
    counts = np.minimum(
        np.round(fraction * own.sizes).astype(np.int64), np.maximum(own.sizes - 1, 0)
    )
    clients = np.flatnonzero(counts)
    for client, rng in zip(
        clients.tolist(), streams.generators(Purpose.HOLDOUT, last=clients), strict=True
    ):
        rng.shuffle(own[client])
    holdout, train = (
        own.first(counts) if counts.any() else (ClientPositions(own.flat[:0], counts), own)
    )
    return train, holdout
