"""The division of the training set between the clients and the server, and its file format,
partition.npz in a run's folder.

A division is a function of the data, the config and the seed. `divide` makes it; the partition that
the config chooses does the central step. Shapes: n samples, N clients, C classes.
"""

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
"""The level of zlib for partition.npz. With a million clients, it takes a fifth of the time of the
default level, 6."""


@dataclass(frozen=True)
class Division:
    """Positions of samples in the training set, divided by who holds the samples.

    Attributes:
        train: Each client's training samples.
        holdout: Each client's held-out samples.
        validation: The samples on which the server validates.
        public: The samples that the server and all clients have.
        histograms: Numbers of training samples of each client in each class [N, C].
    """

    train: Sequence[Indices]
    holdout: Sequence[Indices]
    validation: Indices
    public: Indices
    histograms: Ints

    @property
    def sizes(self) -> Ints:
        """Number of training samples of each client, n_k [N]."""
        return sizes_of(self.train)

    @cached_property
    def hash(self) -> str:
        """SHA-256 (hexadecimal) of the names and values of all arrays, in order."""
        digest = hashlib.sha256()
        for name, array in self._arrays().items():
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(array, dtype="<i8").reshape(-1).data)
        return digest.hexdigest()

    def _arrays(self) -> dict[str, Ints]:
        """Return the arrays of partition.npz, in their order in the file.

        The positions of all clients are in one array, next to an array of the clients' sizes.
        """
        train = ClientPositions.of(self.train)
        holdout = ClientPositions.of(self.holdout)
        return {
            "train": train.flat,
            "sizes": train.sizes,
            "holdout": holdout.flat,
            "holdout_sizes": holdout.sizes,
            "validation": self.validation,
            "public": self.public,
            "histograms": self.histograms,
        }

    def to_bytes(self) -> bytes:
        """Return the content of partition.npz: the hash and the arrays."""
        arrays = {"hash": np.array(self.hash), **self._arrays()}
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=COMPRESSION) as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                    np.lib.format.write_array(entry, array, allow_pickle=False)
        return file.getvalue()

    @classmethod
    def load(cls, path: Path) -> "Division":
        """Return the division in a file that `to_bytes` has filled.

        Raises `DataError` if it cannot be read or does not match its hash.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                division = cls(
                    ClientPositions(file["train"], file["sizes"]),
                    ClientPositions(file["holdout"], file["holdout_sizes"]),
                    file["validation"],
                    file["public"],
                    file["histograms"],
                )
                is_intact = division.hash == str(file["hash"])
        except Exception as error:  # zipfile, zlib and numpy raise many kinds for a damaged file
            reason = f"cannot be read as a saved partition ({type(error).__name__}: {error})"
            raise DataError(f"{path}: {reason}; delete the run's folder and run again") from error
        if not is_intact:
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
    """Divide the training set between the server and `num_clients` clients.

    1. The server takes its samples. 2. The partition divides the rest. 3. A share `holdout_share`
    of each client's samples is held out. Raises `DataError` if there are too few samples.
    """
    public, validation, rest = _server_samples(
        data, server, streams.generator(Purpose.SERVER_SPLIT)
    )
    owners = None if data.owners is None else data.owners[rest]
    remaining = Labelled(data.labels[rest], data.num_classes, owners)
    parts = partition.split(remaining, num_clients, streams.generator(Purpose.PARTITION))
    # The partition counts positions within the rest; translate them to the training set.
    in_rest = _check_parts(parts, num_clients, len(rest), type(partition).__name__)
    positions = ClientPositions(rest[in_rest.flat], in_rest.sizes)
    train, holdout = _hold_out(positions, holdout_share, streams)
    histograms = _histograms(data, train)
    return Division(train, holdout, validation, public, histograms)


def _histograms(data: Labelled, train: ClientPositions) -> Ints:
    """Return the number of training samples of each client in each class [N, C]."""
    num_clients, num_classes = len(train), data.num_classes
    clients = np.repeat(np.arange(num_clients), train.sizes)
    bins = clients * num_classes + data.labels[train.flat]  # one number for each (client, class)
    counts = np.bincount(bins, minlength=num_clients * num_classes)
    return counts.reshape(num_clients, num_classes)


def _check_parts(
    parts: object, num_clients: int, num_samples: int, class_name: str
) -> ClientPositions:
    """Return the `parts` that `Partition.split`, perhaps of a user's class, has returned.

    Raises `DataError` unless they are `num_clients` arrays of different positions in
    0..`num_samples` - 1. Empty arrays may be of any type.
    """
    rule = (
        f"partition: {class_name}.split must return {num_clients} arrays of different positions in "
        f"[0, {num_samples}); it"
    )
    if not isinstance(parts, ClientPositions):
        arrays = []
        for part in parts if isinstance(parts, Iterable) else [parts]:
            array = np.asarray(part)
            is_integer = array.size == 0 or np.issubdtype(array.dtype, np.integer)
            if array.ndim != 1 or not is_integer:
                shape = array.shape
                raise DataError(f"{rule} returned one of {array.dtype} with the shape {shape}")
            arrays.append(array.astype(np.int64, copy=False))
        parts = ClientPositions.of(arrays)
    positions = parts.flat
    in_range = positions[(positions >= 0) & (positions < num_samples)]
    is_used = np.zeros(num_samples, np.bool_)
    is_used[in_range] = True
    num_different = int(np.count_nonzero(is_used))
    if len(parts) != num_clients or num_different < len(positions):
        raise DataError(
            f"{rule} returned {len(parts)} arrays of {len(positions)} positions, {num_different} "
            "of them different and in that range"
        )
    return parts


def _server_samples(
    data: Labelled, server: ServerSplit, rng: np.random.Generator
) -> tuple[Indices, Indices, Indices]:
    """Return the positions of the public samples, of the validation samples and of the rest.

    The public samples are in random order, the others ascending. The validation set is stratified:
    its classes are in proportion to those of the training set. It does not depend on the number of
    public samples, because it is drawn first. Raises `DataError` if no sample remains.
    """
    num_samples = len(data.labels)
    num_public = server.public_samples
    num_validation = round(server.validation_fraction * num_samples)
    if num_validation + num_public >= num_samples:
        raise DataError(
            f"server.validation_fraction={server.validation_fraction}, "
            f"server.public_samples={num_public}: take {num_validation} and {num_public} of "
            f"{num_samples} training samples and leave none for the clients; lower one of them"
        )
    order = rng.permutation(num_samples)
    is_free = np.ones(num_samples, np.bool_)
    validation = _stratified(data, order, num_validation)
    is_free[validation] = False
    public = order[is_free[order]]
    if num_public and server.public_stratified:
        public = _stratified(data, public, num_public)
    public = public[:num_public]
    is_free[public] = False
    return public, np.sort(validation), np.flatnonzero(is_free)


def _stratified(data: Labelled, positions: Indices, count: int) -> Indices:
    """Return `count` of the `positions`, in their order, with classes in proportion.

    They are the first positions of each class.
    """
    labels = data.labels[positions]
    frequencies = np.bincount(labels, minlength=data.num_classes).astype(np.float64)
    counts = largest_remainder(frequencies, count)
    taken = [np.flatnonzero(labels == label)[:num] for label, num in enumerate(counts)]
    return positions[np.sort(np.concatenate(taken))]


def _hold_out(
    positions: ClientPositions, share: float, streams: Streams
) -> tuple[ClientPositions, ClientPositions]:
    """Return the clients' training and held-out positions, drawn at random.

    A `share` of each client's samples, rounded, is held out. Every client with a sample keeps one
    to train on. `positions` is shuffled in place.
    """
    sizes = positions.sizes
    counts = np.minimum(np.round(share * sizes).astype(np.int64), np.maximum(sizes - 1, 0))
    if not counts.any():
        return positions, ClientPositions(positions.flat[:0], counts)
    clients = np.flatnonzero(counts)
    generators = streams.generators(Purpose.HOLDOUT, last=clients)
    for client, rng in zip(clients.tolist(), generators, strict=True):
        rng.shuffle(positions[client])
    holdout, train = positions.split(counts)
    return train, holdout
