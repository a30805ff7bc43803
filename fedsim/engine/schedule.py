"""Which samples each client trains on in each local step: fixed before the training, the same for
all backends."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedsim.core.arrays import Bools, Floats, Ints
from fedsim.core.errors import Problem, rule
from fedsim.core.rng import Purpose, Streams
from fedsim.core.types import UNCORRECTED, Correction, Ids, positions_of, sizes_of

Positions = Ints

MAX_POSITIONS = 2**28
"""Of samples, in the schedule of a round: 2 GiB."""
_KEY_STRIDE = 0x2545F4914F6CDD1D


@dataclass(frozen=True)
class LocalWork:
    """Local training: `steps` optimiser steps, or, where `steps` is None, `epochs` passes; batches
    of `batch_size`.

    Batches are cut from consecutive shuffled epochs. An epoch's last batch is short where
    `batch_size` does not divide the number n_k of the client's samples, so `steps = epochs *
    ceil(n_k / batch_size)` is the same work as `epochs`.
    """

    epochs: int | None
    steps: int | None
    batch_size: int

    def num_steps(self, size: int) -> int:
        if size == 0:
            return 0
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return self.epochs * -(-size // self.batch_size)

    def num_samples(self, size: int) -> int:
        """Samples that a client with `size` of them passes forward and backward in a round."""
        epochs, rest = divmod(self.num_steps(size), max(-(-size // self.batch_size), 1))
        return epochs * size + min(rest * self.batch_size, size)

    def too_large(self, sizes: Ints, cohort_size: int) -> Problem | None:
        """The problem of a round whose schedule would not fit in memory, for clients with `sizes`
        samples [N]."""
        largest = int(sizes.max(initial=0))
        count = cohort_size * self.num_steps(largest) * min(self.batch_size, largest)
        key, value = (
            ("local.epochs", self.epochs) if self.steps is None else ("local.steps", self.steps)
        )
        clients = f"cohort_size={cohort_size} clients of up to {largest} samples"
        text = f"makes batches of {count} samples in a round for {clients}; must make at most {MAX_POSITIONS}"
        return rule(
            count <= MAX_POSITIONS, key, value, text, "lower it, local.batch_size or cohort_size"
        )

    def median_steps(self, positions: Sequence[Positions]) -> int:
        """Optimiser steps, in one round, of a client whose number of samples is the median."""
        return self.num_steps(int(np.median(sizes_of(positions)))) if len(positions) else 0


@dataclass(frozen=True)
class Schedule:
    """The local training of K clients with learning rate `lr`, in arrays of fixed shape: S steps of
    at most B samples.

    `positions` [K, S, B] are rows of the data, of which the first `counts` [K, S] are valid; the
    others repeat a sample of the same client. A count of 0 means that the client has finished.
    `keys` [K, S] are those of the dropout masks (None: the model has no dropout). `correction` is
    added to the gradients.
    """

    positions: Ints
    counts: Ints
    keys: Ints | None
    lr: float
    correction: Correction = UNCORRECTED

    def __len__(self) -> int:
        return len(self.counts)

    @cached_property
    def steps(self) -> Ints:
        """Optimiser steps of each client [K]."""
        return np.count_nonzero(self.counts, axis=1).astype(np.int64)

    @cached_property
    def samples(self) -> Ints:
        """Samples that each client passes forward and backward [K]."""
        return self.counts.sum(1)

    @property
    def mask(self) -> Bools:
        """Which of `positions` are valid [K, S, B]."""
        return np.arange(self.positions.shape[2]) < self.counts[:, :, None]

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """The largest batch of each step [S]."""
        return tuple(self.counts.max(0, initial=0).tolist())

    def rows(self, rows: slice | Ints, *, padded: bool = False) -> "Schedule":
        """Those clients, in this order, without the steps and columns that none of them uses;
        `padded`: with all columns, so that their batches have the shape that they have among all
        clients."""
        counts = self.counts[rows]
        steps = int(np.count_nonzero(counts.any(0)))
        width = self.positions.shape[2] if padded else int(counts.max(initial=0))
        keys = None if self.keys is None else self.keys[rows, :steps]
        return Schedule(
            self.positions[rows, :steps, :width],
            counts[:, :steps],
            keys,
            self.lr,
            self.correction.rows(rows),
        )


def concatenate_schedules(parts: Sequence[Schedule]) -> Schedule:
    """All clients of `parts`, which agree in the learning rate and the kind of correction, padded
    to the most steps and the largest batch."""
    if len(parts) == 1:
        return parts[0]
    steps, width = (max(part.positions.shape[axis] for part in parts) for axis in (1, 2))
    keys = [_padded(part.keys, steps) for part in parts if part.keys is not None]
    return Schedule(
        np.concatenate([_padded(part.positions, steps, width) for part in parts]),
        np.concatenate([_padded(part.counts, steps) for part in parts]),
        np.concatenate(keys) if keys else None,
        parts[0].lr,
        Correction.concat([part.correction for part in parts]),
    )


def _padded(array: Ints, *shape: int) -> Ints:
    """`array` [K, ...] with zeros behind its entries, up to `shape` in the axes from the second
    on."""
    return np.pad(
        array, [(0, 0), *((0, new - old) for old, new in zip(array.shape[1:], shape, strict=True))]
    )


def make_schedule(
    positions: Sequence[Positions],
    work: LocalWork,
    streams: Streams,
    round: int,
    ids: Ids,
    lr: float,
    *,
    dropout: bool,
) -> Schedule:
    """The schedule of clients `ids` in `round`, from the `positions` of all N clients. The order of
    a client's samples depends on (seed, TRAIN, round, client) alone, its dropout masks on (seed,
    DROPOUT, round, client) and the step.
    """
    own = positions_of(positions, ids)
    steps = np.array([work.num_steps(size) for size in own.sizes.tolist()], dtype=np.int64)
    shape = len(ids), int(steps.max(initial=0))
    batches = np.zeros((*shape, min(work.batch_size, int(own.sizes.max(initial=0)))), np.int64)
    busy = np.flatnonzero(steps)
    generators = streams.generators(Purpose.TRAIN, round, last=ids[busy])
    each = list(own)
    for row, rng in zip(busy.tolist(), generators, strict=True):
        _fill(batches[row, : steps[row]], each[row], rng)
    keys = (
        dropout_keys(streams.keys(Purpose.DROPOUT, round, last=ids), shape[1]) if dropout else None
    )
    return Schedule(batches, _counts(own.sizes, steps, work.batch_size), keys, lr)


def _counts(sizes: Ints, steps: Ints, batch_size: int) -> Ints:
    """Samples in each step of clients that make so many `steps` [K, S]; the last batch of an epoch
    may be short."""
    sizes, steps, step = sizes[:, None], steps[:, None], np.arange(steps.max(initial=0))
    per_epoch = np.maximum(-(-sizes // batch_size), 1)
    return np.where(step < steps, np.minimum(sizes - step % per_epoch * batch_size, batch_size), 0)


def _fill(batches: Ints, positions: Positions, rng: np.random.Generator) -> None:
    """One client's `batches` [steps, B]: shuffled epochs, cut into batches; its first position is
    the padding.

    An epoch is a run of the batches' entries: a client has either B samples or more, or a single
    batch an epoch.
    """
    flat, size, width = batches.reshape(-1), len(positions), batches.shape[1]
    flat[:] = positions[0]
    for first in range(0, len(flat), -(-size // width) * width):
        if first + size <= len(flat):
            epoch = flat[first : first + size]
            epoch[:] = positions
            rng.shuffle(epoch)
        else:
            flat[first:] = rng.permutation(positions)[: len(flat) - first]


def mean_weights(counts: Ints, width: int) -> Floats:
    """1 / count for valid samples and 0 for padding [..., width], for `counts` [...]."""
    return (np.arange(width) < counts[..., None]) / np.maximum(counts, 1)[..., None]


def dropout_keys(keys: Ints, num_steps: int) -> Ints:
    """One 63-bit key for each step of clients [K, num_steps], from their own keys in the round
    [K]."""
    strides = np.arange(num_steps, dtype=np.uint64) * np.uint64(_KEY_STRIDE)
    return ((keys.astype(np.uint64)[:, None] + strides) & np.uint64(2**63 - 1)).astype(np.int64)
