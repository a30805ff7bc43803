"""The division of the training set between clients, their held-out samples and the server, and its file format.

A division is a function of the config and the seed.
"""

import hashlib
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedsim.errors import DataError, at_least, between, check
from fedsim.partitions.apportion import largest_remainder
from fedsim.partitions.base import Indices, Labelled, Partition
from fedsim.rng import Purpose, Streams


@dataclass(frozen=True, kw_only=True)
class ServerSplit:
    """The samples that the server takes from the training set before the rest is partitioned.

    `validation_fraction` is a share of the training set; `public_stratified` draws the `public_samples` in proportion
    to the classes.
    """

    validation_fraction: float
    public_samples: int
    public_stratified: bool

    def __post_init__(self) -> None:
        check(
            between("validation_fraction", self.validation_fraction, 0, 1, open_high=True),
            at_least("public_samples", self.public_samples, 0),
        )


@dataclass(frozen=True)
class Division:
    """Positions in the training set: of each client's training and held-out samples, and of the server's two sets.

    `histograms` [N, C] are the label counts of the clients' training samples.
    """

    train: Sequence[Indices]
    holdout: Sequence[Indices]
    validation: Indices
    public: Indices
    histograms: NDArray[np.int64]

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Training samples n_k, [N]."""
        return np.array([len(t) for t in self.train], dtype=np.int64)

    @cached_property
    def hash(self) -> str:
        """SHA-256 (hexadecimal) over the names and values of all arrays, in order."""
        digest = hashlib.sha256()
        for name, array in self._arrays().items():
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
        return digest.hexdigest()

    def _arrays(self) -> dict[str, NDArray[np.int64]]:
        empty = np.empty(0, np.int64)
        return {
            "train": np.concatenate([empty, *self.train]),
            "sizes": self.sizes,
            "holdout": np.concatenate([empty, *self.holdout]),
            "holdout_sizes": np.array([len(h) for h in self.holdout], dtype=np.int64),
            "validation": self.validation,
            "public": self.public,
            "histograms": self.histograms,
        }

    def to_bytes(self) -> bytes:
        """The content of partition.npz: flat arrays with the sizes of the clients, the histograms and the hash."""
        file = io.BytesIO()
        np.savez_compressed(file, hash=np.array(self.hash), allow_pickle=False, **self._arrays())
        return file.getvalue()

    @classmethod
    def load(cls, path: Path) -> "Division":
        """Read a file that holds `to_bytes`. Raises `DataError` if it cannot be read or does not match its hash."""
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            division = cls(
                train=np.split(arrays["train"], np.cumsum(arrays["sizes"])[:-1]),
                holdout=np.split(arrays["holdout"], np.cumsum(arrays["holdout_sizes"])[:-1]),
                validation=arrays["validation"],
                public=arrays["public"],
                histograms=arrays["histograms"],
            )
            intact = division.hash == str(arrays["hash"])
        except Exception as error:  # a damaged archive fails in zipfile, zlib or numpy, each in its own way
            reason = f"cannot be read as a saved partition ({type(error).__name__}: {error})"
            raise DataError(f"{path}: {reason}; delete the run's folder and run again") from error
        if not intact:
            raise DataError(f"{path}: the partition's content does not match its hash; delete the run's folder")
        return division


def divide(
    data: Labelled,
    partition: Partition,
    num_clients: int,
    streams: Streams,
    server: ServerSplit,
    holdout_fraction: float,
) -> Division:
    """Take the server's samples, partition the rest, then hold out a share `holdout_fraction` of each client's samples.

    Raises `DataError` if there are too few samples.
    """
    rng = streams.generator(Purpose.SERVER_SPLIT)
    public, validation, rest = _server_samples(data, server, rng)
    owners = None if data.owners is None else data.owners[rest]
    remaining = Labelled(data.labels[rest], data.num_classes, owners)
    parts = partition.split(remaining, num_clients, streams.generator(Purpose.PARTITION))
    parts = _checked(parts, num_clients, len(rest), type(partition).__name__)
    pairs = [_hold_out(rest[p], holdout_fraction, streams, i) for i, p in enumerate(parts)]
    train, holdout = [t for t, _ in pairs], [h for _, h in pairs]
    histograms = np.stack([np.bincount(data.labels[t], minlength=data.num_classes) for t in train])
    return Division(train, holdout, validation, public, histograms.astype(np.int64))


def _checked(parts: object, num_clients: int, num_samples: int, name: str) -> list[Indices]:
    """What a partition returned, which may be a user's class. Raises `DataError` unless it is as many arrays of
    different positions as there are clients; empty ones may be of any type."""
    told = f"partition: {name}.split must return {num_clients} arrays of different positions in [0, {num_samples}); it"
    if not isinstance(parts, Iterable):
        raise DataError(f"{told} returned a {type(parts).__name__}")
    arrays = [np.asarray(part) for part in parts]
    for found in arrays:
        if found.ndim != 1 or (len(found) and not np.issubdtype(found.dtype, np.integer)):
            raise DataError(f"{told} returned one of {found.dtype} with the shape {found.shape}")
    positions = [found.astype(np.int64, copy=False) for found in arrays]
    everything = np.concatenate([np.empty(0, np.int64), *positions])
    inside = bool(((everything >= 0) & (everything < num_samples)).all())
    num_different = len(np.unique(everything))
    if len(arrays) != num_clients or not inside or num_different < len(everything):
        raise DataError(
            f"{told} returned {len(arrays)} arrays of {len(everything)} positions, {num_different} of them different"
            + ("" if inside else ", some outside that range")
        )
    return positions


def _server_samples(data: Labelled, server: ServerSplit, rng: np.random.Generator) -> tuple[Indices, Indices, Indices]:
    """Positions of the public set (in random order), the validation set and the rest (ascending).

    The validation set is stratified: classes of equal size remain of equal size, so that with one shard per client a
    shard holds one label. The size of the public set has no influence on the validation set.
    """
    num = len(data.labels)
    num_validation = round(server.validation_fraction * num)
    if num_validation + server.public_samples >= num:
        raise DataError(
            f"server.validation_fraction={server.validation_fraction}, server.public_samples={server.public_samples}: "
            f"take {num_validation} and {server.public_samples} of {num} training samples and leave none for the "
            "clients; lower one of them"
        )
    order = rng.permutation(num)
    validation = _stratified(data, order, num_validation)
    others = order[~np.isin(order, validation)]
    public = _stratified(data, others, server.public_samples) if server.public_stratified else others
    public = public[: server.public_samples]
    rest = np.setdiff1d(others, public, assume_unique=True)
    return public, np.sort(validation), np.sort(rest)


def _stratified(data: Labelled, positions: Indices, count: int) -> Indices:
    """The first `count` of `positions`, in their order, with classes in proportion to their frequencies."""
    labels = data.labels[positions]
    frequencies = np.bincount(labels, minlength=data.num_classes).astype(np.float64)
    quota = largest_remainder(frequencies, count)
    chosen = np.concatenate([np.flatnonzero(labels == c)[:k] for c, k in enumerate(quota)])
    picked: Indices = positions[np.sort(chosen)]
    return picked


def _hold_out(positions: Indices, fraction: float, streams: Streams, client: int) -> tuple[Indices, Indices]:
    """A client's training and held-out positions; at least one is left for training, if the client has any."""
    count = min(round(fraction * len(positions)), max(len(positions) - 1, 0))
    shuffled = streams.generator(Purpose.HOLDOUT, client).permutation(positions) if count else positions
    return shuffled[count:], shuffled[:count]
